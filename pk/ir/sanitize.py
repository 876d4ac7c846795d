"""``PK_SANITIZE``: put a ``Bounds`` before every statement that uses an index, a rank or a coordinate.

The language lets tiles lie over and behind the edges of a tensor, and skips negative elements of index vectors; correct
kernels count on both.  Level 1 therefore refuses only what none of them does: a rank, a counter or a scalar's element
that does not exist, and a tile (or an element of a vector) that lies outside by more than tails explain.  Level 2
refuses every tile that lies wholly outside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from pk.ir import nodes as ir
from pk.ir import split
from pk.ir.types import BOOL, Scalar, Tile

BLOCK = 256  # no block of a GEMM is larger: the last one's tiles begin at most so far behind the edge
TURNS = 8  # tiles that ranks take in turn: as many as there may be ranks
COORDINATES = ("column", "row", "depth", "batch")  # counted from the last dimension


def sanitized(kernel: ir.Kernel, level: int = 1) -> ir.Kernel:
    """``kernel``, which has passed :func:`pk.ir.check.check`, with its bounds checked; ``level`` as ``PK_SANITIZE``.

    An index that a ``fetch_add`` makes on the spot is left out: it cannot be looked at without a second add.
    """
    writer = _Writer(level)
    return replace(
        kernel,
        compute=writer.block(kernel.compute),
        communicators=tuple(replace(c, body=writer.block(c.body)) for c in kernel.communicators),
    )


class _Writer:
    """Rewrites the blocks of one kernel."""

    def __init__(self, level: int) -> None:
        self._level = level

    def block(self, block: ir.Block) -> ir.Block:
        """``block`` with bounds before its statements; what has just been checked is not checked again."""
        out: list[ir.Statement] = []
        known: set[ir.Bounds] = set()
        for s in block:
            if not isinstance(s, ir.Do):
                known.clear()
            for b in self._of(s):
                if b not in known:
                    known.add(b)
                    out.append(b)
            out.append(self._inside(s))
        return tuple(out)

    def _inside(self, s: ir.Statement) -> ir.Statement:
        if isinstance(s, ir.If):
            return replace(s, then=self.block(s.then), orelse=self.block(s.orelse))
        if isinstance(s, ir.While):  # the condition is evaluated again after every turn
            return replace(s, body=(*self.block(s.body), *self._of(s)))
        if isinstance(s, ir.For | ir.Tasks | ir.Role | ir.Stage):
            return replace(s, body=self.block(s.body))
        return s

    def _of(self, s: ir.Statement) -> Iterator[ir.Bounds]:
        """The bounds of what ``s`` itself evaluates, innermost first."""
        for e in split.expressions(s):
            for b in self._found(e, None, _tile_of(s, e), s):
                if not _adds(b.index) and (b.guard is None or not _adds(b.guard)):
                    yield replace(b, span=s.span)
        if isinstance(s, ir.Do) and s.op in ("signal", "signal_each"):
            counter = s.operands[0]
            assert isinstance(counter, ir.Signal)
            meant = f"the rank that `{counter.signals}` is signalled on"
            for b in self._rank(s.operands[1], meant, None, [(i, None) for i in counter.index]):
                yield replace(b, span=s.span)

    def _found(
        self, e: ir.Operand, guard: ir.Expr | None, tile: tuple[int, ...], s: ir.Statement
    ) -> Iterator[ir.Bounds]:
        """The bounds under ``e``, which is evaluated where ``guard`` holds; ``tile``: what moves at a window."""
        if isinstance(e, ir.Select | ir.Choose):
            yield from self._found(e.cond, guard, (), s)
            yield from self._found(e.x, _both(guard, e.cond), tile, s)
            yield from self._found(e.y, _both(guard, _not(e.cond)), tile, s)
            return
        if isinstance(e, ir.Binary) and e.op in ("and", "or") and isinstance(e.type, Scalar):
            yield from self._found(e.x, guard, (), s)
            yield from self._found(e.y, _both(guard, e.x if e.op == "and" else _not(e.x)), (), s)
            return
        for inner in split.children(e):
            window = isinstance(e, ir.Call) and isinstance(inner, ir.Memory) and isinstance(e.type, Tile)
            yield from self._found(inner, guard, e.type.shape if window else (), s)  # type: ignore[union-attr]
        if isinstance(e, ir.Memory):
            yield from self._memory(e, _both(guard, _stores(s, e)), tile)
        elif isinstance(e, ir.Signal):
            for axis, index in enumerate(e.index):
                what = f"index {axis} of `{e.signals}`" if len(e.index) > 1 else f"the index of `{e.signals}`"
                yield ir.Bounds(index, ir.Dim(e.signals, axis), what, guard)

    def _memory(self, m: ir.Memory, guard: ir.Expr | None, tile: tuple[int, ...]) -> Iterator[ir.Bounds]:
        if m.rank is not None:
            rows = [(index, ir.Dim(m.tensor, axis)) for axis, index in enumerate(m.coord)]
            yield from self._rank(m.rank, f"the rank whose `{m.tensor}` is meant", guard, rows)
        sizes = (1,) * (len(m.coord) - len(tile)) + tile[-len(m.coord) :]
        for axis, (index, size) in enumerate(zip(m.coord, sizes, strict=True)):
            back = len(m.coord) - 1 - axis
            what = f"{COORDINATES[back] if len(m.coord) > 1 else 'element'} of `{m.tensor}`"
            slack = self._slack(index, size) if tile or isinstance(index.type, Tile) else 0
            yield ir.Bounds(index, ir.Dim(m.tensor, axis), what, guard, 1 - size - slack, slack)

    def _slack(self, index: ir.Expr, size: int) -> int:
        """How far outside a window of ``size`` elements, or an element of a vector, may lie."""
        if self._level >= 2:
            return 0
        if isinstance(index.type, Tile):
            return index.type.cols  # the last lanes of a vector that covers a tail
        return max(BLOCK, TURNS * size) if size > 1 else TURNS

    def _rank(
        self, rank: ir.Operand, what: str, guard: ir.Expr | None, at: Sequence[tuple[ir.Expr, ir.Dim | None]]
    ) -> Iterator[ir.Bounds]:
        """``at``: the coordinates beside ``rank`` with their extents; a rank beside one that means nothing is none."""
        assert not isinstance(rank, ir.Memory | ir.Choose | ir.Shared | ir.Signal)
        if isinstance(rank, ir.Rank) or _adds(rank):
            return
        kind = rank.type
        if isinstance(kind, Tile):
            for index, extent in at:
                if isinstance(index.type, Tile):
                    rank = ir.Call("where", (_exists(index, extent), rank, ir.const(-1)), kind)
        yield ir.Bounds(rank, ir.World(), what, guard)


def _exists(index: ir.Expr, extent: ir.Dim | None) -> ir.Expr:
    """Where elements of the index vector ``index`` mean something."""
    assert isinstance(index.type, Tile)
    found = replace(index.type, dtype=BOOL.dtype)
    exists = ir.Binary(">=", index, ir.const(0), found)
    return exists if extent is None else ir.Binary("and", exists, ir.Binary("<", index, extent, found), found)


def holds(b: ir.Bounds, index: int, bound: int) -> bool:
    """Whether ``index``, an element of a vector or a scalar, is one that ``b`` lets pass."""
    least: float = -inf if isinstance(b.index.type, Tile) else b.least
    return least <= index < bound + b.slack


def _tile_of(s: ir.Statement, e: ir.Operand) -> tuple[int, ...]:
    """Shape of the tile that ``s`` moves from or to window ``e``; () if it moves single elements."""
    if not isinstance(s, ir.Do) or not isinstance(e, ir.Memory | ir.Choose):
        return ()
    if s.op in ("reduce", "all_reduce"):
        shape = s.attr("shape")
        assert isinstance(shape, tuple)
        return shape
    if s.op == "store_elements":
        return ()
    for o in s.operands:
        if isinstance(o, ir.Shared):
            return o.type.shape
    tile = getattr(s.operands[1], "type", None) if len(s.operands) > 1 else None
    return tile.shape if isinstance(tile, Tile) else ()


def _stores(s: ir.Statement, m: ir.Memory) -> ir.Expr | None:
    """When ``s`` touches window ``m`` at all: a register tile may be stored with no rows."""
    if isinstance(s, ir.Do) and s.op == "store_global" and m is s.operands[0]:
        rows = s.operands[2]
        assert not isinstance(rows, ir.Memory | ir.Choose | ir.Shared | ir.Signal)
        return None if isinstance(rows, ir.Const) else ir.Binary(">", rows, ir.const(0), BOOL)
    return None


def _adds(e: ir.Operand) -> bool:
    """Whether evaluating ``e`` changes a counter."""
    return any(isinstance(o, ir.Call) and o.op == "fetch_add" for o in split.walk((e,)))


def _both(x: ir.Expr | None, y: ir.Expr | None) -> ir.Expr | None:
    if x is None or y is None:
        return y if x is None else x
    return ir.Binary("and", x, y, BOOL)


def _not(x: ir.Expr) -> ir.Expr:
    return ir.Unary("not", x, BOOL)
