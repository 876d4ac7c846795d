"""Choice and measurement on GPUs: the library against float64, ``pk.ops.tune``, and never slower than the library."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

import pk
import pk.ops
from pk.ops import baseline, choose, fused, tensor_parallel
from pk.runtime.group import current

FP8 = torch.float8_e4m3fn
OPERATORS = fused.OPERATORS


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """The same on every rank's GPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def expected(operator: str, rank: int, world: int, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    if operator == OPERATORS[0]:
        return torch.cat([a for a, _ in parts]) @ parts[rank][1]
    whole = torch.stack([a @ b for a, b in parts]).sum(0)
    return whole.chunk(world)[rank] if operator == OPERATORS[1] else whole


def library(rank: int, world: int) -> None:
    """Every way of multiplying, against float64."""
    every = [(numbers(r, 64 * world, 256), numbers(9 + r, 512, 256).T) for r in range(world)]
    a, b = every[rank]
    bias = numbers(5, 512)
    told = [(x.double(), y.double()) for x, y in every]
    for operator in OPERATORS:
        op, want = getattr(pk.ops, operator), expected(operator, rank, world, told)
        assert off(op(a, b, config="library"), want) < 0.01
        assert off(op(a, b, out_dtype=torch.float32, config="library"), want) < 1e-3
        got = op(a, b, bias=bias, activation="silu", config="library")
        assert off(got, torch.nn.functional.silu(want + bias.double())) < 0.02
        row, col = torch.rand(64 * world, 1, device="cuda") + 0.5, torch.rand(1, 512, device="cuda") + 0.5
        for r, c in ((row, col), (row[:1], col)):
            exact = fused_or_library(op, a, b, r, c, None)
            assert off(fused_or_library(op, a, b, r, c, "library"), exact.double()) < 0.02


def fused_or_library(op: Any, a: torch.Tensor, b: torch.Tensor, row: Any, col: Any, config: str | None) -> torch.Tensor:
    return op(a.to(FP8), b.T.contiguous().to(FP8).T, scale_a=row, scale_b=col, config=config, deterministic=not config)


def measured(rank: int, world: int) -> dict[str, Any]:
    """Tune, look, run what was chosen, under a graph too."""
    told = {}
    for operator in OPERATORS:
        rows = 2048 // world if operator == OPERATORS[0] else 2048
        a, b = numbers(rank, rows, 1024), numbers(9 + rank, 2048, 1024).T
        tuning = pk.ops.tune(operator, a, b, rounds=3)
        assert not any(c.failed for c in tuning.candidates), str(tuning)
        times = {c.choice.name: c.measured for c in tuning.candidates}
        assert times[tuning.choice.name] == min(t for t in times.values() if t is not None)
        q = tensor_parallel.request(operator, a, b, None, None, None, None, None, None, None)
        assert choose.decide(q, False, None, None) == tuning.choice
        op = getattr(pk.ops, operator)
        eager = op(a, b)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            op(a, b)
            stream.synchronize()
            current().barrier("before the capture")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                captured = op(a, b)
            graph.replay()
            stream.synchronize()
        assert off(captured, eager.double()) < 0.01
        told[operator] = (tuning.choice.name, times, str(tuning))
    return told


def job(rank: int, world: int, store: str, results: Any) -> None:
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        assert baseline.unavailable(current()) == ""
        library(rank, world)
        results.put((rank, measured(rank, world)))
    except BaseException as error:  # noqa: BLE001
        results.put((rank, f"{type(error).__name__}: {error}"))
    pk.finalize()
    dist.destroy_process_group()


@pytest.mark.gpu(2)
def test_processes_with_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_CACHE_DIR", str(tmp_path))
    world, context = torch.cuda.device_count(), multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    members = [context.Process(target=job, args=(r, world, str(tmp_path / "store"), results)) for r in range(world)]
    for member in members:
        member.start()
    found = dict(results.get(timeout=540) for _ in members)
    for member in members:
        member.join(60)
    assert all(isinstance(value, dict) for value in found.values()), found
    for operator in OPERATORS:
        print(found[0][operator][2])
        assert "library" in found[0][operator][1]
        assert all(found[r][operator] == found[0][operator] for r in found)
    assert len(list((tmp_path / "tuned").rglob("*.json"))) == len(OPERATORS)


@pytest.mark.gpu
def test_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_CACHE_DIR", str(tmp_path))
    library(0, 1)
    for _, times, text in measured(0, 1).values():
        print(text)
        assert "library" in times


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_share_a_gpu(world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no NCCL for them: the library is right, and no candidate."""
    monkeypatch.setenv("PK_CACHE_DIR", str(tmp_path))

    def run(rank: int) -> tuple[str, ...]:
        library(rank, world)
        a, b = numbers(rank, 256, 512), numbers(9 + rank, 512, 512).T
        found = [pk.ops.tune(operator, a, b, limit=2, rounds=2) for operator in OPERATORS]
        assert not any(c.failed or c.choice.library for tuning in found for c in tuning.candidates), str(found)
        return tuple(tuning.choice.name for tuning in found)

    assert len(set(pk.spawn(run, world, "cuda-threads"))) == 1


@pytest.mark.gpu
def test_a_candidate_that_fails_on_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_CACHE_DIR", str(tmp_path))
    kept, first = fused.run, []

    def broken(q: Any, out: Any, tile: Any, comm: Any, *rest: Any) -> Any:
        first.append(tile.name)
        if tile.name == first[0] and q.group.rank == 1:
            raise MemoryError("no room")
        return kept(q, out, tile, comm, *rest)

    monkeypatch.setattr(fused, "run", broken)

    def run(rank: int) -> list[str]:
        a, b = numbers(rank, 512, 512), numbers(9 + rank, 512, 512).T
        found = pk.ops.tune("matmul_reduce_scatter", a, b, limit=2, rounds=1)
        pk.ops.matmul_reduce_scatter(a, b)
        pk.synchronize()
        return sorted(c.failed for c in found.candidates)

    assert pk.spawn(run, 2, "cuda-threads") == [["", "rank 1: MemoryError: no room"]] * 2
