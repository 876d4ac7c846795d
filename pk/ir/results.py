"""The type that a ``Call`` yields, from the types of its operands.  Raises a CompileError where they do not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from pk import errors
from pk.ir import nodes as ir
from pk.ir import rules, vectors
from pk.ir.types import INT, DType, Scalar, Tile, Type

Types = Sequence[Type | None]
"""One entry an operand: None for a window of memory, a shared tile and a counter."""


def result(e: ir.Call, types: Types, dtype_of: Callable[[str], DType]) -> Type:
    """The type of ``e``; ``dtype_of`` knows the element types of tensors."""
    if e.op == "load":
        return rules.loaded(cast(ir.Shared, e.operands[0]))
    if e.op == "columns":
        return rules.columns(_tile(types[0]), cast(int, e.attr("start")), cast(int, e.attr("stop")), e.span)
    if e.op == "where":
        return rules.where(*cast("tuple[Type, Type, Type]", tuple(types)), e.span)
    if e.op == "fma":
        return rules.fma(cast("tuple[Type, ...]", tuple(types)), e.span)
    if e.op in ("sum", "max", "min"):
        return rules.reduced(e.op, _tile(types[0]), e.attr("axis"), e.span)
    if e.op == "load_scalar":
        return Scalar(rules.widened(dtype_of(cast(ir.Memory, e.operands[0]).tensor)))
    if e.op == "load_global":
        return Tile(_tile(e.type).shape, rules.widened(dtype_of(cast(ir.Memory, e.operands[0]).tensor)), "register")
    if e.op == "fetch_add":
        return INT
    if e.op in ("full", "cast", "iota"):
        return _declared(e, types)
    return rules.mathematics(e.op, cast(Type, types[0]), e.span)


def _declared(e: ir.Call, types: Types) -> Type:
    tile = _tile(e.type)
    if e.op == "iota":
        rules.iota(tile, e.span)
    elif e.op == "cast":
        rules.cast(cast(Type, types[0]), tile.dtype, e.span)
    elif not vectors.is_vector(tile):
        rules.register_tile(tile, e.span)
    return tile


def _tile(t: Type | None) -> Tile:
    if not isinstance(t, Tile):
        raise errors.WrongOperand(f"{t} where a register tile must stand", ir.NOWHERE, "Make one with pk.full.")
    return t
