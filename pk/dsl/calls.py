"""Calls in a kernel: one handler for every function of the language, for builtins, and for helpers.

A handler gets the reader, the bound arguments by name and the span of the call.
"""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pk import errors
from pk.dsl import collectives, language, operations, tiles
from pk.dsl.arguments import constant, dtype, integer, shape
from pk.dsl.types import Function
from pk.dsl.values import (
    At,
    CommunicatorValue,
    PipelineValue,
    RangeValue,
    RanksFrom,
    RoleValue,
    ScratchValue,
    SharedValue,
    SignalsValue,
    StageMethod,
    StaticRange,
    TasksValue,
    describe,
    is_folded,
    is_scalar,
    is_tile,
)
from pk.ir import index, rules, vectors
from pk.ir import nodes as ir
from pk.ir.types import FLOAT, Tile, int32

if TYPE_CHECKING:
    from pk.dsl.expressions import Expressions

Arguments = dict[str, Any]
Handler = Callable[["Expressions", Arguments, ir.Span], Any]
MAX_UNROLL = 1024
ALIASES: dict[Any, Any] = {builtins.min: language.min, builtins.max: language.max, builtins.range: language.range}


def call(r: Expressions, fn: Any, args: list[Any], kwargs: Arguments, node: ast.Call) -> Any:
    """The value of ``fn(*args, **kwargs)``.  Raises UnsupportedSyntax for functions that a kernel cannot call."""
    span = r.span(node)
    hashable = callable(fn) and type(fn).__hash__ is not None
    fn = ALIASES.get(fn, fn) if hashable else fn
    handler = HANDLERS.get(fn) if hashable else None
    if handler is not None:
        return handler(r, _bound(fn, args, kwargs, span), span)
    if isinstance(fn, Function):
        return r.expand(fn, args, kwargs, node)
    if isinstance(fn, StageMethod):
        if args or kwargs:
            raise errors.WrongOperand(
                f"`{fn.mode}` takes no arguments", span, f"Write `with {fn.pipeline.name}.{fn.mode}() as s:`."
            )
        return StageMethod(fn.pipeline, fn.mode, called=True)
    if any(fn is f for f in (int, float, abs, len, bool)) and len(args) == 1 and not kwargs:
        return _builtin(r, fn, args[0], node)
    if callable(fn) and all(is_folded(v) for v in (*args, *kwargs.values())) and r.math(fn):
        return r.folded(fn, tuple(args), node)
    name = getattr(fn, "__name__", None) or describe(fn)
    if inspect.isfunction(fn) and getattr(language, fn.__name__, None) is not fn:
        raise errors.UnsupportedSyntax(
            f"`{name}` is a Python function and cannot be called in a kernel", span, "Decorate it with @pk.function."
        )
    raise errors.UnsupportedSyntax(
        f"`{name}` cannot be called in a kernel", span, "Kernels call pk's operations and @pk.function helpers."
    )


def _bound(fn: Callable[..., Any], args: list[Any], kwargs: Arguments, span: ir.Span) -> Arguments:
    signature = inspect.signature(fn)
    if fn is language.range and (len(args) == 3 or "step" in kwargs):
        raise errors.WrongOperand(
            "a range with a step", span,
            "Loops at run time have none: write `for j in range(5): ... j * 2` for range(0, 10, 2); pk.static_range, "
            "which is unrolled, has one.",
        )  # fmt: skip
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as e:
        shown = ", ".join(signature.parameters)
        raise errors.WrongOperand(f"pk.{fn.__name__}: {e}", span, f"It is pk.{fn.__name__}({shown}).") from None
    bound.apply_defaults()
    return bound.arguments


