"""Every conformance case on the simulator, under several schedules; its kernel compiles for a GPU is tested on one."""

from __future__ import annotations

import pytest

from tests.conformance.cases import CASES
from tests.conformance.run import failures, run

RUNS = [(name, world) for name, case in CASES.items() for world in case.worlds]


@pytest.mark.parametrize(("name", "world"), RUNS, ids=[f"{name}-{world}" for name, world in RUNS])
def test_means_what_numpy_says(name: str, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    monkeypatch.setenv("PK_SEED", "0")
    found = failures(case, world, [rank[0] for rank in run([case], world, "sim")])
    assert not found, "\n".join(found)
