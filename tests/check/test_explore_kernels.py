"""Kernels in every order: what the explorer says of right ones, of planted mistakes, and that the simulator agrees."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import numpy as np
import pytest
import torch

import pk
from pk import errors
from pk.ir import nodes as ir
from pk.ir.mutate import mutants
from pk.ir.ops import TABLE
from pk.sim import SimTensor, exhaustive, order, simulate
from pk.sim.explore import explore, explore_kernel
from pk.sim.skeleton import NotExplorable, skeleton, ways_to_claim
from pk.sim.skeleton_ops import DOES
from pk.sim.values import STORAGE
from tests.check import patterns, stuck
from tests.check.patterns.pattern import Pattern
from tests.kernels import all_gather_matmul, matmul_reduce_scatter, matmul_reduce_scatter_ordered

Shapes = dict[str, tuple[int, ...]]
TILES = {"BM": 128, "BN": 64, "BK": 64, "P": 64, "STAGES": 2}


@pytest.fixture(autouse=True)
def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduction decides nearly everything: the single orders are for the tests that ask for them."""
    monkeypatch.setattr(exhaustive, "FULL", 3000)


def of(kernel: pk.Kernel, shapes: Shapes, **constants: Any) -> ir.Kernel:
    specs = [pk.spec(torch.bfloat16, len(shape)) for shape in shapes.values()]
    return kernel.specialise(*specs, **constants).ir


def found(kernel: pk.Kernel, world: int, sms: int, **shapes: tuple[int, ...]) -> exhaustive.Explored:
    shapes = shapes or {"x": (8, 16)}
    return explore_kernel(of(kernel, shapes), shapes, world, sms)


def spine(name: str, world: int) -> tuple[ir.Kernel, Shapes, int]:
    """A kernel of the repository with small tensors, and the SMs that it needs."""
    if name == "all_gather_matmul":
        shapes = {"x": (128, 128), "b": (128, 64), "c": (world, 128, 64)}
        return of(all_gather_matmul, shapes, **TILES, BC=64, COMM=1), shapes, 2
    kernel = {"reduce_scatter": matmul_reduce_scatter, "ordered": matmul_reduce_scatter_ordered}[name]
    shapes = {"a": (world, 128, 64), "b": (64, 64), "c": (128, 64)}
    return of(kernel, shapes, **TILES), shapes, 1


def outcome(kernel: ir.Kernel, shapes: Shapes, world: int, sms: int, seed: int) -> str:
    """How a simulation ends."""
    args: list[Any] = [
        {t.name: SimTensor(np.zeros(shapes[t.name], STORAGE[t.dtype]), t.dtype) for t in kernel.tensors}
        for _ in range(world)
    ]
    try:
        simulate(kernel, args, sms=sms, seed=seed)
    except errors.DeadlockError:
        return "deadlock"
    except errors.SimulationError:
        return "error"
    return "ends"


# ---------------------------------------------------------------------------------------------- right kernels
@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["reduce_scatter", "ordered", "all_gather_matmul"])
def test_right_kernels_are_right_in_every_order(name: str, world: int) -> None:
    kernel, shapes, sms = spine(name, world)
    result = explore_kernel(kernel, shapes, world, sms)
    assert result.complete
    assert not result.findings
    assert "explored every order" in result.note


def test_each_single_order_and_the_reduction_agree() -> None:
    kernel, shapes, sms = spine("reduce_scatter", 2)
    system = skeleton(kernel, [shapes] * 2, sms).system
    every, some = explore(system), explore(system, reduce=True)
    assert system.monotone
    assert every.ok
    assert some.ok
    assert some.states == sum(len(actor.steps) for actor in system.actors) + 1
    assert every.states == 163_565  # the twin finds as many, only slowly


# ------------------------------------------------------------------------------------------- planted mistakes
@pk.kernel
def ring_without_a_first(x: pk.Global):
    """Everyone waits for the token before passing it on."""
    token = pk.signals(1)
    for i in pk.tasks(1):
        pk.wait(token, 0, 1)
        pk.signal(token, 0, (pk.rank() + 1) % pk.world_size())


