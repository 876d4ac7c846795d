"""The grammar of pk's IR, on one screen.  Imports nothing of pk but the types.

    kernel  = name, params, signals, scratch, pipelines, compute: block, communicator*
    block   = statement*
    statement
            = var := expr                                   Assign
            | for var in start..stop: block                 For      (kept; static loops are unrolled before)
            | for vars in tasks(extents): block             Tasks    (persistent, dealt to the blocks in turn)
            | while cond: block                             While    (the condition is evaluated before every turn)
            | if cond: block else: block                    If
            | with role: block                              Role
            | with pipeline.fill()/drain(): block           Stage
            | op(operands; attrs)                           Do       (an op of ``ops.TABLE`` with an effect)
            | assert cond, text                             Assert
    expr    = Const | Var | Dim | Rank | World | Unary | Binary | Select
            | op(operands; attrs) : type                    Call     (an op of ``ops.TABLE`` with a result)
    operand = expr | Memory | Choose | Shared | Signal

Every node is frozen and carries the ``Span`` of the user's source that made it.  Scalars are int32,
float32 or bool; ``//`` and ``%`` are Python's (floor).  A name holds a value: ``Assign`` replaces it; only the op
``mma`` updates its first operand in place.  Coordinates count *elements* in every dimension (the front
end has multiplied tile indices by tile extents), and one entry stands for each dimension of the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pk.ir.types import BOOL, INT, DType, Scalar, Tile, Type


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of the user's source: 1-based lines, 0-based columns, as in :mod:`ast`."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    function: str = ""
    text: str = ""  # the first line of the piece, as written

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


NOWHERE = Span("<pk>", 0, 0, 0, 0)


def _span() -> Span:
    return field(default=NOWHERE, compare=False, repr=False)


# ---------------------------------------------------------------------------------------- expressions
@dataclass(frozen=True, slots=True)
class Const:
    """A literal."""

    value: int | float | bool
    type: Scalar
    span: Span = _span()


@dataclass(frozen=True, slots=True)
class Var:
    """A scalar or a register tile, by name.  Names are unique inside a kernel per role that owns them."""

    name: str
    type: Type
    span: Span = _span()


@dataclass(frozen=True, slots=True)
class Dim:
    """Extent of dimension ``axis`` (0-based, outermost first) of tensor or scratch ``tensor``, at run time."""

    tensor: str
    axis: int
    type: Scalar = INT
    span: Span = _span()


@dataclass(frozen=True, slots=True)
class Param:
    """A run-time ``int`` or ``float`` parameter of the kernel."""

    name: str
    type: Scalar
    span: Span = _span()


@dataclass(frozen=True, slots=True)
class Rank:
    """Number of this rank, 0 <= rank < world."""

    type: Scalar = INT
    span: Span = _span()


@dataclass(frozen=True, slots=True)
class World:
    """Number of ranks."""

    type: Scalar = INT
    span: Span = _span()


UnaryOp = Literal["-", "not", "abs"]
BinaryOp = Literal["+", "-", "*", "/", "//", "%", "min", "max", "<", "<=", ">", ">=", "==", "!=", "and", "or"]
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")


@dataclass(frozen=True, slots=True)
class Unary:
    """Scalar, or element by element on register tiles."""

    op: UnaryOp
    x: Expr
    type: Type
    span: Span = _span()


@dataclass(frozen=True, slots=True)
class Binary:
    """Scalar, or element by element on register tiles (a scalar operand is broadcast)."""

    op: BinaryOp
    x: Expr
    y: Expr
    type: Type
    span: Span = _span()


@dataclass(frozen=True, slots=True)
class Select:
    """``x if cond else y`` on scalars."""

    cond: Expr
    x: Expr
    y: Expr
    type: Scalar
    span: Span = _span()


@dataclass(frozen=True, slots=True)
class Call:
    """An op of the table that yields a value, e.g. ``full(; value=0.0) : register[128x256 float32]``."""

    op: str
    operands: tuple[Operand, ...]
    type: Type
    attrs: tuple[tuple[str, object], ...] = ()
    span: Span = _span()

    def attr(self, name: str) -> object:
        """The attribute called ``name``."""
        return dict(self.attrs)[name]


# -------------------------------------------------------------------------------------------- operands
@dataclass(frozen=True, slots=True)
class Memory:
    """A window of a tensor or scratch buffer: ``tensor`` of ``rank`` at element ``coord`` (one entry a dimension).

    ``rank`` is None for this rank's own copy (a ``Global``), an expression for ``c[r]``; ``everyone`` is
    set when the whole ``Parallel`` is meant (destinations only).
    """

    tensor: str
    coord: tuple[Expr, ...]
    rank: Expr | None = None
    everyone: bool = False
    span: Span = _span()


@dataclass(frozen=True, slots=True)
class Choose:
    """``x if cond else y`` on windows: two tensors of one dtype and number of dimensions, one coordinate each."""

    cond: Expr
    x: Memory | Choose
    y: Memory | Choose
    span: Span = _span()


@dataclass(frozen=True, slots=True)
class Shared:
    """A shared tile: field ``field`` of the stage of ``pipeline`` that the role holds now.

    ``pipeline`` is empty for a private tile of the consumer; ``field`` is then the name of its
    ``SharedTile``.  ``type`` is the tile as stored; ``transposed`` marks ``t.T``.
    """

    pipeline: str
    field: str
    type: Tile
    transposed: bool = False
    span: Span = _span()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape as the op sees it."""
        return self.type.shape[::-1] if self.transposed else self.type.shape

    @property
    def private(self) -> bool:
        """Whether it belongs to no pipeline."""
        return not self.pipeline

    @property
    def name(self) -> str:
        """What messages call it: ``inputs.a``, ``tile`` or ``tile.T``."""
        return f"{self.pipeline}.{self.field}"[not self.pipeline :] + ".T" * self.transposed


