"""From IR to Python: each role of a class becomes one generator function.

Interpreting nodes one by one would cost more than the NumPy work they do.  So a role's slice is written out as Python
text, one statement a line, with the ops of ``sim.ops`` called by name, and compiled once for all ranks and blocks.  The
text (``RoleProgram.text``) can be read; every line knows the span of the statement it came from.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pk.ir import nodes as ir
from pk.ir import ops as table
from pk.ir import vectors
from pk.ir.layout import Layout, Layouts, role_warps
from pk.ir.order import coordinate
from pk.ir.split import slice_role
from pk.ir.types import INT, Scalar, Tile
from pk.sim import bounds, ops, ops_vectors
from pk.sim.claims import next_task
from pk.sim.divisions import LOADS, Divisions
from pk.sim.loops import endless, turns, while_turns
from pk.sim.machine import Program, Role, Site
from pk.sim.values import single

WAITING = frozenset(name for name, meaning in ops.MEANING.items() if inspect.isgeneratorfunction(meaning))
"""Ops whose meaning is a generator."""


@dataclass(frozen=True, slots=True, eq=False)
class RoleProgram:
    """A role as Python: ``start(role)`` makes the generator that the machine steps."""

    kind: ir.RoleKind
    text: str
    file: str
    spans: tuple[ir.Span, ...]
    start: Callable[[Role], Program]

    def span(self, line: int) -> ir.Span:
        """The user's source behind a 1-based line of ``text``."""
        return self.spans[line - 1]


def translate(kernel: ir.Kernel, block: ir.Block, kind: ir.RoleKind) -> RoleProgram:
    """Role ``kind`` of a class, whose body (without the prologue) is ``block``."""
    writer = _Writer(Layouts(slice_role(block, kind), role_warps(kernel, block, kind)))
    writer.above = {p.over: p.name for p in kernel.pipelines if p.over}
    writer.function(slice_role(kernel.prologue + block, kind))
    text = "\n".join(writer.lines) + "\n"
    file = f"<pk simulator: {kernel.name}, {kind} {id(writer):x}>"
    exec(compile(text, file, "exec"), writer.names)
    return RoleProgram(kind, text, file, tuple(writer.spans), writer.names["role_program"])


