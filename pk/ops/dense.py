"""``pk.ops.matmul``: one rank's matrix product, with whatever its epilogue can do on the way out."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from pk.errors import ArgumentError, short
from pk.ops import cublas, inputs, kernels, model, options
from pk.ops.model import CONFIGS, Config, Problem
from pk.ops.options import ACTIVATIONS, LIBRARY, RESULTS
from pk.ops.route import routed
from pk.runtime.group import Group, alone

SIXTEEN_BIT = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
__all__ = [
    "ACTIVATIONS", "FP8", "LIBRARY", "RESULTS", "SIXTEEN_BIT", "Operand", "addressable", "aligned", "arguments",
    "check_operands", "check_result", "columns_first", "default_dtype", "explain", "matmul", "no_library", "operand",
    "vector", "without_k",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Operand:
    """A matrix as TMA can address it: rows contiguous (``transposed``: of its transpose)."""

    memory: torch.Tensor
    transposed: bool


@routed
def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    config: Config | str | None = None,
    group: Any = None,
    sms: int | None = None,
) -> torch.Tensor:
    """``activation(a @ b * scale_a * scale_b + bias)``, computed in float32 and rounded once.

    One rank's product: it meets no other rank, wherever this one runs, and ranks may call it as often as they like,
    each with shapes of its own.  ``group`` says whose GPU and share of its SMs it runs on, by default the caller's.

    a (M, K) and b (K, N): bfloat16, float16 or float8_e4m3fn, both alike, each row-major or the transposed view of
    a row-major matrix (no copy is made), as ``F.linear``'s weight is: ``matmul(x, weight.T)``; float8 must be
    contiguous along K, as ``torch._scaled_mm`` wants it too.  N is a multiple of 16 bytes.  ``bias`` (N,);
    ``activation`` "relu", "gelu", "gelu_tanh" or "silu"; ``scale_a`` (M, 1) or one element, ``scale_b`` (1, N) or one
    element, float32.

    Returns ``out``, or a new (M, N) of ``out_dtype``: by default the dtype of ``a``, bfloat16 for float8.
    ``config`` names one of ``pk.ops.model.CONFIGS``, or "library" for torch's; by default the model chooses, and on
    CUDA it takes the library where that has the lower estimate and does the same in one kernel
    (:func:`pk.ops.explain` tells).  ``sms``: SMs that it may fill; fewer than all rule the library out.
    Raises :class:`pk.errors.ArgumentError` for what cannot work.
    """
    options.check("matmul", activation=activation, out_dtype=out_dtype, config=config, sms=sms)
    tile, owner = _config(config), alone(group)
    options.within(owner, sms=sms)
    given = {k: v for k, v in {"bias": bias, "scale_a": scale_a, "scale_b": scale_b}.items() if v is not None}
    a, b, *rest = inputs.tensors("matmul", a=a, b=b, **given)
    vectors = dict(zip(given, rest, strict=True))
    check_operands(a, b, activation)
    inputs.result("matmul", out, a, b, *rest)
    out = _result(a, b, out, out_dtype)
    for name, extent in (("bias", b.shape[1]), ("scale_a", a.shape[0]), ("scale_b", b.shape[1])):
        vector(name, vectors.get(name), extent)
    if out.numel() == 0 or a.shape[1] == 0:
        return without_k(out, vectors.get("bias"), activation)
    limit = sms or owner.sms
    problem = _problem(a, b, out, limit or model.SMS)
    if config is None and a.is_cuda and limit in (None, _sms_of(a.device)):
        if out.is_contiguous() and not no_library(a, out.dtype, activation, vectors) and cublas.preferred(problem):
            config = LIBRARY
    if config == LIBRARY:
        from pk.ops import baseline

        epilogue = vectors.get("bias"), activation or "none", vectors.get("scale_a"), vectors.get("scale_b")
        return baseline.product(a, b, out.dtype, *epilogue, out)
    _launch(a, b, out, vectors, activation or "none", tile or model.choose(problem), owner, sms)
    return out


def explain(
    a: torch.Tensor, b: torch.Tensor, *, bias: torch.Tensor | None = None, activation: str | None = None,
    out_dtype: torch.dtype | None = None, scale_a: torch.Tensor | None = None, scale_b: torch.Tensor | None = None,
    config: Config | str | None = None, sms: int | None = None,
) -> str:  # fmt: skip
    """What :func:`matmul` chooses for these operands on CUDA, which may be on "meta", the runners-up, and why."""
    options.check("matmul", activation=activation, out_dtype=out_dtype, config=config, sms=sms)
    check_operands(a, b, activation)
    given = {"bias": bias, "scale_a": scale_a, "scale_b": scale_b}
    dtype = out_dtype or default_dtype(a)
    p = _problem(a, b, torch.empty((0,), dtype=dtype, device="meta"), sms or _sms(a))
    why = no_library(a, dtype, activation, {k: v for k, v in given.items() if v is not None})
    if sms not in (None, _sms(a)):
        why = "the library takes all SMs"
    library = config == LIBRARY or (config is None and not why and cublas.preferred(p))
    table = model.explain(p, taken=_config(config), arrow=not library)
    if config is not None:
        why = "asked for by `config`"
    elif not why:
        why = "the lowest estimate" if library else "not quicker"
        if p.m <= cublas.FEW_ROWS:
            why = f"{cublas.DOUBT:.0%} are in doubt for few rows" if library else "slower, even beyond doubt"
    return f"{table}\n  {'->' if library else '  '} {LIBRARY:<14} {cublas.microseconds(p):9.1f} us  {why}"


def no_library(a: torch.Tensor, dtype: torch.dtype, activation: str | None, vectors: dict[str, torch.Tensor]) -> str:
    """Why the library is no candidate for this call, whose epilogue or dtypes it has not in one kernel; "" if it is."""
    if a.dtype not in SIXTEEN_BIT or dtype != a.dtype:
        return f"the library is not measured for {a.dtype} to {dtype}"
    if activation not in (None, "none") or vectors.keys() - {"bias"}:
        return "the library has no such epilogue"
    bias = vectors.get("bias")
    return "the library would round before it adds this bias" if bias is not None and bias.dtype != dtype else ""


# ------------------------------------------------------------------------------------------------- arguments
def check_operands(a: torch.Tensor, b: torch.Tensor, activation: str | None) -> None:
    """Raise :class:`pk.errors.ArgumentError` unless these are matrices that can be multiplied."""
    for name, tensor in (("a", a), ("b", b)):
        if tensor.ndim != 2:
            raise ArgumentError(f"`{name}` has shape {tuple(tensor.shape)}, not 2 dimensions.\n  Pass a matrix.")
        if tensor.dtype not in (*SIXTEEN_BIT, FP8):
            raise ArgumentError(
                f"`{name}` is {tensor.dtype}, and must be torch.bfloat16, torch.float16 or {FP8}.\n"
                f"  Cast it with `{name}.bfloat16()`."
            )
    if a.dtype != b.dtype:
        raise ArgumentError(f"`a` is {a.dtype} and `b` is {b.dtype}.\n  Cast one: both must have the same dtype.")
    if a.shape[1] != b.shape[0]:
        raise ArgumentError(
            f"`a` is {tuple(a.shape)} and `b` is {tuple(b.shape)}: "
            f"the inner extents {a.shape[1]} and {b.shape[0]} differ.\n  a is (M, K) and b is (K, N)."
        )
    options.check_activation(activation)


def default_dtype(a: torch.Tensor) -> torch.dtype:
    """Of a product of ``a``."""
    return torch.bfloat16 if a.dtype == FP8 else a.dtype


def _result(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor:
    dtype = dtype or (out.dtype if out is not None else default_dtype(a))
    shape = (a.shape[0], b.shape[1])
    check_result(shape, out, dtype)
    return a.new_empty(shape, dtype=dtype) if out is None else out


def check_result(shape: tuple[int, int], out: torch.Tensor | None, dtype: torch.dtype) -> None:
    """Raise :class:`pk.errors.ArgumentError` unless a result of ``shape`` and ``dtype`` can be, and ``out`` is one."""
    options.check_result(dtype)
    if out is not None:
        inputs.fits(out, shape, dtype)


def columns_first(x: torch.Tensor) -> bool:
    """Whether ``x`` is the transposed view of a row-major matrix."""
    if x.shape[1] == 1:  # one column is one row of the other: TMA wants rows of 16 bytes
        return x.shape[0] > 1 and x.stride(0) == 1 and x.element_size() > 1
    return x.stride(1) != 1 and (x.stride(0) == 1 or x.shape[0] == 1)


def operand(name: str, x: torch.Tensor, along: int) -> Operand:
    """``x`` as TMA can address it; ``along`` is the axis of K, along which 8-bit operands must be contiguous."""
    if columns_first(x):
        found = Operand(x.T, transposed=True)
    elif x.stride(1) == 1 or x.shape[1] == 1:
        found = Operand(x, transposed=False)
    else:
        raise ArgumentError(
            f"`{name}` has strides {x.stride()}: neither its rows nor its columns are contiguous.\n"
            f"  Pass `{name}.contiguous()`."
        )
    if x.element_size() == 1 and x.numel() and found.transposed != (along == 0):
        kept = f"{name}.contiguous()" if along == 1 else f"{name}.T.contiguous().T"
        raise ArgumentError(
            f"`{name}` of {x.dtype} is not contiguous along K, and the tensor core reads 8-bit operands no other way.\n"
            f"  Pass `{kept}`."
        )
    return found


def _config(config: Config | str | None) -> Config | None:
    """The one asked for; None if none is, or the library."""
    if isinstance(config, str) and config != LIBRARY:
        if config not in CONFIGS:
            raise ArgumentError(
                f"config={short(config)} is no configuration.\n  There are {', '.join(CONFIGS)}, library."
            )
        return CONFIGS[config]
    return None if isinstance(config, str) else config


def _problem(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, sms: int) -> Problem:
    layout = "nk" if columns_first(b) else "kn"
    return Problem(a.shape[0], b.shape[1], a.shape[1], 8 * a.element_size(), 8 * out.element_size(), sms, layout)


@functools.cache
def _sms_of(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _sms(a: torch.Tensor) -> int:
    return _sms_of(a.device) if a.is_cuda else model.SMS


def vector(name: str, x: torch.Tensor | None, count: int) -> torch.Tensor | None:
    """``x`` as (count,), expanded from one element."""
    if x is None:
        return None
    if x.numel() not in (1, count):
        raise ArgumentError(f"`{name}` has shape {tuple(x.shape)}, and must have 1 or {count} elements.")
    if x.numel() > 1 and x.shape[0 if name == "scale_a" else -1] != count:  # of rows, or of columns
        wanted = f"({count}, 1)" if name == "scale_a" else f"({count},) or (1, {count})"
        raise ArgumentError(f"`{name}` has shape {tuple(x.shape)}, and must have {wanted}, or 1 element.")
    if name != "bias" and x.dtype != torch.float32:
        raise ArgumentError(f"`{name}` is {x.dtype}, and must be torch.float32.\n  Pass `{name}.float()`.")
    if name == "bias" and x.dtype not in RESULTS:
        raise ArgumentError(f"`bias` is {x.dtype}, and must be {', '.join(map(str, RESULTS))}.\n  Pass `bias.float()`.")
    flat = x.reshape(-1)
    return flat.expand(count) if flat.numel() == 1 else flat


def without_k(out: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    """The result where there is nothing to sum."""
    zero = torch.zeros((), dtype=torch.float32, device=out.device)
    row = zero if bias is None else bias.float()
    functions = {
        "relu": torch.relu, "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }  # fmt: skip
    return out.copy_(functions.get(activation or "none", lambda x: x)(row).expand_as(out))


# ---------------------------------------------------------------------------------------------------- launch
def arguments(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, vectors: dict[str, torch.Tensor], activation: str, c: Config
) -> dict[str, Any]:
    """The kernel's arguments for one product; ``swap`` computes ``out.T = b.T @ a.T``."""
    if c.swap and c.cols * a.element_size() < 32 and columns_first(a):
        a = _with_rows(a)
    left, right = operand("a", a, along=1), operand("b", b, along=0)
    m, n = out.shape
    row = vector("scale_a", vectors.get("scale_a"), m)
    col = vector("scale_b", vectors.get("scale_b"), n)
    bias = vector("bias", vectors.get("bias"), n)
    if c.swap:
        left, right = Operand(right.memory, not right.transposed), Operand(left.memory, not left.transposed)
        row, col, m, n = col, row, n, m
    scalar = col is not None and col.stride(0) == 0 and n > 1
    found = {
        "a": left.memory, "b": right.memory, "c": out,
        "row_scale": None if row is None else row.unsqueeze(1),
        "col_scale": None if col is None or scalar else aligned(col).unsqueeze(0),
        "scale": col[:1].unsqueeze(0) if scalar and col is not None else None,
        "row_bias": bias.unsqueeze(1) if bias is not None and c.swap else None,
        "col_bias": aligned(bias).unsqueeze(0) if bias is not None and not c.swap else None,
        "parts": out.new_empty((c.split - 1, m, n), dtype=torch.float32) if c.split > 1 else None,
    }  # fmt: skip
    through_shared = found["col_scale"] is not None or found["col_bias"] is not None
    constants = c.constants(a.element_size(), out.element_size(), through_shared)
    return {
        **found, **constants, "A_T": left.transposed, "B_T": right.transposed, "C_T": c.swap, "ACTIVATION": activation,
    }  # fmt: skip


def addressable(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy with contiguous rows if TMA can address neither its rows nor its columns.

    In a trace tensors have no address: there it is taken to be a good one.
    """
    rows = x.T if columns_first(x) else x
    step = rows.stride(0) * x.element_size()
    if rows.stride(1) == 1 and step > 0 and step % 16 == 0 and (inputs.traced(x) or x.data_ptr() % 16 == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _with_rows(a: torch.Tensor) -> torch.Tensor:
    """A copy with contiguous rows: the tensor core does not read columns of 8 rows of ``a``, of which this has few."""
    step = -(-a.shape[1] // 16) * 16
    return a.new_empty((a.shape[0], step)).narrow(1, 0, a.shape[1]).copy_(a)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """``x`` as TMA can load it: contiguous, at a multiple of 16 bytes."""
    return x.contiguous() if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def _launch(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, vectors: dict[str, torch.Tensor], activation: str, c: Config,
    group: Group, sms: int | None,
) -> None:  # fmt: skip
    inputs.storable((out.shape[0], out.shape[1]), out.dtype, out)
    kernels.matmul(**arguments(a, b, out, vectors, activation, c), group=group, sms=sms)
