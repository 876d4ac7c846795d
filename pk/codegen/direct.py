"""Windows of tensors that threads reach by pointer, as the macros see them."""

from __future__ import annotations

from dataclasses import dataclass

from pk.codegen.expressions import Expressions
from pk.codegen.params import Params
from pk.codegen.plan import Plan
from pk.ir import nodes as ir


@dataclass(frozen=True, slots=True)
class AreaText:
    """A window: C++ view of its tensor, whose copy, and coordinates, outermost first.

    ``multicast``: the address that stands for all copies, if the kernel has it.
    """

    view: str
    rank: str
    coord: tuple[str, ...]
    multicast: str = ""
    everyone: bool = False


class Direct:
    """Renders the windows of one role."""

    def __init__(self, plan: Plan, params: Params, scalar: Expressions) -> None:
        self._plan, self._params, self._scalar = plan, params, scalar

    def __call__(self, m: ir.Memory) -> AreaText:
        """The text of ``m``."""
        rank = "0" if m.rank is None else self._scalar(m.rank)
        multicast = f"p.{self._params.multicast(m.tensor)}" if m.everyone and m.tensor in self._plan.multicast else ""
        return AreaText(self.view(m.tensor), rank, tuple(map(self._scalar, m.coord)), multicast, m.everyone)

    def view(self, name: str) -> str:
        """The view of tensor ``name``: this rank's copy, or every rank's if the kernel reaches them."""
        tensor = self._plan.kernel.tensor(name)
        ndim = tensor.ndim if isinstance(tensor, ir.Tensor) else len(tensor.shape)
        kind = "peer_view" if dict(self._plan.addressed)[name] else "tensor_view"
        extents = ", ".join(f"p.{self._params.member(f'{name}.{axis}')}" for axis in range(ndim))
        strides = ", ".join(f"p.{self._params.member(f'{name}.stride.{axis}')}" for axis in range(ndim))
        address = self._params.address(name)
        return f"{kind}<{tensor.dtype.cuda}, {ndim}>{{p.{address}, {{{{{extents}}}, {{{strides}}}}}}}"
