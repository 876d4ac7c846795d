"""The race detector: planted races are found, from almost any schedule; what is ordered is not reported."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import pk
from pk import errors
from pk.ir import nodes as ir
from pk.ir.mutate import mutants
from pk.ir.types import DTYPES
from pk.sim import SimTensor, run, simulate
from pk.sim.checker import Checker
from pk.sim.clocks import History
from pk.sim.findings import Finding
from pk.sim.machine import Role
from pk.sim.memory import Buffer
from pk.sim.races import Races
from pk.sim.shadow import Shadow
from pk.sim.values import STORAGE
from pk.simulate import substituted
from tests.check import racing
from tests.conformance.cases import CASES
from tests.conformance.run import run as conform
from tests.sim.test_written import SMALL, written

SEEDS = range(6)
Shape = tuple[int, ...]
Tensors = Mapping[str, tuple[torch.dtype, Shape]]


def build(kernel: Any, tensors: Tensors, **constants: Any) -> ir.Kernel:
    """The IR of a kernel for tensors of these dtypes."""
    specs = {name: pk.spec(dtype, len(shape)) for name, (dtype, shape) in tensors.items()}
    return kernel.specialise(**specs, **constants).ir  # type: ignore[no-any-return]


def operands(tensors: Tensors, world: int, **scalars: int) -> list[dict[str, Any]]:
    """Zeros, and indices that exist."""
    kinds = {name: (DTYPES[str(dtype).removeprefix("torch.")], shape) for name, (dtype, shape) in tensors.items()}
    return [
        {name: SimTensor(np.zeros(shape, STORAGE[kind]), kind) for name, (kind, shape) in kinds.items()} | scalars
        for _ in range(world)
    ]


def races(kernel: ir.Kernel, args: list[dict[str, Any]], seed: int = 0, **how: Any) -> list[Finding]:
    """What the detector finds in one launch."""
    checker = Checker(**how)
    try:
        simulate(kernel, args, sms=3, seed=seed, checker=checker)
    except (errors.SimulationError, errors.DeadlockError):  # a race may lead to worse
        pass
    return [f for f in checker.findings if f.kind == "race"]


def lines(finding: Finding) -> set[str]:
    """The marks ``# [mark]`` of the lines of a finding."""
    return {p.span.text.partition("# [")[2].rstrip("]") for p in finding.places}


B, F, I = torch.bfloat16, torch.float32, torch.int32  # noqa: E741
TILES = {"x": (B, (192, 64)), "y": (B, (192, 64))}
TILE = {"x": (B, (64, 64)), "y": (B, (64, 64))}
SINGLE = {"x": (F, (64, 64)), "y": (F, (64, 64))}
ROWS = {"x": (F, (6, 32)), "y": (F, (1, 32))}
LANES = {"at": (I, (32,)), "y": (I, (32,))}
PLANTED: list[tuple[Any, Tensors, str, set[str]]] = [
    (racing.handover, TILES, "no wait", {"read", "write"}),
    (racing.handover, TILES, "signal first", {"read", "write"}),
    (racing.handover, TILES, "write again", {"again", "read"}),
    (racing.sums, TILE, "no wait", {"add", "write"}),
    (racing.counted, ROWS, "one less", {"write", "read"}),
    (racing.counted, ROWS, "cleared", {"clear", "read"}),
    (racing.by_pipeline, SINGLE, "missing", {"write", "read"}),
    (racing.last_arriver, ROWS, "early", {"write", "read others"}),
    (racing.by_lane, LANES, "signal first", {"write", "read"}),
    (racing.own_store, SINGLE, "unwaited", {"write", "read"}),
]
NAMES = [f"{kernel.name}-{how}".replace(" ", "_") for kernel, _, how, _ in PLANTED]


@pytest.mark.parametrize(("kernel", "tensors", "how", "marks"), PLANTED, ids=NAMES)
def test_planted_race_is_found_from_any_schedule(kernel: Any, tensors: Tensors, how: str, marks: set[str]) -> None:
    planted = build(kernel, tensors, HOW=how)
    pairs = [{frozenset(lines(f)) for f in races(planted, operands(tensors, 3), seed)} for seed in SEEDS]
    # Where who comes first decides what is read, not every schedule has that pair; but every one has some race.
    assert all(pairs)
    assert any(frozenset(marks) in found for found in pairs), pairs


