"""The parameter struct of a launch: every ``artifact.Field`` filled with what its key names."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pk.artifact import MAX_RANKS, Field, Source
from pk.errors import ArgumentError
from pk.runtime import multicast
from pk.runtime.tensormap import validate, validate_stored

MAP_BYTES = 128
_INT_RANGE = range(-(2**31), 2**31)

Encode = Callable[[int, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], int, str], bytes]


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a kernel sees it.  ``peers``: its address on every rank, or () if only this rank can reach it."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements
    dtype: str  # torch's name, without "torch."
    peers: tuple[int, ...] = ()
    odd: tuple[int, ...] = ()  # the same of scratch, in launches of odd numbers

    @property
    def empty(self) -> bool:
        """Whether there is nothing to address."""
        return 0 in self.shape


@dataclass(frozen=True, slots=True)
class Values:
    """What the fields of one launch are filled with."""

    views: Mapping[str, View]
    scalars: Mapping[str, int | float]
    signals: Mapping[str, tuple[int, ...]]
    context: bytes
    pad: int  # zero bytes that empty tensors point to

    def ints(self) -> dict[str, int | float]:
        """Every key that a field of kind ``int`` or ``float`` may have."""
        found: dict[str, int | float] = dict(self.scalars)
        for view in self.views.values():
            found.update({f"{view.name}.{axis}": extent for axis, extent in enumerate(view.shape)})
            found.update({f"{view.name}.stride.{axis}": stride for axis, stride in enumerate(view.strides)})
        offset = 0
        for name, shape in self.signals.items():
            found[f"{name}.offset"] = offset
            found.update({f"{name}.{axis}": extent for axis, extent in enumerate(shape)})
            offset += size(shape)
        return found


def size(shape: Sequence[int]) -> int:
    """Number of elements."""
    count = 1
    for extent in shape:
        count *= extent
    return count


def remote(source: Source) -> tuple[str, ...]:
    """The tensors of which the kernel addresses every rank's copy, in the order of the struct."""
    names = [_tensor(field) for field in source.fields if field.kind in ("maps", "pointers", "sets", "multicast_map")]
    return tuple(dict.fromkeys(names))


def pack(source: Source, values: Values, encode: Encode) -> bytes:
    """The struct, ``source.params_size`` bytes.

    Raises :class:`pk.errors.ArgumentError` for a tensor that TMA cannot address and for a value that needs more than
    32 bits.
    """
    buffer = bytearray(source.params_size)
    ints = values.ints()
    for name in source.by_rows:
        view = values.views[name]
        if not view.empty:
            validate(name, view.dtype, view.shape, view.strides, view.address)
    for name in source.stored:
        view = values.views[name]
        if not view.empty:
            validate_stored(name, view.dtype, view.shape)
    for field in source.fields:
        data = _field(field, values, ints, encode)
        buffer[field.offset : field.offset + len(data)] = data
    return bytes(buffer)


def _field(field: Field, values: Values, ints: Mapping[str, int | float], encode: Encode) -> bytes:
    if field.kind == "context":
        return values.context
    if field.kind in ("multicast", "multicast_map"):
        multicast.no_memory(f"`{_tensor(field) or 'the counters'}`")
    if field.kind == "int":
        return struct.pack("<i", _int(field.key, ints[field.key]))
    if field.kind == "float":
        return struct.pack("<f", ints[field.key])
    view = values.views[_tensor(field)]
    own = values.pad if view.empty else view.address
    everywhere = (values.pad,) * len(view.peers) if view.empty else view.peers
    if field.kind == "pointer":
        return struct.pack("<Q", own)
    if field.kind == "pointers":
        return _addresses(everywhere)
    if field.kind == "sets":
        return _addresses(everywhere) + _addresses(everywhere if view.empty else view.odd)
    if field.kind == "map":
        return _map(field, view, own, encode)
    return b"".join(_map(field, view, peer, encode) for peer in everywhere).ljust(MAP_BYTES * MAX_RANKS, b"\0")


def _addresses(everywhere: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(everywhere)}Q", *everywhere).ljust(8 * MAX_RANKS, b"\0")


def _tensor(field: Field) -> str:
    return field.map.tensor if field.map is not None else field.key


def _map(field: Field, view: View, address: int, encode: Encode) -> bytes:
    assert field.map is not None, "fields of kind map have one"
    shape, strides = view.shape, view.strides
    if view.empty:  # TMA has no empty tensors: one element that is zero, as everything outside a tensor reads
        shape, strides = (1,) * len(shape), (1,) * len(shape)
    return encode(address, view.dtype, shape, strides, field.map.box, field.map.swizzle, view.name)


def _int(key: str, value: int | float) -> int:
    if value not in _INT_RANGE or int(value) != value:
        raise ArgumentError(
            f"`{key}` is {value}, and kernels count in 32-bit integers.\n  Pass smaller views, or split the call."
        )
    return int(value)
