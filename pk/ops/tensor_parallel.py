"""Tensor-parallel matrix products, communication and multiplication in one kernel.

=========================  ================  ===========  ============
operator                   a                 b            result
=========================  ================  ===========  ============
``all_gather_matmul``      (M / world, K)    (K, N)       (M, N)
``matmul_reduce_scatter``  (M, K)            (K, N)       (M / world, N)
``matmul_all_reduce``      (M, K)            (K, N)       (M, N)
=========================  ================  ===========  ============

K and N are this rank's extents.  Every call is collective: all ranks of ``group`` (a ``torch.distributed`` process
group, or None for the current one) make it, from one thread, without rows too.

The same on all ranks: shapes and dtypes of a and b, layout of b, dtype of the bias, which scales there are, and every
option; whether ``out`` of an all-reduce is symmetric; and whether the rows are kept for a gradient of b.  Else
:class:`pk.errors.RanksDisagree` is raised on every rank, with what each called.  Each rank's own: the values, the
layout of a, and where the result goes.  The bias of a sum must have one value everywhere, which nobody checks.
"""

from __future__ import annotations

from typing import Any

import torch

from pk.errors import ArgumentError
from pk.ops import baseline, calls, choose, dense, fused, inputs, options
from pk.ops.calls import Called
from pk.ops.fused import Request
from pk.ops.model import Config
from pk.ops.route import routed
from pk.runtime.group import current


@routed
def all_gather_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: Any = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    comm_sms: int | None = None,
    config: Config | str | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    save_gathered: bool = True,
) -> torch.Tensor:
    """``activation(concatenation of all ranks' a @ b + bias)``: (M, N) from this rank's rows and its columns of b.

    a (M/world, K) and b (K, N): bfloat16, float16 or float8_e4m3fn, both alike; b row-major or the transposed view of
    a row-major (N, K), as ``F.linear``'s weight is (no copy is made); float8 contiguous along K.  Rows of K and of N
    elements are multiples of 16 bytes.  ``bias`` (N,); ``activation`` "relu", "gelu", "gelu_tanh" or "silu".
    ``scale_a`` (M/world, 1) or one element, ``scale_b`` (1, N) or one element, float32.  Sums are float32.

    Returns ``out``, or a new tensor of ``out_dtype`` (the dtype of ``a``; bfloat16 for float8).  The order of the sums
    is fixed, so ``deterministic`` changes nothing but to rule the library out.  ``comm_sms``: SMs that only
    communicate, 0 for a warp of every SM beside its product; a number rules the library out too.  ``config``: a tile of
    ``pk.ops.fused.TILES``, one of ``pk.ops.fused.FEW`` for up to 256 rows, or "library" for an all-gather and a matrix
    product of torch's; by default the fastest, by estimates or by what :func:`pk.ops.tune` measured;
    :func:`pk.ops.explain` shows it.

    The gradient of b needs the rows of all ranks: ``save_gathered`` keeps them from the forward to the backward pass,
    (M, K) elements; without it they are gathered again.  See :mod:`pk.ops.autograd`.

    Raises :class:`pk.errors.ArgumentError` for shapes, strides, dtypes and options that cannot work,
    :class:`pk.errors.RanksDisagree` on every rank if they make different calls.
    """
    options.check("all_gather_matmul", save_gathered=save_gathered)
    q = request("all_gather_matmul", a, b, group, bias, activation, out, out_dtype, scale_a, scale_b)
    return _run(Called(q, out, deterministic, comm_sms, config))[0]


@routed
def matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: Any = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    comm_sms: int | None = None,
    config: Config | str | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """``activation(sum over ranks of a @ b + bias)``, of which every rank receives its M/world rows.

    a (M, K) and b (K, N) are this rank's slice of the contraction; M is a multiple of the world size.  ``scale_a``
    (M, 1) or one element.  ``bias`` is added once, and the same on every rank.  Every rank's partial sum is rounded to
    the result's dtype and sent to the owner of its rows, who adds them in float32 in a fixed order.  The rest as for
    :func:`all_gather_matmul`; ``comm_sms`` is for the all-gather of its backward pass, forward no SM is set aside.
    """
    q = request("matmul_reduce_scatter", a, b, group, bias, activation, out, out_dtype, scale_a, scale_b)
    return _run(Called(q, out, deterministic, comm_sms, config))[0]


