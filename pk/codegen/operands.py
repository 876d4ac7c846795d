"""Operands of ops as the macros see them: pieces of C++ text with what a macro needs to know of each."""

from __future__ import annotations

from dataclasses import dataclass

from pk.codegen.expressions import Expressions
from pk.codegen.names import Names, shared_member
from pk.codegen.plan import Plan, RolePlan
from pk.ir import nodes as ir
from pk.ir.types import Tile


@dataclass(frozen=True, slots=True)
class SharedText:
    """A shared tile: ``text`` names it as stored, ``full`` its stage's full barrier; ``transposed`` marks ``t.T``."""

    text: str
    full: str
    type: Tile
    transposed: bool

    @property
    def operand(self) -> str:
        """The tile as the op means it."""
        return f"transposed({self.text})" if self.transposed else self.text


@dataclass(frozen=True, slots=True)
class RegisterType:
    """The C++ type of a register tile: ``rows`` are those of one warpgroup."""

    element: str
    rows: int
    cols: int

    def __str__(self) -> str:
        return f"register_tile<{self.element}, {self.rows}, {self.cols}>"


@dataclass(frozen=True, slots=True)
class WindowText:
    """A window of a tensor: its map (the array of every rank's if ``everyone``), and coordinates, outermost first."""

    map: str
    everyone: bool
    coord: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CounterText:
    """One counter: the role's view of its array, and its flat index."""

    array: str
    index: str


@dataclass(frozen=True, slots=True)
class At:
    """Where an op stands: the name of its site, empty if it cannot wait."""

    site: str


@dataclass(frozen=True, slots=True)
class Held:
    """C++ variables of a stage that the role holds: the stage and its full barrier."""

    stage: str
    full: str


class Operands:
    """Renders the operands of the ops of one role."""

    def __init__(self, plan: Plan, role: RolePlan, names: Names, scalar: Expressions) -> None:
        self._plan, self._role, self._names, self._scalar = plan, role, names, scalar
        self.held: dict[str, Held] = {}  # by pipeline, outermost first

    def __call__(self, operand: ir.Operand) -> object:
        """The text of one operand, or the record of it that its macro takes apart."""
        if isinstance(operand, ir.Shared):
            held = self.held[operand.pipeline]
            return SharedText(
                f"{held.stage}.{shared_member(operand.field)}", held.full, operand.type, operand.transposed
            )
        if isinstance(operand, ir.Memory):
            raise AssertionError("a window is rendered with the tile that moves: see `window`")
        if isinstance(operand, ir.Signal):
            return self.counter(operand)
        return self._scalar(operand)

    def window(self, memory: ir.Memory, tile: Tile) -> WindowText:
        """``memory`` as the map and coordinates through which ``tile`` moves."""
        m = self._plan.map_of(memory, tile)
        name = f"p.{m.name}"
        if m.everyone and not memory.everyone:
            name += f"[{self._scalar(memory.rank if memory.rank is not None else ir.Rank())}]"
        return WindowText(name, memory.everyone, tuple(self._scalar(c) for c in memory.coord))

    def counter(self, signal: ir.Signal) -> CounterText:
        """``signal`` as the role's view of its array and the flat index in it."""
        array = self._names.local(signal.signals, "signals")
        return CounterText(array, f"{array}.index({', '.join(map(self._scalar, signal.index))})")
