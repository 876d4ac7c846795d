"""Operands of ops as the macros see them: pieces of C++ text with what a macro needs to know of each."""

from __future__ import annotations

from dataclasses import dataclass

from pk.codegen.expressions import Expressions
from pk.codegen.names import Names, shared_member
from pk.codegen.params import Params
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
    private: bool = False  # in no pipeline

    @property
    def operand(self) -> str:
        """The tile as the op means it."""
        return f"transposed({self.text})" if self.transposed else self.text


@dataclass(frozen=True, slots=True)
class RegisterType:
    """The C++ type of a register tile.

    A fragment: ``rows`` are those of one warpgroup.  Linear: all rows, ``share`` of the role's ``warps`` hold one
    together.
    """

    element: str
    rows: int
    cols: int
    warps: int = 0
    share: int = 0

    @property
    def fragment(self) -> bool:
        """Whether it is laid out as the tensor core has it."""
        return not self.warps

    @property
    def matrix(self) -> bool:
        """Whether it is a fragment that ldmatrix and stmatrix move: no vector."""
        return self.fragment and self.rows > 1 and self.cols > 1

    def __str__(self) -> str:
        if self.warps:
            return f"linear_tile<{self.element}, {self.rows}, {self.cols}, {self.warps}, {self.share}>"
        return f"register_tile<{self.element}, {self.rows}, {self.cols}>"


@dataclass(frozen=True, slots=True)
class WindowText:
    """A window of a tensor: its map (the array of every rank's if ``everyone``), and coordinates, outermost first."""

    map: str
    everyone: bool
    coord: tuple[str, ...]
    shared: bool = False  # a load that the blocks of a cluster make together
    expected: bool = False  # a load whose bytes have been announced, by the thread that makes it


@dataclass(frozen=True, slots=True)
class CounterText:
    """One counter: the role's view of its array, its flat index, and ``each`` index by itself (or an index vector)."""

    array: str
    index: str
    each: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class At:
    """Where an op stands: the name of its site, empty if it cannot wait.

    ``in_network``: in a kernel that uses multicast addresses; ``headers``: the one of the ranks' counters.
    """

    site: str
    in_network: bool = False
    headers: str = ""
    lanes: int = 0  # elements of the index vectors among the operands
    deferred: bool = False  # in a role whose signals wait in a queue


@dataclass(frozen=True, slots=True)
class Held:
    """C++ variables of a stage that the role holds: the stage and its full barrier."""

    stage: str
    full: str


class Operands:
    """Renders the operands of the ops of one role."""

    def __init__(self, plan: Plan, role: RolePlan, params: Params, names: Names, scalar: Expressions) -> None:
        self._plan, self._role, self._params, self._names, self._scalar = plan, role, params, names, scalar
        self.held: dict[str, Held] = {}  # by pipeline, outermost first

    def __call__(self, operand: ir.Operand) -> object:
        """The text of one operand, or the record of it that its macro takes apart."""
        if isinstance(operand, ir.Shared):
            if operand.private:
                text = f"shared.{shared_member(operand.field)}"
                return SharedText(text, "", operand.type, operand.transposed, private=True)
            held = self.held[operand.pipeline]
            return SharedText(
                f"{held.stage}.{shared_member(operand.field)}", held.full, operand.type, operand.transposed
            )
        if isinstance(operand, ir.Memory):
            raise AssertionError("a window is rendered with the tile that moves: see `window`")
        if isinstance(operand, ir.Signal):
            return self.counter(operand)
        return self._scalar(operand)

    def window(self, memory: ir.Memory | ir.Choose, tile: Tile, shared: bool = False) -> WindowText:
        """``memory`` as the map and coordinates through which ``tile`` moves."""
        if isinstance(memory, ir.Choose):
            x, y = (self.window(side, tile, shared) for side in (memory.x, memory.y))
            cond = self._scalar(memory.cond, 3)
            coord = (a if a == b else f"{cond} ? {a} : {b}" for a, b in zip(x.coord, y.coord, strict=True))
            return WindowText(f"({cond} ? {x.map} : {y.map})", False, tuple(coord), shared)
        m = self._plan.map_of(memory, tile, shared)
        name = f"p.{self._params.map(m)}"
        if m.everyone and not memory.everyone:
            name += f"[{self._scalar(memory.rank if memory.rank is not None else ir.Rank())}]"
        each = memory.everyone and not m.multicast
        return WindowText(name, each, tuple(self._scalar(c) for c in memory.coord), shared)

    def counter(self, signal: ir.Signal) -> CounterText:
        """``signal`` as the role's view of its array and the flat index in it."""
        array = self._names.local(signal.signals, "signals")
        each = tuple(map(self._scalar, signal.index))
        return CounterText(array, f"{array}.index({', '.join(each)})", each)