@pytest.mark.parametrize(
    ("kernel", "tensors"), {k.name: (k, t) for k, t, _, _ in PLANTED}.values(), ids=lambda v: getattr(v, "name", "")
)
@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_right_form_has_none(kernel: Any, tensors: Tensors, world: int) -> None:
    right = build(kernel, tensors, HOW="right")
    for seed in SEEDS:
        assert not races(right, operands(tensors, world), seed)


def test_adds_do_not_race_with_each_other() -> None:
    adds = build(racing.sums, TILE, HOW="adds only")
    assert not [f for seed in SEEDS for f in races(adds, operands(TILE, 4), seed)]


def test_a_report_names_both_sides() -> None:
    found = races(build(racing.handover, TILES, HOW="no wait"), operands(TILES, 2), seed=1)[0]
    text = str(found)
    source, first = inspect.getsourcelines(racing.handover.fn)
    read = first + next(i for i, line in enumerate(source) if "[read]" in line)
    write = first + next(i for i, line in enumerate(source) if "[write]" in line)
    assert text.startswith("race: `box` of rank ")
    assert f'racing.py", line {read}, in handover' in text and f'racing.py", line {write}, in handover' in text
    assert "loader, tile i=" in text and "storer, tile i=" in text and "^^^^" in text
    assert "[0:64, 0:64]" in text or "[64:128, 0:64]" in text or "[128:192, 0:64]" in text
    assert "last synchronisation: every rank has begun" in text  # the storer's, before it touched its neighbour
    assert "signal after the write" in text and found.seed == 1


# ------------------------------------------------------------------------------------------------ what is missing
@pytest.mark.parametrize("operator", ["drop-wait", "signal-early", "completion", "scope", "fence"])
def test_weaker_reduce_scatter(operator: str) -> None:
    """The mutation engine's forms of the spine; each of them takes away one edge.  Blocks have several tasks."""
    kernel = written("matmul_reduce_scatter", **SMALL)
    shapes = {"a": (B, (3, 256, 64)), "b": (B, (64, 128)), "c": (B, (256, 128))}
    made = [m for m in mutants(kernel) if m.operator.startswith(operator)]
    assert made
    for mutant in made:
        assert races(mutant.kernel, operands(shapes, 3)), mutant.name


@pytest.mark.parametrize("operator", ["early-fill", "early-drain"])
def test_stage_taken_too_early(operator: str) -> None:
    kernel = written("matmul_reduce_scatter", **SMALL)
    shapes = {"a": (B, (2, 256, 256)), "b": (B, (256, 128)), "c": (B, (256, 128))}
    made = list(mutants(kernel, frozenset({operator})))
    assert made
    for mutant in made:
        found = races(mutant.kernel, operands(shapes, 2))
        assert any(p.stage for f in found for p in f.places), mutant.name
        assert "stage" in found[0].advice


# --------------------------------------------------------------------------------------------- ends of launches
def test_exit_before_peers_finished_reading() -> None:
    kernel = build(racing.pull, TILE)
    assert not races(kernel, operands(TILE, 3))  # the compiler emits exit words
    found = races(kernel, operands(TILE, 3), exit_words=False)
    assert [lines(f) for f in found] == [{"read"}]
    assert "may end" in found[0].message and "still reads it" in found[0].message
    assert not races(build(racing.handover, TILES, HOW="right"), operands(TILES, 3), exit_words=False)


