"""Waiting, lateness, launches, and the mistakes that a simulation reports."""

from __future__ import annotations

import inspect
import pickle
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from pk import errors
from pk.ir import nodes as ir
from pk.ir import ops as table
from pk.ir.order import coordinate
from pk.ir.types import FLOAT, INT, DType, bfloat16, float8_e4m3, float8_e5m2, float16, float32, int32
from pk.sim import SimTensor, machine, ops, simulate
from pk.sim.memory import Access
from pk.sim.schedule import Schedule
from pk.sim.translate import WAITING, translate
from pk.sim.values import STORAGE, decode, encode, poisoned, tensor_float32
from tests.sim.build import (
    RANK,
    WORLD,
    counter,
    do,
    drain,
    edit,
    fill,
    let,
    line,
    loop,
    memory,
    op,
    reduce_scatter,
    registers,
    shared,
    tensor,
    var,
    when,
)


def kernel(compute: ir.Block, **fields: Any) -> ir.Kernel:
    empty: dict[str, Any] = dict.fromkeys(("tensors", "scalars", "signals", "scratch", "pipelines", "prologue"), ())
    return ir.Kernel("k", compute=compute, **{**empty, **fields})


def test_one_meaning_for_each_row_of_the_table() -> None:
    assert sorted(ops.MEANING) == sorted(table.TABLE)
    for name, meaning in ops.MEANING.items():
        assert meaning.__doc__
        assert len(inspect.signature(meaning).parameters) == 2 + len(table.TABLE[name].operands), name
    assert {"wait", "signal", "load_async"} <= WAITING
    loads = {"load_global", "load_scalar", "load_elements", "fetch_add"}  # of a result that may be a peer's
    assert WAITING & {name for name, row in table.TABLE.items() if row.result} <= loads


# ------------------------------------------------------------------------------------------ ops on one rank
def through_registers(
    compute: tuple[ir.Statement, ...], out: ir.Var, types: dict[str, DType], result: DType
) -> ir.Kernel:
    """Load 8x8 tiles ``types`` of the tensors so called, run ``compute`` holding them, and store ``out`` to ``y``."""
    inputs = ir.Pipeline("inputs", 1, tuple((name, shared(8, 8, dtype=t)) for name, t in types.items()))
    output = ir.Pipeline("output", 1, (("y", shared(8, 8, dtype=result)),))
    y = ir.Shared("output", "y", output.tile("y"))
    loads = (do("load_async", ir.Shared("inputs", n, inputs.tile(n)), memory(n, 0, 0)) for n in types)
    roles = (
        ir.Role("loader", (fill("inputs", *loads),)),
        ir.Role("consumer", (drain("inputs", *compute, fill("output", do("store", y, out))),), 1),
        ir.Role("storer", (drain("output", do("store_async", memory("y", 0, 0), y)),)),
    )
    tensors = (*(tensor(n, 2, t) for n, t in types.items()), tensor("y", 2, result))
    return kernel((ir.Tasks((var("t"),), (ir.const(1),), roles),), tensors=tensors, pipelines=(inputs, output))


def held(name: str, dtype: DType, transposed: bool = False) -> ir.Shared:
    return ir.Shared("inputs", name, shared(8, 8, dtype=dtype), transposed)


def evaluate(k: ir.Kernel, result: DType, **given: SimTensor) -> np.ndarray:
    y = SimTensor(poisoned((8, 8), result), result)
    simulate(k, [{**given, "y": y}], sms=1)
    return decode(y.array, result)


def matrix(dtype: DType, seed: int) -> SimTensor:
    x = np.random.default_rng(seed).standard_normal((8, 8), dtype=np.float32) * 3
    return SimTensor(encode(x, dtype), dtype)


@pytest.mark.parametrize("dtype", [bfloat16, float16, float32, float8_e4m3, float8_e5m2], ids=str)
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_mma(dtype: DType, transposed: tuple[bool, bool]) -> None:
    acc = var("acc", registers(8, 8))
    start = ir.Assign(acc, ir.Call("full", (), registers(8, 8), (("value", 2.0),)))
    step = do("mma", acc, held("a", dtype, transposed[0]), held("b", dtype, transposed[1]))
    k = through_registers((start, step, step), acc, {"a": dtype, "b": dtype}, float32)
    a, b = matrix(dtype, 1), matrix(dtype, 2)
    x, y = decode(a.array, dtype), decode(b.array, dtype)
    if dtype is float32:
        x, y = tensor_float32(x), tensor_float32(y)
    x, y = x.T if transposed[0] else x, y.T if transposed[1] else y
    want = 2.0 + 2 * (x.astype(np.float64) @ y)
    assert np.allclose(evaluate(k, float32, a=a, b=b), want, rtol=1e-5, atol=1e-4)


