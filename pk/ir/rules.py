"""The rules of single operations: where they may stand, which operands fit, what type comes out.

The front end asks while it reads, so that the first mistake in the text is the one reported; ``check`` asks again for
the whole kernel, so that IR made by anything else meets the same rules.  Each function raises a
``CompileError`` or returns.
"""

from __future__ import annotations

from collections.abc import Mapping

from pk import errors
from pk.ir import nodes as ir
from pk.ir.communicator import NO_ROLES
from pk.ir.ops import TABLE
from pk.ir.types import DType, Scalar, Tile, Type, bfloat16, boolean, float16, float32, int32

TMA_BOX = 256  # elements of a box along one dimension
ROW_BYTES = 16  # inner extents are multiples of this
SWIZZLE_ROWS = 8  # the period of TMA's swizzles: tiles of other heights are not swizzled
PANEL_ALIGN = 128  # bytes: where a box may begin in shared memory
MMA_ROWS = 64  # accumulator rows of one warpgroup
ADD_DTYPES = (bfloat16, float16, float32, int32)
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
SPELLED = {
    "load_global": "load",
    "load_scalar": "load",
    "load_elements": "load",
    "store_global": "store",
    "store_scalar": "store",
    "store_elements": "store",
    "signal_each": "signal",
    "wait_each": "wait",
}


def spelled(op: str) -> str:
    """What the user writes for ``op``: ``pk.load`` has one op for tensors and one for shared tiles."""
    return SPELLED.get(op, op)


def place(op: str, role: str, span: ir.Span) -> None:
    """``op`` in ``role`` (a role, ``team`` or ``shared``)."""
    row = TABLE[op]
    if role in row.roles or (role == "communicator" and "team" in row.roles):  # a team of one warp
        return
    here = {
        "shared": "in shared code (outside role blocks)", "team": "in a class without role blocks",
        "communicator": "in a communicator",
    }  # fmt: skip
    homes = [f"pk.{r}" for r in ("loader", "consumer", "storer") if r in row.roles]
    advice = f"Move it into a {listed(homes)} block." if homes else "It has no place in role blocks."
    if role == "communicator":
        advice = NO_ROLES
    if op in ("signal", "signal_each", "signal_all", "barrier") and role == "loader":
        advice = "A loader's loads have not landed when it goes on: signal from the role that drains the pipeline."
    raise errors.WrongRole(f"pk.{spelled(op)} may not stand {here.get(role, f'in a {role}')}", span, advice)


