"""``pk.check``, ``python -m pk check`` and ``pk.testing``: schedules, replay, shrinking, comparison, exit codes."""

from __future__ import annotations

import doctest
import json
import pickle
import re
import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pk
from pk import env
from pk.__main__ import main
from pk.ir.types import float32, int32
from pk.sim import campaign
from pk.sim import pool as pools
from pk.sim import schedule as schedules
from pk.sim.image import Image, copy_tensors
from pk.sim.memory import SimTensor
from pk.sim.pool import Pool
from pk.sim.schedule import FAMILY, describe, late, make, plan, victim
from tests.check import driver_kernels as kernels
from tests.check.driver_kernels import numbers
from tests.collectives.kernels import tiles_in_groups

ROOT = Path(__file__).parent.parent.parent
FILE = Path(kernels.__file__)
ZEROS = torch.zeros(1, 64)


# ------------------------------------------------------------------------------------------------------- schedules
@dataclass(eq=False)
class Ticket:
    ident: int
    rank: int
    block: int
    kind: str

    def step(self) -> None: ...


def order(seed: int, world: int = 4, sms: int = 4) -> list[Ticket]:
    """240 tickets, added at once, in the order in which the schedule of ``seed`` picks them."""
    kinds = ["loader", "storer", "land", "signal", "load"]
    schedule = make(seed, world, sms)
    for i in range(240):
        schedule.add(Ticket(i, i % world, i // world % sms, kinds[i % 5]))
    picked = []
    while (ticket := schedule.pick()) is not None:
        assert isinstance(ticket, Ticket)
        picked.append(ticket)
    assert schedule.steps == 240
    return picked


def adversaries() -> list[int]:
    counts = {"land": 48, "signal": 48, "load": 48, "read": 0}
    return [s for s in plan(0, 300, 4, 4, counts, frozenset({"loader", "storer"})) if s >= FAMILY]


def test_an_adversary_serves_everyone_once_and_repeats() -> None:
    for seed in adversaries():
        first = [t.ident for t in order(seed)]
        assert sorted(first) == list(range(240)), describe(seed, 4, 4)
        assert first == [t.ident for t in order(seed)]
    assert len(adversaries()) > 100


def test_a_victim_goes_last() -> None:
    seed = victim(0, 2, None, 4, 4)
    assert describe(seed, 4, 4) == "everything of rank 2 is as late as possible"
    assert [t.rank for t in order(seed)[-60:]] == [2] * 60
    seed = victim(3, None, None, 4, 4)
    assert describe(seed, 4, 4) == "every storer is as late as possible"
    assert {t.kind for t in order(seed)[-48:]} == {"storer"}
    seed = victim(0, 1, 3, 4, 4)
    assert describe(seed, 4, 4) == "everything of rank 1 of block 3 is as late as possible"
    assert {(t.rank, t.block) for t in order(seed)[-15:]} == {(1, 3)}


def test_one_operation_is_late() -> None:
    seed = late("land", 7)
    assert describe(seed, 4, 4) == "landing of a store no. 7 is as late as possible"
    lands = [i for i in range(240) if i % 5 == 2]
    assert order(seed)[-1].ident == lands[7]
    assert order(late("signal", 0))[-1].ident == 3


def test_a_victim_acts_only_when_nothing_else_can() -> None:
    """One rank that comes back again and again is held for as long as the other has anything to do."""
    schedule = make(victim(0, 1, None, 2, 1), 2, 1)
    for i in range(4):
        schedule.add(Ticket(i, i % 2, 0, "loader"))
    turns = [0, 0]
    for _ in range(200):
        ticket = schedule.pick()
        assert isinstance(ticket, Ticket)
        turns[ticket.rank] += 1
        schedule.add(ticket)
    assert turns == [200, 0]


def test_orders_of_blocks() -> None:
    backwards, forwards = order(6 * FAMILY), order(6 * FAMILY + 1)
    assert [t.block for t in backwards] == sorted((t.block for t in backwards), reverse=True)
    assert [t.block for t in forwards] == sorted(t.block for t in forwards)
    assert [t.ident for t in order(6 * FAMILY + 4)] == list(range(239, -1, -1))


@pytest.mark.parametrize(("seed", "number"), [(0, 1), (5, 2), (0, 50), (9, 200), (victim(0, 1, None, 3, 2), 20)])
def test_a_plan_has_so_many_schedules_and_begins_with_the_seed(seed: int, number: int) -> None:
    chosen = plan(seed, number, 3, 2, {"land": 9, "signal": 9}, frozenset({"team"}))
    assert len(set(chosen)) == len(chosen) == number
    assert chosen[0] == seed
    random_ones = [s for s in chosen if s < FAMILY]
    assert number < 20 or number // 3 < len(random_ones) < number


def test_a_tiny_launch_runs_out_of_adversaries_but_not_of_schedules() -> None:
    chosen = plan(0, 200, 1, 1, {}, frozenset({"team"}))
    assert len(set(chosen)) == 200
    assert not [s for s in chosen if s // FAMILY in schedules._LATE]


def test_a_plain_simulation_takes_an_adversary_as_its_seed() -> None:
    with env.overriding(PK_SEED=str(6 * FAMILY), PK_BACKEND="sim"), pytest.raises(pk.errors.RankError) as caught:
        pk.spawn(lambda _rank: kernels.alone(), 1)
    assert isinstance(caught.value.__cause__, pk.errors.DeadlockError)


# ------------------------------------------------------------------------------------------------------------ image
def test_an_image_keeps_what_is_shared_and_leaves_the_rest() -> None:
    memory = np.arange(24, dtype=np.float32)
    whole, row = SimTensor(memory[:12].reshape(3, 4), float32), SimTensor(memory[4:8], float32)
    other, none = SimTensor(memory[12::2], float32), SimTensor(np.zeros((0, 4), np.int32), int32)
    image = Image.take([{"whole": whole, "row": row, "other": other, "none": none, "n": 3}])
    memory[:] = -1
    copy, again = image.open()[0], image.open()[0]
    assert isinstance(copy["row"], SimTensor)
    assert isinstance(copy["whole"], SimTensor)
    assert isinstance(again["whole"], SimTensor)
    copy["row"].array[:] = 100
    assert copy["whole"].array.tolist() == [[0, 1, 2, 3], [100] * 4, [8, 9, 10, 11]]
    assert again["whole"].array[1].tolist() == [4, 5, 6, 7]
    assert copy["n"] == 3
    copy_tensors([copy], [{"whole": whole, "row": row, "other": other, "none": none, "n": 3}])
    assert memory[4] == 100
    assert memory[12:16].tolist() == [12, -1, 14, -1]  # what lies between is somebody else's


def test_an_image_is_cut_for_every_rank_and_travels() -> None:
    image = Image.take([{"x": SimTensor(np.full((8, 4), rank), int32)} for rank in range(3)])
    small = pickle.loads(pickle.dumps(image)).cut(2, lambda e: 2 if e == 8 else e)
    assert small.extents() == [(2, 4), (2, 4)]
    values = [mine["x"] for mine in small.open()]
    assert [int(v.array[0, 0]) for v in values] == [0, 1]


# -------------------------------------------------------------------------------------------------------- pk.check
def test_a_correct_kernel_is_clean() -> None:
    check = pk.check(kernels.push, numbers, ZEROS, world_size=3, schedules=30, reference=pushed)
    assert check.ok
    assert check.raise_if_found() is check
    assert (check.kernel, check.schedules, check.world_size, check.sms) == ("push", 30, 3, 4)
    assert str(check).startswith("push: no mistake in 30 schedules (3 ranks x 4 SMs, ")


def pushed(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return {"out": [ranks[rank - 1]["x"] for rank in range(len(ranks))]}


def test_the_example_in_the_documentation() -> None:
    kernel = runpy.run_path(str(ROOT / "examples/01_matmul_reduce_scatter.py"))["matmul_reduce_scatter"]
    text = re.sub(r"[0-9.]+ s\)", "... s)", pk.checking.__doc__ or "")
    names = {"pk": pk, "torch": torch, "matmul_reduce_scatter": kernel}
    example = doctest.DocTestParser().get_doctest(text, names, "pk.checking", None, None)
    assert len(example.examples) == 6
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example).failed == 0


def test_a_race_is_found_shrunk_and_shown() -> None:
    check = pk.check(kernels.push_early, lambda r: numbers(r, 512), torch.zeros(1, 512), world_size=4, schedules=8)
    assert {f.kind for f in check.findings} == {"race"}
    small = check.smallest[0]
    assert (small.case.world, small.case.sms) == (2, 1)
    assert small.case.image.extents() == [(1, 16)] * 4
    text = str(check)
    assert "pk.store(slots[(me + 1) % W]" in text
    assert "smallest case that still fails: world_size=2, sms=1, x (1, 16), out (1, 16), seed" in text
    with pytest.raises(pk.CheckError) as caught:
        check.raise_if_found()
    assert caught.value.check is check
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


def test_a_deadlock_of_some_schedules_is_found_by_one_and_replayed_by_its_seed() -> None:
    def check(**options: Any) -> pk.Check:
        return pk.check(kernels.in_order, numbers, ZEROS, world_size=1, **options)

    found = check(schedules=40)
    (finding,) = found.findings
    assert finding.kind == "deadlock"
    assert finding.seed is not None
    ends = [s for s in range(20) if check(schedules=1, seed=s).ok]
    assert ends, "the kernel must be right under some schedules, or this shows nothing"
    again = check(schedules=1, seed=finding.seed)
    assert [f.key for f in again.findings] == [finding.key]
    assert "order of arrival" in str(again)  # fetch_add: results are not compared, and that is said
    with env.overriding(PK_SEED=str(finding.seed), PK_BACKEND="sim"), pytest.raises(pk.errors.RankError):
        pk.spawn(lambda _rank: kernels.alone(), 1)


def test_the_second_schedule_of_a_check_runs_blocks_backwards() -> None:
    check = pk.check(kernels.in_order, numbers, ZEROS, world_size=1, schedules=2)
    assert check.findings[0].seed in (0, 6 * FAMILY)
    assert not pk.check(kernels.in_order, numbers, ZEROS, world_size=1, sms=2, seed=6 * FAMILY, schedules=1).ok


def test_a_launch_that_never_ends_is_a_finding_and_not_an_error() -> None:
    check = pk.check(kernels.starved, numbers, ZEROS, world_size=3, schedules=5)
    assert [f.kind for f in check.findings] == ["bad-count"]
    assert check.findings[0].seed == 0


def test_sums_in_the_order_of_arrival_differ_beyond_rounding() -> None:
    terms = [torch.full((32, 32), x) for x in (2.0**30, -(2.0**30), 1.0)]
    check = pk.check(kernels.add_up, terms, torch.zeros(32, 32), world_size=3, schedules=30)
    (finding,) = check.findings
    assert finding.kind == "wrong-result"
    assert "`out` of rank 0" in finding.message
    replayed = pk.check(kernels.add_up, terms, torch.zeros(32, 32), world_size=3, schedules=1, seed=finding.seed or 0)
    assert [f.kind for f in replayed.findings] == ["wrong-result"]


def test_sums_that_differ_within_rounding_are_equal() -> None:
    terms = [torch.rand(64, 64) for _ in range(3)]
    assert pk.check(kernels.add_up, terms, torch.zeros(64, 64), world_size=3, schedules=20).ok


def test_results_are_compared_with_a_reference() -> None:
    terms = [torch.rand(64, 64) for _ in range(2)]
    right = terms[0].double() + terms[1].double()

    def check(reference: Any) -> pk.Check:
        return pk.check(kernels.add_up, terms, torch.zeros(64, 64), world_size=2, schedules=3, reference=reference)

    assert check({"out": [right, torch.zeros(64, 64)]}).ok
    assert check(lambda ranks: {"out": [sum(r["x"] for r in ranks), ranks[1]["out"]]}).ok
    wrong = right.clone()
    wrong[5, 7] += 0.01
    (finding,) = check({"out": [wrong, torch.zeros(64, 64)]}).findings
    assert finding.kind == "wrong-result"
    assert "(5, 7)" in finding.message
    assert not check({"out": right}).ok  # rank 1 has zeros
    with pytest.raises(pk.ArgumentError, match="`nothing`"):
        check({"nothing": right})


@pytest.mark.parametrize(
    ("kernel", "schedules", "says"),
    [(kernels.doubled, 3, "All schedules agree"), (kernels.doubled, 1, "One schedule was run"),
     (kernels.arrivals, 3, "were not compared, since fetch_add")],
)  # fmt: skip
def test_schedules_agree_only_if_they_were_compared(kernel: Any, schedules: int, says: str) -> None:
    x = torch.arange(64.0).view(1, -1)
    wrong = {"out" if kernel is kernels.arrivals else "y": torch.full((1, 64), -1.0)}
    check = pk.check(kernel, x, ZEROS, world_size=1, schedules=schedules, reference=wrong)
    (finding,) = check.findings
    assert finding.kind == "wrong-result"
    assert says in finding.advice
    assert ("agree, so this is no race" in str(check)) == (says == "All schedules agree")


def test_a_reference_is_a_dict_or_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 64)
    with pytest.raises(pk.ArgumentError, match=r"the function given as reference returned Tensor"):
        pk.check(kernels.doubled, x, x.clone(), world_size=1, schedules=1, reference=lambda ranks: ranks[0]["x"])

    def started(*_: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("pk.runtime.spawn.spawn", started)
    with pytest.raises(pk.ArgumentError, match=r"reference must be a dict or a function .* is Tensor"):
        pk.check(kernels.doubled, x, x, world_size=1, reference=x)  # type: ignore[arg-type]


def test_memory_that_nobody_has_written() -> None:
    fresh = torch.empty(64, 64, device="meta")
    check = pk.check(kernels.add_up, torch.rand(64, 64), fresh, world_size=2, schedules=3)
    assert "uninitialised" in {f.kind for f in check.findings}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"schedules": 0}, "schedules=0"),
        ({"sms": 0}, "sms=0"),
        ({"seed": -1}, "seed=-1"),
        ({"world_size": 9}, "9 ranks"),
        ({"world_size": 3, "x": [ZEROS, ZEROS]}, "`x` .*a list of 2"),
        ({"x": torch.zeros(64)}, "."),
    ],
)
def test_what_cannot_be_checked_is_refused(options: dict[str, Any], says: str) -> None:
    x = options.pop("x", numbers)
    with pytest.raises(pk.errors.PkError, match=says):
        pk.check(kernels.push, x, ZEROS, **{"schedules": 2, **options})


