"""What a name can stand for while a kernel is read.

A *folded* value is any Python object (a number, a dtype, a tuple, a module).  A run-time value is an IR expression.
The rest are the language's own objects, below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from pk import errors
from pk.ir import nodes as ir
from pk.ir.types import DType, Scalar, Tile

EXPR = (ir.Const, ir.Var, ir.Dim, ir.Param, ir.Rank, ir.World, ir.Unary, ir.Binary, ir.Select, ir.Call)


@dataclass(frozen=True, slots=True)
class TensorValue:
    """A tensor parameter or a scratch buffer.  ``shape``: what its dims stand for."""

    name: str
    kind: Literal["global", "parallel", "scratch"]
    dtype: DType
    shape: tuple[ir.Expr, ...]

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)


@dataclass(frozen=True, slots=True)
class CopyValue:
    """``c[r]``: rank r's copy of a ``Parallel`` or of scratch."""

    tensor: TensorValue
    rank: ir.Expr


@dataclass(frozen=True, slots=True)
class ChosenValue:
    """``x if cond else y`` on tensors of one dtype and number of dimensions."""

    cond: ir.Expr
    x: TensorValue | CopyValue | ChosenValue
    y: TensorValue | CopyValue | ChosenValue

    @property
    def dtype(self) -> DType:
        """The element type of both."""
        return tensor_of(self.x).dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions of both."""
        return tensor_of(self.x).ndim


def tensor_of(value: TensorValue | CopyValue | ChosenValue) -> TensorValue:
    """The tensor behind a copy or a choice (its first)."""
    if isinstance(value, ChosenValue):
        return tensor_of(value.x)
    return value.tensor if isinstance(value, CopyValue) else value


@dataclass(eq=False, slots=True)
class Declared:
    """Something named by the first name bound to it."""

    span: ir.Span
    name: str = ""


@dataclass(eq=False, slots=True)
class SharedValue(Declared):
    """``pk.shared(shape, dtype)``: to be a field of a pipeline, or private to the consumer of class ``owner``."""

    tile: Tile | None = None
    owner: str | None = None  # the class that uses it, once one does


@dataclass(eq=False, slots=True)
class PipelineValue(Declared):
    """``pk.pipeline(...)``."""

    stages: int = 0
    tiles: tuple[tuple[str, Tile], ...] = ()
    owner: str | None = None  # the class that uses it, once one does
    over: PipelineValue | None = None  # whose stages these are as well

    def tile(self, name: str) -> Tile | None:
        """The tile of field ``name``, or None."""
        return dict(self.tiles).get(name)


@dataclass(eq=False, slots=True)
class SignalsValue(Declared):
    """``pk.signals(*shape)``."""

    shape: tuple[ir.Expr, ...] = ()


@dataclass(eq=False, slots=True)
class ScratchValue(Declared):
    """``pk.scratch(shape, dtype)``; becomes a TensorValue when it gets its name."""

    shape: tuple[ir.Expr, ...] = ()
    dtype: DType | None = None


@dataclass(frozen=True, slots=True)
class StageMethod:
    """``p.fill`` or ``p.drain``; ``called`` once it has been."""

    pipeline: PipelineValue
    mode: Literal["fill", "drain"]
    called: bool = False


@dataclass(eq=False, slots=True)
class StageValue:
    """``s`` of ``with p.fill() as s``."""

    pipeline: PipelineValue
    mode: Literal["fill", "drain"]
    held: bool = True


@dataclass(frozen=True, slots=True)
class RanksFrom:
    """``pk.ranks_from(start, count)``."""

    start: Any
    count: Any


@dataclass(frozen=True, slots=True)
class RangeValue:
    """``range(start, stop)``, kept at run time."""

    start: Any
    stop: Any


@dataclass(frozen=True, slots=True)
class StaticRange:
    """``pk.static_range(...)``, unrolled."""

    values: range


@dataclass(frozen=True, slots=True)
class TasksValue:
    """``pk.tasks(*extents, group=)``."""

    extents: tuple[Any, ...]
    group: ir.Expr
    dynamic: bool = False
    cluster: int = 1


@dataclass(frozen=True, slots=True)
class RoleValue:
    """``pk.loader()`` and its like."""

    kind: Literal["loader", "consumer", "storer"]
    warpgroups: int = 0
    teams: int = 1
    stagger: bool = False


@dataclass(frozen=True, slots=True)
class CommunicatorValue:
    """``pk.communicator(sms=, joins=)``; None: a warp of every block that computes."""

    sms: Any
    joins: bool


@dataclass(frozen=True, slots=True)
class At:
    """``pk.at(...)``: a coordinate whose entries all count elements."""

    entries: tuple[Any, ...]


OWN = (
    TensorValue, CopyValue, ChosenValue, Declared, StageMethod, StageValue, RanksFrom, RangeValue, StaticRange,
    TasksValue,
    RoleValue, CommunicatorValue, At, ir.Shared,
)  # fmt: skip


@dataclass(slots=True)
class Binding:
    """What a name is bound to.  ``owner``: the region whose variable it is, or None for a value that is not its own."""

    value: Any
    span: ir.Span
    owner: str | None = None
    where: str = "prologue"  # compute, communicator: the class that bound it; prologue: visible in both


@dataclass(slots=True)
class Gone:
    """Why a name that was bound is not any more."""

    why: str
    span: ir.Span = field(default=ir.NOWHERE)


def plain(value: Any) -> Any:
    """``value`` with NumPy's scalars as Python numbers, in tuples too; every NaN is the same one."""
    if type(value) is tuple:
        entries = tuple(map(plain, value))
        return value if all(x is y for x, y in zip(entries, value, strict=True)) else entries
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    return math.nan if isinstance(value, float) and value != value else value