@pk.kernel
def ring_with_a_first(x: pk.Global):
    token = pk.signals(1)
    for i in pk.tasks(1):
        if pk.rank() == 0:
            pk.signal(token, 0, 1 % pk.world_size())
            pk.wait(token, 0, 1)
        else:
            pk.wait(token, 0, 1)
            pk.signal(token, 0, (pk.rank() + 1) % pk.world_size())


@pk.kernel
def barrier_of_too_many(x: pk.Global):
    """The second use waits for one arrival more than there are."""
    met = pk.signals(1)
    for i in pk.tasks(1):
        pk.signal_all(met, 0)
        pk.wait(met, 0, pk.world_size())
        pk.signal_all(met, 0)
        pk.wait(met, 0, 2 * pk.world_size() + 1)


@pk.kernel
def barrier_twice(x: pk.Global):
    met = pk.signals(1)
    for i in pk.tasks(1):
        pk.signal_all(met, 0)
        pk.wait(met, 0, pk.world_size())
        pk.signal_all(met, 0)
        pk.wait(met, 0, 2 * pk.world_size())


@pk.kernel
def credits(x: pk.Global, y: pk.Parallel, RETURNED: pk.constexpr = 3):
    """Four tiles go to the next rank, which has two slots and gives back a credit for RETURNED tiles."""
    sent, free = pk.signals(1), pk.signals(1)
    after, before = (pk.rank() + 1) % pk.world_size(), (pk.rank() + pk.world_size() - 1) % pk.world_size()
    for t in pk.tasks(1):
        for i in pk.range(4):
            if i >= 2:
                pk.wait(free, 0, i - 1)
            pk.store(y[after], pk.load(x, (i, 0), (1, 16)), (i % 2, 0))
            pk.signal(sent, 0, after)
            pk.wait(sent, 0, i + 1)
            if i < RETURNED:
                pk.signal(free, 0, before)


@pytest.mark.parametrize("world", [2, 3])
def test_a_ring_in_which_nobody_begins(world: int) -> None:
    (finding,) = found(ring_without_a_first, world, 1).findings
    assert finding.kind == "deadlock"
    assert len(finding.places) == world  # the whole cycle
    assert {place.rank for place in finding.places} == set(range(world))
    assert "waits for token[0] of rank" in finding.places[0].what
    assert len(finding.trace) == 2 * world  # every rank begins, and its one role
    assert not found(ring_with_a_first, world, 1).findings


def test_a_barrier_that_waits_for_one_too_many() -> None:
    (finding,) = found(barrier_of_too_many, 3, 1).findings
    assert finding.kind == "bad-count"
    assert "all that is ever added to met[0]" in finding.message
    assert "is 6," in finding.message
    assert finding.places[0].what.endswith(">= 7 (it is 6)")
    assert finding.places[0].span.text.strip() == "pk.wait(met, 0, 2 * pk.world_size() + 1)"
    assert finding.trace[0] == "rank 0: begins the launch"
    at = finding.places[0].rank
    arrived = [line for line in finding.trace if "arrives at met[0]" in line]
    assert sum(f"of rank {at} (" in line for line in arrived) == 6  # all that ever come, and the three each that
    assert len(arrived) == 6 + 2 * 3  # brought the other ranks to their second
    assert not found(barrier_twice, 3, 1).findings


def test_credits_that_are_not_all_given_back() -> None:
    shapes = {"x": (4, 16), "y": (2, 16)}
    for returned, kinds in ((4, set()), (3, set()), (2, set()), (1, {"bad-count"})):
        result = explore_kernel(of(credits, shapes, RETURNED=returned), shapes, 3, 1)
        assert {f.kind for f in result.findings} == kinds, returned


@pytest.mark.parametrize("name", [n for n, k in vars(stuck).items() if isinstance(k, pk.Kernel)])
def test_what_stands_still_in_the_simulator_stands_still_here(name: str) -> None:
    kernel = getattr(stuck, name)
    shapes: Shapes = dict.fromkeys(kernel.signature.tensors, (64, 64))
    try:
        made = of(kernel, shapes)
    except errors.PkError:
        pytest.skip("takes other tensors")
    for world in (1, 3):
        ends = {outcome(made, shapes, world, 2, seed) for seed in range(2)}
        try:
            kinds = {f.kind for f in explore_kernel(made, shapes, world, 2).findings}
        except NotExplorable:
            pytest.skip("depends on data")
        except errors.SimulationError:
            assert ends == {"error"}
            continue
        assert (ends == {"deadlock"}) == bool(kinds & {"deadlock", "bad-count"}), (world, ends, kinds)


