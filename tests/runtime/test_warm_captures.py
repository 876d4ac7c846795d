"""Warm calls and what the kernel captured."""

from __future__ import annotations

import pytest

import pk
from pk.runtime.group import Group
from tests.runtime.warm import pair

pytestmark = pytest.mark.usefixtures("no_compiler", "twin")

FACTORS = [2.0]


@pk.kernel
def filled(y: pk.Parallel):
    """Captures FACTORS."""
    ring = pk.pipeline(1, t=pk.shared((64, 64), y.dtype))
    for m, n in pk.tasks(1, 1):
        with pk.consumer():
            with ring.fill() as s:
                pk.store(s.t, pk.full((64, 64), FACTORS[0]))
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(y[pk.rank()], s.t, (m, n))


def test_what_a_kernel_captures_is_compared_by_warm_calls_too(solo: Group, packs: list[str]) -> None:
    _, y = pair()
    for value, expected in ((2.0, 1), (2.0, 1), (3.0, 2), (3.0, 2), (float("3"), 2)):
        FACTORS[0] = value
        filled(y, group=solo)
        assert len(packs) == expected
    assert solo.context is not None and len(solo.context.warm) == 1
    FACTORS[0] = 2.0
