"""From IR to integers: the synchronisation of a kernel as a ``System`` of programs over counters.

For concrete extents, ranks and SMs, every role of every block becomes an actor whose steps are its waits, each with all
that the role does up to the next one (as ``sim.machine`` runs it); every load, store, landing and signal becomes
an actor of its own, which may take effect at any time from its issue on.  No data is held: values that come out of
tensors are unknown, and a kernel whose synchronisation depends on one is refused.

``requires`` of the steps say what the compiler's waits guarantee: a stage is entered only when the other side has
published or freed it, a signal arrives only after the stores that it releases.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pk.ir import nodes as ir
from pk.ir.split import is_dynamic, roles_of, slice_role, statements
from pk.sim.run import _blocks as blocks_of_classes
from pk.sim.skeleton_parts import Draft, Note, NotExplorable, Place, Shapes, Skeleton
from pk.sim.skeleton_role import RoleWalk
from pk.sim.system import Guard

__all__ = ["NotExplorable", "Skeleton", "Ways", "dynamic_classes", "skeleton", "ways_to_claim"]

Assignment = Mapping[tuple[int, str], Sequence[int]]  # (rank, class) -> which of its blocks claims task 0, 1, ...


def skeleton(
    kernel: ir.Kernel,
    shapes: Sequence[Shapes],
    sms: int,
    scalars: Sequence[Mapping[str, int | float]] | None = None,
    assignment: Assignment | None = None,
) -> Skeleton:
    """The synchronisation of one launch of ``kernel``; ``shapes[r]`` are the shapes of rank r's tensors.

    ``assignment``: which block claims which task, for classes that claim (``ways_to_claim`` lists them).

    Raises :class:`NotExplorable`, and :class:`pk.errors.SimulationError` for what a kernel must not do (a rank or
    counter that does not exist, a failed assert).
    """
    scalars = [{}] * len(shapes) if scalars is None else scalars
    if kernel.joins:
        raise NotExplorable(
            "blocks that take tasks when their communicator has ended",
            kernel.communicators[0].span,
            "this communicator",
            "Explore the kernel without joins=True, and simulate it with many schedules.",
        )
    shared = next((p for p in kernel.pipelines if p.over), None)
    if shared is not None:
        raise NotExplorable(
            f"the stages of `{shared.over}`, which `{shared.name}` is over",
            shared.span,
            "this pipeline",
            "Explore the kernel with stages of its own for each, and simulate it with many schedules.",
        )
    made = Skeleton(kernel, shapes, scalars)
    blocks_of = blocks_of_classes(kernel, sms, made.values[0])
    for rank in range(made.world):
        _begin(made, rank)
    for owner, body in (*kernel.classes[1:], kernel.classes[0]):
        kinds = roles_of(body)
        for rank in range(made.world):
            for index, block in enumerate(blocks_of[owner]):
                place = Place(rank, owner, block, index, len(blocks_of[owner]))
                claimed = _claimed(assignment, place) if is_dynamic(body) else None
                for kind in kinds:
                    walk = RoleWalk(made, place, kind, claims=kind == kinds[0], claimed=claimed)
                    walk.run(slice_role(kernel.prologue + body, kind))
    made.finish()
    return made


def _claimed(assignment: Assignment | None, place: Place) -> list[int]:
    """The numbers of the tasks that a block claims."""
    owners = (assignment or {}).get((place.rank, place.owner), ())
    return [task for task, owner in enumerate(owners) if owner == place.index]


def _begin(made: Skeleton, rank: int) -> None:
    """A rank's stream reaches the launch some time; then its entry word travels to every rank."""
    note = Note(rank, 0, "stream", "begin", "begins the launch", made.kernel.span)
    begin = made.operation(f"rank {rank}", [Draft("begins the launch", note, adds={("begun", rank): 1})])
    if made.world > 1:
        for peer in range(made.world):
            text = f"the entry word arrives at rank {peer}"
            draft = Draft(text, note, [Guard(-1 - begin.index, 1)], {("entries", peer): 1})
            made.operation(f"entry word of rank {rank} for rank {peer}", [draft])


# ------------------------------------------------------------------------------------------------ dynamic tasks
def dynamic_classes(kernel: ir.Kernel) -> list[str]:
    """The classes of blocks that claim their tasks."""
    return [owner for owner, body in kernel.classes if is_dynamic(body)]


@dataclass(frozen=True, slots=True)
class Ways:
    """The ways in which blocks can claim tasks: all of them, or ``limit`` of ``total``."""

    assignments: tuple[Assignment, ...]
    total: int

    @property
    def complete(self) -> bool:
        """Whether these are all."""
        return len(self.assignments) == self.total


def ways_to_claim(
    kernel: ir.Kernel,
    shapes: Sequence[Shapes],
    sms: int,
    scalars: Sequence[Mapping[str, int | float]] | None = None,
    limit: int = 4096,
) -> Ways:
    """Every way in which the blocks can claim the tasks, up to the numbering of blocks that are alike.

    One empty way for a kernel whose tasks are dealt.  If there are more than ``limit``: in turn, and random ones.
    """
    scalars = [{}] * len(shapes) if scalars is None else scalars
    bodies = dict(kernel.classes)
    deals: dict[tuple[int, str], tuple[int, int, bool]] = {}  # tasks, blocks, whether the blocks are alike
    for owner in dynamic_classes(kernel):
        kind = roles_of(bodies[owner])[0]
        alike = all(s.dynamic for s in statements(bodies[owner]) if isinstance(s, ir.Tasks))
        for rank in range(len(shapes)):
            made = Skeleton(kernel, shapes, scalars)
            blocks = blocks_of_classes(kernel, sms, made.values[0])[owner]
            walk = RoleWalk(made, Place(rank, owner, blocks[0], 0, 1), kind, claims=True, claimed=None, counting=True)
            walk.run(slice_role(kernel.prologue + bodies[owner], kind))
            deals[rank, owner] = walk.tasks_done, len(blocks), alike
    total = math.prod(_count(*deal) for deal in deals.values())
    if total <= limit:
        every = itertools.product(*(list(_dealt(*deal)) for deal in deals.values()))
        return Ways(tuple(dict(zip(deals, choice, strict=True)) for choice in every), total)
    rng = random.Random(0)
    found: list[Assignment] = [{key: [t % blocks for t in range(tasks)] for key, (tasks, blocks, _) in deals.items()}]
    while len(found) < limit:
        found.append({key: rng.choices(range(blocks), k=tasks) for key, (tasks, blocks, _) in deals.items()})
    return Ways(tuple(found), total)


def _count(tasks: int, blocks: int, alike: bool) -> int:
    """How many ways ``_dealt`` has."""
    if not alike:
        return int(blocks**tasks)
    ways = {0: 1}  # by the number of blocks that have come so far
    for _ in range(tasks):
        after = dict.fromkeys(range(blocks + 1), 0)
        for used, many in ways.items():
            after[used] += many * used
            if used < blocks:
                after[used + 1] += many
        ways = after
    return sum(ways.values())


def _dealt(tasks: int, blocks: int, alike: bool) -> Iterator[tuple[int, ...]]:
    """Every function from tasks to blocks; of those that differ in the names of alike blocks only one."""

    def extend(dealt: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(dealt) == tasks:
            yield dealt
            return
        choices = min(max(dealt, default=-1) + 2, blocks) if alike else blocks
        for block in range(choices):
            yield from extend((*dealt, block))

    return extend(())