def _builtin(r: Expressions, fn: Any, x: Any, node: ast.Call) -> Any:
    span = r.span(node)
    if is_folded(x) or (fn is len and isinstance(x, tuple)):
        return r.folded(fn, (x,), node)
    if is_tile(x):
        if fn is not abs:
            raise errors.WrongOperand(f"`{fn.__name__}` of {describe(x)}", span, "Use pk.cast(r, dtype).")
        return ir.Unary("abs", x, rules.tile_unary("abs", x.type, span), span)
    if not is_scalar(x) or fn is len:
        raise errors.WrongOperand(f"`{fn.__name__}` of {describe(x)}", span, "It takes a scalar.")
    kind = index.scalar_type(x)
    if fn is abs:
        return ir.Unary("abs", x, kind, span)
    if fn is bool:
        return index.condition(x, span)
    if fn is float:
        return index.binary("*", x, 1.0, span) if kind != FLOAT else x
    if kind == FLOAT:
        raise errors.WrongOperand(
            "`int` of a run-time float32", span, "Kernels have no conversion to int: use // on integers."
        )
    return index.binary("+", x, 0, span)


# ------------------------------------------------------------------------------------------- declarations
def _pipeline(r: Expressions, a: Arguments, span: ir.Span) -> PipelineValue:
    r.b.require_top("pk.pipeline", span)
    if a["over"] is not None:
        return _over(a["over"], a["stages"], a["tiles"], span)
    if a["stages"] is None:
        raise errors.NotConstant(
            "a pipeline without a number of stages",
            span,
            "Write pk.pipeline(3, a=pk.shared(...)), or over= a pipeline.",
        )
    stages = constant("the number of stages", a["stages"], span)
    if stages < 1:
        raise errors.WrongOperand(f"a pipeline of {stages} stages", span, "Give it at least one.")
    tiles = []
    for name, tile in a["tiles"].items():
        if not isinstance(tile, SharedValue) or tile.tile is None:
            raise errors.WrongOperand(
                f"field `{name}` of a pipeline is {describe(tile)}", span, "Make it with pk.shared(shape, dtype)."
            )
        tiles.append((name, tile.tile))
    if not tiles:
        raise errors.WrongOperand("a pipeline without tiles", span, "Name at least one: a=pk.shared(shape, dtype).")
    return PipelineValue(span, "", stages, tuple(tiles))


def _over(base: Any, stages: Any, tiles: dict[str, Any], span: ir.Span) -> PipelineValue:
    if not isinstance(base, PipelineValue):
        raise errors.WrongOperand(
            f"over= is {describe(base)}", span, "Pass a pipeline, whose stages the second one hands on."
        )
    if stages is not None or tiles:
        raise errors.WrongOperand(
            "a pipeline over another with stages or tiles of its own",
            span,
            f"It has those of `{base.name}`: write pk.pipeline(over={base.name}).",
        )
    return PipelineValue(span, "", base.stages, base.tiles, over=base)


def _shared(r: Expressions, a: Arguments, span: ir.Span) -> SharedValue:
    r.b.require_top("pk.shared", span)
    tile = Tile(shape("a shared tile", a["shape"], span), dtype("a shared tile", a["dtype"], span), "shared")
    rules.shared_tile(tile, span)
    return SharedValue(span, "", tile)


def _signals(r: Expressions, a: Arguments, span: ir.Span) -> SignalsValue:
    r.b.require_top("pk.signals", span)
    return SignalsValue(span, "", _extents(r, "the shape of signals", a["shape"], span))


def _scratch(r: Expressions, a: Arguments, span: ir.Span) -> ScratchValue:
    r.b.require_top("pk.scratch", span)
    extents = a["shape"] if isinstance(a["shape"], tuple) else (a["shape"],)
    if not 1 <= len(extents) <= 4:
        raise errors.WrongOperand(f"scratch of {len(extents)} dimensions", span, "Tensors have 1 to 4.")
    return ScratchValue(
        span, "", _extents(r, "the shape of scratch", extents, span), dtype("scratch", a["dtype"], span)
    )


def _extents(r: Expressions, what: str, extents: tuple[Any, ...], span: ir.Span) -> tuple[ir.Expr, ...]:
    return tuple(r.b.closed(integer(f"an extent in {what}", e, span), what, span) for e in extents)


