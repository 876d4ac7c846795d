"""Tensor-parallel matrix products."""

from __future__ import annotations

from typing import Any

import torch

from pk.errors import ArgumentError
from pk.ops import inputs, kernels
from pk.ops.workspace import symmetric_workspace
from pk.runtime.group import current


def matmul_reduce_scatter(
    a: torch.Tensor, b: torch.Tensor, group: Any = None, deterministic: bool | None = None
) -> torch.Tensor:
    """This rank's rows of the sum over ranks of ``a @ b``.

    a (M, K/world) and b (K/world, N) are this rank's slice of the contraction, bfloat16 or float16, rows contiguous;
    M is a multiple of the world size, K/world and N multiples of 8.  Returns (M/world, N), ordinary memory, the dtype
    of ``a``; accumulation within a rank is float32.

    ``deterministic``: True sends every partial sum, rounded to the dtype, to the owner, who adds them in rank order in
    float32: the same bits on every run.  False adds in the owner's memory as partials come, rounding at every addition.
    None: True for three ranks or more (with two both orders are the same).

    The call is collective: all ranks of ``group`` (a ``torch.distributed`` process group, or None for the current
    one) make it, with the same shapes.  There is no backward yet: under autograd, pass detached tensors.  Raises
    :class:`pk.errors.ArgumentError` for shapes and dtypes that cannot
    work.
    """
    owner = current(group)
    world = owner.world_size
    a, b = inputs.tensors("matmul_reduce_scatter", a=a, b=b)
    _check(a, b, world)
    rows, cols = a.shape[0] // world, b.shape[1]
    if rows * cols * a.shape[1] == 0:
        return a.new_zeros((rows, cols))
    parts = a.view(world, rows, a.shape[1])
    if world > 2 if deterministic is None else deterministic:
        out = a.new_empty((rows, cols))
        kernels.matmul_reduce_scatter_ordered(parts, b, out, group=owner)
        return out
    c = symmetric_workspace(owner, "matmul_reduce_scatter", (rows, cols), a.dtype)
    kernels.matmul_reduce_scatter(parts, b, c, group=owner)
    return c.clone()


def _check(a: torch.Tensor, b: torch.Tensor, world: int) -> None:
    for name, tensor in (("a", a), ("b", b)):
        if tensor.ndim != 2:
            raise ArgumentError(f"`{name}` has shape {tuple(tensor.shape)}, not 2 dimensions.\n  Pass a matrix.")
        if tensor.dtype not in (torch.bfloat16, torch.float16):
            raise ArgumentError(
                f"`{name}` is {tensor.dtype}, and must be torch.bfloat16 or torch.float16.\n"
                f"  Cast it with `{name}.bfloat16()`."
            )
    if a.dtype != b.dtype:
        raise ArgumentError(f"`a` is {a.dtype} and `b` is {b.dtype}.\n  Cast one: both must have the same dtype.")
    if a.shape[1] != b.shape[0]:
        raise ArgumentError(
            f"`a` is {tuple(a.shape)} and `b` is {tuple(b.shape)}: "
            f"the inner extents {a.shape[1]} and {b.shape[0]} differ.\n"
            "  a is (M, K / world) and b is (K / world, N)."
        )
    if a.shape[0] % world:
        raise ArgumentError(
            f"`a` has {a.shape[0]} rows, which {world} ranks cannot share equally.\n"
            f"  Pad M to {-(-a.shape[0] // world) * world}."
        )
