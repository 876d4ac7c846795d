"""How ranks meet: threads through a rendezvous, processes through a store; and which group a caller is in."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed

from pk.errors import ArgumentError, BackendError, CompileError, PeerFailed, RanksDisagree
from pk.ir.nodes import Span
from pk.runtime import group as groups
from pk.runtime.group import Group
from pk.runtime.link import Link
from tests.runtime.fake import FakeDriver, Machine
from tests.runtime.ranks import as_processes, links, together


def as_threads(world: int, path: Path) -> list[Group]:
    return groups.threads(world, "sim")


def over_a_store(world: int, path: Path) -> list[Group]:
    return [Group(rank, world, "sim", link=link) for rank, link in enumerate(links(path, world))]


KINDS = pytest.mark.parametrize("kind", [as_threads, over_a_store])


@KINDS
@pytest.mark.parametrize("world", [1, 2, 5])
def test_meet_gives_every_rank_its_result(kind: Callable[[int, Path], list[Group]], world: int, tmp_path: Path) -> None:
    members = kind(world, tmp_path)

    def run(rank: int) -> list[int]:
        work = lambda payloads: [10 * sum(payloads) + r for r in range(world)]  # noqa: E731
        return [members[rank].meet(f"step {i}", rank + i, work) for i in range(3)]

    total = sum(range(world))
    assert together(run, world) == [[10 * (total + world * i) + r for i in range(3)] for r in range(world)]


@KINDS
def test_payloads_come_in_rank_order_and_may_be_tensors(kind: Any, tmp_path: Path) -> None:
    members = kind(3, tmp_path)

    def run(rank: int) -> torch.Tensor:
        time.sleep(0.02 * (2 - rank))
        return members[rank].meet("cat", torch.full((2,), rank), lambda parts: [torch.cat(parts)] * 3)

    for got in together(run, 3):
        assert got.tolist() == [0, 0, 1, 1, 2, 2]


@KINDS
def test_large_payloads_between_processes(kind: Any, tmp_path: Path) -> None:
    members = kind(2, tmp_path)
    big = bytes(range(256)) * 40_000  # more than two chunks
    got = together(lambda rank: members[rank].exchange("big", big if rank else b""), 2)
    assert got == [[b"", big]] * 2


@KINDS
def test_an_exception_reaches_every_rank(kind: Any, tmp_path: Path) -> None:
    members = kind(3, tmp_path)
    span = Span("k.py", 3, 4, 3, 8, "    x = y + z", "k")

    def broken(payloads: list[Any]) -> list[Any]:
        raise CompileError("`y` has no value", span, "Assign it first.")

    errors = together(lambda rank: members[rank].meet("work", rank, broken), 3)
    assert [type(e) for e in errors] == [CompileError] * 3
    assert len({id(e) for e in errors}) == 3
    assert {str(e) for e in errors} == {str(errors[0])}
    assert "    x = y + z" in str(errors[0])


@KINDS
def test_different_keys_name_both(kind: Any, tmp_path: Path) -> None:
    members = kind(3, tmp_path)
    keys = ["launch of f", "launch of g", "launch of f"]
    for error in together(lambda rank: members[rank].meet(keys[rank], rank, lambda p: p), 3):
        if isinstance(error, RanksDisagree):
            assert str(error) == (
                "the ranks do different things at the same point:\n"
                "  ranks 0 and 2: launch of f\n"
                "  rank 1: launch of g\n"
                "  Every rank of the group must make the same calls in the same order."
            )
        else:
            raise AssertionError(error)


@KINDS
def test_a_rank_that_left_releases_the_others_at_once(kind: Any, tmp_path: Path) -> None:
    members = kind(3, tmp_path)
    start = time.monotonic()

    def run(rank: int) -> Any:
        if rank == 2:
            time.sleep(0.1)
            members[rank].leave("raised ValueError")
            return None
        for _ in range(2):  # now, and whenever somebody comes later
            with pytest.raises(PeerFailed) as error:
                members[rank].meet("a sum", rank, lambda p: p)
        return str(error.value)

    assert together(run, 3) == ["rank 2 raised ValueError, so a sum cannot go on."] * 2 + [None]
    assert time.monotonic() - start < 3


@KINDS
def test_meetings_are_bounded(kind: Any, tmp_path: Path) -> None:
    members = kind(2, tmp_path)
    start = time.monotonic()
    with pytest.raises(PeerFailed, match="rank 1 did not come to a sum"):
        members[0].meet("a sum", 0, lambda p: p, timeout=0.2)
    assert 0.2 <= time.monotonic() - start < 2


@KINDS
def test_agree_tells_every_rank_who_failed(kind: Any, tmp_path: Path) -> None:
    members = kind(3, tmp_path)
    errors = together(lambda rank: members[rank].agree(rank == 1, f"no room on {rank}"), 3)
    assert {str(e) for e in errors} == {"rank 0: no room on 0\nrank 2: no room on 2"}
    assert all(isinstance(e, BackendError) for e in errors)
    assert together(lambda rank: members[rank].agree(True, ""), 3) == [None] * 3


@KINDS
def test_attempt_raises_everywhere_or_nowhere(kind: Any, tmp_path: Path) -> None:
    members = kind(2, tmp_path)

    def work(rank: int) -> int:
        if rank == 1:
            raise ValueError("broken")
        return rank

    errors = together(lambda rank: members[rank].attempt("mapping", lambda: work(rank)), 2)
    assert isinstance(errors[1], ValueError)
    assert str(errors[0]) == "mapping failed on rank 1: ValueError: broken"
    assert together(lambda rank: members[rank].attempt("mapping", lambda: rank), 2) == [[0, 1]] * 2


def test_a_group_made_again_over_the_same_store_reads_nothing_old(tmp_path: Path) -> None:
    for word in (b"first", b"second"):
        members = over_a_store(2, tmp_path)
        got = together(lambda rank: members[rank].exchange("word", word + b"%d" % rank), 2)  # noqa: B023
        assert got == [[word + b"0", word + b"1"]] * 2


def test_exchanges_leave_a_bounded_number_of_keys(tmp_path: Path) -> None:
    store = distributed.HashStore()
    ends = [Link(store, rank, 2) for rank in range(2)]
    counts = []
    for round_ in range(3):
        together(lambda rank: [ends[rank].exchange("x", b"y", 5) for _ in range(10)], 2)
        counts.append(store.num_keys())
    assert counts[2] <= counts[0] + 2


@pytest.mark.parametrize("world", [0, 9, -1])
def test_world_size(world: int) -> None:
    with pytest.raises(ArgumentError, match=f"a group of {world} ranks: pk runs 1 to 8"):
        groups.threads(world, "sim")


# --------------------------------------------------------------------------------------------------- where ranks are
def test_processes_with_a_gpu_each(tmp_path: Path) -> None:
    members = as_processes(lambda group: (group.sms, group.shared, group.places), tmp_path, 2, Machine(gpus=2))
    assert members == [(132, False, (0, 1))] * 2


def test_processes_that_see_one_gpu_each_are_matched_by_uuid(tmp_path: Path) -> None:
    machine = Machine(gpus=2)
    drivers = [FakeDriver(machine, [0]), FakeDriver(machine, [1])]
    members = as_processes(lambda g: (g.sms, g.shared, g.places), tmp_path, 2, machine, drivers, [0, 0])
    assert members == [(132, False, (0, None)), (132, False, (None, 0))]


def test_processes_may_share_the_only_gpu(tmp_path: Path) -> None:
    members = as_processes(lambda g: (g.sms, g.shared), tmp_path, 3, Machine(gpus=1), devices=[0, 0, 0])
    assert members == [(44, True)] * 3


def test_processes_on_one_gpu_by_mistake(tmp_path: Path) -> None:
    for error in as_processes(lambda group: None, tmp_path, 2, Machine(gpus=8), devices=[0, 0]):
        assert str(error) == (
            "ranks 0 and 1 are all on GPU 0, though there are 8 GPUs for 2 ranks.\n"
            "  Call torch.cuda.set_device(local_rank) first.  To share a GPU on purpose, narrow CUDA_VISIBLE_DEVICES."
        )


def test_ranks_on_two_hosts(tmp_path: Path) -> None:
    ends = links(tmp_path, 2)
    for error in together(lambda rank: groups.processes(ends[rank], "sim", host=f"node{rank}/x"), 2):
        assert str(error).startswith("the ranks of the group differ in their host: rank 0: node0, rank 1: node1.\n")


# ------------------------------------------------------------------------------------------------------------ current
def test_current_without_spawn_is_a_group_of_one() -> None:
    group = groups.current()
    assert (group.rank, group.world_size, group.backend) == (0, 1, "sim")
    assert groups.current() is group
    assert groups.current(group) is group


def test_current_refuses_what_is_no_group() -> None:
    with pytest.raises(ArgumentError, match="is neither a pk group nor a process group"):
        groups.current("world")