def stage(op: str, t: ir.Shared, held: Mapping[str, str], span: ir.Span) -> None:
    """``op`` on shared tile ``t`` while the stages ``held`` (pipeline -> mode) are."""
    if t.private:
        if op not in ("load", "store", "mma"):
            raise errors.WrongOperand(
                f"pk.{op} on `{t.name}`, which belongs to no pipeline",
                span,
                "A shared tile outside a pipeline is private to the consumer: only store, load and mma use it.",
            )
        return
    mode = held.get(t.pipeline)
    if mode is None:
        raise errors.WrongStage(
            f"`{t.name}` is used outside `with {t.pipeline}.fill()` or `with {t.pipeline}.drain()`",
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
def swizzle(tile: Tile) -> int:
    """Swizzle width of a shared tile in bytes: the widest that divides its rows, 0 for rows too short or too few."""
    row = tile.cols * tile.dtype.itemsize
    return next((w for w in (128, 64, 32) if row % w == 0), 0) if tile.rows % SWIZZLE_ROWS == 0 else 0


def panel_bytes(tile: Tile) -> int:
    """Width of the column panels that a shared tile is stored in, one box each: the swizzle, else the whole row.

    Vectors and other tiles that are never swizzled are cut into panels as wide as a box may be, which begin at
    multiples of 128 bytes, where that is possible (``shared_tile`` refuses the others).
    """
    size, whole = tile.dtype.itemsize, tile.cols * tile.dtype.itemsize
    if tile.rows % SWIZZLE_ROWS == 0:
        return swizzle(tile) or whole
    widths = (tile.cols // n for n in range(1, tile.cols + 1) if tile.cols % n == 0)
    plain = (w for w in widths if w <= TMA_BOX and w * size % ROW_BYTES == 0)
    aligned = (w * size for w in plain if w == tile.cols or tile.rows * w * size % PANEL_ALIGN == 0)
    return next(aligned, whole)


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
    if panel_bytes(tile) > TMA_BOX * tile.dtype.itemsize:
        step = (32 if tile.rows % SWIZZLE_ROWS == 0 else 128) // tile.dtype.itemsize
        raise errors.TileTooLarge(
            f"a shared tile {tile.shape} {tile.dtype} is too large for TMA: its rows of {row} bytes are no multiple of "
            f"{step * tile.dtype.itemsize}, so a row must be one box, and a box has at most {TMA_BOX} elements",
            span,
            f"Make the inner extent a multiple of {step}, or at most {TMA_BOX}.",
        )
    boxes = -(-tile.rows // TMA_BOX)
    if boxes > 1 and tile.rows % (SWIZZLE_ROWS * boxes):
        raise errors.TileTooLarge(
            f"a shared tile {tile.shape} {tile.dtype} is too large for TMA: its {tile.rows} rows cannot be cut into "
            f"{boxes} equal boxes of a multiple of {SWIZZLE_ROWS} rows, and a box has at most {TMA_BOX}",
            span,
            f"Make the outer extent a multiple of {SWIZZLE_ROWS * boxes}, or at most {TMA_BOX}.",
        )


def register_tile(tile: Tile, span: ir.Span) -> None:
    """A register tile that ``full`` makes."""
    if len(tile.shape) != 2 or any(extent < 1 for extent in tile.shape):
        raise errors.WrongTileShape(
            f"a register tile cannot have the shape {tile.shape}", span, "Give it two positive extents, (rows, cols)."
        )


ARITHMETIC = ("+", "-", "*", "/", "//", "%", "min", "max")


def tile_binary(op: str, x: Type, y: Type, span: ir.Span) -> Tile:
    """The type of ``x op y`` where one of them is a register tile.

    float32 and int32 mix to float32, ``/`` is always float32, comparisons give bool; ``and`` and ``or`` (written ``&``
    and ``|``) take bools.  An extent of 1 stands for any.
    """
    for t in (x, y):
        if isinstance(t, Tile) and t.space != "register":
            raise errors.WrongOperand(f"`{op}` on {t}", span, "Bring the tile to registers first: pk.load(t).")
    shape = broadcast(f"`{op}`", (x, y), span)
    if op in ("and", "or"):
        for t in (x, y):
            if t.dtype != boolean:
                sign = "&" if op == "and" else "|"
                raise errors.WrongDType(f"`{sign}` on {t}", span, "It joins conditions: compare first, x < y.")
        return Tile(shape, boolean, "register")
    for t in (x, y):
        if t.dtype not in (float32, int32):
            advice = (
                "Use pk.where(mask, x, y), or pk.cast(mask, pk.int32)."
                if t.dtype == boolean
                else "Use pk.cast(r, pk.float32) first."
            )
            raise errors.WrongDType(
                f"`{op}` on {t}: arithmetic on register tiles is in float32 and int32", span, advice
            )
    if op in ir.COMPARISONS:
        return Tile(shape, boolean, "register")
    floating = float32 in (x.dtype, y.dtype)
    if op in ("//", "%") and floating:
        raise errors.WrongOperand(f"`{op}` on float32", span, "It is defined on integers.")
    if op not in ARITHMETIC:
        raise errors.WrongOperand(f"`{op}` is not defined on register tiles", span, f"Tiles have {listed(ARITHMETIC)}.")
    return Tile(shape, float32 if floating or op == "/" else int32, "register")


def broadcast(what: str, types: tuple[Type, ...], span: ir.Span) -> tuple[int, ...]:
    """The shape in which tiles of ``types`` meet, element by element; scalars fit any."""
    shapes = [t.shape for t in types if isinstance(t, Tile)]
    result = shapes[0]
    for shape in shapes[1:]:
        if len(shape) != len(result) or any(a != b and 1 not in (a, b) for a, b in zip(shape, result, strict=True)):
            raise errors.ShapeMismatch(
                f"{what} on register tiles of shapes {result} and {shape}",
                span,
                "Extents must be equal, or 1, which stands for any: (R, 1) and (1, C) fit (R, C).",
            )
        result = tuple(map(max, shape, result))
    return result


def tile_unary(op: str, x: Tile, span: ir.Span) -> Tile:
    """The type of ``-x``, ``abs(x)`` or ``~x`` (op ``not``)."""
    if op == "not":
        if x.dtype != boolean:
            raise errors.WrongDType(f"`~` on {x}", span, "It turns a condition round: compare first, x < y.")
        return x
    return tile_binary("-", x, x, span)


def where(cond: Type, x: Type, y: Type, span: ir.Span) -> Tile:
    """``where(cond, x, y)``: float32 if either is, else int32."""
    if not isinstance(cond, Tile) or cond.space != "register" or cond.dtype != boolean:
        raise errors.WrongDType(
            f"the condition of pk.where is {cond}",
            span,
            "It is a tile of comparisons; for a scalar write `x if c else y`.",
        )
    for t in (x, y):
        if t.dtype not in (float32, int32):
            raise errors.WrongDType(
                f"pk.where chooses between float32 and int32, and got {t}", span, "Use pk.cast first."
            )
    floating = float32 in (x.dtype, y.dtype)
    return Tile(broadcast("pk.where", (cond, x, y), span), float32 if floating else int32, "register")


def mathematics(op: str, x: Type, span: ir.Span) -> Type:
    """The type of ``exp2(x)`` and its like, on a scalar or a register tile: float32; int32 is converted."""
    if x.dtype not in (float32, int32):
        raise errors.WrongDType(f"pk.{op} of {x}", span, "Use pk.cast(r, pk.float32) first.")
    return Tile(x.shape, float32, "register") if isinstance(x, Tile) else Scalar(float32)


def fma(types: tuple[Type, ...], span: ir.Span) -> Tile:
    """``fma(x, y, z)``."""
    if not any(isinstance(t, Tile) for t in types):
        raise errors.WrongOperand("pk.fma of three scalars", span, "It works on register tiles: write x * y + z.")
    for t in types:
        if t.dtype not in (float32, int32):
            raise errors.WrongDType(f"pk.fma of {t}", span, "Use pk.cast(r, pk.float32) first.")
    return Tile(broadcast("pk.fma", types, span), float32, "register")


def reduced(op: str, x: Tile, axis: object, span: ir.Span) -> Tile:
    """``sum(x, axis)`` and its like; the axis stays, with extent 1."""
    if len(x.shape) != 2:
        raise errors.ShapeMismatch(f"pk.{op} of {x}", span, "It reduces tiles of two dimensions.")
    if axis not in (0, 1, -1, -2):
        raise errors.WrongOperand(
            f"pk.{op} along axis {errors.short(axis)}", span, "Axis 0 runs over rows, axis 1 along a row."
        )
    if x.dtype not in (float32, int32):
        raise errors.WrongDType(f"pk.{op} of {x}", span, "Use pk.cast(r, pk.float32) or pk.cast(r, pk.int32) first.")
    rows, cols = x.shape
    return Tile((1, cols) if axis in (0, -2) else (rows, 1), x.dtype, "register")


def iota(tile: Tile, span: ir.Span) -> None:
    """``iota(shape)``: a vector."""
    if len(tile.shape) > 2 or any(n < 1 for n in tile.shape) or (len(tile.shape) == 2 and 1 not in tile.shape):
        raise errors.WrongTileShape(
            f"pk.iota of shape {tile.shape}", span, "It counts along a vector: (R, 1), (1, C), or (R,) for indices."
        )


def window_tile(op: str, tile: Tile, ndim: int, name: str, span: ir.Span) -> None:
    """A register tile of two dimensions in a tensor of ``ndim``: the trailing ones; (1, C) fits one dimension."""
    if len(tile.shape) != 2 or any(n < 1 for n in tile.shape):
        raise errors.WrongTileShape(
            f"pk.{spelled(op)} of shape {tile.shape}", span, "Give it two positive extents, (rows, cols)."
        )
    if ndim < 2 and tile.rows > 1:
        raise errors.WrongCoordinate(
            f"a tile {tile.shape} cannot lie in `{name}`, which has {ndim} dimension", span, "Use the shape (1, C)."
        )


def widened(dtype: DType) -> DType:
    """What elements of ``dtype`` are in registers."""
    return WIDENED.get(dtype.name, dtype)


def stored_as(what: str, x: Type, dtype: DType, span: ir.Span) -> None:
    """A value of type ``x`` to memory of ``dtype``: floats are rounded, integers stay integers."""
    if boolean in (x.dtype, dtype) or (x.dtype.kind == "int") != (dtype.kind == "int"):
        raise errors.WrongDType(
            f"pk.store of {x.dtype} to {what} of {dtype}", span, f"Use pk.cast(r, pk.{dtype}) first."
        )


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
            f"pk.{op} of a transposed tile `{t.name}`",
            span,
            "TMA copies tiles as stored: drop the `.T`; mma, load and store take transposed ones.",
        )
    if tile.dtype != x.dtype:
        raise errors.WrongDType(
            f"pk.{op} between `{t.name}` of {tile.dtype} and `{x.name}` of {x.dtype}",
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
    if t.shape != r.shape:
        raise errors.ShapeMismatch(
            f"pk.store of a register tile {r.shape} to `{t.name}` of shape {t.shape}",
            span,
            "Their shapes must be equal; acc[:, a:b] takes columns.",
        )
    if (t.type.dtype.kind == "int") != (r.dtype.kind == "int"):
        raise errors.WrongDType(
            f"pk.store of {r.dtype} to `{t.name}` of {t.type.dtype}",
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
