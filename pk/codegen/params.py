"""Lay out the kernel's parameter struct: the C++ members, and the :class:`pk.artifact.Field` records from which the
host packs it.

Order: tensor maps (64-byte aligned by the hardware's rule), the launch context, pointers, ints, floats.  Every member
starts at a multiple of its alignment by construction, so the C++ compiler adds no padding but at the end;
``static_assert`` s in the emitted text prove it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pk.artifact import MAX_RANKS, Field, FieldKind, TensorMap
from pk.codegen.names import Names
from pk.codegen.plan import MapPlan, Plan
from pk.codegen.sites import windows
from pk.ir import nodes as ir
from pk.ir import split
from pk.ir.split import counters_of

MAP_BYTES, CONTEXT_BYTES, ALIGNMENT = 128, 128, 64
SIZES: dict[FieldKind, int] = {
    "map": MAP_BYTES,
    "maps": MAP_BYTES * MAX_RANKS,
    "multicast_map": MAP_BYTES,
    "context": CONTEXT_BYTES,
    "pointer": 8,
    "pointers": 8 * MAX_RANKS,
    "sets": 16 * MAX_RANKS,
    "multicast": 8,
    "int": 4,
    "float": 4,
}
AXES = ("cols", "rows", "depth", "batch")  # counted from the last dimension


@dataclass(frozen=True, slots=True)
class Params:
    """The parameter struct: its members in order, its size, and the members by what they hold."""

    fields: tuple[Field, ...]
    size: int

    def member(self, key: str) -> str:
        """C++ member that holds the run-time value ``key`` (see :class:`pk.artifact.Field`)."""
        return next(f.name for f in self.fields if f.key == key and f.kind in ("int", "float"))

    def map(self, m: MapPlan) -> str:
        """The member with the tensor map (or the array of them) ``m``."""
        tensor_map = TensorMap(m.tensor, m.box, m.swizzle)
        return next(f.name for f in self.fields
                    if f.map == tensor_map and (f.kind == "multicast_map") == m.multicast)  # fmt: skip

    def address(self, tensor: str) -> str:
        """What names ``tensor``'s address: a member of kind ``pointers`` (an array, by rank) or ``pointer``, or the set
        of this launch in one of kind ``sets``.
        """
        found = next(f for f in sorted(self.fields, key=lambda f: f.kind == "pointer")
                     if f.key == tensor and f.kind in ("sets", "pointers", "pointer"))  # fmt: skip
        return f"{found.name}[shared.launch.gen % 2]" if found.kind == "sets" else found.name

    def multicast(self, tensor: str) -> str:
        """The member with the multicast address of ``tensor``; "": of the headers."""
        return next(f.name for f in self.fields if f.kind == "multicast" and f.key == tensor)

    def poison(self, tensor: str) -> str:
        """Arguments of ``fill_nan`` for ``tensor``: address, shape, strides."""
        pointer = next(f.name for f in self.fields if f.key == tensor and f.kind == "pointer")
        keys = [f.key for f in self.fields if f.kind == "int"]
        shape = sorted(k for k in keys if re.fullmatch(rf"{re.escape(tensor)}\.\d", k))
        strides = sorted(k for k in keys if k.startswith(f"{tensor}.stride."))
        return ", ".join([f"p.{pointer}", *(f"p.{self.member(k)}" for k in (*shape, *strides))])


def layout(plan: Plan, names: Names) -> Params:
    """The parameter struct of ``plan``; ``names`` keeps the members apart from each other."""
    at, fields = 0, []
    for name, kind, key, tensor_map in _members(plan):
        size = SIZES[kind]
        fields.append(Field(names.member(name), kind, at, size, key, tensor_map))
        at += size
    return Params(tuple(fields), -(-at // ALIGNMENT) * ALIGNMENT)


def poisoned(plan: Plan) -> tuple[str, ...]:
    """Outputs that an aborted launch fills with NaN."""
    return tuple(t for t in plan.outputs if plan.kernel.tensor(t).dtype.kind == "float")


def only_written(plan: Plan) -> tuple[str, ...]:
    """Outputs whose contents before the launch mean nothing to the kernel: nothing reads them or adds to them."""
    read = set()
    for s in (s for c in plan.classes for r in c.roles for s in split.statements(r.body)):
        adds = isinstance(s, ir.Do) and s.op in ("store_add_async", "all_reduce")
        read |= {at.tensor for at, written in windows(s) if adds or not written}
    return tuple(t for t in plan.outputs if t not in read)


def _members(plan: Plan) -> Iterator[tuple[str, FieldKind, str, TensorMap | None]]:
    kernel = plan.kernel
    for m in plan.maps:
        kind: FieldKind = "multicast_map" if m.multicast else "maps" if m.everyone else "map"
        yield m.name, kind, m.tensor, TensorMap(m.tensor, m.box, m.swizzle)
    yield "ctx", "context", "", None
    for t in dict.fromkeys((*poisoned(plan), *(t for t, everyone in plan.addressed if not everyone))):
        yield t, "pointer", t, None
    for t in (t for t, everyone in plan.addressed if everyone):
        yield f"{t}_peers", "sets" if t in plan.alternating else "pointers", t, None
    for t in plan.multicast:
        yield f"{t or 'headers'}_multicast", "multicast", t, None
    for name, key in _unique((*_dims(plan), *_strides(plan), *_signals(kernel))):
        yield name, "int", key, None
    for s in sorted(kernel.scalars, key=lambda s: s.type.dtype.kind == "float"):  # ints before floats
        yield s.name, "float" if s.type.dtype.kind == "float" else "int", s.name, None


def _dims(plan: Plan) -> Iterator[tuple[str, str]]:
    for tensor, axis in plan.dims:
        yield f"{tensor}_{AXES[_ndim(plan.kernel, tensor) - 1 - axis]}", f"{tensor}.{axis}"


def _strides(plan: Plan) -> Iterator[tuple[str, str]]:
    """Shape and strides of what is reached by pointer, and of the outputs, which an aborted launch fills with NaN."""
    for tensor in dict.fromkeys((*poisoned(plan), *(t for t, _ in plan.addressed))):
        n = _ndim(plan.kernel, tensor)
        for axis in range(n):
            yield f"{tensor}_{AXES[n - 1 - axis]}", f"{tensor}.{axis}"
        for axis in range(n):
            yield f"{tensor}_stride_{AXES[n - 1 - axis]}", f"{tensor}.stride.{axis}"


def _signals(kernel: ir.Kernel) -> Iterator[tuple[str, str]]:
    for s in counters_of(kernel):
        yield f"{s.name}_offset", f"{s.name}.offset"
        for axis in range(len(s.shape)):
            yield f"{s.name}_shape_{axis}", f"{s.name}.{axis}"


def _unique(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, key) for key, name in {key: name for name, key in pairs}.items()]


def _ndim(kernel: ir.Kernel, name: str) -> int:
    t = kernel.tensor(name)
    return t.ndim if isinstance(t, ir.Tensor) else len(t.shape)
