"""Decide everything about a kernel that is not text: roles, warps, registers, shared memory, barriers, tensor maps,
sites.

The plan is frozen and prints as one table (``str(plan)``).  ``params`` lays out the parameter block from it and
``emit`` writes the text; neither decides anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pk.artifact import Site
from pk.codegen import budget, cluster, deferred, layout, turns
from pk.codegen.facts import Facts
from pk.codegen.sites import remote_access, remote_windows, site_names, site_of, sites_of
from pk.errors import NotConstant
from pk.ir import communicator, split
from pk.ir import nodes as ir
from pk.ir.budget import tile_bytes
from pk.ir.early import early as is_early
from pk.ir.early import scratch_of
from pk.ir.layout import Layouts, exchange_slots
from pk.ir.layout import groups as warpgroups
from pk.ir.ops import TABLE
from pk.ir.over import above
from pk.ir.rules import RESERVED_SHARED
from pk.ir.types import Tile

# TMA op -> positions of its operands: memory, shared tile.
MOVES = {"load_async": (1, 0), "store_async": (0, 1), "store_add_async": (0, 1)}


@dataclass(frozen=True, slots=True)
class TilePlan:
    """One tile of a stage; ``offset`` counts from the start of the stage.  ``by_rows``: copied row by row."""

    name: str
    tile: Tile
    offset: int
    swizzle: int
    by_rows: bool = False


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
    sharers: int = 1  # blocks of a cluster that fill each other's stages
    over: str = ""  # the pipeline whose stages these are
    above: str = ""  # the pipeline over these, which must have left a stage too before it is filled anew

    @property
    def memory(self) -> str:
        """The pipeline that its stages are named after."""
        return self.over or self.name

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
    shared_loads: tuple[ir.Do, ...] = field(default=(), repr=False)  # of a loader, made together with the other block
    teams: int = 1  # of so many warps each, which take tasks in turn
    stagger: int = 0  # warpgroups that multiply in turn
    defers: int = 0  # bulk groups under way when the signals of older ones leave; 0: a signal waits for all

    def shares(self, s: ir.Do) -> bool:
        """Whether ``s`` (the node itself) is a load that the blocks of a cluster make together."""
        return any(s is load for load in self.shared_loads)

    @property
    def name(self) -> str:
        """``loader``, or ``communicator loader`` in a communicator."""
        return self.kind if self.block_class == "compute" else f"{self.block_class} {self.kind}"

    @property
    def claims(self) -> bool:
        """Whether its tasks are those that the block claims, where the blocks of its class do."""
        return self.kind != "communicator"

    @property
    def all_warps(self) -> int:
        """Warps of all teams."""
        return self.warps * self.teams

    @property
    def threads(self) -> int:
        """Threads of the role (of one team) that take part in its barriers."""
        return 32 * self.warps


@dataclass(frozen=True, slots=True)
class ClassPlan:
    """One class of thread blocks: ``compute`` or ``communicator``."""

    name: str
    roles: tuple[RolePlan, ...]
    pipelines: tuple[PipelinePlan, ...]
    warpgroups: int  # consumer warpgroups
    tile_bytes: int
    private: tuple[TilePlan, ...] = ()  # tiles in no pipeline; ``offset`` counts from the first tile of the block
    sms: int = 0  # blocks that a communicator asks for
    dynamic: bool = False  # blocks claim their tasks
    cluster: int = 1  # blocks that take neighbouring tasks together
    exchange: int = 0  # words of a thread that warps exchange in reductions
    turns: tuple[str, ...] = ()  # pipelines that the teams of the consumer use in turn
    joins: bool = False  # a communicator whose blocks compute behind it

    @property
    def exchange_bytes(self) -> int:
        """Bytes of shared memory in which warps exchange the partial results of reductions."""
        return 4 * self.exchange * self.exchange_warps * 32

    @property
    def exchange_warps(self) -> int:
        """Warps that do: those of the one role that has several."""
        return max(r.warps for r in self.roles)

    @property
    def teams(self) -> int:
        """Teams of the consumer, which take tasks in turn."""
        return max(r.teams for r in self.roles)

    @property
    def prefix(self) -> str:
        """What the C++ names of the class begin with."""
        return "" if self.name == "compute" else f"{self.name}_"

    def role(self, kind: str) -> RolePlan:
        """The role of that kind."""
        return next(r for r in self.roles if r.kind == kind)


@dataclass(frozen=True, slots=True)
class MapPlan:
    """A tensor map of the parameter block.

    ``everyone``: an array with one map a rank, not only this rank's own; ``multicast``: one map for all ranks at once.
    """

    name: str
    tensor: str
    box: tuple[int, ...]
    swizzle: int
    everyone: bool
    multicast: bool = False


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
    in_network: bool = False  # generated for NVLink multicast
    multicast: tuple[str, ...] = ()  # tensors whose multicast address threads need; "" for the counters
    sanitize: int = 0  # PK_SANITIZE
    trace: bool = False  # notes for pk.trace
    early: bool = False  # ranks need not see each other begin: see pk.ir.early

    @property
    def alternating(self) -> frozenset[str]:
        """Scratch of which launches use two sets in turn."""
        return scratch_of(self.kernel) if self.early else frozenset()

    @property
    def local(self) -> bool:
        """Whether a launch meets no other: it has no counters and no rank but this one sees what it does.

        Nobody then waits to hear that it began or ended, and it cannot give up; see ``local_begin``.
        """
        alone = all(t.kind == "global" for t in self.kernel.tensors) and not (self.kernel.scratch or self.remote)
        bodies = [s for _, body in self.kernel.classes for s in split.statements(body)]
        checked = self.sanitize or any(isinstance(s, ir.Assert) for s in bodies)
        return alone and not (self.uses_signals or self.communicators or checked)

    @property
    def launch_warp(self) -> int:
        """The warp that opens and closes the launch: the third of the producer warpgroup, idle otherwise."""
        return self.threads // 32 - 2

    @property
    def communicator_warp(self) -> bool:
        """Whether the fourth of them is a role of the class that computes."""
        return any(r.kind == "communicator" for r in self.compute.roles)

    @property
    def poisoned_shared(self) -> int:
        """Bytes of shared memory that a sanitized block fills with NaN before it begins: the tiles of all classes."""
        return max(c.tile_bytes for c in self.classes)

    @property
    def compute(self) -> ClassPlan:
        """The class of the task loops."""
        return self.classes[0]

    @property
    def communicator(self) -> ClassPlan | None:
        """The class of the first ``with pk.communicator``, if there is one."""
        return self.classes[1] if len(self.classes) > 1 else None

    @property
    def cluster(self) -> int:
        """Blocks of a thread-block cluster."""
        return max(c.cluster for c in self.classes)

    @property
    def communicators(self) -> tuple[ClassPlan, ...]:
        """The classes of ``with pk.communicator``, whose blocks come first in the grid, in this order."""
        return self.classes[1:]

    def pipeline(self, name: str) -> PipelinePlan:
        """The pipeline called ``name``."""
        return next(p for c in self.classes for p in c.pipelines if p.name == name)

    def map_of(self, memory: ir.Memory, tile: Tile, shared: bool = False) -> MapPlan:
        """The tensor map through which ``tile`` moves from or to ``memory``; ``shared``: half of it, in a cluster."""
        box = (cluster if shared else layout).box(tile, len(memory.coord))
        key = (memory.tensor, box, layout.swizzle(tile), self.in_network and memory.everyone)
        return next(m for m in self.maps if (m.tensor, m.box, m.swizzle, m.multicast) == key)

    def site(self, role: RolePlan, op: str, what: str, span: ir.Span) -> str:
        """C++ name of a site; see :class:`pk.artifact.Site`."""
        return site_names(self.sites)[self.sites.index(site_of(role.name, op, what, span))]

    def __str__(self) -> str:
        from pk.codegen.describe import describe

        return describe(self)


def plan(kernel: ir.Kernel, multicast: bool = False, sanitize: int = 0, trace: bool = False) -> Plan:
    """Plan ``kernel``, which has passed :func:`pk.ir.check.check`; the rest as for :func:`pk.codegen.emit.generate`.

    Raises:
        NotConstant: the communicator's number of SMs is not known at compile time.
    """
    threads = 128 * (warpgroups(kernel) + 1)  # one for the producers
    classes = tuple(_class(kernel, name, body, threads) for name, body in dict(kernel.classes).items())
    shared = max(c.tile_bytes + c.exchange_bytes for c in classes)
    roles = [r for c in classes for r in c.roles]
    early = is_early(kernel) and not (multicast or sanitize)  # poisoned, or at a multicast address, there is one set
    return Plan(
        kernel=kernel,
        threads=threads,
        registers=budget.registers(kernel, threads, classes[0]),
        classes=classes,
        maps=_maps(roles, multicast),
        addressed=_addressed(roles, scratch_of(kernel) if early else frozenset()),
        dims=_dims(kernel, roles),
        shared_bytes=shared + RESERVED_SHARED,
        sites=sites_of(classes),
        outputs=_outputs(kernel, roles),
        remote=any(_touches_users_parallel(kernel, r) for r in roles),
        uses_signals=bool(split.counters_of(kernel)),
        comm_sms=sum(c.sms for c in classes),
        in_network=multicast,
        multicast=_multicast(kernel, roles) if multicast else (),
        sanitize=sanitize,
        trace=trace,
        early=early,
    )


# ---------------------------------------------------------------------------------------------- classes and roles
def _class(kernel: ir.Kernel, name: str, body: ir.Block, threads: int) -> ClassPlan:
    groups = split.warpgroups_of(body)
    roles = tuple(_role(kernel, name, kind, body, groups, threads) for kind in split.roles_of(body))
    pipelines, used = _pipelines(kernel, name, body, groups, roles)
    private = []
    for t in kernel.shared:
        if t.owner == name:
            private.append(TilePlan(t.name, t.type, used, layout.swizzle(t.type)))
            used += tile_bytes(t.type)
    communicator = dict(zip([n for n, _ in kernel.classes[1:]], kernel.communicators, strict=True)).get(name)
    sms = _comm_sms(communicator) if communicator else 0
    paired = cluster.cluster_of(body)
    exchange = max(
        exchange_slots(r.body, Layouts(r.body, r.warps)) if r.kind in ("consumer", "team") else 0 for r in roles
    )
    teams = split.teams_of(body)
    in_turn = turns.pipelines_in_turn(next(r.body for r in roles if r.kind == "consumer")) if teams > 1 else ()
    turns.few_enough(body, in_turn, exchange, teams)
    return ClassPlan(
        name, roles, pipelines, groups, used, tuple(private), sms, split.is_dynamic(body), paired, exchange, in_turn,
        communicator is not None and communicator.joins,
    )  # fmt: skip


def _role(kernel: ir.Kernel, name: str, kind: ir.RoleKind, body: ir.Block, groups: int, threads: int) -> RolePlan:
    producers = threads // 32 - 4  # the last warpgroup, in every class
    first, warps = {
        "consumer": (0, 4 * groups),
        "loader": (producers, 1),
        "storer": (producers + 1, 1),
        "communicator": (producers + 3, 1),  # behind the launch warp
        "team": (0, producers),
    }[kind]
    # A team has no role blocks, so that the slice for any role is the team's code less the names nothing reads.
    mine = split.slice_role((*kernel.prologue, *body), "loader" if kind == "team" else kind)
    if kind in ("communicator", "team"):
        mine = communicator.with_copies(kernel, mine)
    facts = Facts.of(mine, scratch_of(kernel))
    remote = any(remote_access(s, facts) for s in split.statements(mine))
    shared = cluster.shared_loads(mine) if kind == "loader" else ()
    found = (s for s in split.statements(body) if isinstance(s, ir.Role) and s.kind == "consumer")
    consumer = next(found, None) if kind == "consumer" else None
    teams, stagger = (consumer.teams, groups * consumer.stagger) if consumer else (1, 0)
    behind = deferred.behind(kernel, kind, mine)
    return RolePlan(kind, name, first, warps, mine, facts, remote, shared, teams, stagger, behind)


def _pipelines(
    kernel: ir.Kernel, name: str, body: ir.Block, groups: int, roles: tuple[RolePlan, ...]
) -> tuple[tuple[PipelinePlan, ...], int]:
    used = _stage_roles(body)
    shared = {o.pipeline for r in roles for s in r.shared_loads for o in s.operands if isinstance(o, ir.Shared)}
    at, planned = 0, list[PipelinePlan]()
    for p in kernel.pipelines:
        if p.name not in used:
            continue
        ends = used[p.name]
        tiles, size = _stage(p)
        full, empty = (4 * groups if ends[mode] == "consumer" else 1 for mode in ("fill", "drain"))  # one a warp
        sharers = cluster.BLOCKS if p.name in shared else 1
        first = next((q.offset for q in planned if q.name == p.over), at)
        sides, rings = (ends["fill"], ends["drain"], full, empty * sharers), (p.over, above(kernel, p.name))
        planned.append(PipelinePlan(p.name, p.stages, tiles, first, size, *sides, p.span, sharers, *rings))
        at += 0 if p.over else p.stages * size
    return tuple(planned), at


def _stage(p: ir.Pipeline) -> tuple[tuple[TilePlan, ...], int]:
    at, tiles = 0, []
    for name, tile in p.tiles:
        by_rows = name in p.by_rows
        tiles.append(TilePlan(name, tile, at, 0 if by_rows else layout.swizzle(tile), by_rows))
        at += tile_bytes(tile, by_rows)
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


def _comm_sms(communicator: ir.Communicator) -> int:
    if isinstance(communicator.sms, ir.Const):
        return int(communicator.sms.value)
    raise NotConstant(
        "the number of communicator SMs is not known when the kernel is compiled",
        communicator.span,
        "Pass a number or a `pk.constexpr` parameter as `sms`.",
    )


# ------------------------------------------------------------------------------------- what the host has to provide
def moves(roles: list[RolePlan]) -> Iterator[tuple[RolePlan, ir.Do, ir.Memory, ir.Shared]]:
    """Every TMA operation of ``roles``: the role, the op, its window of a tensor and its shared tile."""
    for r in roles:
        for s in split.statements(r.body):
            if isinstance(s, ir.Do) and s.op in MOVES:
                at, tile = (s.operands[i] for i in MOVES[s.op])
                assert isinstance(tile, ir.Shared)
                for window in sides(at):
                    yield r, s, window, tile


def sides(at: ir.Operand) -> list[ir.Memory]:
    """A window, or those that a condition chooses from."""
    if isinstance(at, ir.Choose):
        return sides(at.x) + sides(at.y)
    assert isinstance(at, ir.Memory)
    return [at]


def direct(roles: list[RolePlan]) -> Iterator[tuple[RolePlan, ir.Memory]]:
    """Every window that threads reach by pointer: all but those that TMA moves."""
    for r in roles:
        for s in split.statements(r.body):
            moved = sides(s.operands[MOVES[s.op][0]]) if isinstance(s, ir.Do) and s.op in MOVES else []
            for o in split.walk(split.expressions(s)):
                if isinstance(o, ir.Memory) and not any(o is m for m in moved):
                    yield r, o


def _addressed(roles: list[RolePlan], alternating: frozenset[str]) -> tuple[tuple[str, bool], ...]:
    """Tensors of ``direct`` windows, and whether every rank's copy is reached, or those of two sets are told apart."""
    found: dict[str, bool] = {}
    for r, at in direct(roles):
        found[at.tensor] = found.get(at.tensor, at.tensor in alternating) or r.facts.is_remote(at)
    return tuple(found.items())


