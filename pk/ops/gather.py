"""The rows of all ranks, on every rank: what a backward pass gathers again if the forward pass did not keep it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pk.ops import fused, parallel_kernels
from pk.ops.workspace import symmetric_workspace

if TYPE_CHECKING:
    from pk.runtime.group import Group


def gather_rows(x: torch.Tensor, group: Group) -> torch.Tensor:
    """``x`` (rows, cols) of all ranks, one after the other: (world * rows, cols), in memory of its own.  Collective."""
    rows, cols = x.shape
    if group.world_size == 1 or x.numel() == 0:
        return x.repeat(group.world_size, 1)
    whole = symmetric_workspace(group, "gathered", (group.world_size, rows, cols), x.dtype)
    chunk = fused.CHUNK // x.element_size()
    parallel_kernels.all_gather_rows(x=fused.rows_contiguous(x), whole=whole, BC=chunk, group=group)
    return whole.view(-1, cols).clone()
