"""Expressions: partial evaluation of what the user wrote.

Where every operand is a Python value the result is one; otherwise it is an IR expression.  User code is never called,
apart from properties of captured Python objects and functions of ``math``.
"""

from __future__ import annotations

import ast
import math
import operator
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from pk import errors
from pk.dsl import calls, language, tiles
from pk.dsl.arguments import integer
from pk.dsl.scope import Scope
from pk.dsl.values import (
    ChosenValue,
    CopyValue,
    PipelineValue,
    SharedValue,
    StageMethod,
    StageValue,
    TensorValue,
    describe,
    is_expr,
    is_folded,
    is_scalar,
    is_tile,
    plain,
    tensor_of,
)
from pk.ir import index, rules
from pk.ir import nodes as ir
from pk.ir.types import FLOAT, DType, Tile

BINARY: dict[type[ast.operator], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", operator.add), ast.Sub: ("-", operator.sub), ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv), ast.FloorDiv: ("//", operator.floordiv), ast.Mod: ("%", operator.mod),
    ast.Pow: ("**", operator.pow), ast.LShift: ("<<", operator.lshift), ast.RShift: (">>", operator.rshift),
    ast.BitAnd: ("&", operator.and_), ast.BitOr: ("|", operator.or_), ast.BitXor: ("^", operator.xor),
    ast.MatMult: ("@", operator.matmul),
}  # fmt: skip

COMPARE: dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Lt: ("<", operator.lt), ast.LtE: ("<=", operator.le), ast.Gt: (">", operator.gt), ast.GtE: (">=", operator.ge),
    ast.Eq: ("==", operator.eq), ast.NotEq: ("!=", operator.ne), ast.Is: ("is", operator.is_),
    ast.IsNot: ("is not", operator.is_not), ast.In: ("in", lambda x, y: x in y),
    ast.NotIn: ("not in", lambda x, y: x not in y),
}  # fmt: skip

DEEPEST = 100  # levels of an expression: Python's parser, which reads the simulator's text, stops at 200

DIMS = {"cols": -1, "rows": -2, "depth": -3, "batch": -4}

ADVICE: dict[type[ast.AST], str] = {
    ast.ListComp: "Write a loop over pk.static_range, or the values as a tuple.",
    ast.GeneratorExp: "Write a loop over pk.static_range, or the values as a tuple.",
    ast.SetComp: "Write a loop over pk.static_range.",
    ast.DictComp: "Write a loop over pk.static_range.",
    ast.Lambda: "Write a helper with @pk.function.",
    ast.List: "Use a tuple.",
    ast.Set: "Use a tuple.",
    ast.Dict: "Use names or tuples.",
    ast.NamedExpr: "Assign in a line of its own.",
    ast.JoinedStr: "Use a plain string.",
    ast.Await: "Kernels have no coroutines.",
    ast.Yield: "A helper returns what it computes.",
}


