"""The rules of single operations: where they may stand, which operands fit, what type comes out.

The front end asks while it reads, so that the first mistake in the text is the one reported; ``check`` asks again for
the whole kernel, so that IR made by anything else meets the same rules.  Each function raises a
``CompileError`` or returns.
"""

from __future__ import annotations

from collections.abc import Mapping

from pk import errors
from pk.ir import nodes as ir
from pk.ir.ops import TABLE
from pk.ir.types import DType, Tile, Type, bfloat16, float16, float32

TMA_BOX = 256  # elements of a box along one dimension
ROW_BYTES = 16  # inner extents are multiples of this
MMA_DTYPES = (bfloat16, float16)
MMA_K = 16
MMA_ROWS = 64  # accumulator rows of one warpgroup
MMA_COLS = 256
ADD_DTYPES = (bfloat16, float16, float32)
BLOCK_SHARED = 232448  # bytes of shared memory a block can have: 227 KiB
RESERVED_SHARED = 1024  # for barriers and alignment
TILE_ALIGN = 1024
MAX_WARPGROUPS = 3

WIDENED = {"bfloat16": float32, "float16": float32, "float8_e4m3": float32, "float8_e5m2": float32}


def listed(words: object) -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    items = sorted(str(w) for w in words)  # type: ignore[attr-defined]
    return " or ".join(([", ".join(items[:-1])] if items[1:] else []) + items[-1:])


# -------------------------------------------------------------------------------------------------- places
def place(op: str, role: str, span: ir.Span) -> None:
    """``op`` in ``role`` (a role, ``team`` or ``shared``)."""
    row = TABLE[op]
    if role in row.roles:
        return
    here = {"shared": "in shared code (outside role blocks)", "team": "in a class without role blocks"}
    homes = [f"pk.{r}" for r in ("loader", "consumer", "storer") if r in row.roles]
    advice = f"Move it into a {listed(homes)} block." if homes else "It has no place in role blocks."
    if op in ("signal", "signal_all", "barrier") and role == "loader":
        advice = "A loader's loads have not landed when it goes on: signal from the role that drains the pipeline."
    raise errors.WrongRole(f"pk.{op} may not stand {here.get(role, f'in a {role}')}", span, advice)


def stage(op: str, t: ir.Shared, held: Mapping[str, str], span: ir.Span) -> None:
    """``op`` on shared tile ``t`` while the stages ``held`` (pipeline -> mode) are."""
    mode = held.get(t.pipeline)
    if mode is None:
        raise errors.WrongStage(
            f"`{t.pipeline}.{t.field}` is used outside `with {t.pipeline}.fill()` or `with {t.pipeline}.drain()`",
            span,
            "A tile of a pipeline belongs to a role only while it holds the stage: move the line into the `with`.",
        )
    within = TABLE[op].within
    if within is not None and mode != within:
        raise errors.WrongStage(
            f"pk.{op} needs a stage in `{within}`, and `{t.pipeline}` is in `{mode}` here",
            span,
            f"Write `with {t.pipeline}.{within}() as s:` around it.",
        )


# --------------------------------------------------------------------------------------------------- tiles
def swizzle_bytes(tile: Tile) -> int:
    """Width of the panels a shared tile is stored in: 128, 64 or 32 bytes (swizzled), else the whole row."""
    row = tile.cols * tile.dtype.itemsize
    return next((w for w in (128, 64, 32) if row % w == 0), row)


def shared_tile(tile: Tile, span: ir.Span) -> None:
    """A declaration ``pk.shared(shape, dtype)``."""
    if len(tile.shape) not in (1, 2) or any(extent < 1 for extent in tile.shape):
        raise errors.WrongTileShape(
            f"a shared tile cannot have the shape {tile.shape}",
            span,
            "Give it one or two positive extents, (cols,) or (rows, cols).",
        )
    row = tile.cols * tile.dtype.itemsize
    if row % ROW_BYTES:
        step = ROW_BYTES // tile.dtype.itemsize
        raise errors.WrongTileShape(
            f"rows of a shared tile {tile.shape} {tile.dtype} have {row} bytes, and must be multiples of {ROW_BYTES}",
            span,
            f"Make the inner extent a multiple of {step}.",
        )
    if swizzle_bytes(tile) == row and tile.cols > TMA_BOX:
        step = 32 // tile.dtype.itemsize
        raise errors.TileTooLarge(
            f"a shared tile {tile.shape} {tile.dtype} is too large for TMA: its rows of {row} bytes are no multiple of "
            f"32, so a row must be one box, and a box has at most {TMA_BOX} elements",
            span,
            f"Make the inner extent a multiple of {step}, or at most {TMA_BOX}.",
        )