# ------------------------------------------------------------------------------------------ loops and roles
def _tasks(r: Expressions, a: Arguments, span: ir.Span) -> TasksValue:
    dynamic, cluster = _flag("dynamic", a["dynamic"], span), constant("cluster=", a["cluster"], span)
    if not a["extents"]:
        raise errors.WrongOperand("pk.tasks without extents", span, "Give it one extent for each loop variable.")
    group = integer("group=", a["group"], span)
    if not isinstance(group, ir.Const):
        group = index.lift(index.binary("max", group, 1, span), span)
    elif group.value < 1:
        raise errors.WrongOperand(f"group={group.value}", span, "It must be at least 1.")
    extents = tuple(e if isinstance(e, RanksFrom) else integer("an extent of pk.tasks", e, span) for e in a["extents"])
    for e in extents:
        if isinstance(e, ir.Const) and e.value < 0:
            raise errors.WrongOperand(f"pk.tasks with extent {e.value}", span, "It must be at least 0.")
    return TasksValue(extents, group, dynamic, cluster)


def _ranks_from(r: Expressions, a: Arguments, span: ir.Span) -> RanksFrom:
    count = ir.World(span=span) if a["count"] is None else a["count"]
    return RanksFrom(integer("the first rank", a["start"], span), integer("the number of ranks", count, span))


def _range(r: Expressions, a: Arguments, span: ir.Span) -> RangeValue:
    start, stop = (0, a["start"]) if a["stop"] is None else (a["start"], a["stop"])
    return RangeValue(integer("the start of a range", start, span), integer("the end of a range", stop, span))


def _static_range(r: Expressions, a: Arguments, span: ir.Span) -> StaticRange:
    given = [a["start"]] if a["stop"] is None else [a["start"], a["stop"], a["step"]]
    bounds = [constant("a bound of pk.static_range", v, span) for v in given]
    if len(bounds) == 3 and bounds[2] == 0:
        raise errors.WrongOperand("pk.static_range with step 0", span, "Use another step.")
    values = range(*bounds)
    if len(values) > MAX_UNROLL:
        raise errors.WrongOperand(
            f"pk.static_range would unroll {len(values)} times", span, "Use pk.range, a loop at run time."
        )
    return StaticRange(values)


def _role(kind: Any) -> Handler:
    def handler(r: Expressions, a: Arguments, span: ir.Span) -> RoleValue:
        if kind != "consumer":
            return RoleValue(kind)
        pingpong, stagger = _flag("pingpong", a["pingpong"], span), _flag("stagger", a["stagger"], span)
        warpgroups = constant("warpgroups=", a["warpgroups"], span)
        if not 1 <= warpgroups <= rules.MAX_WARPGROUPS:
            raise errors.WrongOperand(
                f"pk.consumer(warpgroups={warpgroups})", span, f"Use 1 to {rules.MAX_WARPGROUPS}."
            )
        if pingpong and stagger:
            raise errors.WrongOperand(
                "pk.consumer(pingpong=True, stagger=True)", span, "Each orders the warpgroups in its own way: drop one."
            )
        stagger = stagger and warpgroups > 1
        return RoleValue(kind, 1, warpgroups) if pingpong else RoleValue(kind, warpgroups, 1, stagger)

    return handler


def _flag(name: str, value: Any, span: ir.Span) -> bool:
    if isinstance(value, bool):
        return value
    raise errors.NotConstant(f"{name}= is {describe(value)}", span, "Use True or False, or a constexpr that is one.")


def _communicator(r: Expressions, a: Arguments, span: ir.Span) -> CommunicatorValue:
    sms = None if a["sms"] is None else integer("sms=", a["sms"], span)
    joins = _flag("joins", a["joins"], span)
    if sms is None and joins:
        raise errors.WrongOperand(
            "pk.communicator(joins=True) without sms=",
            span,
            "A communicator warp stands in blocks that compute anyhow: drop joins=, or give it SMs of its own.",
        )
    return CommunicatorValue(sms, joins)


