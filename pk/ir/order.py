"""The order in which ``pk.tasks`` walks its coordinates: part of the language's meaning.

Earlier extents are outermost.  The last two are walked in groups of ``group`` rows, column by column inside a group
(so that the blocks running at one time share rows of A and columns of B in L2); ``group=1`` is row-major.
"""

from __future__ import annotations

from collections.abc import Sequence


def coordinate(index: int, extents: Sequence[int], group: int) -> tuple[int, ...]:
    """The coordinates of task ``index``, 0 <= index < product of ``extents``."""
    if len(extents) == 1:
        return (index,)
    *lead, rows, cols = extents
    outer, inner = divmod(index, rows * cols)
    first = inner // (group * cols) * group
    height = min(group, rows - first)
    within = inner - first * cols
    tail = (first + within % height, within // height)
    head: list[int] = []
    for extent in reversed(lead):
        outer, at = divmod(outer, extent)
        head.append(at)
    return (*reversed(head), *tail)
