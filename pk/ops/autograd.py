"""The gradients of the operators: each is another of them, or a local matrix product.

======================  ======================================  ==========================
operator                gradient of a                           gradient of b
======================  ======================================  ==========================
matmul                  g @ b.T                                 a.T @ g
all_gather_matmul       matmul_reduce_scatter(g, b.T)           gathered(a).T @ g
matmul_reduce_scatter   all_gather_matmul(g, b.T)               a.T @ gathered(g)
matmul_all_reduce       g @ b.T                                 a.T @ g
replicated_matmul       matmul_all_reduce(g, b.T)               a.T @ g
all_gather              reduce_scatter(g)
reduce_scatter          all_gather(g)
all_reduce              all_reduce(g)
all_to_all              all_to_all(g), its dimensions exchanged
======================  ======================================  ==========================

``g`` is the gradient of the result before its activation.  The result of ``matmul_all_reduce`` is one value that all
ranks have: its gradient must be the same on all ranks, as it is where they compute one loss.  So is the bias of
``matmul_reduce_scatter``, which therefore receives the sum over the rows of all ranks.  The bias of
``all_gather_matmul`` belongs to this rank's columns.

The gradients of the collectives are those of the sum of all ranks' losses, as torch's own collectives have them.

The gradients have the memory layout of what they are gradients of, so that a transposed weight's needs no copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pk.errors import ArgumentError
from pk.ops import dense
from pk.ops.inputs import gradable
from pk.ops.route import RECOMPUTED

ARGUMENTS = ("a", "b", "bias", "activation", "out_dtype", "scale_a", "scale_b", "config", "group")
ops: Any = torch.ops.pk
Grads = tuple[Any, ...]


# ------------------------------------------------------------------------------------------------------ the forward
def setup(operator: str) -> Callable[..., None]:
    """What ``operator`` keeps for its backward pass."""

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        given = dict(zip(ARGUMENTS, inputs, strict=False))
        a, b, bias, activation = (given[name] for name in ARGUMENTS[:4])
        _refuse(operator, given)
        out, gathered = output if isinstance(output, tuple) else (output, None)
        if gathered is not None:
            ctx.mark_non_differentiable(gathered)
        again = activation in RECOMPUTED
        ctx.given, ctx.rest = given, inputs[len(ARGUMENTS) :]
        ctx.bias = None if bias is None else (tuple(bias.shape), bias.dtype)
        ctx.layouts = [(dense.columns_first(x), x.dtype) for x in (a, b)]
        for name in ("a", "b", "bias"):
            del given[name]
        kept = gathered if gathered is not None else a
        ctx.save_for_backward(
            kept if wants(ctx, 1) and not again else None,
            b if wants(ctx, 0) or again else None,
            a if again else None, bias if again else None, out if activation == "relu" else None,
        )  # fmt: skip

    return keep


def _refuse(operator: str, given: dict[str, Any]) -> None:
    a, operator = given["a"], operator.removesuffix("_saving")
    if a.dtype == dense.FP8:
        raise ArgumentError(
            f"pk.ops.{operator} of {a.dtype} has no backward pass, and an argument requires a gradient.\n"
            "  Call it under torch.no_grad(), or with bfloat16 operands."
        )
    row = given["b"].shape[1] * a.element_size()
    if row % 16 and given["config"] != "library":
        raise ArgumentError(
            f"pk.ops.{operator} of {given['b'].shape[1]} columns has no backward pass, which reads the result's "
            f"gradient in rows of {row} bytes, and TMA needs multiples of 16.\n"
            f"  Pad N to a multiple of {16 // a.element_size()}."
        )
    scaled = [name for name in ("scale_a", "scale_b") if given[name] is not None]
    if scaled:
        raise ArgumentError(
            f"pk.ops.{operator} with `{scaled[0]}` has no backward pass, and an argument requires a gradient.\n"
            f"  Multiply an operand by the scale instead, or call it under torch.no_grad()."
        )


def in_autocast(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The arguments in the dtype that autocast has for ``device``; all of them as they are if one is float8."""
    if dense.FP8 in (a.dtype, b.dtype):
        return a, b, bias
    dtype = torch.get_autocast_dtype(device)

    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

    return cast(a), cast(b), None if bias is None else cast(bias)