@pytest.mark.parametrize("phases", [(0,), (1, 1), (1, 0), (0, 1)])
def test_launches_that_overlap(phases: tuple[int, ...]) -> None:
    """A rank may begin its next launch while a peer is still in the last one.

    Entry words hold it back: before it touches a peer, and before it writes scratch, which peers may still use.
    """
    kernel = build(racing.by_turns, ROWS)
    assert not races_of_launches(kernel, phases)  # which use two sets of scratch in turn
    with mock.patch.object(run, "early", return_value=False):
        assert not races_of_launches(kernel, phases)
    if phases == (0, 1):
        one_set = property(lambda _: 0, lambda *_: None)
        with mock.patch.object(Races, "_set", one_set, create=True):
            assert [lines(f) for f in races_of_launches(kernel, phases)] == [{"push", "own"}]
        with mock.patch.object(run, "early", return_value=False), mock.patch.object(Role, "reach", only_peers):
            assert [lines(f) for f in races_of_launches(kernel, phases)] == [{"push", "own"}]


def only_peers(self: Role, site: Any, window: Any, written: bool = False) -> Any:
    """``Role.reach`` without what protects scratch."""
    if window.ranks != (self.rank,):
        yield from self.enter(site)


def races_of_launches(kernel: Any, phases: tuple[int, ...]) -> list[Finding]:
    """What one checker finds in launches that follow each other."""
    checker = Checker()
    for phase in phases:
        simulate(kernel, operands(ROWS, 2, phase=phase), checker=checker)
    return [f for f in checker.findings if f.kind == "race"]


# ------------------------------------------------------------------------------------------------ right kernels
def one_case_a_kernel() -> list[str]:
    """The first conformance case of every kernel."""
    first: dict[str, str] = {}
    for name, case in CASES.items():
        first.setdefault(case.kernel.name, name)
    return list(first.values())


@pytest.mark.parametrize("name", one_case_a_kernel())
def test_right_kernels_have_none(name: str) -> None:
    """Every kernel of the conformance suite, in its largest world up to 3."""
    found: list[str] = []

    def by(program: Any, args: list[Any], sms: int, multicast: bool) -> None:
        checker = Checker()
        simulate(program.ir, args, sms=sms, seed=len(name), multicast=multicast, checker=checker)
        found.extend(str(f) for f in checker.findings if f.kind == "race")

    case = CASES[name]
    with substituted(by, everywhere=True):
        conform([case], max(w for w in case.worlds if w <= 3 or w == min(case.worlds)), "sim")
    assert not found, found[0]


# ----------------------------------------------------------------------------------------------------- the parts
def test_a_wait_learns_of_the_first_adds_only() -> None:
    history = History()
    told = [np.eye(3, dtype=np.int32)[i] * (i + 1) for i in range(3)]
    for t in told:
        history.add(1, t, alone=False)
    assert history.reached(0) is None
    assert [list(history.reached(n)) for n in (1, 2, 3)] == [[1, 0, 0], [1, 2, 0], [1, 2, 3]]  # type: ignore[arg-type]
    assert history.reached(4) is None
    assert list(history.all()) == [1, 2, 3]  # type: ignore[arg-type]


def test_windows_that_overlap_are_found() -> None:
    """Against comparing everything with everything, for windows of all sizes and places."""
    rng = np.random.default_rng(0)
    array = np.zeros((40, 50), np.float32)
    shadow = Shadow(Buffer("x", 0, -1, array, DTYPES["float32"]), (0, 1))
    seen: list[Any] = []
    for _ in range(300):
        size = [(1, 1), (8, 8), (16, 4), (3, 50)][rng.integers(4)]
        at = rng.integers(0, 40), rng.integers(0, 50)
        window = tuple((int(a), int(min(a + n, bound))) for a, n, bound in zip(at, size, array.shape, strict=True))
        if window in shadow.cells:
            continue
        cell = shadow.new(window)
        meets = [w for w in seen if all(max(p[0], q[0]) < min(p[1], q[1]) for p, q in zip(w, window, strict=True))]
        assert sorted(c.window for c in cell.others) == sorted(meets)
        seen.append(window)


def test_nothing_is_paid_without_a_checker() -> None:
    """And with one, the schedule and the results are the same."""
    kernel, one, two = build(racing.counted, ROWS, HOW="right"), operands(ROWS, 3), operands(ROWS, 3)
    plain = simulate(kernel, one, seed=5)
    assert plain == simulate(kernel, two, seed=5, checker=Checker())
