"""How a collective is launched: its views, its kernel, tiles and blocks; made once for calls that are alike.

A contiguous tensor that is gathered, scattered or exchanged along some dimensions *is* a view of itself whose first
dimension counts ranks, so that no call reshapes by a copy.  What only moves, moves as 32-bit words, of whatever dtype
it is; parts whose rows are no whole words, as with an odd number of bfloat16, go through copies with padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pk.ops import collective_kernels
from pk.ops.calls import Collective

if TYPE_CHECKING:
    from pk.runtime.group import Group

for _kernel in (collective_kernels.exchange, collective_kernels.sum_parts, collective_kernels.sum_and_share):
    _kernel.alike = True

# What one run of benchmarks/collectives.py --sweep compares: the fastest of two H200s, but for sizes between.
TILES = (16384, 8192, 4096, 2048)  # elements of a tile: the largest that gives nearly every SM one, or the last
MOST_SUMMED = 8192  # elements of a tile that is added up: more have no registers
LEAST = 256  # of one row, for tensors that are smaller than the smallest tile
NARROW, EDGE = 64, 256  # columns of a tile: at least, if they divide the rows; where none do, and an edge cuts it
WARP = 32  # threads that a row takes, whether it has so many columns or not
SIGNAL_BYTES = 128 << 10  # of tiles behind which a signal is sent, where every SM has several of them
BLOCKS = 0  # at most; 0: all SMs
# SMs that send while the others add, 0: each does both.  Ranks that share an H200 have no link that could idle, and
# lose by it; two with a link between them have not been measured.
SENDERS = 0
SENDERS_BYTES = 8 << 20  # of tiles to add up, from which on it is so
LAG_BYTES = 16 << 20  # of tiles, up to which a round is sent ahead; more are in L2 no longer when they are added
LINK_GB_S = 350.0  # one way
HOP_US = 3.0  # that a second hop takes: stores that land, a signal, a load
MOVED_INSIDE = 2 << 20  # bytes of a result from which on peers write it; smaller ones go through early launches
INSIDE_BYTES = 8 << 20  # from which on two hops are quicker where peers write the result, whatever crosses the link


def one_hop(world: int, nbytes: int, inside: bool = False) -> bool:
    """Whether an all-reduce of ``nbytes`` is quicker if every rank sends all of them, and nobody sends sums.

    ``inside``: peers write the result, so that nobody copies sums.
    """
    if inside and nbytes >= INSIDE_BYTES:
        return False
    more = (world - 1) * (1 - 2 / world) * nbytes
    return more <= HOP_US * LINK_GB_S * 1e3


def shape_of(rows: int, cols: int, most: int) -> tuple[int, int]:
    """Rows and columns of a tile of up to ``most`` elements, powers of 2, for matrices of ``rows`` by ``cols``.

    Columns that divide the matrix's, or few of them: a tile that an edge cuts is added up element by element.
    """
    up_to = 1 << max(cols - 1, 0).bit_length()
    if rows <= 1:
        return 1, min(most, max(up_to, LEAST))
    whole = cols & -cols
    width = min(most, whole if whole >= NARROW else min(max(up_to, 8), EDGE))
    return min(most // max(width, WARP), 1 << (rows - 1).bit_length()), width


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of a launch: (BM, BN), ``per`` of them to a task and signal, and how many blocks there are tasks for.

    ``lag``: tasks that are sent before the first is waited for: those of a round, if there are several, but not many.
    ``senders``: SMs that send while the others add up; 0: each does both.
    """

    rows: int
    cols: int
    per: int
    blocks: int | None
    lag: int = 0
    senders: int = 0

    @property
    def constants(self) -> dict[str, Any]:
        """Of a kernel."""
        return {"BM": self.rows, "BN": self.cols, "PER": self.per}


