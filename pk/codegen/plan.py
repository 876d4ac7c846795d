"""Decide everything about a kernel that is not text: roles, warps, registers, shared memory, barriers, tensor maps,
sites.

The plan is frozen and prints as one table (``str(plan)``).  ``params`` lays out the parameter block from it and
``emit`` writes the text; neither decides anything.

Register split: a block starts with 65536 / threads registers a thread, and setmaxnreg only moves them inside that
pool.  384 threads: 168 each, moved to 232 for the consumers and 40 for the producer warpgroup, in which no role
spills.  512 threads: 128 each; 160 / 32 leaves the producers too few (28 bytes spilled), 152 / 56 does not.  256
threads: none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from pk.artifact import Site
from pk.codegen import layout
from pk.codegen.facts import Facts
from pk.errors import NotConstant
from pk.ir import nodes as ir
from pk.ir import split
from pk.ir.budget import tile_bytes
from pk.ir.ops import TABLE
from pk.ir.rules import RESERVED_SHARED
from pk.ir.types import Tile

# Threads of a block -> setmaxnreg of its consumers, of its producer warpgroup.
REGISTERS = {384: (232, 40), 512: (152, 56)}
# TMA op -> positions of its operands: memory, shared tile.
MOVES = {"load_async": (1, 0), "store_async": (0, 1), "store_add_async": (0, 1)}


@dataclass(frozen=True, slots=True)
class TilePlan:
    """One tile of a stage; ``offset`` counts from the start of the stage."""

    name: str
    tile: Tile
    offset: int
    swizzle: int


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """A ring in shared memory.  ``offset``: of its first stage from the first tile of the block."""

    name: str
    stages: int
    tiles: tuple[TilePlan, ...]
    offset: int
    stage_bytes: int
    filler: ir.RoleKind
    drainer: ir.RoleKind
    full_arrivals: int
    empty_arrivals: int
    span: ir.Span = field(default=ir.NOWHERE, compare=False, repr=False)

    def tile(self, name: str) -> TilePlan:
        """The tile called ``name``."""
        return next(t for t in self.tiles if t.name == name)


@dataclass(frozen=True, slots=True)
class RolePlan:
    """One role of a class of blocks: its warps and what it executes (prologue scalars included)."""

    kind: ir.RoleKind
    block_class: str
    first_warp: int
    warps: int
    body: ir.Block = field(repr=False)
    facts: Facts = field(repr=False)
    remote: bool

    @property
    def name(self) -> str:
        """``loader``, or ``communicator loader`` in a communicator."""
        return self.kind if self.block_class == "compute" else f"{self.block_class} {self.kind}"

    @property
    def threads(self) -> int:
        """Threads of the role that take part in its barriers."""
        return 32 * self.warps


@dataclass(frozen=True, slots=True)
class ClassPlan:
    """One class of thread blocks: ``compute`` or ``communicator``."""

    name: str
    roles: tuple[RolePlan, ...]
    pipelines: tuple[PipelinePlan, ...]
    warpgroups: int  # consumer warpgroups
    tile_bytes: int

    @property
    def prefix(self) -> str:
        """What the C++ names of the class begin with."""
        return "" if self.name == "compute" else f"{self.name}_"

    def role(self, kind: str) -> RolePlan:
        """The role of that kind."""
        return next(r for r in self.roles if r.kind == kind)


@dataclass(frozen=True, slots=True)
class MapPlan:
    """A tensor map of the parameter block; ``everyone``: an array with one map a rank, not only this rank's own."""

    name: str
    tensor: str
    box: tuple[int, ...]
    swizzle: int
    everyone: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything decided about one kernel."""

    kernel: ir.Kernel = field(repr=False)
    threads: int
    registers: tuple[int, int]
    classes: tuple[ClassPlan, ...]
    maps: tuple[MapPlan, ...]
    addressed: tuple[tuple[str, bool], ...]  # tensors that threads reach by pointer: (name, on every rank)
    dims: tuple[tuple[str, int], ...]  # (tensor, axis), in order of first use
    shared_bytes: int
    sites: tuple[Site, ...]
    outputs: tuple[str, ...]
    remote: bool
    uses_signals: bool
    comm_sms: int

    @property
    def launch_warp(self) -> int:
        """The warp that opens and closes the launch: the third of the producer warpgroup, idle otherwise."""
        return self.threads // 32 - 2

    @property
    def compute(self) -> ClassPlan:
        """The class of the task loops."""
        return self.classes[0]

    @property
    def communicator(self) -> ClassPlan | None:
        """The class of ``with pk.communicator``, if there is one."""
        return self.classes[1] if len(self.classes) > 1 else None

    def pipeline(self, name: str) -> PipelinePlan:
        """The pipeline called ``name``."""
        return next(p for c in self.classes for p in c.pipelines if p.name == name)

    def map_of(self, memory: ir.Memory, tile: Tile) -> MapPlan:
        """The tensor map through which ``tile`` moves from or to ``memory``."""
        box = layout.box(tile, len(memory.coord))
        key = (memory.tensor, box, layout.swizzle(tile))
        return next(m for m in self.maps if (m.tensor, m.box, m.swizzle) == key)

    def site(self, role: RolePlan, op: str, what: str, span: ir.Span) -> str:
        """C++ name of a site; see :class:`pk.artifact.Site`."""
        return site_names(self.sites)[self.sites.index(_site(role.name, op, what, span))]

    def __str__(self) -> str:
        from pk.codegen.describe import describe

        return describe(self)


def plan(kernel: ir.Kernel) -> Plan:
    """Plan ``kernel``, which has passed :func:`pk.ir.check.check`.

    Raises:
        NotConstant: the communicator's number of SMs is not known at compile time.
    """
    bodies = {"compute": kernel.compute}
    if kernel.communicator is not None:
        bodies["communicator"] = kernel.communicator.body
    threads = max(_threads(body) for body in bodies.values())
    classes = tuple(_class(kernel, name, body, threads) for name, body in bodies.items())
    shared = max(c.tile_bytes for c in classes)
    roles = [r for c in classes for r in c.roles]
    return Plan(
        kernel=kernel,
        threads=threads,
        registers=REGISTERS.get(threads, (0, 0)) if classes[0].warpgroups else (0, 0),
        classes=classes,
        maps=_maps(kernel, roles),
        addressed=_addressed(roles),
        dims=_dims(kernel, roles),
        shared_bytes=shared + RESERVED_SHARED,
        sites=_sites(classes),
        outputs=_outputs(kernel, roles),
        remote=any(_touches_users_parallel(kernel, r) for r in roles),
        uses_signals=bool(kernel.signals),
        comm_sms=_comm_sms(kernel),
    )


# ---------------------------------------------------------------------------------------------- classes and roles
def _threads(body: ir.Block) -> int:
    """Threads that a class asks for: its consumer warpgroups (a team: one) and a producer warpgroup."""
    team = split.roles_of(body) == ("team",)
    return 128 * (1 if team else split.warpgroups_of(body)) + 128


def _class(kernel: ir.Kernel, name: str, body: ir.Block, threads: int) -> ClassPlan:
    groups = split.warpgroups_of(body)
    roles = tuple(_role(kernel, name, kind, body, groups, threads) for kind in split.roles_of(body))
    pipelines, used = _pipelines(kernel, name, body, groups)
    return ClassPlan(name, roles, pipelines, groups, used)


def _role(kernel: ir.Kernel, name: str, kind: ir.RoleKind, body: ir.Block, groups: int, threads: int) -> RolePlan:
    producers = threads // 32 - 4  # the last warpgroup, in every class
    first, warps = {
        "consumer": (0, 4 * groups),
        "loader": (producers, 1),
        "storer": (producers + 1, 1),
        "team": (0, producers),
    }[kind]
    # A team has no role blocks, so that the slice for any role is the team's code less the names nothing reads.
    mine = split.slice_role((*kernel.prologue, *body), "loader" if kind == "team" else kind)
    facts = Facts.of(mine)
    remote = any(remote_access(s, facts) for s in split.statements(mine))
    return RolePlan(kind, name, first, warps, mine, facts, remote)


def remote_access(s: ir.Statement, facts: Facts) -> bool:
    """Whether a statement itself (not the blocks inside it) touches another rank's memory or counters."""
    if isinstance(s, ir.Do) and s.op in ("signal_all", "barrier"):
        return True
    if isinstance(s, ir.Do) and s.op in ("signal", "signal_each") and not facts.is_own_rank(s.operands[1]):
        return True
    return bool(remote_windows(s, facts))


