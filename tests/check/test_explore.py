"""The exhaustive explorer: what it finds, that its twin finds the same, how fast it is, and that it can be stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pk.runtime import native
from pk.sim.explore import Failure, explore
from pk.sim.system import Guard, System, at_least, exactly
from tests.check import systems

ROOT = Path(__file__).parent.parent.parent
needs_native = pytest.mark.skipif(native.native() is None, reason=native.reason() or "present")
ENGINES = [pytest.param(True, id="native", marks=needs_native), pytest.param(False, id="twin")]


def holds(guard: Guard, values: list[int], pcs: list[int]) -> bool:
    value = values[guard.variable] if guard.variable >= 0 else pcs[-1 - guard.variable]
    return value == guard.value if guard.exact else value >= guard.value


def replay(failure: Failure) -> None:
    """The trace is a run: every step can be taken, and at its end it fails as it says."""
    system, values, pcs = failure.system, list(failure.system.start), [0] * len(failure.system.actors)
    for at, actor in enumerate(failure.trace):
        step = system.actors[actor].steps[pcs[actor]]
        assert all(holds(g, values, pcs) for g in step.guards)
        if not failure.deadlock and at == len(failure.trace) - 1:
            assert not all(holds(r, values, pcs) for r in step.requires)
            return
        pcs[actor] += 1
        for counter, value in step.adds:
            values[counter] += value
    assert failure.deadlock
    left = [a.steps[pc] for a, pc in zip(system.actors, pcs, strict=True) if pc < len(a.steps)]
    assert left
    assert not any(all(holds(g, values, pcs) for g in step.guards) for step in left)


def brute_force(system: System) -> tuple[set[tuple[int, ...]], int | None, int | None]:
    """Every state, and the lengths of the shortest runs into a deadlock and into a violation: depth first, naively."""
    seen: set[tuple[int, ...]] = set()
    deadlocks, violations = [], []
    stack = [tuple(0 for _ in system.actors)]
    while stack:
        state = stack.pop()
        if state in seen:
            continue
        seen.add(state)
        values, moved, left = system.values(state), False, False
        for actor, pc in enumerate(state):
            if pc == len(system.actors[actor].steps):
                continue
            left, step = True, system.actors[actor].steps[pc]
            if all(holds(g, values, list(state)) for g in step.guards):
                moved = True
                if not all(holds(r, values, list(state)) for r in step.requires):
                    violations.append(sum(state) + 1)
                stack.append((*state[:actor], pc + 1, *state[actor + 1 :]))
        if left and not moved:
            deadlocks.append(sum(state))
    return seen, min(deadlocks, default=None), min(violations, default=None)


# ------------------------------------------------------------------------------------------- planted deadlocks
@pytest.mark.parametrize("engine", ENGINES)
def test_a_barrier_by_equality_deadlocks_and_the_shortest_trace_shows_how(engine: bool) -> None:
    system = systems.barrier(ranks=3, uses=2, monotone=False)
    found = explore(system, native=engine)
    assert found.complete
    assert found.failure is not None
    assert found.failure.deadlock
    replay(found.failure)
    # All three arrive, one goes on and arrives again: the others see four.
    assert len(found.failure.trace) == 5
    assert brute_force(system)[1] == 5
    assert [step.text for _, step in found.failure.steps()].count("signals everyone") == 4
    assert "it is 4" in str(found)
    assert "deadlock, shortest trace, 5 steps" in str(found)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_barrier_that_counts_on_is_right(ranks: int) -> None:
    system = systems.barrier(ranks, uses=3, monotone=True)
    found = explore(system)
    assert found.ok
    assert found.finals == 1
    assert "no deadlock and no violation in any order" in str(found)


def test_a_barrier_by_equality_is_right_when_used_once() -> None:
    assert explore(systems.barrier(3, uses=1, monotone=False)).ok


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("reduce", [False, True])
def test_a_ring_deadlocks_when_nobody_takes_before_it_has_sent(engine: bool, reduce: bool) -> None:
    found = explore(systems.ring(ranks=3, slots=1, tiles=2), native=engine, reduce=reduce)
    assert found.failure is not None
    replay(found.failure)
    assert sorted(found.failure.trace) == [0, 1, 2]  # everyone sends once; then all slots are taken
    assert {actor.name for actor, _, _ in found.failure.stuck()} == {"rank 0", "rank 1", "rank 2"}
    assert explore(systems.ring(ranks=3, slots=2, tiles=2), native=engine, reduce=reduce).ok


@pytest.mark.parametrize("engine", ENGINES)
def test_credits_taken_one_by_one_deadlock(engine: bool) -> None:
    found = explore(systems.credits_one_by_one(senders=3, credits=3, needed=2), native=engine, stop=False)
    assert found.failure is not None
    replay(found.failure)
    assert len(found.failure.trace) == 3  # each holds one
    assert explore(systems.credits_one_by_one(senders=3, credits=4, needed=2), native=engine).ok


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_read_before_the_store_has_landed_is_a_violation_with_its_shortest_run(engine: bool, reduce: bool) -> None:
    found = explore(systems.store_then_signal(released=False), native=engine, reduce=reduce)
    assert found.failure is not None
    assert not found.failure.deadlock
    replay(found.failure)
    assert found.failure.shortest
    assert [a.name for a, _ in found.failure.steps()] == ["writer", "signal", "reader"]
    assert "requires landed >= 1 (it is 0)" in str(found)
    assert explore(systems.store_then_signal(released=True), native=engine, reduce=reduce).ok


# ------------------------------------------------------------------------------------------------ twin and native
def test_the_twin_visits_the_states_that_brute_force_does() -> None:
    kinds = set()
    for seed in range(200):
        system = systems.random_system(seed)
        states, deadlock, violation = brute_force(system)
        every = explore(system, native=False, stop=False)
        assert every.complete
        assert every.states == len(states), seed
        assert (every.deadlocks > 0, every.violations > 0) == (deadlock is not None, violation is not None), seed
        lengths = [len(f.trace) for f in every.failures]
        assert lengths[:1] == sorted(n for n in (deadlock, violation) if n is not None)[:1], seed
        for failure in every.failures:
            replay(failure)
        kinds.add((deadlock is None, violation is None))
    assert len(kinds) == 4  # systems of all kinds were among them


@needs_native
@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("stop", [False, True])
def test_native_and_twin_agree_to_the_last_number(reduce: bool, stop: bool) -> None:
    for seed in range(500):
        system = systems.random_system(seed)
        for limit in (10**6, 7):
            one, two = (explore(system, limit, reduce=reduce, stop=stop, native=engine) for engine in (True, False))
            assert (one.native, two.native) == (True, False)
            for field in ("states", "transitions", "deadlocks", "violations", "finals", "widest", "depth", "complete"):
                assert getattr(one, field) == getattr(two, field), (seed, limit, field)
            assert [(f.deadlock, f.trace) for f in one.failures] == [(f.deadlock, f.trace) for f in two.failures]


def test_reduction_loses_no_deadlock_and_no_violation() -> None:
    fewer = 0
    for seed in range(600):
        system = systems.random_system(seed)
        every, some = (explore(system, reduce=reduce, stop=False) for reduce in (False, True))
        assert every.deadlocks == some.deadlocks, seed
        assert (every.violations > 0) == (some.violations > 0), seed
        assert every.finals == some.finals, seed
        fewer += some.states < every.states
    assert fewer > 60


def test_reduction_takes_one_order_where_counters_only_grow() -> None:
    system = systems.lattice(6, 6)
    assert system.monotone
    found = explore(system, reduce=True)
    assert found.ok
    assert found.states == 6 * 6 + 1
    assert explore(system).states > 1000
    assert not systems.barrier(2, 1, monotone=False).monotone


@needs_native
def test_states_of_many_words() -> None:
    """Actors enough for several 64-bit words."""
    system = System()
    for i in range(20):
        actor = system.actor(f"long {i}")
        gate = system.counter(f"gate {i}")
        for k in range(70):
            actor.step("works", at_least(gate, k), adds={gate: 1})
    last = system.actor("last")
    last.step("waits for everyone", *(a.past() for a in system.actors[:-1]))
    last.step("waits for nobody", exactly(0, -1))
    one, two = (explore(system, reduce=True, native=engine) for engine in (True, False))
    assert one.failure is not None
    assert one.failure.trace == two.failure.trace if two.failure else False
    assert len(one.failure.trace) == 20 * 70 + 1


# ---------------------------------------------------------------------------------------------------- limits
@pytest.mark.parametrize("engine", ENGINES)
def test_a_limit_is_kept_and_said(engine: bool) -> None:
    found = explore(systems.lattice(6, 6), max_states=1000, native=engine)
    assert found.states == 1000
    assert not found.complete
    assert not found.ok
    assert "NOT COMPLETE" in str(found)


def test_what_cannot_be_explored_is_refused() -> None:
    with pytest.raises(ValueError, match="max_states"):
        explore(System(), max_states=0)
    system = System()
    counter = system.counter("big", 2**31 - 10)
    system.actor("a").step("adds", adds={counter: 10})
    with pytest.raises(OverflowError, match="big"):
        explore(system)
    assert explore(System()).ok  # nothing to do


@needs_native
def test_the_native_search_refuses_lists_that_are_no_system() -> None:
    search = native.native().explore  # type: ignore[union-attr]
    flat = systems.lattice(2, 2).flat().lists()
    for change in range(9):
        broken = [list(row) for row in flat]
        broken[change] = [*broken[change], 99]
        with pytest.raises(ValueError, match=r"System|list"):
            search(broken, 100, False, True, True)
    with pytest.raises(ValueError, match="ten lists"):
        search(flat[:3], 100, False, True, True)


def test_the_twin_does_the_work_where_the_extension_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_NATIVE", "0")
    found = explore(systems.barrier(3, 2, monotone=False))
    assert not found.native
    assert found.failure is not None


# ------------------------------------------------------------------------------------------------ speed, stopping
@needs_native
def test_a_million_states_a_second() -> None:
    system = systems.lattice(8, 6)
    best = 0.0
    for _ in range(3):
        began = time.process_time()  # of this process: what else the machine does must not decide
        found = explore(system, native=True)
        best = max(best, found.states / (time.process_time() - began))
    assert found.states == 1_679_617
    assert found.ok
    assert best >= 1e6


@needs_native
def test_other_threads_run_during_the_search() -> None:
    turns, done = [0], threading.Event()

    def count() -> None:
        while not done.wait(0.001):
            turns[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    explore(systems.lattice(8, 6), native=True)
    done.set()
    thread.join()
    assert turns[0] >= 20


@needs_native
def test_control_c_ends_the_search() -> None:
    program = (
        "from pk.sim.explore import explore\n"
        "from tests.check.systems import lattice\n"
        "system = lattice(14, 6)\n"
        "print('begins', flush=True)\n"
        "explore(system, max_states=150_000_000, native=True)\n"
        "print('ended by itself')\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "begins\n"
    time.sleep(1.0)
    began = time.monotonic()
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert "KeyboardInterrupt" in err
    assert not out
    assert time.monotonic() - began < 20
