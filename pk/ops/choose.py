"""Which way an operator takes: a tile and communicating SMs of pk's kernel, or the library (cuBLAS and NCCL).

Estimates (:mod:`pk.ops.estimate`) decide until :func:`pk.ops.tune` has measured; what it measured is kept on disk.
:func:`pk.ops.explain` shows both.

All ranks decide alike: on a group's first choice they agree on what a choice depends on beside the call, which is the
GPUs, whether the library is there, and what is known from measurements: rank 0 reads the disk for all.  From then on
every rank computes the same choice from the same numbers and asks nobody.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pk.errors import ArgumentError, short
from pk.ops import baseline, estimate, fused, model, options
from pk.ops.estimate import Case
from pk.ops.model import CONFIGS, Config
from pk.runtime import toolkit, tunings

if TYPE_CHECKING:
    from pk.ops.fused import Request
    from pk.runtime.group import Group

LIBRARY = options.LIBRARY
FEW_WAYS = 3  # of the tiles for a few rows, candidates
_SOURCES = ("parallel_kernels", "few_rows", "product", "model", "fused", "baseline")
"""Modules whose texts measurements hold for."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One way: pk's kernel with ``tile`` and ``comm_sms``, or, without a tile, the library.

    An all-gather with ``comm_sms`` 0 has communicator warps; but for tiles for a few rows, which have their own way.
    """

    tile: Config | None
    comm_sms: int = 0

    @property
    def library(self) -> bool:
        """Whether it is the library."""
        return self.tile is None

    @property
    def name(self) -> str:
        """``library``, ``c128x256``, or with communicating SMs ``c128x256/8``."""
        if self.tile is None:
            return LIBRARY
        return f"{self.tile.name}/{self.comm_sms}" if self.comm_sms else self.tile.name


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way and what it costs in microseconds; ``measured`` is None where nobody measured, or it ``failed``."""

    choice: Choice
    estimate: float
    measured: float | None = None
    failed: str = ""


@dataclass(slots=True)
class Facts:
    """What all ranks of a group know alike."""

    gpu: str
    sms: int
    no_library: str  # why it is no candidate, or ""
    machine: str  # of measurements on disk
    tuned: dict[str, list[list[Any]]]  # by key: candidate's name, microseconds or None, why it failed
    memo: dict[Any, Choice] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------ what ranks agree on
def facts(group: Group) -> Facts:
    """The group's facts.  Collective on the first call."""
    if group.choices is None:
        mine = (_gpu(group), group.sms or model.SMS, baseline.unavailable(group))
        world = group.world_size
        group.choices = group.meet("what a choice depends on", mine, lambda told: [_agreed(told)] * world)
        if group.threaded:  # the ranks were given one object
            given = group.choices
            group.choices = Facts(given.gpu, given.sms, given.no_library, given.machine, dict(given.tuned))
    known: Facts = group.choices
    return known


def _agreed(told: list[tuple[str, int, str]]) -> Facts:
    names = sorted({gpu for gpu, _, _ in told})
    gpu, sms = " and ".join(names), min(sms for _, sms, _ in told)
    whys = [(rank, why) for rank, (_, _, why) in enumerate(told) if why]
    everywhere = len(whys) == len(told) and len({why for _, why in whys}) == 1
    why = "" if not whys else whys[0][1] if everywhere else f"rank {whys[0][0]}: {whys[0][1]}"
    machine = _machine(gpu, sms, len(told))
    return Facts(gpu, sms, why, machine, {key: _records(value) for key, value in tunings.load(machine).items()})


def _records(value: Any) -> list[list[Any]]:
    """Of a file that anybody may have written; only what reads as measurements."""
    found = []
    for record in value if isinstance(value, list) else []:
        if isinstance(record, list) and len(record) == 3:
            name, us, failed = record
            if isinstance(name, str) and isinstance(failed, str) and (us is None or _positive(us)):
                found.append(record)
    return found


def _positive(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and 0 < x < float("inf")


def _gpu(group: Group) -> str:
    if group.device is None:
        return "the simulator"
    import torch

    return torch.cuda.get_device_name(group.device)


def _machine(gpu: str, sms: int, world: int) -> str:
    digest = hashlib.sha256("\n".join(_versions()).encode()).hexdigest()[:12]
    return f"{re.sub('[^A-Za-z0-9]+', '-', gpu)}-{sms}sms-x{world}-{digest}"


@cache
def _versions() -> tuple[str, ...]:
    """What measurements depend on beside the machine."""
    import torch

    texts = [Path(__file__).with_name(f"{name}.py") for name in _SOURCES]
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "" for path in texts]
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else ""
    return (
        toolkit.pk_version(), toolkit.include_digest(), str(toolkit.nvrtc_version()), torch.__version__,
        str(torch.version.cuda), str(nccl), *digests,
    )  # fmt: skip


def key(case: Case) -> str:
    """Under which measurements of ``case`` are kept: M in steps of 2 and 3 times powers of two, the rest as it is."""
    m = next(s for i in range(64) for s in (2 << i, 3 << i) if s >= case.m)
    extras = [name for name in ("bias", "activation", "scaled") if getattr(case, name)]
    sizes = f"m{m} n{case.n} k{case.k} {case.bits}->{case.out_bits} bits {case.layout}"
    return " ".join([case.operator, f"x{case.world}", sizes, f"{case.sms} SMs", *extras])


