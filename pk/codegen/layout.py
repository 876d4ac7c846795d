"""Shared-memory tiles and TMA boxes: the one rule that plan, templates and device headers share.

A tile (R, C) whose rows are B bytes is stored as column panels of ``w`` bytes.  If R is a multiple of 8, w is the
widest swizzle that divides B, and a panel holds R rows of w bytes, swizzled in the TMA pattern of w.  Other tiles
(vectors, short rows) are not swizzled, and w is as wide as a box may be.  Panel p starts at byte p * R * w of a
1024-byte aligned tile.  One TMA operation moves one panel of at most 256 rows.
"""

from __future__ import annotations

from pk.ir.rules import TMA_BOX, panel_bytes, swizzle
from pk.ir.types import Tile

__all__ = ["box", "box_rows", "panel_columns", "swizzle"]


def panel_columns(tile: Tile) -> int:
    """Elements in a row of one panel."""
    return panel_bytes(tile) // tile.dtype.itemsize


def box_rows(tile: Tile) -> int:
    """Rows that one TMA operation moves: all of the tile, or its largest even part of at most 256."""
    parts = -(-tile.rows // TMA_BOX)
    while tile.rows % parts:
        parts += 1
    return tile.rows // parts


def box(tile: Tile, ndim: int) -> tuple[int, ...]:
    """The TMA box of ``tile`` in a tensor of ``ndim`` dimensions, outermost first."""
    inner = (box_rows(tile), panel_columns(tile))
    return (1,) * (ndim - 2) + inner if ndim >= 2 else inner[1:]
