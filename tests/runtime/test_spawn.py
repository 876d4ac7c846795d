"""pk.spawn: values, failures, deaths; ranks as threads and as processes; and jobs that torch.distributed started."""

from __future__ import annotations

import multiprocessing
import pickle
import queue
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import pk
from pk.errors import ArgumentError, BackendError, RankError
from pk.runtime import spawn as spawning
from pk.runtime.group import current
from pk.runtime.spawn import describe, spawn
from tests.runtime import jobs

BACKENDS = pytest.mark.parametrize("backend", ["sim", "sim-processes"])
START_S = 30  # of processes on a busy machine: each imports torch


@BACKENDS
def test_values_come_back_in_rank_order(backend: str) -> None:
    got = spawn(jobs.total, 3, backend, (10,))
    assert [g["rank"] for g in got] == [0, 1, 2]
    for rank, g in enumerate(got):
        assert torch.equal(g["sum"], torch.full((2, 3), 33, dtype=torch.bfloat16))
        assert torch.equal(g["tensor"], torch.full((2, 3), rank + 10, dtype=torch.bfloat16))


@BACKENDS
def test_an_exception_ends_all_and_says_where(backend: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as error:
        spawn(jobs.fails, 3, backend, (1,))
    assert time.monotonic() - start < (2 if backend == "sim" else START_S)
    assert error.value.rank == 1
    lines = str(error.value).splitlines()
    assert lines[0] == "rank 1 raised ValueError: bad luck on 1"
    assert "jobs.py" in str(error.value)
    assert lines[-1] == "  | ValueError: bad luck on 1"
    assert isinstance(error.value.__cause__, ValueError)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_threads_that_only_compute_are_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawning, "_GRACE_S", 0.3)
    with pytest.raises(RankError, match="rank 0 raised ValueError"):
        spawn(jobs.fails_while_others_compute, 2, "sim", (0,))
    end = time.monotonic() + 5
    while any(t.name == "pk-rank-1" for t in threading.enumerate()):
        assert time.monotonic() < end, "the other rank still runs"
        time.sleep(0.01)


def test_processes_that_only_compute_are_ended_too() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 raised ValueError"):
        spawn(jobs.fails_while_others_compute, 2, "sim-processes", (1,))
    assert time.monotonic() - start < START_S
    assert not [p for p in multiprocessing.active_children() if p.name.startswith("pk-rank")]


def test_a_killed_process_is_named() -> None:
    with pytest.raises(RankError) as error:
        spawn(jobs.killed, 3, "sim-processes", (2,))
    assert (error.value.rank, str(error.value)) == (2, "rank 2 was killed by SIGKILL (9)")


def test_a_process_that_exits_is_named() -> None:
    with pytest.raises(RankError) as error:
        spawn(jobs.exits, 2, "sim-processes")
    assert str(error.value) == (
        "rank 0 exited with status 3 before it returned; see its output above.\n"
        '  A script that calls pk.spawn does so under `if __name__ == "__main__":`.'
    )


@BACKENDS
def test_a_rank_that_returns_early(backend: str) -> None:
    with pytest.raises(RankError, match="rank 0 raised PeerFailed: rank 1 has returned, so the end cannot go on"):
        spawn(jobs.returns_early, 2, backend)


def test_keyboard_interrupt_ends_the_ranks() -> None:
    def interrupted(rank: int) -> None:
        if rank == 1:
            raise KeyboardInterrupt
        current().barrier("the end")

    with pytest.raises(KeyboardInterrupt):
        spawn(interrupted, 2, "sim")


def test_functions_that_do_not_pickle() -> None:
    with pytest.raises(ArgumentError) as error:
        spawn(lambda rank: rank, 2, "sim-processes")
    assert str(error.value).startswith(
        "pk.spawn: `test_functions_that_do_not_pickle.<locals>.<lambda>` or its arguments cannot be "
    )
    assert str(error.value).endswith(
        '  Define the function at module level, or pass backend="cuda-threads" to run the ranks as threads.'
    )


def test_tensors_of_every_dtype_come_through() -> None:
    """Which torch itself pickles and then does not read back."""
    raw = torch.arange(256, dtype=torch.uint8)
    every = [raw.view(dtype).view(16, 16).T for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]
    given = [*every, every[0][:0], torch.zeros((), dtype=torch.float8_e5m2)]
    given += [torch.arange(3).to(dtype) for dtype in (torch.uint16, torch.uint32, torch.uint64)]
    for found in spawn(jobs.hands_back, 2, "sim-processes", (given,)):
        assert [(x.dtype, x.shape) for x in found] == [(x.dtype, x.shape) for x in given]
        assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(found, given, strict=True))


@pytest.mark.parametrize("world", [0, 9])
def test_world_sizes(world: int) -> None:
    with pytest.raises(ArgumentError, match=f"a group of {world} ranks"):
        pk.spawn(jobs.total, world, "sim", (1,))


def test_backends() -> None:
    with pytest.raises(ArgumentError, match="backend='tpu' does not exist"):
        spawn(jobs.total, 2, "tpu")
    assert describe(4, "sim") == "4 ranks, simulated on the CPU"
    assert describe(1, "sim") == "1 rank, simulated on the CPU"


@pytest.mark.parametrize(
    ("gpus", "world", "backend", "text"),
    [
        (8, 1, "cuda", "1 rank, one GPU"),
        (8, 4, "cuda", "4 ranks, a GPU each"),
        (8, 4, "cuda-threads", "4 ranks, a GPU each, threads"),
        (1, 4, "cuda", "4 ranks sharing 1 GPU"),
        (1, 2, "cuda-processes", "2 ranks sharing 1 GPU"),
        (2, 4, "cuda", "4 ranks sharing 2 GPUs"),
    ],
)
def test_where_ranks_run(gpus: int, world: int, backend: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawning, "_gpus", lambda: gpus)
    assert describe(world, backend) == text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu() -> None:
    with pytest.raises(BackendError):
        spawn(jobs.total, 2, "cuda", (1,))


def test_threads_of_a_rank_have_no_group() -> None:
    def run(rank: int) -> str:
        said: list[str] = []

        def helper() -> None:
            try:
                current()
            except BackendError as error:
                said.append(str(error))

        thread = threading.Thread(target=helper)
        thread.start()
        thread.join()
        return said[0]

    for text in spawn(run, 2, "sim"):
        assert text.startswith("this thread is not a rank of pk.spawn")
        assert "to one thread at a time" in text


def test_a_gloo_job(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    args = (3, str(tmp_path / "store"), results)
    members = [context.Process(target=jobs.under_torchrun, args=(rank, *args), daemon=True) for rank in range(3)]
    for process in members:
        process.start()
    found: dict[int, Any] = {}
    try:
        while len(found) < 3:
            rank, value = results.get(timeout=60)
            found[rank] = value
    except queue.Empty:
        pytest.fail(f"only {found} came back")
    for process in members:
        process.join(30)
        assert process.exitcode == 0
    outside = "this rank is not in the process group passed as group=."
    zero = "integer division or modulo by zero"
    assert found == {
        0: [(0, 3, "sim"), True, 3, outside, zero],
        1: [(1, 3, "sim"), True, 3, (0, 2, [b"1", b"2"]), zero],
        2: [(2, 3, "sim"), True, 3, (1, 2, [b"1", b"2"]), zero],
    }