@dataclass(frozen=True, slots=True)
class Signal:
    """One counter: ``signals[index]``, one index entry a dimension of the declaration."""

    signals: str
    index: tuple[Expr, ...]
    span: Span = _span()


Expr = Const | Var | Dim | Param | Rank | World | Unary | Binary | Select | Call
Operand = Expr | Memory | Choose | Shared | Signal


# ------------------------------------------------------------------------------------------ statements
@dataclass(frozen=True, slots=True)
class Assign:
    """``var = value``."""

    var: Var
    value: Expr
    span: Span = _span()


@dataclass(frozen=True, slots=True)
class For:
    """``for var in range(start, stop)``, start <= var < stop, step 1, kept at run time."""

    var: Var
    start: Expr
    stop: Expr
    body: Block
    span: Span = _span()


@dataclass(frozen=True, slots=True)
class Tasks:
    """Persistent loop over ``extents`` (see ``ir.order`` for the walk); block b of the n blocks of the class takes
    tasks b, b+n, ...; the count runs on from one task loop of the class to the next.  ``group`` is at least 1.

    ``dynamic``: a block claims the next number instead.  ``cluster`` = 2: neighbours of the next-to-last extent go to
    a pair of blocks that load together what both need.
    """

    vars: tuple[Var, ...]
    extents: tuple[Expr, ...]
    body: Block
    group: Expr = field(default_factory=lambda: Const(8, INT))
    span: Span = _span()
    dynamic: bool = False
    cluster: int = 1


@dataclass(frozen=True, slots=True)
class While:
    """``while cond``: kept at run time; ``cond`` is evaluated before every turn."""

    cond: Expr
    body: Block
    span: Span = _span()


@dataclass(frozen=True, slots=True)
class If:
    """A branch on a run-time scalar."""

    cond: Expr
    then: Block
    orelse: Block = ()
    span: Span = _span()


RoleKind = Literal["loader", "consumer", "storer", "communicator", "team"]


@dataclass(frozen=True, slots=True)
class Role:
    """``with pk.loader()`` / ``consumer(warpgroups=n)`` / ``storer()``.  Statements outside roles are replicated.

    ``communicator``: ``with pk.communicator():``, one warp beside the other roles of every block that computes.  It
    stands at the top of ``Kernel.compute``, at most once, and sees nothing of it: its task loops are its own.
    ``warpgroups``: those that share a tile.  ``teams`` of so many take tasks in turn (``pingpong``), each a whole tile.
    ``stagger``: the warpgroups issue their mma in turn.
    """

    kind: RoleKind
    body: Block
    warpgroups: int = 0
    span: Span = _span()
    teams: int = 1
    stagger: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """Hold the next stage of ``pipeline``: ``fill`` (it is free) or ``drain`` (it is full), release it at the end.

    ``early``: only in mutants (``ir.mutate``): so many uses of the stage fewer are waited for.
    """

    pipeline: str
    mode: Literal["fill", "drain"]
    body: Block
    span: Span = _span()
    early: int = 0


@dataclass(frozen=True, slots=True)
class Do:
    """An op of the table with an effect, e.g. ``load_async(Shared, Memory)``."""

    op: str
    operands: tuple[Operand, ...]
    attrs: tuple[tuple[str, object], ...] = ()
    span: Span = _span()

    def attr(self, name: str) -> object:
        """The attribute called ``name``."""
        return dict(self.attrs)[name]


@dataclass(frozen=True, slots=True)
class Assert:
    """A condition that the launch gives up without; ``text`` is the user's."""

    cond: Expr
    text: str
    span: Span = _span()


