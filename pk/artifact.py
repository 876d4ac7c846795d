"""The records that code generation hands to the runtime.  Imports nothing of pk.

``Source`` is all that the runtime ever learns of a kernel: text to compile, options, the layout of the parameter block
and the tables that turn a device record back into the user's words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_RANKS = 8

FieldKind = Literal[
    "map", "maps", "multicast_map", "context", "pointer", "pointers", "sets", "multicast", "int", "float"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorMap:
    """How to encode one CUtensorMap: which tensor, and the box that one TMA operation moves.

    ``box`` has one entry a dimension of the tensor, outermost first (leading 1s); ``swizzle`` is 0, 32, 64 or 128
    bytes.
    """

    tensor: str
    box: tuple[int, ...]
    swizzle: int


@dataclass(frozen=True, slots=True)
class Field:
    """One member of the kernel's parameter struct.

    kind       size            filled with
    map        128             tensor map ``map`` over this rank's own copy
    maps       128 * MAX_RANKS tensor map ``map`` over every rank's copy (entries >= world are unused)
    multicast_map  128         tensor map ``map`` over the multicast address of all ranks' copies
    context    see below       the launch context (``pk/include/pk/comm/context.cuh``, ``runtime/context.py``)
    pointer    8               address of tensor ``key``, this rank's own copy
    pointers   8 * MAX_RANKS   addresses of tensor ``key`` on every rank
    sets       16 * MAX_RANKS  the same of scratch, in launches of even numbers, then of odd ones
    multicast  8               multicast address of all ranks' copies of tensor ``key``; key "": of the headers
    int        4               run-time value ``key``
    float      4               run-time value ``key``

    Keys of ints: ``tensor.axis`` (a dim, e.g. ``a.0``), ``tensor.stride.axis`` (elements), ``signals.offset`` (first
    counter of that array in the arena), ``signals.axis`` (its shape), or the name of an ``int`` parameter.
    """

    name: str
    kind: FieldKind
    offset: int
    size: int
    key: str = ""
    map: TensorMap | None = None


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the kernel that may wait or give up: what a device record's ``site`` number stands for."""

    role: str
    op: str
    what: str  # the signals array or pipeline waited for
    file: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel as CUDA text, with everything needed to compile and launch it.  Pure data: pickles, hashes, prints."""

    name: str  # the user's function
    entry: str  # the extern "C" symbol
    text: str
    arch: str  # "sm_90a"
    options: tuple[str, ...]  # NVRTC flags, include paths not among them
    fields: tuple[Field, ...]
    params_size: int
    threads: int
    shared_bytes: int  # dynamic shared memory of a block
    sites: tuple[Site, ...]
    outputs: tuple[str, ...]  # tensors that the kernel writes
    remote: bool  # touches a user's Parallel remotely: exit words needed
    uses_signals: bool
    registers: tuple[int, int] = (0, 0)  # setmaxnreg of consumers, of the others; (0, 0): none
    comm_sms: int = 0  # communicator SMs asked for, 0: no communicator
    stored: tuple[str, ...] = ()  # tensors that TMA stores to: their rows must be whole chunks of 16 bytes
    by_rows: tuple[str, ...] = ()  # tensors whose rows bulk copies move without a map: they must meet TMA's rules too
    multicast: bool = False  # reaches all ranks at once through NVLink multicast addresses
    cluster: int = 1  # blocks of a thread-block cluster; the grid is a multiple of it
    least_blocks: int = 1  # blocks that a launch needs at least
    signallers: tuple[Site, ...] = ()  # statements that add to counters, each with the array in ``what``
    only_written: tuple[str, ...] = ()  # outputs that no statement reads or adds to
    sanitize: int = 0  # PK_SANITIZE when it was made: checks bounds, and buffers are poisoned before each launch
    local: bool = False  # its blocks wait for nothing but their own roles
    early: bool = False  # reaches nothing of other ranks but counters, and scratch that fields of kind ``sets`` address
    trace: bool = False  # made for pk.trace: roles note when they come to a wait, and how long they wait
