"""Who runs a kernel together: the ranks of a group, where they are, and how they meet on the host.

``current()`` finds the group of the caller: the one ``pk.spawn`` made for this thread or process, else the initialised
``torch.distributed`` process group, else a group of one.
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pk import env
from pk.artifact import MAX_RANKS
from pk.errors import ArgumentError, BackendError
from pk.runtime import names
from pk.runtime.link import Link, leave_store
from pk.runtime.rendezvous import Rendezvous, Work, ranks

if TYPE_CHECKING:
    from pk.runtime.context import Context
    from pk.runtime.device import Driver
    from pk.runtime.symm import Heap

Backend = Literal["sim", "cuda"]


class Group:
    """The ranks that launch kernels together, seen from one of them.

    rank, world_size: this rank and how many there are.  backend: ``"sim"`` or ``"cuda"``.  device: torch's GPU index,
    None in the simulator.  shared: other ranks run on the same GPU.  sms: the SMs that a launch of this rank may fill
    (0 in the simulator).
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        backend: Backend,
        *,
        device: int | None = None,
        driver: Driver | None = None,
        rendezvous: Rendezvous | None = None,
        link: Link | None = None,
        places: tuple[int | None, ...] = (),
        sharers: int = 1,
    ) -> None:
        check_world_size(world_size)
        self.rank, self.world_size, self.backend = rank, world_size, backend
        self.device, self.rendezvous, self.link = device, rendezvous, link
        # Every rank's GPU as this process counts them; None: not visible here.
        self.places = places or (device,) * world_size
        self.sharers, self.shared = sharers, sharers > 1
        self._driver = driver
        self.sms = driver.sms(device) // sharers if driver is not None and device is not None else 0
        self.workspaces: dict[str, Any] = {}  # symmetric tensors that operators keep, see pk.ops.workspace
        self.choices: Any = None  # what the ranks agreed on for pk.ops.choose
        self.heap: Heap | None = None
        self.context: Context | None = None
        self.closed, self.group_name = False, names.register(self)  # torch's process groups have a name too

    def __repr__(self) -> str:
        where = "" if self.device is None else f", GPU {self.device}" + (" shared" if self.shared else "")
        return f"<pk group: rank {self.rank} of {self.world_size}, {self.backend}{where}>"

    @property
    def driver(self) -> Driver:
        """The machine under a ``"cuda"`` group."""
        if self._driver is None:
            raise BackendError(f"{self!r} has no GPU.\n  Use a group of the cuda backend.")
        return self._driver

    @property
    def gpu(self) -> int:
        """``device`` of a ``"cuda"`` group."""
        assert self.device is not None, "a cuda group has a device"
        return self.device

    @property
    def threaded(self) -> bool:
        """Whether the other ranks are threads of this process."""
        return self.rendezvous is not None and self.world_size > 1

    # ------------------------------------------------------------------------------------------------- meeting
    def meet(self, key: str, payload: Any, fn: Work, timeout: float | None = None) -> Any:
        """All ranks come with ``key``; one runs ``fn(payloads in rank order)``, which returns one result a rank.

        Between processes payloads and results are pickled, and ``fn`` runs on rank 0.  What ``fn`` raises is raised
        on every rank. Raises :class:`pk.errors.RanksDisagree` on all ranks if their keys differ and
        :class:`pk.errors.PeerFailed` if a rank raised, died or did not come within ``timeout`` seconds (default:
        ``PK_ENTRY_TIMEOUT_S``).
        """
        limit = env.ENTRY_TIMEOUT_S.get() if timeout is None else timeout
        if self.world_size == 1:
            return fn([payload])[0]
        if self.rendezvous is not None:
            return self.rendezvous.meet(self.rank, key, payload, fn, limit)
        return self._link().gather(key, payload, fn, limit)

    def exchange(self, key: str, payload: bytes, timeout: float | None = None) -> list[bytes]:
        """Every rank's ``payload`` in rank order; errors as :meth:`meet`."""
        limit = env.ENTRY_TIMEOUT_S.get() if timeout is None else timeout
        if self.world_size == 1:
            return [payload]
        if self.rendezvous is not None:
            return list(self.rendezvous.meet(self.rank, key, payload, lambda all_: [all_] * len(all_), limit))
        return self._link().exchange(key, payload, limit)

    def barrier(self, key: str, timeout: float | None = None) -> None:
        """Return when every rank has called this; errors as :meth:`meet`."""
        self.exchange(key, b"", timeout)

    def attempt(self, key: str, work: Callable[[], Any]) -> list[Any]:
        """Every rank tries ``work()``; all get all results (pickled in between), or all raise if one failed.

        A rank that failed raises its own exception, the others :class:`pk.errors.BackendError` naming it and the
        reason.
        """
        error: Exception | None = None
        value: Any = None
        try:
            value = work()
        except Exception as caught:  # noqa: BLE001  told to every rank below
            error = caught
        told = pickle.dumps((value, None if error is None else f"{type(error).__name__}: {error}"))
        outcomes = [pickle.loads(data) for data in self.exchange(key, told)]
        if error is not None:
            raise error
        for rank, (_, why) in enumerate(outcomes):
            if why is not None:
                raise BackendError(f"{key} failed on rank {rank}: {why}")
        return [result for result, _ in outcomes]

    def agree(self, ok: bool, why: str, key: str = "an agreement") -> None:
        """Return on every rank if ``ok`` everywhere; else raise BackendError on every rank, with the reasons."""
        votes = [pickle.loads(data) for data in self.exchange(key, pickle.dumps((ok, why)))]
        failed = [(rank, text) for rank, (fine, text) in enumerate(votes) if not fine]
        if failed:
            raise BackendError("\n".join(f"rank {rank}: {text}" for rank, text in failed))

    def leave(self, why: str) -> None:
        """This rank will never meet the others again; whoever waits for it is released with ``why``."""
        if self.rendezvous is not None:
            self.rendezvous.leave(self.rank, why)
        elif self.link is not None:
            self.link.leave(why)

    def _link(self) -> Link:
        assert self.link is not None, "ranks that are no threads have a store"
        return self.link

    # -------------------------------------------------------------------------------------------------- lifecycle
    def reset(self) -> None:
        """Recover after a HangError.  Collective.  Nothing to do where nothing was launched."""
        from pk.runtime import context

        context.reset(self)

    def close(self) -> None:
        """Free the group's memory.  Collective.  What some rank still holds stays until the process ends."""
        from pk.runtime import context, symm

        if not self.closed:
            self.workspaces.clear()
            context.close(self)
            symm.close(self)
            self.closed = True


