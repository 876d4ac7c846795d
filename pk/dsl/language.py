"""The language: every name a kernel may use, documented.  ``pk`` exports all of them.

The operations are read by the front end, never executed: calling one from plain Python raises
:class:`pk.errors.OutsideKernel`.  ``t`` is a shared tile (``s.a`` of a stage), ``r`` a register tile, ``x`` a tensor:
a ``Global``, one rank's copy ``c[r]`` of a ``Parallel`` or of scratch, or (as a destination) a whole ``Parallel``.
"""

from __future__ import annotations

from typing import Any

from pk.dsl.language_tiles import (  # they read like the builtins that some of them replace
    abs,
    cast,
    exp,
    exp2,
    fma,
    full,
    gelu,
    inf,
    iota,
    load,
    log,
    log2,
    max,
    min,
    rsqrt,
    sigmoid,
    silu,
    sqrt,
    store,
    sum,
    tanh,
    where,
    zeros,
)  # fmt: skip
from pk.dsl.types import Function, Global, Parallel, constexpr, function
from pk.dsl.types import outside as _outside
from pk.ir.types import bfloat16, float8_e4m3, float8_e5m2, float16, float32, int32

__all__ = [
    "Function",
    "Global",
    "Parallel",
    "abs",
    "all_reduce",
    "at",
    "barrier",
    "bfloat16",
    "cast",
    "cdiv",
    "communicator",
    "constexpr",
    "consumer",
    "exp",
    "exp2",
    "fetch_add",
    "float8_e4m3",
    "float8_e5m2",
    "float16",
    "float32",
    "fma",
    "full",
    "function",
    "gather_async",
    "gelu",
    "inf",
    "int32",
    "iota",
    "load",
    "load_async",
    "loader",
    "log",
    "log2",
    "max",
    "min",
    "mma",
    "pipeline",
    "range",
    "rank",
    "ranks_from",
    "reduce",
    "rsqrt",
    "scatter_async",
    "scratch",
    "shared",
    "sigmoid",
    "signal",
    "signal_all",
    "signals",
    "silu",
    "sqrt",
    "static_range",
    "store",
    "store_add_async",
    "store_async",
    "storer",
    "sum",
    "tanh",
    "tasks",
    "wait",
    "where",
    "world_size",
    "zeros",
]  # fmt: skip


# ------------------------------------------------------------------------------------------- declarations
def pipeline(stages: int | None = None, /, over: Any = None, **tiles: Any) -> Any:
    """A ring of ``stages`` sets of shared tiles between two roles: ``with p.fill() as s`` and ``with p.drain() as s``.

    One role fills, another drains, in the same order and equally often.  At the top of the kernel.

    ``q = pk.pipeline(over=p)``: a second ring over the stages of ``p``.  The role that drains ``p`` changes them in
    place, ``with p.drain() as s: with q.fill() as t: ...``, and hands them on to the role that drains ``q``, which may
    be the one that fills ``p``; a stage is filled anew when it has left it.
    """
    _outside("pipeline")


def shared(shape: tuple[int, ...], dtype: Any) -> Any:
    """A tile in shared memory: ``shape`` of compile-time constants, inner extent a multiple of 16 bytes.

    In a ``pk.pipeline`` it is a field of its stages.  Bound to a name at the top of the kernel it is private to the
    consumer: ``store`` to it, then ``load`` it or pass it to ``mma``; pk inserts the barriers.
    """
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
    groups of ``group`` rows, column by column inside a group.  The count of tasks runs on from loop to loop.

    ``dynamic=True``: a block claims the next task when it is ready for one, so that long tasks do not hold up others;
    for all task loops of a class or none.  ``cluster=2``: pairs of blocks take neighbours of the next-to-last extent
    and load together what does not depend on it (``group`` even).  Neither changes a result.
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
    """``with pk.consumer(warpgroups=2):`` 1 to 3 warpgroups that compute; rows of a tile are split among them.

    ``pingpong=True``: warpgroups take tasks in turn, each alone on a whole tile, so that one multiplies while another
    stores; such a consumer may not signal.  ``stagger=True``: they issue their mma in turn, so that one multiplies
    while another computes.  Neither changes a result.
    """
    _outside("consumer")


def storer() -> Any:
    """``with pk.storer():`` one warp that issues ``store_async`` and ``store_add_async``."""
    _outside("storer")


def communicator(sms: Any = None, joins: bool = False) -> Any:
    """``with pk.communicator(sms=8):`` whole SMs that run only this body.

    A kernel may have several; they are clipped so that half of the blocks compute.  ``joins=True``: when the body has
    ended, its SMs take tasks as the others do, which must be dynamic (``pk.tasks(..., dynamic=True)``); the only one.

    ``with pk.communicator():`` one warp beside the role blocks of every thread block that computes, for copies between
    ranks that should cost no SM.  It works on register tiles, like a class without role blocks: ``load``, ``store``,
    signals, loops, and task loops of its own, dealt to the blocks in turn; it has no stages.  A kernel has one.
    """
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


