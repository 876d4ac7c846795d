"""Shared memory: what the pipelines of each class of blocks need, against what a block has."""

from __future__ import annotations

from pk import errors
from pk.ir import nodes as ir
from pk.ir.layout import exchange_bytes
from pk.ir.rules import BLOCK_SHARED, RESERVED_SHARED, TILE_ALIGN
from pk.ir.types import Tile
from pk.ir.vectors import PADDING

AVAILABLE = BLOCK_SHARED - RESERVED_SHARED


def tile_bytes(tile: Tile, by_rows: bool = False) -> int:
    """Bytes a shared tile takes: its own, those behind each row if copied by rows, rounded up to the alignment."""
    return -(-(tile.nbytes + PADDING * tile.rows * by_rows) // TILE_ALIGN) * TILE_ALIGN


def stage_bytes(p: ir.Pipeline) -> int:
    """Bytes of one stage of ``p``."""
    return sum(tile_bytes(tile, name in p.by_rows) for name, tile in p.tiles)


def pipeline_bytes(p: ir.Pipeline) -> int:
    """Bytes of all stages of ``p``, none if they are those of another."""
    return 0 if p.over else p.stages * stage_bytes(p)


def shared_memory(kernel: ir.Kernel) -> None:
    """Raise SharedMemoryExceeded, naming every pipeline's share and a fix, if a class needs more than a block has."""
    for owner, block in reversed(kernel.classes):
        pipelines = [p for p in kernel.pipelines if p.owner == owner and not p.over]
        private = [t for t in kernel.shared if t.owner == owner]
        exchange = exchange_bytes(kernel, block)
        total = sum(map(pipeline_bytes, pipelines)) + sum(tile_bytes(t.type) for t in private) + exchange
        if total > AVAILABLE:
            largest = max(pipelines, key=pipeline_bytes) if pipelines else private[0]
            tiles = (f"{t.name}: {tile_bytes(t.type):,} bytes" for t in private)
            shares = "\n  ".join([*map(_share, pipelines), *tiles])
            if exchange:
                shares += f"\n  reductions: {exchange:,} bytes"
            raise errors.SharedMemoryExceeded(
                f"the pipelines{' and tiles' if private else ''} of the {owner} class need {total:,} bytes of shared "
                f"memory, and a block has {AVAILABLE:,} ({BLOCK_SHARED // 1024} KiB less {RESERVED_SHARED:,} bytes for "
                "barriers)",
                largest.span,
                f"{shares}\n  {_fix(pipelines, total) if pipelines else 'Make the tiles smaller.'}",
            )


def _share(p: ir.Pipeline) -> str:
    tiles = " + ".join(f"{name} {tile_bytes(tile, name in p.by_rows):,}" for name, tile in p.tiles)
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