@dataclass(frozen=True, slots=True)
class Bounds:
    """``least <= index < bound + slack`` where ``guard`` holds, or the launch gives up.  Made by ``ir.sanitize`` only.

    ``index``: an int, or an index vector, whose negative elements pass.  ``bound``: ``World``, or the ``Dim`` of a
    tensor or of an array of signals.  ``what`` says what the index is, for people.
    """

    index: Expr
    bound: Dim | World
    what: str
    guard: Expr | None = None
    least: int = 0
    slack: int = 0
    span: Span = _span()


Statement = Assign | For | While | Tasks | If | Role | Stage | Do | Assert | Bounds
Block = tuple[Statement, ...]


# ---------------------------------------------------------------------------------------- declarations
@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor parameter.  ``global``: this rank's own memory.  ``parallel``: the same on every rank, symmetric."""

    name: str
    kind: Literal["global", "parallel"]
    dtype: DType
    ndim: int
    span: Span = _span()


@dataclass(frozen=True, slots=True)
class Signals:
    """``pk.signals(*shape)``: symmetric int32 counters, zero at launch.  ``()`` is one counter."""

    name: str
    shape: tuple[Expr, ...]
    span: Span = _span()


@dataclass(frozen=True, slots=True)
class Scratch:
    """``pk.scratch(shape, dtype)``: symmetric work space, contiguous, contents undefined at launch."""

    name: str
    shape: tuple[Expr, ...]
    dtype: DType
    span: Span = _span()


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A ring of ``stages`` tile sets, used by the roles of class ``owner``; ``over``: with the stages of another.

    ``by_rows``: tiles that ``gather_async`` or ``scatter_async`` copy row by row; their rows are plain and padded.
    """

    name: str
    stages: int
    tiles: tuple[tuple[str, Tile], ...]
    owner: str = "compute"
    span: Span = _span()
    by_rows: frozenset[str] = frozenset()
    over: str = ""

    def tile(self, field_name: str) -> Tile:
        """The tile called ``field_name``."""
        return dict(self.tiles)[field_name]


@dataclass(frozen=True, slots=True)
class SharedTile:
    """``pk.shared(shape, dtype)`` outside a pipeline: one tile a block, private to the consumer of class ``owner``."""

    name: str
    type: Tile
    owner: str = "compute"
    span: Span = _span()


@dataclass(frozen=True, slots=True)
class Communicator:
    """``with pk.communicator(sms=k)``: k whole SMs (clipped to half the blocks, at least 1) that run only this body;
    ``joins``: and then take tasks as the blocks that compute do.
    """

    sms: Expr
    body: Block
    span: Span = _span()
    joins: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """One specialised kernel.  ``prologue``: scalar assignments at the top, visible in both classes.

    ``constants`` are the folded ``constexpr`` parameters, for printing and for the name of the artifact.
    """

    name: str
    tensors: tuple[Tensor, ...]
    scalars: tuple[Param, ...]
    signals: tuple[Signals, ...]
    scratch: tuple[Scratch, ...]
    pipelines: tuple[Pipeline, ...]
    prologue: Block
    compute: Block
    communicators: tuple[Communicator, ...] = ()
    constants: tuple[tuple[str, object], ...] = ()
    span: Span = _span()
    shared: tuple[SharedTile, ...] = ()

    @property
    def communicator(self) -> Communicator | None:
        """The first communicator."""
        return self.communicators[0] if self.communicators else None

    @property
    def joins(self) -> bool:
        """Whether the blocks of the communicator, the only one, compute behind it."""
        return any(c.joins for c in self.communicators)

    @property
    def classes(self) -> tuple[tuple[str, Block], ...]:
        """Name and body of every class of blocks: ``compute``, ``communicator``, ``communicator_2``, ..."""
        names = [communicator_name(i) for i in range(len(self.communicators))]
        return (("compute", self.compute), *((n, c.body) for n, c in zip(names, self.communicators, strict=True)))

    def tensor(self, name: str) -> Tensor | Scratch:
        """The tensor parameter or scratch buffer called ``name``."""
        found: list[Tensor | Scratch] = [*self.tensors, *self.scratch]
        for t in found:
            if t.name == name:
                return t
        raise KeyError(name)

    def pipeline(self, name: str) -> Pipeline:
        """The pipeline called ``name``."""
        return next(p for p in self.pipelines if p.name == name)


def communicator_name(index: int) -> str:
    """What the class of communicator ``index`` (0, 1, ...) is called."""
    return "communicator" if index == 0 else f"communicator_{index + 1}"


def const(value: int | float | bool, span: Span = NOWHERE) -> Const:
    """A literal with the scalar type that its Python type implies."""
    from pk.ir.types import FLOAT

    kind = BOOL if isinstance(value, bool) else INT if isinstance(value, int) else FLOAT
    return Const(value, kind, span)
