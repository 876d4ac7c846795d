"""The group of a caller, and the process groups of ``torch.distributed`` that pk has met.

``current()`` finds it: the one ``pk.spawn`` made for this thread or process, else the initialised
``torch.distributed`` process group, else a group of one.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from pk import env
from pk.errors import ArgumentError, BackendError, PeerFailed, short
from pk.runtime import names, retired, watch
from pk.runtime.backends import Backend, cuda_driver, current_device, default_backend
from pk.runtime.founding import processes, threads
from pk.runtime.link import Link, leave_store
from pk.runtime.team import Group, check_world_size
from pk.runtime.turn import once

__all__ = [
    "Backend", "Group", "alone", "check_world_size", "count_team", "cuda_driver", "current", "default_backend", "enter",
    "finalize", "process_group", "processes", "threads",
]  # fmt: skip


class _Local(threading.local):
    group: Group | None = None


_local = _Local()
_lock = threading.RLock()
_own: Group | None = None  # of a process that pk.spawn started
_teams = 0  # spawns of rank threads under way
_place = ""  # such as "rank 0 of 2": where torch.distributed had this process when pk met a process group of its
_solo: dict[tuple[str, int | None], Group] = {}
_distributed: weakref.WeakKeyDictionary[Any, Group] = weakref.WeakKeyDictionary()


def enter(group: Group | None, whole_process: bool = False) -> None:
    """Make ``group`` what :func:`current` returns in this thread (or in every thread of the process)."""
    global _own  # noqa: PLW0603
    _local.group = group
    if whole_process:
        _own = group


def count_team(change: int) -> None:
    """Rank threads have started (+1) or ended (-1)."""
    global _teams  # noqa: PLW0603
    with _lock:
        _teams += change


def current(group: Any = None) -> Group:
    """The caller's group.  ``group``: a :class:`Group`, a ``torch.distributed`` process group, a name, or None.

    The first call for a process group is collective.  Raises :class:`pk.errors.ArgumentError` for anything else, for a
    process group that has been destroyed or that this rank is not in, and for another rank thread's group;
    :class:`pk.errors.BackendError` if the machine cannot run its kernels, and if all of ``torch.distributed`` has been
    destroyed since pk used it.
    """
    if isinstance(group, Group):
        mine = _local.group
        if mine is not None and mine is not group and mine.rendezvous is group.rendezvous is not None:
            _refuse_another_rank(mine, group)
        return group if not (group.closed or group.orphaned) else group.opened()
    if isinstance(group, str):
        return names.named(group).opened()
    if group is None:
        mine = _local.group or _own or _memo.get()
        if mine is not None:
            return mine
    _refuse_inherited()
    distributed, ready = _torch_distributed()
    if group is not None:
        if not ready:
            _refuse_strange(distributed, group)
        return _of(distributed, group)
    if ready:
        return _memo.put(_of(distributed, distributed.group.WORLD))
    _refuse_helper()
    _refuse_destroyed()
    _refuse_uninitialised()
    retired.sweep()  # process groups that were there have been destroyed
    return _memo.put(_alone())


def _torch_distributed() -> tuple[Any, bool]:
    """``torch.distributed``, None if nothing imported it; and whether it is initialised."""
    distributed = sys.modules.get("torch.distributed")
    return distributed, distributed is not None and distributed.is_available() and distributed.is_initialized()


def alone(group: Any = None) -> Group:
    """The caller as a group of one, for kernels that meet no other rank: :meth:`Group.alone` of its group.

    ``group`` as for :func:`current`, but nobody is met: a process group that pk does not know yet stays unknown, and
    all SMs of the GPU may be filled.  Raises as :func:`current`, but for ranks that work each for itself.
    """
    if isinstance(group, str):
        group = names.find(group)
    if isinstance(group, Group):
        return current(group).alone()
    if group is None:
        mine = _local.group or _own or _memo.get()
        if mine is not None:
            return mine.alone()
        mine = _lone.get()
        if mine is not None:
            return mine
    _refuse_inherited()
    distributed, ready = _torch_distributed()
    if group is not None:
        if not ready:
            _refuse_strange(distributed, group)
        _place_in(distributed, group)
    else:
        _refuse_helper()
        group = distributed.group.WORLD if ready else None
    known = _known(group)
    if known is not None:
        return known.alone()
    return _lone.put(_alone())


def _refuse_strange(distributed: Any, group: Any) -> NoReturn:
    _refuse_destroyed_group(distributed, group)
    raise ArgumentError(
        f"group={short(group)} is neither a pk group nor a process group of an initialised torch.distributed.\n"
        "  Pass a torch.distributed.ProcessGroup, or nothing."
    )


def _refuse_helper() -> None:
    """A thread beside the rank threads of pk.spawn."""
    if _teams and threading.current_thread() is not threading.main_thread():
        raise BackendError(
            "this thread is not a rank of pk.spawn, so it has no group.\n"
            "  Call pk.runtime.group.current() in the rank's own thread and pass the result as group=, to one thread "
            "at a time: two that are in calls of one group at once are refused."
        )


def _refuse_another_rank(mine: Group, group: Group) -> None:
    """A rank thread would act for another one: ranks pass objects among themselves that know their group."""
    raise ArgumentError(
        f"group={short(group)} ({group.group_name}) is that of another rank, and this thread is rank {mine.rank}.\n"
        "  Pass this rank's own group, or nothing."
    )


def _refuse_destroyed() -> None:
    """This process was one of several ranks, and would from now on quietly compute for itself."""
    if _place:
        raise BackendError(
            f"torch.distributed, in which this process was {_place}, has been destroyed (destroy_process_group), so pk "
            "has no group for it.\n"
            "  Call torch.distributed.init_process_group() again, or pk.finalize() to work alone from here on."
        )


def _refuse_destroyed_group(distributed: Any, given: Any) -> None:
    kind = getattr(distributed, "ProcessGroup", None)
    if isinstance(kind, type) and isinstance(given, kind):
        raise ArgumentError(names.destroyed_text(names.name_of(given)))


def _refuse_uninitialised() -> None:
    """A launcher started several ranks, and they have not met: each would quietly compute for itself."""
    rank, world = (os.environ.get(name, "").strip() for name in ("RANK", "WORLD_SIZE"))
    if rank.isdecimal() and world.isdecimal() and int(world) > 1:
        raise BackendError(
            f"this process is rank {rank} of {world} (RANK={rank}, WORLD_SIZE={world}, as torchrun sets them), but "
            "torch.distributed is not initialised, so pk has no group for it.\n"
            "  Call torch.distributed.init_process_group() first.  "
            "For ranks that work alone, unset RANK and WORLD_SIZE."
        )


class _Memo:
    """The group that :func:`current` found last for a caller outside ``pk.spawn``, as long as nothing has changed."""

    def __init__(self) -> None:
        self._group: Group | None = None
        self._world: weakref.ref[Any] | None = None
        self._backend: Any = None
        self._device: Callable[[], int] = lambda: -1

    def put(self, group: Group) -> Group:
        """Remember ``group``; returns it."""
        world = _world()
        self._world = None if world is None else weakref.ref(world)
        self._backend, self._device = _backend_text(), _device_reader()
        self._group = group
        return group

    def get(self) -> Group | None:
        """The group, if process group, environment and current device are what they were."""
        group = self._group
        if group is None or group.closed or _teams:
            return None
        now = _world()
        if now is not (None if self._world is None else self._world()) or (now is None and self._world is not None):
            return None  # also when it has been destroyed, and nothing is left of it that could be compared
        if group.device is not None and group.device != self._device():
            return None
        return group if self._backend == _backend_text() else None


_FAREWELL_S = 2.0  # for a process that ends to tell the store so, which may be gone
_memo = _Memo()
_lone = _Memo()  # of alone()
_backend_text = env.peek(env.BACKEND)


def _world() -> Any:
    """torch.distributed's default process group, or None."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None:
        return None
    try:
        return distributed._world._default_pg  # what the two properties on the public way end at
    except AttributeError:
        return distributed.GroupMember.WORLD


