"""The choice between pk's kernels and the library: estimates, measurements, agreement of the ranks, the disk."""

from __future__ import annotations

import multiprocessing
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import pk
import pk.ops
from pk import errors
from pk.ops import baseline, choose, estimate, fused, tensor_parallel, tuning
from pk.ops.choose import Choice
from pk.ops.estimate import Case
from pk.runtime.group import Group, current
from tests.ops.choose_jobs import gloo, numbers, operands

FP8 = torch.float8_e4m3fn
AG, RS, AR = fused.OPERATORS
SMALL = "c64x128"
KERNELS = (*fused.TILES, *fused.FEW)


def request(operator: str, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> fused.Request:
    return tensor_parallel.request(operator, a, b, None, bias, None, None, None, None, None)


def first(operator: str) -> str:
    """The best of pk's for two ranks' :func:`operands`, by estimate."""
    a, b = (x.to("meta") for x in operands(0))
    known = choose.Facts("", 132, "", "", {})
    m = 2 * a.shape[0] if operator == AG else a.shape[0]
    return tuning.plan(Case(operator, 2, m, b.shape[1], a.shape[1]), known, 1)[0].name


def spawn(fn: Any, world: int = 2) -> list[Any]:
    return pk.spawn(fn, world, "sim")


def expected(operator: str, rank: int, world: int, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Of the products of ``parts``, all ranks' operands in float64."""
    if operator == AG:
        return torch.cat([a for a, _ in parts]) @ parts[rank][1]
    whole = sum((a @ b for a, b in parts), torch.zeros(()).double())
    return whole if operator == AR else whole.chunk(world)[rank]


def close(got: torch.Tensor, want: torch.Tensor, within: float) -> None:
    assert got.shape == want.shape
    error = float((got.detach().double() - want).norm() / want.norm())
    assert error <= within, error


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The library is a candidate, as on GPUs with NCCL; the disk is empty.  The folder of measurements."""
    monkeypatch.setattr(baseline, "unavailable", lambda group: "")
    monkeypatch.setenv("PK_CACHE_DIR", str(tmp_path))
    return tmp_path / "tuned"


# ------------------------------------------------------------------------------------------------------- the library
@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("operator", fused.OPERATORS)
def test_the_library_is_right(operator: str, world: int) -> None:
    def run(rank: int) -> None:
        rows = 5 if operator == AG else 5 * world
        every = [(numbers(r, rows, 32), numbers(90 + r, 48, 32).T) for r in range(world)]
        a, b = every[rank]
        bias = numbers(7, 48)
        out = torch.empty(5 if operator == RS else 5 * world, 96, dtype=torch.bfloat16)[:, :48]
        op = getattr(pk.ops, operator)
        assert op(a, b, bias=bias, activation="relu", out=out, config="library") is out
        want = expected(operator, rank, world, [(x.double(), y.double()) for x, y in every])
        close(out, (want + bias.double()).relu(), 0.01)
        close(op(a, b, out_dtype=torch.float32, config="library"), want, 1e-3)  # of partial sums in float32
        # fp8, with scales that differ from rank to rank
        row, col = torch.rand(rows, 1) + 0.5 + rank, torch.rand(1, 48) + 0.5
        scales = [(row, col)] if world == 1 else current().attempt("scales", lambda: (row, col))
        told = [(x.to(FP8).double() * r.double(), y.to(FP8).double() * c.double())
                for (x, y), (r, c) in zip(every, scales, strict=True)]  # fmt: skip
        got = op(a.to(FP8), b.to(FP8), scale_a=row, scale_b=col, config="library")
        assert got.dtype == torch.bfloat16
        close(got, expected(operator, rank, world, told), 0.01)

    spawn(run, world)


@pytest.mark.parametrize("world", [1, 2])
def test_the_library_returns_the_gathered_rows(world: int) -> None:
    def run(rank: int) -> None:
        a, b = operands(rank)
        result, whole = tensor_parallel.all_gather_matmul_saving(a, b, config="library")
        assert torch.equal(whole, torch.cat([operands(r)[0] for r in range(world)]))
        assert whole.data_ptr() != a.data_ptr()
        assert torch.equal(result, torch.mm(whole, b))

    spawn(run, world)


def test_ranks_share_no_result() -> None:
    def run(rank: int) -> bool:
        y = pk.ops.matmul_all_reduce(*operands(rank), config="library")
        kept = y.clone()
        current().barrier("all have it")
        y.fill_(rank)
        current().barrier("all have written")
        return bool((y == rank).all()) and not torch.equal(kept, y)

    assert spawn(run, 2) == [True, True]


def test_matmul_by_the_library() -> None:
    a, b = operands(0)
    bias = numbers(3, 48)
    assert torch.equal(pk.ops.matmul(a, b, config="library"), a @ b)
    got = pk.ops.matmul(a, b, bias=bias, activation="silu", scale_a=torch.tensor([2.0]), config="library")
    close(got, torch.nn.functional.silu(2 * (a.double() @ b.double()) + bias.double()), 0.005)


def test_processes_with_gloo(tmp_path: Path) -> None:
    world, context = 2, multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    members = [context.Process(target=gloo, args=(r, world, str(tmp_path), results)) for r in range(world)]
    for member in members:
        member.start()
    found = dict(pickle.loads(results.get(timeout=240)) for _ in members)
    for member in members:
        member.join(60)
    every = [(a.double(), b.double()) for a, b in map(operands, range(world))]
    for rank in range(world):
        mine = found[rank]
        assert isinstance(mine, dict), mine
        for operator in fused.OPERATORS:
            close(mine[operator], expected(operator, rank, world, every), 0.01)
        whole = torch.cat([operands(r)[0].to(FP8).double() * (0.5 + r) for r in range(world)])
        close(mine["fp8"], whole @ operands(rank)[1].to(FP8).double() * 2, 1e-4)
        y = expected(AG, rank, world, every)
        close(mine["gradients"][1], torch.cat([a for a, _ in every]).T @ (2 * y), 0.02)
        assert mine["direct"]
        assert (mine["local"] is not None) == (rank == 0)
        assert mine["choice"] == "library"
        assert mine["files"] == (rank == 0)
    total = sum(2 * expected(AG, r, world, every) @ every[r][1].T for r in range(world))
    close(found[1]["gradients"][0], total.chunk(world)[1], 0.02)


# ------------------------------------------------------------------------------------------------------------ choice
def test_the_lowest_estimate_wins(offered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rank: int) -> list[str]:
        a, b = operands(rank)
        q = request(AR, a, b)
        names = [choose.decide(q, False, None, None).name]
        names.append(choose.decide(q, True, None, None).name)
        q = request(AG, a, b)
        names += [choose.decide(q, False, comm, config).name for comm, config in
                  ((None, None), (3, None), (None, SMALL), (3, "c128x256"), (None, "library"))]  # fmt: skip
        return names

    monkeypatch.setattr(estimate, "library_us", lambda case: 0.5)
    small, comm = spawn(run)
    assert small == comm
    names = spawn(run)[0]
    assert names[0] == "library"  # the quickest
    assert names[1].partition("/")[0] in KERNELS  # deterministic
    assert names[2] == "library"
    assert names[3].partition("/")[0] in KERNELS
    assert names[3].endswith("/3")
    assert names[4].partition("/")[0] == SMALL
    assert names[5:] == ["c128x256/3", "library"]
    monkeypatch.setattr(estimate, "library_us", lambda case: 1e6)
    assert spawn(run)[0][0] in KERNELS


def test_the_operator_takes_what_is_chosen(offered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "library_us", lambda case: 0.5)
    monkeypatch.setattr(fused, "run", lambda *args: pytest.fail("not the library"))

    def run(rank: int) -> None:
        a, b = operands(rank)
        for operator in fused.OPERATORS:
            want = getattr(pk.ops, operator)(a, b, config="library")
            assert torch.equal(getattr(pk.ops, operator)(a, b), want)
            with pytest.raises(pytest.fail.Exception):
                getattr(pk.ops, operator)(a, b, deterministic=True)

    spawn(run)


def test_a_simulation_runs_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "library_us", lambda case: 0.5)
    assert all(spawn(lambda rank: choose.decide(request(AR, *operands(rank)), False, None, None).tile))


def test_ranks_agree_once(offered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, seen = Group.meet, []

    def meet(self: Group, key: str, *rest: Any, **options: Any) -> Any:
        seen.append((self.rank, key))
        return kept(self, key, *rest, **options)

    monkeypatch.setattr(Group, "meet", meet)

    def run(rank: int) -> None:
        q = request(AR, *operands(rank))
        first = choose.decide(q, False, None, None)
        assert choose.decide(q, False, None, None) is first
        choose.decide(request(RS, *operands(rank)), False, None, None)

    spawn(run)
    assert sorted(seen) == [(r, "what a choice depends on") for r in (0, 1)]


def test_one_rank_without_the_library_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "unavailable", lambda group: "no NCCL" if group.rank == 1 else "")
    assert spawn(lambda rank: choose.facts(current()).no_library) == ["rank 1: no NCCL"] * 2


@pytest.mark.parametrize(("options", "says"), [
    ({"config": "c1x1"}, 'There are c128x256, .*, "library"'),
    ({"config": "library", "deterministic": True}, "does not fix the order of its sums"),
    ({"comm_sms": -1}, "comm_sms=-1 must be at least 0"),
])  # fmt: skip
def test_refused(options: dict[str, Any], says: str) -> None:
    for rows in (16, 0):
        with pytest.raises(errors.ArgumentError, match=says):
            pk.ops.all_gather_matmul(numbers(0, rows, 32), numbers(1, 32, 48), **options)


# -------------------------------------------------------------------------------------------------------------- tune
def test_the_slowest_rank_decides(offered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[int, list[str]] = {0: [], 1: []}
    quick = first(AR)

    def timed(q: fused.Request, way: Choice, repeats: int) -> float:
        calls[q.group.rank].append(f"{way.name} {repeats}")
        return {"library": (10.0, 90.0), quick: (50.0, 60.0)}.get(way.name, (70.0, 70.0))[q.group.rank]

    monkeypatch.setattr(tuning, "timed", timed)

    def run(rank: int) -> tuple[str, str, str]:
        a, b = operands(rank)
        found = pk.ops.tune(pk.ops.matmul_all_reduce, a, b, limit=2, repeats=3, rounds=2)
        assert choose.decide(request(AR, a, b), False, None, None) == found.choice
        # a smaller M in the same step is the same problem; another N is another
        assert choose.decide(request(AR, a[:13], b), False, None, None) == found.choice
        assert choose.key(estimate.case_of(request(AR, a, b[:, :32]), 132)) not in choose.facts(current()).tuned
        return found.choice.name, str(found), pk.ops.explain("matmul_all_reduce", a, b)

    found = spawn(run)
    assert found[0] == found[1]
    assert found[0][0] == quick
    assert calls[0] == calls[1]
    assert len(calls[0]) == 2 * len(set(calls[0])) >= 4
    for text in found[0][1:]:
        assert any(line.split()[:2] == ["->", quick] and line.endswith("60.0") for line in text.splitlines()), text
    assert found[0][2].splitlines()[-1] == f"  {quick}: the quickest that pk.ops.tune measured"
    assert not offered.exists()  # a simulation is not kept


def test_what_fails_on_one_rank_fails_on_all(offered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, quick = fused.run, first(AR)
    monkeypatch.setattr(tuning, "timed", lambda q, way, repeats: {quick: 1.0, "library": 5.0}.get(way.name, 9.0))

    def broken(q: fused.Request, out: Any, tile: Any, comm: Any, *rest: Any) -> Any:
        if tile.name == quick and q.group.rank == 1:
            raise MemoryError("no room")
        return kept(q, out, tile, comm, *rest)

    monkeypatch.setattr(fused, "run", broken)

    def run(rank: int) -> tuple[str, list[str]]:
        a, b = operands(rank)
        found = pk.ops.tune(AR, a, b, limit=2)
        close(pk.ops.matmul_all_reduce(a, b, config="c128x64"), pk.ops.matmul_all_reduce(a, b).double(), 0.01)
        return found.choice.name, [c.failed for c in found.candidates if c.choice.name == quick]

    assert spawn(run, 3) == [("library", ["rank 1: MemoryError: no room"])] * 3


def test_what_fails_on_all_ranks(offered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise errors.ArgumentError("no such tile\n  here")

    monkeypatch.setattr(fused, "run", broken)

    def run(rank: int) -> str:
        found = pk.ops.tune(AR, *operands(rank), limit=1)
        assert found.choice.library
        return str(found)

    assert "failed: ArgumentError: no such tile" in spawn(run)[0]


def test_wrong_results_are_no_candidates(offered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "run", lambda q, *rest: (torch.ones(q.shape, dtype=q.out_dtype), None))
    found = spawn(lambda rank: pk.ops.tune(RS, *operands(rank), limit=1))
    assert [f.choice.name for f in found] == ["library"] * 2
    assert "off by" in found[0].candidates[-1].failed


def test_values_that_are_not_finite_can_be_tuned(offered: Path) -> None:
    def run(rank: int) -> int:
        a, b = operands(rank)
        a[0, 0] = float("nan")
        return sum(bool(c.failed) for c in pk.ops.tune(RS, a, b, limit=1).candidates)

    assert spawn(run) == [0, 0]


def test_ranks_that_ask_for_different_things(offered: Path) -> None:
    def run(rank: int) -> None:
        with pytest.raises(errors.RanksDisagree, match=r"1 rounds of 2 calls"):
            pk.ops.tune(RS, *operands(rank), limit=1, repeats=2 + rank)

    spawn(run)


def test_tune_refuses() -> None:
    a, b = operands(0)
    with pytest.raises(errors.ArgumentError, match="operator='matmul' is no operator"):
        pk.ops.tune("matmul", a, b)
    with pytest.raises(errors.ArgumentError, match="takes no time"):
        pk.ops.tune(AG, a[:0], b)
    with pytest.raises(errors.ArgumentError, match="rounds=0 must be"):
        pk.ops.tune(AG, a, b, rounds=0)


def test_steps_of_m() -> None:
    def key(m: int) -> str:
        return choose.key(Case(AG, 2, m, 64, 64))

    assert key(1) == key(2) != key(3)
    assert key(4097) == key(5000) == key(6144) != key(6145)
    assert len({key(m) for m in range(1, 8193)}) == 25


# ----------------------------------------------------------------------------------------------------------- explain
def test_explain() -> None:
    a, b = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((4096, 8192), (8192, 4096)))
    lines = pk.ops.explain(pk.ops.all_gather_matmul, a, b, world_size=2, count=3).splitlines()
    assert lines[0] == (
        "all_gather_matmul on 2 ranks of NVIDIA H200, 132 SMs: each multiplies 8192 x 4096 x 8192, 16-bit operands"
    )
    assert lines[1].startswith("  at least ")
    assert "link 194.5 us for 67.1 MB" in lines[1]
    best = lines[3].split()[1].rstrip(",")
    assert best in fused.TILES
    assert lines[3].startswith(f"  -> {best}, 4 SMs communicate ")
    assert any("library (cuBLAS + NCCL)" in line for line in lines)
    assert lines[-1] == f"  {best}/4: the lowest estimate; pk.ops.tune measures"
    assert len(lines) == 9
    last = pk.ops.explain(RS, a, b, world_size=2, deterministic=True).splitlines()[-1]
    assert last.endswith("; deterministic=True rules the library out")
    last = pk.ops.explain(AG, a, b, world_size=2, comm_sms=7).splitlines()[-1]
    assert "/7: " in last
    assert last.endswith("; comm_sms=7 rules the library out")
    assert pk.ops.explain(AR, a, b, world_size=8, config="library").splitlines()[-1] == (
        "  library: asked for by config='library'"
    )
    here = pk.ops.explain(AR, a, b).splitlines()
    assert "1 rank of the simulator" in here[0]
    assert 'no library: a simulation is there to run the kernel; config="library" takes the library' in here[-1]
    assert pk.ops.explain(a, b) == pk.ops.explain("matmul", a, b)


@pytest.mark.parametrize("operator", ["matmul", *fused.OPERATORS])
def test_explain_follows_autocast_and_gradients(operator: str) -> None:
    """It answers for the call that would be made: float32 operands are refused without autocast, and cast with it."""
    a, b = (torch.empty(*shape, device="meta") for shape in ((64, 512), (512, 256)))
    world = {} if operator == "matmul" else {"world_size": 2}
    want = {n: pk.ops.explain(operator, a.bfloat16(), b.bfloat16(), activation=n, **world) for n in (None, "gelu")}
    assert want[None] != want["gelu"]
    with torch.autocast("cpu", torch.bfloat16):
        assert pk.ops.explain(operator, a, b, activation="gelu", **world) == want["gelu"]
        real = (torch.zeros(64, 512), torch.zeros(512, 256))
        assert pk.ops.explain(operator, *real, activation="gelu", **world) == want["gelu"]
        assert "8-bit" in pk.ops.explain(operator, a.to(FP8), b.T.contiguous().to(FP8).T, **world)
    with pytest.raises(errors.ArgumentError, match=r"`a` is torch\.float32"):
        pk.ops.explain(operator, a, b, **world)
    graded = a.bfloat16(), b.bfloat16().requires_grad_()
    assert pk.ops.explain(operator, *graded, activation="gelu", **world) == want[None]  # the activation is torch's
    with torch.no_grad():
        assert pk.ops.explain(operator, *graded, activation="gelu", **world) == want["gelu"]


def test_tune_follows_autocast_and_gradients(offered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "timed", lambda q, way, repeats: 1.0 if way.library else 9.0)
    monkeypatch.setattr(estimate, "library_us", lambda case: 1e6)
    taken: list[bool] = []
    kept = tensor_parallel.chosen
    monkeypatch.setattr(
        tensor_parallel,
        "chosen",
        lambda q, out, way, gathered=False: taken.append(way.library) or kept(q, out, way, gathered),
    )

    def run(rank: int) -> None:
        a, b = (x.float() for x in operands(rank))
        b.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            pk.ops.matmul_all_reduce(a, b, activation="gelu")
            assert not taken[-1]
            pk.ops.tune(AR, a, b, activation="gelu", limit=1)
            pk.ops.matmul_all_reduce(a, b, activation="gelu")
            assert taken[-1], "what was measured is not what is called"

    spawn(run)


def test_explain_refuses() -> None:
    a, b = operands(0)
    with pytest.raises(errors.ArgumentError, match="is no operator"):
        pk.ops.explain("all_gather_gemm", a, b)
    with pytest.raises(errors.ArgumentError, match='"meta" will do'):
        pk.ops.explain(AG, a)
    with pytest.raises(errors.ArgumentError, match="3 ranks cannot share equally"):
        pk.ops.explain(RS, a, b, world_size=3)
    with pytest.raises(errors.ArgumentError, match="a group of 9 ranks"):
        pk.ops.explain(AG, a, b, world_size=9)


def test_tuning_warns_of_nothing(offered: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spawn(lambda rank: pk.ops.tune(AR, *operands(rank), limit=1))
