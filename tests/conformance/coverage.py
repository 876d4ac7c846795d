"""What a kernel uses, read from its IR: operations with dtype, role, tile, dimensions and destination.

Nothing here is declared by a case: what a case covers is what its kernel contains.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pk.dsl.types import Function
from pk.ir import nodes as ir
from pk.ir import split
from pk.ir.types import DType, Tile

COUNTERS = "int32"  # the dtype of what has only counters


@dataclass(frozen=True)
class Use:
    """One operation of a kernel.  ``tile``: the shape it works on; ``ndim`` and ``where``: of the tensor it touches."""

    op: str
    dtype: str
    role: str
    tile: tuple[int, ...] = ()
    ndim: int = 0
    where: str = ""


def uses(kernel: ir.Kernel) -> frozenset[Use]:
    """Every operation of ``kernel``, tile arithmetic included (``tile +``)."""
    found: set[Use] = set()
    for _, body in kernel.classes:
        outside = "team" if split.roles_of(body) == ("team",) else "shared"
        for s in body:
            _walk(kernel, s, outside, found)
    return frozenset(found)


def _walk(kernel: ir.Kernel, node: Any, role: str, found: set[Use]) -> None:
    if isinstance(node, ir.Role):
        role = node.kind
    if isinstance(node, ir.Do | ir.Call):
        windows = [w for o in node.operands for w in _windows(o)]
        if not windows:
            found.add(_use(kernel, node, role, None))
        found.update(_use(kernel, node, role, window) for window in windows)
    elif isinstance(node, ir.Unary | ir.Binary) and any(isinstance(_type(x), Tile) for x in split.children(node)):
        operand = next(t for x in split.children(node) if isinstance(t := _type(x), Tile))
        found.add(Use(f"tile {node.op}", operand.dtype.name, role, operand.shape))
    elif isinstance(node, ir.While):
        found.add(Use("while", COUNTERS, role))
    for child in _children(node):
        _walk(kernel, child, role, found)


def _children(node: Any) -> Iterator[Any]:
    if not dataclasses.is_dataclass(node) or isinstance(node, ir.Span):
        return
    for f in dataclasses.fields(node):
        value = getattr(node, f.name)
        for item in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(item) and not isinstance(item, Tile | DType):
                yield item


def _type(e: Any) -> Any:
    return getattr(e, "type", None)


def _use(kernel: ir.Kernel, node: ir.Do | ir.Call, role: str, window: ir.Memory | None) -> Use:
    shared = [o for o in node.operands if isinstance(o, ir.Shared)]
    values = [t for o in node.operands if isinstance(t := _type(o), Tile)]
    result = node.type if isinstance(node, ir.Call) else None
    ndim, where = (len(window.coord), _where(kernel, window)) if window else (0, "")
    tile: tuple[int, ...] = shared[0].type.shape if shared else values[0].shape if values else ()
    if node.op == "mma":
        factor = _type(node.operands[1])
        return Use("mma", factor.dtype.name, role, (values[0].shape[0], values[0].shape[1], factor.shape[-1]))
    if shared:
        dtype = shared[0].type.dtype.name
    elif window:
        dtype = kernel.tensor(window.tensor).dtype.name
        shape: Any = dict(node.attrs).get("shape", ())
        tile = result.shape if isinstance(result, Tile) else tile or tuple(shape)
    elif any(isinstance(o, ir.Signal) for o in node.operands):
        dtype = COUNTERS
    elif result is not None:
        dtype, tile = result.dtype.name, result.shape if isinstance(result, Tile) else tile
    else:
        dtype = values[0].dtype.name if values else COUNTERS
    return Use(node.op, dtype, role, tuple(tile), ndim, where)


def _windows(o: Any) -> list[ir.Memory]:
    if isinstance(o, ir.Choose):
        return [*_windows(o.x), *_windows(o.y)]
    return [o] if isinstance(o, ir.Memory) else []


def _where(kernel: ir.Kernel, window: ir.Memory) -> str:
    if window.everyone:
        return "everyone"
    mine = {s.var.name for s in kernel.prologue if isinstance(s, ir.Assign) and isinstance(s.value, ir.Rank)}
    me = isinstance(window.rank, ir.Rank) or (isinstance(window.rank, ir.Var) and window.rank.name in mine)
    return "own" if window.rank is None or me else "one rank"


# ------------------------------------------------------------------------------------------- functions of the language
def called(fn: Any) -> frozenset[str]:
    """Names of ``pk`` that the text of a kernel, and of the helpers it calls, uses: ``pk.name``."""
    return frozenset(_called(inspect.unwrap(fn), set()))


def _called(fn: Any, seen: set[Any]) -> Iterator[str]:
    if fn in seen:
        return
    seen.add(fn)
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(fn)))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pk":
            yield node.attr
        helper = fn.__globals__.get(node.id) if isinstance(node, ast.Name) else None
        if isinstance(helper, Function):
            yield from _called(inspect.unwrap(helper.fn), seen)
