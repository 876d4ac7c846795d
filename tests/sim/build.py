"""Kernels as IR, written by hand: the simulator's tests do not depend on the front end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pk.ir import nodes as ir
from pk.ir.index import Value, binary, cdiv, lift
from pk.ir.types import INT, DType, Tile, bfloat16, float32

RANK, WORLD = ir.Rank(), ir.World()


def var(name: str, kind: Any = INT) -> ir.Var:
    return ir.Var(name, kind)


def op(symbol: str, x: Value, y: Value) -> ir.Expr:
    return lift(binary(symbol, x, y))


def up(x: Value, y: int) -> ir.Expr:
    return lift(cdiv(x, y))


def let(name: str, value: Value) -> ir.Assign:
    return ir.Assign(var(name), lift(value))


def shared(*shape: int, dtype: DType = bfloat16) -> Tile:
    return Tile(shape, dtype, "shared")


def registers(*shape: int, dtype: DType = float32) -> Tile:
    return Tile(shape, dtype, "register")


def memory(tensor: str, *coord: Value, rank: Value | None = None, everyone: bool = False) -> ir.Memory:
    return ir.Memory(tensor, tuple(map(lift, coord)), None if rank is None else lift(rank), everyone)


def counter(signals: str, *index: Value) -> ir.Signal:
    return ir.Signal(signals, tuple(map(lift, index)))


def line(number: int, text: str) -> ir.Span:
    """The span of the whole of ``text``, as line ``number`` of a user's file."""
    indent = len(text) - len(text.lstrip())
    return ir.Span("user.py", number, indent, number, len(text), "kernel", text)


def do(name: str, *operands: Any, span: ir.Span = ir.NOWHERE, **attrs: Any) -> ir.Do:
    kept = tuple(o if isinstance(o, ir.Memory | ir.Shared | ir.Signal) else lift(o) for o in operands)
    return ir.Do(name, kept, tuple(attrs.items()), span)


def loop(name: str, start: Value, stop: Value, *body: ir.Statement) -> ir.For:
    return ir.For(var(name), lift(start), lift(stop), body)


def when(cond: Value, *then: ir.Statement, orelse: tuple[ir.Statement, ...] = ()) -> ir.If:
    return ir.If(lift(cond), then, orelse)


def fill(pipeline: str, *body: ir.Statement) -> ir.Stage:
    return ir.Stage(pipeline, "fill", body, line(90, f"    with {pipeline}.fill() as s:"))


def drain(pipeline: str, *body: ir.Statement) -> ir.Stage:
    return ir.Stage(pipeline, "drain", body, line(91, f"    with {pipeline}.drain() as s:"))


def peers(body: Callable[[ir.Expr], ir.Statement]) -> tuple[ir.Statement, ...]:
    """``for r in ranks_from(me + 1, world - 1)``."""
    r = op("%", op("+", RANK, op("+", var("step"), 1)), WORLD)
    return (loop("step", 0, op("-", WORLD, 1), body(r)),)


def tensor(name: str, ndim: int, dtype: DType = bfloat16, parallel: bool = False) -> ir.Tensor:
    return ir.Tensor(name, "parallel" if parallel else "global", dtype, ndim)


