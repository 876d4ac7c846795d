"""What the layers compute, on tensors: products of tokens, and tokens changing hands.

``group`` is a process group, a pk group, the name of either, or None for the caller's.
"""

from __future__ import annotations

from typing import Any

import torch

from pk import ops
from pk.errors import ArgumentError
from pk.nn.arguments import check_dim, check_tensor
from pk.ops.route import through_torch
from pk.runtime.names import name_of, named

_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


# ------------------------------------------------------------------------------------------------------- products
def column_parallel(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, activation: str | None = None,
    group: Any = None, sequence_dim: int | None = 0, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """``activation(x @ weight.T + bias)`` for this rank's rows of the weight, of the tokens of all ranks.

    x (..., K) holds this rank's tokens, a share along ``sequence_dim``; with None it holds all tokens, alike on every
    rank.  ``options`` are those of :func:`pk.ops.all_gather_matmul`.
    """
    _check_input(x, weight)
    options |= {"bias": bias, "activation": activation, "group": group}
    if sequence_dim is not None:
        rows, rest = _rows(x, sequence_dim)
        return _unrows(ops.all_gather_matmul(rows, weight.t(), **options), rest, sequence_dim)
    rows, kept = x.reshape(-1, x.shape[-1]), {"bias", "activation", "group", "config"}
    given = {name: value for name, value in options.items() if name in kept}
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        result = through_torch("replicated_matmul", rows, weight.t(), **given)
    else:
        result = ops.matmul(rows, weight.t(), **given)
    return result.reshape(*x.shape[:-1], result.shape[-1])


def row_parallel(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, group: Any = None,
    sequence_dim: int | None = 0, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """``sum over ranks of x @ weight.T, + bias``, for this rank's columns of the weight and of x (..., K / world).

    Every rank receives its share of the tokens along ``sequence_dim``; with None, all tokens.  ``bias`` is the whole
    one.  ``options`` are those of :func:`pk.ops.matmul_reduce_scatter`.
    """
    _check_input(x, weight)
    options |= {"bias": bias, "group": group}
    if sequence_dim is None:
        result = ops.matmul_all_reduce(x.reshape(-1, x.shape[-1]), weight.t(), **options)
        return result.reshape(*x.shape[:-1], result.shape[-1])
    rows, rest = _rows(x, sequence_dim)
    return _unrows(ops.matmul_reduce_scatter(rows, weight.t(), **options), rest, sequence_dim)


def _check_input(x: Any, weight: torch.Tensor) -> None:
    """Raise :class:`pk.errors.ArgumentError` unless a layer with this rank's ``weight`` can multiply ``x``."""
    check_tensor(x, "a layer of pk.nn")
    check_tensor(weight, "a layer of pk.nn, as its weight,")
    if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ArgumentError(
            f"an input of shape {tuple(x.shape)} has {x.shape[-1] if x.ndim else 'no'} features, and this rank's "
            f"weight of shape {tuple(weight.shape)} takes {weight.shape[1]}.\n"
            "  Pass (..., features): all of a column layer's, this rank's share of a row layer's."
        )
    if x.is_meta != weight.is_meta:
        what, other, place = ("input", "weight", weight) if x.is_meta else ("weight", "input", x)
        raise ArgumentError(
            f"the {what} of a layer is on meta, without values, and the {other} on {place.device}.\n"
            "  Pass real input, and load the module with pk.nn.load_full_state_dict(module, state, assign=True)."
        )
    if x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type):
        return
    if x.dtype != weight.dtype or x.dtype not in _SIXTEEN_BIT:
        raise ArgumentError(
            f"an input of {x.dtype} meets a weight of {weight.dtype}, and products are those of torch.bfloat16 or "
            "torch.float16, both alike.\n"
            "  Cast the module or the input, such as `module.bfloat16()`, or run under torch.autocast."
        )


def _rows(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """``x`` as a matrix whose rows are in the order of ``dim`` first, and the extents that are not of the matrix."""
    if x.ndim < 2 or not -x.ndim <= dim < x.ndim or dim % x.ndim == x.ndim - 1:
        raise ArgumentError(
            f"an input of shape {tuple(x.shape)} has no tokens along dimension {dim}.\n"
            "  Pass (tokens / world, ..., features), or say which dimension counts tokens: `sequence_dim=`."
        )
    moved = x.movedim(dim, 0)
    return moved.reshape(-1, x.shape[-1]), tuple(moved.shape[1:-1])


def _unrows(rows: torch.Tensor, rest: tuple[int, ...], dim: int) -> torch.Tensor:
    if not rest:
        return rows
    return rows.reshape(rows.shape[0] // max(_product(rest), 1), *rest, rows.shape[-1]).movedim(0, dim)


def _product(extents: tuple[int, ...]) -> int:
    total = 1
    for extent in extents:
        total *= extent
    return total


# --------------------------------------------------------------------------------------------- tokens change hands
def gather(x: torch.Tensor, dim: int = 0, group: Any = None) -> torch.Tensor:
    """The ``x`` of all ranks, one after the other along ``dim``.  What follows must be the same on all ranks.

    The gradient is therefore this rank's part of the result's gradient, which is taken to be the same on all ranks.
    """
    check_tensor(x, "pk.nn.gather")
    return torch.ops.pk.gather_along(x, check_dim(x, dim, "pk.nn.gather"), name_of(group))


def split(x: torch.Tensor, dim: int = 0, group: Any = None) -> torch.Tensor:
    """This rank's share along ``dim`` of an ``x`` that all ranks have alike; the gradients of all shares are gathered.

    Raises :class:`pk.errors.ArgumentError` if the ranks cannot share it equally.
    """
    check_tensor(x, "pk.nn.split")
    return torch.ops.pk.share_along(x, check_dim(x, dim, "pk.nn.split"), name_of(group))


def sum_gradients(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    """``x`` itself; its gradient is the sum over the ranks, in float32 and in rank order, the same bits on all.

    For a parameter that all ranks have alike and use on different tokens, such as a norm's between two layers of the
    sequence form: every rank knows only its own tokens' part of the gradient.
    """
    check_tensor(x, "pk.nn.sum_gradients")
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return _SumGradients.apply(x, name_of(group))


class _SumGradients(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.ops.pk.sum_over_ranks(grad, ctx.group), None


def check_tokens(x: torch.Tensor, dim: int, world: int) -> None:
    """Raise :class:`pk.errors.ArgumentError` unless ``world`` ranks can share the tokens along ``dim``."""
    if x.shape[dim] % world:
        raise ArgumentError(
            f"an input of shape {tuple(x.shape)} has {x.shape[dim]} tokens along dimension {dim}, which {world} ranks "
            f"cannot share equally.\n  Pad them to {-(-x.shape[dim] // world) * world}."
        )


# Operators of torch's, because a graph holds names of groups, and only an operator may look a group up.
@torch.library.custom_op("pk::sum_over_ranks", mutates_args=())
def summed(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum of the ``x`` of all ranks, the same bits on all.  Collective; not differentiable."""
    if x.dtype in ops.inputs.SUMMED:
        total: torch.Tensor = torch.ops.pk.all_reduce(x, group)
        return total
    return torch.ops.pk.all_reduce(x.float(), group).to(x.dtype)


@torch.library.custom_op("pk::gather_along", mutates_args=())
def _gather(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    whole: torch.Tensor = torch.ops.pk.all_gather(x, dim, group)
    return whole


@torch.library.custom_op("pk::share_along", mutates_args=())
def _split(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    owner = named(group)
    check_tokens(x, dim, owner.world_size)
    share = x.shape[dim] // owner.world_size
    return x.narrow(dim, owner.rank * share, share).clone(memory_format=torch.contiguous_format)


@summed.register_fake
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return x.new_empty(x.shape)


@_gather.register_fake
def _(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] *= named(group).world_size
    return x.new_empty(shape)


@_split.register_fake
def _(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    shape, world = list(x.shape), named(group).world_size
    check_tokens(x, dim, world)
    shape[dim] = shape[dim] // world
    return x.new_empty(shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.dim, ctx.group = inputs


def _no_gradient(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
    raise ArgumentError(
        "torch.ops.pk.sum_over_ranks has no backward pass.\n"
        "  Use pk.nn.sum_gradients for a sum of gradients, pk.ops.matmul_all_reduce for a sum of products."
    )


summed.register_autograd(_no_gradient)
_gather.register_autograd(
    lambda ctx, grad: (torch.ops.pk.share_along(grad, ctx.dim, ctx.group), None, None), setup_context=_keep
)
_split.register_autograd(
    lambda ctx, grad: (torch.ops.pk.gather_along(grad, ctx.dim, ctx.group), None, None), setup_context=_keep
)


def stacked(x: torch.Tensor, group: str) -> torch.Tensor:
    """(world, *shape): the ``x`` of all ranks, of any shape.  Collective; not differentiable."""
    whole: torch.Tensor = torch.ops.pk.all_gather(x.unsqueeze(0), 0, group)
    return whole