class Expressions(Scope):
    """Evaluates expressions."""

    named_now: ast.expr | None = None  # the right-hand side of the assignment that is being read
    returned: ast.Return | None = None  # the `return` that was read last
    _deep = 0  # expressions around the one that is being read, in its statement

    def unsupported(self, node: ast.AST, what: str = "", advice: str = "") -> errors.UnsupportedSyntax:
        """The error for syntax outside the language, to be raised."""
        what = what or f"`{_words(type(node).__name__)}` is not part of the kernel language"
        return errors.UnsupportedSyntax(what, self.span(node), advice or ADVICE.get(type(node), "Write it without."))

    def no_return(self, flow: str | None, where: str) -> None:
        """Raise UnsupportedSyntax if ``flow``, by which a block in ``where`` ended, is the `return` read last."""
        if flow != "return" or self.returned is None:
            return
        kernel = "Drop it, and guard what would follow with an `if`: a kernel ends when all its statements are done."
        advice = kernel if self.frame.caller is None else "Return once, at the end of the helper."
        raise self.unsupported(self.returned, f"`return` in {where}", advice)

    def eval(self, node: ast.expr) -> Any:
        """The value of an expression."""
        method = getattr(self, f"_eval_{type(node).__name__.lower()}", None)
        if method is None:
            raise self.unsupported(node)
        if self._deep >= DEEPEST:  # what comes later, Python's own compiler included, has no room for more either
            raise self.unsupported(
                node, f"an expression more than {DEEPEST} operations deep", "Bind parts of it to names, a line each."
            )
        self._deep += 1
        try:
            return plain(method(node))
        finally:
            self._deep -= 1

    def _eval_constant(self, node: ast.Constant) -> Any:
        return node.value

    def _eval_name(self, node: ast.Name) -> Any:
        return self.lookup(node)

    def _eval_tuple(self, node: ast.Tuple) -> tuple[Any, ...]:
        return tuple(self.arguments(node.elts))

    def arguments(self, nodes: list[ast.expr]) -> list[Any]:
        """Values of a list of expressions, starred ones spread."""
        found: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                value = self.eval(node.value)
                if not isinstance(value, tuple | list):
                    raise errors.WrongOperand(
                        f"`*` spreads a tuple, and got {describe(value)}", self.span(node), "Drop the `*`."
                    )
                found.extend(value)
            else:
                found.append(self.eval(node))
        return found

    # ------------------------------------------------------------------------------------------- operators
    def _eval_binop(self, node: ast.BinOp) -> Any:
        return self.arithmetic(type(node.op), self.eval(node.left), self.eval(node.right), node)

    def arithmetic(self, kind: type[ast.operator], x: Any, y: Any, node: ast.AST) -> Any:
        """``x op y`` on Python values, scalars, register tiles and tuples."""
        op, python = BINARY[kind]
        span = self.span(node)
        if is_folded(x) and is_folded(y):
            return self.folded(python, (x, y), node)
        if op == "+" and isinstance(x, tuple) and isinstance(y, tuple):
            return x + y
        if op == "@":
            raise self.unsupported(node, "`@` is not part of the kernel language", "Use pk.mma(acc, a, b).")
        if op in ("&", "|") and (is_tile(x) or is_tile(y)):
            return self.combine("and" if op == "&" else "or", x, y, span)
        if op in ("**", "<<", ">>", "&", "|", "^"):
            advice = {"&": "Use `and`.", "|": "Use `or`.", "**": "Multiply.", "<<": "Multiply.", ">>": "Use `//`."}
            raise self.unsupported(
                node, f"`{op}` on run-time values is not part of the kernel language", advice.get(op, "")
            )
        return self.combine(op, x, y, span)

    def combine(self, op: str, x: Any, y: Any, span: ir.Span) -> Any:
        """``x op y``, op of the IR, at least one of them a run-time value."""
        if is_tile(x) or is_tile(y):
            self._operand(op, x, span)
            self._operand(op, y, span)
            other = (x if is_tile(x) else y).type.dtype
            x, y = (tiles.like(v, other) for v in (x, y))
            if op in ("//", "%") and isinstance(y, int) and y == 0:
                raise errors.WrongOperand(f"`{op}` divides by zero", span, "Check the divisor.")
            x, y = index.lift(x, span), index.lift(y, span)
            return ir.Binary(cast(ir.BinaryOp, op), x, y, rules.tile_binary(op, x.type, y.type, span), span)
        self._operand(op, x, span)
        self._operand(op, y, span)
        if op in ("//", "%") and FLOAT in (index.scalar_type(x), index.scalar_type(y)):
            raise errors.WrongOperand(f"`{op}` on float32", span, "It is defined on integers.")
        try:
            return index.binary(op, x, y, span)
        except ZeroDivisionError:
            raise errors.WrongOperand(f"`{op}` divides by zero", span, "Check the divisor.") from None

    def _operand(self, op: str, value: Any, span: ir.Span) -> None:
        if not is_scalar(value) and not is_tile(value):
            advice = (
                "Bring it to registers first: pk.load(t)."
                if isinstance(value, ir.Shared)
                else "Use scalars or register tiles."
            )
            raise errors.WrongOperand(f"`{op}` on {describe(value)}", span, advice)

    def folded(self, fn: Callable[..., Any], args: tuple[Any, ...], node: ast.AST) -> Any:
        """A Python operation on Python values."""
        try:
            return fn(*args)
        except (TypeError, ValueError, ArithmeticError, IndexError, KeyError) as e:
            raise errors.WrongOperand(
                f"{type(e).__name__}: {e}", self.span(node), "This is computed at compile time."
            ) from None

    def _eval_unaryop(self, node: ast.UnaryOp) -> Any:
        x, span = self.eval(node.operand), self.span(node)
        if isinstance(node.op, ast.Not):
            return index.logical_not(self.truth(x, node.operand), span)
        if is_folded(x):
            names: dict[type[ast.unaryop], Callable[[Any], Any]] = {
                ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert,
            }  # fmt: skip
            return self.folded(names[type(node.op)], (x,), node)
        if isinstance(node.op, ast.Invert) and is_tile(x):
            return ir.Unary("not", x, rules.tile_unary("not", x.type, span), span)
        if isinstance(node.op, ast.Invert):
            raise self.unsupported(node, "`~` on run-time values is not part of the kernel language", "Use `not`.")
        self._operand("-", x, span)
        if isinstance(node.op, ast.UAdd):
            return x
        if is_tile(x):
            return ir.Unary("-", x, rules.tile_unary("-", x.type, span), span)
        return index.negate(x, span)

    def truth(self, value: Any, node: ast.AST) -> Any:
        """``value`` as a condition: a Python bool, or a bool expression."""
        if is_expr(value):
            if is_tile(value):
                raise errors.WrongOperand(
                    f"a condition on {describe(value)}", self.span(node), "Conditions are scalars."
                )
            return index.condition(value, self.span(node))
        return bool(value) if is_folded(value) else True  # tensors, pipelines, ...: present

    def _eval_boolop(self, node: ast.BoolOp) -> Any:
        op = "and" if isinstance(node.op, ast.And) else "or"
        result: Any = None
        for i, part in enumerate(node.values):
            value = self.eval(part)
            if i == 0:
                result = value
            elif is_expr(result) or is_expr(value):
                result = index.binary(op, self.truth(result, node), self.truth(value, part), self.span(node))
            else:
                result = value  # the left side did not decide
            if not is_expr(result) and bool(self.truth(result, part)) == (op == "or"):
                return result
        return result

    def _eval_compare(self, node: ast.Compare) -> Any:
        values = [self.eval(e) for e in (node.left, *node.comparators)]
        result: Any = True
        for kind, x, y in zip(node.ops, values, values[1:], strict=False):
            part = self._compare(type(kind), x, y, node)
            if result is True:
                result = part
            elif is_tile(result) or is_tile(part):
                result = self.combine("and", result, part, self.span(node))
            else:
                result = index.binary("and", result, part, self.span(node))
            if result is False:
                return False
        return result

    def _compare(self, kind: type[ast.cmpop], x: Any, y: Any, node: ast.Compare) -> Any:
        op, python = COMPARE[kind]
        if is_folded(x) and is_folded(y):
            return self.folded(python, (x, y), node)
        if op in ("is", "is not"):
            return (x is y) == (op == "is")
        if op in ("in", "not in"):
            raise self.unsupported(
                node, f"`{op}` on run-time values is not part of the kernel language", "Compare with ==."
            )
        if not is_expr(x) and not is_expr(y) and op in ("==", "!="):
            return (x == y) == (op == "==")
        return self.combine(op, x, y, self.span(node))

    def _eval_ifexp(self, node: ast.IfExp) -> Any:
        cond = self.truth(self.eval(node.test), node.test)
        if not is_expr(cond):
            return self.eval(node.body if cond else node.orelse)
        sides = []
        for side in (node.body, node.orelse):
            length = len(self.b.block)
            sides.append(self.eval(side))
            if len(self.b.block) != length:
                raise self.unsupported(side, "a helper with statements inside a conditional expression", "Use an `if`.")
        return self._choose(cond, sides[0], sides[1], node)

    def _choose(self, cond: ir.Expr, x: Any, y: Any, node: ast.IfExp) -> Any:
        if isinstance(x, tuple) and isinstance(y, tuple) and len(x) == len(y):
            return tuple(self._choose(cond, a, b, node) for a, b in zip(x, y, strict=True))
        if is_scalar(x) and is_scalar(y):
            return index.select(cond, x, y, self.span(node))
        if isinstance(x, _TENSORS) and isinstance(y, _TENSORS):
            return self._choose_tensor(cond, x, y, node)
        raise errors.WrongOperand(
            f"a run-time choice between {describe(x)} and {describe(y)}", self.span(node),
            "A conditional expression chooses between scalars or tensors; use an `if` for the rest.",
        )  # fmt: skip

    def _choose_tensor(self, cond: ir.Expr, x: Any, y: Any, node: ast.IfExp) -> Any:
        for side in (x, y):
            if isinstance(side, TensorValue) and side.kind != "global":
                raise errors.WrongOperand(
                    f"a run-time choice of `{side.name}`, which every rank has a copy of", self.span(node),
                    f"Say whose: {side.name}[rank].",
                )  # fmt: skip
        a, b = tensor_of(x), tensor_of(y)
        if (a.dtype, a.ndim) != (b.dtype, b.ndim):
            raise errors.WrongOperand(
                f"a run-time choice between `{a.name}` ({a.ndim}-d {a.dtype}) and `{b.name}` ({b.ndim}-d {b.dtype})",
                self.span(node),
                "Tensors to choose between have one dtype and one number of dimensions.",
            )
        return x if x == y else ChosenValue(cond, x, y)

    # ------------------------------------------------------------------------------- attributes, subscripts
    def _eval_attribute(self, node: ast.Attribute) -> Any:
        base, name = self.eval(node.value), node.attr
        if isinstance(base, _TENSORS):
            return self._tensor_attribute(base, name, node)
        if isinstance(base, StageValue):
            return self._stage_field(base, name, node)
        if isinstance(base, SharedValue) and base.tile is not None:
            base = self.b.use_private(base, self.span(node)) if name == "T" else ir.Shared("", base.name, base.tile)
        if isinstance(base, ir.Shared) or is_tile(base):
            return self._tile_attribute(base, name, node)
        if isinstance(base, PipelineValue):
            if name in ("fill", "drain"):
                return StageMethod(base, name)  # type: ignore[arg-type]
            return self._missing(node, "a pipeline", name, ("fill", "drain", "stages"), {"stages": base.stages})
        if is_expr(base) or not is_folded(base):
            return self._missing(node, describe(base), name, (), {})
        if not isinstance(base, types.ModuleType | DType | tuple | str) and callable(getattr(base, name, None)):
            raise self.unsupported(
                node, f"a method of {type(base).__name__}", "Kernels call pk's operations and @pk.function helpers."
            )
        try:
            value = getattr(base, name)
            self.b.captures.attribute(base, name, value)
            return value
        except AttributeError:
            known = getattr(base, "__all__", None) or [n for n in dir(base) if not n.startswith("_")]
            what = f"module `{base.__name__}`" if isinstance(base, types.ModuleType) else describe(base)
            return self._missing(node, what, name, tuple(known), {})

    def _missing(
        self, node: ast.Attribute, what: str, name: str, known: tuple[str, ...], values: dict[str, Any]
    ) -> Any:
        if name in values:
            return values[name]
        hint = errors.nearest(name, known).strip() or (
            f"It has {', '.join(known)}." if 0 < len(known) < 12 else "Check the name."
        )
        if name == "T":
            hint = "Shared tiles of two dimensions have one: pk.load(s.t.T), pk.store(s.t.T, r), pk.mma(acc, a, s.t.T)."
        raise errors.UnknownName(f"{what} has no `{name}`", self.span(node), hint)

    def _tensor_attribute(self, base: TensorValue | CopyValue | ChosenValue, name: str, node: ast.Attribute) -> Any:
        tensor, dims = tensor_of(base), _dims(base, self.span(node))
        if name in DIMS:
            if tensor.ndim < -DIMS[name]:
                raise errors.UnknownName(
                    f"`{tensor.name}` has {tensor.ndim} dimension{'s' * (tensor.ndim > 1)} and no `.{name}`",
                    self.span(node),
                    f"Its dimensions, from the end, are {', '.join(list(DIMS)[: tensor.ndim])}; or use .shape[i].",
                )  # fmt: skip
            return dims[DIMS[name]]
        values = {"shape": dims, "dtype": tensor.dtype, "ndim": tensor.ndim}
        return self._missing(node, f"tensor `{tensor.name}`", name, (*DIMS, *values), values)

    def _tile_attribute(self, base: Any, name: str, node: ast.Attribute) -> Any:
        shape = base.shape if isinstance(base, ir.Shared) else base.type.shape
        values = {
            "shape": shape,
            "rows": shape[-2] if len(shape) > 1 else 1,
            "cols": shape[-1],
            "dtype": base.type.dtype,
        }
        if isinstance(base, ir.Shared) and len(shape) == 2:
            values["T"] = ir.Shared(base.pipeline, base.field, base.type, not base.transposed, self.span(node))
        return self._missing(node, describe(base), name, tuple(values), values)

    def _stage_field(self, stage: StageValue, name: str, node: ast.Attribute) -> Any:
        tile = stage.pipeline.tile(name)
        if tile is None:
            fields = tuple(n for n, _ in stage.pipeline.tiles)
            return self._missing(node, f"a stage of `{stage.pipeline.name}`", name, fields, {})
        t = ir.Shared(stage.pipeline.name, name, tile, False, self.span(node))
        if not stage.held:
            rules.stage("load", t, {}, self.span(node))
        return t

    def _eval_subscript(self, node: ast.Subscript) -> Any:
        base = self.eval(node.value)
        if isinstance(base, TensorValue):
            return self._copy_of(base, node)
        if is_tile(base):
            return self._columns(base, node)
        if isinstance(base, ir.Shared):
            raise errors.WrongOperand("slices of shared tiles are not part of the language", self.span(node),
                                      "Slice a register tile, acc[:, a:b], or use a smaller tile.")  # fmt: skip
        if is_expr(base) or not isinstance(base, tuple | list | str | dict):
            raise errors.WrongOperand(
                f"{describe(base)} has no elements", self.span(node), "Index tuples and Parallel tensors."
            )
        at = self._index(node.slice)
        if not is_folded(at):
            raise errors.NotConstant(
                "a tuple is indexed by a run-time value", self.span(node.slice), "Use a compile-time index."
            )
        return self.folded(operator.getitem, (base, at), node)

    def _index(self, node: ast.expr) -> Any:
        if not isinstance(node, ast.Slice):
            return self.eval(node)
        return slice(*(self.eval(e) if e is not None else None for e in (node.lower, node.upper, node.step)))

    def _copy_of(self, base: TensorValue, node: ast.Subscript) -> CopyValue:
        if base.kind == "global":
            raise errors.WrongOperand(
                f"`{base.name}` is a Global: it exists on this rank only", self.span(node),
                "Only a Parallel or scratch is indexed, by rank; operations take coordinates as an argument.",
            )  # fmt: skip
        return CopyValue(base, integer("a rank", self._index(node.slice), self.span(node.slice)))

    def _columns(self, base: Any, node: ast.Subscript) -> ir.Call:
        at = node.slice
        parts = at.elts if isinstance(at, ast.Tuple) else []
        whole = len(parts) == 2 and isinstance(parts[0], ast.Slice) and ast.dump(parts[0]) == ast.dump(ast.Slice())
        if not whole or not isinstance(parts[1], ast.Slice) or parts[1].step is not None:
            raise errors.WrongOperand(
                "register tiles are sliced by columns only", self.span(node), "Write acc[:, a:b]."
            )
        bounds = [self.eval(e) if e is not None else None for e in (parts[1].lower, parts[1].upper)]
        if not all(b is None or (isinstance(b, int) and not isinstance(b, bool)) for b in bounds):
            raise errors.NotConstant(
                "the columns of a slice are run-time values", self.span(parts[1]),
                "Use compile-time bounds: loop with pk.static_range.",
            )  # fmt: skip
        start, stop = bounds[0] or 0, base.type.cols if bounds[1] is None else bounds[1]
        tile: Tile = rules.columns(base.type, start, stop, self.span(node))
        self.b.require("columns", self.span(node))
        return ir.Call("columns", (base,), tile, (("start", start), ("stop", stop)), self.span(node))

    # ------------------------------------------------------------------------------------------------ calls
    def _eval_call(self, node: ast.Call) -> Any:
        fn = self.eval(node.func)
        if fn is language.mma and node.args and isinstance(node.args[0], ast.Name):
            self.accumulate_into(node.args[0].id, self.span(node))
        args = self.arguments(node.args)
        kwargs: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self.unsupported(node, "`**` in a call is not part of the kernel language", "Name the arguments.")
            kwargs[keyword.arg] = self.eval(keyword.value)
        value = calls.call(self, fn, args, kwargs, node)
        if isinstance(value, ir.Call) and value.op == "load_scalar" and node is not self.named_now:
            return self.temporary("loaded", value, self.span(node))  # memory is read here and once
        return value

    def expand(self, fn: Any, args: list[Any], kwargs: dict[str, Any], node: ast.Call) -> Any:
        """A helper, in place; the statements' half of the reader knows how."""
        raise NotImplementedError

    def math(self, fn: Callable[..., Any]) -> bool:
        """Whether ``fn`` is a pure function that may be called while compiling."""
        return getattr(fn, "__module__", None) == "math" and getattr(math, fn.__name__, None) is fn


_TENSORS = (TensorValue, CopyValue, ChosenValue)


def _dims(base: TensorValue | CopyValue | ChosenValue, span: ir.Span) -> tuple[Any, ...]:
    """The extents of a tensor where the user wrote it; of a choice, the extents of what is chosen."""
    if isinstance(base, ChosenValue):
        sides = zip(_dims(base.x, span), _dims(base.y, span), strict=True)
        return tuple(index.select(base.cond, x, y, span) for x, y in sides)
    return tuple(_at(d, span) for d in tensor_of(base).shape)


def _at(dim: ir.Expr, span: ir.Span) -> Any:
    """A dim where the user wrote it; the dims of scratch are the expressions of its shape."""
    return index.lower(replace(dim, span=span))


def _words(name: str) -> str:
    names = {"ListComp": "list comprehension", "GeneratorExp": "generator expression", "JoinedStr": "f-string",
             "NamedExpr": ":=", "AsyncFor": "async for", "FunctionDef": "def", "ClassDef": "class", "TryStar": "try",
             "AnnAssign": "annotated assignment", "DictComp": "dict comprehension", "SetComp": "set comprehension",
             "ImportFrom": "import", "Delete": "del"}  # fmt: skip
    return names.get(name, name.lower())