class Gemm:
    """The halves of a GEMM with tiles BM x BN x BK and an epilogue in pieces of P columns."""

    def __init__(self, dtype: DType, BM: int = 32, BN: int = 64, BK: int = 16, P: int = 32, stages: int = 3) -> None:
        self.dtype, self.BM, self.BN, self.BK, self.P = dtype, BM, BN, BK, P
        self.pipelines = (
            ir.Pipeline("inputs", stages, (("a", shared(BM, BK, dtype=dtype)), ("b", shared(BK, BN, dtype=dtype)))),
            ir.Pipeline("output", 2, (("c", shared(BM, P, dtype=dtype)),)),
        )
        self.acc = var("acc", registers(BM, BN))

    def tile(self, pipeline: str, field: str, pipelines: tuple[ir.Pipeline, ...] = ()) -> ir.Shared:
        found = next(p for p in (*self.pipelines, *pipelines) if p.name == pipeline)
        return ir.Shared(pipeline, field, found.tile(field))

    def feed(
        self, a: str, lead: tuple[Value, ...], m: Value, n: Value, depth: Value, rank: Value | None = None
    ) -> ir.For:
        k = op("*", var("k"), self.BK)
        return loop(
            "k", 0, up(depth, self.BK),
            fill(
                "inputs",
                do("load_async", self.tile("inputs", "a"), memory(a, *lead, op("*", m, self.BM), k, rank=rank)),
                do("load_async", self.tile("inputs", "b"), memory("b", k, op("*", n, self.BN))),
            ),
        )  # fmt: skip

    def accumulate(self, depth: Value) -> tuple[ir.Statement, ...]:
        zeros = ir.Call("full", (), registers(self.BM, self.BN), (("value", 0.0),))
        step = do("mma", self.acc, self.tile("inputs", "a"), self.tile("inputs", "b"))
        return ir.Assign(self.acc, zeros), loop("kk", 0, up(depth, self.BK), drain("inputs", step))

    def piece(self, j: int) -> ir.Call:
        span = (("start", j * self.P), ("stop", (j + 1) * self.P))
        return ir.Call("columns", (self.acc,), registers(self.BM, self.P), span)

    def emit(self) -> tuple[ir.Statement, ...]:
        pieces = range(self.BN // self.P)
        return tuple(fill("output", do("store", self.tile("output", "c"), self.piece(j))) for j in pieces)

    def put(self, how: str, target: Callable[[ir.Expr], ir.Memory], n: Value) -> tuple[ir.Statement, ...]:
        firsts = [op("+", op("*", n, self.BN), j * self.P) for j in range(self.BN // self.P)]
        return tuple(drain("output", do(how, target(first), self.tile("output", "c"))) for first in firsts)


WAIT = line(30, "                pk.wait(begun, (owner, m, n), 1)")
SIGNAL = line(37, "                pk.signal_all(begun, (me, m, n))")


def reduce_scatter(dtype: DType = bfloat16, **tiles: int) -> ir.Kernel:
    """``matmul_reduce_scatter``: a (world, M, K), b (K, N), c parallel (M, N)."""
    g = Gemm(dtype, **tiles)
    owner, m, n, depth = var("owner"), var("m"), var("n"), ir.Dim("a", 2)
    here = op("==", owner, RANK)

    def target(first: ir.Expr) -> ir.Memory:
        return memory("c", op("*", m, g.BM), first, rank=owner)

    body: ir.Block = (
        let("owner", op("%", op("+", RANK, var("turn")), WORLD)),
        ir.Role("loader", (g.feed("a", (owner,), m, n, depth),)),
        ir.Role("consumer", (*g.accumulate(depth), *g.emit()), 2),
        ir.Role(
            "storer",
            (
                when(op("!=", owner, RANK), do("wait", counter("begun", owner, m, n), 1, span=WAIT)),
                when(here, *g.put("store_async", target, n), orelse=g.put("store_add_async", target, n)),
                when(here, do("signal_all", counter("begun", RANK, m, n), 1, span=SIGNAL)),
            ),
        ),
    )
    grid = (WORLD, var("rows"), var("cols"))
    return ir.Kernel(
        "matmul_reduce_scatter",
        (tensor("a", 3, dtype), tensor("b", 2, dtype), tensor("c", 2, dtype, parallel=True)),
        (),
        (ir.Signals("begun", (WORLD, up(ir.Dim("c", 0), g.BM), up(ir.Dim("c", 1), g.BN))),),
        (),
        g.pipelines,
        (let("rows", up(ir.Dim("c", 0), g.BM)), let("cols", up(ir.Dim("c", 1), g.BN))),
        (ir.Tasks((var("turn"), m, n), grid, body),),
    )


def reduce_scatter_ordered(dtype: DType = bfloat16) -> ir.Kernel:
    """``matmul_reduce_scatter_det`` of the gallery: partials in scratch, added by the owner in rank order."""
    g = Gemm(dtype)
    parts = ir.Pipeline("parts", 1, (("c", shared(g.BM, g.P, dtype=dtype)),))
    owner, m, n, depth = var("owner"), var("m"), var("n"), ir.Dim("a", 2)
    here, row, pieces = op("==", owner, RANK), op("*", m, g.BM), range(g.BN // g.P)
    tile = g.tile("parts", "c", (parts,))
    load_parts = tuple(
        s
        for j in pieces
        for s in peers(
            lambda r, j=j: fill(
                "parts", do("load_async", tile, memory("part", r, row, op("+", op("*", n, g.BN), j * g.P), rank=RANK))
            )
        )
    )
    piece = var("piece", registers(g.BM, g.P))
    more = ir.Binary("+", piece, ir.Call("load", (tile,), registers(g.BM, g.P)), registers(g.BM, g.P))
    emit = tuple(
        s
        for j in pieces
        for s in (
            ir.Assign(piece, g.piece(j)),
            when(here, *peers(lambda r: drain("parts", ir.Assign(piece, more)))),
            fill("output", do("store", g.tile("output", "c"), piece)),
        )
    )
    wait = do("wait", counter("arrived", m, n), op("-", WORLD, 1), span=WAIT)
    away = g.put("store_async", lambda first: memory("part", RANK, row, first, rank=owner), n)
    body: ir.Block = (
        let("owner", op("%", op("+", op("+", RANK, 1), var("turn")), WORLD)),
        ir.Role("loader", (g.feed("a", (owner,), m, n, depth), when(here, wait, *load_parts))),
        ir.Role("consumer", (*g.accumulate(depth), *emit), 2),
        ir.Role(
            "storer",
            (
                when(
                    here,
                    *g.put("store_async", lambda first: memory("c", row, first), n),
                    orelse=(*away, do("signal", counter("arrived", m, n), owner, 1, span=SIGNAL)),
                ),
            ),
        ),
    )
    rows, cols = up(ir.Dim("c", 0), g.BM), up(ir.Dim("c", 1), g.BN)
    return ir.Kernel(
        "matmul_reduce_scatter_ordered",
        (tensor("a", 3, dtype), tensor("b", 2, dtype), tensor("c", 2, dtype)),
        (),
        (ir.Signals("arrived", (rows, cols)),),
        (ir.Scratch("part", (WORLD, ir.Dim("c", 0), ir.Dim("c", 1)), dtype),),
        (*g.pipelines, parts),
        (let("rows", rows), let("cols", cols)),
        (ir.Tasks((var("turn"), m, n), (WORLD, var("rows"), var("cols")), body),),
    )


def all_gather(dtype: DType = bfloat16, BC: int = 32) -> ir.Kernel:
    """``all_gather_matmul`` of the gallery: communicators push rows into scratch while compute uses its own."""
    g = Gemm(dtype)
    ring = ir.Pipeline("ring", 3, (("x", shared(g.BM, BC, dtype=dtype)),), "communicator")
    tile = g.tile("ring", "x", (ring,))
    m, n, i, j, own, owner, depth = *map(var, ("m", "n", "i", "j", "own", "owner")), ir.Dim("x", 1)
    row, col = op("*", m, g.BM), op("*", j, BC)
    push = (
        ir.Role("loader", (fill("ring", do("load_async", tile, memory("x", row, col))),)),
        ir.Role(
            "storer",
            (
                drain("ring", *peers(lambda r: do("store_async", memory("full", RANK, row, col, rank=r), tile))),
                *peers(lambda r: do("signal", counter("ready", RANK, m), r, 1, span=SIGNAL)),
            ),
        ),
    )
    past, others = op("-", i, var("rows")), op("-", WORLD, 1)
    turn = op("+", op("+", RANK, 1), op("%", past, others))
    wait = do("wait", counter("ready", owner, m), var("chunks"), span=WAIT)
    away = g.feed("full", (owner,), m, n, depth, rank=RANK)
    body: ir.Block = (
        ir.Assign(own, op("<", i, var("rows"))),
        ir.Assign(m, ir.Select(own, i, op("//", past, others), INT)),
        ir.Assign(owner, ir.Select(own, RANK, op("%", turn, WORLD), INT)),
        ir.Role("loader", (when(own, g.feed("x", (), m, n, depth), orelse=(wait, away)),)),
        ir.Role("consumer", (*g.accumulate(depth), *g.emit()), 2),
        ir.Role("storer", g.put("store_async", lambda first: memory("c", owner, row, first), n)),
    )
    rows, chunks = up(ir.Dim("x", 0), g.BM), up(ir.Dim("x", 1), BC)
    return ir.Kernel(
        "all_gather_matmul",
        (tensor("x", 2, dtype), tensor("b", 2, dtype), tensor("c", 3, dtype)),
        (),
        (ir.Signals("ready", (WORLD, rows)),),
        (ir.Scratch("full", (WORLD, ir.Dim("x", 0), ir.Dim("x", 1)), dtype),),
        (*g.pipelines, ring),
        (let("rows", rows), let("chunks", chunks)),
        (ir.Tasks((i, n), (op("*", var("rows"), WORLD), up(ir.Dim("c", 2), g.BN)), body),),
        (ir.Communicator(ir.const(8), (ir.Tasks((m, j), (var("rows"), var("chunks")), push, ir.const(1)),)),),
    )


def edit(block: ir.Block, change: Callable[[ir.Statement], tuple[ir.Statement, ...]]) -> ir.Block:
    """``block`` with every innermost statement s replaced by ``change(s)``."""
    out: list[ir.Statement] = []
    for s in block:
        if isinstance(s, ir.If):
            out.append(replace(s, then=edit(s.then, change), orelse=edit(s.orelse, change)))
        elif isinstance(s, ir.For | ir.Tasks | ir.Role | ir.Stage):
            out.append(replace(s, body=edit(s.body, change)))
        else:
            out += change(s)
    return tuple(out)


def without(kernel: ir.Kernel, *names: str) -> ir.Kernel:
    """A mutant: ``kernel`` without its ops called ``names``."""

    def drop(s: ir.Statement) -> tuple[ir.Statement, ...]:
        return () if isinstance(s, ir.Do) and s.op in names else (s,)

    communicators = tuple(replace(c, body=edit(c.body, drop)) for c in kernel.communicators)
    changed = replace(kernel, compute=edit(kernel.compute, drop), communicators=communicators)
    assert changed != kernel, f"the kernel has no {names}"
    return changed
