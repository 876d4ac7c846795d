"""Symmetric memory: agreed numbers, reuse, views, sharing by pointer and by IPC, and who frees when."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pk.errors import ArgumentError, BackendError, PkError, RankError, RanksDisagree
from pk.runtime import group as groups
from pk.runtime import retired, symm
from pk.runtime.group import Group
from pk.runtime.spawn import run_threads
from tests.runtime.fake import FakeDriver, Machine
from tests.runtime.ranks import as_processes


def simulated(fn: Callable[[Group], Any], world: int) -> list[Any]:
    return run_threads(lambda rank: fn(groups.current()), (), groups.threads(world, "sim"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int32])
def test_views_of_a_symmetric_tensor_are_symmetric(dtype: torch.dtype) -> None:
    def run(group: Group) -> None:
        t = symm.empty((4, 6, 8), dtype, group)
        assert (t.shape, t.dtype, t.is_contiguous()) == ((4, 6, 8), dtype, True)
        base = symm.lookup(t, group)
        assert base[group.rank] == t.data_ptr()
        for view in (t[1:], t[2, 3:5, 4:], t.permute(2, 0, 1), t.view(24, 8)[5:], t[::2, 1], t[3, 5, 7:]):
            offset = view.data_ptr() - t.data_ptr()
            assert symm.lookup(view, group) == [b + offset for b in base]
            assert symm.place(view, group) == (0, offset)
        assert symm.lookup(t[:, :0], group) == base

    simulated(run, 3)


def test_peers_are_the_other_ranks_tensors() -> None:
    def run(group: Group) -> tuple[int, list[int]]:
        t = symm.empty((3,), torch.int32, group)
        return t.data_ptr(), symm.lookup(t, group)

    found = simulated(run, 4)
    assert all(peers == [address for address, _ in found] for _, peers in found)


def test_other_tensors_are_not() -> None:
    def run(group: Group) -> str:
        symm.empty((64, 64), torch.float32, group)
        with pytest.raises(ArgumentError) as error:
            symm.lookup(torch.empty(2, 3), group, "c")
        return str(error.value)

    assert simulated(run, 2) == [
        f"`c` is not symmetric: the memory of this tensor of shape (2, 3) belongs to rank {rank} alone, so its peers "
        "cannot reach it.\n"
        "  On every rank, allocate it with pk.empty(shape, dtype), or share it once with pk.symmetric(tensor)."
        for rank in range(2)
    ]


def test_in_a_group_of_one_every_tensor_is() -> None:
    t = torch.empty(8)
    assert symm.lookup(t, Group(0, 1, "sim")) == [t.data_ptr()]


def test_ranks_must_ask_for_the_same() -> None:
    def run(group: Group) -> None:
        symm.empty((4, 8 + group.rank), torch.float32, group)

    with pytest.raises(RankError) as error:
        simulated(run, 2)
    assert str(error.value.__cause__) == (
        "the ranks ask for different symmetric memory:\n"
        "  rank 0: pk.empty((4, 8), torch.float32)\n"
        "  rank 1: pk.empty((4, 9), torch.float32)\n"
        "  Every rank allocates the same tensors in the same order."
    )
    assert isinstance(error.value.__cause__, RanksDisagree)


def test_memory_is_reused_only_when_every_rank_dropped_it() -> None:
    def run(group: Group) -> list[int]:
        kept = []
        first, second = (symm.empty((1000,), torch.float32, group) for _ in range(2))
        numbers = [symm.place(t, group)[0] for t in (first, second)]  # type: ignore[index]
        view = second[5:]
        if group.rank == 0:
            del first  # rank 1 still holds it
            kept.append(second)
        else:
            kept.append(first)
            del second  # but not its view
        gc.collect()
        third = symm.empty((999,), torch.float32, group)
        numbers.append(symm.place(third, group)[0])  # type: ignore[index]
        del view, kept
        first = second = third
        gc.collect()
        group.barrier("dropped")
        fourth = symm.empty((1001,), torch.float32, group)
        numbers.append(symm.place(fourth, group)[0])  # type: ignore[index]
        return numbers

    assert simulated(run, 2) == [[0, 1, 2, 0]] * 2


def test_symmetric_shares_an_existing_tensor() -> None:
    def run(group: Group) -> tuple[int, list[int]]:
        whole = torch.zeros(100)
        t = whole[group.rank + 1 :][:50]  # another offset on every rank
        assert symm.symmetric(t, group) is t
        assert symm.symmetric(t, group) is t  # a second time: nothing new
        assert len(symm.heap(group).segments) == 1
        assert symm.place(t[3:], group) == (0, 12)
        with pytest.raises(ArgumentError):
            symm.lookup(whole, group)
        return t.data_ptr(), symm.lookup(t, group)

    found = simulated(run, 3)
    assert all(peers == [address for address, _ in found] for _, peers in found)


# ------------------------------------------------------------------------------------------------------- processes, IPC
def test_ipc_maps_unmaps_and_then_frees(tmp_path: Path) -> None:
    machine = Machine(gpus=2)

    def run(group: Group) -> None:
        t = symm.empty((4, 8), torch.bfloat16, group)
        assert symm.lookup(t, group)[group.rank] == t.data_ptr()
        assert len(set(symm.lookup(t, group))) == 2
        del t
        gc.collect()
        group.close()

    assert as_processes(run, tmp_path, 2, machine) == [None, None]
    assert [e[2] for e in machine.log if e[0] == "allocate"] == [2 << 20] * 2
    kinds = [e[0] for e in machine.log]
    assert kinds.count("unmap") == kinds.count("free") == 2
    assert not machine.freed_while_mapped() and not +machine.mapped


def test_memory_that_a_rank_still_holds_is_freed_with_its_tensor(tmp_path: Path) -> None:
    machine, held = Machine(gpus=2), []

    def run(group: Group) -> None:
        t = symm.empty((4, 8), torch.bfloat16, group)
        if group.rank == 1:
            held.append(t)
        del t
        gc.collect()
        group.close()

    assert as_processes(run, tmp_path, 2, machine) == [None, None]
    kinds = [e[0] for e in machine.log]
    assert kinds.count("unmap") == 2 and kinds.count("free") == 1
    held.pop().fill_(3)
    gc.collect()
    retired.sweep()
    assert [e[0] for e in machine.log].count("free") == 2


def failing(
    fn: Callable[[Group], Any], path: Path, machine: Machine, drivers: list[FakeDriver] | None = None
) -> list[str]:
    errors = as_processes(fn, path, 2, machine, drivers)
    assert all(isinstance(e, PkError) for e in errors), errors
    return [str(e) for e in errors]


def make(group: Group) -> None:
    symm.empty((4, 8), torch.bfloat16, group)


def test_p2p_impossible(tmp_path: Path) -> None:
    machine = Machine(gpus=2, p2p=False)
    first, second = failing(make, tmp_path, machine)
    assert first == (
        "GPU 0 cannot access the memory of GPU 1: the driver reports no peer-to-peer path.\n"
        "  See `nvidia-smi topo -p2p rw`: MIG, some virtual machines and PCIe switches with ACS turn P2P off."
    )
    assert "GPU 1 cannot access the memory of GPU 0" in second
    assert not machine.freed_while_mapped()


def test_ipc_impossible_on_one_rank(tmp_path: Path) -> None:
    machine, broken = Machine(gpus=2), Machine(gpus=2, ipc=False)
    drivers = [FakeDriver(machine), FakeDriver(broken)]
    broken.log, broken.mapped = machine.log, machine.mapped
    first, second = failing(make, tmp_path, machine, drivers)
    assert second.startswith(
        "the memory of rank 0 cannot be mapped through CUDA IPC: cuIpcOpenMemHandle failed: CUDA_ERROR_INVALID_DEVICE: "
        "invalid device ordinal.\n  The driver may report P2P and still refuse IPC"
    )
    assert first == f"mapping pk.empty((4, 8), torch.bfloat16) failed on rank 1: BackendError: {second}"
    kinds = [e[0] for e in machine.log]
    assert kinds.index("unmap") < kinds.index("free") and kinds.count("free") == 2 and not +machine.mapped


def test_no_memory_on_one_rank(tmp_path: Path) -> None:
    machine = Machine(gpus=2)
    drivers = [FakeDriver(machine), FakeDriver(machine)]
    drivers[0].memory_left = 1000
    first, second = failing(make, tmp_path, machine, drivers)
    assert first == "cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY: out of memory."
    assert second.startswith(
        "allocating pk.empty((4, 8), torch.bfloat16) failed on rank 0: BackendError: cuMemAlloc failed"
    )
    assert [e[0] for e in machine.log] == ["allocate", "free"]


def test_expandable_segments(tmp_path: Path) -> None:
    machine = Machine(gpus=2)
    drivers = [FakeDriver(machine), FakeDriver(machine)]
    tensors = [torch.zeros(64), torch.zeros(64)]
    drivers[1].expandable.append((tensors[1].data_ptr(), tensors[1].data_ptr() + 256))
    first, second = failing(lambda group: symm.symmetric(tensors[group.rank], group), tmp_path, machine, drivers)
    assert "expandable_segments:True" in second and "pk.empty" in second
    assert "failed on rank 1" in first and "expandable_segments:True" in first


def test_allocation_during_capture() -> None:
    driver = FakeDriver()
    driver.captured.add(100)
    with pytest.raises(BackendError, match="while a CUDA graph is being captured"):
        symm.empty((4,), torch.float32, Group(0, 1, "cuda", device=0, driver=driver))


def test_a_closed_group_says_so() -> None:
    group = Group(0, 1, "sim")
    group.close()
    with pytest.raises(BackendError, match=r"was closed by pk.finalize\(\)"):
        symm.empty((4,), torch.float32, group)
