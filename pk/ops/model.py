"""The configurations of the kernel ``matmul``, and the closed-form model that chooses one.

The model counts cycles: of every wave the tile's multiplications, or what feeds it if that takes longer, and its
epilogue; divided by a clock.  The GPU is power-limited and lowers its clock the busier the tensor cores are, so the
clock is a property of the configuration, and the one number fitted for each.  A second bound is memory: operands and
result once, at the rate that DRAM gives.  Their larger, and a fixed time for the launch, is the estimate.

What did not work (bfloat16, H200, against the first row of the table): stream-K over the last waves, -0.5 to -6.6 %;
task counters in memory, -0.5 to -0.8 %; a late second warpgroup, 0 to -1.4 %; clusters of 4, -9 %; three consumer
warpgroups, -5 to -9 %; fragments stored straight to memory, -4 to -15 %; pieces of 32 columns, -0.2 to -0.6 %.
Against ping-pong 128x192: clusters of 2, -0.5 to -1.7 %; 192x128 not transposed, which reads more shared memory,
-1.5 to -3 %; instructions of two slabs of the accumulator in turn, 0.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from pk.ops.clocks import CLOCK, CLOCK_8

SMS = 132
DRAM = 4.4e3  # bytes a nanosecond
L2 = 5.5e3  # the same, of partial sums
LAUNCH_US = 4.0
FILL_CYCLES = 4700  # of the pipeline, before and after the waves
STEP_CYCLES = 300  # of a stage whose multiplications take less
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
    ``group``: tiles walked together, 0 for the default; ``split``: parts of K; ``columns``: of tiles, from which on it
    is a candidate; ``few``: of rows, whose number decides its ``cols``.
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
    columns: int = 0
    few: bool = False

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return 2 if self.share else 1

    @property
    def result_tile(self) -> tuple[int, int]:
        """Rows and columns of the result that a tile is."""
        return (self.cols, self.rows) if self.swap else (self.rows, self.cols)

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
    """Names: c(ooperative) or p(ing-pong), tile, t(ransposed), the operand that a cluster shares, s(tages), g(roup).

    Blocks that run together read the fewest bytes where the tiles that they compute form a square: with 132 blocks 16
    rows of 128x256 tiles, 14 of 128x192.  With 3 stages a whole tile of the result is stored behind the next main loop.
    Transposed 128x192 tiles are 192 rows by 128 columns: 4096 columns are 32 of them, and 21.33 of the others.
    """
    base = Config("c128x256", 128, 256)
    whole = replace(base, name="c128x256.s3", stages=3, outs=4)
    wide = Config("p128x192", 128, 192, piece=32, pingpong=True)
    across = replace(wide, name="p128x192.t", swap=True)
    return [
        base,
        replace(base, name="c128x256.g16", group=16),
        whole,
        replace(whole, name="c128x256.s3.g16", group=16),
        replace(base, name="c128x256.b", share="b"),
        Config("c256x192", 256, 192, piece=32),
        Config("c128x192", 128, 192, piece=32),
        Config("p128x128", 128, 128, pingpong=True),
        Config("p128x128.b", 128, 128, pingpong=True, share="b"),
        wide,
        replace(wide, name="p128x192.g16", group=16, columns=32),
        across,
        replace(across, name="p128x192.t.g16", group=16),
        Config("p128x160", 128, 160, piece=32, pingpong=True),
        Config("p64x256", 64, 256, pingpong=True),
        Config("c128x128.b", 128, 128, share="b"),
        Config("c128x64", 128, 64),
        Config("c64x128", 64, 128, warpgroups=1),
    ]


def _small() -> list[Config]:
    """For a few rows: the transpose is computed, so that they become columns, of which a tile may have few.

    Names: t(ranspose), tile, d(epth of a stage), k (parts of K), the operand that a cluster shares.
    """
    found = []
    for cols in (8, 16, 32, 64, 128, 256):
        base = Config(f"t64x{cols}", 64, cols, piece=min(cols, 64), warpgroups=1, swap=True, few=True)
        deep = replace(base, name=f"{base.name}.d128", depth=128)
        found.append(base)
        if cols <= 128:
            found += [deep, *(replace(deep, name=f"{deep.name}.k{s}", split=s) for s in (2, 4))]
        if cols <= 32:
            found.append(replace(base, name=f"{base.name}.d256", depth=256))
        if cols >= 64:
            found.append(replace(base, name=f"{base.name}.b", share="b"))
            found += [replace(deep, name=f"{deep.name}.{s}", share=s) for s in ("a", "b") if cols < 256]
            wide = Config(f"t128x{cols}", 128, cols, piece=32 if cols == 256 else 64, swap=True, few=True)
            found += [wide, replace(wide, name=f"{wide.name}.k2", split=2)]
    return found


CONFIGS = {c.name: c for c in (*_large(), *_small())}
"""Every configuration, by name."""

CLOCK_ELSE = 1.6
EPILOGUE = {False: 2040, True: 0}  # cycles a tile, by `pingpong`: there the other warpgroup multiplies meanwhile
PINGPONG_FILL = 1700


@dataclass(frozen=True, slots=True)
class Problem:
    """What decides a choice; ``bits`` of an element of a and b, ``out_bits`` of the result.

    ``layout`` of b: "kn", rows contiguous, or "nk", columns contiguous.
    """

    m: int
    n: int
    k: int
    bits: int = 16
    out_bits: int = 16
    sms: int = SMS
    layout: str = "kn"


def legal(c: Config, p: Problem) -> bool:
    """Whether the model considers ``c``: tiles that mostly lie outside the result are no candidates."""
    if not c.few:
        m, n = (p.n, p.m) if c.swap else (p.m, p.n)
        fits = c.rows < 2 * max(m, 64) and c.cols < 2 * max(n, 64)
        return p.m > 64 and fits and -(-n // c.cols) >= c.columns
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


def clock(c: Config, p: Problem) -> float:
    """GHz of a GPU that runs ``c``."""
    table = CLOCK_8 if p.bits == 8 else CLOCK[p.layout]
    return table.get(c.name, CLOCK_ELSE)


def microseconds(c: Config, p: Problem) -> float:
    """The estimate for ``p`` with ``c``."""
    busy = cycles(c, p) / (1e3 * clock(c, p))
    memory = (p.bits * p.k * (p.m + p.n) + p.out_bits * p.m * p.n) / 8e3 / DRAM
    extra = (c.split - 1) * (8 * p.m * p.n / 1e3 / L2 + SPLIT_US)  # written and read, 4 bytes each
    longer = (busy**6 + memory**6) ** (1 / 6)  # their maximum, and a little more where they are alike
    return longer + LAUNCH_US + extra


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


def explain(p: Problem, count: int = 5, taken: Config | None = None, arrow: bool = True) -> str:
    """The choice for ``p`` and the runners-up, as a table; ``taken``: what is asked for, ``arrow``: or mark none."""
    lines = [f"matmul {p.m} x {p.n} x {p.k}, {p.bits}-bit operands, {p.sms} SMs"]
    shown = list(ranking(p)[:count])
    if taken is not None and taken not in [c for c, _ in shown]:
        shown.append((taken, microseconds(taken, p)))
    taken = taken or shown[0][0]
    for c, us in shown:
        m, n = (p.n, p.m) if c.swap else (p.m, p.n)
        tiles = -(-m // c.rows) * -(-n // c.cols) * c.split
        mark = "->" if arrow and c == taken else "  "
        lines.append(f"  {mark} {c.name:<14} {us:9.1f} us  {tiles} tiles of {c.rows}x{c.cols}, "
                     f"{tiles / p.sms:.2f} waves")  # fmt: skip
    return "\n".join(lines)