def test_a_copy_of_an_accumulator_keeps_its_value() -> None:
    acc, copy = var("acc", registers(8, 8)), var("copy", registers(8, 8))
    body = (
        ir.Assign(acc, ir.Call("full", (), registers(8, 8), (("value", 1.0),))),
        ir.Assign(copy, acc),
        do("mma", acc, held("a", bfloat16), held("a", bfloat16)),
    )
    got = evaluate(through_registers(body, copy, {"a": bfloat16}, float32), float32, a=matrix(bfloat16, 1))
    assert (got == 1).all()


@pytest.mark.parametrize("symbol", ["+", "-", "*", "/", "min", "max"])
def test_register_arithmetic_rounds_to_its_type(symbol: str) -> None:
    x, y, narrow = var("x", registers(8, 8)), var("y", registers(8, 8)), registers(8, 8, dtype=bfloat16)
    a, b = matrix(float32, 1), matrix(float32, 2)
    plain = {
        "+": a.array + b.array, "-": a.array - b.array, "*": a.array * b.array, "/": a.array / b.array,
        "min": np.minimum(a.array, b.array), "max": np.maximum(a.array, b.array),
    }[symbol]  # fmt: skip
    load = (
        ir.Assign(x, ir.Call("load", (held("a", float32),), registers(8, 8))),
        ir.Assign(y, ir.Call("load", (held("b", float32),), registers(8, 8))),
    )
    z = var("z", registers(8, 8))
    wide = (*load, ir.Assign(z, ir.Binary(symbol, x, y, registers(8, 8))))  # type: ignore[arg-type]
    types = {"a": float32, "b": float32}
    assert np.array_equal(evaluate(through_registers(wide, z, types, float32), float32, a=a, b=b), plain)
    z = var("z", narrow)
    small = (*load, ir.Assign(z, ir.Call("cast", (ir.Binary(symbol, x, y, registers(8, 8)),), narrow)))  # type: ignore[arg-type]
    want = decode(encode(plain, bfloat16), bfloat16)
    assert np.array_equal(evaluate(through_registers(small, z, types, float32), float32, a=a, b=b), want)


def test_scalars_broadcast_and_conditions_are_booleans() -> None:
    x, z = var("x", registers(8, 8)), var("z", registers(8, 8))
    load = ir.Assign(x, ir.Call("load", (held("a", float16),), registers(8, 8)))
    scaled = ir.Binary("*", x, ir.Binary("/", ir.const(1), ir.const(3), FLOAT), registers(8, 8))
    a = matrix(float16, 3)
    got = evaluate(through_registers((load, ir.Assign(z, scaled)), z, {"a": float16}, float32), float32, a=a)
    assert np.array_equal(got, decode(a.array, float16) * np.float32(1 / 3))


