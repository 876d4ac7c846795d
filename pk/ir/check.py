"""Always-on checks of a kernel, whoever made it: types, names, roles, stages, pipelines, hardware limits, balance.

``check`` raises the first ``CompileError`` it finds.  What holds for a single operation is in ``rules``; this module
walks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from pk import errors
from pk.ir import budget, collective, communicator, layout, multiply, results, rules, vectors
from pk.ir import nodes as ir
from pk.ir.balance import balance
from pk.ir.ops import TABLE
from pk.ir.over import over
from pk.ir.schedule import schedule
from pk.ir.split import roles_of, statements
from pk.ir.types import BOOL, FLOAT, INT, Scalar, Tile, Type

Names = dict[str, Type]
_STAGES = {"fill": ("loader", "consumer", "storer"), "drain": ("consumer", "storer")}


def check(kernel: ir.Kernel) -> None:
    """Raise a CompileError, with the user's line, if ``kernel`` breaks a rule."""
    _declarations(kernel)
    names: Names = {}
    walk = _Walk(kernel, "compute", "shared")
    for s in kernel.prologue:
        if not isinstance(s, ir.Assign) or not isinstance(s.var.type, Scalar):
            raise errors.WrongRole(
                "a statement before the classes that is no scalar assignment", s.span, "Move it down."
            )
        walk.statement(s, names)
    for c in kernel.communicators:
        walk.integer("sms=", c.sms, {}, c.span)
        if isinstance(c.sms, ir.Const) and c.sms.value < 1:
            raise errors.WrongOperand(f"pk.communicator(sms={c.sms.value})", c.span, "Give it one SM or more.")
    communicator.communicator(kernel)
    for name, body in (*kernel.classes[1:], kernel.classes[0]):
        _class(kernel, name, body, dict(names))
    schedule(kernel)
    over(kernel)
    layout.check(kernel)
    vectors.check_rows(kernel)
    budget.shared_memory(kernel)
    balance(kernel)


def _declarations(kernel: ir.Kernel) -> None:
    seen: set[str] = set()
    declared: list[ir.Tensor | ir.Param | ir.Signals | ir.Scratch | ir.Pipeline | ir.SharedTile] = [
        *kernel.tensors, *kernel.scalars, *kernel.signals, *kernel.scratch, *kernel.pipelines, *kernel.shared
    ]  # fmt: skip
    for d in declared:
        if d.name in seen:
            raise errors.WrongDeclaration(f"`{d.name}` is declared twice", d.span, "Use another name.")
        seen.add(d.name)
    for p in kernel.pipelines:
        if p.stages < 1:
            raise errors.WrongOperand(f"a pipeline of {p.stages} stages", p.span, "Give it at least one.")
        for _, tile in p.tiles:
            rules.shared_tile(tile, p.span)
    for t in kernel.shared:
        rules.shared_tile(t.type, t.span)
    walk = _Walk(kernel, "compute", "shared")
    symmetric: list[ir.Signals | ir.Scratch] = [*kernel.signals, *kernel.scratch]
    for s in symmetric:
        for extent in s.shape:
            walk.integer(f"an extent of `{s.name}`", extent, {}, s.span)


def _class(kernel: ir.Kernel, name: str, block: ir.Block, names: Names) -> None:
    """One class of blocks."""
    roles = roles_of(block)
    _consumers_agree(block)
    walk = _Walk(kernel, name, "team" if roles == ("team",) else "shared", top=dict(names))
    walk.block(block, names)
    walk.pipelines()


def _consumers_agree(block: ir.Block) -> None:
    found = [s for s in statements(block) if isinstance(s, ir.Role) and s.kind == "consumer"]
    for s in found:
        if not 1 <= s.warpgroups <= rules.MAX_WARPGROUPS:
            raise errors.WrongOperand(
                f"pk.consumer(warpgroups={s.warpgroups})", s.span, f"Use 1 to {rules.MAX_WARPGROUPS}."
            )
        if s.warpgroups != found[0].warpgroups:
            raise errors.WrongRole(
                f"a consumer of {s.warpgroups} warpgroups in a class whose first consumer (line {found[0].span.line}) "
                f"has {found[0].warpgroups}",
                s.span,
                "All consumer blocks of a class are one role: give them the same warpgroups=.",
            )