def as_called(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: str | None, *scales: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, str | None]:
    """What an operator that is called with these here gets to compute.

    Under autocast the arguments in its dtype ("meta" follows that of either device); where a gradient will need what
    goes into the activation, none.
    """
    graded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (a, b, bias, *scales))
    if graded and activation in RECOMPUTED:
        activation = None
    kinds = ("cuda", "cpu") if a.is_meta else (a.device.type,)
    device = next((kind for kind in kinds if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)), "")
    return (*(in_autocast(a, b, bias, device) if device else (a, b, bias)), activation)


# ----------------------------------------------------------------------------------------------------- the backward
def _matmul(ctx: Any, grad: torch.Tensor) -> Grads:
    g, x, b = _start(ctx, grad, ops.matmul)
    grad_a = _left(ctx, g, b, ctx.given["group"]) if wants(ctx, 0) else None
    return _done(ctx, grad_a, _right(ctx, x, g), _bias(ctx, g))


def _replicated_matmul(ctx: Any, grad: torch.Tensor) -> Grads:
    _refuse_second("replicated_matmul")
    g, x, b = _start(ctx, grad, ops.replicated_matmul)
    grad_a = _collective(ctx, ops.matmul_all_reduce, g, b) if wants(ctx, 0) else None
    return _done(ctx, grad_a, _right(ctx, x, g), _bias(ctx, g))


def _matmul_all_reduce(ctx: Any, grad: torch.Tensor) -> Grads:
    _refuse_second("matmul_all_reduce")
    g, x, b = _start(ctx, grad, ops.matmul_all_reduce)
    grad_a = _left(ctx, g, b, ctx.given["group"]) if wants(ctx, 0) else None
    return _done(ctx, grad_a, _right(ctx, x, g), _bias(ctx, g))


def _all_gather_matmul(ctx: Any, grad: torch.Tensor, of_gathered: torch.Tensor | None = None) -> Grads:
    _refuse_second("all_gather_matmul")
    g, x, b = _start(ctx, grad, ops.all_gather_matmul)
    grad_a = _collective(ctx, ops.matmul_reduce_scatter, g, b) if wants(ctx, 0) else None
    if wants(ctx, 1) and x.shape[0] != g.shape[0]:
        x = ops.all_gather(x, 0, ctx.given["group"])
    return _done(ctx, grad_a, _right(ctx, x, g), _bias(ctx, g))


def _matmul_reduce_scatter(ctx: Any, grad: torch.Tensor) -> Grads:
    _refuse_second("matmul_reduce_scatter")
    g, x, b = _start(ctx, grad, ops.matmul_reduce_scatter)
    grad_a = None
    if not wants(ctx, 0):
        whole = ops.all_gather(g, 0, ctx.given["group"])
    elif wants(ctx, 1) or wants(ctx, 2):
        grad_a, whole = _collective(ctx, ops.all_gather_matmul_saving, g, b)
    else:
        grad_a, whole = _collective(ctx, ops.all_gather_matmul, g, b), g
    return _done(ctx, grad_a, _right(ctx, x, whole), _bias(ctx, whole))


BACKWARD: dict[str, Callable[..., Grads]] = {
    "matmul": _matmul,
    "replicated_matmul": _replicated_matmul,
    "all_gather_matmul": _all_gather_matmul,
    "all_gather_matmul_saving": _all_gather_matmul,
    "matmul_reduce_scatter": _matmul_reduce_scatter,
    "matmul_all_reduce": _matmul_all_reduce,
}


def keep_dims(operator: str, names: tuple[str, ...]) -> Callable[..., None]:
    """What a collective keeps for its backward pass: its dimensions, counted from the front, and the group."""

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        gradable(operator, inputs[0])
        given = dict(zip((*names, "group"), inputs[1:], strict=False))  # torch leaves defaults at the end away
        ctx.dims, ctx.group = [given.get(name, 0) % inputs[0].ndim for name in names], given.get("group", "")

    return keep