def check_world_size(world_size: int) -> None:
    """Raise :class:`pk.errors.ArgumentError` unless pk can run so many ranks."""
    if not isinstance(world_size, int) or isinstance(world_size, bool):
        raise ArgumentError(
            f"world_size={world_size!r} is {type(world_size).__name__}, and must be a whole number from 1 to "
            f"{MAX_RANKS}.\n  Pass the number of ranks, such as 2."
        )
    if not 1 <= world_size <= MAX_RANKS:
        raise ArgumentError(
            f"a group of {world_size} ranks: pk runs 1 to {MAX_RANKS}, the GPUs that one host connects by NVLink.\n"
            "  Across hosts, use one group for each host."
        )


# ----------------------------------------------------------------------------------------------------- making groups
def threads(
    world_size: int, backend: Backend, devices: list[int] | None = None, driver: Driver | None = None
) -> list[Group]:
    """Groups for ``world_size`` rank threads of this process; ``devices``: the GPU of each rank."""
    check_world_size(world_size)
    meeting = Rendezvous(world_size)
    places: tuple[int | None, ...] = tuple(devices) if devices is not None else (None,) * world_size
    return [
        Group(
            rank, world_size, backend, device=places[rank], driver=driver, rendezvous=meeting, places=places,
            sharers=places.count(places[rank]) if backend == "cuda" else 1,
        )
        for rank in range(world_size)
    ]  # fmt: skip


