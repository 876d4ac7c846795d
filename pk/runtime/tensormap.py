"""Tensor maps: how TMA addresses a tensor.  ``validate`` says what TMA cannot do; ``encode`` asks the driver, once.

All tuples are in the user's order, outermost dimension first, and in elements.  TMA's limits are those of
``cuTensorMapEncodeTiled``; the driver itself only ever says "invalid argument".
"""

from __future__ import annotations

import functools

from pk.errors import ArgumentError
from pk.runtime import driver

MAX_DIMS = 4  # of a pk tensor; TMA itself has 5
MAX_BOX = 256  # elements of a box along one dimension
MAX_EXTENT = 2**32
MAX_STRIDE = 2**40  # bytes
ALIGNMENT = 16  # bytes, of the base and of every stride

# pk's name -> bytes, and the driver's name for the type; fp8 moves as bytes
DTYPES = {
    "bfloat16": (2, "BFLOAT16"),
    "float16": (2, "FLOAT16"),
    "float8_e4m3": (1, "UINT8"),
    "float8_e5m2": (1, "UINT8"),
    "float8_e4m3fn": (1, "UINT8"),
    "float32": (4, "FLOAT32"),
    "int32": (4, "INT32"),
}
_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}

Ints = tuple[int, ...]


def itemsize(dtype_name: str, name: str = "tensor") -> int:
    """Bytes of an element; ArgumentError for a dtype that TMA cannot move."""
    if dtype_name not in DTYPES:
        known = ", ".join(DTYPES)
        raise ArgumentError(f"`{name}` has dtype {dtype_name}, which TMA cannot move.\n  Use one of {known}.")
    return DTYPES[dtype_name][0]


