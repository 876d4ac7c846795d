"""What ``torch.matmul`` is estimated to take, so that :func:`pk.ops.matmul` is no slower: cuBLAS is a candidate.

cuBLAS is modelled as a kernel of cooperative tiles like those of :mod:`pk.ops.model`, of which it has wider ones.  With
few rows it is as quick as memory, while the model's estimates of pk's tiles for few rows are good to 15 % only; so
there it is left only where pk's are lower by more than that.
"""

from __future__ import annotations

import functools

from pk.ops import model
from pk.ops.model import Config, Problem

WIDE = Config("128x320", 128, 320)
WIDE_FROM = 1 << 26  # elements of the result: there cuBLAS was seen to take the wide tile, below the others
TILES = (
    Config("128x256", 128, 256), Config("256x128", 256, 128), Config("128x192", 128, 192),
    Config("128x128", 128, 128), Config("128x64", 128, 64),
)  # fmt: skip
GHZ = {"128x320": 1.597, "128x256": 1.61, "256x128": 1.61}
GHZ_ELSE = 1.5
FEW_ROWS = 256
FEW_US = 6.0  # of a product of few rows, beside the time for its bytes
DOUBT = 0.15  # of pk's estimates for few rows
MARGIN = {True: 1 - DOUBT, False: 1.005}  # of cuBLAS's estimate, by "few rows": pk is taken below


def microseconds(p: Problem) -> float:
    """The estimate for ``p``."""
    bytes_us = (p.bits * p.k * (p.m + p.n) + p.out_bits * p.m * p.n) / 8e3 / model.DRAM
    if p.m <= FEW_ROWS // 2:
        return bytes_us + FEW_US
    tiles = [c for c in TILES if c.rows < 2 * p.m and c.cols < 2 * max(p.n, 64)]
    if p.m * p.n >= WIDE_FROM:
        tiles = [WIDE]
    busy = min(model.cycles(c, p) / 1e3 / GHZ.get(c.name, GHZ_ELSE) for c in tiles)
    return float((busy**6 + bytes_us**6) ** (1 / 6)) + model.LAUNCH_US


@functools.lru_cache(maxsize=4096)
def preferred(p: Problem) -> bool:
    """Whether the library is taken for ``p``, of 16-bit operands and a result alike."""
    return model.ranking(p)[0][1] > MARGIN[p.m <= FEW_ROWS] * microseconds(p)
