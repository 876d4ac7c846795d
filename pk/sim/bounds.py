"""What may not be: an index that ``PK_SANITIZE`` refuses on the device, and an int that does not fit its 32 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pk.ir import nodes as ir
from pk.ir.sanitize import holds

if TYPE_CHECKING:
    from pk.sim.machine import Role, Site


def check(role: Role, site: Site, bounds: ir.Bounds, index: object) -> None:
    """Raise :class:`pk.errors.SimulationError` if ``index``, an int or an index vector, lies outside ``bounds``."""
    bound = _bound(role, bounds)
    values = [int(index)] if isinstance(index, int) else [int(i) for i in np.ravel(np.asarray(index))]
    wrong = next((i for i in values if not holds(bounds, i, bound)), None)
    if wrong is not None:
        raise role.fail(site, f"{bounds.what} is {wrong}, which is none of 0 to {bound - 1}")


def fits(role: Role, site: Site, value: int) -> int:
    """``value``, a scalar of the kernel.  Raises :class:`pk.errors.SimulationError` if it is no int32."""
    if -0x80000000 <= value <= 0x7FFFFFFF:
        return value
    raise role.fail(
        site,
        f"{value} does not fit the 32 bits of an int, which scalars of kernels are; on the GPU such an overflow is "
        "undefined: reckon with smaller numbers, or with an int32 tile, which wraps around",
    )


def _bound(role: Role, bounds: ir.Bounds) -> int:
    of = bounds.bound
    if isinstance(of, ir.World):
        return role.world
    shape = role.launch.signal_shapes.get(of.tensor)
    return shape[of.axis] if shape is not None else role.dims[of.tensor, of.axis]