class _Writer:
    """Writes one function.  ``names`` is its module: ops, sites and helpers."""

    def __init__(self, layouts: Layouts) -> None:
        self._layouts = layouts
        self._layout: Layout | None = None  # of the statement being written
        self.lines: list[str] = []
        self.spans: list[ir.Span] = []
        self.names: dict[str, Any] = {
            "binary": ops.binary,
            "unary": ops.unary,
            "Lanes": ops_vectors.Lanes,
            "Counters": ops_vectors.Counters,
            "single": single,
            "coordinate": coordinate,
            "next_task": next_task,
            "turns": turns,
            "while_turns": while_turns,
            "endless": endless,
            "prod": math.prod,
            "check_bounds": bounds.check,
            "fits": bounds.fits,
            "inf": math.inf,
            "nan": math.nan,
            **{f"op_{name}": meaning for name, meaning in ops.MEANING.items()},
        }
        self.by_lane: set[str] = set()  # sites of ops that take a counter or window a lane
        self._sites = 0
        self._divisions: Divisions | None = None
        self._depth = 0
        self._span = ir.NOWHERE
        self._variables: dict[str, str] = {}
        self._pipelines: dict[str, str] = {}
        self.above: dict[str, str] = {}  # pipelines over others, by these

    # ---------------------------------------------------------------------------------------------- text
    def line(self, text: str) -> None:
        self.lines.append("    " * self._depth + text)
        self.spans.append(self._span)

    @contextmanager
    def indented(self, head: str) -> Iterator[None]:
        self.line(head)
        self._depth += 1
        before = len(self.lines)
        yield
        if len(self.lines) == before:
            self.line("pass")
        self._depth -= 1

    def site(self, op: str, what: str, span: ir.Span, kind: Any = None, attrs: tuple[tuple[str, Any], ...] = ()) -> str:
        name = f"site{self._sites}"
        self._sites += 1
        self.names[name] = Site(op, what, span, kind, attrs)
        if op in ops_vectors.BY_LANE:
            self.by_lane.add(name)
        return name

    def variable(self, name: str) -> str:
        """A Python name for ``name``: its own, made safe, and numbered so that no two collide."""
        return _numbered(self._variables, "v", name)

    def pipeline(self, name: str) -> str:
        """The same for pipelines."""
        return _numbered(self._pipelines, "p", name)

    # ---------------------------------------------------------------------------------------- statements
    def function(self, block: ir.Block) -> None:
        with self.indented("def role_program(role):"):
            self.line("me, world, dims, scalars = role.rank, role.world, role.dims, role.scalars")
            self.line("index, of, tasks, claimed = role.index, role.of, 0, None")
            self.line("turns_left = [role.launch.turns]")
            at = len(self.lines)
            self._divisions = Divisions(block)
            self.block(block)
            self.line("yield from ()")
            if "divisions" in self.names:
                self.lines.insert(at, "    role.edges = {}")
                self.spans.insert(at, ir.NOWHERE)
            for pipeline, p in self._pipelines.items():
                text = f"fills_{p} = drains_{p} = 0; ring_{p} = role.rings[{pipeline!r}].stages"
                self.lines.insert(at, "    " + text)
                self.spans.insert(at, ir.NOWHERE)

    def block(self, block: ir.Block) -> None:
        for s in block:
            self.statement(s)

    def statement(self, s: ir.Statement) -> None:
        self._span = s.span
        self._layout = self._layouts.of_statement(s)
        if isinstance(s, ir.Assign):
            self.line(f"{self.variable(s.var.name)} = {self.expression(s.value)}")
        elif isinstance(s, ir.For):
            start, stop = self.expression(s.start), self.expression(s.stop)
            site = self.site("for", "", s.span)
            with self.indented(f"for {self.variable(s.var.name)} in turns(role, turns_left, {start}, {stop}, {site}):"):
                self.block(s.body)
        elif isinstance(s, ir.While):
            self.conditional_loop(s)
        elif isinstance(s, ir.Tasks):
            self.tasks(s)
        elif isinstance(s, ir.If):
            with self.indented(f"if {self.expression(s.cond)}:"):
                self.block(s.then)
            if s.orelse:
                with self.indented("else:"):
                    self.block(s.orelse)
        elif isinstance(s, ir.Role):  # only in a team's slice, which has none; slices of roles have them dissolved
            raise AssertionError(f"a {s.kind} block inside a role")
        elif isinstance(s, ir.Stage):
            self.stage(s)
        elif isinstance(s, ir.Do):
            self.do(s)
        elif isinstance(s, ir.Bounds):
            site = self.site("bounds", "", s.span)
            self.names[f"of_{site}"] = s
            guard = self.expression(s.guard) if s.guard is not None else "True"
            with self.indented(f"if {guard}:"):
                self.line(f"check_bounds(role, {site}, of_{site}, {self.expression(s.index)})")
        else:
            site = self.site("assert", "", s.span)
            with self.indented(f"if not {self.expression(s.cond)}:"):
                self.line(f"raise role.fail({site}, {f'assertion failed: {s.text}'!r})")

    def tasks(self, s: ir.Tasks) -> None:
        """Block ``index`` of ``of`` takes the tasks ``index`` modulo ``of``; ``tasks`` came before this loop.

        Dynamically, it takes those that it claims; a number past the last task belongs to the next loop.
        """
        number = self.variable(f"tasks {len(self.lines)}")  # no name of the user has a space
        variables = [self.variable(v.name) for v in s.vars]
        names = tuple(v.name for v in s.vars)
        self.line(f"{number} = ({', '.join(map(self.expression, s.extents))},)")
        group = self.expression(s.group)
        if s.dynamic:
            site = self.site("tasks", "", s.span)
            with self.indented("if claimed is None:"):
                self.line(f"claimed = yield from next_task(role, {site})")
            head = f"while (task := claimed - tasks) < prod({number}):"
        else:
            head = f"for task in range((index - tasks) % of, prod({number}), of):"
        with self.indented(head):
            self.line(f"{', '.join(variables)}, = coordinate(task, {number}, {group})")
            self.line(f"role.task = ({names!r}, ({', '.join(variables)},))")
            self.block(s.body)
            if s.dynamic:
                self.line(f"claimed = yield from next_task(role, {site})")
        self._span = s.span
        self.line(f"tasks += prod({number})")
        self.line("role.task = ((), ())")

    def conditional_loop(self, s: ir.While) -> None:
        """A ``while``, which must end: it has no waits that could do without it."""
        turns, site = self.variable(f"turns {len(self.lines)}"), self.site("while", "", s.span)
        self.line(f"{turns}, most = 0, while_turns()")  # no name of the user is so: see `variable`
        with self.indented(f"while {self.expression(s.cond)}:"):
            self.line(f"{turns} += 1")
            with self.indented(f"if {turns} > most:"):
                self.line(f"raise endless(most, {site}.span, role.where())")
            self.block(s.body)

    def stage(self, s: ir.Stage) -> None:
        p = self.pipeline(s.pipeline)
        site = self.site(s.mode, s.pipeline, s.span)
        cursor, counter, leave = (
            (f"fills_{p}", "empty", "full") if s.mode == "fill" else (f"drains_{p}", "full", "empty")
        )
        use = f"{cursor} // len(ring_{p})" + ("" if s.mode == "fill" else " + 1") + f" - {s.early}" * (s.early > 0)
        self.line(f"held_{p} = ring_{p}[{cursor} % len(ring_{p})]")
        if s.mode == "fill" and s.pipeline in self.above:
            above = self.above[s.pipeline]
            there = self.site("fill", above, s.span)
            self.line(f"yield ring_{self.pipeline(above)}[held_{p}.at].empty, {use}, {there}")
        if s.mode == "drain" or s.pipeline not in self.above.values():  # else the fill below has waited
            self.line(f"yield held_{p}.{counter}, {use}, {site}")
            if s.mode == "fill":
                self.line(f"held_{p}.enter_fill()")
        self.line(f"{cursor} += 1")
        self.block(s.body)
        self._span = s.span
        self.line(f"held_{p}.leave(role, held_{p}.{leave})")

    def do(self, s: ir.Do) -> None:
        row = table.TABLE[s.op]
        what = next((o.signals for o in s.operands if isinstance(o, ir.Signal)), "")
        site = self.site(s.op, what, s.span, attrs=s.attrs)
        call = f"op_{s.op}(role, {', '.join([site, *(self.operand(o, site) for o in s.operands)])})"
        if s.op in WAITING:
            self.line(f"yield from {call}")
            return
        changed = [s.operands[i] for i in row.writes if row.operands[i] == "register"]
        names = [self.variable(v.name) for v in changed if isinstance(v, ir.Var)]
        self.line(" = ".join([*names, call]))

    # --------------------------------------------------------------------------------------- expressions
    def operand(self, e: ir.Operand, site: str) -> str:
        if isinstance(e, ir.Shared):
            tiles = "role.private" if e.private else f"held_{self.pipeline(e.pipeline)}.tiles"
            return f"{tiles}[{e.field!r}]" + (".T" if e.transposed else "")
        if isinstance(e, ir.Memory):
            coord = self.tuple(e.coord)
            if vectors.has_vector((e,)):
                rank = "None" if e.rank is None else self.expression(e.rank)
                return f"Lanes(role, {e.tensor!r}, {coord}, {rank})"
            if e.everyone:
                return f"role.everyone({e.tensor!r}, {coord})"
            rank = "None" if e.rank is None else self.expression(e.rank)
            return f"role.window({e.tensor!r}, {coord}, {rank}, {site})"
        if isinstance(e, ir.Choose):
            return f"({self.operand(e.x, site)} if {self.expression(e.cond)} else {self.operand(e.y, site)})"
        if isinstance(e, ir.Signal) and site in self.by_lane:
            return f"Counters({e.signals!r}, {self.tuple(e.index)})"
        if isinstance(e, ir.Signal):
            return f"role.counter({e.signals!r}, {self.tuple(e.index)}, {site})"
        return self.expression(e)

    def tuple(self, entries: tuple[ir.Expr, ...]) -> str:
        return "(" + "".join(f"{self.expression(e)}, " for e in entries) + ")"

    def expression(self, e: ir.Expr, part_of: ir.Span | None = None) -> str:
        """``part_of``: the span of the sum, difference or product that ``e`` is an operand of."""
        if isinstance(e, ir.Const):
            return f"({single(e.value) if isinstance(e.value, float) else e.value!r})"
        if isinstance(e, ir.Var):
            return self.variable(e.name)
        if isinstance(e, ir.Dim):
            return f"dims[{e.tensor!r}, {e.axis}]"
        if isinstance(e, ir.Param):
            return f"single(scalars[{e.name!r}])" if e.type.dtype.kind == "float" else f"scalars[{e.name!r}]"
        if isinstance(e, ir.Rank):
            return "me"
        if isinstance(e, ir.World):
            return "world"
        if isinstance(e, ir.Select):  # Python evaluates one side only, and so does the device
            return f"({self.expression(e.x)} if {self.expression(e.cond)} else {self.expression(e.y)})"
        if isinstance(e, ir.Unary):
            return self.unary(e, part_of)
        if isinstance(e, ir.Binary):
            return self.binary(e, part_of)
        layout = (("layout", self._layout),) if e.op == "sum" else ()  # it fixes the order
        site = self.site(e.op, "", e.span, e.type, (*e.attrs, *layout))
        if e.op in LOADS and self._divisions is not None:
            self._divisions.sites[id(e)] = self.names[site]
        call = f"op_{e.op}(role, {', '.join([site, *(self.operand(o, site) for o in e.operands)])})"
        return f"(yield from {call})" if e.op in WAITING else call

    def unary(self, e: ir.Unary, part_of: ir.Span | None = None) -> str:
        x = self.expression(e.x, e.span if e.op == "-" else None)
        if isinstance(e.type, Tile):
            return f"unary({e.op!r}, {x}, {self.dtype(e.type)})"
        text = {"-": f"(-{x})", "not": f"(not {x})", "abs": f"abs({x})"}[e.op]
        return self.fitting(e, text, part_of)

    def binary(self, e: ir.Binary, part_of: ir.Span | None = None) -> str:
        within = e.span if e.op in ("+", "-", "*") else None
        x, y = self.expression(e.x, within), self.expression(e.y, within)
        if isinstance(e.type, Tile):
            if e.op in ("//", "%") and not (isinstance(e.y, ir.Const) and e.y.value):
                site = self.site(e.op, "", e.span)
                self.names |= {"divisions": self._divisions, f"of_{site}": e}
                return f"divisions.divide(role, {site}, of_{site}, {x}, {y}, {self.dtype(e.type)})"
            return f"binary({e.op!r}, {x}, {y}, {self.dtype(e.type)})"
        if e.op in ("min", "max"):
            text = f"{e.op}({x}, {y})"
        else:
            text = f"({x} {e.op} {y})"
        return f"single({text})" if e.type.dtype.kind == "float" else self.fitting(e, text, part_of)

    def fitting(self, e: ir.Unary | ir.Binary, text: str, part_of: ir.Span | None) -> str:
        """``text``, the value of ``e``, checked to fit int32 if it may be too large.

        A part of what the user wrote in one piece (``(i - 1) * 64`` is ``i * 64 - 64`` in the IR) may be: the device
        wraps around and back.
        """
        grows = e.op in ("+", "-", "*", "abs") or (e.op == "//" and not _positive(e.y))
        if not grows or e.type != INT or e.span == part_of:
            return text
        return f"fits(role, {self.site(e.op, '', e.span)}, {text})"

    def dtype(self, kind: Tile | Scalar) -> str:
        name = f"dtype_{kind.dtype.name}"
        self.names[name] = kind.dtype
        return name


def _positive(e: ir.Expr) -> bool:
    return isinstance(e, ir.Const) and e.value > 0


def _numbered(names: dict[str, str], prefix: str, name: str) -> str:
    if name not in names:
        safe = "".join(c if c.isascii() and c.isalnum() else "_" for c in name)
        names[name] = f"{prefix}{len(names)}_{safe}"
    return names[name]
