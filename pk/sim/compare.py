"""Whether two results of one kernel are the same: bit by bit, or within the rounding of sums in another order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pk.ir import nodes as ir
from pk.ir import ops, split
from pk.ir.types import DType
from pk.sim.image import Arguments
from pk.sim.memory import SimTensor
from pk.sim.values import Array, decode

# Distance of 1.0 to the next number, and what the tensor core keeps of a float32 operand.
_EPSILON = {
    "bfloat16": 2.0**-7, "float16": 2.0**-10, "float8_e4m3": 2.0**-3, "float8_e5m2": 2.0**-2, "float32": 2.0**-23,
}  # fmt: skip
_TF32 = 2.0**-10

_ADDS = frozenset({"store_add_async"})
_BY_ARRIVAL = frozenset({"fetch_add"})  # results lie where the order of arrival has put them


def names_of(kernel: ir.Kernel) -> frozenset[str]:
    """Names of the ops that the kernel uses, with effect or with result."""
    return frozenset(name for _, block in kernel.classes for s in split.statements(block) for name in _ops(s))


def _ops(s: ir.Statement) -> Iterator[str]:
    if isinstance(s, ir.Do):
        yield s.op
    yield from (e.op for e in split.walk(split.expressions(s)) if isinstance(e, ir.Call))


def written(kernel: ir.Kernel) -> frozenset[str]:
    """Tensors that the kernel writes."""
    return frozenset(
        operand.tensor
        for _, block in kernel.classes
        for s in split.statements(block)
        if isinstance(s, ir.Do)
        for operand in split.walk(s.operands[i] for i in ops.TABLE[s.op].writes)
        if isinstance(operand, ir.Memory)
    ) & {t.name for t in kernel.tensors}


def any_order(kernel: ir.Kernel) -> bool:
    """Whether the order of arrival decides where results are: then two runs may differ, and both be right."""
    return bool(names_of(kernel) & _BY_ARRIVAL)


def tolerance(kernel: ir.Kernel, dtype: DType, world: int, multicast: bool) -> float:
    """How much sums of ``dtype`` may differ between schedules, as a share of the largest element; 0: not at all."""
    if dtype.kind != "float" or not (names_of(kernel) & _ADDS or multicast):
        return 0.0
    return 4 * world * _EPSILON[dtype.name]


def differing(kernel: ir.Kernel, first: list[Arguments], other: list[Arguments], multicast: bool) -> str:
    """What differs between two results of ``kernel``, in one sentence; nothing if they are the same."""
    if any_order(kernel):
        return ""
    for name in sorted(written(kernel)):
        for rank, (mine, theirs) in enumerate(zip(first, other, strict=True)):
            x, y = mine.get(name), theirs.get(name)
            if not isinstance(x, SimTensor) or not isinstance(y, SimTensor):
                continue
            bad = _unequal(x, y, tolerance(kernel, x.dtype, len(first), multicast))
            if bad is not None and bad.any():
                return f"`{name}` of rank {rank}: " + _sentence(bad, decode(x.array, x.dtype), decode(y.array, y.dtype))
    return ""


def _unequal(x: SimTensor, y: SimTensor, share: float) -> Array | None:
    """Where two tensors differ; None: nowhere, for sure."""
    bits: Array = x.array != y.array
    if x.dtype.name == "float32":
        bits &= ~(np.isnan(x.array) & np.isnan(y.array))
    if not bits.any():
        return None
    if not share:
        return bits
    a, b = decode(x.array, x.dtype).astype(np.float64), decode(y.array, y.dtype).astype(np.float64)
    finite = a[np.isfinite(a)]
    limit = share * (float(np.abs(finite).max()) if finite.size else 0.0)
    with np.errstate(invalid="ignore"):
        near = np.abs(a - b) <= limit
    return bits & ~near & ~(np.isnan(a) & np.isnan(b)) & ~(a == b)


def against_reference(name: str, rank: int, got: SimTensor, want: Array, uses_mma: bool) -> str:
    """How a tensor differs from what a reference says (values: float64 or int), in one sentence, or nothing.

    Allowed are 32 units of the dtype's resolution, of the element itself and of the tensor's root mean square.
    """
    values = decode(got.array, got.dtype)
    if values.shape != want.shape:
        return f"`{name}` of rank {rank} has shape {values.shape}, the reference {want.shape}"
    if got.dtype.kind != "float":
        bad: Array = values != want
    else:
        a = values.astype(np.float64)
        unit = max(_EPSILON[got.dtype.name], _TF32 if uses_mma and got.dtype.name == "float32" else 0.0)
        finite = want[np.isfinite(want)]
        scale = float(np.sqrt(np.mean(np.square(finite, dtype=np.float64)))) if finite.size else 0.0
        with np.errstate(invalid="ignore"):
            near = np.abs(a - want) <= 32 * unit * (scale + np.abs(want))
        bad = ~(near | (a == want) | (np.isnan(a) & np.isnan(want)))
    return f"`{name}` of rank {rank}: " + _sentence(bad, values, want) if bad.any() else ""


def _sentence(bad: Array, x: Array, y: Array) -> str:
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    many = f"{int(bad.sum())} of {bad.size} elements differ" if bad.size > 1 else "it differs"
    return f"{many}, the first at {at}: {x[at]:g} and {y[at]:g}"
