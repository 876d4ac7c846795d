"""Types of the IR: dtypes, scalars and tiles.  Imports nothing of pk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    ``name`` is torch's name for it, ``cuda`` the C++ type the device headers use, ``bits`` its
    width.  ``kind`` is ``"float"``, ``"int"`` or ``"bool"``.
    """

    name: str
    bits: int
    kind: Literal["float", "int", "bool"]
    cuda: str

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return max(self.bits // 8, 1)

    def __repr__(self) -> str:
        return self.name

    def __str__(self) -> str:
        return self.name


bfloat16 = DType("bfloat16", 16, "float", "bf16")
float16 = DType("float16", 16, "float", "f16")
float8_e4m3 = DType("float8_e4m3", 8, "float", "e4m3")
float8_e5m2 = DType("float8_e5m2", 8, "float", "e5m2")
float32 = DType("float32", 32, "float", "float")
int32 = DType("int32", 32, "int", "int")
boolean = DType("bool", 8, "bool", "bool")

DTYPES: dict[str, DType] = {d.name: d for d in (bfloat16, float16, float8_e4m3, float8_e5m2, float32, int32, boolean)}

Space = Literal["register", "shared", "copied"]  # copied: in registers, as it lies in memory (ir.communicator)


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value, the same in every thread of a role: an index, a condition, a run-time parameter."""

    dtype: DType

    def __str__(self) -> str:
        return self.dtype.name


@dataclass(frozen=True, slots=True)
class Tile:
    """A dense rectangle of elements, in registers (of a group of warps) or in shared memory."""

    shape: tuple[int, ...]
    dtype: DType
    space: Space

    @property
    def rows(self) -> int:
        """Extent of the second to last dimension."""
        return self.shape[-2] if len(self.shape) > 1 else 1

    @property
    def cols(self) -> int:
        """Extent of the last dimension."""
        return self.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        n = self.dtype.itemsize
        for extent in self.shape:
            n *= extent
        return n

    def __str__(self) -> str:
        return f"{self.space}[{'x'.join(map(str, self.shape))} {self.dtype}]"


Type = Scalar | Tile

INT = Scalar(int32)
BOOL = Scalar(boolean)
FLOAT = Scalar(float32)
