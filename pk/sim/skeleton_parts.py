"""What a kernel's skeleton (``sim.skeleton``) is built of: steps, the names of their counters, where they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pk import errors
from pk.ir import nodes as ir
from pk.ir.early import early
from pk.ir.index import evaluate
from pk.ir.types import Scalar
from pk.sim.memory import Kind
from pk.sim.system import Actor, Guard, System

Key = tuple[object, ...]  # of a counter
Shapes = Mapping[str, tuple[int, ...]]
Window = tuple[tuple[int, int], ...]  # first and last + 1 element of every dimension

MAX_STEPS = 200_000
NEVER = 1  # needed of a counter to which nobody adds


class NotExplorable(errors.PkError):
    """A kernel that cannot be explored: its synchronisation depends on loaded values, or it is too large."""

    def __init__(self, what: str, span: ir.Span, where: str, advice: str) -> None:
        super().__init__(f"{what}\n{errors.frame(span)}\n  in {where}\n  {advice}")


@dataclass(frozen=True, slots=True)
class Note:
    """Where a step comes from.  ``kind``: a role, or ``load``, ``store``, ``land``, ``signal``, ``begin``."""

    rank: int
    block: int
    role: str
    kind: str
    what: str
    span: ir.Span
    task: tuple[tuple[str, int], ...] = ()
    stage: str = ""


@dataclass(slots=True)
class Draft:
    """A step whose guards name counters that may not exist yet.  ``needed`` None: as much as the use of a stage has."""

    text: str
    note: Note
    guards: list[tuple[Key, int | None] | Guard] = field(default_factory=list)
    adds: dict[Key, int] = field(default_factory=dict)
    requires: list[tuple[Key, int | None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Place:
    """A block of a class on a rank, and what its roles need to know about the launch."""

    rank: int
    owner: str
    block: int
    index: int  # number of the block in its class
    of: int


@dataclass(frozen=True, slots=True)
class Touch:
    """Step ``step`` of an actor reads, writes or adds to a window of a rank's tensor (None: somewhere in it)."""

    actor: int
    step: int
    kind: Kind
    rank: int
    tensor: str
    window: Window | None
    span: ir.Span | None = None  # where, if not at the place of the step (which may begin with a wait)


class Skeleton:
    """The system of one launch, while it is built."""

    def __init__(
        self, kernel: ir.Kernel, shapes: Sequence[Shapes], scalars: Sequence[Mapping[str, int | float]]
    ) -> None:
        self.kernel, self.shapes, self.scalars, self.world = kernel, shapes, scalars, len(shapes)
        self.system = System()
        self.parts: dict[Key, int] = {}  # of each use of a stage: what counts on its counter in all
        self.values = [self._known(rank) for rank in range(self.world)]
        first = self.values[0]
        self.signals = {s.name: tuple(int(evaluate(e, first)) for e in s.shape) for s in kernel.signals}
        scratch = {s.name: tuple(int(evaluate(e, first)) for e in s.shape) for s in kernel.scratch}
        self.dims = [{**mine, **scratch} for mine in shapes]
        self.work_space, self.early = frozenset(scratch), early(kernel)
        self.touches: list[Touch] = []
        self._drafts: list[tuple[Actor, Draft]] = []
        self._lengths: dict[int, int] = {}
        self._numbers: dict[Key, int] = {}
        self._names: dict[str, int] = {}

    def _known(self, rank: int) -> dict[str, int | float]:
        """What ``ir.index.evaluate`` needs to know on a rank."""
        values: dict[str, int | float] = {"rank": rank, "world": self.world, **self.scalars[rank]}
        for name, shape in self.shapes[rank].items():
            values.update({f"{name}.{axis}": extent for axis, extent in enumerate(shape)})
        for s in self.kernel.prologue:
            if isinstance(s, ir.Assign) and isinstance(s.var.type, Scalar):
                values[s.var.name] = evaluate(s.value, values)
        return values

    def actor(self, name: str) -> Actor:
        """A new actor; equal names are told apart."""
        self._names[name] = count = self._names.get(name, 0) + 1
        return self.system.actor(name if count == 1 else f"{name} #{count}")

    def step(self, actor: Actor, draft: Draft) -> None:
        """Append a step."""
        if len(self._drafts) >= MAX_STEPS:
            where = f"rank {draft.note.rank}, block {draft.note.block}, {draft.note.role}"
            raise NotExplorable(
                f"kernel `{self.kernel.name}` synchronises more than {MAX_STEPS:,} times at these extents",
                draft.note.span, where, "Explore smaller tensors, fewer ranks or fewer SMs.",
            )  # fmt: skip
        self._drafts.append((actor, draft))
        self._lengths[actor.index] = self.length(actor) + 1

    def length(self, actor: Actor) -> int:
        """How many steps an actor has so far."""
        return self._lengths.get(actor.index, 0)

    def touch(
        self, actor: Actor, step: int, kind: Kind, rank: int, tensor: str, window: Window | None,
        span: ir.Span | None = None,
    ) -> None:  # fmt: skip
        """Note that a step accesses memory; ``window`` None: nobody knows where."""
        self.touches.append(Touch(actor.index, step, kind, rank, tensor, window, span))

    def operation(self, name: str, drafts: list[Draft]) -> Actor:
        """A new actor with these steps."""
        actor = self.actor(name)
        for draft in drafts:
            self.step(actor, draft)
        return actor

    def finish(self) -> System:
        """Resolve the counters' names."""
        for actor, d in self._drafts:
            guards = [g if isinstance(g, Guard) else self._guard(g) for g in d.guards]
            adds = {self._number(key): value for key, value in d.adds.items() if value}
            requires = tuple(map(self._guard, d.requires))
            actor.step(d.text, *guards, adds=adds, requires=requires, note=d.note)
        return self.system

    def _guard(self, wanted: tuple[Key, int | None]) -> Guard:
        key, needed = wanted
        return Guard(self._number(key), self.parts.get(key, NEVER) if needed is None else needed)

    def _number(self, key: Key) -> int:
        if key not in self._numbers:
            self._numbers[key] = self.system.counter(name_of(key))
        return self._numbers[key]


def name_of(key: Key) -> str:
    """What messages call a counter."""
    kind, *rest = key
    if kind == "signal":
        rank, signals, *index = rest
        return f"{signals}{_index(tuple(index))} of rank {rank}"
    if kind in ("full", "empty"):
        rank, block, pipeline, stage, use = rest
        assert isinstance(use, int)
        done = "filled" if kind == "full" else "drained"
        return f"use {use + 1} of stage {stage} of {pipeline} (rank {rank}, block {block}), {done}"
    return {
        "begun": "launch begun on rank {0}",
        "entries": "entry words at rank {0}",
        "work": "tasks of {0} claimed on rank {1}",
        "published": "claims of rank {0}, block {1}", "landed": "stores landed, {3} {4} of rank {0}, block {1}, {2}",
    }[str(kind)].format(*rest)  # fmt: skip


def _index(index: tuple[object, ...]) -> str:
    return f"[{', '.join(map(str, index))}]" if index else ""
