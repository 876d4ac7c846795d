"""The operands of a launch as they were, to begin from again and again.

An :class:`Image` copies what all ranks pass; tensors that share memory share it in every copy too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from pk.ir.types import DType
from pk.sim.memory import SimTensor
from pk.sim.values import Array

Arguments = dict[str, SimTensor | int | float]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies: byte ``offset`` of region ``region``."""

    region: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: np.dtype[np.generic]
    dtype: DType


@dataclass(frozen=True, slots=True)
class Image:
    """``regions``: pieces of memory, as bytes; ``ranks``: where each rank's operands lie in them."""

    regions: tuple[Array, ...]
    ranks: tuple[dict[str, _Place | int | float], ...]

    @staticmethod
    def take(args: list[Arguments]) -> Image:
        """Copy the operands of all ranks."""
        arrays = {
            (rank, name): value.array
            for rank, mine in enumerate(args)
            for name, value in mine.items()
            if isinstance(value, SimTensor)
        }
        bounds = {key: _bounds(array) for key, array in arrays.items()}
        merged: list[list[int]] = []  # byte ranges that no tensor crosses
        for first, end in sorted(b for b in bounds.values() if b[1] > b[0]):
            if merged and first < merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([first, end])
        regions = [np.zeros(end - first, np.uint8) for first, end in merged]
        ranks: list[dict[str, _Place | int | float]] = []
        for rank, mine in enumerate(args):
            places: dict[str, _Place | int | float] = {}
            for name, value in mine.items():
                if not isinstance(value, SimTensor):
                    places[name] = value
                    continue
                first, end = bounds[rank, name]
                at = next((i for i, (low, high) in enumerate(merged) if low <= first and end <= high), -1)
                array = value.array
                offset = first - merged[at][0] if at >= 0 and end > first else 0
                where = at if end > first else -1
                places[name] = _Place(where, offset, array.shape, array.strides, array.dtype, value.dtype)
            ranks.append(places)
        image = Image(tuple(regions), tuple(ranks))
        image._fill(args)
        return image

    def open(self) -> list[Arguments]:
        """Operands to run a launch on, in fresh memory, as they were."""
        return self._views([region.copy() for region in self.regions])

    def shapes(self, rank: int = 0) -> dict[str, tuple[tuple[int, ...], DType]]:
        """Shape and dtype of a rank's tensors."""
        return {name: (p.shape, p.dtype) for name, p in self.ranks[rank].items() if isinstance(p, _Place)}

    def extents(self) -> list[tuple[int, ...]]:
        """The shapes of all tensors of all ranks."""
        return [p.shape for mine in self.ranks for p in mine.values() if isinstance(p, _Place)]

    def cut(self, world: int, change: Callable[[int], int]) -> Image:
        """The first ``world`` ranks, every extent e of a tensor cut to ``change(e)``; shared memory stays shared."""
        args: list[Arguments] = []
        for mine in self.open()[:world]:
            small: Arguments = {}
            for name, value in mine.items():
                if isinstance(value, SimTensor):
                    corner = value.array[tuple(slice(change(n)) for n in value.array.shape)]
                    value = replace(value, array=corner)
                small[name] = value
            args.append(small)
        return Image.take(args)

    def _views(self, memory: list[Array]) -> list[Arguments]:
        return [
            {name: _view(place, memory) if isinstance(place, _Place) else place for name, place in mine.items()}
            for mine in self.ranks
        ]

    def _fill(self, args: list[Arguments]) -> None:
        """Copy values into the (new) regions, tensor by tensor: what lies between strided elements stays out."""
        copy_tensors(args, self._views(list(self.regions)))


def copy_tensors(source: list[Arguments], target: list[Arguments]) -> None:
    """Copy the elements of every tensor of every rank."""
    for mine, theirs in zip(source, target, strict=True):
        for name, value in mine.items():
            into = theirs[name]
            if isinstance(value, SimTensor) and isinstance(into, SimTensor):
                into.array[...] = value.array


def _view(place: _Place, memory: list[Array]) -> SimTensor:
    if place.region < 0:
        return SimTensor(np.zeros(place.shape, place.storage), place.dtype)
    base = memory[place.region]
    array: Array = np.ndarray(place.shape, place.storage, base.data, place.offset, place.strides)
    return SimTensor(array, place.dtype)


def _bounds(array: Array) -> tuple[int, int]:
    """Addresses of the first byte and of the byte after the last; equal if it is empty."""
    first = array.__array_interface__["data"][0]
    if not math.prod(array.shape):
        return first, first
    last = sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True))
    return first, first + last + array.itemsize