def remote_windows(s: ir.Statement, facts: Facts) -> list[ir.Memory]:
    """Other ranks' memory that a statement itself touches."""
    return [o for o in split.walk(split.expressions(s)) if isinstance(o, ir.Memory) and facts.is_remote(o)]


def _pipelines(kernel: ir.Kernel, name: str, body: ir.Block, groups: int) -> tuple[tuple[PipelinePlan, ...], int]:
    used = _stage_roles(body)
    at, planned = 0, []
    for p in kernel.pipelines:
        if p.name not in used:
            continue
        ends = used[p.name]
        tiles, size = _stage(p)
        full, empty = (4 * groups if ends[mode] == "consumer" else 1 for mode in ("fill", "drain"))  # one a warp
        planned.append(
            PipelinePlan(p.name, p.stages, tiles, at, size, ends["fill"], ends["drain"], full, empty, p.span)
        )
        at += p.stages * size
    return tuple(planned), at


def _stage(p: ir.Pipeline) -> tuple[tuple[TilePlan, ...], int]:
    at, tiles = 0, []
    for name, tile in p.tiles:
        tiles.append(TilePlan(name, tile, at, layout.swizzle(tile)))
        at += tile_bytes(tile)
    return tuple(tiles), at


def _stage_roles(body: ir.Block) -> dict[str, dict[str, ir.RoleKind]]:
    """For each pipeline that a class uses, the role that fills it and the role that drains it."""
    found: dict[str, dict[str, ir.RoleKind]] = {}
    for role in split.statements(body):
        if isinstance(role, ir.Role):
            for s in split.statements(role.body):
                if isinstance(s, ir.Stage):
                    found.setdefault(s.pipeline, {})[s.mode] = role.kind
    return found


