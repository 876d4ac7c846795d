"""The language: every name a kernel may use, documented.  ``pk`` exports all of them.

The operations are read by the front end, never executed: calling one from plain Python raises
:class:`pk.errors.OutsideKernel`.  ``t`` is a shared tile (``s.a`` of a stage), ``r`` a register tile, ``x`` a tensor:
a ``Global``, one rank's copy ``c[r]`` of a ``Parallel`` or of scratch, or (as a destination) a whole ``Parallel``.
"""

from __future__ import annotations

from typing import Any, NoReturn

from pk import errors
from pk.dsl.types import Function, Global, Parallel, constexpr, function
from pk.ir.types import bfloat16, float8_e4m3, float8_e5m2, float16, float32, int32

__all__ = [
    "Function",
    "Global",
    "Parallel",
    "at",
    "barrier",
    "bfloat16",
    "cast",
    "cdiv",
    "communicator",
    "constexpr",
    "consumer",
    "float8_e4m3",
    "float8_e5m2",
    "float16",
    "float32",
    "full",
    "function",
    "int32",
    "load",
    "load_async",
    "loader",
    "max",
    "min",
    "mma",
    "pipeline",
    "range",
    "rank",
    "ranks_from",
    "scratch",
    "shared",
    "signal",
    "signal_all",
    "signals",
    "static_range",
    "store",
    "store_add_async",
    "store_async",
    "storer",
    "tasks",
    "wait",
    "world_size",
    "zeros",
]  # fmt: skip


def _outside(name: str) -> NoReturn:
    raise errors.OutsideKernel(
        f"pk.{name} is an operation of the kernel language and was called by plain Python.\n"
        f"  Use it inside a function decorated with @pk.kernel (or @pk.function, called from one)."
    )


# ------------------------------------------------------------------------------------------- declarations
def pipeline(stages: int, /, **tiles: Any) -> Any:
    """A ring of ``stages`` sets of shared tiles between two roles: ``with p.fill() as s`` and ``with p.drain() as s``.

    One role fills, another drains, in the same order and equally often.  At the top of the kernel.
    """
    _outside("pipeline")


def shared(shape: tuple[int, ...], dtype: Any) -> Any:
    """A tile in shared memory: ``shape`` of compile-time constants, inner extent a multiple of 16 bytes."""
    _outside("shared")


def signals(*shape: Any) -> Any:
    """Symmetric int32 counters, zero at launch, owned by the runtime.

    The shape is made of tensor dims, world size and constants, equal on all ranks; no argument: one counter.
    """
    _outside("signals")


def scratch(shape: tuple[Any, ...], dtype: Any) -> Any:
    """Symmetric work space, owned by the runtime, contents undefined at launch.  Used like a ``Parallel``."""
    _outside("scratch")


# ------------------------------------------------------------------------------------------------- loops
def tasks(*extents: Any, group: int = 8, dynamic: bool = False, cluster: int = 1) -> Any:
    """The persistent loop over task coordinates, dealt round-robin to the blocks of the class.

    An extent is an integer or ``pk.ranks_from(...)``.  Earlier extents are outermost; the last two are walked in
    groups of ``group`` rows, column by column inside a group.
    """
    _outside("tasks")


def ranks_from(start: Any, count: Any = None) -> Any:
    """start, start + 1, ... modulo the world size, ``count`` of them (default: all); a task extent or a loop."""
    _outside("ranks_from")


def range(start: Any, stop: Any = None) -> Any:
    """``range(n)`` or ``range(a, b)``, a loop at run time."""
    _outside("range")


def static_range(start: int, stop: int | None = None, step: int = 1) -> Any:
    """A loop unrolled when the kernel is compiled: its variable is a Python int."""
    _outside("static_range")


# ------------------------------------------------------------------------------------------------- roles
def loader() -> Any:
    """``with pk.loader():`` one warp that issues ``load_async``."""
    _outside("loader")