@pytest.mark.parametrize("name", ["reduce_scatter", "all_gather_matmul"])
def test_mutants_end_as_the_explorer_says(name: str) -> None:
    kernel, shapes, sms = spine(name, 2)
    kinds_of: dict[str, set[str]] = {}
    for mutant in mutants(kernel):
        ended = outcome(mutant.kernel, shapes, 2, sms, seed=1)
        try:
            kinds = {f.kind for f in explore_kernel(mutant.kernel, shapes, 2, sms).findings}
        except errors.SimulationError:
            kinds = {"error"}
        kinds_of.setdefault(mutant.operator, set()).update(kinds)
        if not (mutant.operator == "early-fill" and kinds == {"race"}):  # what then happens is anybody's guess
            stopped = bool(kinds & {"deadlock", "bad-count"})
            assert ended == ("error" if kinds == {"error"} else "deadlock" if stopped else "ends"), mutant.description
    assert kinds_of["drop-signal"] == {"deadlock"}
    assert kinds_of["wait-more"] == {"bad-count"}
    for operator in ("drop-wait", "early-drain", "completion", "scope"):
        assert kinds_of[operator] == {"race"}, operator


def test_a_signal_that_overtakes_its_stores_is_shown_with_the_shortest_run() -> None:
    kernel, shapes, sms = spine("reduce_scatter", 2)
    mutant = next(m for m in mutants(kernel) if m.operator == "completion")
    finding = explore_kernel(mutant.kernel, shapes, 2, sms).findings[0]
    assert "a signal can arrive before the stores that it should release" in finding.message
    assert "pk.signal_all(begun, (me, m, n))" in str(finding)
    assert "arrives at begun[0, 0, 0] of rank 0" in finding.trace[-1]
    assert not any("lands" in line for line in finding.trace)
    assert len(finding.trace) == 13  # begins, entries, two loads, the roles up to the signal


ALL = [name for _, name, _ in pkgutil.iter_modules(patterns.__path__) if name != "pattern"]


@pytest.mark.parametrize("name", ALL)
def test_patterns_of_known_bugs(name: str) -> None:
    """Mistakes of order are found without running anything; the fixed forms are clean."""
    pattern = getattr(importlib.import_module(f"tests.check.patterns.{name}"), "PATTERN", None)
    if not isinstance(pattern, Pattern):
        pytest.skip("no pattern of kernels")
    for label, case in pattern.cases.items():
        world, sms = case.options.get("world_size", pattern.world), case.options.get("sms", pattern.sms) or 4
        args = [pattern.arguments(rank, world) for rank in range(world)]
        specs = [pk.spec(x.dtype, x.dim()) if isinstance(x, torch.Tensor) else x for x in args[0]]
        kernel = case.kernel.specialise(*specs).ir
        shapes = [{t.name: tuple(x.shape) for t, x in zip(kernel.tensors, mine, strict=True)} for mine in args]
        expected = {e.kind for e in case.expected}
        try:
            kinds = {f.kind for f in explore_kernel(kernel, shapes, world, sms).findings}
        except NotExplorable:  # depends on data
            continue
        except errors.SimulationError:
            assert expected, label
            continue
        for kind in ("race", "bad-count", "deadlock"):
            assert kind not in expected or kind in kinds, label
        assert not kinds or expected, label


# ----------------------------------------------------------------------------------------------- dynamic tasks
@pk.kernel
def claimed_chain(x: pk.Global, AHEAD: pk.constexpr = 0):
    """Task i waits for task i - 1, or with AHEAD every task but the last waits for the last."""
    done = pk.signals(3)
    for i in pk.tasks(3, dynamic=True):
        if AHEAD:
            if i < 2:
                pk.wait(done, 2, 1)
        else:
            if i > 0:
                pk.wait(done, i - 1, 1)
        pk.signal(done, i, pk.rank())