def combined_in_network(s: ir.Statement, kernel: ir.Kernel) -> str | None:
    """The tensor whose copies ``s`` can combine in the switch; float32 can only be added there."""
    if not isinstance(s, ir.Do) or s.op not in ("reduce", "all_reduce"):
        return None
    source = s.operands[-1]
    assert isinstance(source, ir.Memory)
    return source.tensor if kernel.tensor(source.tensor).dtype.bits == 16 or s.attr("op") == "sum" else None


def _multicast(kernel: ir.Kernel, roles: list[RolePlan]) -> tuple[str, ...]:
    """What threads reach through multicast addresses: tensors, and "" for the counters."""
    done = [s for r in roles for s in split.statements(r.body) if isinstance(s, ir.Do)]
    found = dict.fromkeys(t for s in done if (t := combined_in_network(s, kernel)) is not None)
    counters = ("",) if any(s.op in ("signal_all", "barrier") for s in done) else ()
    return (*found, *counters)


def _maps(roles: list[RolePlan], multicast: bool) -> tuple[MapPlan, ...]:
    """The maps of all moves, then those of what goes to every rank at once through multicast addresses."""
    moved = list(moves(roles))
    plain = _maps_of([m for m in moved if not (multicast and m[2].everyone)])
    through = _maps_of([m for m in moved if multicast and m[2].everyone])
    return plain + tuple(
        MapPlan(m.name.replace("_maps", "_multicast_map"), m.tensor, m.box, m.swizzle, everyone=False, multicast=True)
        for m in through
    )


