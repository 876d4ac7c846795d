"""What roles act on: sites of the program, counters, the stages of pipelines, windows of tensors."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pk.ir import nodes as ir
from pk.ir.types import Tile, Type
from pk.sim.memory import Buffer
from pk.sim.schedule import Schedule
from pk.sim.values import POISON, poisoned

if TYPE_CHECKING:
    from pk.sim.machine import Launch, Role


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A statement or op of the kernel, as the running program refers to it."""

    op: str
    what: str  # the signals array or pipeline that it waits for
    span: ir.Span
    type: Type | None = None
    attrs: tuple[tuple[str, Any], ...] = ()

    def attr(self, name: str) -> Any:
        """A compile-time attribute of the op."""
        return dict(self.attrs)[name]

    @property
    def tile(self) -> Tile:
        """The type of the op's result."""
        assert isinstance(self.type, Tile)
        return self.type


class Counter:
    """A number that grows, and the roles that wait until it is large enough."""

    __slots__ = ("index", "name", "schedule", "value", "waiters")

    def __init__(self, schedule: Schedule, name: str, index: tuple[int, ...] = ()) -> None:
        self.schedule, self.name, self.index = schedule, name, index
        self.value = 0
        self.waiters: list[tuple[int, Role]] = []

    def add(self, value: int) -> None:
        """Add, and let those go on who have what they need."""
        self.value += value
        if self.waiters:
            still = []
            for needed, role in self.waiters:
                if self.value >= needed:
                    role.blocked = None
                    self.schedule.add(role)
                else:
                    still.append((needed, role))
            self.waiters = still


Wait = tuple[Counter, int, Site]
Program = Generator[Wait, None, None]


# ------------------------------------------------------------------------------------------------ pipelines
class SharedTile:
    """A tile of a stage, or its transposed view."""

    __slots__ = ("T", "buffer", "stage")

    def __init__(self, stage: Stage, buffer: Buffer, mirror: SharedTile | None = None) -> None:
        self.stage, self.buffer = stage, buffer
        if mirror is None:
            turned = Buffer(buffer.name, buffer.rank, buffer.block, buffer.array.T, buffer.dtype)
            mirror = SharedTile(stage, turned, self)
        self.T = mirror


class Stage:
    """One stage of a pipeline: its tiles, and how often it was published (``full``) and freed (``empty``)."""

    __slots__ = ("_leaving", "_pending", "at", "empty", "full", "launch", "pipeline", "tiles")

    def __init__(
        self, launch: Launch, pipeline: ir.Pipeline, at: int, rank: int, block: int, base: Stage | None = None
    ) -> None:
        self.launch, self.pipeline, self.at = launch, pipeline.name, at
        self.full = Counter(launch.schedule, pipeline.name, (at,))
        self.empty = Counter(launch.schedule, pipeline.name, (at,))
        self.tiles: dict[str, SharedTile] = {}
        for field, tile in pipeline.tiles:
            if base is not None:  # the same memory
                self.tiles[field] = SharedTile(self, base.tiles[field].buffer)
                continue
            array = poisoned(tile.shape, tile.dtype)
            name = f"{pipeline.name}[{at}].{field}"
            self.tiles[field] = SharedTile(self, Buffer(name, rank, block, array, tile.dtype))
        self._pending = 0
        self._leaving: Counter | None = None

    def enter_fill(self) -> None:
        """The filling role has the stage: what the use before left in it counts as unwritten."""
        for tile in self.tiles.values():
            tile.buffer.array[...] = POISON[tile.buffer.dtype]

    def leave(self, role: Role, counter: Counter) -> None:
        """``role`` has left: count on ``counter`` when its asynchronous operations on the stage are done."""
        if self.launch.checker is not None:
            self.launch.checker.stage_left(role, self)
        if self._pending:
            self._leaving = counter
        else:
            self.launch.add(counter, 1, self)

    def begin(self) -> None:
        """An asynchronous operation will read or write the stage."""
        self._pending += 1

    def done(self) -> None:
        """It has."""
        self._pending -= 1
        if not self._pending and self._leaving is not None:
            counter, self._leaving = self._leaving, None
            self.launch.add(counter, 1, self)


def private_tile(launch: Launch, declared: ir.SharedTile, rank: int, block: int) -> SharedTile:
    """A tile of the consumer of one block: in a stage of its own, which nobody fills or drains."""
    stage = Stage(launch, ir.Pipeline(declared.name, 1, ((declared.name, declared.type),)), 0, rank, block)
    return stage.tiles[declared.name]


class Ring:
    """A pipeline of one block.  Each role counts its own fills and drains.  ``over``: in the stages of another."""

    __slots__ = ("over", "stages")

    def __init__(self, launch: Launch, pipeline: ir.Pipeline, rank: int, block: int, base: Ring | None = None) -> None:
        self.over = base is not None
        self.stages: list[Stage] = [
            Stage(launch, pipeline, i, rank, block, base.stages[i] if base else None) for i in range(pipeline.stages)
        ]


# ------------------------------------------------------------------------------------------------- operands
class Window:
    """Where an op touches memory: element ``coord`` of ``tensor`` on each of ``ranks``."""

    __slots__ = ("coord", "ranks", "tensor")

    def __init__(self, tensor: str, coord: tuple[int, ...], ranks: tuple[int, ...]) -> None:
        self.tensor, self.coord, self.ranks = tensor, coord, ranks


@dataclass(frozen=True, slots=True)
class CounterRef:
    """One counter of a signals array, on whatever rank the op says."""

    signals: str
    index: tuple[int, ...]
