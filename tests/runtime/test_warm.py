"""The warm path: what a repeated call costs on the host, and everything after which it must pack again."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pk import errors
from pk.runtime import group as groups
from pk.runtime import records
from pk.runtime.group import Group
from tests.runtime.fake import FakeDriver
from tests.runtime.warm import driver, pair, pushed, scalars, scaled_copy

pytestmark = pytest.mark.usefixtures("no_compiler", "twin")


# ----------------------------------------------------------------------------------------------------------- reuse
def test_the_same_call_is_packed_once(solo: Group, packs: list[str]) -> None:
    x, y = pair()
    for _ in range(3):
        scaled_copy(x, y, group=solo)
    assert packs == ["scaled_copy"]
    datas = [data for _, _, _, data in driver(solo).launches]
    assert len(datas) == 3 and len(set(datas)) == 1


def test_contents_and_views_of_the_same_memory_are_the_same_call(solo: Group, packs: list[str]) -> None:
    x, y = pair()
    scaled_copy(x, y, group=solo)
    x.fill_(3)
    scaled_copy(x.view(128, 128), y[:], group=solo)
    assert len(packs) == 1


CHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "pointer": lambda x, y: ((x.clone(), y), {}),
    "pointer of a Parallel": lambda x, y: ((x, y.clone()), {}),
    "offset": lambda x, y: ((x[8:], y), {}),
    "shape": lambda x, y: ((x[:64], y), {}),
    "strides": lambda x, y: ((x.view(64, 256)[:, :128], y), {}),
    "shape, of as many elements": lambda x, y: ((x.view(64, 256), y), {}),
    "dtype": lambda x, y: ((x.view(torch.float16), y.view(torch.float16)), {}),
    "constexpr": lambda x, y: ((x, y), {"B": 32}),
    "constexpr, through config": lambda x, y: ((x, y), {"config": {"B": 32}}),
    "number of SMs": lambda x, y: ((x, y), {"sms": 8}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_packed_again_and_back_is_not(what: str, solo: Group, packs: list[str]) -> None:
    x, y = pair()
    scaled_copy(x, y, group=solo)
    first = driver(solo).launches[0][1:]
    args, kwargs = CHANGES[what](x, y)
    scaled_copy(*args, **kwargs, group=solo)
    assert len(packs) == 2 and driver(solo).launches[1][1:] != first
    scaled_copy(x, y, group=solo)
    scaled_copy(*args, **kwargs, group=solo)
    assert len(packs) == 2 and [entry[1:] for entry in driver(solo).launches[2:]] == [
        first, driver(solo).launches[1][1:],
    ]  # fmt: skip


def test_memory_that_changes_in_place_is_noticed(solo: Group, packs: list[str]) -> None:
    x, y = pair()
    scaled_copy(x, y, group=solo)
    x.data = torch.ones(64, 128, dtype=torch.bfloat16)
    scaled_copy(x, y, group=solo)
    x.resize_(32, 128)
    scaled_copy(x, y, group=solo)
    assert len(packs) == 3


def test_scalars_are_refilled(solo: Group, packs: list[str]) -> None:
    x, y = pair()
    told = []
    for args, kwargs in (((), {}), ((2,), {}), ((3, 2.5), {}), ((), {"scale": 0.25}), ((), {}), ((-(2**31), -0.0), {})):
        scaled_copy(x, y, *args, **kwargs, group=solo)
        told.append(scalars(solo))
    assert told == [(1, 1.0), (2, 1.0), (3, 2.5), (1, 0.25), (1, 1.0), (-(2**31), 0.0)]
    assert len(packs) == 1
    assert struct.pack("<f", told[-1][1]) == struct.pack("<f", -0.0)


def test_a_warm_scalar_that_does_not_fit_is_refused(solo: Group) -> None:
    x, y = pair()
    scaled_copy(x, y, 1, group=solo)
    with pytest.raises(errors.ArgumentError, match="does not fit int32"):
        scaled_copy(x, y, 2**31, group=solo)
    with pytest.raises(errors.ArgumentError, match="must be an int"):
        scaled_copy(x, y, 2.0, group=solo)
    with pytest.raises(errors.ArgumentError, match="cannot be hashed"):
        scaled_copy(x, y, B=[64], group=solo)
    with pytest.raises(errors.ArgumentError, match="takes 5 arguments"):
        scaled_copy(x, y, 1, 1.0, 64, 5, group=solo)
    assert len(driver(solo).launches) == 1
    scaled_copy(x, y, 4, group=solo)
    assert scalars(solo) == (4, 1.0)


def test_empty_tensors_are_never_taken_for_each_other(solo: Group, packs: list[str]) -> None:
    x, y = pair()
    for _ in range(2):
        scaled_copy(x[:, :0], y[:, :0], group=solo)
    assert solo.context is not None and not solo.context.warm


def test_the_cache_is_bounded(solo: Group) -> None:
    x, y = pair(2100, 64)
    scaled_copy(x[:8], y, group=solo)
    assert solo.context is not None
    for row in range(1030):
        scaled_copy(x[row : row + 8], y, group=solo)
    assert len(solo.context.warm) == 1024 and len(solo.context.cache) == 1024


# -------------------------------------------------------------------------------------------- what must not be cached
def test_streams_are_followed(solo: Group) -> None:
    x, y = pair()
    me = groups.threading.get_ident()
    for stream in (5, 5, 6, 6, 5):
        driver(solo).current_stream[me] = stream
        scaled_copy(x, y, group=solo)
    assert [entry[2] for entry in driver(solo).launches] == [5, 5, 6, 6, 5]
    assert [e for e in driver(solo).machine.log if e[0] == "follow"] == [("follow", 6, 5), ("follow", 5, 6)]


def test_time_limits_are_those_of_the_call(solo: Group, packs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = pair()
    scaled_copy(x, y, group=solo)
    monkeypatch.setenv("PK_TIMEOUT_S", "2.5")
    scaled_copy(x, y, group=solo)
    monkeypatch.setenv("PK_ENTRY_TIMEOUT_S", "7")
    scaled_copy(x, y, group=solo)
    scaled_copy(x, y, group=solo)
    assert len(packs) == 3
    assert struct.pack("<QQ", 2_500_000_000, 7_000_000_000) in driver(solo).launches[-1][3]


def test_the_sanitizer_may_be_switched_between_two_calls(
    solo: Group, packs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = pair()
    for level in ("0", "1", "0", "1"):
        monkeypatch.setenv("PK_SANITIZE", level)
        scaled_copy(x, y, group=solo)
    assert len(packs) == 2
    sizes = [len(data) for _, _, _, data in driver(solo).launches]
    assert sizes[0] == sizes[2] and sizes[1] == sizes[3]
    poisons = [e for e in driver(solo).machine.log if e[0] == "poison"]
    assert len(poisons) == 2  # the scratch of the second and the fourth


def _hang(group: Group) -> None:
    assert group.context is not None
    record = struct.pack("<7I2i5I4i2Q40x", 1, records.COUNTER, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 5, 9)
    driver(group).write(0, group.context.host_page, record)


def test_a_hang_is_raised_by_the_next_warm_call_and_reset_clears_it(solo: Group, packs: list[str]) -> None:
    x, y = pair()
    scaled_copy(x, y, group=solo)
    prepared = scaled_copy.prepare(x, y, group=solo)
    _hang(solo)
    for call in (lambda: scaled_copy(x, y, group=solo), prepared, lambda: scaled_copy(x, y, group=solo)):
        with pytest.raises(errors.HangError):
            call()
    assert len(driver(solo).launches) == 1
    solo.reset()
    scaled_copy(x, y, group=solo)
    prepared()
    assert len(driver(solo).launches) == 3 and len(packs) == 2  # once before and once after the reset


def test_growth_moves_every_launch_to_the_new_counters(solo: Group, packs: list[str]) -> None:
    x, y = pair()
    prepared = scaled_copy.prepare(x, y, group=solo)
    scaled_copy(x, y, group=solo)
    assert solo.context is not None
    old = solo.context._segment()
    big = torch.zeros(8 * 70_000, 8, dtype=torch.bfloat16)
    scaled_copy(big, torch.zeros_like(big), B=8, group=solo)
    new = solo.context._segment()
    assert new is not old and solo.context.outgrown == [old]
    scaled_copy(x, y, group=solo)
    prepared()
    headers = [struct.pack("<Q", s.base) for s in (old, new)]
    for number, (_, _, _, data) in enumerate(driver(solo).launches):
        assert (headers[0] in data, headers[1] in data) == ((True, False) if number == 0 else (False, True))
    assert len(packs) == 3  # before, the large one, after


def test_reset_clears_the_counters_that_captured_launches_still_use(solo: Group) -> None:
    x, y = pair()
    scaled_copy(x, y, group=solo)
    big = torch.zeros(8 * 70_000, 8, dtype=torch.bfloat16)
    scaled_copy(big, torch.zeros_like(big), B=8, group=solo)
    assert solo.context is not None
    (old,) = solo.context.outgrown
    solo.context.abort(0)
    assert driver(solo).read(0, old.base + 256, 4) == b"\1\0\0\0"
    assert solo.context.aborted()
    solo.reset()
    assert driver(solo).read(0, old.base + 256, 4) == bytes(4)
    assert not solo.context.aborted()


def test_a_closed_group_is_not_launched_on() -> None:
    group = Group(0, 1, "cuda", device=0, driver=FakeDriver())
    x, y = pair()
    scaled_copy(x, y, group=group)
    prepared = scaled_copy.prepare(x, y, group=group)
    group.close()
    for call in (prepared, lambda: scaled_copy(x, y, group=group)):
        with pytest.raises(errors.BackendError, match="was closed"):
            call()
    assert len(driver(group).launches) == 1


# --------------------------------------------------------------------------------------------------------------- cost
def test_a_warm_call_is_a_few_python_calls(solo: Group) -> None:
    """Not time, which a busy machine stretches, but work: Python functions entered from call to driver."""
    x, y = pair()
    prepared = scaled_copy.prepare(x, y, group=solo)
    scaled_copy(x, y, group=solo)
    scaled_copy(x, y, 1, group=solo)
    pushed(x, y, group=solo)
    calls = {"no scalars": lambda: pushed(x, y, group=solo), "scalars": lambda: scaled_copy(x, y, 3, group=solo)}
    assert len(entered(calls["no scalars"])) <= 5
    assert len(entered(calls["scalars"])) <= 15
    assert len(entered(prepared)) <= 4


def entered(call: Callable[[], Any]) -> list[str]:
    """The functions of pk that ``call`` enters, in order."""
    found = []

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("pk."):
            found.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found
