"""Shared memory: what the pipelines of each class of blocks need, against what a block has."""

from __future__ import annotations

from pk import errors
from pk.ir import nodes as ir
from pk.ir.rules import BLOCK_SHARED, RESERVED_SHARED, TILE_ALIGN
from pk.ir.types import Tile

AVAILABLE = BLOCK_SHARED - RESERVED_SHARED


def tile_bytes(tile: Tile) -> int:
    """Bytes a shared tile takes: its own, rounded up to the alignment of tile bases."""
    return -(-tile.nbytes // TILE_ALIGN) * TILE_ALIGN


def stage_bytes(p: ir.Pipeline) -> int:
    """Bytes of one stage of ``p``."""
    return sum(tile_bytes(tile) for _, tile in p.tiles)


def pipeline_bytes(p: ir.Pipeline) -> int:
    """Bytes of all stages of ``p``."""
    return p.stages * stage_bytes(p)


def shared_memory(kernel: ir.Kernel) -> None:
    """Raise SharedMemoryExceeded, naming every pipeline's share and a fix, if a class needs more than a block has."""
    for owner in ("communicator", "compute"):
        pipelines = [p for p in kernel.pipelines if p.owner == owner]
        total = sum(map(pipeline_bytes, pipelines))
        if total > AVAILABLE:
            largest = max(pipelines, key=pipeline_bytes)
            shares = "\n  ".join(_share(p) for p in pipelines)
            raise errors.SharedMemoryExceeded(
                f"the pipelines of the {owner} class need {total:,} bytes of shared memory, and a block has "
                f"{AVAILABLE:,} ({BLOCK_SHARED // 1024} KiB less {RESERVED_SHARED:,} bytes for barriers)",
                largest.span,
                f"{shares}\n  {_fix(pipelines, total)}",
            )


def _share(p: ir.Pipeline) -> str:
    tiles = " + ".join(f"{name} {tile_bytes(tile):,}" for name, tile in p.tiles)
    return f"{p.name}: {p.stages} stage{'s' * (p.stages > 1)} x ({tiles}) = {pipeline_bytes(p):,} bytes"


def _fix(pipelines: list[ir.Pipeline], total: int) -> str:
    """The smallest change of one pipeline's stages that fits; failing that, smaller tiles."""
    options = []
    for p in pipelines:
        drop = -(-(total - AVAILABLE) // stage_bytes(p))
        if p.stages - drop >= 1:
            options.append((drop * stage_bytes(p), p.stages - drop, p.name, total - drop * stage_bytes(p)))
    whole = max(pipelines, key=stage_bytes)
    pieces = "or pass tiles in pieces: acc[:, a:b] takes columns of an accumulator."
    if not options:
        return f"Make the tiles of `{whole.name}` smaller, {pieces}"
    _, stages, name, left = min(options)
    return f"Give `{name}` {stages} stage{'s' * (stages > 1)} ({left:,} bytes in all), {pieces}"
