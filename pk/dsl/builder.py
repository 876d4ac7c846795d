"""The kernel under construction: declarations, the block being written, and where in the kernel the reader stands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from pk import errors
from pk.dsl.captures import Captures
from pk.dsl.values import PipelineValue, ScratchValue, SharedValue, SignalsValue
from pk.ir import index, rules, vectors
from pk.ir import nodes as ir
from pk.ir.communicator import has_roles
from pk.ir.split import walk

COMMUNICATOR_WARP = "communicator warp"  # the place of ``with pk.communicator():``


class Builder:
    """Collects IR.

    ``where``: the class of blocks (``ir.Kernel.classes``; ``prologue`` until its first statement that is no
    assignment).  ``owner``: the region whose variables may be assigned in place: the class, or one role
    block.  ``depth``: kept loops and branches around.
    """

    def __init__(self, captures: Captures | None = None) -> None:
        self.captures = Captures() if captures is None else captures
        self.tensors: list[ir.Tensor] = []
        self.scalars: list[ir.Param] = []
        self.signals: list[ir.Signals] = []
        self.scratch: list[ir.Scratch] = []
        self.pipelines: list[PipelineValue] = []
        self.private: list[SharedValue] = []  # shared tiles in no pipeline, once an operation uses them
        self.prologue: list[ir.Statement] = []
        self.compute: list[ir.Statement] = []
        self.communicators: list[ir.Communicator] = []
        self.communicator: ir.Span | None = None  # of the communicator warp
        self.definitions: dict[str, ir.Expr] = {}  # prologue variables in terms of dims, rank, world, parameters
        self.used: set[str] = set()
        self.block: list[ir.Statement] = self.prologue
        self.where = "prologue"
        self.owner: str = "prologue"
        self.role: ir.Role | None = None
        self.depth = 0
        self.tasks = False
        self.held: dict[str, Literal["fill", "drain"]] = {}
        self.doubtful: list[tuple[str, ir.Span]] = []  # ops outside roles that only a team may do
        self.roles_seen: ir.Span | None = None
        self._loop_names: dict[tuple[str, str], list[str]] = {}
        self._live_loops: set[str] = set()
        self._blocks = 0

    # ---------------------------------------------------------------------------------------------- names
    def unique(self, base: str) -> str:
        """``base``, or ``base_1``, ... if it is taken."""
        name, n = base, 0
        while name in self.used:
            n += 1
            name = f"{base}_{n}"
        self.used.add(name)
        return name

    @contextmanager
    def loop_name(self, base: str) -> Iterator[str]:
        """A name for a loop variable, used again by later loops of the same role."""
        pool = self._loop_names.setdefault((base, f"{self.where} {self.role.kind if self.role else ''}"), [])
        name = next((n for n in pool if n not in self._live_loops), None)
        if name is None:
            name = self.unique(base)
            pool.append(name)
        self._live_loops.add(name)
        try:
            yield name
        finally:
            self._live_loops.discard(name)

    # ------------------------------------------------------------------------------------------- emitting
    def emit(self, s: ir.Statement) -> None:
        """Append to the block being written."""
        if self.where == "prologue" and not (isinstance(s, ir.Assign) and _for_the_host(s.value)):
            self.begin()
        self.block.append(s)
        if self.where == "prologue" and isinstance(s, ir.Assign):
            self.definitions[s.var.name] = index.substitute(s.value, self.definitions)

    def begin(self) -> None:
        """End the prologue: what follows belongs to the compute class."""
        if self.where == "prologue":
            self.where = self.owner = "compute"
            self.block = self.compute

    @contextmanager
    def nested(self, *, kept: bool = True) -> Iterator[list[ir.Statement]]:
        """A block inside the current one; ``kept``: a run-time loop or branch."""
        outer, self.block = self.block, []
        self.depth += kept
        try:
            yield self.block
        finally:
            self.block = outer
            self.depth -= kept

    @contextmanager
    def in_role(self, role: ir.Role) -> Iterator[list[ir.Statement]]:
        """A role block; its variables are its own."""
        owner, self._blocks = self.owner, self._blocks + 1
        self.role, self.owner = role, f"{role.kind} {self._blocks}"
        self.roles_seen = self.roles_seen or role.span
        try:
            with self.nested() as block:
                yield block
        finally:
            self.role, self.owner = None, owner

    @contextmanager
    def in_communicator(self) -> Iterator[list[ir.Statement]]:
        """The body of the communicator class."""
        saved = self.where, self.owner, self.doubtful, self.roles_seen
        self.where = self.owner = ir.communicator_name(len(self.communicators))
        self.doubtful, self.roles_seen = [], None
        try:
            with self.nested(kept=False) as block:
                yield block
                self.settle()
        finally:
            self.where, self.owner, self.doubtful, self.roles_seen = saved

    @contextmanager
    def in_communicator_warp(self, span: ir.Span) -> Iterator[list[ir.Statement]]:
        """The body of the communicator warp; its variables are its own, and so are its task loops."""
        saved = self.where, self.owner, self.doubtful
        self.where = self.owner = COMMUNICATOR_WARP
        self.doubtful, self.communicator = [], span  # all that a team may do
        try:
            with self.nested(kept=False) as block:
                yield block
        finally:
            self.where, self.owner, self.doubtful = saved

    @property
    def in_warp(self) -> bool:
        """Whether the reader stands in the communicator warp."""
        return self.where == COMMUNICATOR_WARP

    @contextmanager
    def in_stage(self, pipeline: str, mode: Literal["fill", "drain"]) -> Iterator[list[ir.Statement]]:
        """The body of a fill or drain."""
        self.held[pipeline] = mode
        try:
            with self.nested(kept=False) as block:
                yield block
        finally:
            del self.held[pipeline]

    # ---------------------------------------------------------------------------------------------- places
    @property
    def place(self) -> str:
        """The role here, or ``shared``."""
        return self.role.kind if self.role else "communicator" if self.in_warp else "shared"

    def require(self, op: str, span: ir.Span) -> None:
        """Check that ``op`` may stand here.  Outside roles the answer may have to wait for the end of the class."""
        from pk.ir.ops import TABLE

        if self.place == "shared" and "shared" not in TABLE[op].roles and "team" in TABLE[op].roles:
            self.doubtful.append((op, span))
            return
        rules.place(op, self.place, span)

    def settle(self) -> None:
        """At the end of a class: what was allowed only to a team."""
        if self.roles_seen is not None:
            for op, span in self.doubtful:
                rules.place(op, "shared", span)

    def require_top(self, what: str, span: ir.Span) -> None:
        """Declarations stand outside loops, branches and roles."""
        if self.depth or self.role is not None or self.held:
            raise errors.WrongDeclaration(
                f"{what} inside a {'role' if self.role else 'loop or branch'}",
                span,
                "Declare it at the top of the kernel.",
            )

    def closed(self, e: ir.Expr, what: str, span: ir.Span) -> ir.Expr:
        """``e`` in terms of what the host knows.  Raises NotConstant if it depends on anything else."""
        closed = index.substitute(e, self.definitions)
        found = [e for e in walk((closed,)) if isinstance(e, ir.Var | ir.Rank)]
        if found:
            which = (
                f"`{found[0].name}`, which is computed in the kernel" if isinstance(found[0], ir.Var) else "pk.rank()"
            )
            raise errors.NotConstant(
                f"{what} depends on {which}",
                span,
                "Use tensor dims, pk.world_size(), parameters and constants.",
            )
        return closed

    # --------------------------------------------------------------------------------------------- declaring
    def declare(self, value: SignalsValue | ScratchValue | PipelineValue, base: str) -> None:
        """Give a declaration its name."""
        value.name = self.unique(base)
        if isinstance(value, SignalsValue):
            self.signals.append(ir.Signals(value.name, value.shape, value.span))
        elif isinstance(value, ScratchValue):
            assert value.dtype is not None
            self.scratch.append(ir.Scratch(value.name, value.shape, value.dtype, value.span))
        else:
            self.pipelines.append(value)

    def use_private(self, value: SharedValue, span: ir.Span) -> ir.Shared:
        """A shared tile outside a pipeline, as an operand.  Its first use makes it a tile of the consumer here."""
        assert value.tile is not None
        if self.role is None or self.role.kind != "consumer":
            here = "outside role blocks" if self.place == "shared" else f"in a {self.place}"
            raise errors.WrongRole(
                f"the shared tile `{value.name}` is used {here}",
                span,
                "A shared tile outside a pipeline is private to the consumer; put it in a pipeline to pass it on.",
            )
        if value.owner not in (None, self.where):
            raise errors.PipelineMisused(
                f"`{value.name}` is used by the {value.owner} class and by the {self.where} class",
                span,
                "Shared memory belongs to one class of blocks: declare a second tile.",
            )
        if value.owner is None:
            value.owner, value.name = self.where, self.unique(value.name or "tile")
            self.private.append(value)
        return ir.Shared("", value.name, value.tile, False, span)

    def finish(self, name: str, constants: tuple[tuple[str, object], ...], span: ir.Span) -> ir.Kernel:
        """The kernel.  Pipelines that nothing uses are left out: they would only take shared memory."""
        self.settle()
        if self.communicator is not None:
            has_roles(tuple(self.compute), self.communicator)
        pipelines = tuple(
            ir.Pipeline(p.name, p.stages, p.tiles, p.owner, p.span, over=p.over.name if p.over else "")
            for p in self.pipelines
            if p.owner is not None
        )
        made = ir.Kernel(
            name, tuple(self.tensors), tuple(self.scalars), tuple(self.signals), tuple(self.scratch), pipelines,
            tuple(self.prologue), tuple(self.compute), tuple(self.communicators), constants, span,
            tuple(ir.SharedTile(t.name, t.tile, t.owner, t.span) for t in self.private if t.tile and t.owner),
        )  # fmt: skip
        return vectors.by_rows(made)


def _for_the_host(e: ir.Expr) -> bool:
    """Whether the host can evaluate ``e`` as well: it reads no memory and calls no operation."""
    return not any(isinstance(o, ir.Call) for o in walk((e,)))
