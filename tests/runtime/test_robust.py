"""What goes wrong around a launch ends in a right answer, or in a clear error on every rank.

Memory that comes and goes, workspaces, ranks that fail, graphs, edited files; on a machine of host memory.  Jobs of
several processes are in test_robust_jobs.py.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pk.errors import BackendError, RankError
from pk.ops.workspace import symmetric_workspace
from pk.runtime import capturing, driver_memory, retired, symm
from pk.runtime import context as contexts
from pk.runtime import group as groups
from pk.runtime.group import Group
from pk.runtime.spawn import run_threads
from tests.runtime.fake import FakeDriver, Machine, _Host
from tests.runtime.ranks import as_processes

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    gc.collect()
    retired.sweep()
    assert not retired._left


def held(machine: Machine) -> int:
    """Bytes of device memory that are allocated now."""
    sizes = {entry[1]: entry[2] for entry in machine.log if entry[0] == "allocate"}
    freed = [entry[1] for entry in machine.log if entry[0] in ("free", "free host")]
    return sum(sizes.values()) - sum(sizes[address] for address in freed)


def bytes_(n: int, group: Group) -> torch.Tensor:
    return symm.empty((n,), torch.uint8, group)


def number(t: torch.Tensor, group: Group) -> int:
    found = symm.place(t, group)
    assert found is not None
    return found[0]


def fake_threads(fn: Callable[[Group], Any], driver: FakeDriver, world: int = 2) -> list[Any]:
    return run_threads(lambda rank: fn(groups.current()), (), groups.threads(world, "cuda", [0] * world, driver))


# ------------------------------------------------------------------------------------------------------------- memory
def test_a_piece_serves_for_sizes_up_to_its_own() -> None:
    def run(group: Group) -> list[int]:
        numbers = []
        for size in (100_000, 85_000, 100_352, 70_000, 60_000, 85_000):
            numbers.append(number(bytes_(size, group), group))
            group.barrier("dropped")
        return numbers

    assert run_threads(lambda rank: run(groups.current()), (), groups.threads(2, "sim")) == [[0, 0, 0, 1, 1, 0]] * 2


@pytest.mark.parametrize("backend", ["sim", "threads", "processes"])
def test_many_sizes_keep_no_more_than_the_spare(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symm, "SPARE", 64 * MIB)
    machine = Machine(gpus=1 if backend == "threads" else 2)

    def run(group: Group) -> int:
        kept = bytes_(MIB, group)
        kept.fill_(7)
        most = 0
        for n in range(40):  # each new, and none fits another
            bytes_(int(MIB * 1.3 ** (n % 13)) + n, group)
            heap = symm.heap(group)
            most = max(most, sum(s.nbytes for s in heap.segments.values()))
            group.barrier("dropped")
        assert bool((kept == 7).all())
        assert len(symm.lookup(kept, group)) == 2
        del kept
        group.close()
        return most

    if backend == "sim":
        found = run_threads(lambda rank: run(groups.current()), (), groups.threads(2, "sim"))
    elif backend == "threads":
        found = fake_threads(run, FakeDriver(machine))
    else:
        found = as_processes(run, tmp_path, 2, machine)
    assert all(isinstance(most, int) and most <= (64 + 24 + 4) * MIB for most in found), found
    assert not machine.freed_while_mapped() and not +machine.mapped and held(machine) == 0


def test_a_piece_that_nobody_took_for_long_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symm, "PATIENCE", 5)
    driver = FakeDriver()
    group = Group(0, 1, "cuda", device=0, driver=driver)
    bytes_(1000, group)
    for _ in range(5):
        bytes_(9000, group)
    assert sorted(symm.heap(group).segments) == [0, 1]
    for _ in range(2):
        bytes_(9000, group)
    assert sorted(symm.heap(group).segments) == [1]
    group.close()
    assert held(driver.machine) == 0


def test_without_room_the_free_pieces_go_back_first(tmp_path: Path) -> None:
    machine = Machine(gpus=2)
    drivers = [FakeDriver(machine), FakeDriver(machine)]
    drivers[1].memory_left = 10 * MIB

    def run(group: Group) -> Any:
        bytes_(4 * MIB, group)
        group.barrier("dropped")
        large = bytes_(8 * MIB, group)
        with pytest.raises(BackendError) as error:
            bytes_(4 * MIB, group)
        large.fill_(group.rank)
        assert len(set(symm.lookup(large, group))) == 2
        small = bytes_(2 * MIB, group)
        assert number(small, group) == 2
        del large, small
        group.close()
        return str(error.value)

    first, second = as_processes(run, tmp_path, 2, machine, drivers)
    assert second == "cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY: out of memory."
    assert "failed on rank 1: BackendError: cuMemAlloc failed" in first
    gc.collect()  # the errors' frames
    retired.sweep()
    assert not machine.freed_while_mapped() and held(machine) == 0


def test_launches_are_packed_anew_after_memory_went_back() -> None:
    group = Group(0, 1, "cuda", device=0, driver=FakeDriver())
    context = contexts.of(group)
    piece = bytes_(1000, group)
    segment = symm.heap(group).segments[number(piece, group)]
    del piece
    context.warm["call",] = "packed"
    before = context.generation
    symm.heap(group).release([segment])
    assert context.generation == before + 1 and not context.warm
    group.close()


def test_a_reused_piece_comes_after_the_launches_of_another_stream() -> None:
    driver = FakeDriver()
    group = Group(0, 1, "cuda", device=0, driver=driver)
    context = contexts.of(group)
    context.follow(7)
    bytes_(1000, group)
    driver.current_stream[threading.get_ident()] = 8
    bytes_(1000, group)
    assert ("follow", 8, 7) in driver.machine.log
    assert context.stream == 7
    group.close()


def test_what_a_tensor_holds_at_the_end_is_freed_with_it(tmp_path: Path) -> None:
    machine, kept = Machine(gpus=2), []

    def run(group: Group) -> None:
        t = bytes_(1000, group)
        if group.rank == 1:
            kept.append(t)
        del t
        group.close()

    assert as_processes(run, tmp_path, 2, machine) == [None, None]
    kept[0].fill_(3)
    assert held(machine) == 2 * MIB
    kept.clear()
    gc.collect()
    retired.sweep()
    assert held(machine) == 0


def test_a_tensor_inside_a_larger_allocation(tmp_path: Path) -> None:
    """As torch's allocator gives: a block of its own offset on each rank; the peers map the whole."""
    machine = Machine(gpus=2)

    def run(group: Group) -> tuple[int, list[int], list[int]]:
        base = group.driver.allocate(group.gpu, 4 * MIB)
        offset = 4096 * (3 + 5 * group.rank)
        t = torch.from_numpy(np.asarray(_Host(base + offset, 8192))).view(torch.float32)
        assert symm.symmetric(t, group) is t
        mine = symm.lookup(t, group), symm.lookup(t[100:], group)
        group.close()
        group.driver.free(group.gpu, base)
        return base + offset, *mine

    first, second = as_processes(run, tmp_path, 2, machine)
    assert first[1] == second[1] == [first[0], second[0]]
    assert first[2] == [first[0] + 400, second[0] + 400]
    assert not machine.freed_while_mapped()


