"""The communicator warp: ``with pk.communicator():``, one warp beside the other roles of every block that computes.

What may stand where, tiles that it only copies, and how many registers its tiles may take.

A tile that is loaded from a tensor and stored to tensors of the same dtype, and nothing else, is *copied*: it is not
widened, any lane may hold any part of it, and it takes the registers that its bytes fill.  So it is in a team, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from pk import errors
from pk.ir import nodes as ir
from pk.ir import split
from pk.ir.types import DType, Tile

T = TypeVar("T", ir.Var, ir.Call)

LANES = 32
# Warpgroups of a block that compute -> registers of a lane that one tile may take; fewer where the consumers'
# accumulators take more than WIDE of theirs.
WORDS = {0: 128, 1: 128, 2: 32, 3: 32}
WIDE, WIDE_WORDS = {0: 232, 1: 232, 2: 160, 3: 100}, 16


# ---------------------------------------------------------------------------------------------------- structure
def communicator(kernel: ir.Kernel) -> None:
    """Raise a CompileError if ``kernel`` has a communicator warp where none may be."""
    for name, block in kernel.classes:
        found = [s for s in split.statements(block) if isinstance(s, ir.Role) and s.kind == "communicator"]
        for s in found:
            if name != "compute" or not any(s is t for t in block):
                raise errors.WrongRole(INSIDE, s.span, TOP)
        if len(found) > 1:
            raise twice(found[0].span, found[1].span)
        if found:
            has_roles(block, found[0].span)
            for inner in split.statements(found[0].body):
                if isinstance(inner, ir.Tasks):
                    dealt(inner.dynamic, inner.cluster, inner.span)


INSIDE, TOP = "pk.communicator inside a loop, branch or role", "It stands at the top of the kernel."
NO_ROLES = (
    "A communicator without sms= is one warp, which works on register tiles: use pk.load and pk.store, or give it SMs "
    "of its own, pk.communicator(sms=8)."
)


def twice(first: ir.Span, second: ir.Span) -> errors.WrongRole:
    """A second communicator warp."""
    return errors.WrongRole(
        f"a second pk.communicator() without sms=; the first is in line {first.line}",
        second,
        "Every block has one warp for it: put both bodies into one, or give one of them SMs of its own, "
        "pk.communicator(sms=8).",
    )


def has_roles(block: ir.Block, span: ir.Span) -> None:
    """The class of the communicator warp must have role blocks."""
    if not any(isinstance(s, ir.Role) and s.kind != "communicator" for s in split.statements(block)):
        raise errors.WrongRole(
            "pk.communicator() without sms= in a kernel whose task loops have no role blocks",
            span,
            "It is a warp beside a loader, consumer or storer: put the other code into role blocks, or give the "
            "communicator SMs of its own, pk.communicator(sms=8).",
        )


def dealt(dynamic: bool, cluster: int, span: ir.Span) -> None:
    """Tasks of a communicator warp are dealt to the blocks in turn, one by one."""
    if dynamic or cluster != 1:
        option, value = ("dynamic", "True") if dynamic else ("cluster", str(cluster))
        raise errors.WrongOperand(
            f"pk.tasks({option}={value}) in a communicator warp",
            span,
            f"Its tasks are dealt to the blocks in turn, whatever the other roles do: drop {option}=.",
        )


# ------------------------------------------------------------------------------------------------- copied tiles
def with_copies(kernel: ir.Kernel, body: ir.Block) -> ir.Block:
    """``body`` of a communicator warp or a team; tiles that it only copies are ``copied``, of their tensor's dtype."""
    return _Narrow(kernel, _copied(kernel, body)).block(body)


def _copied(kernel: ir.Kernel, body: ir.Block) -> dict[str, DType]:
    """Names of tiles that are only loaded from tensors and stored to tensors, of one dtype."""
    dtypes: dict[str, set[DType]] = {}
    other: set[str] = set()
    for s in split.statements(body):
        if isinstance(s, ir.Assign) and isinstance(s.var.type, Tile):
            source = _source(s.value)
            if source is None:
                other.add(s.var.name)
            else:
                dtypes.setdefault(s.var.name, set()).add(kernel.tensor(source).dtype)
        stored = s.operands[1] if isinstance(s, ir.Do) and s.op == "store_global" else None
        for e in split.walk(split.expressions(s)):
            if isinstance(e, ir.Var) and isinstance(e.type, Tile):
                if e is stored and isinstance(s, ir.Do) and isinstance(s.operands[0], ir.Memory):
                    dtypes.setdefault(e.name, set()).add(kernel.tensor(s.operands[0].tensor).dtype)
                else:
                    other.add(e.name)
    return {name: kinds.pop() for name, kinds in dtypes.items() if len(kinds) == 1 and name not in other}


def _source(e: ir.Operand) -> str | None:
    """The tensor that a tile is loaded from, and nothing more."""
    if isinstance(e, ir.Call) and e.op == "load_global" and isinstance(e.operands[0], ir.Memory):
        return e.operands[0].tensor
    return None


class _Narrow:
    """Writes a body again, in which copied tiles have the type ``copied`` of their tensor's dtype."""

    def __init__(self, kernel: ir.Kernel, names: dict[str, DType]) -> None:
        self._kernel, self._names = kernel, names

    def block(self, block: ir.Block) -> ir.Block:
        """The statements of a block."""
        return tuple(map(self._statement, block))

    def _statement(self, s: ir.Statement) -> ir.Statement:
        if isinstance(s, ir.If):
            return replace(s, then=self.block(s.then), orelse=self.block(s.orelse))
        if isinstance(s, ir.For | ir.While | ir.Tasks):
            return replace(s, body=self.block(s.body))
        if isinstance(s, ir.Assign) and s.var.name in self._names:
            assert isinstance(s.value, ir.Call)
            dtype = self._names[s.var.name]
            return replace(s, var=self._narrow(s.var, dtype), value=self._narrow(s.value, dtype))
        if isinstance(s, ir.Do) and s.op == "store_global":
            to, value, rows = s.operands
            if isinstance(value, ir.Var) and value.name in self._names:
                return replace(s, operands=(to, self._narrow(value, self._names[value.name]), rows))
            if isinstance(to, ir.Memory) and isinstance(value, ir.Call) and (source := _source(value)) is not None:
                dtype = self._kernel.tensor(source).dtype
                if dtype == self._kernel.tensor(to.tensor).dtype:
                    return replace(s, operands=(to, self._narrow(value, dtype), rows))
        return s

    def _narrow(self, e: T, dtype: DType) -> T:
        """The tile ``e`` as its tensor has it."""
        assert isinstance(e.type, Tile)
        return replace(e, type=Tile(e.type.shape, dtype, "copied"))


def registers(tile: Tile) -> int:
    """Registers of a lane that a copied tile takes."""
    return -(-tile.nbytes // (4 * LANES))


def fits(needed: int, shape: tuple[int, ...], most: int, span: ir.Span) -> None:
    """Raise TileTooLarge if a tile of a communicator warp needs more than ``most`` registers of a lane."""
    if needed > most:
        raise errors.TileTooLarge(
            f"a register tile {shape} needs {needed} registers of each of the communicator warp's {LANES} threads, and "
            f"they have {most} for it beside the consumers",
            span,
            "Take a smaller piece at a time: a loop over pieces costs nothing here. A tile that is only loaded and "
            "stored takes the registers of its bytes, one that is computed with a register an element.",
        )