def test_only_kernels_are_checked() -> None:
    with pytest.raises(pk.ArgumentError, match="must be a kernel"):
        pk.check(numbers, ZEROS)  # type: ignore[arg-type]


def test_helpers_find_what_one_process_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    ask = pools._ask

    def spy(process: Any, case: bytes, seed: int) -> Any:
        trial = ask(process, case, seed)
        asked.append(seed if trial is not None else -1)
        return trial

    def check() -> pk.Check:
        return pk.check(kernels.in_order, numbers, ZEROS, world_size=1, schedules=30)

    alone = check()
    guarded = pools.run

    def slow(case: Any, seed: int, baseline: Any) -> Any:
        import time

        time.sleep(0.2)  # so that the helper gets its share
        return guarded(case, seed, baseline)

    monkeypatch.setattr(pools, "_WORTH_S", 0.0)
    monkeypatch.setattr(pools, "_ask", spy)
    monkeypatch.setattr(pools, "_guarded", slow)
    monkeypatch.setattr(Pool, "__init__", lambda self: self.__dict__.update(helpers=1, _running=[]))
    together = check()
    assert asked
    assert -1 not in asked
    assert [f.key for f in together.findings] == [f.key for f in alone.findings]
    assert [f.seed for f in together.findings] == [f.seed for f in alone.findings]


