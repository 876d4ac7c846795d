"""What pk refuses of a tensor, in the same words on a GPU and in the simulator; and torch's dtypes by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pk.errors import ArgumentError, short
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
        raise ArgumentError(f"{short(dtype)} is no dtype that pk can move.\n  Use one of {', '.join(DTYPES)}.")
    found = getattr(torch, {"float8_e4m3": "float8_e4m3fn"}.get(name, name))
    assert isinstance(found, torch.dtype)
    return found


class _Viewed:
    """What NumPy reads to make an array over the memory of ``tensor``, which it keeps alive."""

    def __init__(self, tensor: torch.Tensor, interface: dict[str, object]) -> None:
        self.tensor, self.__array_interface__ = tensor, interface


def numpy_view(tensor: torch.Tensor, storage: str | None = None) -> Any:
    """A NumPy array over the memory of a CPU tensor, shape and strides kept; writing to one writes to the other.

    ``storage``: the name of NumPy's dtype for an element, of its size; by default the tensor's own.

    Not ``tensor.numpy()``: that forbids for ever to resize the tensor's storage, as FSDP does with parameters.
    """
    import numpy as np

    dtype, size = np.dtype(storage or str(tensor.dtype).removeprefix("torch.")), tensor.element_size()
    assert dtype.itemsize == size, (tensor.dtype, storage)
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), dtype)
    interface: dict[str, object] = {
        "version": 3, "typestr": dtype.str, "data": (tensor.data_ptr(), False), "shape": tuple(tensor.shape),
        "strides": tuple(stride * size for stride in tensor.stride()),
    }  # fmt: skip
    return np.asarray(_Viewed(tensor, interface))


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
    if tensor.numel() and not tensor.untyped_storage().nbytes():  # as FSDP leaves parameters between their uses
        raise ArgumentError(
            f"`{name}` of {where} has shape {tuple(tensor.shape)}, and its memory has been freed: its storage is 0 "
            "bytes.\n  Use it where its owner has filled it; FSDP frees a parameter when its module's forward ends."
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
