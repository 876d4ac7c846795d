"""``torch.ops.pk``: the operators for autograd, ``torch.compile``, ``torch.export`` and autocast.

The functions of ``pk.ops`` go through these whenever one of them looks on; see ``pk.ops.route``.  A group is passed by
name: ``""`` is the caller's, ``group.group_name`` a process group's.

Like every collective, these must run in one order on all ranks of a group.  A compiled graph keeps the order of the
program it came from; ranks must compile the same program, for the same shapes.

CUDA graphs: a call is recorded like any other launch.  What needs memory or the host must have happened before: run
the same shapes once, forward and backward, on the stream that captures, and hold the group's calls back on no rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pk.errors import ArgumentError
from pk.ops import autograd, collectives, dense, tensor_parallel
from pk.runtime.names import named

_VALUES = (
    "Tensor a, Tensor b, Tensor? bias=None, str activation='none', ScalarType? out_dtype=None, "
    "Tensor? scale_a=None, Tensor? scale_b=None, str? config=None, str group=''"
)
_PARALLEL = f"({_VALUES}, bool deterministic=False, int? comm_sms=None)"
SCHEMAS = {
    "matmul": f"({_VALUES}, int? sms=None) -> Tensor",
    "replicated_matmul": f"({_VALUES}, int? sms=None) -> Tensor",
    "all_gather_matmul": f"{_PARALLEL} -> Tensor",
    "all_gather_matmul_saving": f"{_PARALLEL} -> (Tensor, Tensor)",
    "matmul_reduce_scatter": f"{_PARALLEL} -> Tensor",
    "matmul_all_reduce": f"{_PARALLEL} -> Tensor",
    "all_gather": "(Tensor x, int dim=0, str group='') -> Tensor",
    "reduce_scatter": "(Tensor x, int dim=0, str group='') -> Tensor",
    "all_reduce": "(Tensor x, str group='') -> Tensor",
    "all_to_all": "(Tensor x, int split_dim=0, int concat_dim=0, str group='') -> Tensor",
}
"""``all_gather_matmul_saving`` returns the gathered rows too, for its own backward pass.  ``replicated_matmul`` is a
matmul of an ``a`` that all ranks have alike: its backward pass sums their gradients."""

Values = dict[str, Any]


# ------------------------------------------------------------------------------------------------- what they compute
def _given(group: str, **values: Any) -> Values:
    return {**values, "group": named(group)}


def _matmul(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "none",
    out_dtype: torch.dtype | None = None, scale_a: torch.Tensor | None = None, scale_b: torch.Tensor | None = None,
    config: str | None = None, group: str = "", sms: int | None = None,
) -> torch.Tensor:  # fmt: skip
    return dense.matmul.direct(
        a, b, bias=bias, activation=activation, out_dtype=out_dtype, scale_a=scale_a, scale_b=scale_b, config=config,
        group=group or None, sms=sms,
    )  # fmt: skip


def _parallel(direct: Callable[..., Any]) -> Callable[..., Any]:
    def compute(
        a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "none",
        out_dtype: torch.dtype | None = None, scale_a: torch.Tensor | None = None, scale_b: torch.Tensor | None = None,
        config: str | None = None, group: str = "", deterministic: bool = False, comm_sms: int | None = None,
    ) -> Any:  # fmt: skip
        given = _given(
            group,
            bias=bias,
            activation=activation,
            out_dtype=out_dtype,
            scale_a=scale_a,
            scale_b=scale_b,
            config=config,
        )
        return direct(a, b, deterministic=deterministic, comm_sms=comm_sms, **given)

    return compute


def _collective(operator: str) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    """What ``operator`` computes, and in shapes.  Behind x come its dimensions and the group's name."""

    def given(x: torch.Tensor, rest: tuple[Any, ...], named_: dict[str, Any]) -> tuple[dict[str, int], str]:
        values = dict(zip((*names, "group"), rest, strict=False)) | named_
        dims = {name: collectives.along(operator, name, values.get(name, 0), x) for name in names}
        return dims, values.get("group", "")

    def compute(x: torch.Tensor, *rest: Any, **named_: Any) -> torch.Tensor:
        dims, group = given(x, rest, named_)
        return collectives.direct(operator, x, dims, named(group), None)

    def fake(x: torch.Tensor, *rest: Any, **named_: Any) -> torch.Tensor:
        dims, group = given(x, rest, named_)
        return x.new_empty(collectives.result_shape(operator, x, dims, named(group).world_size))

    names = collectives.DIMENSIONS[operator]
    return compute, fake


