"""Collectives: what moves between ranks without being multiplied.

==================  ==========================================================  ============================
operator            result                                                      gradient
==================  ==========================================================  ============================
``all_gather``      every rank's x, joined along ``dim``                        ``reduce_scatter``
``reduce_scatter``  this rank's part, along ``dim``, of the sum of every x      ``all_gather``
``all_reduce``      the sum of every rank's x, the same bits on every rank      ``all_reduce``
``all_to_all``      part r of x, along ``split_dim``, to rank r; what comes is  ``all_to_all``, its inverse
                    joined along ``concat_dim``
==================  ==========================================================  ============================

Every call is collective: all ranks of ``group`` (a ``torch.distributed`` process group, or None for the current one)
make it, from one thread, without elements too, with the same shapes, dtypes and dimensions.  x has any number of
dimensions and any strides; one that is not contiguous is copied.  ``out`` is contiguous.  Where ``out`` is made by
``pk.empty`` peers write it directly, but for ``reduce_scatter``; whether it is must be the same on all ranks.

Sums are of bfloat16, float16 and float32, made in float32 in rank order and rounded once: their bits are the same on
every run.  The others move every dtype.
"""

from __future__ import annotations

import operator as operators
from typing import Any

import torch

from pk.errors import ArgumentError, short
from pk.ops import calls, choose, collective_plans, inputs, route
from pk.ops.inputs import SUMMED
from pk.runtime import symm
from pk.runtime.group import Group, current

DIMENSIONS = {
    "all_gather": ("dim",), "reduce_scatter": ("dim",), "all_reduce": (), "all_to_all": ("split_dim", "concat_dim"),
}  # fmt: skip
"""Every collective, and the names of its dimensions."""
SUMS = ("reduce_scatter", "all_reduce")


def all_gather(
    x: torch.Tensor, dim: int = 0, *, group: Any = None, out: torch.Tensor | None = None
) -> torch.Tensor:  # fmt: skip
    """Every rank's ``x``, joined along ``dim`` in the order of the ranks.

    Returns ``out``, or a new tensor: the shape of ``x``, with world times its extent along ``dim``.  Its gradient is
    the sum over ranks of this rank's part.  Raises :class:`pk.errors.ArgumentError` for what cannot work,
    :class:`pk.errors.RanksDisagree` on every rank if they make different calls.
    """
    return _call("all_gather", x, {"dim": dim}, group, out)


def reduce_scatter(
    x: torch.Tensor, dim: int = 0, *, group: Any = None, out: torch.Tensor | None = None
) -> torch.Tensor:  # fmt: skip
    """This rank's part, along ``dim``, of the sum of every rank's ``x``.

    The extent along ``dim`` is a multiple of the world size.  The rest as for :func:`all_gather`.
    """
    return _call("reduce_scatter", x, {"dim": dim}, group, out)


def all_reduce(x: torch.Tensor, *, group: Any = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of every rank's ``x``, with the same bits on every rank.  ``out`` may be ``x``.

    The rest as for :func:`all_gather`.
    """
    return _call("all_reduce", x, {}, group, out)


def all_to_all(
    x: torch.Tensor, split_dim: int = 0, concat_dim: int = 0, *, group: Any = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``x`` cut along ``split_dim`` into as many parts as there are ranks, part r for rank r; what the ranks send to
    this one, joined along ``concat_dim`` in their order.

    The extent along ``split_dim`` is a multiple of the world size.  The rest as for :func:`all_gather`.
    """
    return _call("all_to_all", x, {"split_dim": split_dim, "concat_dim": concat_dim}, group, out)


# ----------------------------------------------------------------------------------------------------------- calls
def _call(operator: str, x: Any, dims: dict[str, Any], group: Any, out: Any) -> torch.Tensor:
    inputs.are_tensors(operator, x=x)
    at = {name: along(operator, name, value, x) for name, value in dims.items()}
    if torch.compiler.is_compiling() or route.watched(operator, x, None, {}):
        return route.collective_through_torch(operator, x, tuple(at.values()), group, out)
    return direct(operator, x, at, group, out)


def along(operator: str, name: str, value: Any, x: torch.Tensor) -> int:
    """The dimension ``value`` of ``x``, counted from the front."""
    try:
        if isinstance(value, bool | torch.Tensor):
            raise TypeError
        dim = operators.index(value)
    except TypeError:
        raise ArgumentError(
            f"pk.ops.{operator} got {name}={short(value)}, which is {type(value).__name__}.\n"
            "  Pass the number of a dimension."
        ) from None
    if not x.ndim:
        raise ArgumentError(
            f"pk.ops.{operator} got a tensor without dimensions, and works along one.\n  Pass `x.view(1)`."
        )
    if not -x.ndim <= dim < x.ndim:
        raise ArgumentError(
            f"pk.ops.{operator} got {name}={dim} and a tensor of shape {tuple(x.shape)}.\n"
            f"  Pass one of its dimensions, from {-x.ndim} to {x.ndim - 1}."
        )
    return dim % x.ndim


def result_shape(operator: str, x: torch.Tensor, dims: dict[str, int], world: int) -> tuple[int, ...]:
    """The shape of the result; raises for an ``x`` that ``world`` ranks cannot share, or not add up."""
    if operator in SUMS and x.dtype not in SUMMED:
        raise ArgumentError(
            f"`x` of pk.ops.{operator} is {x.dtype}, and sums are of {', '.join(map(str, SUMMED))}.\n"
            "  Cast it to one of them."
        )
    shape = list(x.shape)
    for name, dim in dims.items():
        if operator == "all_gather" or name == "concat_dim":
            shape[dim] *= world
            continue
        if shape[dim] % world:
            raise ArgumentError(
                f"`x` of pk.ops.{operator} has {shape[dim]} elements along {name}={dim}, which {world} ranks cannot "
                f"share equally.\n  Pad them to {-(-shape[dim] // world) * world}."
            )
        shape[dim] //= world
    return tuple(shape)


def direct(operator: str, x: Any, dims: dict[str, int], group: Any, out: torch.Tensor | None) -> torch.Tensor:
    """The call, past torch."""
    owner = current(group)
    (x,) = inputs.tensors(operator, x=x)
    shape = result_shape(operator, x, dims, owner.world_size)
    if out is not None:
        in_place = operator == "all_reduce" and isinstance(out, torch.Tensor) and same_memory(out, x)
        inputs.result(operator, out, *(() if in_place else (x,)))
        inputs.fits_whole(out, shape, x.dtype)
    if owner.world_size == 1:
        return x.clone(memory_format=torch.contiguous_format) if out is None else out.copy_(x)
    inside = operator != "reduce_scatter" and out is not None and reached(out, owner)
    call = calls.Collective(operator, x, tuple(dims.items()), inside)
    key = call.key()
    with owner.turn.of(call):
        plan = owner.calls.get(key)
        if plan is None:
            calls.compared(owner, call)
            plan = collective_plans.made(call, owner.world_size, choose.facts(owner).sms)
            calls.remember(owner, key, plan)
        out = x.new_empty(shape) if out is None else out
        plan.run(x, out, owner)
        return out


def reached(out: torch.Tensor, group: Group) -> bool:
    """Whether peers can write ``out``, by words."""
    return symm.place(out, group) is not None and out.data_ptr() % 4 == 0


def same_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors are one, element by element."""
    if inputs.traced(x) or inputs.traced(y):
        return False
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype
