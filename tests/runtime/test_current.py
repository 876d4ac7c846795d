"""The group of a caller that names none."""

from __future__ import annotations

import pytest

from pk.runtime import group as groups
from pk.runtime.group import Group
from tests.runtime.fake import FakeDriver


def test_the_group_of_a_caller_without_one_is_looked_up_once_and_again_after_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PK_BACKEND", "sim")
    group = groups.current()
    monkeypatch.setattr(groups, "_alone", lambda: pytest.fail("looked up again"))
    assert groups.current() is group
    looked_up = Group(0, 1, "sim")
    monkeypatch.setattr(groups, "_alone", lambda: looked_up)
    assert groups.current() is group
    monkeypatch.setenv("PK_BACKEND", " sim")  # another text
    assert groups.current() is looked_up
    looked_up.closed = True
    other = Group(0, 1, "sim")
    monkeypatch.setattr(groups, "_alone", lambda: other)
    assert groups.current() is other
    world = Group(0, 1, "sim")  # any object will do for torch's default process group
    monkeypatch.setattr(groups, "_world", lambda: world)
    third = Group(0, 1, "sim")
    monkeypatch.setattr(groups, "_alone", lambda: third)
    assert groups.current() is third
    other.closed = third.closed = True  # nothing of this test is found by the next


def test_a_world_that_is_gone_is_not_taken_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of a process group that was destroyed, as there is nothing where there was none."""

    class World:
        pass

    worlds: list[World] = [World()]
    monkeypatch.setenv("PK_BACKEND", "sim")
    monkeypatch.setattr(groups, "_world", lambda: worlds[0] if worlds else None)
    memo = groups._Memo()
    group = memo.put(Group(0, 1, "sim"))
    assert memo.get() is group
    worlds.clear()
    assert memo.get() is None
    assert memo.put(group) is memo.get() is group, "without a world from the start"


def test_another_device_is_another_group(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = [Group(0, 1, "cuda", device=index, driver=FakeDriver()) for index in (0, 1)]
    now = 0
    monkeypatch.setattr(groups, "_device_reader", lambda: lambda: now)
    monkeypatch.setattr(groups, "_alone", lambda: pair[now])
    assert groups.current() is pair[0]
    now = 1
    assert groups.current() is pair[1]
    now = 0
    assert groups.current() is pair[0]
    for group in pair:
        group.close()
