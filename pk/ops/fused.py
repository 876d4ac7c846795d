"""Launching the tensor-parallel kernels: operands as TMA wants them, a configuration, the launch."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pk.ops import collectives, dense, few_rows, inputs, model, parallel_kernels
from pk.ops.model import CONFIGS, Config, Problem
from pk.ops.workspace import symmetric_workspace
from pk.runtime import symm

if TYPE_CHECKING:
    from pk.runtime.group import Group

OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
TILES = ("c128x256", "c128x192", "p128x192", "p128x192.t", "p128x160", "c128x64", "c64x128")
"""Configurations of the kernel ``matmul`` that these kernels have too: no clusters, no parts of K."""
LEAST = "c64x128"
"""Of them, what launches without anything to multiply take: ranks without rows meet the others all the same."""
FEW = (
    *(f"t64x{cols}.d128{parts}" for cols in (8, 16, 32, 64, 128) for parts in ("", ".k2", ".k4")),
    *(f"t128x{cols}{parts}" for cols in (64, 128, 256) for parts in ("", ".k2")), "t64x256",
)  # fmt: skip
"""The same for a few rows, up to 256: see ``few_rows.py``."""
for _kernel in (
    parallel_kernels.all_gather_matmul, parallel_kernels.matmul_reduce_scatter_ordered,
    parallel_kernels.matmul_all_reduce_ordered, few_rows.few_all_gather_matmul, few_rows.few_matmul_reduce,
):  # fmt: skip
    _kernel.alike = True
COMM_SMS = 0  # a warp of every SM: SMs of their own cost many problems a wave of tiles
FEW_BYTES = 4 << 20  # take the link as long as reading b twice takes, or so
LAG_WAVES = 200  # percent of a wave of tiles by which own ones follow those of others: their partial sums have come
LAG_LINK = 150  # the same if own tiles, which are alone at the end, would wait for the link there
LINK = 340  # bytes a nanosecond that TMA fetches from peers
PARTS = 3  # pieces of partial sums under way: a fourth would leave the result one, or the product two stages
IN_PLACE = 5  # pieces of both, where a result replaces its partial sum
IN_PLACE_WAVES = 5  # of tiles, from which on that is faster
COPIED = 4096  # bytes of a piece that a communicator warp copies; half of it beside warpgroups with 192 columns
FLUSHED = 300  # bytes a nanosecond that communicator warps push, which wait for their stores at every signal
CHUNK = 256  # bytes of K that a message of the communicator holds of every row: 32 KiB with 128 rows


@dataclass(frozen=True, slots=True)
class Request:
    """One call, checked: a is (M / world, K) for the all-gather, else (M, K); b (K, N)."""

    operator: str
    group: Group
    a: torch.Tensor
    b: torch.Tensor
    out_dtype: torch.dtype
    bias: torch.Tensor | None = None  # (N,)
    activation: str = "none"
    scale_a: torch.Tensor | None = None  # float32, one element for each row of a, or one
    scale_b: torch.Tensor | None = None  # float32, one element for each column of b, or one

    @property
    def world(self) -> int:
        """Ranks of the group."""
        return self.group.world_size

    @property
    def empty(self) -> bool:
        """Whether there is nothing to multiply."""
        return 0 in (*self.a.shape, *self.b.shape)

    @property
    def shape(self) -> tuple[int, int]:
        """Of this rank's result."""
        rows = self.a.shape[0]
        if self.operator == "all_gather_matmul":
            rows *= self.world
        elif self.operator == "matmul_reduce_scatter":
            rows //= self.world
        return rows, self.b.shape[1]

    @property
    def computed(self) -> Problem:
        """The product that this rank computes."""
        rows = self.a.shape[0] * (self.world if self.operator == "all_gather_matmul" else 1)
        bits, out_bits = 8 * self.a.element_size(), 8 * self.out_dtype.itemsize
        layout = "kn" if self.b.stride(1) == 1 or self.b.shape[1] == 1 else "nk"
        return Problem(rows, self.b.shape[1], self.a.shape[1], bits, out_bits, self.group.sms or model.SMS, layout)


def tiles(operator: str) -> tuple[str, ...]:
    """Configurations of ``operator``: for sums none with 192 columns to a warpgroup that are stored in pieces of 32
    columns, see ``estimate.HELD``.
    """
    return tuple(n for n in TILES if operator == "all_gather_matmul" or not crowded(CONFIGS[n]) or CONFIGS[n].swap)


def crammed(operator: str, tile: Config, scaled: bool, out_bits: int) -> bool:
    """Whether the epilogue of a sum finds no registers beside 192 of the accumulator: it is right, and spills."""
    return operator != "all_gather_matmul" and crowded(tile) and (scaled or out_bits > 16)