@pytest.mark.parametrize(("visible", "devices"), [([[0], [1]], [0, 0]), ([[1, 0], [1, 0]], [0, 1]), (None, [1, 0])])
def test_ranks_that_see_one_gpu_each_or_all_in_another_order(
    visible: list[list[int]] | None, devices: list[int], tmp_path: Path
) -> None:
    machine = Machine(gpus=2)
    drivers = [FakeDriver(machine, seen) for seen in visible or [None, None]]

    def run(group: Group) -> list[int]:
        t = bytes_(1000, group)
        contexts.of(group)
        peers = symm.lookup(t, group)
        assert peers[group.rank] == t.data_ptr()
        del t
        group.close()
        return peers

    first, second = as_processes(run, tmp_path, 2, machine, drivers, devices)
    assert first == second
    assert held(machine) == 0 and not machine.freed_while_mapped()


# --------------------------------------------------------------------------------------------------------- workspaces
def test_a_workspace_is_taken_once_grown_and_freed_with_the_group() -> None:
    driver = FakeDriver()
    group = Group(0, 1, "cuda", device=0, driver=driver)
    first = symmetric_workspace(group, "w", (100, 10), torch.float32).data_ptr()
    assert symmetric_workspace(group, "w", (50, 20), torch.bfloat16).data_ptr() == first
    assert symmetric_workspace(group, "other", (100, 10), torch.float32).data_ptr() != first
    large = symmetric_workspace(group, "w", (101, 10), torch.float32)
    assert large.shape == (101, 10)
    del large
    taken = held(driver.machine)
    for rows in range(102, 120):  # crept up to: one step of growth holds them
        symmetric_workspace(group, "w", (rows, 10), torch.float32)
    assert held(driver.machine) == taken
    group.close()
    assert held(driver.machine) == 0


def test_a_workspace_never_grows_under_capture_and_a_graphs_own_stays() -> None:
    driver = FakeDriver()

    def run(group: Group) -> tuple[str, bool]:
        stream = 200 + group.rank
        driver.current_stream[threading.get_ident()] = stream
        small = symmetric_workspace(group, "w", (10, 10), torch.float32).data_ptr()
        group.barrier("eager")
        if group.rank == 1:
            driver.captured.add(stream)
        group.barrier("captured")
        assert symmetric_workspace(group, "w", (10, 10), torch.float32).data_ptr() == small
        with pytest.raises(BackendError) as error:
            symmetric_workspace(group, "w", (1000, 10), torch.float32)
        group.barrier("refused")
        driver.captured.clear()
        group.barrier("eager again")
        assert symmetric_workspace(group, "w", (1000, 10), torch.float32).data_ptr() != small
        taken = [bytes_(400, group) for _ in range(3)]
        return str(error.value), small in [t.data_ptr() for t in taken]

    (first, reused), (second, kept) = fake_threads(run, driver)
    assert second == (
        "workspace `w` of pk.ops, 40000 bytes, needs symmetric memory, which cannot be allocated while a CUDA graph is "
        "being captured.\n  Do it once before the capture: make the same call eagerly first."
    )
    assert first.startswith(second.split(".\n")[0] + " by rank 1.\n")
    assert not kept, "the graph of rank 1 writes to it"
    assert not reused
    gc.collect()  # the errors' frames
    retired.sweep()
    assert held(driver.machine) == 0