def register_tile(tile: Tile, span: ir.Span) -> None:
    """A register tile that ``full`` makes."""
    if len(tile.shape) != 2 or any(extent < 1 for extent in tile.shape):
        raise errors.WrongTileShape(
            f"a register tile cannot have the shape {tile.shape}", span, "Give it two positive extents, (rows, cols)."
        )


def split_rows(tile: Tile, warpgroups: int, span: ir.Span) -> None:
    """A register tile in a consumer of ``warpgroups``: its rows are dealt to the warpgroups, 64 at a time."""
    unit = MMA_ROWS * warpgroups
    if tile.rows % unit:
        raise errors.ShapeMismatch(
            f"a register tile of {tile.rows} rows cannot be split among {warpgroups} warpgroups",
            span,
            f"Rows must be a multiple of {unit} (64 for each warpgroup).",
        )


def tile_binary(op: str, x: Type, y: Type, span: ir.Span) -> Tile:
    """The type of ``x op y`` where one of them is a register tile."""
    for t in (x, y):
        if isinstance(t, Tile) and t.space != "register":
            raise errors.WrongOperand(f"`{op}` on {t}", span, "Bring the tile to registers first: pk.load(t).")
    if op not in ("+", "-", "*", "/", "min", "max"):
        raise errors.WrongOperand(
            f"`{op}` is not defined on register tiles", span, "Tiles have + - * / and pk.min, pk.max."
        )
    tiles = [t for t in (x, y) if isinstance(t, Tile)]
    for t in tiles:
        if t.dtype != float32:
            raise errors.WrongDType(
                f"`{op}` on {t}: arithmetic on register tiles is in float32", span, "Use pk.cast(r, pk.float32) first."
            )
    if len(tiles) == 2 and tiles[0].shape != tiles[1].shape:
        raise errors.ShapeMismatch(
            f"`{op}` on register tiles of shapes {tiles[0].shape} and {tiles[1].shape}",
            span,
            "Their shapes must be equal.",
        )
    return tiles[0]


def loaded(t: ir.Shared) -> Tile:
    """The register tile that ``load`` makes of a shared one."""
    return Tile(t.shape, WIDENED.get(t.type.dtype.name, t.type.dtype), "register")


def columns(tile: Tile, start: int, stop: int, span: ir.Span) -> Tile:
    """Columns ``start``..``stop`` of a register tile."""
    if not 0 <= start < stop <= tile.cols:
        raise errors.ShapeMismatch(
            f"columns {start}:{stop} of a tile with {tile.cols} columns", span, "Take columns inside the tile."
        )
    if start % 8 or stop % 8:
        raise errors.ShapeMismatch(
            f"columns {start}:{stop} are no multiples of 8", span, "Column slices start and stop at multiples of 8."
        )
    return Tile((*tile.shape[:-1], stop - start), tile.dtype, "register")


# -------------------------------------------------------------------------------------------------- copies
def moved(op: str, t: ir.Shared, x: ir.Tensor | ir.Scratch, span: ir.Span) -> None:
    """``load_async`` and its like, between shared tile ``t`` and tensor ``x``."""
    tile = t.type
    if t.transposed:
        raise errors.WrongOperand(
            f"pk.{op} of a transposed tile `{t.pipeline}.{t.field}.T`",
            span,
            "Only mma reads tiles transposed: drop the `.T`.",
        )
    if tile.dtype != x.dtype:
        raise errors.WrongDType(
            f"pk.{op} between `{t.pipeline}.{t.field}` of {tile.dtype} and `{x.name}` of {x.dtype}",
            span,
            f"A copy does not convert: declare the tile with `{x.name}.dtype`.",
        )
    if op == "store_add_async" and tile.dtype not in ADD_DTYPES:
        raise errors.WrongDType(f"pk.store_add_async of {tile.dtype}", span, f"Memory can add {listed(ADD_DTYPES)}.")
    ndim = x.ndim if isinstance(x, ir.Tensor) else len(x.shape)
    if len(tile.shape) > ndim:
        raise errors.WrongCoordinate(
            f"a tile {tile.shape} cannot lie in `{x.name}`, which has {ndim} dimension{'s' * (ndim > 1)}",
            span,
            "A tile has at most as many dimensions as its tensor.",
        )


