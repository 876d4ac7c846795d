"""Symmetric memory that operators reuse: one buffer a group and operator, grown when a call needs more.

Reuse is safe without a barrier: a launch does not end on a rank's stream before every peer has finished with its
memory, and the next launch touches no peer before that peer's stream has reached it.

A buffer that a CUDA graph was captured with stays as long as the group, also when a larger one has taken its place:
replays still write to it.  The group drops them all when it is closed (``pk.finalize``) or its process group destroyed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pk.runtime import symm

if TYPE_CHECKING:
    from pk.runtime.group import Group


@dataclass(slots=True)
class Workspace:
    """The buffer of one operator (bytes), and earlier ones that graphs hold."""

    memory: torch.Tensor
    captured: bool = False  # a graph holds it

    def larger(self, nbytes: int) -> int:
        """How much to take when ``nbytes`` are needed: sizes that creep up are met once in a while, not every time."""
        return max(nbytes, self.memory.numel() + self.memory.numel() // 4)


def symmetric_workspace(group: Group, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A symmetric tensor of ``shape`` for operator ``name``, the same memory on every call.  Collective if it grows.

    Raises :class:`pk.errors.BackendError` on every rank if it would have to grow while one captures a CUDA graph.
    """
    needed = math.prod(shape) * dtype.itemsize
    buffers: dict[str, Workspace] = group.workspaces
    found = buffers.get(name)
    if found is None or found.memory.numel() < needed:
        found = buffers[name] = _grown(group, name, found, max(needed, 1))
    found.captured = found.captured or symm.capturing(group)
    return found.memory[:needed].view(dtype).view(shape)


def _grown(group: Group, name: str, old: Workspace | None, needed: int) -> Workspace:
    size = needed if old is None else old.larger(needed)
    if old is not None:
        if old.captured:
            kept = sum(1 for other in group.workspaces if other.startswith(f"{name} of a graph"))
            group.workspaces[f"{name} of a graph {kept}"] = old
        elif not symm.capturing(group):
            del group.workspaces[name]
    del old  # its memory may serve for the new one, or be given back
    return Workspace(symm.empty((size,), torch.uint8, group, f"workspace `{name}` of pk.ops, {size} bytes,"))