def _device_reader() -> Callable[[], int]:
    """What gives torch's current device: its C function, past checks that CUDA has started."""
    import torch

    return getattr(torch._C, "_cuda_getDevice", None) or current_device


def _alone() -> Group:
    backend = default_backend()
    device = current_device() if backend == "cuda" else None
    with _lock:
        if (backend, device) not in _solo:
            driver = cuda_driver(device) if device is not None else None
            _solo[backend, device] = Group(0, 1, backend, device=device, driver=driver)
        return _solo[backend, device]


def _of(distributed: Any, process_group: Any) -> Group:
    found = _known(process_group)
    if found is not None:
        return found
    retired.sweep()
    return _join(distributed, process_group)


def _known(process_group: Any) -> Group | None:
    """What was made for ``process_group``, if anything was and it still exists."""
    with _lock:
        try:
            found = _distributed.get(process_group)
        except TypeError:  # not even something a weak reference can point to
            found = None
    return found if found is not None and not retired.destroyed(process_group) else None


def _place_in(distributed: Any, process_group: Any) -> tuple[int, int]:
    """This process's rank in ``process_group``, and the world size; ArgumentError if it is in none of that name."""
    try:
        rank, world = distributed.get_rank(process_group), distributed.get_world_size(process_group)
    except Exception as error:  # noqa: BLE001  torch raises TypeError, ValueError or RuntimeError here
        _refuse_destroyed_group(distributed, process_group)
        raise ArgumentError(f"group={short(process_group)} is not a process group: {error}.") from None
    if rank < 0:
        raise ArgumentError(
            "this rank is not in the process group passed as group=.\n  Call on the group's ranks only."
        )
    check_world_size(world)
    return rank, world


