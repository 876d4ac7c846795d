"""Every conformance case on the simulator, in every world it is for, under several schedules."""

from __future__ import annotations

import pytest

from tests.conformance.cases import CASES
from tests.conformance.run import failures, run

SEEDS = {2: (0, 1), 3: (0, 2, 3)}
"""Schedules by world size; the others have seed 0."""


@pytest.mark.parametrize("name", CASES)
def test_means_what_numpy_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, found = CASES[name], []
    for world in case.worlds:
        for seed in SEEDS.get(world, (0,)):
            monkeypatch.setenv("PK_SEED", str(seed))
            wrong = failures(case, world, [rank[0] for rank in run([case], world, "sim")])
            found += [f"PK_SEED={seed}: {text}" for text in wrong]
    assert not found, "\n".join(found)
