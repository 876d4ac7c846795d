"""Symmetric memory that operators reuse: one buffer a group and operator, grown when a call needs more.

Reuse is safe without a barrier: a launch does not end on a rank's stream before every peer has finished with its
memory, and the next launch touches no peer before that peer's stream has reached it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from pk.runtime import symm

if TYPE_CHECKING:
    from pk.runtime.group import Group


def symmetric_workspace(group: Group, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A symmetric tensor of ``shape`` for operator ``name``, the same memory on every call.  Collective if it grows."""
    needed = math.prod(shape) * dtype.itemsize
    buffers: dict[str, torch.Tensor] = group.workspaces
    if name not in buffers or buffers[name].numel() < needed:
        buffers[name] = symm.empty((max(needed, 1),), torch.uint8, group)
    return buffers[name][:needed].view(dtype).view(shape)