def is_expr(value: Any) -> bool:
    """Whether ``value`` is a run-time expression."""
    return isinstance(value, EXPR)


def is_tile(value: Any) -> bool:
    """Whether ``value`` is a register tile."""
    return isinstance(value, EXPR) and isinstance(value.type, Tile)


def is_scalar(value: Any) -> bool:
    """Whether ``value`` is a number, known or not."""
    return isinstance(value, int | float) or (isinstance(value, EXPR) and isinstance(value.type, Scalar))


def is_folded(value: Any) -> bool:
    """Whether ``value`` is a Python value, all the way down."""
    if isinstance(value, tuple | list):
        return all(is_folded(v) for v in value)
    return not isinstance(value, EXPR) and not isinstance(value, OWN)


def describe(value: Any) -> str:
    """``value`` in a message."""
    if isinstance(value, EXPR):
        return f"a register tile {value.type}" if is_tile(value) else f"a run-time {value.type}"
    if isinstance(value, ir.Shared):
        return f"a shared tile {value.type}"
    if isinstance(value, TensorValue):
        return f"the {value.kind} tensor `{value.name}`" if value.kind != "scratch" else f"the scratch `{value.name}`"
    names = {
        CopyValue: "one rank's copy of a tensor", ChosenValue: "a choice between tensors", PipelineValue: "a pipeline",
        SignalsValue: "signals",
        ScratchValue: "scratch", SharedValue: "a shared tile outside a pipeline", StageValue: "a stage",
        StageMethod: "a method of a pipeline", RanksFrom: "pk.ranks_from(...)", TasksValue: "pk.tasks(...)",
        RangeValue: "a range", StaticRange: "a range", RoleValue: "a role", CommunicatorValue: "pk.communicator(...)",
        At: "pk.at(...)",
    }  # fmt: skip
    if type(value) in names:
        return names[type(value)]
    if isinstance(value, tuple) and not is_folded(value):
        return f"a tuple of {len(value)}"
    return errors.shown(value)