@routed
def matmul_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: Any = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    comm_sms: int | None = None,
    config: Config | str | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """``activation(sum over ranks of a @ b + bias)``, (M, N) on every rank, with the same bits on all.

    As :func:`matmul_reduce_scatter`, for any M; the owner of a tile sends it to every rank when it is finished.
    ``out`` made by ``pk.empty`` is written by all ranks directly, which saves a copy.  ``comm_sms`` is refused: no SM
    is set aside in either direction.
    """
    q = request("matmul_all_reduce", a, b, group, bias, activation, out, out_dtype, scale_a, scale_b)
    return _run(Called(q, out, deterministic, comm_sms, config))[0]


def all_gather_matmul_saving(
    a: torch.Tensor, b: torch.Tensor, *, group: Any = None, deterministic: bool = False, comm_sms: int | None = None,
    config: Config | str | None = None, bias: torch.Tensor | None = None, activation: str | None = None,
    out_dtype: torch.dtype | None = None, scale_a: torch.Tensor | None = None, scale_b: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """:func:`all_gather_matmul`, and the rows of all ranks (M, K), which its backward pass needs."""
    q = request("all_gather_matmul", a, b, group, bias, activation, None, out_dtype, scale_a, scale_b)
    result, whole = _run(Called(q, None, deterministic, comm_sms, config, gathered=True))
    assert whole is not None
    return result, whole


# ---------------------------------------------------------------------------------------------------------- calls
def request(
    operator: str, a: torch.Tensor, b: torch.Tensor, group: Any, bias: torch.Tensor | None, activation: str | None,
    out: torch.Tensor | None, out_dtype: torch.dtype | None, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None,
) -> Request:  # fmt: skip
    """The call with everything checked that one rank can check."""
    options.check(operator, activation=activation, out_dtype=out_dtype)
    owner = current(group)
    given = {k: v for k, v in {"bias": bias, "scale_a": scale_a, "scale_b": scale_b}.items() if v is not None}
    a, b, *rest = inputs.tensors(operator, a=a, b=b, **given)
    dense.check_operands(a, b, activation)
    dense.operand("b", b, along=0)
    if operator == "matmul_reduce_scatter":
        check_shares(a, owner.world_size)
    inputs.result(operator, out, a, b, *rest)
    dtype = out_dtype or (out.dtype if out is not None else dense.default_dtype(a))
    q = Request(operator, owner, a, b, dtype, activation=activation or "none", **dict(zip(given, rest, strict=True)))
    dense.check_result(q.shape, out, dtype)
    dense.vector("bias", q.bias, q.shape[1])
    dense.vector("scale_b", q.scale_b, q.shape[1])
    dense.vector("scale_a", q.scale_a, a.shape[0])
    return q


def check_shares(a: torch.Tensor, world: int) -> None:
    """Raise :class:`pk.errors.ArgumentError` unless ``world`` ranks can share the rows of ``a`` equally."""
    if a.shape[0] % world:
        raise ArgumentError(
            f"`a` has {a.shape[0]} rows, which {world} ranks cannot share equally.\n"
            f"  Pad M to {-(-a.shape[0] // world) * world}."
        )


def _run(call: Called) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The call, if all ranks make it; and the rows of all ranks if they are kept.  Empty ones are launched too."""
    q = call.q
    options.check(q.operator, deterministic=call.deterministic, comm_sms=call.comm_sms, config=call.config)
    key = call.key()
    with q.group.turn.of(call):
        way = q.group.calls.get(key)
        if way is None:
            choose.forced(q.operator, call.deterministic, call.comm_sms, call.config)
            options.within(q.group, call.comm_sms)
            calls.compared(q.group, call)
            way = choose.decide(q, call.deterministic, call.comm_sms, call.config)
            calls.remember(q.group, key, way)
        return chosen(q, call.out, way, call.gathered)


def chosen(
    q: Request, out: torch.Tensor | None, way: choose.Choice, gathered: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The call the way that was chosen; see :func:`pk.ops.fused.run`."""
    if way.tile is None:
        return baseline.run(q, out, gathered)
    return fused.run(q, out, way.tile, way.comm_sms, gathered)