def processes(
    link: Link, backend: Backend, device: int | None = None, driver: Driver | None = None, host: str | None = None
) -> Group:
    """The group of ranks that are processes of one host.  Collective: the ranks tell each other where they are.

    Raises :class:`pk.errors.BackendError` on every rank if they are on several hosts, of different backends, or on one
    GPU although there are enough.
    """
    here = {"host": host or _host(), "backend": backend, "uuid": "", "visible": 0, "device": device}
    if driver is not None and device is not None:
        here |= {"uuid": driver.uuid(device), "visible": len(driver.uuids())}
    told = [
        pickle.loads(data) for data in link.exchange("making a group", pickle.dumps(here), env.ENTRY_TIMEOUT_S.get())
    ]
    link.learn()
    _check_places(told)
    visible = driver.uuids() if driver is not None else []
    places = tuple(visible.index(t["uuid"]) if t["uuid"] in visible else None for t in told)
    sharers = [t["uuid"] for t in told].count(here["uuid"]) if backend == "cuda" else 1
    return Group(
        link.rank, link.world, backend, device=device, driver=driver, link=link, places=places, sharers=sharers
    )


def _host() -> str:
    try:  # two containers may have one name; the boot id tells hosts apart
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()}/{file.read().strip()}"
    except OSError:
        return socket.gethostname()


def _check_places(told: list[dict[str, Any]]) -> None:
    for what, advice in (
        ("backend", "Set PK_BACKEND to one value on all ranks."),
        (
            "host",
            "pk's groups stay inside one host: make a process group for each host with torch.distributed.new_group.",
        ),
    ):
        if len({t[what] for t in told}) > 1:
            listing = ", ".join(f"rank {r}: {t[what].split('/')[0]}" for r, t in enumerate(told))
            raise BackendError(f"the ranks of the group differ in their {what}: {listing}.\n  {advice}")
    for uuid in {t["uuid"] for t in told if t["uuid"]}:
        who = [r for r, t in enumerate(told) if t["uuid"] == uuid]
        if len(who) > 1 and min(told[r]["visible"] for r in who) >= len(told):
            raise BackendError(
                f"{ranks(who)} are all on GPU {told[who[0]]['device']}, though there are {told[who[0]]['visible']} "
                f"GPUs for {len(told)} ranks.\n"
                "  Call torch.cuda.set_device(local_rank) first.  "
                "To share a GPU on purpose, narrow CUDA_VISIBLE_DEVICES."
            )


# ------------------------------------------------------------------------------------------------- finding the group
class _Local(threading.local):
    group: Group | None = None


_local = _Local()
_lock = threading.RLock()
_own: Group | None = None  # of a process that pk.spawn started
_teams = 0  # spawns of rank threads under way
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

    The first call for a process group is collective.  Raises :class:`pk.errors.ArgumentError` for anything else, and
    for a process group this rank is not in; :class:`pk.errors.BackendError` if the machine cannot run its kernels.
    """
    if isinstance(group, Group):
        return group
    if isinstance(group, str):
        return names.named(group)
    if group is None:
        mine = _local.group or _own or _memo.get()
        if mine is not None:
            return mine
    distributed = sys.modules.get("torch.distributed")
    ready = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if group is not None:
        if not ready:
            raise ArgumentError(
                f"group={group!r} is neither a pk group nor a process group of an initialised torch.distributed.\n"
                "  Pass a torch.distributed.ProcessGroup, or nothing."
            )
        return _of(distributed, group)
    if ready and distributed is not None:
        return _memo.put(_of(distributed, distributed.group.WORLD))
    if _teams and threading.current_thread() is not threading.main_thread():
        raise BackendError(
            "this thread is not a rank of pk.spawn, so it has no group.\n"
            "  Call pk.runtime.group.current() in the rank's own thread and pass the result as group=."
        )
    _refuse_uninitialised()
    return _memo.put(_alone())


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
        world = self._world
        if _world() is not (None if world is None else world()):
            return None
        if group.device is not None and group.device != self._device():
            return None
        return group if self._backend == _backend_text() else None


_FAREWELL_S = 2.0  # for a process that ends to tell the store so, which may be gone
_ENDED = "has left: its process has ended"
_memo = _Memo()
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

    return getattr(torch._C, "_cuda_getDevice", None) or _current_device


def default_backend() -> Backend:
    """``PK_BACKEND``, else ``"cuda"`` if there is a Hopper-class GPU and torch can use it, else ``"sim"``."""
    chosen = env.BACKEND.get()
    if chosen:
        return "cuda" if chosen == "cuda" else "sim"
    return "cuda" if not _why_no_cuda() else "sim"


def _why_no_cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        return "torch finds no CUDA device (a CPU build of torch, or no NVIDIA driver)"
    from pk.runtime import driver

    return driver.why_unavailable() or ""


def cuda_driver(device: int) -> Driver:
    """The real machine, if GPU ``device`` runs pk's kernels; :class:`pk.errors.BackendError` says why not."""
    import torch

    from pk.runtime import driver
    from pk.runtime.driver_memory import cuda

    driver.require_hopper(device)
    if not torch.cuda.is_available():
        raise BackendError(
            "torch cannot use the GPU: this is a CPU build of torch.\n  Install a CUDA build, or set PK_BACKEND=sim."
        )
    return cuda()


