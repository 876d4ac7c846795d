"""Conformance cases and random programs on a GPU, ranks sharing it: against NumPy and against the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from pk import errors
from tests.conformance import cases, random_programs
from tests.conformance.case import GPU_WORLDS, Case
from tests.conformance.run import Results, compile_all, disagreements, failures, run

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(1500)]

BATCH = 40
"""Launches of one spawn: enough that starting ranks costs nothing, few enough that a hang takes little with it."""
SHOWN = 25


def _report(found: list[str]) -> None:
    more = [f"... and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    assert not found, "\n".join([*found[:SHOWN], *more])


@pytest.fixture(scope="module")
def compiled() -> dict[str, str]:
    """What is wrong with the kernels of the cases, by name."""
    return compile_all(cases.program, list(cases.CASES))


@pytest.fixture(scope="module")
def compiled_programs() -> dict[str, str]:
    """The same of the random programs."""
    return compile_all(random_programs.program, [f"program_{i}" for i in range(random_programs.COUNT)])


def _on_gpu(batch: list[Case], world: int) -> tuple[list[Case], Results, list[str]]:
    """Run a batch; after a failure every case alone.  The cases that ran, their results, and what failed."""
    try:
        return batch, run(batch, world, "cuda"), []
    except errors.PkError:
        pass
    ran: list[Case] = []
    wrong: list[str] = []
    results: Results = [[] for _ in range(world)]
    for case in batch:
        try:
            for mine, new in zip(results, run([case], world, "cuda"), strict=True):
                mine += new
            ran.append(case)
        except errors.PkError as error:
            wrong.append(f"{case}, world {world}: {str(error).splitlines()[0]}")
    return ran, results, wrong


def _compare(chosen: Iterable[Case], world: int) -> list[str]:
    found: list[str] = []
    every = list(chosen)
    for start in range(0, len(every), BATCH):
        ran, got, wrong = _on_gpu(every[start : start + BATCH], world)
        found += wrong
        if not ran:
            continue
        simulated = run(ran, world, "sim")
        for i, case in enumerate(ran):
            mine, theirs = [rank[i] for rank in got], [rank[i] for rank in simulated]
            found += [f"NumPy: {text}" for text in failures(case, world, mine)]
            found += [f"simulator: {text}" for text in disagreements(case, world, mine, theirs)]
    return found


def _runnable(told: dict[str, str]) -> Callable[[str], bool]:
    return lambda name: not told.get(name, "").startswith("error")


def test_every_kernel_compiles_without_spills(compiled: dict[str, str]) -> None:
    _report([f"{name}: {text}" for name, text in compiled.items()])


@pytest.mark.parametrize("world", GPU_WORLDS)
def test_cases(world: int, compiled: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_TIMEOUT_S", "10")
    names = filter(_runnable(compiled), cases.CASES)
    _report(_compare((c for c in map(cases.CASES.__getitem__, names) if world in c.worlds), world))


def test_every_program_compiles_without_spills(compiled_programs: dict[str, str]) -> None:
    _report([f"{name}: {text}" for name, text in compiled_programs.items()])


@pytest.mark.parametrize("world", GPU_WORLDS)
def test_random_programs(world: int, compiled_programs: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_TIMEOUT_S", "10")
    names = filter(_runnable(compiled_programs), (f"program_{i}" for i in range(random_programs.COUNT)))
    chosen = (random_programs.case(int(name.removeprefix("program_"))) for name in names)
    _report(_compare((c for c in chosen if world in c.worlds), world))
