"""The spine on a GPU: the simulator's problems with ranks sharing the device, soak, real IPC, time-outs."""

from __future__ import annotations

import os
import random
import time

import pytest
import torch

import pk
from pk import errors
from tests.kernels import (
    all_gather_matmul,
    matmul,
    matmul_reduce_scatter,
    matmul_reduce_scatter_ordered,
    operands,
    relative_error,
)
from tests.problems import Problem, expected, problems, solve_all

pytestmark = pytest.mark.gpu(1)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_ranks_sharing_a_gpu_agree_with_the_simulator(world: int) -> None:
    batch = problems()
    on_gpu = pk.spawn(solve_all, world, "cuda", (world, batch))
    simulated = pk.spawn(solve_all, world, "sim", (world, batch))
    for i, problem in enumerate(batch):
        eps = torch.finfo(problem.dtype).eps / 2
        for rank, want in enumerate(expected(world, problem)):
            got, sim = on_gpu[rank][i], simulated[rank][i]
            assert relative_error(got, want) <= 1e-2, f"{problem}, rank {rank}"
            # Terms arrive in any order, and every addition rounds: at most a rounding a term of the running sum.
            bound = world * eps * (want.abs() + 4 * want.abs().mean())
            worst = ((got.double() - sim.double()).abs() - bound).max()
            assert worst <= 0, f"{problem}, rank {rank}: differs from the simulator by {worst:.3e} more than rounding"


def _soak(rank: int, world: int, launches: int) -> float:
    """Launches with changing shapes; every 50th is checked.  Returns the worst error seen."""
    rng, worst = random.Random(5), 0.0
    sizes = [(rng.randint(1, 300), 8 * rng.randint(1, 64), 8 * rng.randint(1, 40)) for _ in range(25)]
    tensors = []
    for m, n, k in sizes:
        a, b = (t.to(pk.device()) for t in operands(rank, world * m, k, n, torch.bfloat16))
        tensors.append((a.view(world, m, k), b, pk.empty((m, n), torch.bfloat16)))
    total = {}
    for i in range(launches):
        which = rng.randrange(len(sizes))
        a, b, c = tensors[which]
        matmul_reduce_scatter(a, b, c)
        if i % 50 == 0:
            pk.synchronize()
            if which not in total:
                m, n, k = sizes[which]
                pairs = [operands(r, world * m, k, n, torch.bfloat16) for r in range(world)]
                total[which] = sum(x.double() @ y.double() for x, y in pairs).chunk(world)[rank]
            worst = max(worst, relative_error(c.cpu(), total[which]))
    pk.synchronize()
    return worst


@pytest.mark.parametrize("world", [2, 8])
def test_two_thousand_launches_with_changing_shapes(world: int) -> None:
    assert max(pk.spawn(_soak, world, "cuda", (world, 2000))) <= 1e-2


def test_two_processes_share_a_gpu_through_ipc() -> None:
    problem = Problem(seed=3, m=72, n=136, k=64, dtype=torch.bfloat16)
    ranks = pk.spawn(solve_all, 2, "cuda-processes", (2, [problem, problem]))
    for got, want in zip(ranks, expected(2, problem), strict=True):
        assert relative_error(got[0], want) <= 1e-2
        assert relative_error(got[1], want) <= 1e-2


def _gather(rank: int, world: int, m: int, n: int, k: int) -> torch.Tensor:
    x, b = (t.to(pk.device()) for t in operands(rank, m, k, n, torch.bfloat16))
    c = torch.full((world, m, n), float("nan"), dtype=torch.bfloat16, device=pk.device())
    all_gather_matmul(x, b, c)
    pk.synchronize()
    return c.cpu()


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_communicator(world: int) -> None:
    m, n, k = 264, 520, 328
    whole = torch.stack([operands(r, m, k, n, torch.bfloat16)[0] for r in range(world)]).double()
    for rank, got in enumerate(pk.spawn(_gather, world, "cuda", (world, m, n, k))):
        assert relative_error(got, whole @ operands(rank, m, k, n, torch.bfloat16)[1].double()) <= 1e-2


def _ordered(rank: int, world: int, m: int, n: int, k: int) -> list[torch.Tensor]:
    a, b = (t.to(pk.device()) for t in operands(rank, world * m, k, n, torch.bfloat16))
    results = []
    for _ in range(3):
        c = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=pk.device())
        matmul_reduce_scatter_ordered(a.view(world, m, k), b, c, STAGES=3)
        pk.synchronize()
        results.append(c.cpu())
    return results


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_ordered_sum_is_repeatable(world: int) -> None:
    m, n, k = 264, 520, 328
    pairs = [operands(r, world * m, k, n, torch.bfloat16) for r in range(world)]
    total = sum(a.double() @ b.double() for a, b in pairs)
    for got, want in zip(pk.spawn(_ordered, world, "cuda", (world, m, n, k)), total.chunk(world), strict=True):
        assert relative_error(got[0], want) <= 1e-2
        assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])


