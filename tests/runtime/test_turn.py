"""Two threads of one rank in calls of one group at once: refused on whichever way they come, never a wrong value."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import pk
import pk.ops
from pk.errors import BackendError, PeerFailed, RankError, RanksDisagree, ThreadsCollide
from pk.runtime import group as groups
from pk.runtime import symm, turn
from pk.runtime.group import Group
from tests.runtime.fake import Machine
from tests.runtime.ranks import as_processes, together
from tests.runtime.test_group import as_threads, over_a_store
from tests.runtime.warm import driver, scaled_copy

KINDS = pytest.mark.parametrize("kind", [as_threads, over_a_store])
Kind = Callable[[int, Path], list[Group]]


def in_a_thread(work: Callable[[], Any], name: str = "other") -> Any:
    """The value of ``work()`` in a thread of that name, or what it raised."""
    found: list[Any] = []

    def body() -> None:
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001
            found.append(error)

    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it hangs"
    return found[0]


@contextmanager
def another_thread_inside(group: Group) -> Iterator[None]:
    """A thread called `first` is in a call of ``group``."""
    inside, leave = threading.Event(), threading.Event()

    def body() -> None:
        try:
            with group.turn:
                inside.set()
                leave.wait(20)
        except ThreadsCollide:
            pass

    thread = threading.Thread(target=body, name="first", daemon=True)
    thread.start()
    assert inside.wait(20)
    try:
        yield
    finally:
        leave.set()
        thread.join(20)


@KINDS
def test_the_second_thread_is_refused_and_the_rank_has_left(kind: Kind, tmp_path: Path) -> None:
    members = kind(2, tmp_path)
    with another_thread_inside(members[0]):
        error = in_a_thread(lambda: members[0].barrier("a step"), "second")
    assert isinstance(error, ThreadsCollide)
    assert "threads `first` and `second` of <pk group: rank 0 of 2, sim> are in calls of it at once" in str(error)
    assert "Call from one thread at a time" in str(error)
    with pytest.raises(ThreadsCollide, match="`first` and `second`"):  # for good
        members[0].barrier("a step")
    for _ in range(2):
        with pytest.raises(PeerFailed) as caught:
            members[1].barrier("a step")
        assert str(caught.value) == (
            "rank 0 was in calls of the group from two threads at once (`first` and `second`), so a step cannot go on."
        )


@KINDS
def test_what_is_exchanged_meanwhile_is_void(kind: Kind, tmp_path: Path) -> None:
    """All ranks have come, one works, and only then the second thread does: nobody gets the result."""
    members = kind(2, tmp_path)
    late: list[Any] = []

    def work(payloads: list[Any]) -> list[Any]:
        late.append(in_a_thread(lambda: members[0].barrier("another step")))
        return payloads

    first, second = together(lambda rank: members[rank].meet("a step", rank, work), 2)
    assert isinstance(late[0], ThreadsCollide)
    assert isinstance(first, ThreadsCollide)
    assert isinstance(second, PeerFailed)
    assert not isinstance(second, ThreadsCollide)


@KINDS
def test_one_thread_after_the_other_may_use_a_group(kind: Kind, tmp_path: Path) -> None:
    members = kind(2, tmp_path)

    def run(rank: int) -> list[Any]:
        return [in_a_thread(lambda: members[rank].exchange("x", b"%d" % rank)) for _ in range(3)]

    assert together(run, 2) == [[[b"0", b"1"]] * 3] * 2


def test_one_call_has_steps(tmp_path: Path) -> None:
    group = over_a_store(1, tmp_path)[0]
    with group.turn.of("f(x)"):
        assert re.fullmatch(r"f\(x\) at (.*/)?test_turn.py:\d+", group.turn.told())
        with group.turn, group.turn.of("what f calls"):
            assert group.turn.told().startswith("f(x)")
        assert isinstance(in_a_thread(group.turn.__enter__), ThreadsCollide)
        with pytest.raises(ThreadsCollide), group.turn:
            pass
        group.turn.misuse = ""
    assert group.turn.told() == ""


def test_the_call_that_was_disturbed_fails_though_its_steps_went_well() -> None:
    group = groups.threads(2, "sim")[0]
    with pytest.raises(ThreadsCollide), group.turn.of("f(x)"):
        assert isinstance(in_a_thread(group.turn.__enter__), ThreadsCollide)
    with pytest.raises(ThreadsCollide), group.turn.of("f(x)"):
        pytest.fail("it has left the group")


# --------------------------------------------------------------------------------------------------------- operators
def _colliding(rank: int) -> None:
    group, eye = groups.current(), torch.eye(64).bfloat16()
    pk.ops.all_gather_matmul(eye, eye)
    if rank == 0:
        with another_thread_inside(group):
            for call in (lambda: pk.ops.all_gather_matmul(eye, eye), lambda: pk.empty((8, 8), torch.bfloat16)):
                with pytest.raises(ThreadsCollide, match=r"threads `first` and `pk-rank-0`"):
                    call()
            pk.ops.matmul(eye, eye)  # meets nobody
    else:
        with pytest.raises(PeerFailed, match=r"two threads at once .* so pk.ops.all_gather_matmul\(a \(64, 64\) bf"):
            pk.ops.all_gather_matmul(eye, eye)
    raise KeyError("so far all is well")


def test_operators() -> None:
    with pytest.raises(RankError, match="so far all is well"):  # closing the group would raise as well
        pk.spawn(_colliding, 2, "sim")


def _two_threads(rank: int) -> dict[int, Any]:
    """Each of two threads of a rank multiplies a matrix of its own."""
    group, found = groups.current(), {}
    start = threading.Barrier(2)

    def work(i: int) -> None:
        a = torch.full((64, 64), float(10 * i + rank)).bfloat16()
        start.wait(20)
        try:
            found[i] = pk.ops.all_gather_matmul(a, torch.eye(64).bfloat16(), group=group)[[0, -1], 0].tolist()
        except BackendError as error:
            found[i] = type(error).__name__

    threads = [threading.Thread(target=work, args=(i,), name=f"worker {i}") for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.parametrize("backend", ["sim", "sim-processes"])
def test_never_the_values_of_another_thread(backend: str) -> None:
    """Most times they collide, which the threads are told, and maybe pk.spawn, when it closes the group."""
    try:
        ranks = pk.spawn(_two_threads, 2, backend)
    except RankError as error:
        assert isinstance(error.__cause__, (ThreadsCollide, PeerFailed))  # noqa: PT017
        return
    for found in ranks:
        assert sorted(found) == [0, 1]
        for i, value in found.items():
            assert value in ([10.0 * i, 10.0 * i + 1], "ThreadsCollide", "PeerFailed")


# ----------------------------------------------------------------------------------------------------------- launches
@pytest.mark.usefixtures("no_compiler", "twin")
def test_launches_that_are_warm(tmp_path: Path) -> None:
    """Of ranks that meet; a rank alone may launch from any threads."""

    def run(group: Group) -> int:
        x, y = torch.zeros(128, 128).bfloat16(), symm.empty((128, 128), torch.bfloat16, group)
        for _ in range(2):
            scaled_copy(x, y, group=group)
        prepared = scaled_copy.prepare(x, y, group=group)
        with another_thread_inside(group):
            for call in (prepared, lambda: scaled_copy(x, y, group=group)):
                with pytest.raises(ThreadsCollide, match="`first`"):
                    call()
        return len(driver(group).launches)

    assert as_processes(run, tmp_path, 2, Machine(gpus=2)) == [2, 2]
    alone = Group(0, 1, "cuda", device=0, driver=as_processes(lambda g: g.driver, tmp_path, 1, Machine())[0])
    x, y = torch.zeros(128, 128).bfloat16(), torch.zeros(128, 128).bfloat16()
    with another_thread_inside(alone):
        for _ in range(2):
            scaled_copy(x, y, group=alone)
    alone.close()


def test_a_process_group_that_two_threads_meet_at_once() -> None:
    process_group = object()

    def make() -> Group:
        late = in_a_thread(lambda: turn.once(process_group, lambda: pytest.fail("at once")), "second")
        assert isinstance(late, ThreadsCollide)
        return Group(0, 2, "sim", rendezvous=groups.threads(2, "sim")[0].rendezvous)

    made = in_a_thread(lambda: turn.once(process_group, make), "first")
    with pytest.raises(ThreadsCollide, match="`second` and `first`"), made.turn:
        pass
    assert turn.once(process_group, lambda: made) is made, "another time"


# ---------------------------------------------------------------------------------------------- ranks that disagree
@KINDS
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_an_exchange_on_one_rank_and_a_meeting_on_the_others(kind: Kind, odd: int, tmp_path: Path) -> None:
    """Both go through the store, in different ways; nobody waits for what does not come."""
    members = kind(3, tmp_path)

    def run(rank: int) -> Any:
        with members[rank].turn.of(f"f({rank == odd})"):
            if rank == odd:
                return members[rank].exchange("an exchange", b"", 15)
            return members[rank].meet("a meeting", rank, lambda told: told, 15)

    for error in together(run, 3):
        assert isinstance(error, RanksDisagree)
        assert f"rank {odd}: f(True) at" in str(error)
        assert "f(False) at" in str(error)
    assert together(lambda rank: members[rank].exchange("next", b"%d" % rank, 15), 3) == [[b"0", b"1", b"2"]] * 3


@KINDS
def test_one_call_that_goes_different_ways(kind: Kind, tmp_path: Path) -> None:
    members = kind(2, tmp_path)

    def run(rank: int) -> Any:
        with members[rank].turn.of("f(x)"):
            return members[rank].barrier(f"step {rank}")

    for error in together(run, 2):
        assert re.search(r"rank 0: f\(x\) at .*: step 0\n  rank 1: f\(x\) at .*: step 1\n", str(error))