# --------------------------------------------------------------------------------------- what they compute, in shapes
def _fake(operator: str) -> Callable[..., Any]:
    """The result of ``operator`` without memory, with the checks that need no values."""

    def fake(
        a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "none",
        out_dtype: torch.dtype | None = None, scale_a: torch.Tensor | None = None, scale_b: torch.Tensor | None = None,
        config: str | None = None, group: str = "", *options: Any,
    ) -> Any:  # fmt: skip
        dense.check_operands(a, b, activation)
        _same_device(operator, a, {"b": b, "bias": bias, "scale_a": scale_a, "scale_b": scale_b})
        rows, world = a.shape[0], named(group).world_size if operator not in ("matmul", "replicated_matmul") else 1
        if operator == "matmul_reduce_scatter":
            tensor_parallel.check_shares(a, world)
            rows = rows // world
        elif operator.startswith("all_gather"):
            rows = rows * world
        shape, dtype = (rows, b.shape[1]), out_dtype or dense.default_dtype(a)
        dense.check_result(shape, None, dtype)
        dense.vector("bias", bias, shape[1])
        dense.vector("scale_b", scale_b, shape[1])
        dense.vector("scale_a", scale_a, a.shape[0])
        result = a.new_empty(shape, dtype=dtype)
        return (result, a.new_empty((rows, a.shape[1]))) if operator.endswith("saving") else result

    return fake


def _same_device(operator: str, a: torch.Tensor, given: dict[str, torch.Tensor | None]) -> None:
    """One argument on "meta" brings a call here whose other arguments hold values: it would give a result of none."""
    for name, x in given.items():
        if x is not None and x.device != a.device:
            raise ArgumentError(
                f"`{name}` of pk.ops.{operator.removesuffix('_saving')} is on {x.device}, and `a` on {a.device}.\n"
                "  Pass all on one device; a tensor on meta has no values."
            )


# ------------------------------------------------------------------------------------------------------- registration
COMPUTE: dict[str, Callable[..., Any]] = {
    "matmul": _matmul,
    "replicated_matmul": _matmul,
    "all_gather_matmul": _parallel(tensor_parallel.all_gather_matmul.direct),
    "all_gather_matmul_saving": _parallel(tensor_parallel.all_gather_matmul_saving),
    "matmul_reduce_scatter": _parallel(tensor_parallel.matmul_reduce_scatter.direct),
    "matmul_all_reduce": _parallel(tensor_parallel.matmul_all_reduce.direct),
} | {name: _collective(name)[0] for name in collectives.DIMENSIONS}
_fragment = torch.library.Library("pk", "FRAGMENT")


def _register(name: str) -> Any:
    made = torch.library.custom_op(f"pk::{name}", COMPUTE[name], mutates_args=(), schema=SCHEMAS[name])
    made.register_vmap(_refuse_vmap(name))
    if name in collectives.DIMENSIONS:
        made.register_fake(_collective(name)[1])
        made.register_autograd(
            autograd.COLLECTIVES[name], setup_context=autograd.keep_dims(name, collectives.DIMENSIONS[name])
        )
        return made
    made.register_fake(_fake(name))
    made.register_autograd(autograd.BACKWARD[name], setup_context=autograd.setup(name))
    for device in ("CPU", "CUDA"):
        _fragment.impl(name, _autocast(name, device.lower()), f"Autocast{device}")
    return made


def _refuse_vmap(name: str) -> Callable[..., Any]:
    collective = name not in ("matmul", "replicated_matmul")
    advice = "  Fold the batch into the rows: `x.flatten(0, -2)`."
    if name in collectives.DIMENSIONS:
        advice = "  Pass the whole batch: x has any number of dimensions."

    def refuse(info: Any, in_dims: Any, *args: Any) -> Any:
        raise ArgumentError(
            f"pk.ops.{name} cannot be batched by torch.vmap: it is one launch{' on all ranks' * collective}.\n{advice}"
        )

    return refuse


def _autocast(name: str, device: str) -> Callable[..., Any]:
    """Operands and bias in autocast's dtype; scales are float32, and float8 operands stay what they are."""
    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device.upper()}"))

    def cast(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, *rest: Any, **options: Any) -> Any:
        a, b, bias = autograd.in_autocast(a, b, bias, device)
        with torch._C._ExcludeDispatchKeyGuard(key):
            return getattr(torch.ops.pk, name)(a, b, bias, *rest, **options)

    return cast


OPERATORS = {name: _register(name) for name in SCHEMAS}
