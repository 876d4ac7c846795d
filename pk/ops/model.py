"""The configurations of the kernel ``matmul``, and the closed-form model that chooses one.

The model counts cycles: of every wave the tile's multiplications, or what feeds it if that takes longer, and its
epilogue; divided by a clock.  The GPU is power-limited and lowers its clock the busier the tensor cores are, so the
clock is a property of the configuration, and the one number fitted for each.  A second bound is memory: operands and
result once, at the rate that DRAM gives.  Their larger, and a fixed time for the launch, is the estimate.

What did not work (bfloat16, H200, against the first row of the table): stream-K over the last waves, -0.5 to -6.6 %;
task counters in memory, -0.5 to -0.8 %; a late second warpgroup, 0 to -1.4 %; clusters of 4, -9 %; three consumer
warpgroups, -5 to -9 %; fragments stored straight to memory, -4 to -15 %.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

SMS = 132
DRAM = 4.4e3  # bytes a nanosecond
L2 = 5.5e3  # the same, of partial sums
LAUNCH_US = 4.0
FILL_CYCLES = 4700  # of the pipeline, before and after the waves
STEP_CYCLES = 110  # of a stage whose multiplications take less
FEED = 64  # bytes a cycle that an SM takes from L2
SPLIT_US = 3.0  # of handing partial sums over
SHARED = 231_424  # bytes of a block for stages
VECTORS = 2048  # of them for vectors of the epilogue
STAGE_LIMIT = 16  # barriers in the bytes kept for them


@dataclass(frozen=True, slots=True)
class Config:
    """One configuration: ``rows`` x ``cols`` tiles of the result, or of its transpose (``swap``).

    ``depth``: 16-bit elements of K in a stage; ``stages``: as many as fit up to this; ``piece``: columns of the tile
    that are stored at a time, ``outs`` such pieces under way; ``share``: the operand that clusters of 2 share;
    ``group``: tiles walked together, 0 for the default; ``split``: parts of K.
    """

    name: str
    rows: int
    cols: int
    stages: int = STAGE_LIMIT
    piece: int = 64
    outs: int = 2
    warpgroups: int = 2
    pingpong: bool = False
    share: str = ""
    group: int = 0
    split: int = 1
    swap: bool = False
    depth: int = 64

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return 2 if self.share else 1

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage; the depth in bytes is the same for every dtype."""
        return 2 * self.depth * (self.rows + self.cols)

    def fitting_stages(self, vectors: bool) -> int:
        """Stages that fit, beside ``vectors`` for the epilogue or not."""
        piece_bytes = -(-2 * self.rows * min(self.piece, self.cols) // 1024) * 1024
        left = SHARED - self.outs * piece_bytes - VECTORS * vectors
        # Tiles begin at multiples of 1 KiB.
        tiles = sum(-(-2 * self.depth * extent // 1024) * 1024 for extent in (self.rows, self.cols))
        return min(self.stages, left // tiles)

    def constants(self, itemsize: int, out_itemsize: int, vectors: bool = False) -> dict[str, object]:
        """The kernel's constants for operands and a result of so many bytes an element."""
        piece = min(self.piece, self.cols) * 2 // out_itemsize
        if piece < 8 or self.cols % piece:
            piece = min(self.piece, self.cols)
        return {
            "BM": self.rows, "BN": self.cols, "BK": self.depth * 2 // itemsize, "P": piece,
            "STAGES": self.fitting_stages(vectors), "OUTS": self.outs, "WARPGROUPS": self.warpgroups,
            "PINGPONG": self.pingpong, "CLUSTER": self.cluster, "BY_COLS": self.share == "a", "GROUP": self.group,
            "SPLIT": self.split,
        }  # fmt: skip


def _large() -> list[Config]:
    """Names: c(ooperative) or p(ing-pong), tile, the operand that a cluster shares."""
    base = Config("c128x256", 128, 256)
    return [
        base,
        replace(base, name="c128x256.b", share="b"),
        replace(base, name="c128x256.b.s3", share="b", stages=3, outs=4),
        Config("c256x128.a", 256, 128, piece=32, share="a"),
        Config("c256x128.b", 256, 128, piece=32, share="b"),
        Config("c256x192", 256, 192, piece=32),
        Config("c256x160", 256, 160, piece=32, outs=1),
        Config("c128x192", 128, 192, piece=32),
        Config("p128x128", 128, 128, pingpong=True),
        Config("p128x128.b", 128, 128, pingpong=True, share="b"),
        Config("p128x192", 128, 192, piece=32, pingpong=True),
        Config("p128x192.g16", 128, 192, piece=32, pingpong=True, group=16),
        Config("p128x192.b", 128, 192, piece=32, pingpong=True, share="b"),
        Config("p64x256", 64, 256, pingpong=True),
        Config("c128x128.b", 128, 128, share="b"),
        Config("c128x64", 128, 64),
        Config("c128x64.a", 128, 64, share="a"),
        Config("c128x64.b", 128, 64, share="b"),
        Config("c64x128", 64, 128, warpgroups=1),
    ]


def _small() -> list[Config]:
    """For a few rows: the transpose is computed, so that they become columns, of which a tile may have few."""
    found = []
    for cols in (8, 16, 32, 64, 128, 256):
        piece = min(cols, 64)
        base = Config(f"t64x{cols}", 64, cols, piece=piece, warpgroups=1, swap=True)
        found.append(base)
        found += [replace(base, name=f"{base.name}.k{s}", split=s) for s in (2, 4) if cols <= 128]
        if cols <= 64:
            found.append(replace(base, name=f"{base.name}.d128", depth=128))
        if cols >= 64:
            found.append(replace(base, name=f"{base.name}.b", share="b"))
            found += [replace(base, name=f"{base.name}.a", share="a")] if cols < 256 else []
            wide = Config(f"t128x{cols}", 128, cols, piece=piece // 2 if cols == 256 else piece, swap=True)
            found += [wide, replace(wide, name=f"{wide.name}.k2", split=2)]
    return found


CONFIGS = {c.name: c for c in (*_large(), *_small())}
"""Every configuration, by name."""

CLOCK = {
    "c128x256": 1.585, "c128x256.b": 1.600, "c128x256.b.s3": 1.602, "c256x128.a": 1.585, "c256x128.b": 1.580,
    "c256x192": 1.615, "c256x160": 1.590, "c128x192": 1.500, "p128x128": 1.510, "p128x128.b": 1.500,
    "p128x192": 1.565, "p128x192.g16": 1.565, "p128x192.b": 1.560, "p64x256": 1.500, "c128x128.b": 1.500,
    "c128x64.a": 1.400, "c128x64.b": 1.400,
}  # fmt: skip
"""GHz at which a configuration runs on random data; ``benchmarks/gemm_fit.py`` prints this table."""
CLOCK_8: dict[str, float] = {}
"""The same for 8-bit operands, where it differs."""
CLOCK_ELSE = 1.6
EPILOGUE = {False: 2040, True: 0}  # cycles a tile, by `pingpong`: there the other warpgroup multiplies meanwhile
PINGPONG_FILL = 1700


@dataclass(frozen=True, slots=True)
class Problem:
    """What decides a choice; ``bits`` of an element of a and b, ``out_bits`` of the result."""

    m: int
    n: int
    k: int
    bits: int = 16
    out_bits: int = 16
    sms: int = SMS


def legal(c: Config, p: Problem) -> bool:
    """Whether the model considers ``c``: tiles that mostly lie outside the result are no candidates."""
    if not c.swap:
        return p.m > 64 and c.rows < 2 * max(p.m, 64) and c.cols < 2 * max(p.n, 64)
    wanted = next((w for w in (8, 16, 32, 64, 128, 256) if w >= p.m), 0)
    steps = -(-p.k * p.bits // (16 * c.depth))
    halves = c.cols == wanted // 2 >= 64  # two tiles of columns, which may share weights
    return (halves or (c.cols == wanted and c.share != "a")) and steps >= 8 * c.split


def cycles(c: Config, p: Problem) -> float:
    """Cycles of the longest block."""
    m, n = (p.n, p.m) if c.swap else (p.m, p.n)
    rows, cols = -(-m // c.rows), -(-n // c.cols)
    outer, inner = (cols, rows) if c.share == "a" else (rows, cols)
    tasks = c.split * -(-outer // c.cluster) * inner
    waves = -(-tasks // max(1, p.sms // c.cluster))
    steps = -(-p.k * p.bits // (16 * c.depth) // c.split)
    shared = {"a": c.rows, "b": c.cols}.get(c.share, 0) // 2
    fed = 2 * c.depth * (c.rows + c.cols - shared) / FEED
    step = max(c.rows * c.cols * c.depth / 2048, fed, STEP_CYCLES)
    epilogue = EPILOGUE[c.pingpong] * c.rows * c.cols / (128 * 256)
    return waves * (steps * step + epilogue) + FILL_CYCLES + PINGPONG_FILL * c.pingpong


def clock(c: Config, bits: int) -> float:
    """GHz of a GPU that runs ``c``."""
    clocks = CLOCK | CLOCK_8 if bits == 8 else CLOCK
    return clocks.get(c.name, CLOCK_ELSE)


def microseconds(c: Config, p: Problem) -> float:
    """The estimate for ``p`` with ``c``."""
    busy = cycles(c, p) / (1e3 * clock(c, p.bits))
    memory = (p.bits * p.k * (p.m + p.n) + p.out_bits * p.m * p.n) / 8e3 / DRAM
    extra = (c.split - 1) * (8 * p.m * p.n / 1e3 / L2 + SPLIT_US)  # written and read, 4 bytes each
    return max(busy, memory) + LAUNCH_US + extra


@functools.lru_cache(maxsize=4096)
def ranking(p: Problem) -> tuple[tuple[Config, float], ...]:
    """The candidates for ``p`` and their estimates in microseconds, best first; never empty."""
    candidates = [c for c in CONFIGS.values() if legal(c, p)]
    if not candidates:  # tiny matrices
        candidates = [CONFIGS["c64x128"]]
    return tuple(sorted(((c, microseconds(c, p)) for c in candidates), key=lambda pair: pair[1]))


def choose(p: Problem) -> Config:
    """The configuration with the lowest estimate."""
    return ranking(p)[0][0]


def explain(p: Problem, count: int = 5) -> str:
    """The choice for ``p`` and the runners-up, as a table."""
    lines = [f"matmul {p.m} x {p.n} x {p.k}, {p.bits}-bit operands, {p.sms} SMs"]
    for i, (c, us) in enumerate(ranking(p)[:count]):
        m, n = (p.n, p.m) if c.swap else (p.m, p.n)
        tiles = -(-m // c.rows) * -(-n // c.cols) * c.split
        lines.append(f"  {'->' if i == 0 else '  '} {c.name:<14} {us:9.1f} us  {tiles} tiles of {c.rows}x{c.cols}, "
                     f"{tiles / p.sms:.2f} waves")  # fmt: skip
    return "\n".join(lines)