def normalised(shape: Ints, strides: Ints, size: int) -> Ints:
    """``strides`` (elements), those of extent-1 dimensions, which nothing uses, replaced by ones that TMA accepts."""
    fixed = list(strides)
    inner = 1  # elements that one step along the dimension at hand must at least pass over
    for axis in range(len(shape) - 1, -1, -1):
        if shape[axis] == 1:
            unit = ALIGNMENT // size
            fixed[axis] = 1 if axis == len(shape) - 1 else -(-inner // unit) * unit
        inner = max(inner, fixed[axis] * shape[axis])
    return tuple(fixed)


def validate(name: str, dtype_name: str, shape: Ints, strides: Ints, ptr: int = 0) -> None:
    """Raise :class:`pk.errors.ArgumentError`, naming tensor and dimension, if TMA cannot address it; needs no GPU.

    A tensor with a dimension of extent 0 is the caller's business: there is nothing to address, hence no map.
    """
    size = itemsize(dtype_name, name)
    what = f"`{name}` of shape {tuple(shape)} and strides {tuple(strides)} ({dtype_name})"
    if len(shape) != len(strides):
        raise ArgumentError(f"{what}: {len(shape)} extents and {len(strides)} strides.")
    if not 1 <= len(shape) <= MAX_DIMS:
        raise ArgumentError(f"{what} has {len(shape)} dimensions; pk's tensors have 1 to {MAX_DIMS}.\n  Pass a view.")
    for axis, extent in enumerate(shape):
        if extent < 1:
            raise ArgumentError(
                f"{what} is empty: dimension {axis} has extent {extent}, and there is nothing to address."
            )
        if extent > MAX_EXTENT:
            raise ArgumentError(
                f"{what}: dimension {axis} has extent {extent}, and TMA allows at most 2**32.\n"
                "  Split the tensor with views."
            )
    if ptr % ALIGNMENT:
        raise ArgumentError(
            f"{what} begins at address {ptr:#x}, {ptr % ALIGNMENT} bytes past a multiple of {ALIGNMENT}; "
            f"TMA needs a {ALIGNMENT}-byte aligned base.\n"
            f"  Slice at multiples of {ALIGNMENT // size} elements, or pass a copy: `{name}.clone()`."
        )
    _validate_strides(what, name, size, shape, normalised(shape, strides, size))


def _validate_strides(what: str, name: str, size: int, shape: Ints, strides: Ints) -> None:
    last = len(shape) - 1
    if strides[last] != 1:
        raise ArgumentError(
            f"{what} is not contiguous in its last dimension: its stride there is {strides[last]}, and TMA needs 1.\n"
            f"  Pass a copy: `{name}.contiguous()`."
        )
    for axis, stride in enumerate(strides[:last]):
        if stride <= 0:
            raise ArgumentError(
                f"{what}: dimension {axis} is expanded (stride {stride}); its elements share memory.\n"
                f"  Pass a copy: `{name}.contiguous()`."
            )
        if stride * size % ALIGNMENT:
            raise ArgumentError(
                f"{what}: the stride of dimension {axis} is {stride} elements = {stride * size} bytes, "
                f"and TMA needs a multiple of {ALIGNMENT} bytes.\n"
                f"  Pad it to a multiple of {ALIGNMENT // size} elements, and pass a view of the padded tensor."
            )
        if stride * size >= MAX_STRIDE:
            raise ArgumentError(
                f"{what}: the stride of dimension {axis} is {stride * size} bytes, and TMA allows less than 2**40.\n"
                "  Pass a copy that is packed more densely."
            )


def validate_stored(name: str, dtype_name: str, shape: Ints) -> None:
    """Raise :class:`pk.errors.ArgumentError` if TMA stores to the tensor would write beyond its rows.

    Loads clip at every element, but stores and adds clip at whole chunks of 16 bytes (seen on an H200).
    """
    size = itemsize(dtype_name, name)
    extra = -shape[-1] * size % ALIGNMENT
    if extra:
        raise ArgumentError(
            f"`{name}` of shape {tuple(shape)} ({dtype_name}) has rows of {shape[-1] * size} bytes, and TMA stores "
            f"write whole chunks of {ALIGNMENT} bytes: {extra} bytes behind every row would be overwritten.\n"
            f"  Make the last dimension a multiple of {ALIGNMENT // size} elements, and slice the result."
        )


def validate_box(name: str, dtype_name: str, box: Ints, swizzle: int) -> None:
    """Raise :class:`pk.errors.ArgumentError` if one TMA operation cannot move ``box`` elements of tensor ``name``."""
    size = itemsize(dtype_name, name)
    what = f"the tile {tuple(box)} of `{name}` ({dtype_name})"
    if swizzle not in _SWIZZLES:
        raise ArgumentError(f"{what}: a swizzle of {swizzle} bytes does not exist.\n  Use 0, 32, 64 or 128.")
    for axis, extent in enumerate(box):
        if not 1 <= extent <= MAX_BOX:
            raise ArgumentError(
                f"{what} has {extent} elements along dimension {axis}, and TMA moves 1 to {MAX_BOX}.\n"
                "  Use a smaller tile."
            )
    inner = box[-1] * size
    if inner % ALIGNMENT:
        raise ArgumentError(
            f"{what} has rows of {inner} bytes, and TMA needs a multiple of {ALIGNMENT} bytes.\n"
            f"  Make it a multiple of {ALIGNMENT // size} elements wide."
        )
    if swizzle and inner > swizzle:
        raise ArgumentError(
            f"{what} has rows of {inner} bytes, wider than its swizzle of {swizzle} bytes.\n"
            f"  Move it in panels of {swizzle // size} elements."
        )


@functools.lru_cache(maxsize=4096)
def encode(
    ptr: int, dtype_name: str, shape: Ints, strides: Ints, box: Ints, swizzle: int, name: str = "tensor"
) -> bytes:
    """The 128 bytes of a CUtensorMap; the same arguments are encoded once (4096 are kept).

    ``ptr`` may be memory of a peer, as mapped here.  Raises as :func:`validate` and :func:`validate_box` do, and
    :class:`pk.errors.BackendError` without a driver.
    """
    validate(name, dtype_name, shape, strides, ptr)
    validate_box(name, dtype_name, box, swizzle)
    if len(box) != len(shape):
        raise ArgumentError(f"the tile {tuple(box)} of `{name}` has {len(box)} dimensions, the tensor {len(shape)}.")
    size, kind = DTYPES[dtype_name]
    byte_strides = [s * size for s in normalised(shape, strides, size)[:-1]]
    return driver.encode_tiled(kind, ptr, shape[::-1], byte_strides[::-1], box[::-1], _SWIZZLES[swizzle])