def test_every_interleaving_of_a_small_launch() -> None:
    def check(kernel: pk.Kernel, world: int) -> pk.Check:
        x, out = (lambda rank: numbers(rank, 32)), torch.zeros(1, 32)
        return pk.check(kernel, x, out, world_size=world, sms=2, schedules=2, exhaustive=True)

    clean = check(kernels.push, 2)
    assert clean.ok
    assert "every order" in clean.notes[0]
    (race,) = check(kernels.push_early, 2).findings  # one mistake, though both ways find it
    assert race.seed is not None
    assert race.trace
    assert "shortest trace:" in str(race)
    refused = check(kernels.in_order, 1)
    assert "not every interleaving was explored" in refused.notes[0]


def test_shrinking_can_be_left_out() -> None:
    options: dict[str, Any] = {"world_size": 2, "schedules": 2}
    assert pk.check(kernels.starved, numbers, ZEROS, **options).smallest
    assert not pk.check(kernels.starved, numbers, ZEROS, **options, shrink=False).smallest


# ------------------------------------------------------------------------------------------------------- pk.testing
def test_assert_race_free() -> None:
    assert pk.testing.assert_race_free(kernels.push, numbers, ZEROS, world_size=2, schedules=5).ok
    with pytest.raises(AssertionError, match=r"race: .*(\n.*)*pk\.store\(slots"):
        pk.testing.assert_race_free(kernels.push_early, numbers, ZEROS, world_size=2, schedules=5)


