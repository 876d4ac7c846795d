"""A sample of ``python -m tests.check.sweep``: every example and operator, and some kernels of the tests, is clean."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

import pk
import pk.ops
from tests.check import driver_kernels, racing, sweep
from tests.check.sweep_items import WORLDS, Item, everything, of_program
from tests.conformance import random_programs
from tests.conformance.case import F32, Arguments, blank
from tests.mutants.subject import EXAMPLES, example
from tests.mutants.subjects import random

ITEMS = [item for item in everything() if item.tier < 3]
FIRST = [item for item in ITEMS if item.tier == 0]
LARGE = 3  # ranks of the two kernels that simulate longest
SHARE = 10  # one of so many kernels of the tests is in the sample
ONCE_WRONG = ("all_reduce_1d", "all_reduce_3d", "shifted", "addressed")  # of the conformance suite: tiles beyond a tail

# Every number of ranks has its turn.
SAMPLE = [(item, item.worlds[at % len(item.worlds)]) for at, item in enumerate(FIRST)]
SAMPLE = [(item, min(world, LARGE) if item.name.startswith("08.moe") else world) for item, world in SAMPLE]
SAMPLE += [(item, item.worlds[at % len(item.worlds)]) for at, item in enumerate(ITEMS) if item.tier and at % SHARE == 0]
SAMPLE += [
    (next(item for item in ITEMS if item.name.startswith(f"conformance.{name}")), world)
    for name, world in zip(ONCE_WRONG, (3, 3, 1, 1), strict=True)
]


@pytest.mark.parametrize(("item", "world"), SAMPLE, ids=[f"{item}-{world}" for item, world in SAMPLE])
def test_clean(item: Item, world: int) -> None:
    outcome = sweep.check(item, world, 2)
    assert outcome.clean, sweep.line(outcome)
    assert outcome.schedules == 2


@pytest.mark.parametrize("seed", range(3))
def test_random_programs_are_clean(seed: int) -> None:
    """They may signal what nobody waits for, and are not judged by that."""
    (world,) = random_programs.case(seed).worlds
    outcome = sweep.check(of_program(seed), world, 2)
    assert outcome.clean, sweep.line(outcome)


def test_the_sample_has_every_number_of_ranks() -> None:
    assert {world for _, world in SAMPLE} == set(WORLDS)


def test_every_kernel_of_the_examples_and_operators_is_swept() -> None:
    modules = [example(path.stem) for path in sorted(EXAMPLES.glob("[0-9]*.py"))]
    modules += [importlib.import_module(f"pk.ops.{m.name}") for m in pkgutil.iter_modules(pk.ops.__path__)]
    kernels = {value for module in modules for value in vars(module).values() if isinstance(value, pk.Kernel)}
    assert len(kernels) > 20
    missing = {k.name for k in kernels - {item.kernel for item in FIRST}}
    assert not missing, f"sweep_items.py does not have {missing}"


# ---------------------------------------------------------------------------------------------- of the sweep itself
def _push(rank: int, world: int) -> Arguments:
    return {"x": random(1, 40, key=rank, dtype=F32), "out": blank((1, 40), F32)}


def test_a_wrong_kernel_is_not_clean() -> None:
    outcome = sweep.check(Item("early", driver_kernels.push_early, _push, 0), 2, 2)
    assert not outcome.clean
    assert outcome.findings[0].startswith("race: `slots`")
    assert "early world 2: 2 schedules" in sweep.line(outcome)
    spared = Item("early", driver_kernels.push_early, _push, 0, ignored=frozenset({"race"}))
    assert sweep.check(spared, 2, 2).clean


def test_a_kernel_that_never_ends_is_not_clean() -> None:
    assert not sweep.check(Item("starved", driver_kernels.starved, _push, 0), 2, 1).clean


def test_what_cannot_be_checked_is_not_clean() -> None:
    item = Item("sums", racing.sums, lambda rank, world: {}, 0)
    outcome = sweep.check(item, 2, 1)
    assert outcome.error.startswith("ArgumentError: kernel `sums` is missing")
    assert not outcome.clean


def test_results_are_kept(tmp_path: Path) -> None:
    path, name = tmp_path / "results" / "sweep.jsonl", "04.one_shot"
    assert sweep.sweep([(name, 2), (name, 3)], 1, path, workers=1, minutes=0) == 0  # no time at all
    assert not sweep.kept(path)
    assert sweep.sweep([(name, 2)], 1, path, workers=1, minutes=1) == 0
    known = sweep.kept(path)
    assert list(known) == [(name, 2)]
    assert known[name, 2].clean
    row = sweep.table([item for item in FIRST if item.name == name], known).splitlines()[-1]
    assert row == "| 04.one_shot | - | 1 | - | - | - | - | - | - |"