def _to(operator: str) -> Callable[..., Grads]:
    def backward(ctx: Any, grad: torch.Tensor) -> Grads:
        return getattr(ops, operator)(grad, *reversed(ctx.dims), ctx.group), *(None,) * (len(ctx.dims) + 1)

    return backward


COLLECTIVES: dict[str, Callable[..., Grads]] = {
    "all_gather": _to("reduce_scatter"),
    "reduce_scatter": _to("all_gather"),
    "all_reduce": _to("all_reduce"),
    "all_to_all": _to("all_to_all"),
}


# ------------------------------------------------------------------------------------------------------------ helpers
def wants(ctx: Any, argument: int) -> bool:
    """Whether argument 0, 1 or 2 requires a gradient; torch leaves trailing arguments away that are their defaults."""
    return argument < len(ctx.needs_input_grad) and bool(ctx.needs_input_grad[argument])


def _refuse_second(operator: str) -> None:
    if torch.is_grad_enabled():
        raise ArgumentError(
            f"pk.ops.{operator} has no second derivative.\n  Call backward() without create_graph=True."
        )


def _start(ctx: Any, grad: torch.Tensor, forward: Any) -> tuple[torch.Tensor, Any, Any]:
    """The gradient before the activation, row-major, in the operands' dtype; what was kept of a; b."""
    kept, b, a, bias, out = ctx.saved_tensors
    activation, dtype = ctx.given["activation"], ctx.layouts[0][1]
    if activation == "relu":
        grad = torch.where(out > 0, grad, torch.zeros_like(grad))
    elif activation in RECOMPUTED:
        options = {name: ctx.given[name] for name in ("out_dtype", "config", "group")}
        z = forward(a, b, bias, **options)
        kept = a
        aten = torch.ops.aten
        if activation == "silu":
            grad = aten.silu_backward(grad, z)
        else:
            grad = aten.gelu_backward(grad, z, approximate="tanh" if activation == "gelu_tanh" else "none")
    return grad.to(dtype).contiguous(), kept, b


def _collective(ctx: Any, operator: Any, g: torch.Tensor, b: torch.Tensor) -> Any:
    """``operator(g, b.T)`` with the options of the forward call that are not about its shapes."""
    deterministic, comm_sms = ctx.rest if len(ctx.rest) == 2 else (False, None)
    return operator(
        g, b.t(), config=_local(ctx), group=ctx.given["group"], deterministic=deterministic, comm_sms=comm_sms
    )


def _local(ctx: Any) -> str | None:
    """The configuration of a backward product: the library's if the forward call was to be the library's."""
    return "library" if ctx.given["config"] == "library" else None


def _left(ctx: Any, g: torch.Tensor, b: torch.Tensor, group: str) -> torch.Tensor:
    """g @ b.T in the layout of a, if TMA can store it."""
    if ctx.layouts[0][0] and g.shape[0] * g.element_size() % 16 == 0:
        return ops.matmul(b, g.t(), config=_local(ctx), group=group).t()
    return ops.matmul(g, b.t(), config=_local(ctx), group=group)


def _right(ctx: Any, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor | None:
    """x.T @ g in the layout of b, if anybody asks."""
    if not wants(ctx, 1):
        return None
    options = {"config": _local(ctx), "group": ctx.given["group"]}
    x = dense.addressable(x)
    return ops.matmul(g.t(), x, **options).t() if ctx.layouts[1][0] else ops.matmul(x.t(), g, **options)


def _bias(ctx: Any, g: torch.Tensor) -> torch.Tensor | None:
    """The sum of the rows of ``g``, in float32, as the bias is."""
    if not wants(ctx, 2):
        return None
    shape, dtype = ctx.bias
    total = g.sum(dtype=torch.float32) if all(extent == 1 for extent in shape) else g.sum(0, dtype=torch.float32)
    return total.to(dtype).reshape(shape)


def _done(ctx: Any, grad_a: torch.Tensor | None, grad_b: torch.Tensor | None, grad_bias: torch.Tensor | None) -> Grads:
    others = len(ARGUMENTS) - 3 + len(ctx.rest)
    return (grad_a, grad_b, grad_bias, *(None,) * others)
