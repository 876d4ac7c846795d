"""Statements: control flow folded on Python values and kept on run-time ones, roles, stages, helpers."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, cast

from pk import errors
from pk.dsl.arguments import integer
from pk.dsl.expressions import Expressions, _words
from pk.dsl.scope import Frame
from pk.dsl.source import Source
from pk.dsl.values import (
    CommunicatorValue,
    RangeValue,
    RanksFrom,
    RoleValue,
    StageMethod,
    StageValue,
    StaticRange,
    TasksValue,
    describe,
    is_expr,
)
from pk.dsl.while_loops import read_while
from pk.ir import communicator, index
from pk.ir import nodes as ir
from pk.ir.rules import listed
from pk.ir.split import statements, walk
from pk.ir.types import INT

Flow = Literal["continue", "return"] | None
"""How a block ended, if not by running to its end."""

ADVICE: dict[type[ast.stmt], str] = {
    ast.Break: "Give the loop the number of turns it needs, or guard the rest with an `if`.",
    ast.FunctionDef: "Define helpers outside the kernel, with @pk.function.",
    ast.ClassDef: "Define classes outside the kernel.",
    ast.Try: "Kernels have no exceptions; use `assert`.",
    ast.Raise: 'Use `assert condition, "text"`.',
    ast.Import: "Import at the top of the file.",
    ast.ImportFrom: "Import at the top of the file.",
    ast.Global: "Helpers return what they compute.",
    ast.Nonlocal: "Helpers return what they compute.",
    ast.Delete: "Drop the line: names end with their block.",
    ast.AnnAssign: "Drop the annotation.",
    ast.Match: "Use if and elif.",
}


class Reader(Expressions):
    """Reads a kernel function into its builder."""

    tail = False  # whether nothing follows the block being read in its loop's body: where a branch may `continue`

    # ------------------------------------------------------------------------------------------- blocks
    def block(self, stmts: list[ast.stmt]) -> Flow:
        """Read statements in order."""
        for i, stmt in enumerate(stmts):
            if isinstance(stmt, ast.If):
                flow, done = self._if(stmt, stmts[i + 1 :])
                if done or flow is not None:
                    return flow
                continue
            flow = self._statement(stmt)
            if flow is not None:
                return flow
        return None

    def _statement(self, stmt: ast.stmt) -> Flow:
        method = getattr(self, f"_do_{type(stmt).__name__.lower()}", None)
        if method is None:
            raise self.unsupported(
                stmt, f"`{_words(type(stmt).__name__)}` is not part of the kernel language", ADVICE.get(type(stmt), "")
            )
        return cast(Flow, method(stmt))

    def _do_pass(self, stmt: ast.Pass) -> None:
        pass

    def _do_expr(self, stmt: ast.Expr) -> None:
        if isinstance(stmt.value, ast.Constant) and isinstance(stmt.value.value, str | types.EllipsisType):
            return
        value = self.eval(stmt.value)
        if value is not None:
            what = (
                "a call whose result is dropped"
                if isinstance(stmt.value, ast.Call)
                else "an expression that does nothing"
            )
            raise self.unsupported(stmt, what, "Bind the value to a name, or drop the line.")

    # --------------------------------------------------------------------------------------- assignment
    def _do_assign(self, stmt: ast.Assign) -> None:
        self.named_now = stmt.value
        value = self.eval(stmt.value)
        for target in stmt.targets:
            self._assign_to(target, value, stmt)

    def _do_augassign(self, stmt: ast.AugAssign) -> None:
        if not isinstance(stmt.target, ast.Name):
            raise self.unsupported(stmt, "an update of something that is no name", "Update a name.")
        name = ast.copy_location(ast.Name(stmt.target.id, ast.Load()), stmt.target)
        value = self.arithmetic(type(stmt.op), self.eval(name), self.eval(stmt.value), stmt)
        self.assign(stmt.target.id, value, self.span(stmt))

    def _assign_to(self, target: ast.expr, value: Any, stmt: ast.stmt) -> None:
        whole = stmt.value if isinstance(stmt, ast.Assign) and target in stmt.targets else None
        if value is None and isinstance(whole, ast.Call):
            raise errors.WrongOperand(
                "a call that yields nothing is bound to a name", self.span(stmt), "Drop the `name =`."
            )
        if isinstance(target, ast.Name):
            self.assign(target.id, value, self.span(stmt))
        elif isinstance(target, ast.Tuple | ast.List):
            self._unpack(target, value, stmt)
        else:
            advice = (
                "Tiles are written with pk.store, tensors with pk.store_async."
                if isinstance(target, ast.Subscript)
                else ""
            )
            raise self.unsupported(target, "an assignment to something that is no name", advice or "Assign to a name.")

    def _unpack(self, target: ast.Tuple | ast.List, value: Any, stmt: ast.stmt) -> None:
        if any(isinstance(t, ast.Starred) for t in target.elts):
            raise self.unsupported(target, "`*` on the left of an assignment", "Name every entry.")
        if not isinstance(value, tuple | list) or len(value) != len(target.elts):
            raise errors.WrongOperand(
                f"{len(target.elts)} names and {describe(value)} on the right", self.span(stmt),
                "Give as many values as names.",
            )  # fmt: skip
        values = list(value)
        names = {t.id for t in target.elts if isinstance(t, ast.Name)}
        taken = {self.frame.names[n].value.name for n in names if n in self.frame.names and self._own(n)}
        for i, v in enumerate(values):  # all are evaluated before the first is assigned
            if is_expr(v) and any(isinstance(e, ir.Var) and e.name in taken for e in walk((v,))):
                values[i] = self.temporary("old", v, self.span(stmt))
        for t, v in zip(target.elts, values, strict=True):
            self._assign_to(t, v, stmt)

    def _own(self, name: str) -> bool:
        found = self.frame.names[name]
        return found.owner is not None and found.owner == self.b.owner and isinstance(found.value, ir.Var)

    # ----------------------------------------------------------------------------------------- branches
    def _if(self, stmt: ast.If, rest: list[ast.stmt]) -> tuple[Flow, bool]:
        """An ``if``, with the rest of the block where a branch ends in ``continue``: (flow, rest was read)."""
        cond = self.truth(self.eval(stmt.test), stmt.test)
        if not is_expr(cond):
            return self.block([*(stmt.body if cond else stmt.orelse), *rest]), True
        then, orelse, done = stmt.body, stmt.orelse, False
        for branch in (then, orelse):
            if branch and isinstance(branch[-1], ast.Continue):
                self._may_continue(branch[-1])
                if not self.tail:
                    raise self._bad_continue(branch[-1])
                done = True
        if done:
            then = then[:-1] if isinstance(then[-1], ast.Continue) else [*then, *rest]
            orelse = orelse[:-1] if orelse and isinstance(orelse[-1], ast.Continue) else [*orelse, *rest]
        self.b.begin()
        self.materialise(self.assigned([*then, *orelse]))
        with self._tail(self.tail and (done or not rest)):
            blocks = [self._branch(part, stmt) for part in (then, orelse)]
        if blocks[0] or blocks[1]:
            self.b.emit(ir.If(cond, blocks[0], blocks[1], self.span(stmt.test)))
        return None, done

    def _branch(self, stmts: list[ast.stmt], stmt: ast.If) -> ir.Block:
        before = dict(self.frame.names)
        with self.b.nested() as block:
            flow = self.block(stmts)
        self.no_return(flow, "a run-time branch")
        if flow == "continue":
            raise self._bad_continue(stmt)
        self.leave(before, "It is first bound inside a branch and ends with it: bind `{name}` before the `if`.")
        return tuple(block)

    @contextmanager
    def _tail(self, tail: bool) -> Iterator[None]:
        outer, self.tail = self.tail, tail
        try:
            yield
        finally:
            self.tail = outer

    def _may_continue(self, node: ast.stmt) -> None:
        if self.b.role is not None:
            raise self.unsupported(
                node, "`continue` in a role block", "Only shared code may continue; guard the rest with an `if`."
            )

    def _bad_continue(self, node: ast.AST) -> errors.UnsupportedSyntax:
        return self.unsupported(
            node, "`continue` deep inside branches", "Put `if condition: continue` directly in the loop's body."
        )

    def _do_continue(self, stmt: ast.Continue) -> Flow:
        self._may_continue(stmt)
        return "continue"

    def _do_assert(self, stmt: ast.Assert) -> None:
        cond = self.truth(self.eval(stmt.test), stmt.test)
        text = self.eval(stmt.msg) if stmt.msg else ast.unparse(stmt.test)
        if not isinstance(text, str):
            raise errors.NotConstant(
                f"the text of an assert is {describe(text)}", self.span(stmt), "Use a plain string."
            )
        if is_expr(cond):
            self.b.emit(ir.Assert(cond, text, self.span(stmt)))
        elif not cond:
            raise errors.WrongOperand(f"assert failed: {text}", self.span(stmt), "It is false for these constants.")

    # -------------------------------------------------------------------------------------------- loops
    def _do_for(self, stmt: ast.For) -> Flow:
        if stmt.orelse:
            raise self.unsupported(stmt.orelse[0], "`else` of a loop", "Write the lines after the loop.")
        over = self.eval(stmt.iter)
        if isinstance(over, StaticRange | tuple | list):
            return self._unroll(stmt, over.values if isinstance(over, StaticRange) else over)
        self.b.begin()
        if isinstance(over, TasksValue):
            self._tasks(stmt, over)
        elif isinstance(over, RangeValue):
            self._loop(stmt, over.start, over.stop, lambda var: var)
        elif isinstance(over, RanksFrom):
            self._loop(stmt, index.lift(0), over.count, lambda var: _rank(over, var, self.span(stmt.iter)))
        else:
            raise errors.WrongOperand(
                f"a loop over {describe(over)}", self.span(stmt.iter),
                "Loop over range, pk.range, pk.static_range, pk.ranks_from, pk.tasks or a tuple.",
            )  # fmt: skip
        return None

    def _do_while(self, stmt: ast.While) -> None:
        read_while(self, stmt)

    def _unroll(self, stmt: ast.For, values: Any) -> Flow:
        before = dict(self.frame.names)
        for value in values:
            self._assign_loop_names(stmt.target, value)
            with self._tail(True):
                flow = self.block(stmt.body)
            self.no_return(flow, "a loop")
        names = _target_names(stmt.target)
        after = self.frame.names
        self.leave({n: after[n] for n in before if n in after}, _GONE_LOOP, names, ended=False)
        return None

    def _assign_loop_names(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.bind(target.id, value, self.span(target))
        elif isinstance(target, ast.Tuple) and isinstance(value, tuple | list) and len(value) == len(target.elts):
            for t, v in zip(target.elts, value, strict=True):
                self._assign_loop_names(t, v)
        else:
            raise errors.WrongOperand(
                f"the loop yields {describe(value)}", self.span(target), "Give as many names as values."
            )

    def _loop(self, stmt: ast.For, start: Any, stop: Any, value: Callable[[ir.Var], ir.Expr]) -> None:
        """A run-time loop; ``value``: what the user's variable is in terms of the counter."""
        if not isinstance(stmt.target, ast.Name):
            raise self.unsupported(stmt.target, "a loop over integers with several names", "Use one name.")
        name = stmt.target.id
        span = self.span(stmt)
        derived = value(ir.Var("", INT)) != ir.Var("", INT)
        self.materialise(_without(self.assigned(stmt.body), {name}))
        before = dict(self.frame.names)
        base = "i" if name == "_" else f"{name}_i" if derived else name
        with self.b.loop_name(base) as counter:
            var = ir.Var(counter, INT, self.span(stmt.target))
            with self.b.nested() as block:
                self._loop_body(stmt, [(name, value(var))])
            self.b.emit(ir.For(var, start, self._fixed(stop, block), tuple(block), span))
        self.leave(before, _GONE_LOOP, {name})

    def _fixed(self, stop: ir.Expr, body: list[ir.Statement]) -> ir.Expr:
        """The end of a loop, as it is before the first turn: a copy if the body changes what it is made of."""
        changed = {s.var.name for s in statements(tuple(body)) if isinstance(s, ir.Assign)}
        if any(isinstance(e, ir.Var) and e.name in changed for e in walk((stop,))):
            return self.temporary("stop", stop, stop.span)
        return stop

    def _loop_body(self, stmt: ast.For, names: list[tuple[str, ir.Expr]]) -> None:
        for name, value in names:
            if isinstance(value, ir.Var):
                self.bind(name, value, self.span(stmt.target))
            else:
                self.bind(name, None, self.span(stmt.target))
                self.assign(name, value, self.span(stmt.target))
        with self._tail(True):
            flow = self.block(stmt.body)
        self.no_return(flow, "a loop")

    def _tasks(self, stmt: ast.For, over: TasksValue) -> None:
        span = self.span(stmt)
        if self.b.role is not None or self.b.tasks:
            where = "a role block" if self.b.role is not None else "another task loop"
            raise errors.WrongRole(
                f"pk.tasks inside {where}", span, "Task loops stand in shared code; use pk.range here."
            )
        targets = stmt.target.elts if isinstance(stmt.target, ast.Tuple) else [stmt.target]
        if len(targets) != len(over.extents) or not all(isinstance(t, ast.Name) for t in targets):
            raise errors.WrongOperand(
                f"{len(targets)} names for the {len(over.extents)} extents of pk.tasks", self.span(stmt.target),
                "Give one name for each extent.",
            )  # fmt: skip
        names = [cast(ast.Name, t).id for t in targets]
        self.materialise(_without(self.assigned(stmt.body), set(names)))
        before = dict(self.frame.names)
        variables, bindings = [], []
        for name, extent in zip(names, over.extents, strict=True):
            base = f"{name}_i" if isinstance(extent, RanksFrom) else name
            var = ir.Var(self.b.unique(base), INT, self.span(stmt.target))
            variables.append(var)
            bindings.append((name, _rank(extent, var, self.span(stmt.iter)) if isinstance(extent, RanksFrom) else var))
        extents = tuple(e.count if isinstance(e, RanksFrom) else e for e in over.extents)
        if self.b.in_warp:
            communicator.dealt(over.dynamic, over.cluster, span)
        self.b.tasks = True
        with self.b.nested() as block:
            self._loop_body(stmt, bindings)
        self.b.tasks = False
        self.b.emit(ir.Tasks(tuple(variables), extents, tuple(block), over.group, span, over.dynamic, over.cluster))
        self.leave(before, _GONE_LOOP, names)

    # ----------------------------------------------------------------------------------------- with blocks
    def _do_with(self, stmt: ast.With) -> Flow:
        return self._with(stmt.items, stmt)

    def _with(self, items: list[ast.withitem], stmt: ast.With) -> Flow:
        if not items:
            with self._tail(False):
                return self.block(stmt.body)
        item, rest = items[0], items[1:]
        value, span = self.eval(item.context_expr), self.span(item.context_expr)
        if isinstance(value, StageMethod):
            return self._stage(value, item, rest, stmt)
        if item.optional_vars is not None:
            raise self.unsupported(
                item.optional_vars, f"`as` after {describe(value)}", "Only fill and drain give a value."
            )
        if isinstance(value, RoleValue):
            self._role(value, rest, stmt, span)
        elif isinstance(value, CommunicatorValue):
            self._communicator(value, rest, stmt, span)
        else:
            raise self.unsupported(
                item.context_expr, f"`with` on {describe(value)}",
                "Use pk.loader(), pk.consumer(), pk.storer(), pk.communicator(), p.fill() or p.drain().",
            )  # fmt: skip
        return None

    def _role(self, role: RoleValue, rest: list[ast.withitem], stmt: ast.With, span: ir.Span) -> None:
        if self.b.place != "shared":
            advice = "Roles stand side by side in shared code." if self.b.role else communicator.NO_ROLES
            raise errors.WrongRole(f"pk.{role.kind} inside a {self.b.place}", span, advice)
        self.b.begin()
        before = dict(self.frame.names)
        made = ir.Role(role.kind, (), role.warpgroups, span, role.teams, role.stagger)
        with self.b.in_role(made) as block:
            flow = self._with(rest, stmt)
        self.no_return(flow, "a role block")
        self.b.emit(replace(made, body=tuple(block)))
        self.leave(
            before, f"It is private to the {role.kind} that bound it: compute `{{name}}` in shared code, or again here."
        )

    def _communicator(self, value: CommunicatorValue, rest: list[ast.withitem], stmt: ast.With, span: ir.Span) -> None:
        if self.b.depth or self.b.role is not None or self.b.where.startswith("communicator"):
            raise errors.WrongRole(communicator.INSIDE, span, communicator.TOP)
        warp = value.sms is None
        if warp and self.b.communicator is not None:
            raise communicator.twice(self.b.communicator, span)
        sms = ir.const(0) if warp else self.b.closed(integer("sms=", value.sms, span), "sms=", span)
        self.b.begin()
        before = dict(self.frame.names)
        with self.b.in_communicator_warp(span) if warp else self.b.in_communicator() as block:
            self.no_return(self._with(rest, stmt), "the communicator")
        if warp:
            self.b.emit(ir.Role("communicator", tuple(block), 0, span))
        else:
            self.b.communicators.append(ir.Communicator(sms, tuple(block), span, value.joins))
        self.leave(before, "It belongs to the communicator: compute `{name}` at the top of the kernel, or again here.")

    def _stage(self, value: StageMethod, item: ast.withitem, rest: list[ast.withitem], stmt: ast.With) -> Flow:
        pipeline, mode, span = value.pipeline, value.mode, self.span(item.context_expr)
        if not value.called:
            raise errors.WrongOperand(f"`{mode}` is not called", span, f"Write `with {pipeline.name}.{mode}() as s:`.")
        self._may_stage(value, span)
        stage = StageValue(pipeline, mode)
        if item.optional_vars is not None:
            if not isinstance(item.optional_vars, ast.Name):
                raise self.unsupported(
                    item.optional_vars, "a stage bound to several names", "Write `as s`, then s.name."
                )
            self.bind(item.optional_vars.id, stage, span)
        with self.b.in_stage(pipeline.name, mode) as block:
            flow = self._with(rest, stmt)
        stage.held = False
        if flow is not None:
            raise self.unsupported(stmt, f"`{flow}` inside a stage", "Put it after the `with`.")
        self.b.emit(ir.Stage(pipeline.name, mode, tuple(block), span))
        return None

    def _may_stage(self, value: StageMethod, span: ir.Span) -> None:
        pipeline, mode = value.pipeline, value.mode
        allowed = {"fill": ("loader", "consumer", "storer"), "drain": ("consumer", "storer")}[mode]
        if self.b.role is None or self.b.role.kind not in allowed:
            here = "outside role blocks" if self.b.place == "shared" else f"in a {self.b.place}"
            advice = communicator.NO_ROLES if self.b.in_warp else f"A pipeline is {mode}ed by a {listed(allowed)}."
            raise errors.WrongRole(f"`{pipeline.name}.{mode}()` may not stand {here}", span, advice)
        if pipeline.name in self.b.held:
            raise errors.PipelineMisused(
                f"a stage of `{pipeline.name}` inside a stage of `{pipeline.name}`",
                span,
                "Leave the first `with` before the next.",
            )
        where = self.b.where
        if pipeline.owner not in (None, where):
            raise errors.PipelineMisused(
                f"`{pipeline.name}` is used by the {pipeline.owner} class and by the {where} class", span,
                "Shared memory belongs to one class of blocks: declare a second pipeline.",
            )  # fmt: skip
        pipeline.owner = where

    # ------------------------------------------------------------------------------------------- helpers
    def _do_return(self, stmt: ast.Return) -> Flow:
        if self.frame.caller is None and stmt.value is not None:
            raise self.unsupported(stmt, "a kernel that returns a value", "Kernels write their results to tensors.")
        self.frame.result, self.returned = self.eval(stmt.value) if stmt.value is not None else None, stmt
        return "return"

    def expand(self, fn: Any, args: list[Any], kwargs: dict[str, Any], node: ast.Call) -> Any:
        """Read the body of helper ``fn`` here; its result is the value of the call."""
        span, source = self.span(node), Source(fn.fn)
        try:
            bound = inspect.signature(fn.fn).bind(*args, **kwargs)
        except TypeError as e:
            raise errors.WrongOperand(f"{source.name}: {e}", span, "Call it as it is defined.") from None
        bound.apply_defaults()
        with self._in_frame(Frame(source, self.frame), span) as frame:
            for name, value in bound.arguments.items():
                self._parameter(name, value, span)
            with self._tail(False):
                self.block(frame.source.tree.body)
            for binding in frame.names.values():  # what the helper made has no other name left
                if binding.owner == self.b.owner and isinstance(binding.value, ir.Var):
                    self.fresh.add(binding.value.name)
        return frame.result

    @contextmanager
    def _in_frame(self, frame: Frame, span: ir.Span) -> Iterator[Frame]:
        caller: Frame | None = self.frame
        while caller is not None:
            if caller.source.fn is frame.source.fn:
                raise errors.UnsupportedSyntax(
                    f"`{frame.source.name}` calls itself", span, "Helpers are expanded in place: use a loop."
                )
            caller = caller.caller
        outer, self.frame = self.frame, frame
        deep, self._deep = self._deep, 0
        try:
            yield frame
        except errors.CompileError as e:
            raise e.called_at(span) from None
        finally:
            self.frame, self._deep = outer, deep

    def _parameter(self, name: str, value: Any, span: ir.Span) -> None:
        """Bind an argument: by reference, but what would have to be computed again gets a variable."""
        simple = not is_expr(value) or isinstance(value, ir.Var | ir.Param | ir.Dim | ir.Rank | ir.World | ir.Const)
        if simple and not (isinstance(value, ir.Var) and value.name in self.fresh):
            self.bind(name, index.lower(value) if is_expr(value) else value, span)
        else:
            self.assign(name, value, span)


_GONE_LOOP = "It is first bound inside a loop and ends with it: bind `{name}` before the loop."


def _rank(over: RanksFrom, var: ir.Var, span: ir.Span) -> ir.Expr:
    """The rank that turn ``var`` of ``ranks_from`` stands for."""
    turn = index.binary("+", over.start, var, span)
    return index.lift(index.binary("%", turn, ir.World(span=span), span), span)


def _target_names(target: ast.expr) -> set[str]:
    return {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}


def _without(names: dict[str, ast.AST], drop: set[str]) -> dict[str, ast.AST]:
    return {n: node for n, node in names.items() if n not in drop}