# --------------------------------------------------------------------------------------- scalars and tiles
def _extreme(op: str) -> Handler:
    def handler(r: Expressions, a: Arguments, span: ir.Span) -> Any:
        values = a["values"]
        if a["axis"] is not None:
            if len(values) != 1:
                raise errors.WrongOperand(f"`{op}` of {len(values)} values along an axis", span, "Give it one tile.")
            return tiles.reduction(r, op, values[0], a["axis"], span)
        if len(values) == 1 and isinstance(values[0], tuple):
            values = values[0]
        if not values:
            raise errors.WrongOperand(f"`{op}` of nothing", span, "Give it two values.")
        result = values[0]
        for value in values[1:]:
            folded = isinstance(result, int | float) and isinstance(value, int | float)
            result = index.OPS[op](result, value) if folded else r.combine(op, result, value, span)
        return result

    return handler


def _cdiv(r: Expressions, a: Arguments, span: ir.Span) -> Any:
    if is_tile(a["x"]):
        return r.combine("//", r.combine("+", r.combine("-", a["x"], 1, span), a["y"], span), a["y"], span)
    x, y = integer("the dividend", a["x"], span), integer("the divisor", a["y"], span)
    if isinstance(y, ir.Const) and y.value < 1:
        raise errors.WrongOperand(f"pk.cdiv by {y.value}", span, "The divisor must be positive.")
    return index.cdiv(x, y, span)


def _full(r: Expressions, a: Arguments, span: ir.Span) -> ir.Call:
    element = dtype("a register tile", a["dtype"], span)
    tile = Tile(shape("a register tile", a["shape"], span), element, "register")
    if len(tile.shape) == 1 and element == int32:
        tile = vectors.vector(tile.cols, span)  # at home everywhere
    else:
        r.b.require("full", span)
        rules.register_tile(tile, span)
    value = a.get("value", 0.0)
    if not isinstance(value, int | float):
        raise errors.NotConstant(
            f"the value of pk.full is {describe(value)}", span, "Use a number: zeros + x fills with x."
        )
    if element.kind == "int" and not -(2**31) <= value < 2**31:  # NaN, too
        raise errors.WrongOperand(
            f"the value of pk.full is {errors.short(value)}, which does not fit {element}",
            span,
            "Use -2147483648 to 2147483647.",
        )
    value = int(value) if element.kind == "int" else tiles.number(value)
    return ir.Call("full", (), tile, (("value", value),), span)


def _cast(r: Expressions, a: Arguments, span: ir.Span) -> ir.Call:
    r.b.require("cast", span)
    x = a["r"]
    if not is_tile(x):
        raise errors.WrongOperand(
            f"pk.cast of {describe(x)}", span, "It converts register tiles; pk.load(t) makes one."
        )
    return ir.Call("cast", (x,), rules.cast(x.type, dtype("pk.cast", a["dtype"], span), span), (), span)


HANDLERS: dict[Any, Handler] = {
    language.pipeline: _pipeline, language.shared: _shared, language.signals: _signals, language.scratch: _scratch,
    language.tasks: _tasks, language.ranks_from: _ranks_from, language.range: _range,
    language.static_range: _static_range,
    language.loader: _role("loader"), language.consumer: _role("consumer"), language.storer: _role("storer"),
    language.communicator: _communicator,
    language.at: lambda r, a, span: At(tuple(a["entries"])),
    language.rank: lambda r, a, span: ir.Rank(span=span), language.world_size: lambda r, a, span: ir.World(span=span),
    language.cdiv: _cdiv, language.min: _extreme("min"), language.max: _extreme("max"),
    language.zeros: _full, language.full: _full, language.cast: _cast,
    **operations.HANDLERS, **collectives.HANDLERS, **tiles.HANDLERS,
}  # fmt: skip
"""By function; ``operations`` has those that act on memory and signals."""