def test_integers_stay_integers() -> None:
    kind = registers(8, 8, dtype=int32)
    x = ir.Call("load", (held("a", int32),), kind)
    z = var("z", kind)
    halves = ir.Binary("//", ir.Unary("-", x, kind), ir.const(2), kind)
    a = SimTensor(np.arange(64, dtype=np.int32).reshape(8, 8), int32)
    got = evaluate(through_registers((ir.Assign(z, halves),), z, {"a": int32}, int32), int32, a=a)
    assert np.array_equal(got, -a.array // 2)


def test_what_no_load_filled_is_nan() -> None:
    def forget_b(s: ir.Statement) -> tuple[ir.Statement, ...]:
        return () if isinstance(s, ir.Do) and s.op == "load_async" and held("b", bfloat16) in s.operands else (s,)

    x = var("x", registers(8, 8))
    take = ir.Assign(x, ir.Call("load", (held("b", bfloat16),), registers(8, 8)))
    k = through_registers((take,), x, {"a": bfloat16, "b": bfloat16}, bfloat16)
    a, b = matrix(bfloat16, 1), matrix(bfloat16, 2)
    assert np.array_equal(evaluate(k, bfloat16, a=a, b=b), decode(b.array, bfloat16))
    mutant = replace(k, compute=edit(k.compute, forget_b))
    assert np.isnan(evaluate(mutant, bfloat16, a=a, b=b)).all()


# ---------------------------------------------------------------------------------------------- many ranks
def broadcast() -> ir.Kernel:
    """Every rank stores its 8x8 ``x`` into slot ``rank`` of all ``y``, meets the others, adds it once more."""
    ring = ir.Pipeline("ring", 2, (("x", shared(8, 8)),))
    tile = ir.Shared("ring", "x", ring.tile("x"))
    roles = (
        ir.Role("loader", (loop("i", 0, 2, fill("ring", do("load_async", tile, memory("x", 0, 0)))),)),
        ir.Role(
            "storer",
            (
                drain("ring", do("store_async", memory("y", RANK, 0, 0, everyone=True), tile)),
                do("barrier", counter("met")),
                drain("ring", do("store_add_async", memory("y", RANK, 0, 0, everyone=True), tile)),
            ),
        ),
    )
    return kernel(
        (ir.Tasks((var("t"),), (ir.const(1),), roles),),
        tensors=(tensor("x", 2), tensor("y", 3, parallel=True)),
        signals=(ir.Signals("met", ()),),
        pipelines=(ring,),
    )


@pytest.mark.parametrize("world", [1, 2, 5])
def test_stores_to_everyone_and_barriers(world: int) -> None:
    for seed in range(10):
        args: list[dict] = [
            {"x": matrix(bfloat16, r), "y": SimTensor(poisoned((world, 8, 8), bfloat16), bfloat16)}
            for r in range(world)
        ]
        report = simulate(broadcast(), args, seed=seed)
        want = np.stack([2 * decode(mine["x"].array, bfloat16) for mine in args])
        assert all(np.array_equal(decode(mine["y"].array, bfloat16), want) for mine in args)
        assert (report.stores, report.signals) == (2 * world * world, world * world)
        assert report.messages == 3 * world * (world - 1)


def test_nobody_touches_a_peer_that_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(seed: int) -> None:
        args: list[dict] = [
            {"x": matrix(bfloat16, r), "y": SimTensor(poisoned((3, 8, 8), bfloat16), bfloat16)} for r in range(3)
        ]
        simulate(broadcast(), args, seed=seed)

    def eager(role: machine.Role, site: machine.Site) -> Iterator[machine.Wait]:
        yield from ()

    for seed in range(30):
        run(seed)
    monkeypatch.setattr(machine.Role, "enter", eager)

    def run_all() -> None:
        for seed in range(30):
            run(seed)

    with pytest.raises(AssertionError, match="before it has begun"):
        run_all()


def test_a_team_signals_and_waits() -> None:
    """A token goes round the ranks: rank r may pass it on once it has it."""
    body: ir.Block = (
        when(op("!=", RANK, 0), do("wait", counter("token", 0), 1)),
        when(op("<", RANK, op("-", WORLD, 1)), do("signal", counter("token", 0), op("+", RANK, 1), 1)),
    )
    k = kernel((ir.Tasks((var("t"),), (ir.const(1),), body),), signals=(ir.Signals("token", (ir.const(1),)),))
    report = simulate(k, [{}] * 6, sms=1, seed=3)
    assert (report.signals, report.messages) == (5, 5)
    assert report.waits >= 1


def test_waits_mean_at_least_and_counters_are_per_index() -> None:
    body: ir.Block = (
        loop("i", 0, 5, do("signal", counter("seen", var("i")), RANK, 3)),
        loop("i", 0, 5, do("wait", counter("seen", var("i")), 2)),
    )
    tasks = ir.Tasks((var("t"),), (ir.const(1),), body)
    assert simulate(kernel((tasks,), signals=(ir.Signals("seen", (ir.const(5),)),)), [{}]).signals == 5


def test_tasks_are_dealt_round_robin_and_the_count_runs_on() -> None:
    """Loops of 3, 0 and 5 tasks: block b of n runs numbers b, b + n, ... of all of them together."""
    seen: list[tuple[int, tuple[int, ...]]] = []

    def body(name: str) -> ir.Block:
        there = counter(name, var("m"), var("n"))
        return (do("signal", there, RANK, op("+", op("*", var("m"), 10), var("n"))),)

    loops = [(3, 1), (0, 4), (1, 5)]
    tasks = tuple(
        ir.Tasks((var("m"), var("n")), (ir.const(a), ir.const(b)), body(f"s{i}"), group=ir.const(2))
        for i, (a, b) in enumerate(loops)
    )
    signals = tuple(ir.Signals(f"s{i}", (ir.const(9), ir.const(9))) for i in range(3))
    original = machine.Role.counter

    def record(role: machine.Role, name: str, index: tuple[int, ...], site: machine.Site) -> machine.CounterRef:
        seen.append((role.block, (int(name[1:]), *index)))
        return original(role, name, index, site)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine.Role, "counter", record)
        simulate(kernel(tasks, signals=signals), [{}], sms=3)
    numbered = [(i, *coordinate(t, loops[i], 2)) for i in range(3) for t in range(loops[i][0] * loops[i][1])]
    assert sorted(seen) == sorted((number % 3, task) for number, task in enumerate(numbered))


