"""Registers of the warps of a block, as setmaxnreg splits them.

A block starts with 65536 / threads registers a thread, and setmaxnreg only moves them inside that pool.  384 threads:
168 each, moved to 232 for the consumers and 40 for the producer warpgroup, in which no role spills.  512 threads: 128
each; 160 / 32 leaves the producers too few (28 bytes spilled), 152 / 56 does not.  256 threads: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pk.ir import nodes as ir
from pk.ir import split
from pk.ir.layout import has_wide

if TYPE_CHECKING:
    from pk.codegen.plan import ClassPlan

Split = tuple[int, int]  # of the consumers, of the producer warpgroup

# By threads of a block.
REGISTERS: dict[int, Split] = {384: (232, 40), 512: (152, 56)}
# The same if roles of the producer warpgroup reckon with what they read from memory, or keep their place in two
# pipelines and more: 40 spill a few.
READING = REGISTERS | {384: (224, 56)}
# The same with a communicator warp, which holds a tile of 32 registers a lane and its place in several loops; but not
# where the consumers' accumulators leave none for it.
COMMUNICATING = {384: (208, 88), 512: (144, 80)}


def registers(kernel: ir.Kernel, threads: int, compute: ClassPlan) -> Split:
    """The register split of the class that computes; (0, 0) for none."""
    if not compute.warpgroups:
        return (0, 0)
    if any(r.kind == "communicator" for r in compute.roles) and not has_wide(kernel):
        return COMMUNICATING.get(threads, (0, 0))
    bodies = [r.body for r in compute.roles if r.warps == 1]
    operands = split.walk(o for b in bodies for s in split.statements(b) for o in split.expressions(s))
    reads = any(isinstance(o, ir.Call) and any(isinstance(m, ir.Memory) for m in o.operands) for o in operands)
    busy = any(len({s.pipeline for s in split.statements(b) if isinstance(s, ir.Stage)}) > 1 for b in bodies)
    return (READING if reads or busy else REGISTERS).get(threads, (0, 0))