def tiling(depth: int, rows: int, cols: int, itemsize: int, sms: int, summed: bool = False) -> Tiling:
    """For ``depth`` matrices of ``rows`` by ``cols`` on ``sms`` SMs."""
    for most in (t for t in TILES if not summed or t <= MOST_SUMMED):
        bm, bn = shape_of(rows, cols, most)
        tiles = depth * -(-rows // bm) * -(-cols // bn)
        if 8 * tiles >= 7 * sms:
            break
    most = min(SIGNAL_BYTES // (bm * bn * itemsize), tiles // (4 * sms))
    per = 1 << max(most.bit_length() - 1, 0)  # a power of 2: each number is a kernel of its own
    tasks = -(-tiles // per)
    launched = blocks(tasks, sms)
    each = launched or sms
    nbytes = tiles * bm * bn * itemsize
    senders = SENDERS if summed and each > 1 and nbytes >= SENDERS_BYTES else 0
    ahead = each < tasks and nbytes <= LAG_BYTES
    return Tiling(bm, bn, per, launched, each if ahead else 0, senders)


def blocks(tasks: int, sms: int) -> int | None:
    """How many blocks to launch: none that has nothing to do.  None: as many as there are SMs."""
    most = min(tasks, BLOCKS or sms)
    return max(most, 1) if most < sms else None


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch for calls that are alike.

    ``part``: the shape of what one rank sends another.  ``split``, ``concat``: in front of which dimension x and the
    result have one of ranks; None: they have none.  ``extents``: (P, R, C) of a part as matrices.
    """

    world: int
    part: tuple[int, ...]
    split: int | None
    concat: int | None
    extents: tuple[int, int, int]
    tiles: Tiling
    summed: bool = False
    hops: int = 1
    words: bool = False  # what moves is whole words
    inside: bool = False  # peers write the result

    def words_of(self, operator: str, x: torch.Tensor, sms: int) -> list[str]:
        """In words, for :func:`pk.ops.explain`."""
        t, sent = self.tiles, x.nbytes if self.split is None else x.nbytes // self.world
        if self.hops == 2:
            sent = 2 * x.nbytes // self.world
        link = (self.world - 1) * sent
        kernel = "sum_and_share" if self.hops == 2 else "sum_parts" if self.summed else "exchange"
        unit = str(x.dtype).removeprefix("torch.") if self.summed else "4-byte words"
        lines = [
            f"  at least {link / 1e3 / LINK_GB_S:.1f} us: {link / 1e6:.1f} MB over the link of each rank",
            f"  kernel {kernel}: tiles of {t.rows} x {t.cols} {unit}, {t.per} to a signal, {t.blocks or sms} blocks",
        ]
        if operator == "all_reduce":
            ways = "one hop: every rank sends all, and adds up all", "two hops: each rank adds up a share, and sends it"
            lines.append(f"  {ways[self.hops - 1]}")
        elif not self.summed and not self.words:
            lines.append("  through padded copies: rows of its parts are no whole words of 4 bytes")
        return lines

    def run(self, x: torch.Tensor, out: torch.Tensor, group: Group) -> None:
        """Launch it, from x to ``out``, which may be x for an all-reduce."""
        if not x.is_contiguous() or x.data_ptr() % 16:
            x = x.clone(memory_format=torch.contiguous_format)
        x, out = packed(x), packed(out)
        if self.hops == 2:
            self._share(x, out, group)
        elif self.summed:
            _, rows, cols = self.extents
            parts = self._along(x, self.split)[:, 0]
            given = {**self.tiles.constants, "COMM": self.tiles.senders, "lag": self.tiles.lag}
            given |= {"sms": self.tiles.blocks, "group": group}
            collective_kernels.sum_parts(x=parts, out=out.view(rows, cols), **given)
        elif self.words:
            into = torch.empty_like(out) if out.data_ptr() % 4 else out  # whatever is the case on the other ranks
            parts, found = (self._along(t, dim).view(torch.int32) for t, dim in ((x, self.split), (into, self.concat)))
            self._move(parts, found, self.inside, group)
            if into is not out:
                out.copy_(into)
        else:
            self._padded(x, out, group)

    def _along(self, t: torch.Tensor, dim: int | None) -> torch.Tensor:
        """(world, P, R, C): the parts of ``t`` along ``dim``; the whole of it for every rank without one."""
        P, R, C = self.extents
        if dim is None:
            return t.view(1, P, R, C).expand(self.world, P, R, C)
        before = math.prod(self.part[:dim])
        if before == P * R:  # the ranks stand in front of the columns
            return t.view(P, R, self.world, C).permute(2, 0, 1, 3)
        return t.view(P, self.world, R, C).transpose(0, 1)

    def _share(self, x: torch.Tensor, out: torch.Tensor, group: Group) -> None:
        there = {"whole" if self.inside else "out": out.view(1, -1)}
        tiles = self.tiles
        collective_kernels.sum_and_share(
            x=x.view(1, -1), **there, lag=tiles.lag, BN=tiles.cols, COMM=tiles.senders, sms=tiles.blocks, group=group
        )

    def _move(self, x: torch.Tensor, out: torch.Tensor, inside: bool, group: Group) -> None:
        there, tiles = {"whole" if inside else "out": out}, self.tiles
        collective_kernels.exchange(x=x, lag=tiles.lag, **there, **tiles.constants, sms=tiles.blocks, group=group)

    def _padded(self, x: torch.Tensor, out: torch.Tensor, group: Group) -> None:
        """Through copies of the parts, each padded to whole words."""
        parts = self._along(x, self.split)[: 1 if self.split is None else self.world]
        raw = parts.reshape(parts.shape[0], math.prod(self.part)).contiguous().view(torch.uint8)
        nbytes = raw.shape[1]
        raw = torch.nn.functional.pad(raw, (0, -nbytes % 16 if nbytes else 16))  # without elements too, the ranks meet
        shape = (self.world, 1, 1, raw.shape[1] // 4)
        sent = raw.view(torch.int32).view(-1, *shape[1:]).expand(shape)
        found = torch.empty(shape, dtype=torch.int32, device=x.device)
        self._move(sent, found, False, group)
        whole = found.view(self.world, shape[3]).view(torch.uint8)[:, :nbytes].contiguous().view(x.dtype)
        self._along(out, self.concat).copy_(whole.view(self.world, *self.extents))


def packed(t: torch.Tensor) -> torch.Tensor:
    """The contiguous ``t`` with the strides of its shape: torch lets dimensions of one element have any, and then
    refuses to view it as words.
    """
    strides = [math.prod(t.shape[d + 1 :]) for d in range(t.ndim)]
    return t if list(t.stride()) == strides or not t.numel() else t.as_strided(t.shape, strides)


def made(call: Collective, world: int, sms: int) -> Plan:
    """The plan of ``call`` between ``world`` ranks, the same on all of them; ``sms``: that each has at least."""
    x, dims = call.x, dict(call.dims)
    joins = call.operator == "all_gather"
    split = None if joins else dims.get("dim", dims.get("split_dim"))
    concat = dims["dim"] if joins else dims.get("concat_dim")
    part = tuple(n // world if d == split else n for d, n in enumerate(x.shape))
    extents = extents_of(part, split, concat)
    if call.operator in ("reduce_scatter", "all_reduce"):
        hops = 1 if call.operator == "reduce_scatter" or one_hop(world, x.nbytes, call.inside) else 2
        tiles = tiling(*extents, x.element_size(), sms, summed=True)
        if hops == 2:
            tiles = tiling(1, 1, -(-x.numel() // world), x.element_size(), sms, summed=True)
        return Plan(world, part, split, concat, extents, tiles, True, hops, inside=call.inside)
    row = extents[2] * x.element_size()
    words = row % 4 == 0 and x.numel() > 0
    if words:
        tiles = tiling(*extents[:2], row // 4, 4, sms)
    else:
        tiles = tiling(1, 1, -(-math.prod(part) * x.element_size() // 16) * 4, 4, sms)
    few = math.prod(part) * x.element_size() * world < MOVED_INSIDE
    return Plan(world, part, split, concat, extents, tiles, words=words, inside=call.inside and words and not few)


def extents_of(part: tuple[int, ...], *dims: int | None) -> tuple[int, int, int]:
    """(P, R, C) of a part: the extents in front of, between and behind ``dims``, in as few dimensions as they fit."""
    at = sorted(d for d in dims if d is not None)
    if not at:
        return 1, 1, math.prod(part)
    P, R, C = math.prod(part[: at[0]]), math.prod(part[at[0] : at[-1]]), math.prod(part[at[-1] :])
    return (1, P, C) if R == 1 else (P, R, C)