def _comm_sms(kernel: ir.Kernel) -> int:
    if kernel.communicator is None:
        return 0
    sms = kernel.communicator.sms
    if isinstance(sms, ir.Const):
        return int(sms.value)
    raise NotConstant(
        "the number of communicator SMs is not known when the kernel is compiled",
        kernel.communicator.span,
        "Pass a number or a `pk.constexpr` parameter as `sms`.",
    )


# ------------------------------------------------------------------------------------- what the host has to provide
def moves(roles: list[RolePlan]) -> Iterator[tuple[RolePlan, ir.Do, ir.Memory, ir.Shared]]:
    """Every TMA operation of ``roles``: the role, the op, its window of a tensor and its shared tile."""
    for r in roles:
        for s in split.statements(r.body):
            if isinstance(s, ir.Do) and s.op in MOVES:
                at, tile = (s.operands[i] for i in MOVES[s.op])
                assert isinstance(at, ir.Memory)
                assert isinstance(tile, ir.Shared)
                yield r, s, at, tile


def direct(roles: list[RolePlan]) -> Iterator[tuple[RolePlan, ir.Memory]]:
    """Every window that threads reach by pointer: all but those that TMA moves."""
    for r in roles:
        for s in split.statements(r.body):
            moved = s.operands[MOVES[s.op][0]] if isinstance(s, ir.Do) and s.op in MOVES else None
            for o in split.walk(split.expressions(s)):
                if isinstance(o, ir.Memory) and o is not moved:
                    yield r, o


def _addressed(roles: list[RolePlan]) -> tuple[tuple[str, bool], ...]:
    """Tensors of ``direct`` windows, and whether every rank's copy is reached."""
    found: dict[str, bool] = {}
    for r, at in direct(roles):
        found[at.tensor] = found.get(at.tensor, False) or r.facts.is_remote(at)
    return tuple(found.items())


