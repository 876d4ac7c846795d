"""Divisions of int tiles by zero, which no device reports: an error, in the elements that exist.

What a load reads outside its tensor is 0, and what is made of it is dropped again at the edge: a divisor of 0 there is
no mistake.  So the loads of a role that divides note where they read, and a divisor with a zero is looked at closely.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pk.ir import nodes as ir
from pk.ir.split import children, statements
from pk.ir.types import DType
from pk.sim.memory import clip, fit
from pk.sim.values import Array

if TYPE_CHECKING:
    from pk.sim.machine import Role, Site

REDUCTIONS = ("sum", "max", "min")
LOADS = ("load_global", "load_elements")


def note(role: Role, site: Site, inside: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | Array) -> None:
    """The load at ``site`` reads the elements ``inside``: a mask, or a tensor's extents, a coordinate and a shape."""
    if role.edges is not None:
        role.edges[id(site)] = inside


class Divisions:
    """The divisions of one role, whose statements are ``block``; ``sites``: those of its loads, by node."""

    def __init__(self, block: ir.Block) -> None:
        self.sites: dict[int, Site] = {}
        self._values: dict[str, list[ir.Expr]] = {}
        for s in statements(block):
            if isinstance(s, ir.Assign):
                self._values.setdefault(s.var.name, []).append(s.value)

    def exist(self, role: Role, e: ir.Operand, seen: frozenset[str] = frozenset()) -> Array:
        """Which elements of ``e``, as evaluated last, are made of what lies inside tensors; broadcasts to its shape."""
        if isinstance(e, ir.Var):
            values = [] if e.name in seen else self._values.get(e.name, [])
            return _all([self.exist(role, v, seen | {e.name}) for v in values])
        if isinstance(e, ir.Call) and e.op in LOADS:
            return _mask((role.edges or {}).get(id(self.sites.get(id(e)))))
        found = _all([self.exist(role, o, seen) for o in children(e)])
        if isinstance(e, ir.Call) and e.op in REDUCTIONS and found.ndim:
            return np.asarray(found.any(axis=cast(int, e.attr("axis")), keepdims=True))
        if isinstance(e, ir.Call) and e.op == "columns" and found.ndim and found.shape[1] > 1:
            return found[:, cast(int, e.attr("start")) : cast(int, e.attr("stop"))]
        return found

    def divide(self, role: Role, site: Site, e: ir.Binary, x: Any, y: Any, dtype: DType) -> Array:
        """``x // y`` or ``x % y``.  Raises SimulationError for a 0 in ``y``, but for what lies outside tensors."""
        from pk.sim.ops import binary

        result = binary(e.op, x, y, dtype)
        zero = np.broadcast_to(np.asarray(y) == 0, result.shape)
        if zero.any():
            wrong = np.argwhere(zero & self.exist(role, e))
            if len(wrong):
                at = ", ".join(map(str, wrong[0].tolist()))
                raise role.fail(
                    site,
                    f"division by zero: element [{at}] of the divisor is 0, and the GPU would go on with any number; "
                    "replace zeros in the divisor first: pk.where(d == 0, 1, d)",
                )
        return result


def _mask(noted: Any) -> Array:
    """What :func:`note` was given, as a mask; of a load that has not run, everything."""
    if noted is None:
        return np.ones((), bool)
    if not isinstance(noted, tuple):
        return cast(Array, noted)
    bounds, coord, shape = noted
    mask = np.zeros(fit(shape, len(bounds)), bool)
    inside, part = clip(bounds, coord, mask.shape)
    if inside is not None:
        mask[part if part is not None else ...] = True
    return mask.reshape(shape)


def _all(masks: list[Array]) -> Array:
    found = np.ones((), bool)
    for mask in masks:
        found = found & mask
    return found