def gather_async(t: Any, x: Any, rows: Any, col: Any = 0, rank: Any = None) -> None:
    """Row i of the tile ``t`` (R, C) from row ``rows[i]`` of ``x`` (two dimensions), in ``fill`` of a loader.

    ``rows`` is an index vector of R elements, ``col`` counts tiles of C columns.  ``x``: a ``Global``, one rank's copy
    ``c[r]``, or a whole ``Parallel`` or scratch with ``rank=``, an integer or an index vector: row i comes from rank
    ``rank[i]``.  A row outside ``x`` (a negative index) is zero, and so are columns outside.  One bulk copy a row; a
    tile that is gathered into or scattered from cannot also be an operand of ``mma``, ``load_async`` or
    ``store_async``.

        with ring.fill() as s:
            pk.gather_async(s.x, x, pk.load(perm, t, (32,), other=-1), j)
    """
    _outside("gather_async")


def scatter_async(x: Any, t: Any, rows: Any, col: Any = 0, rank: Any = None) -> None:
    """Row i of the tile ``t`` (R, C) to row ``rows[i]`` of ``x``, in ``drain`` of a storer; the reverse of
    :func:`gather_async`.

    A row outside ``x`` (a negative index) is dropped, and so are columns outside.
    """
    _outside("scatter_async")


def at(*entries: Any) -> Any:
    """A coordinate whose entries all count elements; in a plain tuple the trailing ones count tiles."""
    _outside("at")


# ------------------------------------------------------------------------------------- all ranks' copies of a window
def reduce(x: Any, coord: Any, c: Any, c_coord: Any, shape: tuple[int, ...], op: str = "sum") -> None:
    """The window of ``shape`` at ``c_coord`` of every rank's copy of ``c``, combined, into ``x`` at ``coord``.

    ``c`` is a whole ``Parallel`` or scratch, ``x`` a ``Global`` or one rank's copy, both of one dtype: bfloat16,
    float16 or float32.  ``shape`` is (cols,) or (rows, cols), of constants, and lines up with the trailing dimensions;
    coordinates count windows of it.  ``op`` is "sum", "min" or "max".  The values are combined in float32 in rank order
    0, 1, ... and rounded once, so the result is the same in every run and on every rank.  Outside ``c`` reads 0,
    outside ``x`` is dropped.  In a consumer, or in a class without role blocks.

        pk.reduce(out, (0, i), x, (0, i), shape=(1, 2048))
    """
    _outside("reduce")


def all_reduce(c: Any, coord: Any, shape: tuple[int, ...], op: str = "sum") -> None:
    """:func:`reduce` of the window at ``coord`` of every rank's copy of ``c``, the result written to every copy.

    In place: one rank alone combines a window, after a signal has told it that every rank's part is there.
    """
    _outside("all_reduce")


# --------------------------------------------------------------------------------------------- register tiles
def mma(acc: Any, a: Any, b: Any, accumulate: bool = True) -> None:
    """``acc += a @ b`` on the tensor core: acc (M, N) float32, a (M, K), b (K, N).

    ``accumulate=False``: ``acc = a @ b``, and what acc held is lost.  The one operation that changes a tile in place.

    a and b are shared tiles, as stored or transposed (``t.T``); a may also be a register tile of bfloat16 or float16
    (``pk.cast(p, v.dtype)``).  dtypes: bfloat16, float16 (a and b alike); float8_e4m3, float8_e5m2 (mixed or alike);
    float32, read as tf32 (a 10-bit mantissa).  Operands of 8 and 32 bits must be contiguous along K: a (M, K) as
    stored, b stored (N, K) and passed as ``t.T``.

    M is a multiple of 64 for each warpgroup, N a multiple of 8 up to 256 (192 with three warpgroups), K a multiple of
    16 elements (32 of 8 bits, 8 of float32); a shared tile has rows of a multiple of 32 bytes.
    """
    _outside("mma")


# ------------------------------------------------------------------------------------------------- signals
def signal(sig: Any, index: Any, rank: Any, value: Any = 1) -> None:
    """Add to a counter of one rank, after all earlier stores of this role.

    ``index``, ``rank`` and ``value`` may be index vectors: one signal a lane; a negative index is skipped.
    """
    _outside("signal")


def signal_all(sig: Any, index: Any, value: Any = 1) -> None:
    """Add to a counter of every rank, after all earlier stores of this role."""
    _outside("signal_all")


def wait(sig: Any, index: Any, value: Any) -> None:
    """Until my counter is at least ``value``; everything after it sees what was signalled.

    ``index`` and ``value`` may be index vectors: until all are; a negative index is skipped.
    """
    _outside("wait")


def fetch_add(sig: Any, index: Any, value: Any = 1) -> Any:
    """Add to a counter of this rank, after all earlier stores of this role: the value before, an int32.

    Whoever finds a value sees all that was stored before the adds that made it.  In any role, not in shared code.

        ticket = pk.fetch_add(done, m)
        if ticket == parts - 1:  # the last one of them
            ...
    """
    _outside("fetch_add")


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
    """x / y rounded up, y positive; x may be a tile of int32.  On ints it also works outside kernels."""
    if isinstance(x, int) and isinstance(y, int):
        return -(-x // y)
    return _outside("cdiv")


_ = (Function, Global, Parallel, constexpr, function, bfloat16, float8_e4m3, float8_e5m2, float16, int32)