def test_parameters_and_scratch() -> None:
    """``count`` signals to the next rank, scratch of a declared shape seen as poison."""
    body: ir.Block = (
        ir.Assert(op("==", ir.Dim("work", 1), op("*", ir.Param("count", INT), 2)), "scratch has the declared shape"),
        loop("i", 0, ir.Param("count", INT), do("signal", counter("done"), op("%", op("+", RANK, 1), WORLD), 1)),
        do("wait", counter("done"), ir.Param("count", INT)),
    )
    k = kernel(
        (ir.Tasks((var("t"),), (ir.const(1),), body),),
        scalars=(ir.Param("count", INT),),
        signals=(ir.Signals("done", ()),),
        scratch=(ir.Scratch("work", (WORLD, op("*", ir.Param("count", INT), 2)), float32),),
    )
    assert simulate(k, [{"count": 4}] * 3, sms=1).signals == 12


def test_an_observer_sees_every_access() -> None:
    seen: list[Access] = []
    x, y = matrix(bfloat16, 0), SimTensor(poisoned((1, 8, 8), bfloat16), bfloat16)
    simulate(broadcast(), [{"x": x, "y": y}], sms=1, observer=seen.append)
    kinds = [(a.who.role, a.kind, a.buffer.name) for a in seen]
    assert sorted(kinds) == sorted(
        [("loader", "read", "x")] * 2
        + [("loader", "write", f"ring[{i}].x") for i in range(2)]
        + [("storer", "read", f"ring[{i}].x") for i in range(2)]
        + [("storer", "write", "y"), ("storer", "add", "y")]
    )
    assert len({a.actor for a in seen}) == 6  # two loads, two stores, two landings


# ------------------------------------------------------------------------------------------------- mistakes
def team(*body: ir.Statement, **fields: Any) -> ir.Kernel:
    return kernel((ir.Tasks((var("t"),), (ir.const(1),), body),), **fields)


def failure(k: ir.Kernel, *args: dict) -> errors.SimulationError:
    with pytest.raises(errors.SimulationError) as caught:
        simulate(k, list(args) or [{}], sms=1)
    return caught.value


def test_a_failed_assert() -> None:
    check = ir.Assert(op("<", RANK, 1), "only one rank", line(7, '        assert pk.rank() < 1, "only one rank"'))
    assert str(failure(team(check), {}, {})) == (
        "assertion failed: only one rank\n"
        '  File "user.py", line 7, in kernel\n'
        '    assert pk.rank() < 1, "only one rank"\n'
        "    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
        "  in rank 1, block 0, team at task t=0"
    )


def test_an_index_outside_the_signals() -> None:
    k = team(do("wait", counter("s", 3), 1, span=line(9, "    pk.wait(s, 3, 1)")), signals=(ir.Signals("s", (WORLD,)),))
    assert failure(k).what == "index (3,) is outside `s` of shape (1,)"


def test_a_rank_that_does_not_exist() -> None:
    k = team(
        do("signal", counter("s"), WORLD, 1, span=line(9, "    pk.signal(s, (), W)")), signals=(ir.Signals("s", ()),)
    )
    assert failure(k, {}, {}).what == "rank 2 does not exist: ranks are 0 to 1"


def test_division_by_zero_names_the_line() -> None:
    half = ir.Assign(var("x"), op("//", 1, op("-", WORLD, 1)), line(5, "    x = 1 // (W - 1)"))
    use = ir.Assert(op("==", var("x"), 1), "x is 1")
    assert failure(team(half, use)).span.line == 5
    simulate(team(half, use), [{}, {}], sms=1)


