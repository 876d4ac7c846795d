"""What every operator asks of its tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from pk.errors import ArgumentError, made_of
from pk.runtime.tensormap import ALIGNMENT, validate
from pk.runtime.tensors import plain, separate

SUMMED = (torch.bfloat16, torch.float16, torch.float32)
"""What the collectives add up."""


def tensors(operator: str, **given: Any) -> tuple[torch.Tensor, ...]:
    """The arguments as plain strided tensors, in order; lazily negated or conjugated ones are written out.

    Raises :class:`pk.errors.ArgumentError` for what is no tensor of memory.
    """
    return tuple(_one(operator, name, value) for name, value in given.items())


def are_tensors(operator: str, **given: Any) -> None:
    """Raise :class:`pk.errors.ArgumentError` for an argument that is no tensor."""
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(
                f"`{name}` of pk.ops.{operator} is {type(value).__name__}, and must be a torch.Tensor.\n"
                f"  Pass {made_of(name, value)}."
            )


def _one(operator: str, name: str, value: Any) -> torch.Tensor:
    where = f"pk.ops.{operator}"
    are_tensors(operator, **{name: value})
    if value.is_quantized or value.is_nested:
        kind, way = ("nested", "to_padded_tensor(0)") if value.is_nested else ("quantized", "int_repr()")
        raise ArgumentError(
            f"`{name}` of {where} is a {kind} tensor, and pk reads plain memory.\n  Pass `{name}.{way}`."
        )
    if value.layout == torch.strided and value.device.type != "meta":
        value = value.resolve_neg().resolve_conj()
    plain(value, name, where)
    return value


def gradable(operator: str, x: torch.Tensor) -> None:
    """Raise :class:`pk.errors.ArgumentError` if ``x`` requires a gradient that no sum over ranks can be."""
    if operator == "all_gather" and x.requires_grad and x.dtype not in SUMMED:
        raise ArgumentError(
            f"`x` of pk.ops.all_gather requires a gradient and is {x.dtype}: its gradient is a sum over the ranks, and "
            f"sums are of {', '.join(map(str, SUMMED))}.\n  Cast it to one of them, or pass `x.detach()`."
        )


def traced(x: torch.Tensor) -> bool:
    """Whether ``x`` stands for a tensor in a trace: it has no memory, hence no address."""
    return isinstance(x, (FakeTensor, FunctionalTensor)) or torch._is_functional_tensor(x)


def result(operator: str, out: Any, *given: torch.Tensor | None) -> None:
    """Raise :class:`pk.errors.ArgumentError` if ``out`` is no memory that the operator may write, or None.

    ``given``: what it reads, of which ``out`` may be no part.  Its shape and dtype are checked elsewhere.
    """
    if out is None:
        return
    where = f"pk.ops.{operator}"
    is_out(operator, out)
    if traced(out):
        return
    plain(out, "out", where)
    separate(out, "out", operator)
    if out.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            f"`out` of {where} requires a gradient, and has no history here.\n  Pass `out.detach()`, or leave it away."
        )
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ArgumentError(
            f"`out` of {where} was made in inference mode, and may be written in that only.\n"
            "  Pass `out.clone()`, or make the call under torch.inference_mode()."
        )
    for tensor in given:
        if tensor is not None and _overlap(out, tensor):
            raise ArgumentError(
                f"`out` of {where} shares memory with an operand of shape {tuple(tensor.shape)}, which is read while "
                "`out` is written.\n  Pass memory of its own, or leave it away."
            )
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)  # autograd does not see what a kernel writes, and peers


def is_out(operator: str, out: Any) -> None:
    """Raise :class:`pk.errors.ArgumentError` unless ``out`` is a tensor."""
    if not isinstance(out, torch.Tensor):
        raise ArgumentError(
            f"`out` of pk.ops.{operator} is {type(out).__name__}, and must be a torch.Tensor.\n"
            "  Pass one made by `torch.empty`, or leave it away."
        )


def fits(out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise :class:`pk.errors.ArgumentError` unless ``out`` can hold a result of ``shape`` and ``dtype``, by rows."""
    alike(out, shape, dtype)
    if out.stride(1) != 1 and out.shape[1] > 1:
        _lie(out, shape, dtype, "its rows must be")


def fits_whole(out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The same for a result of any number of dimensions, without gaps."""
    alike(out, shape, dtype)
    if not out.is_contiguous():
        _lie(out, shape, dtype, "must be")


def alike(out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise :class:`pk.errors.ArgumentError` unless ``out`` has this ``shape`` and ``dtype``."""
    if tuple(out.shape) != shape or out.dtype != dtype:
        raise ArgumentError(
            f"`out` is {tuple(out.shape)} {out.dtype}, and the result is {shape} {dtype}.\n"
            f"  Pass `torch.empty({shape}, dtype={dtype}, ...)`, or leave it away."
        )


def _lie(out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, how: str) -> None:
    raise ArgumentError(
        f"`out` has strides {out.stride()}, and {how} contiguous.\n"
        f"  Pass `torch.empty({shape}, dtype={dtype}, ...)`, or leave it away."
    )


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether an element of ``x`` may be one of ``y``; columns of one matrix that lie side by side are told apart."""
    if x.numel() == 0 or y.numel() == 0 or x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr():
        return False
    (x_first, x_stop), (y_first, y_stop) = _span(x), _span(y)
    if x_stop <= y_first or y_stop <= x_first:
        return False
    rows = x.ndim == y.ndim == 2 and x.stride(1) == y.stride(1) == 1
    if rows and x.stride(0) * x.element_size() == y.stride(0) * y.element_size():
        step = x.stride(0) * x.element_size()
        gap = (y_first - x_first) % step  # from where x begins to where y does, in a row
        return gap < x.shape[1] * x.element_size() or step - gap < y.shape[1] * y.element_size()
    return True


def _span(x: torch.Tensor) -> tuple[int, int]:
    """The first byte of ``x``, and the one behind its last."""
    last = sum((extent - 1) * stride for extent, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def addressable(name: str, x: torch.Tensor) -> None:
    """Raise :class:`pk.errors.ArgumentError`, in the caller's names, unless TMA can address the matrix ``x``."""
    if x.numel() == 0:
        return
    step = x.stride(0) * x.element_size()
    if step > 0 and step % ALIGNMENT == 0 and x.data_ptr() % ALIGNMENT == 0:
        return
    dtype = str(x.dtype).removeprefix("torch.").removesuffix("fn")
    validate(name, dtype, tuple(x.shape), x.stride(), x.data_ptr())


def storable(shape: tuple[int, int], dtype: torch.dtype, out: torch.Tensor | None) -> None:
    """Raise :class:`pk.errors.ArgumentError` unless TMA can store a result of ``shape``, to ``out`` if there is one."""
    size = dtype.itemsize
    if shape[1] * size % ALIGNMENT:
        raise ArgumentError(
            f"the result is {shape} {dtype}: its rows are {shape[1] * size} bytes, and TMA stores multiples of "
            f"{ALIGNMENT}.\n  Pad N to a multiple of {ALIGNMENT // size}, and slice the result."
        )
    if out is not None:
        addressable("out", out)