def test_a_first_launch_that_one_rank_captures_is_an_error_on_all() -> None:
    driver = FakeDriver()

    def run(group: Group) -> str:
        driver.current_stream[threading.get_ident()] = 200 + group.rank
        driver.captured.add(201)
        with pytest.raises(BackendError) as error:
            contexts.of(group)
        return str(error.value)

    first, second = fake_threads(run, driver)
    assert second.startswith("the group's first launch needs memory, which is impossible while a CUDA graph is being")
    assert first.startswith("making the launch context failed on rank 1: BackendError: the group's first launch")


# ------------------------------------------------------------------------------------------------------ failing ranks
def test_the_memory_of_a_spawn_that_failed_is_freed() -> None:
    driver = FakeDriver()

    def run(group: Group) -> None:
        t = bytes_(1000, group)
        contexts.of(group)
        group.barrier("ready")
        if group.rank == 1:
            raise ValueError("before its launch")
        t.fill_(1)
        group.barrier("a launch")

    with pytest.raises(RankError, match="rank 1 raised ValueError: before its launch"):
        fake_threads(run, driver)
    gc.collect()
    retired.sweep()
    assert held(driver.machine) == 0


def test_a_rank_that_leaves_alone_frees_when_the_others_have_unmapped(tmp_path: Path) -> None:
    machine, left = Machine(gpus=2), threading.Event()

    def run(group: Group) -> None:
        bytes_(1000, group)
        group.barrier("made")
        if group.rank == 0:
            retired.leave(group, retired.DESTROYED)
            assert held(machine) == 4 * MIB
            left.set()
            return
        assert left.wait(30)
        with pytest.raises(BackendError, match="rank 0 has destroyed its process group, so closing cannot go on"):
            group.close()
        with pytest.raises(BackendError, match=r"could not close the group: rank 0 has destroyed its process group"):
            bytes_(1000, group)

    assert as_processes(run, tmp_path, 2, machine) == [None, None]
    retired.sweep()
    assert held(machine) == 0 and not machine.freed_while_mapped() and not +machine.mapped


def test_waiting_for_a_stream_can_be_interrupted() -> None:
    looks = iter([False] * 3 + [True])
    driver_memory._listen_until(lambda: next(looks))
    assert not list(looks)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        driver_memory._listen_until(lambda: False)


# --------------------------------------------------------------------------------------------------------- CUDA graphs
def test_torch_cuda_graph_is_refused_to_rank_threads_in_its_global_mode() -> None:
    graph, entered = torch.cuda.graph, []
    original = graph.__enter__
    graph.__enter__ = entered.append
    try:
        plain = graph.__enter__
        both = SimpleNamespace(capture_error_mode="global"), SimpleNamespace(capture_error_mode="thread_local")
        with capturing.refusing(1, 2), capturing.refusing(1, 2):
            with pytest.raises(BackendError) as error:
                graph.__enter__(both[0])
            graph.__enter__(both[1])
        with capturing.refusing(0, 1):
            graph.__enter__(both[0])
        assert entered == [both[1], both[0]]
        assert graph.__enter__ is plain
    finally:
        graph.__enter__ = original
    assert str(error.value).startswith("torch.cuda.graph on rank 1 of 2, which are threads of one process: ")
    assert 'capture_error_mode="thread_local"' in str(error.value)


# -------------------------------------------------------------------------------------------------------------- source
TWICE = """
import pk

@pk.kernel
def scaled(x: pk.Global, y: pk.Global):
    for m in pk.tasks(1):
        pk.store(y, pk.load(x, (0, 0), (16, 16)) * {}, (0, 0))
"""


def test_a_kernel_is_the_text_that_was_imported(tmp_path: Path) -> None:
    file = tmp_path / "edited.py"

    def load() -> Any:
        spec = importlib.util.spec_from_file_location("edited", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def result(module: Any) -> float:
        x, y = torch.ones(16, 16), torch.empty(16, 16)
        module.scaled(x, y)
        return float(y.unique().item())

    file.write_text(TWICE.format("2.0"))
    first = load()
    file.write_text(TWICE.format("30.0"))  # of as many lines
    assert result(first) == 2
    file.write_text("# longer\n" + TWICE.format("400.0"))
    second = load()
    assert [result(first), result(second)] == [2, 400]
