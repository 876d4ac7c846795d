"""Clusters: which loads the two blocks of a pair share.

The blocks of a pair take tasks that differ in one coordinate, the *pair coordinate*.  A load whose window does not
depend on it brings the same to both: each block fetches half for both.  That holds a pipeline's stages in step, so
how often the pipeline is filled may not depend on the coordinate either.
"""

from __future__ import annotations

from collections.abc import Iterator

from pk.codegen import layout
from pk.ir import nodes as ir
from pk.ir import split
from pk.ir.ops import TABLE
from pk.ir.types import Tile

BLOCKS = 2  # of a cluster


def cluster_of(block: ir.Block) -> int:
    """Blocks that take neighbouring tasks of a class together."""
    tasks = (s for s in split.statements(split.beside_communicator(block)) if isinstance(s, ir.Tasks))
    return max((s.cluster for s in tasks), default=1)


def shared_loads(loader: ir.Block) -> tuple[ir.Do, ...]:
    """The loads of a loader (prologue included) that both blocks of a pair make, the same."""
    if cluster_of(loader) == 1:
        return ()
    varying = _varying(loader)
    uneven = {s.pipeline for s, under in _walk(loader, varying) if isinstance(s, ir.Stage) and under}
    found = []
    for s, under in _walk(loader, varying):
        if isinstance(s, ir.Do) and s.op == "load_async" and not under:
            tile = s.operands[0]
            assert isinstance(tile, ir.Shared)
            even = tile.pipeline not in uneven and halves(tile.type)
            if even and not _depends(s.operands[1], varying):
                found.append(s)
    return tuple(found)


def halves(tile: Tile) -> bool:
    """Whether two blocks can fetch half of ``tile`` each: of its panels, or of the rows of every panel."""
    panels = tile.cols // layout.panel_columns(tile)
    return panels % BLOCKS == 0 or (len(tile.shape) == 2 and tile.rows % (8 * BLOCKS) == 0)


def box(tile: Tile, ndim: int) -> tuple[int, ...]:
    """The TMA box of one half of ``tile`` in a tensor of ``ndim`` dimensions, outermost first."""
    whole = layout.box(tile, ndim)
    if tile.cols // layout.panel_columns(tile) % BLOCKS == 0:
        return whole
    return (*whole[:-2], min(whole[-2], tile.rows // BLOCKS), whole[-1])


def outside_effect(s: ir.Statement) -> bool:
    """Whether ``s`` itself leaves something outside its block: a store or a signal, which a padding task must not."""
    targets = [s.operands[i] for i in TABLE[s.op].writes] if isinstance(s, ir.Do) else []
    return any(isinstance(o, ir.Memory | ir.Choose | ir.Signal) for o in targets)


# ------------------------------------------------------------------------------------- what the coordinate reaches
def _varying(block: ir.Block) -> frozenset[str]:
    """Names whose values may differ between the blocks of a pair."""
    found = {s.vars[-2].name for s in split.statements(block) if isinstance(s, ir.Tasks)}
    while True:
        before = len(found)
        for s, under in _walk(block, frozenset(found)):
            if isinstance(s, ir.Assign | ir.For) and (under or any(_depends(e, found) for e in split.expressions(s))):
                found.add(s.var.name)
        if len(found) == before:
            return frozenset(found)


def _depends(e: ir.Operand, names: frozenset[str] | set[str]) -> bool:
    """Whether ``e`` may differ between the blocks: by a name, or because it reads memory that others may be writing."""
    parts = list(split.walk((e,)))
    return any(isinstance(p, ir.Call) or (isinstance(p, ir.Var) and p.name in names) for p in parts)


def _walk(block: ir.Block, names: frozenset[str], under: bool = False) -> Iterator[tuple[ir.Statement, bool]]:
    """Every statement, and whether how often it runs may differ between the blocks."""
    for s in block:
        yield s, under
        control = isinstance(s, ir.If | ir.For | ir.While) and any(_depends(e, names) for e in split.expressions(s))
        for inner in split.bodies(s):
            yield from _walk(inner, names, under or control)