# -------------------------------------------------------------------------------------------------------------- CLI
def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["check", *arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_a_program_is_checked_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = command(capsys, str(FILE), "--schedules", "5")
    assert status == 0
    assert out.startswith("push: no mistake in 5 schedules (2 ranks x 4 SMs, ")
    assert err == "the program's own words\n"


def test_world_size_sms_and_arguments_reach_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (str(FILE), "--schedules", "2", "--world-size", "3", "--sms", "2", "--", "--wrong")
    status, out, _ = command(capsys, *arguments)
    assert status == 1
    assert "push_early: 1 mistake in 2 schedules (3 ranks x 2 SMs, " in out
    assert out.splitlines()[-1] == (
        f"replay: python -m pk check {FILE} --world-size 3 --sms 2 --seed 0 --schedules 1 -- --wrong"
    )


@pytest.mark.parametrize(
    ("function", "status", "launches", "world"),
    [("run", 0, 1, 3), ("run_early", 1, 1, 3), ("run_starved", 1, 1, 3), ("alone", 1, 1, 1)],
)
def test_one_function_as_json(
    capsys: pytest.CaptureFixture[str], function: str, status: int, launches: int, world: int
) -> None:
    options = ("--world-size", "3") if world > 1 else ()
    got, out, _ = command(capsys, f"{FILE}:{function}", "--schedules", "20", "--format", "json", *options)
    report = json.loads(out)
    assert got == status
    assert report["ok"] == (status == 0)
    assert report["error"] is None
    assert [launch["world_size"] for launch in report["launches"]] == [world] * launches
    for launch in report["launches"]:
        assert bool(launch["findings"]) == (status == 1)
        for finding in launch["findings"]:
            assert finding["places"][0]["at"]["file"] == str(FILE)
            assert finding["seed"] is not None
            assert finding["smallest"]["world_size"] <= world


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.py"], "There is no file nowhere.py"),
        ([f"{FILE}:idle"], "launched no kernel"),
        ([f"{FILE}:nothing"], "has no function `nothing`"),
        ([f"{FILE}:push"], "has no function `push`, but a kernel"),
        ([f"{FILE}:alone", "--world-size", "2"], "--world-size 2 was asked for"),
        ([str(FILE), "--", "--ranks", "9"], "9 ranks"),
        ([str(FILE), "--", "--unknown"], "ended itself"),
    ],
)
def test_what_cannot_be_checked_ends_with_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ":alone" in arguments[0]:
        monkeypatch.setattr(campaign, "_merged", lambda _trials: [])
    status, _, err = command(capsys, *arguments[:1], "--schedules", "2", *arguments[1:])
    assert status == 2
    assert says in err