def _maps(kernel: ir.Kernel, roles: list[RolePlan]) -> tuple[MapPlan, ...]:
    wanted: dict[tuple[str, tuple[int, ...], int], bool] = {}
    for r, _, at, tile in moves(roles):
        key = (at.tensor, layout.box(tile.type, len(at.coord)), layout.swizzle(tile.type))
        wanted[key] = wanted.get(key, False) or r.facts.is_remote(at)
    many = {t: [k for k in wanted if k[0] == t] for t, _, _ in wanted}
    maps = []
    for key, everyone in wanted.items():
        tensor, box, swizzle = key
        suffix = "" if len(many[tensor]) == 1 else f"_{'x'.join(map(str, box[-2:]))}"
        if sum(k[1][-2:] == box[-2:] for k in many[tensor]) > 1:
            suffix += f"_s{swizzle}"
        maps.append(MapPlan(f"{tensor}_{'maps' if everyone else 'map'}{suffix}", tensor, box, swizzle, everyone))
    return tuple(maps)


def _dims(kernel: ir.Kernel, roles: list[RolePlan]) -> tuple[tuple[str, int], ...]:
    found: dict[tuple[str, int], None] = {}
    for r in roles:
        for s in split.statements(r.body):
            for e in split.walk(split.expressions(s)):
                if isinstance(e, ir.Dim):
                    found[e.tensor, e.axis] = None
    return tuple(found)


def _outputs(kernel: ir.Kernel, roles: list[RolePlan]) -> tuple[str, ...]:
    done = [s for r in roles for s in split.statements(r.body) if isinstance(s, ir.Do)]
    operands = [s.operands[i] for s in done for i in TABLE[s.op].writes]
    written = {o.tensor for o in operands if isinstance(o, ir.Memory)}
    return tuple(t.name for t in kernel.tensors if t.name in written)


def _touches_users_parallel(kernel: ir.Kernel, role: RolePlan) -> bool:
    users = {t.name for t in kernel.tensors if t.kind == "parallel"}
    touched = [at for s in split.statements(role.body) for at in remote_windows(s, role.facts)]
    return any(at.tensor in users for at in touched)


# -------------------------------------------------------------------------------------------------------- sites
LAUNCH_SITES = (
    Site("launch", "entry", "every rank has begun", "", 0, ""),
    Site("launch", "exit", "every rank has finished", "", 0, ""),
)


def site_names(sites: tuple[Site, ...]) -> list[str]:
    """A C++ enumerator for each site, such as ``SITE_INPUTS_FILL``."""
    names: list[str] = []
    for s in sites:
        subject = "" if s.role == "launch" or s.op == "assert" else f"{s.what}_"
        name = base = re.sub(r"\W", "_", f"SITE_{subject}{s.op}".upper())
        n = 1
        while name in names:
            n += 1
            name = f"{base}_{n}"
        names.append(name)
    return names


def _site(role: str, op: str, what: str, span: ir.Span) -> Site:
    return Site(role, op, what, span.file, span.line, span.text.strip().rstrip("\\"))


def _sites(classes: tuple[ClassPlan, ...]) -> tuple[Site, ...]:
    """Every place that may wait, in the order of the emitted text, then the two of the launch itself."""
    found: dict[Site, None] = {}
    for c in classes:
        for r in c.roles:
            for s in split.statements(r.body):
                for op, what in waits_of(s, r.facts):
                    found[_site(r.name, op, what, s.span)] = None
    return (*found, *LAUNCH_SITES)


def waits_of(s: ir.Statement, facts: Facts) -> Iterator[tuple[str, str]]:
    """(op, what) of each wait that a statement itself may do; a remote access waits for the ranks to have begun."""
    if isinstance(s, ir.Stage):
        yield s.mode, s.pipeline
    elif isinstance(s, ir.Assert):
        yield "assert", s.text
    elif isinstance(s, ir.Do):
        first = s.operands[0] if s.operands else None
        if isinstance(first, ir.Signal):
            yield s.op, first.signals
        elif touched := remote_windows(s, facts):
            yield s.op, touched[0].tensor
    elif touched := remote_windows(s, facts):
        yield "load", touched[0].tensor
