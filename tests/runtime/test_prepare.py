"""`kernel.prepare`, graph capture, and how many blocks a launch has."""

from __future__ import annotations

import pytest
import torch

import pk
from pk import errors
from pk.runtime import group as groups
from pk.runtime import module, symm
from pk.runtime.group import Group
from pk.runtime.spawn import run_threads
from tests.runtime.fake import FakeDriver
from tests.runtime.warm import driver, pair, pushed, scaled_copy

pytestmark = pytest.mark.usefixtures("no_compiler", "twin")


# ------------------------------------------------------------------------------------------------------------ capture
def test_capture_records_and_leaves_eager_ordering_alone(solo: Group) -> None:
    x, y = pair()
    fake, me = driver(solo), groups.threading.get_ident()

    def launch(stream: int) -> None:
        fake.current_stream[me] = stream
        scaled_copy(x, y, group=solo)

    launch(5)
    fake.captured = {8, 9}
    for stream in (8, 8, 9, 8):  # a capture that forks to a second stream and comes back
        launch(stream)
    fake.captured = set()
    launch(6)  # after the eager launch on 5, not after what the graph holds
    assert [e[1:] for e in fake.machine.log if e[0] == "follow"] == [(9, 8), (8, 9), (6, 5)]
    assert [entry[2] for entry in fake.launches] == [5, 8, 8, 9, 8, 6]


def test_capture_on_the_stream_of_the_last_launch_then_on_a_fork(solo: Group) -> None:
    x, y = pair()
    fake, me = driver(solo), groups.threading.get_ident()
    for stream, captured in ((5, set()), (5, {5, 7}), (7, {5, 7}), (5, {5, 7}), (5, set()), (6, set())):
        fake.current_stream[me], fake.captured = stream, captured
        scaled_copy(x, y, group=solo)
    assert [e[1:] for e in fake.machine.log if e[0] == "follow"] == [(7, 5), (5, 7), (6, 5)]


def test_what_cannot_happen_during_capture(solo: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = pair()
    fake = driver(solo)
    fake.captured = {100}
    with pytest.raises(errors.BackendError, match=r"first launch needs memory, .*while a CUDA graph is being captured"):
        scaled_copy(x, y, group=solo)
    fake.captured = set()
    scaled_copy(x, y, group=solo)
    fake.captured = {100}
    scaled_copy(x, y, group=solo)
    scaled_copy(x[:64], y[:64], group=solo)  # a new shape that fits needs nothing
    with pytest.raises(errors.BackendError, match=r"bytes of scratch needs .*while a CUDA graph is being captured"):
        scaled_copy(*pair(8192, 8192), group=solo)
    with pytest.raises(errors.BackendError, match=r"pk.synchronize\(\) waits"):
        pk.synchronize(solo)
    monkeypatch.setattr(module, "loaded", lambda binary, entry: False)
    with pytest.raises(errors.BackendError, match="called for the first time and has to be loaded"):
        scaled_copy(x, y, B=32, group=solo)
    scaled_copy(x, y, group=solo)
    assert len(fake.launches) == 4


# ------------------------------------------------------------------------------------------------------------ prepare
def test_prepared_launches_what_the_call_launches(solo: Group, packs: list[str]) -> None:
    x, y = pair()
    prepared = scaled_copy.prepare(x, y, 3, scale=0.5, sms=8, group=solo)
    assert driver(solo).launches == []
    for _ in range(2):
        prepared()
    scaled_copy(x, y, 3, scale=0.5, sms=8, group=solo)
    scaled_copy(x, y, 4, scale=0.75, sms=8, group=solo)
    prepared()
    launches = driver(solo).launches
    assert launches[0] == launches[1] == launches[2] == launches[4] != launches[3]
    assert launches[0][1][0] == 8
    assert len(packs) == 1
    assert "scaled_copy" in repr(prepared)


def test_prepared_keeps_its_tensors(solo: Group) -> None:
    import weakref

    x, y = pair()
    watch = weakref.ref(x)
    prepared = scaled_copy.prepare(x, y, group=solo)
    scaled_copy(x, y, group=solo)
    del x
    assert watch() is not None
    prepared()
    del prepared
    assert watch() is None  # and the cache of warm calls does not


def test_ranks_as_threads_prepare_and_launch_together() -> None:
    fake = FakeDriver()

    def run(rank: int) -> None:
        x, y = torch.zeros(64, 64), symm.empty((64, 64), torch.float32, groups.current())
        prepared = scaled_copy.prepare(x, y, 5)
        prepared()
        scaled_copy(x, y, 6)
        scaled_copy(x, y, 7)
        prepared()
        if rank == 0:  # a prepared call and an ordinary one meet, before and after growth
            scaled_copy(x, y, 5)
        else:
            prepared()
        big = torch.zeros(8 * 70_000, 8, dtype=torch.bfloat16)
        scaled_copy(big, symm.empty((8 * 70_000, 8), torch.bfloat16, groups.current()), B=8)
        if rank == 0:
            scaled_copy(x, y, 5)
        else:
            prepared()

    run_threads(run, (), groups.threads(2, "cuda", [0, 0], fake))
    assert len(fake.launches) == 14


def test_sim_prepares_too() -> None:
    x, y = torch.randn(128, 64).bfloat16(), torch.zeros(128, 64).bfloat16()
    group = Group(0, 1, "sim")
    prepared = scaled_copy.prepare(x, y, group=group, sms=2)
    assert not y.any()
    prepared()
    assert torch.equal(x, y)


# ------------------------------------------------------------------------------------------------------------- blocks
def test_sms_is_checked(solo: Group) -> None:
    x, y = pair()
    for sms in (0, -1, 133, 2.0, True):
        with pytest.raises(errors.ArgumentError, match="this rank may fill 1 to 132 SMs"):
            scaled_copy(x, y, sms=sms, group=solo)
    scaled_copy(x, y, sms=132, group=solo)


def test_a_communicator_needs_a_second_block(solo: Group) -> None:
    with pytest.raises(errors.BackendError) as error:
        pushed(*pair(), sms=1, group=solo)
    assert str(error.value) == (
        "kernel `pushed` has a communicator, which fills SMs of its own: it needs at least 2 blocks, and rank 0 may "
        "launch 1.\n  Pass sms=2 or more."
    )
    pushed(*pair(), sms=2, group=solo)