def test_a_program_that_fails_is_told_with_its_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.py").write_text("print('on its way')\nraise ValueError('what now')\n")
    status, out, err = command(capsys, str(tmp_path / "bad.py"))
    assert (status, out) == (2, "")
    assert "on its way" in err
    assert "ValueError: what now" in err


def test_pk_empty_is_unwritten_memory_in_a_checked_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = (
        "import torch, pk\n"
        "from tests.check import driver_kernels as k\n"
        "def run(rank):\n"
        "    out = pk.empty((32, 32), torch.float32)\n"
        "    {clear}\n"
        "    k.add_up(torch.ones(32, 32), out)\n"
        "pk.spawn(run, 2)\n"
    )
    wrong, right = tmp_path / "wrong.py", tmp_path / "right.py"
    wrong.write_text(program.format(clear="pass"))
    right.write_text(program.format(clear="out.zero_()"))
    status, out, _ = command(capsys, str(wrong), "--schedules", "2")
    assert status == 1
    assert "uninitialised: " in out
    assert command(capsys, str(right), "--schedules", "2")[0] == 0


def test_equal_launches_get_fewer_schedules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "twice.py"
    path.write_text(
        "import torch, pk\n"
        "from tests.check import driver_kernels as k\n"
        "def run(rank):\n"
        "    out = pk.empty((1, 64), torch.float32)\n"
        "    for n in range(3):\n"
        "        k.push(k.numbers(rank) + n, out)\n"
        "        assert out[0, 0] == 1000 * (1 - rank) + n\n"
        "pk.spawn(run, 2)\n"
    )
    status, out, err = command(capsys, str(path), "--schedules", "20", "--format", "json")
    assert status == 0, err
    assert [launch["schedules"] for launch in json.loads(out)["launches"]] == [20, 2, 2]


def test_a_parameter_that_is_called_as_an_option_of_a_call() -> None:
    result = pk.check(tiles_in_groups, torch.zeros(40, 56), 2, world_size=1, schedules=1, B=16)
    assert result.ok, result
