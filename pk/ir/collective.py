"""The rules of ``reduce`` and ``all_reduce``: which windows of tensors fit.

As in ``rules``, the front end asks while it reads and ``check`` asks again for the whole kernel.
"""

from __future__ import annotations

import math
from typing import cast

from pk import errors
from pk.ir import nodes as ir
from pk.ir.rules import listed
from pk.ir.types import DType, bfloat16, float16, float32

OPS = ("sum", "min", "max")
DTYPES = (bfloat16, float16, float32)
MAX_ELEMENTS = 1 << 16  # of one window: a task that is larger would keep one block busy for long


def ndim(x: ir.Tensor | ir.Scratch) -> int:
    """Number of dimensions."""
    return x.ndim if isinstance(x, ir.Tensor) else len(x.shape)


def reduced(
    op: str, to: ir.Tensor | ir.Scratch, source: ir.Tensor | ir.Scratch, shape: object, how: object, span: ir.Span
) -> tuple[int, ...]:
    """``reduce`` of windows of ``shape`` of ``source`` into ``to`` (``all_reduce``: the same tensor); the shape."""
    if how not in OPS:
        raise errors.WrongOperand(f"pk.{op} with op={errors.short(how)}", span, f"Use {listed(repr(o) for o in OPS)}.")
    extents = cast("tuple[int, ...]", shape)
    if len(extents) not in (1, 2) or any(extent < 1 for extent in extents):
        raise errors.WrongTileShape(
            f"pk.{op} of windows of shape {extents}",
            span,
            "Give it one or two positive extents, (cols,) or (rows, cols).",
        )
    if math.prod(extents) > MAX_ELEMENTS:
        raise errors.WrongTileShape(
            f"pk.{op} of windows of {extents}, more than {MAX_ELEMENTS:,} elements", span,
            "Make the windows smaller: each is the work of one block.",
        )  # fmt: skip
    for x in (to, source):
        _fits(op, x, extents, span)
    if to.dtype != source.dtype:
        raise errors.WrongDType(
            f"pk.{op} of `{source.name}` of {source.dtype} into `{to.name}` of {to.dtype}", span,
            "Both must have one dtype: sums are made in float32 and rounded once.",
        )  # fmt: skip
    return extents


def _fits(op: str, x: ir.Tensor | ir.Scratch, extents: tuple[int, ...], span: ir.Span) -> None:
    dtype: DType = x.dtype
    if dtype not in DTYPES:
        raise errors.WrongDType(f"pk.{op} of `{x.name}` of {dtype}", span, f"It combines {listed(DTYPES)}.")
    if len(extents) > ndim(x):
        raise errors.WrongCoordinate(
            f"a window {extents} cannot lie in `{x.name}`, which has {ndim(x)} dimension{'s' * (ndim(x) > 1)}", span,
            "A window has at most as many dimensions as its tensor.",
        )  # fmt: skip