def test_every_way_to_claim_tasks_is_explored() -> None:
    shapes: Shapes = {"x": (8, 16)}
    chain, ahead = of(claimed_chain, shapes), of(claimed_chain, shapes, AHEAD=1)
    result = explore_kernel(chain, shapes, 1, 2)
    assert not result.findings
    assert "4 of the 4 ways to claim the tasks" in result.note
    assert len(ways_to_claim(chain, [shapes] * 2, 3).assignments) == 5 * 5
    (finding,) = explore_kernel(ahead, shapes, 1, 2).findings  # both blocks wait for what nobody can claim
    assert finding.kind == "deadlock"
    assert not explore_kernel(ahead, shapes, 1, 3).findings
    for sms, ends in ((2, "deadlock"), (3, "ends")):
        assert {outcome(ahead, shapes, 1, sms, seed) for seed in range(3)} == {ends}


def test_too_many_ways_to_claim_are_sampled_and_it_says_so() -> None:
    shapes: Shapes = {"x": (8, 16)}
    ways = ways_to_claim(of(claimed_chain, shapes), [shapes] * 4, 3, limit=10)
    assert (len(ways.assignments), ways.total, ways.complete) == (10, 5**4, False)


def test_a_limit_of_states_is_said() -> None:
    kernel, shapes, sms = spine("reduce_scatter", 2)
    result = explore_kernel(kernel, shapes, 2, sms, max_states=20)
    assert not result.complete
    assert result.note.startswith("NOT COMPLETE")


# --------------------------------------------------------------------------------------------- what depends on data
@pk.kernel
def counted_by_data(n: pk.Global, x: pk.Global):
    ready = pk.signals(1)
    for i in pk.tasks(1):
        for k in pk.range(pk.load(n, (0,))):
            pk.signal(ready, 0, pk.rank())


@pk.kernel
def data_that_does_not_matter(n: pk.Global, x: pk.Global):
    ready = pk.signals(1)
    for i in pk.tasks(1):
        total = 0
        for k in pk.range(pk.load(n, (0,))):
            total = total + k
        pk.store(x, total, (0, 0))
        pk.signal(ready, 0, pk.rank())
        pk.wait(ready, 0, 1)


def test_synchronisation_that_depends_on_data_is_refused() -> None:
    shapes: Shapes = {"n": (4,), "x": (8, 16)}
    specs = [pk.spec(torch.int32, 1), pk.spec(torch.int32, 2)]
    with pytest.raises(NotExplorable, match="how often a loop runs depends on values loaded from a tensor") as refused:
        explore_kernel(counted_by_data.specialise(*specs).ir, shapes, 1, 1)
    assert "for k in pk.range(pk.load(n, (0,))):" in str(refused.value)
    assert not explore_kernel(data_that_does_not_matter.specialise(*specs).ir, shapes, 1, 1).findings


# --------------------------------------------------------------------------------------------------- pk.check
def test_check_exhaustive_reports_a_deadlock_with_its_trace() -> None:
    x = torch.zeros(8, 16)
    check = pk.check(ring_without_a_first, x, world_size=2, schedules=1, sms=1, exhaustive=True)
    assert any(f.kind == "deadlock" and f.trace for f in check.findings)
    right = pk.check(ring_with_a_first, x, world_size=2, schedules=1, sms=1, exhaustive=True)
    assert right.ok
    assert "explored every order" in str(right)


# ------------------------------------------------------------------------------------------------------ order
def test_every_op_with_an_effect_has_one_here() -> None:
    assert set(DOES) == {name for name, row in TABLE.items() if not row.result}


def test_native_and_python_order_events_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, shapes, sms = spine("ordered", 2)
    made = skeleton(kernel, [shapes] * 2, sms)
    events = [(t.actor, t.step) for t in made.touches]
    native = order.Runs(made.system)
    native.learn([None, *events])
    monkeypatch.setenv("PK_NATIVE", "0")
    twin = order.Runs(made.system)
    assert len(events) > 10
    for event in (None, *events):
        assert list(native.without(event)) == list(twin.without(event))
        assert event is None or native.without(event)[event[0]] == event[1]
