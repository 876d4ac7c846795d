"""Index vectors: the rules of operations that act on one row, element or counter a lane.

An index vector is a register tile of one dimension, int32 ``(R,)`` (bool, if it compares), R at most 128.  Where one
may stand, so may a scalar: it counts for all lanes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

from pk import errors
from pk.ir import nodes as ir
from pk.ir.split import statements, walk
from pk.ir.types import INT, Tile, Type, int32

MAX_LANES = 128
ROW_OPS = {"gather_async": (0, 1), "scatter_async": (1, 0)}  # -> positions of tile and window
COUNTER_OPS = ("signal_each", "wait_each")
PADDING = 16  # bytes behind each row of a tile that is copied by rows


def is_vector(kind: Type | None) -> bool:
    """Whether ``kind`` is the type of an index vector."""
    return isinstance(kind, Tile) and kind.space == "register" and len(kind.shape) == 1


def has_vector(operands: Iterable[object]) -> bool:
    """Whether one of ``operands``, or a coordinate, rank or index in it, is an index vector."""
    return any(is_vector(getattr(e, "type", None)) for o in operands for e in _entries(o))


def vector(count: int, span: ir.Span) -> Tile:
    """The type of an index vector of ``count`` elements."""
    if not 1 <= count <= MAX_LANES:
        raise errors.WrongTileShape(
            f"an index vector of {count} elements",
            span,
            f"It has 1 to {MAX_LANES}: one a lane, at most four registers.",
        )
    return Tile((count,), int32, "register")


def lanes(what: str, operands: Iterable[object], span: ir.Span) -> int:
    """How many elements the index vectors among ``operands`` have; all must have as many, and be int32."""
    found: int | None = None
    for kind in (getattr(e, "type", None) for o in operands for e in _entries(o)):
        if is_vector(kind):
            kind = cast(Tile, kind)
            if kind.dtype != int32:
                raise errors.WrongDType(f"{what} is {kind}", span, "It must be int32: pk.where(mask, x, -1).")
            if found is not None and kind.cols != found:
                raise errors.ShapeMismatch(
                    f"{what} has index vectors of {found} and of {kind.cols} elements", span, "They must be as long."
                )
            found = kind.cols
            vector(found, span)
        elif kind != INT:
            raise errors.WrongOperand(f"{what} is {kind}", span, "It must be an integer or an index vector.")
    if found is None:
        raise errors.WrongOperand(f"{what} has no index vector", span, "Make one with pk.load or pk.iota.")
    return found


def _entries(o: object) -> tuple[object, ...]:
    if isinstance(o, ir.Memory):
        return (*o.coord, *([] if o.rank is None else [o.rank]))
    return o.index if isinstance(o, ir.Signal) else (o,)


def rows(op: str, t: ir.Shared, x: ir.Tensor | ir.Scratch, window: ir.Memory, span: ir.Span) -> None:
    """``gather_async`` or ``scatter_async`` between shared tile ``t`` and the rows of ``x`` that ``window`` names."""
    ndim = x.ndim if isinstance(x, ir.Tensor) else len(x.shape)
    if t.transposed or len(t.type.shape) != 2:
        raise errors.WrongOperand(
            f"pk.{op} of `{t.name}` of shape {t.shape}",
            span,
            "It copies rows of a tile (R, C) as stored: drop the `.T`.",
        )
    if ndim != 2:
        raise errors.WrongCoordinate(
            f"pk.{op} with `{x.name}`, which has {ndim} dimension{'s' * (ndim > 1)}",
            span,
            "Pass a view of two: (rows, cols).",
        )
    if t.type.dtype != x.dtype:
        raise errors.WrongDType(
            f"pk.{op} between `{t.name}` of {t.type.dtype} and `{x.name}` of {x.dtype}",
            span,
            f"A copy does not convert: declare the tile with `{x.name}.dtype`.",
        )
    count = lanes(
        f"the rows of `{x.name}`", (window.coord[0], *([window.rank] if window.rank is not None else [])), span
    )
    if count != t.type.rows:
        raise errors.ShapeMismatch(
            f"pk.{op} of a tile of {t.type.rows} rows with an index vector of {count} elements", span,
            "One element says where one row of the tile lies.",
        )  # fmt: skip
    if not is_vector(window.coord[0].type):
        raise errors.WrongOperand(
            f"the rows of pk.{op} are one integer", span, "Rows one after the other move by load_async and store_async."
        )
    if window.coord[1].type != INT:
        raise errors.WrongOperand(f"the column of pk.{op} is {window.coord[1].type}", span, "It must be an integer.")


def owner(op: str, x: ir.Tensor | ir.Scratch, window: ir.Memory, span: ir.Span) -> None:
    """Whose copy of ``x`` an operation on elements or rows touches."""
    symmetric = isinstance(x, ir.Scratch) or x.kind == "parallel"
    if window.everyone or symmetric != (window.rank is not None):
        raise errors.WrongOperand(
            f"pk.{op} does not say which rank's copy of `{x.name}`" if symmetric else
            f"`{x.name}` is a Global: it exists on this rank only", span,
            f"Write {x.name}[rank], or rank= with an index vector." if symmetric else "Drop the rank.",
        )  # fmt: skip


def elements(op: str, x: ir.Tensor | ir.Scratch, window: ir.Memory, more: tuple[ir.Expr, ...], span: ir.Span) -> Tile:
    """``load_elements`` or ``store_elements``: the type of the vector that is moved."""
    ndim = x.ndim if isinstance(x, ir.Tensor) else len(x.shape)
    owner(op, x, window, span)
    if len(window.coord) != ndim:
        raise errors.WrongCoordinate(
            f"the coordinate of `{x.name}` has {len(window.coord)} entries, and it has {ndim} dimensions", span,
            "Give one entry for each dimension.",
        )  # fmt: skip
    if x.dtype != int32:
        raise errors.WrongDType(
            f"pk.{op} of index vectors with `{x.name}` of {x.dtype}",
            span,
            "Index vectors are int32, and so is what holds them.",
        )
    return vector(lanes(f"an element of `{x.name}`", (window, *more), span), span)


# ----------------------------------------------------------------------------------------------- tiles by rows
def by_rows(kernel: ir.Kernel) -> ir.Kernel:
    """``kernel`` with the tiles marked that ``gather_async`` and ``scatter_async`` copy row by row."""
    found = _row_copies(kernel)
    pipelines = (
        replace(p, by_rows=frozenset(name for name, _ in p.tiles if (p.name, name) in found)) for p in kernel.pipelines
    )
    return replace(kernel, pipelines=tuple(pipelines)) if found else kernel


def check_rows(kernel: ir.Kernel) -> None:
    """Raise WrongOperand for a tile copied by rows that TMA or the tensor core also touches, in another layout."""
    found = _row_copies(kernel)
    for s in _done(kernel):
        for t in walk(s.operands):
            if isinstance(t, ir.Shared) and (t.pipeline, t.field) in found and s.op not in (*ROW_OPS, "store"):
                where = found[t.pipeline, t.field]
                raise errors.WrongOperand(
                    f"`{t.name}` is used by pk.{s.op}, and by pk.{where.op} at line {where.span.line}",
                    s.span,
                    f"pk.{where.op} copies single rows, which need another layout in shared memory than pk.{s.op}: "
                    "use a tile of its own, or pass the values through registers.",
                )
    for p in kernel.pipelines:
        if p.by_rows != {name for name, _ in p.tiles if (p.name, name) in found}:
            raise errors.WrongDeclaration(
                f"tiles {sorted(p.by_rows)} of `{p.name}` are marked as copied by rows", p.span, "Use vectors.by_rows."
            )


def row_tensors(kernel: ir.Kernel) -> tuple[str, ...]:
    """Tensors of which rows are copied."""
    windows = [s.operands[ROW_OPS[s.op][1]] for s in _done(kernel) if s.op in ROW_OPS]
    return tuple(dict.fromkeys(w.tensor for w in windows if isinstance(w, ir.Memory)))


def stored_tensors(kernel: ir.Kernel) -> tuple[str, ...]:
    """Tensors that whole tiles are stored or added to asynchronously."""
    windows = [s.operands[0] for s in _done(kernel) if s.op in ("store_async", "store_add_async")]
    found = [w for window in windows for w in ((window.x, window.y) if isinstance(window, ir.Choose) else (window,))]
    return tuple(dict.fromkeys(w.tensor for w in found if isinstance(w, ir.Memory)))


def _done(kernel: ir.Kernel) -> list[ir.Do]:
    return [s for _, body in kernel.classes for s in statements(body) if isinstance(s, ir.Do)]


def _row_copies(kernel: ir.Kernel) -> dict[tuple[str, str], ir.Do]:
    """(pipeline, field) of every tile that is copied by rows, and one statement that does it."""
    return {
        (t.pipeline, t.field): s
        for s in _done(kernel) if s.op in ROW_OPS for t in s.operands if isinstance(t, ir.Shared)
    }  # fmt: skip
