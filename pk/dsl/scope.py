"""Names: what they are bound to, how they come and go with loops, branches and roles."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from pk import errors
from pk.dsl import language
from pk.dsl.builder import Builder
from pk.dsl.source import MISSING, Source
from pk.dsl.values import (
    At,
    Binding,
    ChosenValue,
    CopyValue,
    Declared,
    Gone,
    PipelineValue,
    ScratchValue,
    SharedValue,
    SignalsValue,
    TensorValue,
    describe,
    is_expr,
    is_tile,
)
from pk.ir import nodes as ir
from pk.ir.index import lift, scalar_type
from pk.ir.split import walk
from pk.ir.types import Tile, Type


class Frame:
    """The names of one function being read: the kernel or a helper expanded in it."""

    def __init__(self, source: Source, caller: Frame | None = None) -> None:
        self.source, self.caller = source, caller
        self.names: dict[str, Binding] = {}
        self.gone: dict[str, Gone] = {}
        self.result: Any = None


class Scope:
    """Binding and looking up, on top of a builder.  ``frame`` is the function being read now."""

    def __init__(self, builder: Builder, source: Source) -> None:
        self.b = builder
        self.frame = Frame(source)
        self._free: dict[tuple[object, ...], list[str]] = {}  # variables of blocks that have ended, to be used again
        self.fresh: set[str] = set()  # variables of helpers that have returned: the first name to take one owns it

    def span(self, node: ast.AST) -> ir.Span:
        """Where ``node`` stands in the user's file."""
        return self.frame.source.span(node)

    # -------------------------------------------------------------------------------------------- look up
    def lookup(self, node: ast.Name) -> Any:
        """The value of a name.  Raises UnknownName, or NameOutOfScope if it had one."""
        name = node.id
        found = self.frame.names.get(name)
        if found is not None:
            if self.b.where.startswith("communicator") and found.where not in ("prologue", self.b.where):
                raise errors.NameOutOfScope(
                    f"`{name}` belongs to the {found.where} class and is used in the communicator",
                    self.span(node),
                    "Compute it inside the communicator, or at the top of the kernel, before any loop.",
                )
            return found.value
        if name in self.frame.gone:
            raise errors.NameOutOfScope(f"`{name}` does not exist here", self.span(node), self.frame.gone[name].why)
        value = self.frame.source.outside(name)
        if value is not MISSING:
            if (home := self.frame.source.home(name)) is not None:
                self.b.captures.variable(home, name, value)
            return value
        raise errors.UnknownName(
            f"unknown name `{name}`", self.span(node), self._suggest(name) or "Bind it before this line."
        )

    def _suggest(self, name: str) -> str:
        if name in language.__all__:
            return f"Did you mean `pk.{name}`?"
        known = [*self.frame.names, *(n for n in self.frame.source.fn.__globals__ if not n.startswith("_"))]
        return errors.nearest(name, known).strip()

    # ----------------------------------------------------------------------------------------------- bind
    def assign(self, name: str, value: Any, span: ir.Span) -> None:
        """``name = value``."""
        value = self.named(value, name)
        found = self.frame.names.get(name)
        if found is not None and found.owner is not None and found.owner == self.b.owner:
            self._replace(name, found, value, span)
        elif is_expr(value):
            self._create(name, value, span)
        else:
            self.bind(name, self._settled(name, value, span), span)

    def _settled(self, name: str, value: Any, span: ir.Span) -> Any:
        """A tuple as it is bound: its tiles are computed here and now, and what a helper made for it stays its own."""
        if isinstance(value, tuple):
            return tuple(self._settled(name, v, span) for v in value)
        if isinstance(value, ir.Var):
            self.fresh.discard(value.name)
        elif is_tile(value):
            return self.temporary(name, value, span)
        return value

    def temporary(self, base: str, value: ir.Expr, span: ir.Span) -> ir.Var:
        """A variable of our own, holding ``value`` as it is now."""
        var = ir.Var(self.b.unique(base), value.type, span)
        self.b.emit(ir.Assign(var, value, span))
        return var

    def accumulate_into(self, name: str, span: ir.Span) -> None:
        """Before an ``mma`` into ``name``: a tile that belongs to somebody else (a helper's argument) is copied."""
        found = self.frame.names.get(name)
        if found is None or not isinstance(found.value, ir.Var) or not is_tile(found.value):
            return
        if found.owner != self.b.owner and found.value.name not in self.fresh:
            self.bind(name, self.temporary(name, found.value, span), span, self.b.owner)
        self._refuse_stale(name, found.value, span)

    def bind(self, name: str, value: Any, span: ir.Span, owner: str | None = None) -> None:
        """Let ``name`` stand for ``value`` without storing anything."""
        self.frame.names[name] = Binding(value, span, owner, self.b.where)
        self.frame.gone.pop(name, None)

    def named(self, value: Any, name: str) -> Any:
        """A declaration takes the first name bound to it."""
        if (
            isinstance(value, Declared)
            and not value.name
            and isinstance(value, PipelineValue | SignalsValue | ScratchValue)
        ):
            self.b.declare(value, name)
        if isinstance(value, SharedValue):
            value.name = value.name or name  # made unique if it turns out to be in no pipeline
        if isinstance(value, ScratchValue):
            assert value.dtype is not None
            return TensorValue(value.name, "scratch", value.dtype, value.shape)
        return value

    def _create(self, name: str, value: ir.Expr, span: ir.Span) -> None:
        """A new variable."""
        if isinstance(value, ir.Var) and value.name in self.fresh:
            self.fresh.discard(value.name)  # computed by a helper and seen by nobody else
            self.bind(name, value, span, self.b.owner)
            return
        free = self._free.get(self._pool(name, value.type, self.b.where, self.b.owner))
        var = ir.Var(free.pop() if free else self.b.unique(name), value.type, span)
        self.b.emit(ir.Assign(var, value, span))
        self.bind(name, var, span, self.b.owner)

    def _replace(self, name: str, found: Binding, value: Any, span: ir.Span) -> None:
        """A new value for an existing variable."""
        var: ir.Var = found.value
        number = isinstance(value, int | float)
        if not (is_expr(value) or number):
            raise errors.NameChangesType(
                f"`{name}` is {_kind(var.type)} and is assigned {errors.shown(value)}",
                span,
                "A run-time value keeps its type for life: use another name.",
            )
        if number and var.type == scalar_type(0.0) and not isinstance(value, float | bool):
            value = float(value)
        kind = scalar_type(value) if number else value.type
        if kind != var.type:
            raise errors.NameChangesType(
                f"`{name}` is {_kind(var.type)} and is assigned {_kind(kind)}",
                span,
                "A name keeps one shape and dtype for life: use another name, or start with the type it shall have.",
            )
        self._refuse_stale(name, var, span)
        if value != var:
            self.b.emit(ir.Assign(ir.Var(var.name, var.type, span), lift(value, span), span))

    def _refuse_stale(self, name: str, var: ir.Var, span: ir.Span) -> None:
        """A tuple or copy that was made of a variable must not see its new value."""
        for other, binding in self.frame.names.items():
            if other != name and not (is_expr(binding.value) and binding.owner) and _mentions(binding.value, var.name):
                raise errors.NameChangesType(
                    f"`{name}` is assigned while `{other}` still stands for its old value",
                    span,
                    f"Make `{other}` again after this line under another name, or use another name here.",
                )

    # ------------------------------------------------------------------------------------------- regions
    def assigned(self, stmts: Iterable[ast.stmt]) -> dict[str, ast.AST]:
        """Names that statements assign or accumulate into (``pk.mma``), loop and ``with`` names not counted."""
        found: dict[str, ast.AST] = {}
        for node in (n for top in stmts for n in ast.walk(top)):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AugAssign):
                targets = [node.target]
            elif isinstance(node, ast.Call) and node.args and self.is_mma(node.func):
                targets = node.args[:1]
            for leaf in (n for target in targets for n in ast.walk(target)):
                if isinstance(leaf, ast.Name):
                    found.setdefault(leaf.id, leaf)
        return found

    def is_mma(self, fn: ast.expr) -> bool:
        """Whether an expression names ``pk.mma``, whatever the user calls it."""
        if isinstance(fn, ast.Attribute) and isinstance(fn.value, ast.Name):
            return getattr(self.frame.source.outside(fn.value.id), fn.attr, None) is language.mma
        return isinstance(fn, ast.Name) and self.frame.source.outside(fn.id) is language.mma

    def materialise(self, names: dict[str, ast.AST]) -> None:
        """Before a run-time loop or branch: names assigned in it become variables of this role."""
        for name, node in names.items():
            found = self.frame.names.get(name)
            if found is None or (found.owner is not None and found.owner == self.b.owner):
                continue
            if not (is_expr(found.value) or isinstance(found.value, int | float)):
                raise errors.NameChangesType(
                    f"`{name}` is assigned inside a run-time loop or branch, and stands for {describe(found.value)} "
                    "before it",
                    self.span(node),
                    "Only scalars and register tiles change at run time: use another name.",
                )
            var = ir.Var(self.b.unique(name), lift(found.value).type, found.span)
            self.b.emit(ir.Assign(var, lift(found.value, found.span), found.span))
            self.bind(name, var, found.span, self.b.owner)

    def leave(
        self, before: dict[str, Binding], why: str, loop_names: Iterable[str] = (), *, ended: bool = True
    ) -> None:
        """After a region: forget the names first bound in it, restore the others.

        ``ended``: it was a block of its own, so that its variables may be used again.
        """
        for name, binding in self.frame.names.items():
            if name not in before or name in loop_names:
                self.frame.gone[name] = Gone(why.format(name=name), binding.span)
            if ended and binding.owner is not None and before.get(name) is not binding:
                pool = self._pool(name, binding.value.type, binding.where, binding.owner)
                self._free.setdefault(pool, []).append(binding.value.name)
        self.frame.names = {n: b for n, b in before.items() if n not in loop_names}

    @staticmethod
    def _pool(name: str, kind: Type, where: str, owner: str) -> tuple[object, ...]:
        """Which variables may take each other's place: same name, type and role."""
        return name, kind, where, owner.split(maxsplit=1)[0]


def _mentions(value: Any, name: str) -> bool:
    if isinstance(value, tuple | list):
        return any(_mentions(v, name) for v in value)
    if isinstance(value, At):
        return _mentions(value.entries, name)
    if isinstance(value, CopyValue):
        return _mentions(value.rank, name)
    if isinstance(value, ChosenValue):
        return any(_mentions(v, name) for v in (value.cond, value.x, value.y))
    return is_expr(value) and any(isinstance(v, ir.Var) and v.name == name for v in walk((value,)))


def _kind(t: Type) -> str:
    return f"a register tile {t.shape} {t.dtype}" if isinstance(t, Tile) else f"a scalar {t}"
