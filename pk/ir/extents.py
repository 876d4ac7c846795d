"""The shapes of counters and scratch in one launch, and what cannot be one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pk.errors import ArgumentError, frame
from pk.ir import nodes as ir
from pk.ir.index import evaluate

MAX_COUNTERS = 2**31 - 1  # of a launch: kernels number them in 32 bits
MAX_SCRATCH = 2**48  # bytes of a launch, more than any GPU has


def extents(declared: ir.Signals | ir.Scratch, values: Mapping[str, Any], kernel: str) -> tuple[int, ...]:
    """The shape of a declaration in one launch; :class:`pk.errors.ArgumentError` if there is none."""
    call = "pk.signals" if isinstance(declared, ir.Signals) else "pk.scratch"
    try:
        shape = tuple(int(evaluate(e, values)) for e in declared.shape)
    except ZeroDivisionError:
        raise ArgumentError(
            f"the shape of `{declared.name}` of kernel `{kernel}` divides by zero.\n{frame(declared.span)}\n"
            "  Pass tensors and numbers for which it does not."
        ) from None
    if any(extent < 0 for extent in shape):
        raise ArgumentError(
            f"`{declared.name}` of kernel `{kernel}` has shape {shape}, and an extent is negative.\n"
            f"{frame(declared.span)}\n  {call} takes extents of 0 or more."
        )
    return shape


def bounded_counters(shapes: Mapping[str, Sequence[int]], kernel: str) -> None:
    """Raise :class:`pk.errors.ArgumentError` if a launch declares more counters than a kernel can number."""
    total = sum(math.prod(shape) for shape in shapes.values())
    if total > MAX_COUNTERS:
        listing = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ArgumentError(
            f"kernel `{kernel}` declares {total} counters ({listing}), and a launch has at most {MAX_COUNTERS}.\n"
            "  Declare fewer: one for each tile, not for each element."
        )


def bounded_scratch(sizes: Mapping[str, int], kernel: str) -> None:
    """Raise :class:`pk.errors.ArgumentError` if a launch declares more scratch (bytes by name) than can exist."""
    if sum(sizes.values()) > MAX_SCRATCH:
        listing = ", ".join(f"{name} {size} bytes" for name, size in sizes.items())
        raise ArgumentError(
            f"kernel `{kernel}` declares {sum(sizes.values())} bytes of scratch ({listing}), more than a GPU has.\n"
            "  Declare less, or pass a tensor."
        )
