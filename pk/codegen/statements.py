"""The statements of one role: IR -> lines of CUDA.

Text comes from the macros of ``templates``; this module decides order and state: which stages the role holds, which it
still owes because the tensor cores or the stores may be reading them, and whether it has met the other ranks on every
path to here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pk.codegen import cluster, deferred, inflight, render, turns
from pk.codegen.accesses import Accesses
from pk.codegen.builtins import Builtins
from pk.codegen.direct import Direct
from pk.codegen.expressions import Expressions
from pk.codegen.lanes import STATEMENTS, Lanes, cuda_type, has_effect
from pk.codegen.lines import Lines
from pk.codegen.names import Names, shared_member
from pk.codegen.operands import At, Held, Operands
from pk.codegen.params import Params
from pk.codegen.plan import MOVES, ClassPlan, Plan, RolePlan
from pk.codegen.preamble import Preamble
from pk.codegen.registers import Registers
from pk.codegen.sites import gated_windows, waits_of
from pk.ir import nodes as ir
from pk.ir import split, vectors
from pk.ir.types import Scalar, Tile, Type


@dataclass(slots=True)
class Path:
    """What holds on every path to the statement being written (``owed``: on some path)."""

    entered: bool = False  # the role has seen every rank's entry word
    multiplying: list[str] = field(default_factory=list)  # accumulators that an mma may be writing
    factors: list[str] = field(default_factory=list)  # register tiles that an mma may be reading; "" has no name
    uncommitted: bool = False  # an mma has been issued since the last commit
    owed: list[str] = field(default_factory=list)  # pipelines with a stage to release when its reader is done
    accesses: Accesses = field(default_factory=Accesses)  # of tensors, by threads


class Statements:
    """Writes the body of one role."""

    def __init__(self, plan: Plan, block_class: ClassPlan, role: RolePlan, params: Params) -> None:
        self._plan, self._role = plan, role
        self._names = Names(_plain(role.body))
        self._preamble = Preamble(plan, block_class, role, params, self._names)
        self._builtins = Builtins(role.body, self._names)
        self._scalar = Expressions(params, self._names, role.facts, self._builtins)
        self._operand = Operands(plan, role, params, self._names, self._scalar)
        self._direct = Direct(plan, params, self._scalar)
        self._lanes = Lanes(self._scalar, self._operand, self._direct)
        self._scalar.calls = self._call
        self._network = bool(plan.multicast) or any(m.multicast for m in plan.maps)
        self._headers = f"p.{params.multicast('')}" if "" in plan.multicast else ""
        self._registers = Registers(self._names, self._scalar, self._operand, self._direct, role)
        self._path = Path()
        self._used = self._builtins.aliases.union(*(split.used(s) for s in split.statements(role.body)))
        self._lines = Lines(1)
        self._flushed: tuple[str, ...] = ()  # pipelines whose stores the line before has waited for
        self._together = False  # in a branch that one thread takes, to make all loads of a stage
        self._pads = False  # in a task that a pair of blocks may have once too often
        self._adds = ""  # in a loop of signals that share one release: the C++ name of whether this thread adds
        self._turns = turns.of(role.body, role.teams, role.stagger)

    def write(self) -> str:
        """The role's body."""
        self._lines.add(self._preamble.begin())
        self._lines.add("\n")
        for line in self._builtins.declarations:
            self._lines.add(line)
        self._block(self._role.body, set())
        self._settle()
        self._flush()
        self._lines.own()
        self._lines.add(self._preamble.end())
        return self._lines.text()

    # ------------------------------------------------------------------------------------------------ blocks
    def _block(self, block: ir.Block, outside: set[str]) -> None:
        """Write ``block``; ``outside`` are the names declared around it."""
        scope = set(outside)
        block = tuple(s for s in block if not self._is_unused(s))
        for i, s in enumerate(block):
            for p in self._turns.before.get(id(s), ()):
                self._settle()
                self._pass_turn(p, "take")
            if isinstance(s, ir.Assign):
                self._assign(s, scope, block[i + 1 :])
            else:
                self._statement(s, scope, block[i + 1 :], len(block) == 1)
            for p in self._turns.after.get(id(s), ()):
                self._pass_turn(p, "give")

    def _pass_turn(self, pipeline: str, how: str) -> None:
        ring = {"ring": shared_member(pipeline)} if pipeline else {}
        self._say("turn" if pipeline else "stagger", **ring, how=how)

    def _pass_on(self, pipelines: Iterable[str]) -> None:
        for p in pipelines:
            self._pass_turn(p, "take")
            self._pass_turn(p, "give")

    def _is_unused(self, s: ir.Statement) -> bool:
        return isinstance(s, ir.Assign) and s.var.name not in self._used and not has_effect(s.value)

    def _statement(self, s: ir.Statement, scope: set[str], rest: ir.Block, alone: bool) -> None:
        if self._path.multiplying and not self._may_go_on(s):
            self._settle()
        self._flushed = ()
        if self._must_flush(s):
            self._flush()
        self._meet(s)
        if isinstance(s, ir.Stage):
            self._stage(s, scope, rest, braces=not alone)
            return
        self._lines.source(s.span)
        if isinstance(s, ir.Tasks):
            self._tasks(s, scope, rest)
        elif isinstance(s, ir.For):
            self._for(s, scope)
        elif isinstance(s, ir.While):
            self._open("while_begin", cond=self._scalar(s.cond, 5))
            self._loop_body(s.body, scope)
            self._lines.close()
        elif isinstance(s, ir.If):
            self._if(s, scope)
        elif isinstance(s, ir.Do) and self._pads and cluster.outside_effect(s):
            entered = self._path.entered
            self._lines.open("if (is_real) {")
            self._do(s)
            self._lines.close()
            self._path.entered = entered
        elif isinstance(s, ir.Do):
            self._do(s)
        elif isinstance(s, ir.Assert):
            self._say("check", cond=self._scalar(s.cond), at=self._at(s))
        elif isinstance(s, ir.Bounds):
            self._bounds(s)
        else:
            raise AssertionError(f"not a statement of a role: {s!r}")

    def _bounds(self, s: ir.Bounds) -> None:
        guard = self._scalar(s.guard) if s.guard is not None else ""
        span = f", {s.least}, {s.slack}" if s.least or s.slack else ""
        index, bound = self._scalar(s.index), self._scalar(s.bound)
        self._say("bounds", index=index, bound=bound, guard=guard, range=span, at=self._at(s))

    def _meet(self, s: ir.Statement) -> None:
        """Before ``s`` touches what peers touch: every rank has begun.  (Signals see to it themselves.)"""
        if not self._path.entered and gated_windows(s, self._role.facts):
            self._lines.source(s.span)
            self._say("enter", at=self._at(s))
            self._path.entered = True
        if self._path.accesses.must_meet(s) and (self._role.warps > 1 or self._role.kind == "communicator"):
            self._lines.source(s.span)
            self._say("meet")

    def _assign(self, s: ir.Assign, scope: set[str], rest: ir.Block) -> None:
        if isinstance(s.var.type, Tile) and self._in_flight & {s.var.name, *inflight.tiles_read(s.value)}:
            self._settle()
        self._meet(s)
        self._lines.source(s.span)
        new = s.var.name not in scope
        if _is_grouped(s.var.type):
            for line in self._registers.assign(s, new, over=inflight.overwritten(s.var.name, rest)):
                self._lines.add(line)
        else:
            changes = any(isinstance(t, ir.Assign) and t.var.name == s.var.name for t in split.statements(rest))
            kind = f"{'' if changes else 'const '}{cuda_type(s.var.type)} " if new else ""
            value = self._builtins.value(s) or self._scalar(s.value)
            self._lines.add(f"{kind}{self._names.local(s.var.name)} = {value};")
        scope.add(s.var.name)

    # ----------------------------------------------------------------------------------------- loops, branches
    def _tasks(self, s: ir.Tasks, scope: set[str], rest: ir.Block) -> None:
        tasks = self._names.local(f"tasks {s.span.line} {s.span.column}", "tasks", "tasks")
        extents = [self._scalar(e) for e in s.extents]
        count = " * ".join(self._scalar(e, 9) for e in s.extents)
        if s.cluster > 1:
            pairs = f"ceil_div({extents[-2]}, {s.cluster})"
            count = " * ".join([*(self._scalar(e, 9) for e in s.extents[:-2]), pairs, self._scalar(s.extents[-1], 9)])
        in_turn = self._role.teams > 1
        step = self._preamble.step + ", role.pass()" * in_turn
        self._open("tasks_begin", tasks=tasks, count=count, step=step)
        if in_turn:
            self._say("skip_task")
            self._pass_on(self._turns.idle.get(id(s), ()))
        used = frozenset().union(*(split.used(t) for t in split.statements(s.body))) if s.body else frozenset()
        self._pads = s.cluster > 1 and any(map(cluster.outside_effect, split.statements(s.body)))
        wanted = [(i, v) for i, v in enumerate(s.vars) if v.name in used or (self._pads and i == len(s.vars) - 2)]
        if wanted:
            at = self._names.local("at", "at", "at")
            fixed = isinstance(s.group, ir.Const)
            grouped, walked = self._scalar(s.group), extents
            if s.cluster > 1:
                assert isinstance(s.group, ir.Const)
                grouped, walked = str(int(s.group.value) // s.cluster), [*extents[:-2], pairs, extents[-1]]
            self._say("task_coordinate", at=at, group=grouped, fixed=fixed, extents=walked)
            for i, v in wanted:
                name = self._names.local(v.name)
                if s.cluster > 1 and i == len(s.vars) - 2:
                    self._say("pair_coordinate", name=name, at=f"{at}[{i}]", extent=extents[-2], real=self._pads)
                else:
                    self._lines.add(f"const int {name} = {at}[{i}];")
        inner = scope | {v.name for v in s.vars}
        bindings = _bindings(s)
        self._block(bindings, inner)
        if len(wanted) == len(s.vars):
            self._say("visit", names=[self._names.local(n) for n in _visited(s, bindings)])
        self._loop_body(s.body[len(bindings) :], inner | {b.var.name for b in bindings if isinstance(b, ir.Assign)})
        self._lines.close()
        self._pads = False
        if self._preamble.runs_on:
            self._say("tasks_end", tasks=tasks, dynamic=s.dynamic)

    def _for(self, s: ir.For, scope: set[str]) -> None:
        name = self._names.local(s.var.name)
        row = deferred.signals_in_a_row(s)
        if row is not None and not (self._network or self._preamble.defers or self._pads):
            adds = self._names.local(f"adds {s.span.line} {s.span.column}", "adds", "adds")
            self._say("signals_begin", adds=adds, at=self._at(row))
            self._adds = adds
        # Python evaluates the bound once: so does C++, unless it is a constant or a name that stays as it is.
        changed = {t.var.name for t in split.statements(s.body) if isinstance(t, ir.Assign)}
        fixed = isinstance(s.stop, ir.Const) or (isinstance(s.stop, ir.Var) and s.stop.name not in changed)
        bound = "" if fixed else self._names.local(f"{name}_stop", "bound")
        self._open("for_begin", name=name, start=self._scalar(s.start), stop=self._scalar(s.stop, 8), bound=bound)
        self._loop_body(s.body, scope | {s.var.name})
        self._lines.close()
        self._adds = ""

    def _open(self, macro: str, **values: object) -> None:
        *before, last = render.statement(macro, **values).split("\n")
        for line in before:
            self._lines.add(line)
        self._lines.open(last)

    def _loop_body(self, body: ir.Block, scope: set[str]) -> None:
        entered, owed = self._path.entered, list(self._path.owed)
        self._path.accesses.enter_loop(body)
        self._block(body, scope)
        if not inflight.streams(body):
            self._settle()
        several = self._role.kind == "storer" and len(inflight.pipelines(body)) > 1  # it may wait for one, holding one
        if several or any(map(self._may_block, split.statements(body))):
            self._flush()  # what the next turn, or what follows the loop, must not find owed
        self._path.entered = entered  # the body may have run no time at all
        self._path.owed = list(dict.fromkeys(owed + self._path.owed))

    def _if(self, s: ir.If, scope: set[str]) -> None:
        entered, owed, accesses = self._path.entered, list(self._path.owed), self._path.accesses.copy()
        self._lines.open(f"if ({self._scalar(s.cond)}) {{")
        self._pass_on(self._turns.idle_then.get(id(s), ()))
        self._block(s.then, scope)
        self._settle()
        after, self._path = self._path, Path(entered, owed=owed, accesses=accesses)
        if s.orelse or id(s) in self._turns.idle_else:
            self._lines.close_open("} else {")
            self._pass_on(self._turns.idle_else.get(id(s), ()))
            self._block(s.orelse, scope)
            self._settle()
        self._lines.close()
        self._path.accesses.join(after.accesses)
        self._path.entered = after.entered and self._path.entered
        self._path.owed = list(dict.fromkeys(after.owed + self._path.owed))

    # ------------------------------------------------------------------------------------------------ stages
    def _stage(self, s: ir.Stage, scope: set[str], rest: ir.Block, braces: bool) -> None:
        self._declare_before(s.body, scope, rest)
        ring = shared_member(s.pipeline)
        held = self._hold(s)
        if braces:
            self._lines.open_source("{", s.span)
        else:
            self._lines.source(s.span)
        loads = s.mode == "fill" and self._role.kind in ("loader", "storer")
        planned = self._plan.pipeline(s.pipeline)
        waits = s.mode == "fill" and planned.above not in ("", *self._flushed)
        if waits and self._plan.pipeline(planned.above).drainer == self._role.kind:  # it may hold what it waits for
            self._say("flush", rings=[shared_member(planned.above)])
        self._say(
            f"{s.mode}_begin", ring=ring, stage=held.stage, full=held.full, loads=loads, at=self._at(s),
            memory=shared_member(planned.memory), above=shared_member(planned.above) if planned.above else "",
        )  # fmt: skip
        if loads and inflight.only_loads(s.body):
            self._loads(s.body, scope, ring, held)
        else:
            self._block(s.body, scope)
            self._leave(s, ring)
        if braces:
            self._lines.close()
        del self._operand.held[s.pipeline]

    def _loads(self, body: ir.Block, scope: set[str], ring: str, held: Held) -> None:
        """A stage that is filled by loads and nothing else: one thread announces them all, then makes them."""
        for s in body:
            self._meet(s)
        tiles = [f"{held.stage}.{shared_member(inflight.loaded(s).field)}" for s in body]
        first, *rest = render.statement("loads_begin", full=held.full, tiles=tiles).split("\n")
        self._lines.open(first)
        for line in rest:
            self._lines.add(line)
        self._together = True
        self._block(body, scope)
        self._together = False
        self._lines.close()
        self._say("loads_end", ring=ring)

    def _hold(self, s: ir.Stage) -> Held:
        """Names for the stage's variables: the user's own, where no outer stage has it."""
        named = re.search(rf"{s.mode}\(\)\s+as\s+([A-Za-z_]\w*)", s.span.text)
        stage = self._names.local(named.group(1) if named else s.pipeline, "stage")
        full = "full"
        outer = self._operand.held.values()
        if any(h.stage == stage for h in outer):
            stage = self._names.local(f"{s.pipeline}_stage", "stage")
        if outer:
            full = self._names.local(f"{s.pipeline}_full", "stage")
        self._operand.held[s.pipeline] = Held(stage, full)
        return self._operand.held[s.pipeline]

    def _declare_before(self, body: ir.Block, scope: set[str], rest: ir.Block) -> None:
        """Names bound inside a stage stay bound after it: declare those that the rest of the block reads."""
        later = frozenset().union(*(split.used(t) for t in split.statements(rest))) if rest else frozenset()
        for t in body:
            if isinstance(t, ir.Assign) and t.var.name in later and t.var.name not in scope:
                kind = self._registers.declared(t.var) if _is_grouped(t.var.type) else cuda_type(t.var.type)
                self._lines.add(f"{kind} {self._names.local(t.var.name)};")
                scope.add(t.var.name)

    def _leave(self, s: ir.Stage, ring: str) -> None:
        """Give the stage up: at once, or with the next one of its pipeline if mma or stores are still reading it."""
        if s.mode == "fill":
            self._say("fill_end", ring=ring, loads=self._role.kind in ("loader", "storer"))
            return
        how = "mma" if self._path.multiplying else "store" if self._role.kind == "storer" else "now"
        self._say("drain_end", ring=ring, how=how, deferred=self._preamble.defers)
        if how == "mma":
            self._path.uncommitted = False
        if how != "now" and s.pipeline not in self._path.owed:
            self._path.owed.append(s.pipeline)

    def _settle(self) -> None:
        """Wait for the tensor cores, then free the stage that they read last."""
        if self._path.multiplying:
            rings = [shared_member(p) for p in self._path.owed]
            accumulators = [self._names.local(a) for a in self._path.multiplying]
            self._say("settle", rings=rings, accumulators=accumulators, commit=self._path.uncommitted)
            self._path.multiplying, self._path.factors, self._path.owed = [], [], []
            self._path.uncommitted = False

    @property
    def _in_flight(self) -> set[str]:
        """Register tiles that the tensor cores may be writing or reading."""
        return {*self._path.multiplying, *self._path.factors}

    def _may_go_on(self, s: ir.Statement) -> bool:
        """Whether the tensor cores may go on during ``s``: it only multiplies, and blocks on no pipeline but the one
        whose stage they still owe (another one's filler may need that stage first).
        """
        if not inflight.only_multiplies((s,)) or len(inflight.pipelines((s,)).union(self._path.owed)) > 1:
            return False
        a = s.operands[1] if isinstance(s, ir.Do) else None
        if a is None or isinstance(a, ir.Shared | ir.Var):
            return True
        return not self._path.factors and self._in_flight.isdisjoint(inflight.tiles_read(a))

    def _flush(self) -> None:
        """Wait until the stores have read their stages, then free the last one."""
        if self._path.owed and not self._path.multiplying:
            self._say("flush", rings=[shared_member(p) for p in self._path.owed])
            self._flushed, self._path.owed = tuple(self._path.owed), []

    def _must_flush(self, s: ir.Statement) -> bool:
        """Whether a stage that stores have read must be free before ``s``: it blocks, or counts on another pipeline."""
        if isinstance(s, ir.Stage):
            return any(p != s.pipeline for p in self._path.owed)
        return any(map(self._may_block, split.statements((s,))))

    def _may_block(self, s: ir.Statement) -> bool:
        """Whether ``s`` itself may wait for another block or rank."""
        if self._preamble.defers and isinstance(s, ir.Do) and s.op in deferred.SIGNALS:
            return False
        return isinstance(s, ir.Do) and bool(s.operands) and isinstance(s.operands[0], ir.Signal)

    # --------------------------------------------------------------------------------------------------- ops
    def _do(self, s: ir.Do) -> None:
        operands: list[object] = []
        if self._adds:
            counter, rank, value = (self._value(o) for o in s.operands)
            self._say("signal_next", adds=self._adds, counter=counter, rank=rank, value=value)
            return
        if self._preamble.defers and s.op in deferred.BLOCKING:
            self._say("flush_signals")
        if s.op in MOVES:
            memory, tile = (s.operands[i] for i in MOVES[s.op])
            assert isinstance(memory, ir.Memory | ir.Choose)
            assert isinstance(tile, ir.Shared)
            window = self._operand.window(memory, tile.type, self._role.shares(s))
            window = replace(window, expected=self._together)
            operands = [window if o is memory else self._operand(o) for o in s.operands]
        elif s.op in ("reduce", "all_reduce"):
            operands = [self._direct(o) for o in s.operands if isinstance(o, ir.Memory)]
        elif s.op in STATEMENTS:
            operands = self._lanes.operands(s)
        else:
            acc = s.operands[0]
            like = acc.name if s.op == "mma" and isinstance(acc, ir.Var) else ""
            operands = [self._value(o, like) for o in s.operands]
        attrs = dict(s.attrs)
        if s.op == "store":
            kind = s.operands[1].type  # type: ignore[union-attr]
            attrs["type"] = self._registers.type(kind, self._registers.layout(s.operands[1]))  # type: ignore[arg-type]
        if s.op == "store_global" and s.operands[1].type.space == "copied":  # type: ignore[union-attr]
            attrs["copied"] = True
        written = s.operands[0] if s.op == "store" else None
        private = written.field if isinstance(written, ir.Shared) and written.private else ""
        if private:
            self._say("private_begin", tile=private)
        elif isinstance(written, ir.Shared) and self._plan.pipeline(written.pipeline).over:
            self._say("in_place", tile=written.field)
        self._lines.add(render.op(s.op, *operands, at=self._at(s), **attrs))
        if private:
            self._say("private_end", tile=private)
        if s.op == "mma":
            acc, a = s.operands[:2]
            assert isinstance(acc, ir.Var)
            if acc.name not in self._path.multiplying:
                self._path.multiplying.append(acc.name)
            self._path.uncommitted = True
            if not isinstance(a, ir.Shared):
                self._path.factors.append(a.name if isinstance(a, ir.Var) else "")

    def _value(self, o: ir.Operand, like: str = "") -> object:
        if isinstance(o, ir.Memory):
            return self._direct(o)
        if isinstance(o, ir.Shared) or not _is_grouped(getattr(o, "type", None)):
            return self._operand(o)
        lines: list[str] = []
        name = self._registers.tile(o, lines, like)
        for line in lines:
            self._lines.add(line)
        return name

    def _at(self, s: ir.Statement) -> At:
        wait = next(waits_of(s, self._role.facts), None)
        site = self._plan.site(self._role, *wait, s.span) if wait else ""
        at = At(site, self._network, self._headers, deferred=bool(self._preamble.defers))
        return self._lanes.at(s, at) if isinstance(s, ir.Do) and s.op in STATEMENTS else at

    def _call(self, e: ir.Call) -> str:
        """An op that yields a scalar or an index vector."""
        if self._lanes.writes(e):
            return self._lanes.call(e)
        if e.op == "load_scalar":
            return render.op(e.op, self._direct(e.operands[0]))  # type: ignore[arg-type]
        if isinstance(e.type, Scalar):  # a function of a number
            x = e.operands[0]
            text = self._scalar(x) if x.type.dtype.kind == "float" else f"float({self._scalar(x)})"  # type: ignore[union-attr]
            return render.op(e.op, text, **dict(e.attrs))
        raise AssertionError(f"not a scalar expression: {e!r}")

    def _say(self, macro: str, **values: object) -> None:
        self._lines.add(render.statement(macro, **values))


def _is_grouped(kind: Type | None) -> bool:
    """Whether ``kind`` is a register tile of a group of warps, and no index vector."""
    return isinstance(kind, Tile) and not vectors.is_vector(kind)


def _bindings(s: ir.Tasks) -> ir.Block:
    """The assignments at the head of the body that the task loop's own line made, e.g. of a rank from its step."""
    n = 0
    while n < len(s.body) and isinstance(s.body[n], ir.Assign) and s.body[n].span.line == s.span.line:
        n += 1
    return s.body[:n]


def _visited(s: ir.Tasks, bindings: ir.Block) -> list[str]:
    """The task as the user names it: a binding instead of the variable that it was made from."""
    made = {name: b.var.name for b in bindings if isinstance(b, ir.Assign) for name in split.used(b)}
    return [made.get(v.name, v.name) for v in s.vars]


def _plain(block: ir.Block) -> dict[str, str]:
    """The user's own word for each variable that the front end numbered to tell it from one of another role."""
    written: dict[str, str] = {}
    for s in split.statements(block):
        names = [v.name for v in s.vars] if isinstance(s, ir.Tasks) else []
        names += [s.var.name] if isinstance(s, ir.Assign | ir.For) else []
        written |= {n: s.span.text for n in names if n not in written}
    plain = {n: re.sub(r"_\d+$", "", n) for n, text in written.items() if not re.search(rf"\b{re.escape(n)}\b", text)}
    bases = [plain.get(n, n) for n in written]
    return {n: base for n, base in plain.items() if bases.count(base) == 1}
