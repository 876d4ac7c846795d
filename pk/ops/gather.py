"""The rows of all ranks, on every rank: what a backward pass gathers again if the forward pass did not keep it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pk.errors import ArgumentError
from pk.ops import calls, fused, parallel_kernels
from pk.ops.workspace import symmetric_workspace

if TYPE_CHECKING:
    from pk.runtime.group import Group


def check_rows(x: torch.Tensor) -> None:
    """Raise :class:`pk.errors.ArgumentError` unless ``x`` is a matrix, of rows to gather."""
    if x.ndim != 2:
        raise ArgumentError(
            f"torch.ops.pk.all_gather got a tensor of shape {tuple(x.shape)}, and gathers the rows of matrices.\n"
            "  Use pk.nn.gather(x, dim), which takes any shape and has a gradient."
        )


def gather_rows(x: torch.Tensor, group: Group) -> torch.Tensor:
    """``x`` (rows, cols) of all ranks, one after the other: (world * rows, cols), in memory of its own.  Collective."""
    check_rows(x)
    rows, cols = x.shape
    if group.world_size == 1:
        return x.repeat(1, 1)
    call = calls.Gathered(x)
    with group.turn.of(call):
        if call.key() not in group.calls:
            calls.compared(group, call)
            calls.remember(group, call.key(), True)
        whole = symmetric_workspace(group, "gathered", (group.world_size, rows, cols), x.dtype)
        chunk = fused.CHUNK // x.element_size()
        parallel_kernels.all_gather_rows(x=fused.rows_contiguous(x), whole=whole, BC=chunk, group=group)
        return whole.view(group.world_size * rows, cols).clone()
