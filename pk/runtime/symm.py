"""Symmetric memory: tensors of one shape on every rank, each reachable by all.

Allocation is collective, and so are reuse and release.  When a rank drops its last tensor over a piece, the piece is
*free on that rank*; an ``empty`` that it fits takes it only if it is free on every rank, the smallest and lowest number
first, so that all ranks always take the same piece whatever their garbage collectors do.  Free pieces that are too
many, or for which there was no use for long, go back to the driver during the next ``empty``, and all of them when
memory has run out: every rank waits for its device and unmaps them, then each frees its own.

A reused piece is safe in stream order, like memory of torch's allocator: a kernel ends on its rank's stream only after
every peer is done with this rank's memory, no peer touches it before the next launch has begun there, and the stream
that is current in ``empty`` comes after the group's launches on others.  Work of other libraries on another stream, and
CUDA graphs, must be finished with a tensor before it is dropped.
"""

from __future__ import annotations

import bisect
import math
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pk.errors import ArgumentError, BackendError, PeerFailed, RanksDisagree, no_tensor
from pk.runtime import ipc
from pk.runtime.device import Memory
from pk.runtime.rendezvous import differing
from pk.runtime.tensors import plain

if TYPE_CHECKING:
    import torch

    from pk.runtime.group import Group

_ALIGNMENT = 512
SPARE = 256 << 20  # free bytes that a heap keeps for reuse, or as many as are in use if that is more
PATIENCE = 256  # allocations after which a piece that none of them took is given back

# Called with every simulated tensor that `empty` makes: a check marks it as memory that nobody has written.
fillers: list[Callable[[torch.Tensor], None]] = []


@dataclass(slots=True)
class Segment:
    """One piece of symmetric memory, seen from one rank."""

    number: int  # the same on all ranks
    base: int
    nbytes: int
    reach: ipc.Reach
    owned: bool  # allocated here; otherwise the user's
    keep: Any = None  # what keeps it alive if the driver does not
    used: int = 0  # the heap's allocation that took it last, the same on all ranks


class _HostMemory(Memory):
    """Simulated device memory: numpy reads ``__array_interface__`` and keeps this object, and with it the host's array.

    A tensor may outlive its group: ranks return them from ``pk.spawn``.
    """

    keep: Any = None

    @property
    def __array_interface__(self) -> dict[str, object]:
        return self.interface


