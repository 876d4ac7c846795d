"""The mistakes that ``ir.mutate`` makes, one function a kind: each changes one statement of one block in one way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import cast

from pk.ir import nodes as ir
from pk.ir.index import Value, binary, lift
from pk.ir.split import ROLE_ORDER, bodies, expressions, statements, walk
from pk.ir.text import words
from pk.ir.types import Tile

OPERATORS: dict[str, str] = {
    "drop-wait": "a wait is left out (of a barrier: the signal stays)",
    "drop-signal": "a signal is left out (of a barrier: the wait stays)",
    "wait-less": "a wait is content with one less",
    "wait-more": "a wait wants one more",
    "signal-early": "a signal comes before the stores that stand before it",
    "scope": "a signal releases nothing beyond its thread block",
    "completion": "a signal does not wait until the bulk stores before it have landed",
    "fence": "bulk operations are not ordered by the wait before them",
    "early-fill": "a stage is filled before the use before has drained it",
    "early-drain": "a stage is drained before it has been filled",
    "swap-stages": "two neighbouring stages are taken in the other order",
    "swap-tiles": "two tiles of a stage are taken for each other",
    "drop-stage": "one stage is never filled, or never drained",
    "tile-off": "a tile index is one too large",
    "index-off": "a signal's or wait's index is one too large",
    "wrong-owner": "the next rank's memory or counter is taken",
    "one-rank": "what is meant for every rank goes to one",
    "skip-last": "a loop leaves out its last turn, or the last row of tiles",
    "shrink-signals": "an array of signals is one too small",
    "shrink-scratch": "scratch is one row or column too small",
}
"""Name of each operator: what it does."""

SIGNALS = frozenset({"signal", "signal_all", "signal_each"})
WAITS = frozenset({"wait", "wait_each"})
STORES = frozenset({
    "store_async", "store_add_async", "scatter_async", "store_global", "store_scalar", "store_elements", "reduce",
    "all_reduce",
})  # fmt: skip
BULK_STORES = frozenset({"store_async", "store_add_async", "scatter_async"})
BULK = BULK_STORES | {"load_async", "gather_async"}


@dataclass(frozen=True, slots=True)
class Place:
    """A statement in its surroundings: number ``at`` of ``block``.

    ``around``: blocks that lead to it, outermost first, and which of their statements it is in.  ``role`` is empty in
    code that all roles share.
    """

    kernel: ir.Kernel
    block: ir.Block
    at: int
    role: str
    around: tuple[tuple[ir.Block, int], ...]

    @property
    def statement(self) -> ir.Statement:
        """The statement itself."""
        return self.block[self.at]

    def instead(self, description: str, *new: ir.Statement) -> Change:
        """The block with ``new`` in the statement's place."""
        block = (*self.block[: self.at], *new, *self.block[self.at + 1 :])
        return Change(block, self.statement.span, description)

    def text(self, s: ir.Statement | None = None) -> str:
        """The first line of a statement, as the IR prints."""
        return words(self.kernel, s or self.statement)

    def words(self, e: ir.Operand) -> str:
        """An operand as the IR prints."""
        return words(self.kernel, e)

    def ops(self, before: bool) -> frozenset[str]:
        """Names of the ops that the roles of the statement execute before or after it, in this turn or another."""
        found: set[str] = set()
        for block, at in (*self.around, (self.block, self.at)):
            loop = isinstance(block[at], ir.For | ir.While | ir.Tasks)
            near = block[: at + loop] if before else block[at + 1 - loop :]
            found |= set(ops_in(near, self.role))
        return frozenset(found)


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of the block, and what was done, in words."""

    block: ir.Block
    span: ir.Span
    description: str


Edit = Callable[[Place], Iterator[Change]]


def ops_in(block: ir.Block, role: str = "") -> Iterator[str]:
    """Names of the ops in ``block`` that ``role`` (empty: any) executes."""
    for s in block:
        if isinstance(s, ir.Role) and role not in ("", s.kind):
            continue
        if isinstance(s, ir.Do):
            yield s.op
        yield from (e.op for e in walk(expressions(s)) if isinstance(e, ir.Call))
        for inner in bodies(s):
            yield from ops_in(inner, role)


def _plus(e: Value, by: int) -> ir.Expr:
    """``e + by``, on scalars and vectors."""
    if isinstance(e, int | float) or not isinstance(e.type, Tile):
        return lift(binary("+", e, by))
    return ir.Binary("+", e, ir.const(by), e.type, e.span)


def _next_rank(e: ir.Expr) -> ir.Expr:
    if isinstance(e.type, Tile):
        return ir.Binary("%", _plus(e, 1), ir.World(), e.type, e.span)
    return lift(binary("%", binary("+", e, 1), ir.World()))


# --------------------------------------------------------------------------------------------- waits and signals
def _drop_wait(p: Place) -> Iterator[Change]:
    s = p.statement
    if isinstance(s, ir.Do) and s.op in WAITS:
        yield p.instead(f"without `{p.text()}`")
    if isinstance(s, ir.Do) and s.op == "barrier":
        yield p.instead(f"`{p.text()}` only signals", _halves(s)[0])


def _drop_signal(p: Place) -> Iterator[Change]:
    s = p.statement
    if isinstance(s, ir.Do) and s.op in SIGNALS:
        yield p.instead(f"without `{p.text()}`")
    if isinstance(s, ir.Do) and s.op == "barrier":
        yield p.instead(f"`{p.text()}` only waits", _halves(s)[1])


def _halves(s: ir.Do, by: int = 0) -> tuple[ir.Do, ir.Do]:
    """A barrier as what it is made of."""
    signal = ir.Do("signal_all", (s.operands[0], ir.const(1)), (), s.span)
    return signal, ir.Do("wait", (s.operands[0], _plus(ir.World(), by)), (), s.span)


def _wait_for(by: int) -> Edit:
    def edit(p: Place) -> Iterator[Change]:
        s = p.statement
        if isinstance(s, ir.Do) and s.op == "barrier":
            yield p.instead(f"`{p.text()}` waits for world_size {by:+d}", *_halves(s, by))
        if isinstance(s, ir.Do) and s.op in WAITS:
            needed = cast(ir.Expr, s.operands[1])
            if isinstance(needed, ir.Const) and needed.value + by <= 0:
                return  # the same as without
            new = replace(s, operands=(s.operands[0], _plus(needed, by)))
            yield p.instead(f"`{p.text()}` {by:+d}", new)

    return edit


def _signal_early(p: Place) -> Iterator[Change]:
    """The statement that signals (perhaps a branch around the signal) goes before the stores of its block."""
    s = p.statement
    roles = [r for r in ROLE_ORDER if p.role in ("", r) and set(ops_in((s,), r)) & SIGNALS]
    if any(set(ops_in((s,), r)) & STORES for r in roles):
        return
    before = p.block[: p.at]
    needed = {e.name for t in statements((s,)) for e in walk(expressions(t)) if isinstance(e, ir.Var)}
    defined = max((i for i, t in enumerate(before) if _assigns(t) & needed), default=-1)
    stores = [i for i, t in enumerate(before) if i > defined and any(set(ops_in((t,), r)) & STORES for r in roles)]
    if stores:
        at = stores[0]
        block = (*before[:at], s, *before[at:], *p.block[p.at + 1 :])
        yield Change(block, s.span, f"`{p.text()}` before the stores that it follows")


def _assigns(s: ir.Statement) -> set[str]:
    return {t.var.name for t in statements((s,)) if isinstance(t, ir.Assign)}


def _weaken(attr: tuple[str, object], which: frozenset[str], what: str, bulk: frozenset[str] = frozenset()) -> Edit:
    """An attribute on ops ``which``; it concerns bulk operations, if any are given: before signals and after waits."""

    def edit(p: Place) -> Iterator[Change]:
        s = p.statement
        if bulk and not p.ops(before=attr[0] != "fence") & bulk:
            return
        if isinstance(s, ir.Do) and s.op in which:
            yield p.instead(f"`{p.text()}` {what}", replace(s, attrs=(*s.attrs, attr)))
        if isinstance(s, ir.Assign) and isinstance(s.value, ir.Call) and s.value.op in which:
            call = replace(s.value, attrs=(*s.value.attrs, attr))
            yield p.instead(f"`{p.text()}` {what}", replace(s, value=call))

    return edit


# ------------------------------------------------------------------------------------------------------- stages
def _early(mode: str) -> Edit:
    def edit(p: Place) -> Iterator[Change]:
        s = p.statement
        if isinstance(s, ir.Stage) and s.mode == mode:
            if mode == "fill" and any(q.name == s.pipeline and q.over for q in p.kernel.pipelines):
                return  # it waits for nothing
            yield p.instead(f"`{s.pipeline}.{mode}()` of {_contents(p, s)} one use early", replace(s, early=1))

    return edit


def _contents(p: Place, s: ir.Stage) -> str:
    """What is done with a stage, to tell it from others."""
    return f"`{p.text(s.body[0])}`" if s.body else "nothing"


def _swap_stages(p: Place) -> Iterator[Change]:
    s = p.statement
    after = p.block[p.at + 1] if p.at + 1 < len(p.block) else None
    if isinstance(s, ir.Stage) and isinstance(after, ir.Stage):
        block = (*p.block[: p.at], after, s, *p.block[p.at + 2 :])
        what = f"{_contents(p, s)} in `{s.pipeline}` after {_contents(p, after)} in `{after.pipeline}`"
        yield Change(block, s.span, what)


def _swap_tiles(p: Place) -> Iterator[Change]:
    s = p.statement
    if not isinstance(s, ir.Stage):
        return
    tiles = p.kernel.pipeline(s.pipeline).tiles
    for i, (x, kind) in enumerate(tiles):
        for y, other in tiles[i + 1 :]:
            if kind == other:
                other_name = {x: y, y: x}

                def swap(e: ir.Operand, s: ir.Stage = s, names: dict[str, str] = other_name) -> ir.Operand:
                    if isinstance(e, ir.Shared) and e.pipeline == s.pipeline:
                        return replace(e, field=names.get(e.field, e.field))
                    return e

                body = tuple(_mapped(t, swap) for t in s.body)
                yield p.instead(f"`{s.pipeline}.{x}` for `{s.pipeline}.{y}` in {s.mode}()", replace(s, body=body))


def _drop_stage(p: Place) -> Iterator[Change]:
    s = p.statement
    if isinstance(s, ir.Stage):
        yield p.instead(f"without `{s.pipeline}.{s.mode}()` of {_contents(p, s)}")


# ---------------------------------------------------------------------------------------------------- operands
def _mapped(s: ir.Statement, change: Callable[[ir.Operand], ir.Operand]) -> ir.Statement:
    """``s`` with every operand of ops directly in it (and in blocks inside it) changed."""
    if isinstance(s, ir.Do):
        return replace(s, operands=tuple(_everywhere(o, change) for o in s.operands))
    if isinstance(s, ir.Assign):
        return replace(s, value=cast(ir.Expr, _everywhere(s.value, change)))
    if isinstance(s, ir.If):
        return replace(
            s, then=tuple(_mapped(t, change) for t in s.then), orelse=tuple(_mapped(t, change) for t in s.orelse)
        )
    if isinstance(s, ir.For | ir.While | ir.Tasks | ir.Role | ir.Stage):
        return replace(s, body=tuple(_mapped(t, change) for t in s.body))
    return s


def _everywhere(e: ir.Operand, change: Callable[[ir.Operand], ir.Operand]) -> ir.Operand:
    if isinstance(e, ir.Call):
        e = replace(e, operands=tuple(_everywhere(o, change) for o in e.operands))
    elif isinstance(e, ir.Binary):
        e = replace(e, x=cast(ir.Expr, _everywhere(e.x, change)), y=cast(ir.Expr, _everywhere(e.y, change)))
    elif isinstance(e, ir.Unary):
        e = replace(e, x=cast(ir.Expr, _everywhere(e.x, change)))
    return change(e)


Found = tuple[ir.Operand, Callable[[ir.Operand], ir.Statement], "ir.Do | ir.Call"]


def _operands(s: ir.Statement) -> Iterator[Found]:
    """Windows and counters that ops of ``s`` take: each with a function that puts another in its place, and its op."""
    if isinstance(s, ir.Do):
        yield from _of_op(s, lambda new: cast(ir.Do, new))
    elif isinstance(s, ir.Assign):
        yield from _of_expr(s.value, lambda new: replace(s, value=new))


def _of_expr(e: ir.Operand, rebuild: Callable[[ir.Expr], ir.Statement]) -> Iterator[Found]:
    if isinstance(e, ir.Call):
        yield from _of_op(e, lambda new: rebuild(cast(ir.Call, new)))
    elif isinstance(e, ir.Binary):
        yield from _of_expr(e.x, lambda new: rebuild(replace(e, x=new)))
        yield from _of_expr(e.y, lambda new: rebuild(replace(e, y=new)))
    elif isinstance(e, ir.Unary):
        yield from _of_expr(e.x, lambda new: rebuild(replace(e, x=new)))


def _of_op(op: ir.Do | ir.Call, rebuild: Callable[[ir.Do | ir.Call], ir.Statement]) -> Iterator[Found]:
    for i, o in enumerate(op.operands):

        def put(new: ir.Operand, i: int = i) -> ir.Statement:
            return rebuild(replace(op, operands=(*op.operands[:i], new, *op.operands[i + 1 :])))

        if isinstance(o, ir.Memory | ir.Signal):
            yield o, put, op
        elif isinstance(o, ir.Choose):
            yield from _of_choice(o, put, op)
        else:
            yield from _of_expr(o, put)


def _of_choice(o: ir.Choose, put: Callable[[ir.Operand], ir.Statement], op: ir.Do | ir.Call) -> Iterator[Found]:
    for side in ("x", "y"):
        inner = o.x if side == "x" else o.y

        def put_side(new: ir.Operand, side: str = side) -> ir.Statement:
            window = cast("ir.Memory | ir.Choose", new)
            return put(replace(o, x=window) if side == "x" else replace(o, y=window))

        if isinstance(inner, ir.Choose):
            yield from _of_choice(inner, put_side, op)
        else:
            yield inner, put_side, op


def _steps(op: ir.Do | ir.Call, window: ir.Memory) -> tuple[int, ...]:
    """What one tile further is, in each dimension of ``window``, in elements."""
    shape: tuple[int, ...] = ()
    attrs = dict(op.attrs)
    if "shape" in attrs:
        shape = cast("tuple[int, ...]", attrs["shape"])
    elif isinstance(op, ir.Call) and isinstance(op.type, Tile):
        shape = op.type.shape
    else:
        for o in op.operands:
            if isinstance(o, ir.Shared):
                shape = o.shape
            elif not isinstance(o, ir.Memory | ir.Choose | ir.Signal) and isinstance(o.type, Tile):
                shape = o.type.shape
    by_lane = any(isinstance(c.type, Tile) for c in window.coord)
    if by_lane and op.op not in ("gather_async", "scatter_async"):
        shape = ()
    full = ((1,) * len(window.coord) + shape)[-len(window.coord) :]
    return tuple(1 if isinstance(c.type, Tile) else n for c, n in zip(window.coord, full, strict=True))


def _tile_off(p: Place) -> Iterator[Change]:
    for o, put, op in _operands(p.statement):
        if isinstance(o, ir.Memory):
            for axis, step in enumerate(_steps(op, o)):
                coord = (*o.coord[:axis], _plus(o.coord[axis], step), *o.coord[axis + 1 :])
                what = f"`{p.words(o)}` of {op.op}: dimension {axis} {step:+d}"
                yield p.instead(what, put(replace(o, coord=coord)))


def _index_off(p: Place) -> Iterator[Change]:
    for o, put, op in _operands(p.statement):
        if isinstance(o, ir.Signal):
            for axis, entry in enumerate(o.index):
                index = (*o.index[:axis], _plus(entry, 1), *o.index[axis + 1 :])
                yield p.instead(f"`{p.words(o)}` of {op.op}: index {axis} +1", put(replace(o, index=index)))


def _wrong_owner(p: Place) -> Iterator[Change]:
    s = p.statement
    for o, put, op in _operands(s):
        if isinstance(o, ir.Memory) and o.rank is not None and not o.everyone:
            yield p.instead(f"`{p.words(o)}` of {op.op} on the next rank", put(replace(o, rank=_next_rank(o.rank))))
    if isinstance(s, ir.Do) and s.op in ("signal", "signal_each"):
        counter, to, by = s.operands
        new = replace(s, operands=(counter, _next_rank(cast(ir.Expr, to)), by))
        yield p.instead(f"`{p.text()}` to the next rank", new)


def _one_rank(p: Place) -> Iterator[Change]:
    s = p.statement
    for o, put, op in _operands(s):
        if isinstance(o, ir.Memory) and o.everyone and op.op not in ("reduce", "all_reduce"):
            new = replace(o, everyone=False, rank=ir.Rank())
            yield p.instead(f"`{p.words(o)}` of {op.op} on this rank alone", put(new))
    if isinstance(s, ir.Do) and s.op == "signal_all":
        counter, by = s.operands
        yield p.instead(f"`{p.text()}` to this rank alone", ir.Do("signal", (counter, ir.Rank(), by), s.attrs, s.span))


# ---------------------------------------------------------------------------------------- loops and declarations
def _skip_last(p: Place) -> Iterator[Change]:
    s = p.statement
    if isinstance(s, ir.For):
        role = f" of the {p.role}" * bool(p.role)
        yield p.instead(f"`{p.text()}`{role} without its last turn", replace(s, stop=_plus(s.stop, -1)))
    if isinstance(s, ir.Tasks):
        for axis, extent in enumerate(s.extents):
            extents = (*s.extents[:axis], _plus(extent, -1), *s.extents[axis + 1 :])
            yield p.instead(f"`{p.text()}` without the last `{s.vars[axis].name}`", replace(s, extents=extents))


EDITS: dict[str, Edit] = {
    "drop-wait": _drop_wait,
    "drop-signal": _drop_signal,
    "wait-less": _wait_for(-1),
    "wait-more": _wait_for(1),
    "signal-early": _signal_early,
    "scope": _weaken(("scope", "block"), SIGNALS | {"fetch_add"}, "of the block's scope"),
    "completion": _weaken(("completion", False), SIGNALS | {"fetch_add"}, "at once", BULK_STORES),
    "fence": _weaken(("fence", False), WAITS, "without a fence", BULK),
    "early-fill": _early("fill"),
    "early-drain": _early("drain"),
    "swap-stages": _swap_stages,
    "swap-tiles": _swap_tiles,
    "drop-stage": _drop_stage,
    "tile-off": _tile_off,
    "index-off": _index_off,
    "wrong-owner": _wrong_owner,
    "one-rank": _one_rank,
    "skip-last": _skip_last,
}
"""The operators that change a statement."""


def declarations(kernel: ir.Kernel) -> Iterator[tuple[str, ir.Kernel, ir.Span, str]]:
    """The operators that change a declaration: operator, kernel, place and description."""
    for i, s in enumerate(kernel.signals):
        for axis, extent in enumerate(s.shape):
            shape = (*s.shape[:axis], _plus(extent, -1), *s.shape[axis + 1 :])
            made = (*kernel.signals[:i], replace(s, shape=shape), *kernel.signals[i + 1 :])
            yield "shrink-signals", replace(kernel, signals=made), s.span, f"`{s.name}`: dimension {axis} - 1"
    for i, b in enumerate(kernel.scratch):
        for axis, extent in enumerate(b.shape):
            shape = (*b.shape[:axis], _plus(extent, -1), *b.shape[axis + 1 :])
            buffers = (*kernel.scratch[:i], replace(b, shape=shape), *kernel.scratch[i + 1 :])
            yield "shrink-scratch", replace(kernel, scratch=buffers), b.span, f"`{b.name}`: dimension {axis} - 1"
