"""What pk refuses of a tensor, in the same words on a GPU and in the simulator; and torch's dtypes by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pk.errors import ArgumentError
from pk.runtime.tensormap import DTYPES

if TYPE_CHECKING:
    import torch


def torch_dtype(dtype: Any) -> torch.dtype:
    """torch's dtype for itself, one of pk's, or a name; :class:`pk.errors.ArgumentError` if there is none."""
    import torch

    if isinstance(dtype, torch.dtype):
        return dtype
    name = str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    if name not in DTYPES:
        raise ArgumentError(f"{dtype!r} is no dtype that pk can move.\n  Use one of {', '.join(DTYPES)}.")
    found = getattr(torch, {"float8_e4m3": "float8_e4m3fn"}.get(name, name))
    assert isinstance(found, torch.dtype)
    return found


def plain(tensor: torch.Tensor, name: str, where: str) -> None:
    """Raise :class:`pk.errors.ArgumentError` unless ``tensor`` is strided memory that holds its values as they are.

    ``where``: whose argument it is, such as ``kernel `gemm```.
    """
    import torch

    if tensor.layout != torch.strided:
        raise ArgumentError(
            f"`{name}` of {where} is a tensor of layout {tensor.layout}, and pk reads strided memory.\n"
            f"  Pass `{name}.to_dense()`."
        )
    if tensor.device.type == "meta":
        raise ArgumentError(
            f"`{name}` of {where} is on meta: a tensor of shape {tuple(tensor.shape)} without memory.\n"
            f"  Pass a tensor with contents, such as `torch.empty_like({name}, device=pk.device())`."
        )
    for marked, word, call in (
        (tensor.is_neg(), "negated", "resolve_neg()"), (tensor.is_conj(), "conjugated", "resolve_conj()"),
    ):  # fmt: skip
        if marked:
            raise ArgumentError(
                f"`{name}` of {where} is lazily {word}: its memory does not hold its values.\n  Pass `{name}.{call}`."
            )


def separate(tensor: torch.Tensor, name: str, kernel: str) -> None:
    """Raise :class:`pk.errors.ArgumentError` if elements of ``tensor``, which ``kernel`` writes, share memory."""
    inside = 0  # elements from the first to the last of one step along the dimension at hand
    if not tensor.numel():
        return
    dims = [(stride, extent, axis) for axis, (extent, stride) in enumerate(zip(tensor.shape, tensor.stride()))]  # noqa: B905
    for stride, extent, axis in sorted(d for d in dims if d[1] > 1):
        if stride <= inside:
            raise ArgumentError(
                f"`{name}` of shape {tuple(tensor.shape)} and strides {tensor.stride()} overlaps itself, and kernel "
                f"`{kernel}` writes it: one step along dimension {axis} is {stride} elements, and what lies inside "
                f"it spans {inside + 1}.\n"
                f"  Pass memory of its own for every element: `torch.empty({tuple(tensor.shape)}, ...)`."
            )
        inside += (extent - 1) * stride