def _maps_of(moved: list[tuple[RolePlan, ir.Do, ir.Memory, ir.Shared]]) -> tuple[MapPlan, ...]:
    wanted: dict[tuple[str, tuple[int, ...], int], bool] = {}
    for r, s, at, tile in moved:
        box = (cluster if r.shares(s) else layout).box(tile.type, len(at.coord))
        key = (at.tensor, box, layout.swizzle(tile.type))
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
    counters = {s.name for s in kernel.signals}
    for r in roles:
        for s in split.statements(r.body):
            for e in split.walk(split.expressions(s)):
                if isinstance(e, ir.Dim) and e.tensor not in counters:  # shapes of signals are members anyway
                    found[e.tensor, e.axis] = None
    return tuple(found)


def _outputs(kernel: ir.Kernel, roles: list[RolePlan]) -> tuple[str, ...]:
    done = [s for r in roles for s in split.statements(r.body) if isinstance(s, ir.Do)]
    operands = [o for s in done for i in TABLE[s.op].writes for o in split.walk((s.operands[i],))]
    written = {o.tensor for o in operands if isinstance(o, ir.Memory)}
    return tuple(t.name for t in kernel.tensors if t.name in written)


def _touches_users_parallel(kernel: ir.Kernel, role: RolePlan) -> bool:
    users = {t.name for t in kernel.tensors if t.kind == "parallel"}
    touched = [at for s in split.statements(role.body) for at in remote_windows(s, role.facts)]
    return any(at.tensor in users for at in touched)