@dataclass(slots=True)
class Heap:
    """The symmetric memory of a group on one rank."""

    group: Group
    segments: dict[int, Segment] = field(default_factory=dict)
    free: set[int] = field(default_factory=set)
    _count: int = 0
    _clock: int = 0  # allocations so far
    _bases: list[tuple[int, int]] = field(default_factory=list)  # (base, number), sorted

    def allocate(self, nbytes: int, what: str) -> Segment:
        """A segment of at least ``nbytes``, reused or new.  Collective.  ``what``: the same text on all ranks."""
        group = self.group
        granule = ipc.GRANULE if group.link is not None and group.backend == "cuda" else _ALIGNMENT
        size = -(-max(nbytes, 1) // granule) * granule
        mine = (what, size, sorted(self.free), capturing(group))
        told = [pickle.loads(data) for data in group.exchange("symmetric allocation", pickle.dumps(mine))]
        _refuse_capture(what, [captures for *_, captures in told], group.rank)
        _same([text for text, *_ in told])
        self._clock += 1
        free = [self.segments[n] for n in sorted(set.intersection(*(set(free) for _, _, free, _ in told)))]
        fitting = [s for s in free if s.owned and size <= s.nbytes <= size + size // 4]
        found = min(fitting, key=lambda s: (s.nbytes, s.number), default=None)
        free = [s for s in free if s is not found and s.owned]
        self.release(self._excess(free))
        if found is None:
            return self._new(size, what, [s for s in free if s.number in self.segments])
        self.free.discard(found.number)
        found.used = self._clock
        if group.context is not None:
            group.context.precede(group.driver.stream(group.gpu))
        return found

    def _excess(self, free: list[Segment]) -> list[Segment]:
        """Which of the pieces that are free on every rank to give back."""
        spare = sum(s.nbytes for s in free)
        limit = max(SPARE, sum(s.nbytes for s in self.segments.values() if s.owned) - spare)
        found = []
        for segment in sorted(free, key=lambda s: (s.used, s.number)):
            if spare <= limit and self._clock - segment.used <= PATIENCE:
                break
            found.append(segment)
            spare -= segment.nbytes
        return found

    def release(self, segments: list[Segment]) -> None:
        """Give pieces back that are free on every rank.  Collective: all ranks name the same."""
        from pk.runtime import retired

        retired.sweep()
        for segment in segments:
            self.remove(segment.number)
        group = self.group
        if not segments or group.backend == "sim":  # the last tensor has taken a simulated one with it
            return

        def unmap() -> None:
            group.driver.synchronize(group.gpu)
            for segment in segments:
                ipc.unmap(group, segment.reach.mapped)

        group.attempt("giving symmetric memory back", unmap)
        if group.context is not None:
            group.context.forget()  # another piece may get one of these addresses, and have others on its peers
        for segment in segments:
            group.driver.free(group.gpu, segment.base)

    def _new(self, size: int, what: str, spare: list[Segment]) -> Segment:
        """A new piece; if memory has run out on some rank, after all of ``spare`` has been given back."""
        try:
            return self._make(size, what)
        except (PeerFailed, RanksDisagree):
            raise
        except Exception:  # on every rank
            if not spare:
                raise
        self.release(spare)
        return self._make(size, what)

    def _make(self, size: int, what: str) -> Segment:
        """All ranks have memory, or none keeps it: what one rank's failure leaves behind is freed on every rank."""
        group = self.group
        made: list[tuple[int, Any]] = []
        try:
            group.attempt(f"allocating {what}", lambda: made.append(self._memory(size, what)))
            reach = ipc.share(group, made[0][0], what)
        except PeerFailed:
            raise  # a rank is gone: others may still map this memory, which therefore stays
        except Exception:
            for base, _ in made if group.backend == "cuda" else ():
                group.driver.free(group.gpu, base)
            raise
        return self.add(made[0][0], size, reach, owned=True, keep=made[0][1])

    def _memory(self, size: int, what: str) -> tuple[int, Any]:
        """Address of new memory of this rank, and what keeps it alive."""
        group = self.group
        if group.backend == "cuda":
            return group.driver.allocate(group.gpu, size), None
        import numpy as np

        try:
            keep = np.empty(size + _ALIGNMENT, np.uint8)
        except (MemoryError, ValueError):
            raise BackendError(
                f"{what} needs {size} bytes, which this host cannot give to simulated rank {group.rank}.\n"
                "  Simulate with smaller tensors or fewer ranks."
            ) from None
        return -(-keep.ctypes.data // _ALIGNMENT) * _ALIGNMENT, keep

    def add(self, base: int, nbytes: int, reach: ipc.Reach, owned: bool, keep: Any = None) -> Segment:
        """Register memory under the next number."""
        segment = Segment(self._count, base, nbytes, reach, owned, keep, self._clock)
        self._count += 1
        self.segments[segment.number] = segment
        bisect.insort(self._bases, (base, segment.number))
        return segment

    def remove(self, number: int) -> None:
        """Forget a segment."""
        segment = self.segments.pop(number)
        self.free.discard(number)
        self._bases.remove((segment.base, number))

    def unmap(self) -> None:
        """Undo all mappings of peers' memory, once."""
        for segment in self.segments.values():
            mapped, segment.reach = segment.reach.mapped, ipc.Reach(segment.reach.peers)
            ipc.unmap(self.group, mapped)

    def tensor(self, segment: Segment, nbytes: int) -> torch.Tensor:
        """uint8 tensor over the segment's first bytes; when it and all its views are gone, the segment is free here."""
        group = self.group
        memory = (_HostMemory if group.backend == "sim" else Memory)(segment.base, nbytes)
        if isinstance(memory, _HostMemory):
            memory.keep = segment.keep
        weakref.finalize(memory, self.free.add, segment.number).atexit = False
        if group.backend == "cuda":
            return group.driver.tensor(group.gpu, memory)
        import numpy as np
        import torch

        return torch.from_numpy(np.asarray(memory))

    def find(self, first: int, last: int) -> Segment | None:
        """The segment that holds the bytes ``first`` to ``last``, both included."""
        at = bisect.bisect_right(self._bases, (first, 1 << 62)) - 1
        while at >= 0:  # a tensor of the user may lie inside another one that was shared before
            segment = self.segments[self._bases[at][1]]
            if segment.base <= first and last < segment.base + segment.nbytes:
                return segment
            if segment.owned:
                return None
            at -= 1
        return None


def capturing(group: Group) -> bool:
    """Whether this rank's current stream is being captured into a CUDA graph."""
    return group.backend == "cuda" and group.driver.capturing(group.gpu, group.driver.stream(group.gpu))


def heap(group: Group) -> Heap:
    """The group's heap on this rank."""
    if group.opened().heap is None:
        group.heap = Heap(group)
    assert group.heap is not None
    return group.heap


def empty(shape: tuple[int, ...], dtype: torch.dtype, group: Group, what: str = "") -> torch.Tensor:
    """A symmetric tensor of ``shape``, contents undefined.  Collective: every rank asks for the same shape and dtype.

    ``what`` it is, for messages.
    Raises :class:`pk.errors.RanksDisagree` on every rank if they do not, and :class:`pk.errors.BackendError` on every
    rank if one cannot allocate or share.
    """
    if any(extent < 0 for extent in shape):
        raise ArgumentError(f"pk.empty({tuple(shape)}): an extent is negative.")
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes >= 1 << 62:
        raise ArgumentError(
            f"pk.empty({tuple(shape)}, {dtype}) asks for {nbytes} bytes, more than any address space.\n"
            "  Pass a smaller shape."
        )
    where = heap(group)
    segment = where.allocate(nbytes, what or f"pk.empty({tuple(shape)}, {dtype})")
    made = where.tensor(segment, max(nbytes, 16))[:nbytes].view(dtype).view(shape)
    for fill in fillers if group.backend == "sim" else ():
        fill(made)
    return made


def symmetric(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Share an existing tensor with all ranks and return it.  Collective; it stays alive until ``pk.finalize()``.

    Every rank passes a tensor of the same shape, strides and dtype, on its own device.  Raises as :func:`empty`, and
    :class:`pk.errors.BackendError` on every rank if one rank's memory cannot be exported.
    """
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(no_tensor("pk.symmetric: `tensor`", "tensor", tensor))
    plain(tensor, "tensor", "pk.symmetric")
    where = heap(group)
    what = f"pk.symmetric(tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype})"
    known = _find(tensor, group)
    place = None if known is None else (known[0].number, known[1])
    told = group.attempt("pk.symmetric", lambda: (_on_device(tensor, group), what, place))
    _same([text for _, text, _ in told])
    if place is not None and all(other == place for _, _, other in told):
        return tensor
    first, last = _extent(tensor)
    reach = ipc.share(group, first, what)
    where.add(first, last - first + 1, reach, owned=False, keep=tensor.untyped_storage())
    return tensor


def lookup(tensor: torch.Tensor, group: Group, name: str = "tensor") -> list[int]:
    """The address of ``tensor`` on every rank, as this rank's kernels see it.

    A view, slice or permutation of a symmetric tensor is symmetric.  Raises :class:`pk.errors.ArgumentError` for
    others; in a group of one every tensor is.
    """
    if group.world_size == 1:
        return [_extent(tensor)[0]]
    found = _find(tensor, group)
    if found is None:
        raise ArgumentError(
            f"`{name}` is not symmetric: the memory of this tensor of shape {tuple(tensor.shape)} belongs to rank "
            f"{group.rank} alone, so its peers cannot reach it.\n"
            "  On every rank, allocate it with pk.empty(shape, dtype), or share it once with pk.symmetric(tensor)."
        )
    segment, offset = found
    return [peer + offset for peer in segment.reach.peers]


def place(tensor: torch.Tensor, group: Group) -> tuple[int, int] | None:
    """Number of the segment and offset in it: equal on all ranks if and only if they pass the same symmetric tensor."""
    found = _find(tensor, group)
    return None if found is None else (found[0].number, found[1])


def same_places(kernel: str, found: list[dict[str, tuple[int, int] | None]]) -> None:
    """Raise :class:`pk.errors.RanksDisagree` if the ranks pass different memory (:func:`place`, by parameter name)."""
    for name in found[0]:
        places = [mine.get(name) for mine in found]
        if len(set(places)) > 1:
            texts = [f"symmetric memory {p[0]}, byte {p[1]}" if p else "not symmetric" for p in places]
            raise RanksDisagree(
                f"the ranks call kernel `{kernel}` with different tensors as `{name}`:\n{differing(texts)}\n"
                "  A Parallel argument is the same pk.empty tensor, or the same view of it, on every rank."
            )


def close(group: Group) -> None:
    """Give everything back: synchronise, all unmap, then each rank frees what its tensors do not hold.  Collective."""
    from pk.runtime import retired

    where = group.heap
    if where is None:
        return
    if group.backend == "cuda":
        group.driver.synchronize(group.gpu)
    group.barrier("closing")
    where.unmap()
    group.barrier("closing, unmapped")
    group.heap = None
    retired.retire(group, where, set())


def _find(tensor: torch.Tensor, group: Group) -> tuple[Segment, int] | None:
    first, last = _extent(tensor)
    segment = None if group.heap is None else group.heap.find(first, max(first, last))
    return None if segment is None else (segment, first - segment.base)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first and the last byte; the last is before the first if the tensor is empty."""
    size = tensor.element_size()
    if tensor.numel() == 0:  # its data_ptr() is 0, even inside a symmetric tensor
        base = tensor.untyped_storage().data_ptr()
        return base, base - 1
    first = tensor.data_ptr()
    span = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (span + 1) * size - 1


def _on_device(tensor: torch.Tensor, group: Group) -> bool:
    wanted = "cpu" if group.backend == "sim" else group.driver.device_name(group.gpu)
    if str(tensor.device) != wanted:
        raise ArgumentError(f"pk.symmetric: the tensor is on {tensor.device}, and the group's rank on {wanted}.")
    return True


def _refuse_capture(what: str, captures: list[bool], mine: int) -> None:
    if any(captures):
        who = "" if captures[mine] else f" by rank {captures.index(True)}"
        raise BackendError(
            f"{what} needs symmetric memory, which cannot be allocated while a CUDA graph is being captured{who}.\n"
            "  Do it once before the capture: make the same call eagerly first."
        )


def _same(texts: list[str]) -> None:
    if len(set(texts)) > 1:
        raise RanksDisagree(
            f"the ranks ask for different symmetric memory:\n{differing(texts)}\n"
            "  Every rank allocates the same tensors in the same order."
        )
