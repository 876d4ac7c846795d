"""Launches that come to a stop: the missing signaller, the count never reached, the circle, the lack of room."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pk
from pk import errors
from pk.codegen.plan import plan
from pk.ir import nodes as ir
from pk.ir.types import bfloat16
from pk.sim import SimTensor, residency, run, simulate
from pk.sim.checker import Checker
from pk.sim.findings import Finding
from tests import kernels
from tests.check import stuck
from tests.sim import build
from tests.sim.test_kernels import run_reduce_scatter


def compiled(name: str) -> ir.Kernel:
    kernel = getattr(stuck, name)
    return kernel.specialise(**{t: pk.spec(bfloat16, 2) for t in kernel.signature.tensors}).ir


def operands(kernel: ir.Kernel, world: int) -> list[dict[str, Any]]:
    return [{t.name: SimTensor(np.zeros((16, 16), np.uint16), bfloat16) for t in kernel.tensors} for _ in range(world)]


def launch(name: str, world: int = 2, sms: int = 1, **how: Any) -> Checker:
    """Simulate kernel ``name`` of ``stuck``, which ends, and check it."""
    checker, kernel = Checker(), compiled(name)
    simulate(kernel, operands(kernel, world), sms=sms, checker=checker, **how)
    return checker


def deadlock(name: str, world: int = 2, sms: int = 1, **how: Any) -> errors.DeadlockError:
    kernel = compiled(name)
    with pytest.raises(errors.DeadlockError) as caught:
        simulate(kernel, operands(kernel, world), sms=sms, **how)
    return caught.value


def cause(name: str, world: int = 2, sms: int = 1, **how: Any) -> Finding:
    """The one cause."""
    (found,) = deadlock(name, world, sms, **how).causes
    assert isinstance(found, Finding)
    return found


def line_of(name: str, text: str) -> int:
    """The line of ``stuck.py`` in kernel ``name`` that contains ``text``."""
    source = compiled(name).span.file
    lines = Path(source).read_text().splitlines()
    start = next(i for i, t in enumerate(lines) if t.startswith(f"def {name}("))
    return next(i + 1 for i, t in enumerate(lines) if i > start and text in t)


# ------------------------------------------------------------------------------------------------ missing signals
def test_nobody_signals() -> None:
    found = cause("nobody")
    assert found.kind == "deadlock"
    assert found.message == "nobody signals never[2] of rank 0: the kernel has no signal to `never`"
    (place,) = found.places
    assert (place.rank, place.block, place.role, place.task) == (0, 0, "team", (("i", 0),))
    assert place.what == "wait of never[2] needs 1, sees 0"
    assert place.span.line == line_of("nobody", "pk.wait")


def test_the_signal_went_to_another_counter() -> None:
    line = line_of("elsewhere", "pk.signal(")
    assert cause("elsewhere").message == (
        f"nobody signals ready[1] of rank 0: the signals to `ready` (line {line}) go to ready[2] of rank 0 (1), "
        "ready[1] of rank 1 (1)"
    )


def test_a_signal_in_a_branch_that_nobody_takes() -> None:
    line = line_of("never_reached", "pk.signal(")
    text = f"nobody signals ready[0] of rank 0: the signal to `ready` (line {line}) is never reached"
    assert cause("never_reached").message == text


def test_who_waits_for_the_stuck_is_not_a_cause() -> None:
    found = cause("behind")  # rank 0 only waits for rank 1
    assert found.message.startswith("nobody signals never[0] of rank 1")
    assert len(deadlock("behind").blocked) == 2


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_count_that_is_never_reached(world: int) -> None:
    found = cause("too_few", world)
    line = line_of("too_few", "signal_all")
    assert found.kind == "bad-count"
    want = f"ready[0] of rank 0 never reaches {world + 1}: all signals together make {world} (from line {line})"
    assert found.message == want
    assert found.advice.startswith(f"Wait for {world}, or signal")


def test_future_signals_count_too() -> None:
    """A role that waits for more than there is, behind another wait: nothing was signalled yet, but it will be."""
    begun = build.line(30, "                pk.wait(begun, (owner, m, n), 2)")

    def two(s: ir.Statement) -> tuple[ir.Statement, ...]:
        if isinstance(s, ir.Do) and s.op == "wait":
            return (replace(s, operands=(s.operands[0], ir.const(2)), span=begun),)
        return (s,)

    kernel = build.reduce_scatter()
    with pytest.raises(errors.DeadlockError) as caught:
        run_reduce_scatter(replace(kernel, compute=build.edit(kernel.compute, two)), bfloat16, 3, 40, 72, 24)
    (found,) = caught.value.causes
    assert found.kind == "bad-count"
    assert "never reaches 2: all signals together make 1 (from line 37)" in found.message


def test_the_checker_hears_of_it() -> None:
    checker, kernel = Checker(), compiled("nobody")
    with pytest.raises(errors.DeadlockError):
        simulate(kernel, operands(kernel, 2), sms=1, checker=checker, seed=3)
    assert [(f.kind, f.seed) for f in checker.findings] == [("deadlock", 3)]


def test_the_text_of_the_error() -> None:
    error = deadlock("nobody")
    lines = str(error).splitlines()
    assert lines[-2:] == [
        "  nobody signals never[2] of rank 0: the kernel has no signal to `never`",
        "  Find who should signal `never` and why it does not, or wait for less.",
    ]
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.causes == error.causes


# -------------------------------------------------------------------------------------------------------- circles
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_ring(world: int) -> None:
    found = cause("ring", world)
    assert found.kind == "deadlock"
    assert found.message == f"{world} roles wait for each other in a circle"
    assert sorted(p.rank for p in found.places) == list(range(world))
    for p in found.places:
        before = (p.rank - 1) % world
        line = line_of("ring", "pk.signal(")
        assert f"; rank {before}, block 0, team would signal it at line {line}" in p.what


def test_a_ring_of_one() -> None:
    found = cause("itself")
    assert found.message.startswith("the team waits for itself: wait of mine[0] comes before the line that ends it")
    assert cause("ring", world=1).message.startswith("the team waits for itself")


def test_roles_of_one_block() -> None:
    found = cause("between_roles")
    assert found.message == "2 roles wait for each other in a circle"
    by_role = {p.role: p for p in found.places}
    assert by_role["loader"].what.startswith("wait of ready[0] needs 1, sees 0; the storer of this block would signal")
    assert by_role["storer"].what.endswith("the loader of this block would fill it at line 80")
    assert by_role["storer"].stage == "pipe[0]"


def test_one_fill_too_few() -> None:
    """The front end refuses it: a kernel as IR."""
    full = build.reduce_scatter()

    def fewer(block: ir.Block) -> ir.Block:
        out = []
        for s in block:
            if isinstance(s, ir.Role) and s.kind == "loader":
                (feed,) = s.body
                assert isinstance(feed, ir.For)
                s = replace(s, body=(replace(feed, stop=build.op("-", feed.stop, 1)),))
            elif isinstance(s, ir.Tasks):
                s = replace(s, body=fewer(s.body))
            out.append(s)
        return tuple(out)

    mutant = replace(full, compute=fewer(full.compute))
    with pytest.raises(errors.DeadlockError) as caught:
        run_reduce_scatter(mutant, bfloat16, 1, 16, 32, 64, sms=1)
    found = caught.value.causes[0]
    assert found.kind == "deadlock"
    assert "the consumer needs stage inputs[" in found.message
    assert "and it is filled only" in found.message


def test_polling_does_not_hang_the_diagnosis() -> None:
    error = deadlock("polls")
    assert "Find who should signal `ready`" in str(error)


def test_a_large_deadlock_is_diagnosed_quickly() -> None:
    mutant = build.without(build.reduce_scatter(), "signal_all")
    began = time.perf_counter()
    with pytest.raises(errors.DeadlockError) as caught:
        run_reduce_scatter(mutant, bfloat16, 8, 200, 200, 64, sms=8)
    assert time.perf_counter() - began < 30
    (found,) = caught.value.causes
    assert "the kernel has no signal to `begun`" in found.message


# ------------------------------------------------------------------------------------------------------ residency
def test_blocks_that_meet_must_fit() -> None:
    assert not launch("grid_barrier", sms=4).findings
    assert not launch("grid_barrier", sms=4, resident=4).findings
    found = cause("grid_barrier", sms=4, resident=2)
    assert found.kind == "not-resident"
    assert "block 2 of rank 0 would signal met[0]" in found.message
    assert "2 blocks of a rank fit" in found.message
    assert {p.block for p in found.places} == {0, 2}


@pytest.mark.parametrize("resident", [1, 2, 3])
def test_work_that_depends_on_the_order_of_blocks(resident: int) -> None:
    assert not launch("one_after_the_other", sms=4, resident=resident).findings
    assert cause("one_after_the_other", sms=4, resident=resident, order=[3, 2, 1, 0]).kind == "not-resident"


def probed(name: str, resident: int) -> list[Finding]:
    def run(resident: int, order: Any) -> list[Finding]:
        try:
            return launch(name, sms=4, resident=resident, order=order).findings
        except errors.DeadlockError as error:
            return list(error.causes)

    return residency.probe(run, 4, resident)


def test_probing_orders() -> None:
    assert [f.kind for f in probed("one_after_the_other", 2)] == ["order-dependent"]
    assert "in the order of their numbers" in probed("one_after_the_other", 2)[0].message
    assert [f.kind for f in probed("grid_barrier", 2)] == ["not-resident"]
    assert probed("one_after_the_other", 4) == []


def test_what_fits() -> None:
    kernel = kernels.matmul_reduce_scatter.specialise(
        a=pk.spec(bfloat16, 3), b=pk.spec(bfloat16, 2), c=pk.spec(bfloat16, 2)
    )
    assert residency.capacity(kernel.ir) == 132
    assert residency.capacity(kernel.ir, sms=8) == 8
    assert residency.shared_bytes(kernel.ir) == plan(kernel.ir).shared_bytes
    assert residency.capacity(compiled("between_roles"), sms=10) > 10  # a few threads, no shared memory to speak of


def test_orders_and_rooms_that_make_no_sense() -> None:
    kernel = compiled("grid_barrier")
    with pytest.raises(errors.ArgumentError, match="does not name each of the blocks 0 to 3 once"):
        simulate(kernel, operands(kernel, 1), sms=4, resident=2, order=[0, 1, 2])
    with pytest.raises(errors.ArgumentError, match="at least one block"):
        simulate(kernel, operands(kernel, 1), sms=4, resident=0)


def test_the_reduce_scatter_needs_its_blocks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks walk the owners from different places, so that block 0 of each waits for block 2 of the other."""
    original = residency.make_room
    monkeypatch.setattr(run, "make_room", lambda launch, _, order, sms: original(launch, 1, order, sms))
    with pytest.raises(errors.DeadlockError) as caught:
        run_reduce_scatter(build.reduce_scatter(), bfloat16, 2, 40, 72, 24, sms=3)
    assert [f.kind for f in caught.value.causes] == ["not-resident"]
    assert "1 block of a rank fits on the device at once" in str(caught.value)


# ---------------------------------------------------------------------------------------- signals that nobody hears
def test_an_array_that_nobody_waits_for() -> None:
    (found,) = launch("unheard").findings
    assert found.kind == "lost-signal"
    assert found.message == f"nobody waits for `done`, which is signalled at line {line_of('unheard', 'done, 0)')}"


def test_one_signal_too_many() -> None:
    (found,) = launch("surplus", world=3).findings
    assert found.kind == "lost-signal"
    assert "ends at 2, and at most 1 was ever waited for" in found.message
    assert "ready[0]" in found.message


def test_credits_left_over_are_no_mistake() -> None:
    assert not launch("credits", world=2).findings
    assert not launch("credits", world=3).findings


@pytest.mark.parametrize(
    ("name", "text"), [("small_counters", "outside `ready`"), ("next_rank", "rank 2 does not exist")]
)
def test_counters_and_ranks_that_do_not_exist(name: str, text: str) -> None:
    kernel = compiled(name)
    with pytest.raises(errors.SimulationError, match=text):
        simulate(kernel, operands(kernel, 2), sms=1)