def consumer(warpgroups: int = 1, pingpong: bool = False, stagger: bool = False) -> Any:
    """``with pk.consumer(warpgroups=2):`` 1 to 3 warpgroups that compute; rows of a tile are split among them."""
    _outside("consumer")


def storer() -> Any:
    """``with pk.storer():`` one warp that issues ``store_async`` and ``store_add_async``."""
    _outside("storer")


def communicator(sms: Any) -> Any:
    """``with pk.communicator(sms=8):`` whole SMs that run only this body; clipped to half of the blocks."""
    _outside("communicator")


# ---------------------------------------------------------------------------------------------- moving tiles
def load_async(t: Any, x: Any, coord: Any) -> None:
    """Tensor to stage, in ``fill`` of a loader.  Outside the tensor reads 0."""
    _outside("load_async")


def store_async(x: Any, t: Any, coord: Any) -> None:
    """Stage to tensor, in ``drain`` of a storer.  Outside the tensor is dropped."""
    _outside("store_async")


def store_add_async(x: Any, t: Any, coord: Any) -> None:
    """As :func:`store_async`, added atomically, element by element: bfloat16, float16, float32."""
    _outside("store_add_async")


def load(t: Any) -> Any:
    """Stage to registers, in a consumer; 16-bit and 8-bit floats widen to float32."""
    _outside("load")


def store(t: Any, r: Any) -> None:
    """Registers to stage, cast to its dtype, in ``fill`` of a consumer."""
    _outside("store")


def at(*entries: Any) -> Any:
    """A coordinate whose entries all count elements; in a plain tuple the trailing ones count tiles."""
    _outside("at")


# --------------------------------------------------------------------------------------------- register tiles
def zeros(shape: tuple[int, ...], dtype: Any = float32) -> Any:
    """A register tile of zeros."""
    _outside("zeros")


def full(shape: tuple[int, ...], value: Any, dtype: Any = float32) -> Any:
    """A register tile of one value."""
    _outside("full")


def cast(r: Any, dtype: Any) -> Any:
    """The same values in another dtype."""
    _outside("cast")


def mma(acc: Any, a: Any, b: Any) -> None:
    """``acc += a @ b`` in float32: acc (M, N), a (M, K), b (K, N); ``t.T`` reads a shared tile transposed.

    The one operation that changes a tile in place.
    """
    _outside("mma")


# ------------------------------------------------------------------------------------------------- signals
def signal(sig: Any, index: Any, rank: Any, value: Any = 1) -> None:
    """Add to a counter of one rank, after all earlier stores of this role."""
    _outside("signal")


def signal_all(sig: Any, index: Any, value: Any = 1) -> None:
    """Add to a counter of every rank, after all earlier stores of this role."""
    _outside("signal_all")


def wait(sig: Any, index: Any, value: Any) -> None:
    """Until my counter is at least ``value``; everything after it sees what was signalled."""
    _outside("wait")


def barrier(sig: Any, index: Any = ()) -> None:
    """``signal_all``, then ``wait`` for the world size: once per rank, index and launch."""
    _outside("barrier")


# ------------------------------------------------------------------------------------------------- scalars
def rank() -> Any:
    """This rank, a run-time int32."""
    _outside("rank")


def world_size() -> Any:
    """The number of ranks, a run-time int32."""
    _outside("world_size")


def cdiv(x: Any, y: Any) -> Any:
    """x / y rounded up.  On ints it also works outside kernels."""
    if isinstance(x, int) and isinstance(y, int):
        return -(-x // y)
    _outside("cdiv")


def min(*values: Any) -> Any:
    """The least of scalars, or element by element of register tiles."""
    _outside("min")


def max(*values: Any) -> Any:
    """The greatest of scalars, or element by element of register tiles."""
    _outside("max")


_ = (Function, Global, Parallel, constexpr, function, bfloat16, float8_e4m3, float8_e5m2, float16, int32)