def _join(distributed: Any, process_group: Any) -> Group:
    rank, world = _place_in(distributed, process_group)
    _remember(distributed, process_group)
    backend = default_backend()
    device = current_device() if backend == "cuda" else None
    driver = cuda_driver(device) if device is not None else None
    if world == 1:
        made = Group(0, 1, backend, device=device, driver=driver)
    else:
        store = distributed.distributed_c10d._get_process_group_store(process_group)
        made = once(process_group, lambda: processes(Link(store, rank, world), backend, device, driver))
    with _lock:
        _distributed[process_group] = made
    retired.watch(process_group, made)
    return made


def _remember(distributed: Any, process_group: Any) -> None:
    """That pk has met ``process_group``, and where this process stands among all ranks."""
    global _place  # noqa: PLW0603
    names.meet(process_group)
    world = distributed.get_world_size()
    _place = f"rank {distributed.get_rank()} of {world}" if world > 1 else ""


def process_group(group: Group) -> Any:
    """The process group of ``torch.distributed`` that ``group`` was made for; None if there is none."""
    with _lock:
        return next((found for found, made in _distributed.items() if made is group), None)


@atexit.register
def _tell_that_this_process_ends() -> None:
    """Ranks that wait for this one, or will, are released; also those of process groups that pk never met here."""
    if _inherited:
        return
    why = _ended()
    for group in retired.joined():
        if group.link is not None:
            leave_store(group.link.store, group.rank, why, _FAREWELL_S)
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    for process_group, (_, store) in list(getattr(getattr(distributed, "_world", None), "pg_map", {}).items()):
        if store is not None and process_group.size() > 1:
            leave_store(store, process_group.rank(), why, _FAREWELL_S)


def _ended() -> str:
    """How this process ends, for the others; the error that nobody caught, if there is one."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return "has left: its process has ended"
    return f"has left: its process has ended by {type(error).__name__}: {error}"


def finalize() -> None:
    """Free what pk holds for this rank's groups.  Collective over each of them.

    Groups whose process group has been destroyed, here or on another rank, are left.  Raises
    :class:`pk.errors.PeerFailed`, after all groups are closed, if a rank of one failed or does not come.
    """
    global _place  # noqa: PLW0603
    _refuse_inherited()
    _place = ""
    retired.sweep()
    mine = [_local.group or _own] if (_local.group or _own) is not None else []
    joined = retired.joined()
    retired.forget(joined)
    with _lock:
        every = [*mine, *joined, *(_solo.values() if not mine else [])]
        _distributed.clear()
        if not mine:
            _solo.clear()
    failed: PeerFailed | None = None
    for group in every:
        try:
            if group is not None:
                group.close()
        except PeerFailed as error:
            if retired.DESTROYED not in str(error):
                failed = failed or error
    if failed is not None:
        raise failed


# -------------------------------------------------------------------------------------------------- forked processes
_inherited = ""  # in a forked process: the group of its parent that it is no member of


def _forked() -> None:
    """In the child: CUDA and the connections to other ranks are the parent's; a simulated group of one is a copy."""
    global _inherited, _own, _teams, _lock, _place  # noqa: PLW0603
    _lock = threading.RLock()
    lost = [group for group in names.every() if group.world_size > 1 or group.backend == "cuda"]
    for group in lost:
        if not group.closed:
            _inherited = _inherited or repr(group)
        group.closed, group.why = True, "belongs to the process that forked this one."
        group.context = group.heap = None
    _local.group, _own, _teams, _place = None, None, 0, ""
    for key in [key for key, group in _solo.items() if group in lost]:
        del _solo[key]
    _distributed.clear()
    retired.inherited()
    watch.inherited()


def _refuse_inherited() -> None:
    if _inherited:
        raise BackendError(
            f"this process (pid {os.getpid()}) was forked from one that is {_inherited}, and is no rank itself: "
            "neither CUDA nor the connections to other ranks survive a fork.\n"
            "  Use pk in the rank's own process; for data-loader workers that need it, pass "
            'multiprocessing_context="spawn".'
        )


os.register_at_fork(after_in_child=_forked)