def _operator(rank: int, world: int, m: int, n: int, k: int) -> torch.Tensor:
    a, b = (t.to(pk.device()) for t in operands(rank, m, k, n, torch.bfloat16))
    first = pk.ops.matmul_reduce_scatter(a, b)
    pk.ops.matmul_reduce_scatter(b.new_zeros(m, k), b)  # reuses the workspace
    pk.synchronize()
    return first.cpu()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_operator(world: int) -> None:
    m, n, k = 136 * world, 264, 136
    total = sum(a.double() @ b.double() for a, b in (operands(r, m, k, n, torch.bfloat16) for r in range(world)))
    for got, want in zip(pk.spawn(_operator, world, "cuda", (world, m, n, k)), total.chunk(world), strict=True):
        assert relative_error(got, want) <= 1e-2


@pk.kernel
def nobody_signals(c: pk.Global):
    never = pk.signals(3)
    for i in pk.tasks(1):
        with pk.storer():
            pk.wait(never, 1, 5)


def _hang(rank: int, world: int) -> tuple[str, float]:
    c = torch.zeros(8, 8, dtype=torch.bfloat16, device=pk.device())
    start = time.perf_counter()
    try:
        nobody_signals(c)
        pk.synchronize()
    except errors.HangError as e:
        return str(e), time.perf_counter() - start
    return "", 0.0


@pytest.mark.parametrize("backend", ["cuda", "cuda-processes"])
def test_a_missing_signal_comes_back_as_hang_error(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_TIMEOUT_S", "2")
    for text, seconds in pk.spawn(_hang, 2, backend, (2,)):
        assert "nobody_signals" in text and "never[1]" in text and "test_spine.py" in text
        assert "5" in text and "0" in text
        assert seconds <= 4 + 10 * (backend == "cuda-processes")


def _recover(rank: int, world: int) -> float:
    text, _ = _hang(rank, world)
    assert "never[1]" in text
    with pytest.raises(errors.HangError):  # poisoned until it is reset
        nobody_signals(torch.zeros(8, 8, dtype=torch.bfloat16, device=pk.device()))
    pk.reset()
    problem = Problem(seed=4, m=72, n=136, k=64, dtype=torch.bfloat16)
    return relative_error(solve_all(rank, world, [problem])[0], expected(world, problem)[rank])


def test_reset_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_TIMEOUT_S", "1")
    assert max(pk.spawn(_recover, 2, "cuda", (2,))) <= 1e-2


def test_a_new_shape_does_not_recompile() -> None:
    from pk.runtime import compile as compiler

    compiled = []
    for m, n, k in ((128, 256, 64), (200, 136, 264)):
        a, b = (t.cuda() for t in operands(0, m, k, n, torch.bfloat16))
        c = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        matmul(a, b, c)
        pk.synchronize()
        assert relative_error(c.cpu(), a.double().cpu() @ b.double().cpu()) <= 1e-2
        compiled.append(compiler.counts.compiled)
    assert compiled[0] == compiled[1]


def _mistakes(rank: int, world: int) -> list[str]:
    texts = []
    a, b = (t.to(pk.device()) for t in operands(rank, 128, 64, 128, torch.bfloat16))
    c = pk.empty((64, 128), torch.bfloat16)
    attempts = [
        (a.cpu().view(2, 64, 64), b, c),
        (a.view(2, 64, 64), b, torch.empty(64, 128, dtype=torch.bfloat16, device=a.device)),
        (a.view(2, 64, 64).transpose(1, 2), b, c),
        (a.view(2, 64, 64), b, c[: 32 + 8 * rank]),
    ]
    for attempt in attempts:
        try:
            matmul_reduce_scatter(*attempt)
            pk.synchronize()
            texts.append("")
        except errors.PkError as e:
            texts.append(f"{type(e).__name__}: {e}")
    return texts


def test_mistakes_end_promptly_on_every_rank() -> None:
    start = time.perf_counter()
    for cpu, private, transposed, shapes in pk.spawn(_mistakes, 2, "cuda", (2,)):
        assert "is a CPU tensor of shape (2, 64, 64), but rank" in cpu
        assert "not symmetric" in private
        assert "last dim" in transposed
        assert "different shapes" in shapes and "(32, 128)" in shapes and "(40, 128)" in shapes
    assert time.perf_counter() - start <= 60


def test_environment_is_safe() -> None:
    assert os.environ.get("PK_MULTICAST", "0") != "1"
