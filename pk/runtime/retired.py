"""Memory of groups that are no more: freed as soon as no peer can reach it and no tensor refers to it.

A group that all ranks close together knows that its peers have unmapped its memory.  A rank whose process group was
destroyed, or whose peers have failed, leaves alone: it unmaps what it had of the others and tells them so through the
store; its own memory waits here until each of them has done the same, or has ended.  Nothing here waits for a rank.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pk.runtime import context

if TYPE_CHECKING:
    from pk.runtime.symm import Heap
    from pk.runtime.team import Group

DESTROYED = "has destroyed its process group"
_UNMAPPED = "unmapped"


@dataclass(slots=True)
class _Left:
    """The memory of a group on one rank, after the group."""

    group: Group
    heap: Heap
    mapping: set[int]  # ranks that may still reach it


_lock = threading.RLock()
_left: list[_Left] = []
_joined: list[tuple[weakref.ref[Any], Group]] = []  # process groups, and what pk made for them


def watch(process_group: Any, group: Group) -> None:
    """Leave ``group`` when ``process_group`` is destroyed; its peers learn of it at once."""
    with _lock:
        _joined.append((weakref.ref(process_group), group))
    if group.link is not None:
        weakref.finalize(process_group, _tell, weakref.ref(group)).atexit = False


def _tell(group: weakref.ref[Group]) -> None:
    found = group()
    if found is not None and not found.closed:
        found.orphaned, found.why = True, DESTROYED
        found.leave(DESTROYED)


def destroyed(process_group: Any) -> bool:
    """Whether ``torch.distributed`` no longer knows this process group, or None in its place."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    known = getattr(getattr(distributed, "_world", None), "pg_map", None)
    return process_group is None or (known is not None and process_group not in known)


def joined() -> list[Group]:
    """The groups of process groups that still exist, in the order in which they were made."""
    with _lock:
        return [group for _, group in _joined]


def forget(groups: list[Group]) -> None:
    """These have been closed."""
    with _lock:
        _joined[:] = [(made, group) for made, group in _joined if group not in groups]


def sweep() -> None:
    """Leave groups whose process group is gone, and free what has become nobody's.  Never waits for a rank."""
    with _lock:
        gone = [group for made, group in _joined if destroyed(made())]
        forget(gone)
        for group in gone:
            leave(group, DESTROYED)
        _left[:] = [item for item in _left if not _freed(item)]


def leave(group: Group, why: str) -> None:
    """This rank is done with ``group``, whatever the others do.  Waits for its own device, never raises.

    ``why`` is what the others are told, such as "has destroyed its process group".
    """
    if group.closed:
        return
    group.closed, group.why = True, why
    group.workspaces.clear()
    if group.solo is not None:
        leave(group.solo, why)
    group.leave(why)
    heap = group.heap
    try:
        if group.backend == "cuda" and (heap is not None or group.context is not None):
            group.driver.synchronize(group.gpu)
        context.drop(group)
        if heap is not None:
            heap.unmap()
    except Exception:  # noqa: BLE001  the CUDA context is lost, and its memory with it
        group.context = group.heap = None
        return
    group.heap = None
    if group.link is not None:
        with contextlib.suppress(Exception):  # without a store the others look whether this process lives
            group.link.note(f"{_UNMAPPED}/{group.rank}", b"")
    if heap is not None:
        link = group.link
        retire(group, heap, set() if link is None else set(range(link.world)) - {link.rank})


def retire(group: Group, heap: Heap, mapping: set[int]) -> None:
    """Free ``heap`` when its tensors are gone and no rank of ``mapping`` can reach it any more."""
    item = _Left(group, heap, mapping)
    if not _freed(item):
        with _lock:
            _left.append(item)


def inherited() -> None:
    """In a forked child: nothing of this is its own."""
    global _lock  # noqa: PLW0603
    _lock = threading.RLock()
    _left.clear()
    _joined.clear()


def _freed(item: _Left) -> bool:
    """Free what can be; whether that was all."""
    group, heap = item.group, item.heap
    item.mapping = {rank for rank in item.mapping if not _unmapped(group, rank)}
    if item.mapping:
        return False
    for number, segment in list(heap.segments.items()):
        if group.backend == "sim" or not segment.owned:  # whoever needs it keeps it
            heap.remove(number)
        elif number in heap.free:
            heap.remove(number)
            with contextlib.suppress(Exception):  # the CUDA context is lost
                group.driver.free(group.gpu, segment.base)
    return not heap.segments


def _unmapped(group: Group, rank: int) -> bool:
    link = group.link
    if link is None:
        return True
    with contextlib.suppress(Exception):  # no store, no news
        if link.peek(f"{_UNMAPPED}/{rank}") is not None:
            return True
    with contextlib.suppress(Exception):
        return bool(link.ended(rank))
    return False
