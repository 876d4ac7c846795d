"""A group: the ranks that run a kernel together, seen from one of them, and how they meet on the host."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pk import env
from pk.artifact import MAX_RANKS
from pk.errors import ArgumentError, BackendError, PeerFailed, ThreadsCollide, short
from pk.runtime import names
from pk.runtime.backends import Backend
from pk.runtime.link import Link
from pk.runtime.rendezvous import Rendezvous, Work
from pk.runtime.turn import Turn

if TYPE_CHECKING:
    from pk.runtime.context import Context
    from pk.runtime.device import Driver
    from pk.runtime.symm import Heap
    from pk.runtime.tracing import Tracer


class Group:
    """The ranks that launch kernels together, seen from one of them.

    rank, world_size: this rank and how many there are.  backend: ``"sim"`` or ``"cuda"``.  device: torch's GPU index,
    None in the simulator.  shared: other ranks run on the same GPU.  sms: the SMs that a launch of this rank may fill
    (0 in the simulator).  turn: held by the thread that is in a call of the group.
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
        self.calls: dict[Any, Any] = {}  # of operators, which the ranks have compared: the way they go
        self.heap: Heap | None = None
        self.context: Context | None = None
        self.tracer: Tracer | None = None  # while pk.trace records
        self.turn = Turn(self)
        self.beside = rendezvous is not None and self.shared  # its GPU runs ranks of this process that wait for others
        self.team = world_size  # of a group of :meth:`alone`: the ranks of the one that it is of
        self._solo: Group | None = None
        self._making = threading.Lock()
        self.group_name = names.register(self)  # torch's process groups have one too
        self.closed, self.why = False, "was closed by pk.finalize()."
        self.orphaned = False  # its process group has been destroyed; its memory is still there

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

    def opened(self) -> Group:
        """This group, if it can still be used; else :class:`pk.errors.BackendError` says why not."""
        if self.closed or self.orphaned:
            raise BackendError(f"{self!r} {self.why}")
        return self

    @property
    def threaded(self) -> bool:
        """Whether the other ranks are threads of this process."""
        return self.rendezvous is not None and self.world_size > 1

    def alone(self) -> Group:
        """A group of this rank alone, with its GPU and its share of the SMs, for kernels that meet no other rank.

        Made once, and closed with this one.  Not collective.
        """
        if self.world_size == 1 or self.closed:
            return self.opened()
        made = self._solo
        if made is None:
            with self._making:
                if self._solo is None:
                    made = Group(0, 1, self.backend, device=self.device, driver=self._driver, sharers=self.sharers)
                    made.beside, made.team, self._solo = self.beside, self.world_size, made
                made = self._solo
        if made.tracer is not self.tracer:  # pk.trace has begun or ended
            made.tracer = self.tracer
            if made.context is not None:
                made.context.warm = {}
        return made

    @property
    def solo(self) -> Group | None:
        """What :meth:`alone` has made."""
        return self._solo

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
        with self.turn:
            if self.rendezvous is not None:
                return self.rendezvous.meet(self.rank, key, payload, fn, limit, self.turn.told)
            return self._link().gather(key, payload, fn, limit, self.turn.told())

    def exchange(self, key: str, payload: bytes, timeout: float | None = None) -> list[bytes]:
        """Every rank's ``payload`` in rank order; errors as :meth:`meet`."""
        limit = env.ENTRY_TIMEOUT_S.get() if timeout is None else timeout
        if self.world_size == 1:
            return [payload]
        with self.turn:
            if self.rendezvous is not None:
                work: Work = lambda all_: [all_] * len(all_)  # noqa: E731
                return list(self.rendezvous.meet(self.rank, key, payload, work, limit, self.turn.told))
            return self._link().exchange(key, payload, limit, self.turn.told())

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

    def leave(self, why: str, void: bool = False) -> None:
        """This rank will never meet the others again; whoever waits for it is released with ``why``.

        ``void``: what is being exchanged now is of no use to anybody either.
        """
        if self.rendezvous is not None:
            self.rendezvous.leave(self.rank, why, void)
        elif self.link is not None:
            self.link.leave(why, void)

    def _link(self) -> Link:
        assert self.link is not None, "ranks that are no threads have a store"
        return self.link

    # -------------------------------------------------------------------------------------------------- lifecycle
    def reset(self) -> None:
        """Recover after a HangError.  Collective.  Nothing to do where nothing was launched."""
        from pk.runtime import context

        if self._solo is not None:
            context.reset(self._solo)
        context.reset(self)

    def close(self) -> None:
        """Free the group's memory; what tensors still refer to, when they are gone.  Collective.

        Raises :class:`pk.errors.PeerFailed` if a rank has left or does not come; then this rank has left as well.
        """
        from pk.runtime import context, retired, symm

        if self.closed:
            return
        self.workspaces.clear()
        if self._solo is not None:
            self._solo.close()
        try:
            context.close(self)
            symm.close(self)
        except (PeerFailed, ThreadsCollide) as error:
            if self.link is not None:  # threads leave when all of them have ended
                retired.leave(self, f"could not close the group: {error}")
            raise
        self.closed = True


def check_world_size(world_size: int) -> None:
    """Raise :class:`pk.errors.ArgumentError` unless pk can run so many ranks."""
    if not isinstance(world_size, int) or isinstance(world_size, bool):
        raise ArgumentError(
            f"world_size={short(world_size)} is {type(world_size).__name__}, and must be a whole number from 1 to "
            f"{MAX_RANKS}.\n  Pass the number of ranks, such as 2."
        )
    if not 1 <= world_size <= MAX_RANKS:
        raise ArgumentError(
            f"a group of {short(world_size)} ranks: pk runs 1 to {MAX_RANKS}, the GPUs that one host connects by "
            "NVLink.\n  Across hosts, use one group for each host."
        )
