"""What the tensor cores may be doing meanwhile: an mma is waited for only where something needs its result."""

from __future__ import annotations

from pk.ir import nodes as ir
from pk.ir import split
from pk.ir.types import Tile


def tiles_read(e: ir.Operand) -> set[str]:
    """Names of the register tiles in ``e``."""
    return {o.name for o in split.walk((e,)) if isinstance(o, ir.Var) and isinstance(o.type, Tile)}


def pipelines(block: ir.Block) -> set[str]:
    """Pipelines of which ``block`` takes stages."""
    return {s.pipeline for s in split.statements(block) if isinstance(s, ir.Stage)}


def overwritten(name: str, rest: ir.Block) -> bool:
    """Whether the first thing that ``rest`` does with register tile ``name``, on every path, is an mma into it."""
    for s in rest:
        if isinstance(s, ir.Stage):
            if any(_mentions(t, name) for t in split.statements(s.body)):
                return overwritten(name, s.body)
        elif any(_mentions(t, name) for t in split.statements((s,))):
            a = s.operands[1] if isinstance(s, ir.Do) and s.op == "mma" else None
            return a is not None and name not in tiles_read(a)
    return False


def streams(body: ir.Block) -> bool:
    """Whether the tensor cores may go on from one turn of a loop to the next, as in the main loop of a GEMM."""
    factors = [s.operands[1] for s in split.statements(body) if isinstance(s, ir.Do) and s.op == "mma"]
    named = all(isinstance(a, ir.Shared | ir.Var) for a in factors)  # registers made anew are free only after the mma
    return named and len(pipelines(body)) <= 1 and only_multiplies(body)


def only_loads(block: ir.Block) -> bool:
    """Whether ``block`` is one or more ``load_async`` and nothing else."""
    return bool(block) and all(isinstance(s, ir.Do) and s.op == "load_async" for s in block)


def loaded(s: ir.Statement) -> ir.Shared:
    """The tile that a ``load_async`` fills."""
    assert isinstance(s, ir.Do)
    tile = s.operands[0]
    assert isinstance(tile, ir.Shared)
    return tile


def _mentions(s: ir.Statement, name: str) -> bool:
    return name in split.used(s) or (isinstance(s, ir.Assign) and s.var.name == name)


def only_multiplies(block: ir.Block) -> bool:
    """Whether ``block`` does nothing but issue mma and reckon scalars, so that the tensor cores may go on meanwhile."""
    for s in block:
        if isinstance(s, ir.For | ir.Stage):
            if not only_multiplies(s.body):
                return False
        elif isinstance(s, ir.Do):
            if s.op != "mma":
                return False
        elif not (isinstance(s, ir.Assign) and not isinstance(s.var.type, Tile)):
            return False
    return True
