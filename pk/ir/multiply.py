"""The rules of ``mma``: what the tensor core can multiply, in which layouts, and what an accumulator costs."""

from __future__ import annotations

from pk import errors
from pk.ir import nodes as ir
from pk.ir.rules import MMA_ROWS, listed
from pk.ir.types import DType, Tile, Type, bfloat16, float8_e4m3, float8_e5m2, float16, float32

SIXTEEN_BIT = (bfloat16, float16)
EIGHT_BIT = (float8_e4m3, float8_e5m2)
STEP_BYTES = 32  # of k in one instruction
MAX_COLS = 256
# Consumer warpgroups -> 32-bit accumulators that a thread can hold beside what addresses and conversions need, and the
# widest instruction: with 512 threads a block begins with 128 registers a thread, whatever it gets later.
ACCUMULATORS = {1: 208, 2: 192, 3: 128}
COLS = {1: 256, 2: 256, 3: 192}

Factor = ir.Shared | Tile


def mma(acc: Type, a: Factor, b: ir.Shared, warpgroups: int, span: ir.Span) -> None:
    """``mma(acc, a, b)`` in a consumer of ``warpgroups``; ``a`` is a shared tile or the type of a register tile."""
    if not isinstance(acc, Tile) or acc.space != "register" or acc.dtype != float32:
        raise errors.WrongDType(
            f"pk.mma accumulates into a float32 register tile, and got {acc}",
            span,
            "Make the accumulator with pk.zeros((M, N), pk.float32).",
        )
    _dtypes(a, b, span)
    shapes = f"acc {acc.shape} += a {a.shape} @ b {b.shape}"
    if len(a.shape) != 2 or len(b.shape) != 2 or acc.shape != (a.shape[0], b.shape[1]) or a.shape[1] != b.shape[0]:
        raise errors.ShapeMismatch(
            f"shapes do not fit in pk.mma: {shapes}",
            span,
            "They must be acc (M, N), a (M, K), b (K, N); `.T` reads a shared tile transposed.",
        )
    _limits(acc, a, b, warpgroups, shapes, span)
    for what, t in (("a", a), ("b", b)):
        if isinstance(t, ir.Shared):
            _layout(what, t, span)


def dtype_of(t: Factor) -> DType:
    """The element type of an operand."""
    return t.type.dtype if isinstance(t, ir.Shared) else t.dtype


def _dtypes(a: Factor, b: ir.Shared, span: ir.Span) -> None:
    x, y = dtype_of(a), dtype_of(b)
    if isinstance(a, Tile) and x not in SIXTEEN_BIT:
        wanted = y if y in SIXTEEN_BIT else SIXTEEN_BIT[0]
        raise errors.WrongDType(
            f"pk.mma of a register tile of {x}",
            span,
            f"In registers `a` is {listed(SIXTEEN_BIT)}: pk.cast(r, pk.{wanted}), or store it to a shared tile.",
        )
    if not (x == y and x in (*SIXTEEN_BIT, float32)) and not (x in EIGHT_BIT and y in EIGHT_BIT):
        raise errors.WrongDType(
            f"pk.mma multiplies {x} by {y}",
            span,
            f"Both operands must be {listed((*SIXTEEN_BIT, 'float32 (read as tf32)'))}, the same for both, "
            "or both 8-bit floats.",
        )


def _limits(acc: Tile, a: Factor, b: ir.Shared, warpgroups: int, shapes: str, span: ir.Span) -> None:
    rows, cols, depth = acc.rows, acc.cols, a.shape[1]
    unit, step = MMA_ROWS * warpgroups, STEP_BYTES // dtype_of(a).itemsize
    groups = f"{warpgroups} warpgroup{'s' * (warpgroups > 1)}"
    problem = f"the tensor core cannot do {shapes}: "
    if rows % unit:
        raise errors.ShapeMismatch(
            f"{problem}M = {rows} is no multiple of {unit} (64 rows for each of {groups})",
            span,
            f"Make M a multiple of {unit}, or change warpgroups=.",
        )
    if cols % 8 or cols > MAX_COLS:
        raise errors.ShapeMismatch(
            f"{problem}N = {cols} is no multiple of 8 up to {MAX_COLS}",
            span,
            f"Make N a multiple of 8, at most {MAX_COLS}.",
        )
    if cols > COLS[warpgroups]:
        raise errors.ShapeMismatch(
            f"{problem}N = {cols} takes more registers than a block of {groups} begins with",
            span,
            f"Make N at most {COLS[warpgroups]}, or use 2 warpgroups.",
        )
    if depth % step:
        raise errors.ShapeMismatch(
            f"{problem}K = {depth} is no multiple of {step}", span, f"Make K a multiple of {step}."
        )
    registers = rows * cols // (128 * warpgroups)
    if registers > ACCUMULATORS[warpgroups]:
        raise errors.ShapeMismatch(
            f"an accumulator {acc.shape} takes {registers} registers a thread in {groups}, and at most "
            f"{ACCUMULATORS[warpgroups]} are free for it",
            span,
            "Make the tile smaller, or use more warpgroups.",
        )


def _layout(what: str, t: ir.Shared, span: ir.Span) -> None:
    """How operand ``what`` must lie in shared memory."""
    size = t.type.dtype.itemsize
    if size != 2 and t.transposed != (what == "b"):
        shape, form = ("(M, K)", "s.a") if what == "a" else ("(N, K)", "s.b.T")
        raise errors.WrongOperand(
            f"pk.mma reads `{t.name}` of {t.type.dtype} across K",
            span,
            f"Operands of {size * 8} bits must be contiguous along K: declare {what} as {shape} and pass `{form}`.",
        )
    if t.type.cols * size % STEP_BYTES:
        raise errors.ShapeMismatch(
            f"the tensor core cannot read `{t.name}` of shape {t.type.shape}: its rows are no multiple of 32 bytes",
            span,
            f"Make the inner extent of the shared tile a multiple of {STEP_BYTES // size}.",
        )
    if t.type.rows % 8:
        raise errors.ShapeMismatch(
            f"the tensor core cannot read `{t.name}` of shape {t.type.shape}: its rows are no multiple of 8",
            span,
            "Make the outer extent of the shared tile a multiple of 8.",
        )