# --------------------------------------------------------------------------------------------------------- choosing
def decide(q: Request, deterministic: bool, comm_sms: int | None, config: Config | str | None) -> Choice:
    """The way that call ``q`` takes.  Collective on a group's first choice, and alike on all ranks.

    Raises :class:`pk.errors.ArgumentError` for a configuration that does not exist, or that the options rule out.
    """
    tile = forced(q.operator, deterministic, comm_sms, config)
    options.within(q.group, comm_sms)
    if config == LIBRARY:
        return Choice(None)
    if q.empty:  # there is nothing to be quick at, and all ranks meet
        least = 1 if comm_sms is None else comm_sms
        return Choice(tile or CONFIGS[fused.LEAST], least if q.operator == "all_gather_matmul" else 0)
    if tile is not None and (comm_sms is not None or q.operator != "all_gather_matmul"):
        return Choice(tile, comm_sms or 0)
    known = q.group.choices or facts(q.group)
    memo = (
        q.operator, q.a.shape, q.a.dtype, q.b.shape, q.b.stride(1) == 1, q.out_dtype, q.bias is None, q.activation,
        q.scale_a is None and q.scale_b is None, deterministic, comm_sms, tile,
    )  # fmt: skip
    chosen: Choice | None = known.memo.get(memo)
    if chosen is None:
        case = estimate.case_of(q, known.sms)
        chosen = best(allowed(candidates(case, known), q.operator, deterministic, comm_sms, tile)).choice
        if len(known.memo) > 4096:
            known.memo.clear()
        known.memo[memo] = chosen
    return chosen


def forced(operator: str, deterministic: bool, comm_sms: int | None, config: Config | str | None) -> Config | None:
    """The tile that the options name, if they name one; ArgumentError for options that cannot be."""
    options.check(operator, deterministic=deterministic, comm_sms=comm_sms, config=config)
    if config == LIBRARY:
        return None
    if not isinstance(config, str):
        if config is not None and not config.few and (config.share or config.split > 1):
            raise ArgumentError(
                f"config={config.name!r} has clusters or parts of K, and {operator}'s tiles have not.\n"
                f"  There are {', '.join(fused.TILES)}."
            )
        return config
    if config not in (*fused.TILES, *fused.FEW):
        raise ArgumentError(
            f'config={short(config)} is no configuration.\n  There are {", ".join(fused.TILES)}, "{LIBRARY}", and for '
            f"up to 256 rows {', '.join(fused.FEW)}."
        )
    return CONFIGS[config]


def candidates(case: Case, known: Facts) -> list[Candidate]:
    """Every way that may be taken, the best first: what was measured, and worked, by its time, before estimates."""
    measured = {name: (us, failed) for name, us, failed in known.tuned.get(key(case), ())}
    ways = [
        Choice(tile, comm)
        for tile in estimate.fitting(case, fused.tiles(case.operator))
        if not fused.crammed(case.operator, tile, case.scaled, case.out_bits)
        for comm in estimate.comm_counts(case.operator, case.world, case.sms)
        if comm or case.operator != "all_gather_matmul" or not fused.crowded(tile)
    ]
    few = fused.few_tiles(case.operator, case.world, case.problem(case.sms))
    ways += [Choice(tile, 0) for tile in sorted(few, key=lambda c: estimate.fused_us(case, c, 0))[:FEW_WAYS]]
    ways += [] if known.no_library else [Choice(None)]
    found = [Candidate(way, cost(case, way), *measured.get(way.name, (None, ""))) for way in ways]
    return sorted(found, key=_order)


def warps(operator: str, way: Choice) -> bool:
    """Whether warps beside the roles communicate."""
    return operator == "all_gather_matmul" and way.tile is not None and not way.tile.few and not way.comm_sms


def _order(c: Candidate) -> tuple[bool, bool, float]:
    guess = c.measured is None
    return bool(c.failed), guess, c.estimate if c.measured is None else c.measured


def cost(case: Case, way: Choice) -> float:
    """The estimate, in microseconds."""
    return estimate.library_us(case) if way.tile is None else estimate.fused_us(case, way.tile, way.comm_sms)


def allowed(
    found: Sequence[Candidate], operator: str, deterministic: bool, comm_sms: int | None, tile: Config | None
) -> list[Candidate]:
    """Those that the options leave.  A number of SMs that the model would not try is taken for all tiles."""
    gathers = operator == "all_gather_matmul"
    library = not (deterministic or tile is not None or (gathers and comm_sms is not None))
    left = [c for c in found if (library if c.choice.tile is None else tile is None or c.choice.tile == tile)]
    if comm_sms is not None and gathers:
        exact = [c for c in left if c.choice.comm_sms == comm_sms]
        left = exact or [_with(c, comm_sms) for c in left]
    if not left and tile is not None:  # one that does not fit well, asked for by name
        counts = {c.choice.comm_sms for c in found if c.choice.tile is not None}
        left = [Candidate(Choice(tile, max(counts) if comm_sms is None else comm_sms), float("nan"))]
    return left


def _with(c: Candidate, comm_sms: int) -> Candidate:
    return Candidate(Choice(c.choice.tile, comm_sms), c.estimate)


def best(left: Sequence[Candidate]) -> Candidate:
    """The first that did not fail; where all did, the first by its estimate."""
    return next((c for c in left if not c.failed), min(left, key=lambda c: c.estimate))
