"""Everything that can be read or written: tensors, scratch and shared tiles, behind one access function.

All data moves through :meth:`Memory.access`, which knows who touches which window of what, and why.  A race
detector hooks in there (``observer``) and needs nothing from the ops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pk.ir import nodes as ir
from pk.ir.types import DType
from pk.sim.values import STORAGE, Array, decode, encode

Kind = Literal["read", "write", "add"]


@dataclass(frozen=True, slots=True)
class SimTensor:
    """A tensor argument: ``array`` is a (strided) view of its storage (see ``sim.values``), changed in place."""

    array: Array
    dtype: DType


@dataclass(frozen=True, slots=True)
class Who:
    """The thread group that made an access, or that issued the asynchronous operation which made it."""

    rank: int
    block: int
    role: str


@dataclass(frozen=True, slots=True)
class Buffer:
    """One allocation: a tensor or scratch of one rank (``block`` is -1), or a tile of a stage of one block."""

    name: str
    rank: int
    block: int
    array: Array
    dtype: DType


@dataclass(frozen=True, slots=True)
class Access:
    """One read, write or atomic add of one window, as the observer sees it.

    ``window``: first and last + 1 element of every dimension, clipped to the buffer.  ``actor`` is the
    identity of the role or of the asynchronous operation in the schedule.
    """

    who: Who
    actor: int
    kind: Kind
    buffer: Buffer
    window: tuple[tuple[int, int], ...]
    span: ir.Span


Observer = Callable[[Access], None]


class Memory:
    """The access function, and who listens to it."""

    __slots__ = ("observer",)

    def __init__(self, observer: Observer | None = None) -> None:
        self.observer = observer

    def access(
        self,
        who: Who,
        actor: int,
        kind: Kind,
        buffer: Buffer,
        span: ir.Span,
        origin: tuple[int, ...] | None = None,
        shape: tuple[int, ...] = (),
        values: Array | None = None,
    ) -> Array:
        """Touch the window of ``shape`` at element ``origin`` of ``buffer`` (None: all of it), as TMA does.

        What lies outside reads as 0 and is dropped when written, in every dimension; coordinates may be negative.
        ``write`` and ``add`` take ``values`` (storage, that many elements); ``add`` rounds each sum to the dtype.
        Returns the storage read, with ``shape`` (possibly a view: copy it to keep it), or the values given.
        """
        array = buffer.array
        if origin is None:
            origin, shape = (0,) * array.ndim, array.shape
        extents = fit(shape, array.ndim)
        inside, part = clip(array.shape, origin, extents)
        if self.observer is not None and inside is not None:
            window = tuple((s.start, s.stop) for s in inside)
            self.observer(Access(who, actor, kind, buffer, window, span))
        if kind == "read":
            if inside is None:
                return np.zeros(shape, array.dtype)
            if part is None:
                return array[inside].reshape(shape)
            out = np.zeros(extents, array.dtype)
            out[part] = array[inside]
            return out.reshape(shape)
        assert values is not None
        if inside is not None:
            new = values.reshape(extents)
            new = new if part is None else new[part]
            array[inside] = new if kind == "write" else _sum(array[inside], new, buffer.dtype)
        return values


def fit(shape: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """A tile's extents in a tensor of ``ndim`` dimensions: the shape lines up with the trailing ones."""
    if len(shape) <= ndim:
        return (1,) * (ndim - len(shape)) + shape
    return shape[len(shape) - ndim :]


def clip(
    bounds: tuple[int, ...], origin: tuple[int, ...], extents: tuple[int, ...]
) -> tuple[tuple[slice, ...] | None, tuple[slice, ...] | None]:
    """Where a window meets a tensor: slices of the tensor (None: nowhere) and of the window (None: all of it)."""
    inside, part, whole = [], [], True
    for bound, first, extent in zip(bounds, origin, extents, strict=True):
        start, stop = max(first, 0), min(first + extent, bound)
        if start >= stop:
            return None, None
        whole = whole and stop - start == extent
        inside.append(slice(start, stop))
        part.append(slice(start - first, stop - first))
    return tuple(inside), None if whole else tuple(part)


def _sum(old: Array, new: Array, dtype: DType) -> Array:
    """What a reduce-add leaves behind: one rounding an addition."""
    return encode(decode(old, dtype) + decode(new, dtype), dtype)


def storage_of(dtype: DType) -> str:
    """The NumPy dtype that a ``SimTensor`` of ``dtype`` must have, for messages."""
    return STORAGE[dtype].name
