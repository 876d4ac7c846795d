"""Kernels whose ranks need not see each other begin before they reach each other.

A launch of such a kernel reaches nothing of other ranks but counters and scratch, and the runtime gives it scratch that
launches use in turn, as they do counters.  A rank may then be one launch ahead of another, as it always may, and touch
it: what the late one still uses is the other set.  Two suffice, because no launch ends before every rank has begun it.
"""

from __future__ import annotations

from pk.ir import nodes as ir
from pk.ir import split

MAPPED = frozenset({"load_async", "store_async", "store_add_async"})  # through tensor maps, which have one address


def early(kernel: ir.Kernel) -> bool:
    """Whether ``kernel`` is one: it has no ``Parallel``, and threads reach its scratch by pointer."""
    if any(t.kind == "parallel" for t in kernel.tensors):
        return False
    scratch = scratch_of(kernel)
    moves = (s for _, body in kernel.classes for s in split.statements(body) if isinstance(s, ir.Do))
    moved = (o for s in moves if s.op in MAPPED for o in split.walk(s.operands))
    return not any(isinstance(o, ir.Memory) and o.tensor in scratch for o in moved)


def scratch_of(kernel: ir.Kernel) -> frozenset[str]:
    """The names of its scratch."""
    return frozenset(s.name for s in kernel.scratch)
