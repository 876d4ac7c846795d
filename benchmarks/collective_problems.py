"""Problems of the benchmark of collectives: tensors, what the result must be, contenders, and which kernels they need.

A message counts as NCCL counts it: the gathered result of an all-gather, one rank's input of the other three.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from baselines import Contender
from collective_calls import Call
from team import Team
from tp_problems import Build, specs

import pk
from pk.ops import calls, collective_kernels, collective_plans, collectives
from pk.ops.model import SMS
from pk.runtime.group import Group, current

OPERATORS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
LINK_GB_S = 358.0  # one way, the most that stores of all SMs reached between two H200s
TILES = (2048, 4096, 8192, 16384)
SIGNAL_KB = (8, 16, 32, 64, 128)
BLOCKS = (16, 32, 64, 0)


@dataclass(frozen=True)
class Problem:
    """One call on every rank: ``nbytes`` of bfloat16 in all, in rows of one element."""

    operator: str
    nbytes: int

    def link_bytes(self, world: int) -> float:
        """Bytes that must leave (and enter) every GPU."""
        return (2 if self.operator == "all_reduce" else 1) * (world - 1) * self.nbytes / world

    def shape(self, world: int) -> tuple[int, ...]:
        """Of x."""
        count = -(-self.nbytes // 2 // world) * world
        return (count // world if self.operator == "all_gather" else count,)

    def title(self) -> str:
        """As in the tables."""
        return f"{self.operator} of {size(self.nbytes)}"


def size(nbytes: int) -> str:
    """With a unit."""
    for unit, factor in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes} B"


def nbytes_of(text: str) -> int:
    """What :func:`size` says, without blanks: 64KB, 1GB, 300."""
    for unit, factor in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10), ("B", 1)):
        if text.upper().endswith(unit):
            return int(float(text[: -len(unit)]) * factor)
    return int(text)


@dataclass(frozen=True)
class Way:
    """How a launch is planned: None is what ``pk.ops.collective_plans`` has."""

    tile: int | None = None
    signal_kb: int | None = None
    blocks: int | None = None
    hops: int | None = None
    senders: int | None = None

    def __str__(self) -> str:
        parts = ("t", self.tile), ("s", self.signal_kb), ("b", self.blocks), ("senders ", self.senders)
        found = [f"{k}{v}" for k, v in parts if v is not None]
        return " ".join([*found, *([] if self.hops is None else [f"{self.hops} hop{'s' * (self.hops > 1)}"])])


AS_IT_IS = (
    collective_plans.TILES, collective_plans.SIGNAL_BYTES, collective_plans.BLOCKS, collective_plans.HOP_US,
    collective_plans.MOVED_INSIDE, collective_plans.SENDERS, collective_plans.SENDERS_BYTES,
)  # fmt: skip
ONE_AT_A_TIME = threading.Lock()  # ranks may be threads


@contextmanager
def planned(way: Way) -> Iterator[None]:
    """Inside, plans are made this ``way``; ranks that are threads ask for the same."""
    c = collective_plans
    c.TILES = c.TILES if way.tile is None else (way.tile,)
    c.SIGNAL_BYTES = c.SIGNAL_BYTES if way.signal_kb is None else way.signal_kb << 10
    c.BLOCKS = c.BLOCKS if way.blocks is None else way.blocks
    c.HOP_US = c.HOP_US if way.hops is None else {1: math.inf, 2: -1.0}[way.hops]
    if way.senders is not None:
        c.SENDERS, c.SENDERS_BYTES = way.senders, 0
    c.MOVED_INSIDE = 0  # where it is said who writes the result, it is so
    try:
        yield
    finally:
        c.TILES, c.SIGNAL_BYTES, c.BLOCKS, c.HOP_US, c.MOVED_INSIDE, c.SENDERS, c.SENDERS_BYTES = AS_IT_IS


class Operands:
    """What one rank passes, where results go, and the right answer."""

    def __init__(self, p: Problem, team: Team) -> None:
        self.p, self.team = p, team
        gen = torch.Generator(device=team.device).manual_seed(p.nbytes + 1001 * team.rank)
        self.x = torch.randn(p.shape(team.world), device=team.device, generator=gen).bfloat16()
        count = self.x.numel() * (team.world if p.operator == "all_gather" else 1)
        self.shape = (count // team.world if p.operator == "reduce_scatter" else count,)
        self.out = self.x.new_empty(self.shape)
        self.there = pk.empty(self.shape, torch.bfloat16) if p.operator != "reduce_scatter" else None
        self.results = [self.out] + ([] if self.there is None else [self.there])

    def reference(self) -> torch.Tensor:
        """By torch, sums in float32.  Collective."""
        p, world, rank = self.p, self.team.world, self.team.rank
        if p.operator == "all_gather":
            return self.team.gathered(self.x)
        if p.operator == "all_to_all":
            return self.team.gathered(self.x).view(world, world, -1)[:, rank].reshape(-1)
        total = self.team.summed(self.x.float())
        return total.view(world, -1)[rank] if p.operator == "reduce_scatter" else total

    def poison(self) -> None:
        """NaN into the results, on every rank before any goes on: peers write there."""
        for result in self.results:
            result.fill_(math.nan)
        self.team.sync()
        self.team.align()
        self.team.sync()

    def error(self, want: torch.Tensor, got: torch.Tensor) -> float:
        """||got - want|| / ||want||; infinite if ``got`` has a NaN, or moved with other bits."""
        if self.p.operator in ("all_gather", "all_to_all"):
            return 0.0 if torch.equal(got, want) else math.inf
        off = (got.float() - want).norm() / want.norm().clamp_min(1e-30)
        return float(off) if bool(off == off) else math.inf


def plan(o: Operands, way: Way, inside: bool) -> collective_plans.Plan:
    """The launch of ``o`` planned this ``way``."""
    dims = tuple((name, 0) for name in collectives.DIMENSIONS[o.p.operator])
    with ONE_AT_A_TIME, planned(way):
        call = calls.Collective(o.p.operator, o.x, dims, inside)
        return collective_plans.made(call, current().world_size, current().sms or SMS)


# -------------------------------------------------------------------------------------------------------- contenders
def ours(o: Operands) -> list[Contender]:
    """The operators as they are called, into ordinary and into symmetric memory."""
    operator = getattr(pk.ops, o.p.operator)
    found = [Contender("pk", "pk", lambda: operator(o.x, out=o.out), True)]
    if o.there is not None:
        found.append(Contender("pk, symmetric", "pk", lambda: operator(o.x, out=o.there), True))
    return found


def variants(o: Operands, ways: list[tuple[Way, bool]]) -> list[Contender]:
    """Plans that differ, of ``ways`` and whether peers write the result."""
    found: dict[collective_plans.Plan, Contender] = {}
    for way, inside in ways:
        if inside and o.there is None:
            continue
        made, out = plan(o, way, inside), o.there if inside else o.out
        assert out is not None
        name = f"{way}{', symmetric' * inside}"

        def call(made: collective_plans.Plan = made, out: torch.Tensor = out) -> torch.Tensor:
            made.run(o.x, out, current())
            return out

        found.setdefault(made, Contender(name, "pk", call, True))
    return list(found.values())


def nccl(o: Operands) -> list[Contender]:
    """torch.distributed: NCCL, or gloo on the CPU, which has no reduce-scatter and no all-to-all of its own."""
    if o.p.operator == "all_reduce":
        return [Contender("NCCL", "rival", *_in_place(o, dist.all_reduce, torch.empty_like(o.x)))]
    if not o.team.gpu and o.p.operator != "all_gather":
        return []
    call = {
        "all_gather": dist.all_gather_into_tensor, "reduce_scatter": dist.reduce_scatter_tensor,
        "all_to_all": dist.all_to_all_single,
    }[o.p.operator]  # fmt: skip

    def moved() -> torch.Tensor:
        call(o.out, o.x)
        return o.out

    return [Contender("NCCL", "rival", moved, True)]


def _in_place(o: Operands, call: Callable[[torch.Tensor], Any], y: torch.Tensor) -> tuple[Callable[[], Any], bool]:
    """``call`` on ``y``, which is not whole: its sums go on growing, so that it is timed on zeros.

    Here, once, on x: right, or an error.
    """
    y.copy_(o.x)
    call(y)
    o.team.sync()
    if not o.error(o.reference(), y) < 1e-2:
        raise ValueError("wrong sums")
    y.zero_()
    return lambda: call(y), False


def symmetric_memory(o: Operands) -> list[Contender]:
    """torch's one-shot and two-shot all-reduce."""
    if o.p.operator != "all_reduce":
        return []
    import torch.distributed._symmetric_memory as symm_mem

    name = dist.group.WORLD.group_name
    with warnings.catch_warnings():  # newer versions of torch need no enabling, and say so
        warnings.simplefilter("ignore")
        symm_mem.enable_symm_mem_for_group(name)
    shared = symm_mem.empty(o.shape, dtype=o.x.dtype, device=o.x.device)
    symm_mem.rendezvous(shared, name)
    ops = torch.ops.symm_mem
    found = [Contender("two-shot", "rival", *_in_place(o, lambda y: ops.two_shot_all_reduce_(y, "sum", name), shared))]
    if o.p.nbytes <= 8 << 20:
        sent = symm_mem.empty(o.shape, dtype=o.x.dtype, device=o.x.device)
        symm_mem.rendezvous(sent, name)
        sent.copy_(o.x)

        def one_shot() -> torch.Tensor:
            ops.one_shot_all_reduce_out(sent, "sum", name, o.out)
            return o.out

        found.append(Contender("one-shot", "rival", one_shot, True))
    return found