def _current_device() -> int:
    import torch

    return int(torch.cuda.current_device()) if torch.cuda.is_available() else 0


def _alone() -> Group:
    backend = default_backend()
    device = _current_device() if backend == "cuda" else None
    with _lock:
        if (backend, device) not in _solo:
            driver = cuda_driver(device) if device is not None else None
            _solo[backend, device] = Group(0, 1, backend, device=device, driver=driver)
        return _solo[backend, device]


def _of(distributed: Any, process_group: Any) -> Group:
    with _lock:
        try:
            found = _distributed.get(process_group)
        except TypeError:  # not even something a weak reference can point to
            found = None
    return found or _join(distributed, process_group)


def _join(distributed: Any, process_group: Any) -> Group:
    try:
        rank, world = distributed.get_rank(process_group), distributed.get_world_size(process_group)
    except Exception as error:  # noqa: BLE001  torch raises TypeError, ValueError or RuntimeError here
        raise ArgumentError(f"group={process_group!r} is not a process group: {error}.") from None
    if rank < 0:
        raise ArgumentError(
            "this rank is not in the process group passed as group=.\n  Call on the group's ranks only."
        )
    check_world_size(world)
    backend = default_backend()
    device = _current_device() if backend == "cuda" else None
    driver = cuda_driver(device) if device is not None else None
    if world == 1:
        made = Group(0, 1, backend, device=device, driver=driver)
    else:
        store = distributed.distributed_c10d._get_process_group_store(process_group)
        made = processes(Link(store, rank, world), backend, device, driver)
    with _lock:
        _distributed[process_group] = made
    return made


def process_group(group: Group) -> Any:
    """The process group of ``torch.distributed`` that ``group`` was made for; None if there is none."""
    with _lock:
        return next((found for found, made in _distributed.items() if made is group), None)


@atexit.register
def _tell_that_this_process_ends() -> None:
    """Ranks that wait for this one, or will, are released; also those of process groups that pk never met here."""
    with _lock:
        for group in _distributed.values():
            if group.link is not None:
                leave_store(group.link.store, group.rank, _ENDED, _FAREWELL_S)
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    for process_group, (_, store) in list(getattr(getattr(distributed, "_world", None), "pg_map", {}).items()):
        if store is not None and process_group.size() > 1:
            leave_store(store, process_group.rank(), _ENDED, _FAREWELL_S)


def finalize() -> None:
    """Free what pk holds for this rank's groups.  Collective over each of them."""
    mine = [_local.group or _own] if (_local.group or _own) is not None else []
    with _lock:
        every = [*mine, *_distributed.values(), *(_solo.values() if not mine else [])]
        _distributed.clear()
        if not mine:
            _solo.clear()
    for group in every:
        if group is not None:
            group.close()
