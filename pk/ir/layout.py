"""Where the elements of register tiles live: one layout for each connected group of names (gallery rule 16).

*fragment*: the accumulator layout of wgmma.  Tiles that meet an ``mma``, directly or through arithmetic.
*linear*: everything else.  Rows are dealt to the warps of the role in turn; along a row every lane holds ``vector``
consecutive columns, then the next lane.  With fewer rows than warps, ``share`` warps hold a row together.

A group is what arithmetic, reductions and assignments connect.  Within a group a tile with one row is a vector over
columns that every row of the group can meet, and a tile with one column a vector over rows.

Shapes: (R, C), (R, 1), (1, C).  Index vectors (R,) belong to single warps and have no layout here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pk import errors
from pk.ir import communicator, split
from pk.ir import nodes as ir
from pk.ir.types import Tile

LANES = 32
GROUP_WARPS = 4  # of a warpgroup
TEAM_GROUPS = 2  # warpgroups of a team that shares its launch with no consumer
MMA_ROWS = 64  # rows of a fragment that one warpgroup holds
MMA_STEP = 8  # columns of a fragment come in eights
VECTOR = 8  # consecutive columns of a lane: 16 bytes of a 16-bit type
MAX_ELEMENTS = 232  # of one tile a thread can hold: its registers

Kind = Literal["fragment", "linear"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How the ``warps`` of a role hold the tiles of one group; ``share``: warps that hold a row together (linear)."""

    kind: Kind
    warps: int
    share: int = 1

    @property
    def groups(self) -> int:
        """Linear: sets of warps that hold a row each."""
        return self.warps // self.share

    @property
    def lanes(self) -> int:
        """Linear: lanes that hold a row together."""
        return LANES * self.share

    def vector(self, cols: int) -> int:
        """Consecutive columns of a thread in a tile of ``cols`` columns."""
        if self.kind == "fragment":
            return 1 if cols == 1 else 2
        return next((v for v in (8, 4, 2) if cols % v == 0 and v * self.lanes <= cols), 1)

    def row_slots(self, rows: int) -> int:
        """Rows of a tile of ``rows`` of which a thread holds elements."""
        if rows == 1:
            return 1
        return rows // (8 * self.warps) if self.kind == "fragment" else -(-rows // self.groups)

    def col_slots(self, cols: int) -> int:
        """Columns of a tile of ``cols`` of which a thread holds elements."""
        if cols == 1:
            return 1
        if self.kind == "fragment":
            return cols // 4
        step = self.vector(cols) * self.lanes
        return -(-cols // step) * self.vector(cols)

    def elements(self, tile: Tile) -> int:
        """Elements of ``tile`` that a thread holds, padding included."""
        return self.row_slots(tile.rows) * self.col_slots(tile.cols)


def linear(warps: int, rows: int) -> Layout:
    """The linear layout of a group whose tallest tile has ``rows`` rows."""
    return Layout("linear", warps, max(1, warps // rows))


# ---------------------------------------------------------------------------------------------------- inference
class Layouts:
    """The layouts of one role, which has ``warps`` warps; ``body`` is what it executes."""

    def __init__(self, body: ir.Block, warps: int) -> None:
        self.warps = warps
        self._parent: dict[str, str] = {}
        self._rows: dict[str, int] = {}
        self._mma: dict[str, str] = {}  # root of a group -> an accumulator in it
        for names, rows in _connections(body):
            self._join(names, rows)
        for name in accumulators(body):
            self._mma.setdefault(self._root(name), name)

    def of_name(self, name: str) -> Layout:
        """The layout of register tile ``name``."""
        root = self._root(name)
        if root in self._mma:
            return Layout("fragment", self.warps)
        return linear(self.warps, self._rows[root])

    def of(self, e: ir.Operand) -> Layout:
        """The layout of the whole expression ``e``; without names it is a group of its own, and linear."""
        name = next(_names(e), None)
        return self.of_name(name) if name is not None else linear(self.warps, _tallest(e))

    def of_statement(self, s: ir.Statement) -> Layout | None:
        """The layout in which statement ``s`` computes; None if it has no register tiles of a group of warps."""
        operands: list[ir.Operand] = [s.var, s.value] if isinstance(s, ir.Assign) else list(split.expressions(s))
        tiled = [o for o in operands if _tiles(o)]
        named = next((o for o in tiled if next(_names(o), None) is not None), tiled[0] if tiled else None)
        return self.of(named) if named is not None else None

    def accumulator(self, name: str) -> str | None:
        """The accumulator that makes the group of ``name`` a fragment, if one does."""
        return self._mma.get(self._root(name))

    def _root(self, name: str) -> str:
        while self._parent.setdefault(name, name) != name:
            name = self._parent[name]
        return name

    def _join(self, names: list[str], rows: int) -> None:
        roots = [self._root(n) for n in names]
        for root in roots:
            self._parent[root] = roots[0]
        self._rows[roots[0]] = max([rows, *(self._rows.get(r, 1) for r in roots)])


def layouts(body: ir.Block, warps: int = GROUP_WARPS) -> dict[str, Kind]:
    """For each register tile that ``body`` (a role's statements) names: ``fragment`` or ``linear``."""
    found = Layouts(body, warps)
    names = [s.var.name for s in split.statements(body) if isinstance(s, ir.Assign) and is_grouped(s.var)]
    return {name: found.of_name(name).kind for name in names}


def is_grouped(e: ir.Operand) -> bool:
    """Whether ``e`` is a register tile of a group of warps: two dimensions."""
    kind = getattr(e, "type", None)
    return isinstance(kind, Tile) and kind.space == "register" and len(kind.shape) == 2


def accumulators(body: ir.Block) -> Iterator[str]:
    """Names that meet an ``mma``: accumulators, and operands that it reads from registers."""
    for s in split.statements(body):
        if isinstance(s, ir.Do) and s.op == "mma":
            for o in s.operands:
                yield from _names(o)


def _connections(body: ir.Block) -> Iterator[tuple[list[str], int]]:
    """(names, rows) of everything that one statement connects; ``rows`` of its tallest tile."""
    for s in split.statements(body):
        if isinstance(s, ir.Assign) and is_grouped(s.var):
            yield [s.var.name, *_names(s.value)], max(_tallest(s.var), _tallest(s.value))
        elif isinstance(s, ir.Do) and s.op == "mma":
            yield [n for o in s.operands for n in _names(o)], max(map(_tallest, s.operands))
        else:
            for o in split.expressions(s):
                names = list(_names(o))
                if names:
                    yield names, _tallest(o)


def _names(e: ir.Operand) -> Iterator[str]:
    return (v.name for v in _tiles(e) if isinstance(v, ir.Var))


def _tiles(e: ir.Operand) -> list[ir.Operand]:
    return [o for o in split.walk((e,)) if is_grouped(o)]


def _tallest(e: ir.Operand) -> int:
    return max((o.type.rows for o in _tiles(e)), default=1)  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------------------- checks
def check(kernel: ir.Kernel) -> None:
    """Raise a CompileError for a register tile that its layout cannot hold."""
    for _, block in kernel.classes:
        for role in split.roles_of(block):
            if role in ("consumer", "team"):
                body, warps = role_body(block, role), role_warps(kernel, block, role)
                if role == "team":
                    body = communicator.with_copies(kernel, body)
                    _check_team_copies(body, warps)
                _check_role(Layouts(body, warps), body)
            elif role == "communicator":
                body = communicator.with_copies(kernel, role_body(block, role))
                most = communicator.WIDE_WORDS if has_wide(kernel) else communicator.WORDS[groups(kernel)]
                _check_copies(body, most)
                _check_role(Layouts(body, 1), body, most)


def role_body(block: ir.Block, role: ir.RoleKind) -> ir.Block:
    """What ``role`` of the class ``block`` executes."""
    return block if role == "team" else split.slice_role(block, role)


def role_warps(kernel: ir.Kernel, block: ir.Block, role: ir.RoleKind) -> int:
    """Warps of a role of the class ``block``: a team has all that the launch's consumers could have."""
    if role == "consumer":
        return GROUP_WARPS * split.warpgroups_of(block)
    return GROUP_WARPS * groups(kernel) if role == "team" else 1


def groups(kernel: ir.Kernel) -> int:
    """Warpgroups of a block of ``kernel``, the producers' not counted."""
    wanted = [
        TEAM_GROUPS if split.roles_of(b) == ("team",) else split.warpgroups_of(b) * split.teams_of(b)
        for _, b in kernel.classes
    ]
    return max(wanted)


def has_wide(kernel: ir.Kernel) -> bool:
    """Whether the accumulators of the class that computes leave a communicator warp beside them few registers."""
    if "consumer" not in split.roles_of(kernel.compute):
        return False
    body = split.slice_role(kernel.compute, "consumer")
    found = Layouts(body, role_warps(kernel, kernel.compute, "consumer"))
    tiles = {s.var.name: s.var.type for s in split.statements(body) if isinstance(s, ir.Assign) and is_grouped(s.var)}
    names = {n for s in split.statements(body) if isinstance(s, ir.Do) and s.op == "mma" for n in _names(s.operands[0])}
    taken = sum(found.of_name(n).elements(tiles[n]) for n in names if n in tiles)  # type: ignore[arg-type,misc]
    return taken > communicator.WIDE[groups(kernel)]


def _check_copies(body: ir.Block, most: int) -> None:
    """What tiles that a communicator warp only copies need of registers."""
    for s in split.statements(body):
        for e in split.walk(split.expressions(s)):
            if isinstance(e, ir.Call) and isinstance(e.type, Tile) and e.type.space == "copied":
                communicator.fits(communicator.registers(e.type), e.type.shape, most, e.span)


def _check_team_copies(body: ir.Block, warps: int) -> None:
    """The same of a team, which has more threads and registers for them."""
    for s in split.statements(body):
        for e in split.walk(split.expressions(s)):
            if isinstance(e, ir.Call) and isinstance(e.type, Tile) and e.type.space == "copied":
                needed = -(-e.type.nbytes // (4 * LANES * warps))
                if needed > MAX_ELEMENTS:
                    raise _too_large(e.type, needed, warps, e.span)


def _too_large(tile: Tile, needed: int, warps: int, span: ir.Span) -> errors.TileTooLarge:
    return errors.TileTooLarge(
        f"a register tile {tile.shape} needs {needed} registers of each of the role's {LANES * warps} threads, and "
        f"they have at most {MAX_ELEMENTS}",
        span,
        "Make the tile smaller, or give the consumer more warpgroups.",
    )


def _check_role(found: Layouts, body: ir.Block, most: int = MAX_ELEMENTS) -> None:
    for s in split.statements(body):
        layout = found.of_statement(s)
        if layout is None:
            continue
        for e in split.walk(_whole(s)):
            if is_grouped(e):
                _fits(found, layout, e, s, most)
            if isinstance(e, ir.Call) and e.op == "columns":
                _cut(layout, e)


def _whole(s: ir.Statement) -> tuple[ir.Operand, ...]:
    """What a statement evaluates and what it assigns to."""
    return (s.var, *split.expressions(s)) if isinstance(s, ir.Assign) else split.expressions(s)


def _fits(found: Layouts, layout: Layout, e: ir.Operand, s: ir.Statement, most: int) -> None:
    """Whether ``layout`` can hold tile ``e`` of statement ``s``."""
    tile: Tile = e.type  # type: ignore[union-attr, assignment]
    span = s.span if isinstance(e, ir.Var) or not e.span.line else e.span
    if layout.kind == "fragment":
        name = next((n for o in _whole(s) for n in _names(o)), "")
        acc = found.accumulator(name) if name else None
        meets = f", and meets `{acc}`, which an mma works on" if acc else ""
        advice = "To combine tiles of other shapes, pass one through a shared tile: store it there and load it."
        groups_, unit = layout.warps // GROUP_WARPS, MMA_ROWS * (layout.warps // GROUP_WARPS)
        if tile.rows > 1 and tile.rows % unit:
            raise errors.ShapeMismatch(
                f"a register tile of {tile.rows} rows cannot be split among {groups_} warpgroups{meets}",
                span,
                f"Rows must be a multiple of {unit} (64 for each warpgroup), or 1. {advice}",
            )
        if tile.cols > 1 and tile.cols % MMA_STEP:
            raise errors.ShapeMismatch(
                f"a register tile of {tile.cols} columns is no multiple of {MMA_STEP}{meets}",
                span,
                f"Columns must be a multiple of {MMA_STEP}, or 1. {advice}",
            )
    named = isinstance(e, ir.Var) or (isinstance(e, ir.Call) and e.op in ("load", "load_global", "full"))
    if named and layout.warps == 1:
        communicator.fits(layout.elements(tile), tile.shape, most, span)
    elif named and layout.elements(tile) > MAX_ELEMENTS:
        raise _too_large(tile, layout.elements(tile), layout.warps, span)


def _cut(layout: Layout, e: ir.Call) -> None:
    """A slice of columns stays in the threads that hold them."""
    source: Tile = e.operands[0].type  # type: ignore[union-attr, assignment]
    if layout.kind == "fragment":
        return
    assert isinstance(e.type, Tile)
    step = layout.vector(source.cols) * layout.lanes
    bounds = [v for k, v in e.attrs if k in ("start", "stop")]
    if any(int(b) % step for b in bounds) or layout.vector(e.type.cols) != layout.vector(source.cols):  # type: ignore[call-overload]
        raise errors.ShapeMismatch(
            f"columns {bounds[0]}:{bounds[1]} of a tile {source.shape} lie in other threads than the tile that is made",
            e.span,
            f"No mma meets this tile, so that its columns are dealt {step} at a time: cut at multiples of {step}, "
            "or load the pieces one by one.",
        )


# ------------------------------------------------------------------------------------------- sums between warps
EXCHANGE_SLOTS = 4  # words of a thread that warps exchange at a time


def exchanged(e: ir.Call, layout: Layout) -> int:
    """Words of shared memory a thread that reduction ``e`` exchanges between warps: 0, 1 or ``EXCHANGE_SLOTS``."""
    source: Tile = e.operands[0].type  # type: ignore[union-attr, assignment]
    if e.attr("axis") == 1:
        return int(layout.kind == "linear" and layout.share > 1 and source.cols > 1)
    return EXCHANGE_SLOTS if source.rows > 1 and layout.warps > 1 else 0


def exchange_slots(body: ir.Block, layouts: Layouts) -> int:
    """Words of shared memory a thread that a role's reductions need."""
    slots = 0
    for s in split.statements(body):
        layout = layouts.of_statement(s)
        for e in split.walk(split.expressions(s)):
            if layout is not None and isinstance(e, ir.Call) and e.op in ("sum", "max", "min"):
                slots = max(slots, exchanged(e, layout))
    return slots


def exchange_bytes(kernel: ir.Kernel, block: ir.Block) -> int:
    """Bytes of shared memory that the reductions of one class need."""
    found = 0
    for role in split.roles_of(block):
        if role in ("consumer", "team"):
            body, warps = role_body(block, role), role_warps(kernel, block, role)
            found = max(found, 4 * LANES * warps * exchange_slots(body, Layouts(body, warps)))
    return found