# ------------------------------------------------------------------------------------------------------- compiling
def builds(p: Problem, ways: list[tuple[Way, bool]], world: int) -> list[Build]:
    """The kernels of a problem; no GPU needed."""
    dims = tuple(0 for _ in collectives.DIMENSIONS[p.operator])
    found: list[Build] = []
    for way, inside in ways:
        found += builds_of(Call(p.operator, p.shape(world), dims, torch.bfloat16, "symmetric" * inside), way, world)
    return found


def builds_of(call: Call, way: Way, world: int) -> list[Build]:
    """The kernels of one call."""
    x = torch.empty(call.shape, dtype=call.dtype, device="meta")
    dims = dict(zip(collectives.DIMENSIONS[call.operator], call.front(), strict=True))
    out = x.new_empty(collectives.result_shape(call.operator, x, dims, world))
    inside = call.place == "symmetric" and call.operator != "reduce_scatter"
    with ONE_AT_A_TIME, planned(way):
        made = collective_plans.made(calls.Collective(call.operator, x, tuple(dims.items()), inside), world, SMS)
    found: list[Build] = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            def note(**given: Any) -> None:
                found.append((name, specs({k: v for k, v in given.items() if k not in ("group", "sms")})))

            return note

    kept = collective_plans.collective_kernels
    collective_plans.collective_kernels = Recorder()  # type: ignore[assignment]
    try:
        made.run(x, out, Group(0, world, "sim"))
    finally:
        collective_plans.collective_kernels = kept
    return found


def compile_one(build: Build) -> str:
    """In a process of its own: fills the disk cache; what is wrong with the cubin, or nothing."""
    name, arguments = build
    resources = getattr(collective_kernels, name).resources(**arguments)
    return f"{name}: {resources}" if resources.spill_bytes or resources.local_bytes else ""