@dataclass
class _Walk:
    """One pass over the blocks of a class."""

    kernel: ir.Kernel
    owner: str
    role: str
    warpgroups: int = 0
    tasks: bool = False
    held: dict[str, str] = field(default_factory=dict)
    users: dict[tuple[str, str], dict[str, ir.Span]] = field(default_factory=dict)  # (pipeline, mode) -> roles
    top: Names = field(default_factory=dict)  # names of the prologue: all that a communicator warp sees

    # ------------------------------------------------------------------------------------------ statements
    def block(self, block: ir.Block, names: Names) -> None:
        for s in block:
            self.statement(s, names)

    def statement(self, s: ir.Statement, names: Names) -> None:
        """Check ``s``; ``names`` learns what it assigns."""
        if isinstance(s, ir.Assign):
            self._assign(s, names)
        elif isinstance(s, ir.Do):
            self.do(s, names)
        elif isinstance(s, ir.Assert):
            self.condition(s.cond, names, s.span)
        elif isinstance(s, ir.If):
            self.condition(s.cond, names, s.span)
            self.block(s.then, dict(names))
            self.block(s.orelse, dict(names))
        elif isinstance(s, ir.For):
            self.integer("the start of a loop", s.start, names, s.span)
            self.integer("the end of a loop", s.stop, names, s.span)
            self.block(s.body, {**names, s.var.name: s.var.type})
        elif isinstance(s, ir.While):
            self.condition(s.cond, names, s.span)
            self.block(s.body, dict(names))
        elif isinstance(s, ir.Tasks):
            self._tasks(s, names)
        elif isinstance(s, ir.Role):
            self._role(s, names)
        elif isinstance(s, ir.Stage):  # there is no Bounds before a kernel has been checked
            self._stage(s, names)

    def _assign(self, s: ir.Assign, names: Names) -> None:
        kind = self.type_of(s.value, names, s.span)
        if kind != s.var.type or names.get(s.var.name, kind) != kind:
            raise errors.NameChangesType(
                f"`{s.var.name}` is {names.get(s.var.name, s.var.type)} and is assigned {kind}", s.span,
                "A name keeps one shape and dtype for life.",
            )  # fmt: skip
        names[s.var.name] = kind

    def _tasks(self, s: ir.Tasks, names: Names) -> None:
        if self.tasks or self.role not in ("shared", "team", "communicator"):
            where = "another task loop" if self.tasks else f"a {self.role}"
            raise errors.WrongRole(
                f"pk.tasks inside {where}", s.span, "Task loops stand in shared code; use pk.range here."
            )
        if len(s.vars) != len(s.extents) or not s.extents or (isinstance(s.group, ir.Const) and s.group.value < 1):
            raise errors.WrongOperand(
                f"pk.tasks of {len(s.extents)} extents, {len(s.vars)} names and group={s.group}", s.span,
                "Give one name for each extent and a group of at least 1.",
            )  # fmt: skip
        for extent in s.extents:
            self.integer("an extent of pk.tasks", extent, names, s.span)
        self.integer("group=", s.group, names, s.span)
        self.tasks = True
        self.block(s.body, {**names, **{v.name: v.type for v in s.vars}})
        self.tasks = False

    def _role(self, s: ir.Role, names: Names) -> None:
        if self.role != "shared":
            raise errors.WrongRole(
                f"pk.{s.kind} inside a {self.role}", s.span, "Roles stand side by side in shared code."
            )
        self.role, self.warpgroups = s.kind, s.warpgroups
        self.block(s.body, dict(self.top if s.kind == "communicator" else names))
        self.role, self.warpgroups = "shared", 0

    def _stage(self, s: ir.Stage, names: Names) -> None:
        pipeline = next((p for p in self.kernel.pipelines if p.name == s.pipeline), None)
        if pipeline is None:
            raise errors.UnknownName(
                f"unknown pipeline `{s.pipeline}`", s.span, "Declare it at the top: pk.pipeline(...)."
            )
        if self.role not in _STAGES[s.mode]:
            here = f"in a {self.role}" if self.role not in ("shared", "team") else "outside role blocks"
            raise errors.WrongRole(
                f"`{s.pipeline}.{s.mode}()` may not stand {here}", s.span,
                f"A pipeline is {s.mode}ed by a {rules.listed(_STAGES[s.mode])}.",
            )  # fmt: skip
        if pipeline.owner != self.owner:
            raise errors.PipelineMisused(
                f"`{s.pipeline}` is used by the {pipeline.owner} class and by the {self.owner} class", s.span,
                "Shared memory belongs to one class of blocks: declare a second pipeline.",
            )  # fmt: skip
        if s.pipeline in self.held:
            raise errors.PipelineMisused(
                f"a stage of `{s.pipeline}` inside a stage of `{s.pipeline}`",
                s.span,
                "Leave the first `with` before the next.",
            )
        self.users.setdefault((s.pipeline, s.mode), {}).setdefault(self.role, s.span)
        self.held[s.pipeline] = s.mode
        self.block(s.body, names)  # names bound inside stay bound
        del self.held[s.pipeline]

    def pipelines(self) -> None:
        """One role fills a pipeline, one other drains it."""
        for (pipeline, mode), roles in self.users.items():
            if len(roles) > 1:
                (a, _), (b, span) = list(roles.items())[:2]
                raise errors.PipelineMisused(
                    f"`{pipeline}` is {mode}ed by two roles, {a} and {b}",
                    span,
                    f"One role {mode}s a pipeline: declare a second one.",
                )
            other = self.users.get((pipeline, "drain"), {}) if mode == "fill" else {}
            for role, span in other.items():
                if role in roles:
                    raise errors.PipelineMisused(
                        f"`{pipeline}` is filled and drained by the same role, {role}", span,
                        "A pipeline passes tiles from one role to another.",
                    )  # fmt: skip

    # ------------------------------------------------------------------------------------------- operations
    def do(self, s: ir.Do, names: Names) -> None:
        """An operation with an effect."""
        self._operands(s, names)
        o = s.operands
        if s.op in ("load_async", "store_async", "store_add_async"):
            t, window = (o[0], o[1]) if s.op == "load_async" else (o[1], o[0])
            self._moved(s, cast(ir.Shared, t), window, names)
        elif s.op == "store":
            rules.stored(cast(ir.Shared, o[0]), self.type_of(o[1], names, s.span), s.span)
        elif s.op in ("reduce", "all_reduce"):
            self._reduced(s, names)
        elif s.op == "mma":
            if not isinstance(o[0], ir.Var):
                raise errors.WrongOperand("pk.mma accumulates into a name", s.span, "Bind the accumulator first.")
            a = o[1] if isinstance(o[1], ir.Shared) else cast(Tile, self.type_of(o[1], names, s.span))
            acc = self.type_of(o[0], names, s.span)
            multiply.mma(acc, a, cast(ir.Shared, o[2]), self.warpgroups, s.span)
        elif s.op in vectors.ROW_OPS:
            t, window = (s.operands[i] for i in vectors.ROW_OPS[s.op])
            tensor = self._lanes(s, cast(ir.Memory, window), names)
            vectors.rows(s.op, cast(ir.Shared, t), tensor, cast(ir.Memory, window), s.span)
        elif s.op == "store_elements":
            window, value = cast(ir.Memory, o[0]), cast(ir.Expr, o[1])
            vectors.elements("store", self._lanes(s, window, names), window, (value,), s.span)
        elif s.op in vectors.COUNTER_OPS:
            vectors.lanes(f"an operand of pk.{rules.spelled(s.op)}", o, s.span)
        elif s.op in ("store_global", "store_scalar"):
            window, kind = cast(ir.Memory, o[0]), self.type_of(o[1], names, s.span)
            self._window(s.op, window, kind, names, s.span)
            rules.stored_as(f"`{window.tensor}`", kind, self.kernel.tensor(window.tensor).dtype, s.span)
            if s.op == "store_global":
                self.integer("rows=", o[2], names, s.span)
        else:
            for what, operand in zip(
                ("the rank", "the value") if s.op == "signal" else ("the value",), o[1:], strict=False
            ):
                self.integer(what, operand, names, s.span)

    def _lanes(self, s: ir.Do | ir.Call, window: ir.Memory, names: Names) -> ir.Tensor | ir.Scratch:
        """The tensor of a window with index vectors in its coordinate or rank, both checked."""
        tensor = self._tensor(window, s.span)
        for e in (*window.coord, *([window.rank] if window.rank is not None else [])):
            self.type_of(e, names, s.span)
        vectors.owner(rules.spelled(s.op), tensor, window, s.span)
        return tensor

    def _reduced(self, s: ir.Do, names: Names) -> None:
        for position, window in enumerate(s.operands):
            if not isinstance(window, ir.Memory) or window.everyone != (s.op == "all_reduce" or position == 1):
                raise errors.WrongOperand(
                    f"an operand of pk.{s.op} is {window}", s.span,
                    "It combines every rank's copy, into one rank's window (all_reduce: into every rank's).",
                )  # fmt: skip
        tensors = [self._placed(s.op, cast(ir.Memory, window), names, s.span) for window in s.operands]
        to, source = tensors[0], tensors[-1]
        collective.reduced(s.op, to, source, s.attr("shape"), s.attr("op"), s.span)

    def _operands(self, s: ir.Do | ir.Call, names: Names) -> None:
        """Place, number and kinds of operands, as the op table has them."""
        row = TABLE.get(s.op)
        if row is None or row.result == isinstance(s, ir.Do):
            raise errors.UnknownName(f"unknown operation `{s.op}`", s.span, "The op table (pk.ir.ops) has them all.")
        if not (
            s.op in ("full", "iota", "where") and vectors.is_vector(getattr(s, "type", None))
        ):  # at home everywhere
            rules.place(s.op, self.role, s.span)
        kinds = {"shared": ir.Shared, "memory": ir.Memory | ir.Choose, "signal": ir.Signal}
        if len(s.operands) != len(row.operands):
            raise errors.WrongOperand(
                f"pk.{s.op} of {len(s.operands)} operands", s.span, f"It has {len(row.operands)}."
            )
        for kind, operand in zip(row.operands, s.operands, strict=True):
            if kind in kinds and not isinstance(operand, kinds[kind]):
                raise errors.WrongOperand(f"an operand of pk.{s.op} is {operand}", s.span, f"It must be {kind}.")
            if isinstance(operand, ir.Shared):
                self._shared(operand, s.span)
                rules.stage(s.op, operand, self.held, s.span)
            elif isinstance(operand, ir.Signal):
                self._signal(operand, names, s.span, lanes=s.op in vectors.COUNTER_OPS)
            elif not isinstance(operand, ir.Memory | ir.Choose):
                found = self.type_of(operand, names, s.span)
                if kind != "value" and isinstance(found, Tile) != (kind in ("register", "factor")):
                    raise errors.WrongOperand(f"an operand of pk.{s.op} is {found}", s.span, f"It must be a {kind}.")

    def _shared(self, t: ir.Shared, span: ir.Span) -> None:
        if t.private:
            self._private(t, span)
            return
        declared = next((p for p in self.kernel.pipelines if p.name == t.pipeline), None)
        if declared is None or dict(declared.tiles).get(t.field) != t.type:
            raise errors.UnknownName(
                f"`{t.pipeline}.{t.field}` is not declared as {t.type}", span, "Declare it in pk.pipeline."
            )

    def _private(self, t: ir.Shared, span: ir.Span) -> None:
        tile = next((s for s in self.kernel.shared if s.name == t.field), None)
        if tile is None or tile.type != t.type:
            raise errors.UnknownName(
                f"`{t.name}` is not declared as {t.type}", span, "Declare it at the top: pk.shared(...)."
            )
        if self.role != "consumer" or tile.owner != self.owner:
            here = f"in a {self.role}" if tile.owner == self.owner else f"by the {self.owner} class"
            raise errors.WrongRole(
                f"`{t.name}` is used {here}", span, f"It is private to the consumer of the {tile.owner} class."
            )

    def _signal(self, counter: ir.Signal, names: Names, span: ir.Span, lanes: bool) -> None:
        declared = next((s for s in self.kernel.signals if s.name == counter.signals), None)
        if declared is None:
            raise errors.UnknownName(
                f"unknown signals `{counter.signals}`", span, "Declare them at the top: pk.signals(...)."
            )
        if len(counter.index) != len(declared.shape):
            raise errors.WrongCoordinate(
                f"`{counter.signals}` is indexed by {len(counter.index)} entries and has {len(declared.shape)} "
                "dimensions",
                span,
                "Give one entry for each dimension.",
            )  # fmt: skip
        for e in counter.index:
            if not (lanes and vectors.is_vector(self.type_of(e, names, span))):
                self.integer(f"an index of `{counter.signals}`", e, names, span)

    def _moved(self, s: ir.Do, t: ir.Shared, window: ir.Operand, names: Names) -> None:
        """A copy from or to a window, or to the one that a condition chooses."""
        if isinstance(window, ir.Choose):
            self.condition(window.cond, names, s.span)
            self._moved(s, t, window.x, names)
            self._moved(s, t, window.y, names)
        else:
            self._copy(s, t, cast(ir.Memory, window), names)

    def _copy(self, s: ir.Do, t: ir.Shared, window: ir.Memory, names: Names) -> None:
        rules.moved(s.op, t, self._tensor(window, s.span), s.span)
        self._placed(s.op, window, names, s.span)

    def _window(self, op: str, window: ir.Memory, value: Type, names: Names, span: ir.Span) -> None:
        """A window of a tensor that threads read or write: a register tile's, or one element."""
        tensor = self._tensor(window, span)
        ndim = tensor.ndim if isinstance(tensor, ir.Tensor) else len(tensor.shape)
        if isinstance(value, Tile) and len(value.shape) > 1:
            rules.window_tile(op, value, ndim, tensor.name, span)
        self._placed(op, window, names, span)

    def _tensor(self, window: ir.Memory, span: ir.Span) -> ir.Tensor | ir.Scratch:
        try:
            return self.kernel.tensor(window.tensor)
        except KeyError:
            raise errors.UnknownName(
                f"unknown tensor `{window.tensor}`", span, "It must be a parameter or scratch."
            ) from None

    def _placed(self, op: str, window: ir.Memory, names: Names, span: ir.Span) -> ir.Tensor | ir.Scratch:
        """Coordinate and rank of a window; the tensor."""
        tensor = self._tensor(window, span)
        ndim = tensor.ndim if isinstance(tensor, ir.Tensor) else len(tensor.shape)
        if len(window.coord) != ndim:
            raise errors.WrongCoordinate(
                f"the coordinate of `{tensor.name}` has {len(window.coord)} entries, and it has {ndim} dimensions",
                span,
                "Give one entry for each dimension.",
            )  # fmt: skip
        symmetric = isinstance(tensor, ir.Scratch) or tensor.kind == "parallel"
        if symmetric != (window.rank is not None or window.everyone) or (window.everyone and op.startswith("load")):
            raise errors.WrongOperand(
                f"pk.{rules.spelled(op)} does not say which rank's copy of `{tensor.name}`" if symmetric else
                f"`{tensor.name}` is a Global: it exists on this rank only", span,
                f"Write {tensor.name}[rank]." if symmetric else "Drop the rank.",
            )  # fmt: skip
        for e in (*window.coord, *([window.rank] if window.rank is not None else [])):
            self.integer(f"an entry of the coordinate of `{tensor.name}`", e, names, span)
        return tensor

    # ---------------------------------------------------------------------------------------------- values
    def integer(self, what: str, e: ir.Operand, names: Names, span: ir.Span) -> None:
        """``e`` is an int32 scalar."""
        found = self.type_of(e, names, span)
        if found != INT:
            raise errors.WrongOperand(f"{what} is {found}", span, "It must be an integer.")

    def condition(self, e: ir.Expr, names: Names, span: ir.Span) -> None:
        """``e`` is a bool scalar."""
        found = self.type_of(e, names, span)
        if found != BOOL:
            raise errors.WrongOperand(f"a condition of type {found}", span, "Compare: x != 0.")

    def type_of(self, e: ir.Operand, names: Names, span: ir.Span) -> Type:
        """The type of an expression, having checked it; it must be the one that its node carries."""
        if isinstance(e, ir.Memory | ir.Choose | ir.Shared | ir.Signal):
            raise errors.WrongOperand(f"{e} where a value must stand", span, "Load it first.")
        found = self._type(e, names, span)
        if found != e.type:
            raise errors.WrongDType(
                f"an expression of type {found} is marked {e.type}", span, "Build nodes with their own type."
            )
        return found

    def _type(self, e: ir.Expr, names: Names, span: ir.Span) -> Type:
        if isinstance(e, ir.Const):
            if e.type == INT and not -(2**31) <= e.value < 2**31:
                raise errors.WrongOperand(f"{e.value} does not fit int32", span,
                                          "Integers of kernels are int32, -2147483648 to 2147483647.")  # fmt: skip
            return e.type
        if isinstance(e, ir.Var):
            if e.name not in names:
                raise errors.NameOutOfScope(f"`{e.name}` has no value here", span, "Assign it before.")
            return names[e.name]
        if isinstance(e, ir.Unary):
            x = self.type_of(e.x, names, span)
            return rules.tile_unary(e.op, x, span) if isinstance(x, Tile) else BOOL if e.op == "not" else x
        if isinstance(e, ir.Binary):
            return self._binary(e, names, span)
        if isinstance(e, ir.Select):
            self.condition(e.cond, names, span)
            kinds = {self.type_of(e.x, names, span), self.type_of(e.y, names, span)}
            return kinds.pop() if len(kinds) == 1 else FLOAT if FLOAT in kinds else INT
        if isinstance(e, ir.Call):
            return self._call(e, names, span)
        return e.type

    def _binary(self, e: ir.Binary, names: Names, span: ir.Span) -> Type:
        x, y = self.type_of(e.x, names, span), self.type_of(e.y, names, span)
        if isinstance(x, Tile) or isinstance(y, Tile):
            return rules.tile_binary(e.op, x, y, span)
        if e.op in ("and", "or"):
            self.condition(e.x, names, span)
            self.condition(e.y, names, span)
        if e.op in (*ir.COMPARISONS, "and", "or"):
            return BOOL
        return FLOAT if e.op == "/" or FLOAT in (x, y) else INT

    def _call(self, e: ir.Call, names: Names, span: ir.Span) -> Type:
        self._operands(e, names)
        memory = (ir.Memory, ir.Choose, ir.Shared, ir.Signal)
        types = [None if isinstance(o, memory) else self.type_of(o, names, span) for o in e.operands]
        if e.op in ("load_global", "load_scalar"):
            self._window(e.op, cast(ir.Memory, e.operands[0]), e.type, names, span)
        elif e.op == "load_elements":
            window = cast(ir.Memory, e.operands[0])
            return vectors.elements("load", self._lanes(e, window, names), window, (), span)
        return results.result(e, types, lambda name: self.kernel.tensor(name).dtype)