def choose_tile(request: Request, comm_sms: int) -> Config:
    """The tile with the lowest estimate on the SMs that compute."""
    p = request.computed
    p = dataclasses.replace(p, sms=max(1, p.sms - comm_sms))
    swapped = few_tiles(request.operator, request.world, p)
    if swapped:
        return min(swapped, key=lambda c: model.microseconds(c, p))
    scaled = request.scale_a is not None or request.scale_b is not None
    candidates = [CONFIGS[name] for name in tiles(request.operator)]
    candidates = [c for c in candidates if not crammed(request.operator, c, scaled, p.out_bits)]
    fitting = [c for c in candidates if c.result_tile[0] < 2 * max(p.m // request.world, 64)] or candidates[-1:]
    return min(fitting, key=lambda c: model.microseconds(c, p))


def few_tiles(operator: str, world: int, p: Problem) -> list[Config]:
    """The tiles for a few rows that may compute ``p``; none if there are more, or if they would send too much.

    Such an all-reduce sends whole terms to every peer, and not a share of them twice.
    """
    more_bytes = max(0, (world - 1) * (world - 2)) * p.m * p.n * p.out_bits // 8 // world
    if operator == "matmul_all_reduce" and more_bytes > FEW_BYTES:
        return []
    return [CONFIGS[name] for name in FEW if model.legal(CONFIGS[name], p)]


def run(
    request: Request, out: torch.Tensor | None, tile: Config | None, comm_sms: int | None, gathered: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch the fused kernel; the result, and with ``gathered`` the rows of all ranks (M, K), in memory of its own."""
    inputs.addressable("a", rows_contiguous(request.a))
    inputs.addressable("b", dense.operand("b", request.b, along=0).memory)
    inputs.storable(request.shape, request.out_dtype, out)
    comm_sms = COMM_SMS if comm_sms is None else comm_sms
    communicates = request.operator == "all_gather_matmul" and request.world > 1
    tile = tile or choose_tile(request, comm_sms if communicates else 0)
    if tile.few:
        return few(request, out, tile, gathered)
    if request.operator == "all_gather_matmul":
        return _all_gather(request, out, tile, comm_sms, gathered)
    if request.operator == "matmul_reduce_scatter":
        return _reduce_scatter(request, out, tile), None
    return _all_reduce(request, out, tile), None


def _all_gather(
    q: Request, out: torch.Tensor | None, tile: Config, comm_sms: int, gathered: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    a = rows_contiguous(q.a)
    rows, k = a.shape
    out = a.new_empty(q.shape, dtype=q.out_dtype) if out is None else out
    whole = symmetric_workspace(q.group, "gathered", (q.world, rows, k), a.dtype) if gathered else None
    scale = q.scale_a
    if scale is not None and q.world > 1:
        scale = _gather_scales(q, dense.vector("scale_a", scale, rows))
    parallel_kernels.all_gather_matmul(
        x=a, c=out.view(q.world, rows, q.b.shape[1]), whole=whole, **_operands(q, tile, q.world, scale),
        **_constants(q, tile, a, out), COMM=comm_sms, BC=CHUNK // a.element_size(), **_pushing(q, tile, comm_sms),
        group=q.group,
    )  # fmt: skip
    return out, None if whole is None else whole.view(q.world * rows, k).clone()


def crowded(tile: Config) -> bool:
    """Whether a warpgroup has so much of the tile that communicator warps have registers for 8 rows at a time: too few
    for an NVLink.
    """
    return tile.pingpong and tile.rows * tile.cols > 128 * 160


def _pushing(q: Request, tile: Config, comm_sms: int) -> dict[str, Any]:
    """Constants of communicator warps: 32 KiB of 128 rows a signal, and of fewer rows as much; four times that where
    the rows would else come behind the last wave of tiles, which needs all of them.
    """
    if comm_sms:
        return {}
    chunks = max(1, 128 // tile.result_tile[0])
    late = _late(q.computed, tile, (q.world - 1) * q.a.numel() * q.a.element_size())
    return {"CHUNKS": 4 * chunks if late else chunks, "PUSH": 8 if crowded(tile) else 16}


@functools.lru_cache(maxsize=4096)
def _late(p: Problem, tile: Config, coming: int) -> bool:
    """Whether so many bytes, with a signal for every 32 KiB, come behind the last wave of tiles."""
    rows, cols = tile.result_tile
    waves = -(-(-(-p.m // rows) * -(-p.n // cols)) // p.sms)
    return coming / 1e3 / FLUSHED > model.microseconds(tile, p) * (waves - 1) / waves


def _reduce_scatter(q: Request, out: torch.Tensor | None, tile: Config) -> torch.Tensor:
    a = rows_contiguous(q.a)
    out = a.new_empty(q.shape, dtype=q.out_dtype) if out is None else out
    shape = (q.world, a.shape[0] // q.world, a.shape[1])
    parallel_kernels.matmul_reduce_scatter_ordered(
        a=a.view(shape), c=out, **_operands(q, tile, q.world, q.scale_a), **_summing(q, tile, a, out), group=q.group
    )
    return out


def _all_reduce(q: Request, out: torch.Tensor | None, tile: Config) -> torch.Tensor:
    a = rows_contiguous(q.a)
    out = a.new_empty(q.shape, dtype=q.out_dtype) if out is None else out
    by_cols = -(-a.shape[0] // tile.result_tile[0]) < 4 * q.world
    constants = _summing(q, tile, a, out)
    reached = q.world > 1 and symmetric(out, q.group)  # then peers write into it
    there = {"c" if reached else "out": out}
    row_bytes = (constants["BN"] if tile.swap else constants["P"]) * out.element_size()
    parallel_kernels.matmul_all_reduce_ordered(
        a=a, **there, **_operands(q, tile, None, q.scale_a), **constants, BY_COLS=by_cols,
        PR=(COPIED // 2 if crowded(tile) else COPIED) // row_bytes, group=q.group,
    )  # fmt: skip
    return out


def few(
    q: Request, out: torch.Tensor | None, tile: Config, gathered: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:func:`run` for a few rows; others are right too, and slow."""
    p = q.computed
    a = rows_contiguous(q.a)
    out = a.new_empty(q.shape, dtype=q.out_dtype) if out is None else out
    gathers = q.operator == "all_gather_matmul"
    scale = dense.vector("scale_a", q.scale_a, a.shape[0])
    if scale is not None and gathers and q.world > 1:
        scale = _gather_scales(q, scale)
    columns, bias = dense.vector("scale_b", q.scale_b, p.n), dense.vector("bias", q.bias, p.n)
    b = dense.operand("b", q.b, along=0)
    given: dict[str, Any] = {
        "b": b.memory, "B_T": b.transposed, "c": out, "ACTIVATION": q.activation, "group": q.group,
        "row_scale": None if columns is None else columns.unsqueeze(1),
        "col_scale": None if scale is None else dense.aligned(scale).unsqueeze(0),
    }  # fmt: skip
    sizes: dict[str, Any] = tile.constants(a.element_size(), out.element_size(), scale is not None)
    given |= {name: sizes[name] for name in ("BK", "P", "WARPGROUPS", "SPLIT")} | {"BN": tile.rows, "BM": tile.cols}
    if gathers:
        whole = symmetric_workspace(q.group, "gathered", (p.m, p.k), a.dtype) if gathered else None
        piece = next((r for r in (8, 16) if r >= a.shape[0]), 32)
        stages, row_stages = _few_stages(tile, scale is not None)
        few_rows.few_all_gather_matmul(
            x=a, whole=whole, row_bias=None if bias is None else bias.unsqueeze(1), **given, STAGES=stages,
            ROW_STAGES=row_stages, PR=piece, PC=CHUNK // a.element_size(),
        )  # fmt: skip
        return out, None if whole is None else whole.clone()
    piece = next((r for r in (8, 16, 32) if r >= out.shape[0]), 32 if out.shape[0] <= 128 else 64)
    scatter, pieces = q.operator == "matmul_reduce_scatter", tile.cols // sizes["P"]
    few_rows.few_matmul_reduce(
        a=a, col_bias=None if bias is None else dense.aligned(bias).unsqueeze(0), **given,
        STAGES=sizes["STAGES"], OUTS=1 if scatter else min(pieces, 2),  # rows that are scattered lie apart
        SCATTER=scatter, WORLD=q.world, PR=piece,
    )  # fmt: skip
    return out, None


def _few_stages(tile: Config, vectors: bool) -> tuple[int, int]:
    """Stages of b, which comes from memory, and of the rows, which come from L2: as many as fit, of b first."""
    left = model.SHARED - 2 * 2 * tile.rows * min(tile.piece, tile.cols) - model.VECTORS * vectors
    weights, rows = 2 * tile.depth * tile.rows, max(1024, 2 * tile.depth * tile.cols)
    for stages in range(12, 1, -1):
        fitting = min(stages, (left - stages * weights) // rows)
        if fitting >= min(stages, 4):
            return stages, fitting
    return 2, 2


def symmetric(x: torch.Tensor, group: Group) -> bool:
    """Whether peers can reach ``x``."""
    return symm.place(x, group) is not None


def rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy if TMA cannot address its rows, or if they cannot be viewed as those of several ranks."""
    step = x.stride(0) * x.element_size()
    if x.stride(1) == 1 and step > 0 and step % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)  # which a contiguous one at an odd address needs too


def _operands(q: Request, tile: Config, blocks: int | None, scale: torch.Tensor | None) -> dict[str, Any]:
    """b and the vectors of the epilogue; ``blocks``: into which the kernel divides A's rows, if it does."""
    b = dense.operand("b", q.b, along=0)
    columns = q.b.shape[1]
    col = dense.vector("scale_b", q.scale_b, columns)
    bias = dense.vector("bias", q.bias, columns)
    row = dense.vector("scale_a", scale, q.computed.m)
    if row is not None:
        row = row.reshape(blocks or 1, -1)
        row = _rows_aligned(row).unsqueeze(1) if tile.swap else row.contiguous().unsqueeze(2)
        row = row if blocks else row[0]
    return {
        "b": b.memory, "B_T": b.transposed, "ACTIVATION": q.activation, "row_scale": row,
        "scale": None if col is None else _along(tile, col), "bias": None if bias is None else _along(tile, bias),
    }  # fmt: skip


def _along(tile: Config, x: torch.Tensor) -> torch.Tensor:
    """A vector along b's columns: through shared memory, or, where they are the accumulator's rows, to registers."""
    return x.unsqueeze(1) if tile.swap else dense.aligned(x).unsqueeze(0)


def _rows_aligned(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy, whose rows TMA can load: at multiples of 16 bytes."""
    if x.stride(1) == 1 and x.stride(0) % 4 == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.new_empty((x.shape[0], -(-x.shape[1] // 4) * 4)).narrow(1, 0, x.shape[1]).copy_(x)


def _constants(q: Request, tile: Config, a: torch.Tensor, c: torch.Tensor) -> dict[str, Any]:
    through_shared = q.scale_a is not None if tile.swap else q.bias is not None or q.scale_b is not None
    every = tile.constants(a.element_size(), c.element_size(), through_shared)
    names = ("BK", "P", "STAGES", "OUTS", "WARPGROUPS", "PINGPONG")
    rows, cols = tile.result_tile
    return {name: every[name] for name in names} | {
        "BM": rows, "BN": cols, "TURNED": tile.swap, "GROUP": tile.group or 8,
    }  # fmt: skip


def _summing(q: Request, tile: Config, a: torch.Tensor, c: torch.Tensor) -> dict[str, Any]:
    """Constants of the kernels that add partial sums: PARTS pieces of them, and two of the result, are under way; of
    many tiles, five of which each result replaces its partial sum.
    """
    found = _constants(q, dataclasses.replace(tile, outs=2 + PARTS), a, c)
    sms = q.group.sms or model.SMS
    found |= owner_turns(sms, q.world) | {"GROUP": owner_group(tile, sms, q.world)}
    return found | _under_way(q.computed, tile, q.world, q.operator == "matmul_reduce_scatter")


@functools.lru_cache(maxsize=4096)
def _under_way(p: Problem, tile: Config, world: int, scatters: bool) -> dict[str, Any]:
    rows, cols = tile.result_tile
    waves = -(-p.m // rows) * -(-p.n // cols) / p.sms
    lag = -(-LAG_WAVES * p.sms // (100 * world))
    fetched = lag * (world - 1) * rows * cols * p.out_bits // 8
    at_the_end = model.microseconds(tile, p) / max(1.0, waves) * -(-lag // p.sms)
    if scatters and fetched / 1e3 / LINK > at_the_end:  # an all-reduce also sends there: sooner did not help
        lag = -(-LAG_LINK * p.sms // (100 * world))
    if waves > IN_PLACE_WAVES and not tile.pingpong:
        return {"OUTS": 2, "PARTS": IN_PLACE, "AHEAD": IN_PLACE, "LAG": lag, "IN_PLACE": True}
    return {"OUTS": 2, "PARTS": PARTS, "AHEAD": -(-PARTS // max(1, world - 1)), "LAG": lag}


def owner_group(tile: Config, blocks: int, world: int) -> int:
    """GROUP of sums: every owner has as many of the tiles that ``blocks`` compute at a time, in other rows and the same
    columns.  They read the fewest bytes where all their rows are as many as their columns.
    """
    rows, cols = tile.result_tile
    return max(1, round(math.sqrt(blocks * cols / rows) / world))


def owner_turns(blocks: int, world: int) -> dict[str, int]:
    """STEPS and SHIFT of ``parallel_kernels.owner_of``, so that each of ``blocks`` has tiles of all owners alike.

    From a block's task to its next are STEPS steps, and the owner moves on by ``blocks % world``: SHIFT more are needed
    where that never comes to some of them.
    """
    shift = next(s for s in range(world) if math.gcd(blocks + s, world) == 1)
    return {"STEPS": max(1, blocks // world), "SHIFT": shift}


def _gather_scales(q: Request, mine: torch.Tensor) -> torch.Tensor:
    """The scales of all ranks' rows (world * rows,): a launch of its own, a few bytes a row."""
    return collectives.direct("all_gather", mine, {"dim": 0}, q.group, None)