def stored(t: ir.Shared, r: Type, span: ir.Span) -> None:
    """``store(t, r)``."""
    if not isinstance(r, Tile) or r.space != "register":
        raise errors.WrongOperand(
            f"pk.store writes a register tile, and got {r}", span, "Make one with pk.full, pk.load or pk.zeros."
        )
    if t.transposed:
        raise errors.WrongOperand(
            f"pk.store to a transposed tile `{t.pipeline}.{t.field}.T`",
            span,
            "Only mma reads tiles transposed: drop the `.T`.",
        )
    if t.shape != r.shape:
        raise errors.ShapeMismatch(
            f"pk.store of a register tile {r.shape} to `{t.pipeline}.{t.field}` of shape {t.shape}",
            span,
            "Their shapes must be equal; acc[:, a:b] takes columns.",
        )
    if (t.type.dtype.kind == "int") != (r.dtype.kind == "int"):
        raise errors.WrongDType(
            f"pk.store of {r.dtype} to `{t.pipeline}.{t.field}` of {t.type.dtype}",
            span,
            f"Use pk.cast(r, pk.{t.type.dtype}).",
        )


def cast(x: Type, dtype: DType, span: ir.Span) -> Tile:
    """``cast(r, dtype)``."""
    if not isinstance(x, Tile) or x.space != "register":
        raise errors.WrongOperand(
            f"pk.cast converts a register tile, and got {x}", span, "Bring the tile to registers first: pk.load(t)."
        )
    return Tile(x.shape, dtype, "register")


# --------------------------------------------------------------------------------------------------- mma
def mma(acc: Type, a: ir.Shared, b: ir.Shared, warpgroups: int, span: ir.Span) -> None:
    """``mma(acc, a, b)`` in a consumer of ``warpgroups``."""
    if not isinstance(acc, Tile) or acc.space != "register" or acc.dtype != float32:
        raise errors.WrongDType(
            f"pk.mma accumulates into a float32 register tile, and got {acc}",
            span,
            "Make the accumulator with pk.zeros((M, N), pk.float32).",
        )
    if a.type.dtype != b.type.dtype or a.type.dtype not in MMA_DTYPES:
        raise errors.WrongDType(
            f"pk.mma multiplies {a.type.dtype} by {b.type.dtype}",
            span,
            f"Both operands must be {listed(MMA_DTYPES)}, the same for both.",
        )
    shapes = f"acc {acc.shape} += a {a.shape} @ b {b.shape}"
    if len(a.shape) != 2 or len(b.shape) != 2 or acc.shape != (a.shape[0], b.shape[1]) or a.shape[1] != b.shape[0]:
        raise errors.ShapeMismatch(
            f"shapes do not fit in pk.mma: {shapes}",
            span,
            "They must be acc (M, N), a (M, K), b (K, N); `.T` reads a shared tile transposed.",
        )
    _mma_limits(acc, a, b, warpgroups, shapes, span)


def _mma_limits(acc: Tile, a: ir.Shared, b: ir.Shared, warpgroups: int, shapes: str, span: ir.Span) -> None:
    rows, cols, depth = acc.rows, acc.cols, a.shape[1]
    unit = MMA_ROWS * warpgroups
    if rows % unit:
        raise errors.ShapeMismatch(
            f"the tensor core cannot do {shapes}: M = {rows} is no multiple of {unit} (64 rows for each of "
            f"{warpgroups} warpgroup{'s' * (warpgroups > 1)})",
            span,
            f"Make M a multiple of {unit}, or change warpgroups=.",
        )
    if cols % 8 or cols > MMA_COLS:
        raise errors.ShapeMismatch(
            f"the tensor core cannot do {shapes}: N = {cols} is no multiple of 8 up to {MMA_COLS}",
            span,
            f"Make N a multiple of 8, at most {MMA_COLS}.",
        )
    if depth % MMA_K:
        raise errors.ShapeMismatch(
            f"the tensor core cannot do {shapes}: K = {depth} is no multiple of {MMA_K}",
            span,
            f"Make K a multiple of {MMA_K}.",
        )
    for t in (a, b):
        if t.type.cols * t.type.dtype.itemsize % 32:
            raise errors.ShapeMismatch(
                f"the tensor core cannot read `{t.pipeline}.{t.field}` of shape {t.type.shape}: "
                "its rows are no multiple of 32 bytes",
                span,
                "Make the inner extent of the shared tile a multiple of 16.",
            )
