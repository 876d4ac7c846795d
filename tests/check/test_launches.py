"""What a rank that is one launch ahead may touch: every order of events of launches that follow each other."""

from __future__ import annotations

import itertools

import pytest

from pk.sim.explore import explore
from tests.check.launches import launches

KINDS = ("push", "quiet", "pull", "PUSH", "QUIET", "PULL")


def test_two_ranks_in_every_order_of_three_launches() -> None:
    for kinds in itertools.product(KINDS, repeat=3):
        found = explore(launches(2, *kinds), reduce=True)
        assert found.ok, f"{kinds}\n{found}"


@pytest.mark.parametrize(
    "kinds", [("quiet", "push", "pull", "quiet", "push"), ("pull",) * 5, ("quiet",) * 5, ("PULL", "quiet") * 2]
)
def test_counters_come_around(kinds: tuple[str, ...]) -> None:
    found = explore(launches(2, *kinds), reduce=True)
    assert found.ok, found


@pytest.mark.parametrize("kinds", [("push", "quiet"), ("pull", "PULL"), ("quiet", "pull", "quiet")])
def test_three_ranks(kinds: tuple[str, ...]) -> None:
    found = explore(launches(3, *kinds), reduce=True)
    assert found.ok, found


@pytest.mark.parametrize(
    ("kinds", "scheme", "step"),
    [
        (("push", "push"), {"scratch_sets": 1}, "lands"),
        (("pull", "pull"), {"scratch_sets": 1}, "writes its own scratch"),
        (("quiet",) * 3, {"counter_sets": 2}, "signals"),
        (("quiet",) * 4, {"counter_sets": 2}, "signals"),
        (("quiet",) * 3, {"open_waits": False}, "clears the counters of launch 0"),
        (("pull", "quiet", "pull"), {"open_waits": False}, "writes its own scratch"),
    ],
)
def test_what_each_rule_is_for(kinds: tuple[str, ...], scheme: dict[str, int], step: str) -> None:
    """Without it, something goes wrong."""
    found = explore(launches(2, *kinds, **scheme), reduce=True, stop=False)
    assert any(f.steps()[-1][1].text == step for f in found.failures), found


def test_three_sets_of_counters_would_do() -> None:
    """Four are a power of two, so that the number of a launch may wrap around."""
    assert explore(launches(2, *("quiet", "push") * 2, "quiet", counter_sets=3), reduce=True).ok
