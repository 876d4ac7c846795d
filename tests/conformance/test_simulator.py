"""Every conformance case on the simulator, in every world it is for, under several schedules."""

from __future__ import annotations

import pytest

from tests.conformance.cases import CASES
from tests.conformance.run import failures, run

SEEDS = 2
"""Schedules of each case: seed 0 in every world, another one in the worlds of two and three ranks."""


@pytest.mark.parametrize("name", CASES)
def test_means_what_numpy_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, found = CASES[name], []
    for world in case.worlds:
        for seed in range(SEEDS if world in (2, 3) else 1):
            monkeypatch.setenv("PK_SEED", str(seed))
            wrong = failures(case, world, [rank[0] for rank in run([case], world, "sim")])
            found += [f"PK_SEED={seed}: {text}" for text in wrong]
    assert not found, "\n".join(found)
