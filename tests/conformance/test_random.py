"""Random programs on the simulator.  A sample by default; all of them with ``CONFORMANCE=full``."""

from __future__ import annotations

import os

import pytest

from tests.conformance.random_programs import COUNT, case
from tests.conformance.run import failures, run

FULL = os.environ.get("CONFORMANCE", "") == "full"
SAMPLE = range(COUNT) if FULL else range(0, COUNT, 8)


@pytest.mark.parametrize("seed", SAMPLE)
def test_random_program(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program = case(seed)
    (world,) = program.worlds
    monkeypatch.setenv("PK_SEED", str(seed))
    found = failures(program, world, [rank[0] for rank in run([program], world, "sim")])
    assert not found, "\n".join(found)