def test_arguments_that_do_not_fit() -> None:
    k = reduce_scatter()
    good = {
        "a": SimTensor(np.zeros((1, 8, 8), np.uint16), bfloat16),
        "b": SimTensor(np.zeros((8, 8), np.uint16), bfloat16),
        "c": SimTensor(np.zeros((8, 8), np.uint16), bfloat16),
    }
    simulate(k, [good])
    for name, wrong, text in (
        ("a", SimTensor(np.zeros((8, 8), np.uint16), bfloat16), "2 dimensions"),
        ("b", SimTensor(np.zeros((8, 8), np.uint16), float16), "is float16"),
        ("b", SimTensor(np.zeros((8, 8), np.float16), bfloat16), "stored as float16"),
        ("c", 3, "must be a SimTensor, not 3"),
    ):
        with pytest.raises(errors.ArgumentError, match=text):
            simulate(k, [{**good, name: wrong}])
    with pytest.raises(errors.ArgumentError, match="takes a, b, c; rank 0 was given a, b"):
        simulate(k, [{name: good[name] for name in ("a", "b")}])
    short = {**good, "c": SimTensor(np.zeros((4, 8), np.uint16), bfloat16)}
    with pytest.raises(errors.RanksDisagree, match=r"tensor `c` .* \(8, 8\) on rank 0 and \(4, 8\) on rank 1"):
        simulate(k, [good, short])
    with pytest.raises(errors.ArgumentError, match="at least one rank"):
        simulate(k, [])


def test_a_communicator_needs_a_second_block() -> None:
    k = kernel((let("x", 1),), communicators=(ir.Communicator(ir.const(2), (let("y", 1),)),))
    with pytest.raises(errors.ArgumentError, match="sms=1"):
        simulate(k, [{}], sms=1)
    assert simulate(k, [{}], sms=2).steps > 0


@pytest.mark.parametrize(("asked", "sms", "blocks"), [(1, 4, 1), (2, 4, 2), (9, 4, 2), (0, 4, 1), (2, 3, 1)])
def test_communicator_blocks(asked: int, sms: int, blocks: int) -> None:
    tasks = (ir.Tasks((var("t"),), (ir.const(100),), (do("signal", counter("s", 0), 0, 1),)),)
    k = kernel((), signals=(ir.Signals("s", (ir.const(1),)),), communicators=(ir.Communicator(ir.const(asked), tasks),))
    used = set()
    original = machine.Role.counter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine.Role, "counter", lambda role, *rest: (used.add(role.block), original(role, *rest))[1])
        simulate(k, [{}], sms=sms)
    assert used == set(range(blocks))


def test_errors_travel() -> None:
    body = do("wait", counter("s"), 1, span=line(9, "    pk.wait(s, (), 1)"))
    with pytest.raises(errors.DeadlockError) as caught:
        simulate(team(body, signals=(ir.Signals("s", ()),)), [{}, {}], sms=3)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.blocked == caught.value.blocked
    assert "rank 0, block 0, team at task t=0: wait of s needs 1, sees 0 (and 1 like it on other blocks)" in str(again)


def test_the_program_text_names_every_statement() -> None:
    k = reduce_scatter()
    storer = translate(k, k.compute, "storer")
    lines = storer.text.splitlines()
    wait = next(i for i, text in enumerate(lines, 1) if "op_wait" in text)
    assert storer.span(wait).line == 30
    assert "op_mma" not in storer.text
    assert "op_load_async" not in storer.text


# ------------------------------------------------------------------------------------------------- schedule
@dataclass(eq=False)
class Ticket:
    ident: int
    rank: int
    block: int
    kind: str

    def step(self) -> None: ...


def test_the_schedule_serves_everyone_once_and_repeats() -> None:
    def order(seed: int) -> tuple[list[int], str]:
        schedule = Schedule(seed, 4, 4)
        rng = random.Random(1)
        for i in range(500):
            schedule.add(Ticket(i, i % 4, i // 4 % 4, rng.choice(["loader", "storer", "land", "signal"])))
        picked = []
        while (ticket := schedule.pick()) is not None:
            picked.append(ticket.ident)
        assert schedule.steps == 500
        return picked, schedule.digest()

    assert sorted(order(0)[0]) == list(range(500))
    assert order(7) == order(7)
    assert order(7) != order(8)


def test_the_schedule_starves() -> None:
    """In some schedule, one rank of two does nothing while the other takes 30 steps in a row."""

    def longest(seed: int) -> int:
        schedule = Schedule(seed, 2, 1)
        tickets = [Ticket(i, i % 2, 0, "loader") for i in range(8)]
        for ticket in tickets:
            schedule.add(ticket)
        best = run = 0
        for _ in range(300):
            ticket = schedule.pick()
            assert isinstance(ticket, Ticket)
            run = run + 1 if ticket.rank == 0 else 0
            best = max(best, run)
            schedule.add(ticket)
        return best

    assert max(longest(seed) for seed in range(10)) >= 30


def test_storage_covers_every_dtype() -> None:
    assert {d.itemsize for d in STORAGE} == {1, 2, 4}
    assert all(d.itemsize == s.itemsize for d, s in STORAGE.items())
