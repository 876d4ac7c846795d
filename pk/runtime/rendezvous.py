"""How the rank threads of one process meet: all arrive, one works, all leave with their result or with the error.

Imports nothing of CUDA: the same object serves simulated ranks and ranks that share a GPU.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

from pk.errors import PeerFailed, PeerLate, RanksDisagree

Work = Callable[[list[Any]], list[Any]]
Told = Callable[[], str]  # what a rank is in, such as an operator's call, in words; "" if it has none


class _Step:
    """One meeting: who is there, and what came of it."""

    def __init__(self) -> None:
        self.arrived: dict[int, tuple[str, Any, Told]] = {}
        self.results: list[Any] | None = None
        self.error: BaseException | None = None
        self.called_off: dict[int, BaseException] = {}

    @property
    def over(self) -> bool:
        return self.results is not None or self.error is not None


class Rendezvous:
    """The meeting point of ``world`` rank threads."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._changed = threading.Condition()
        self._step = _Step()
        self._gone: dict[int, str] = {}
        self._void = False  # what the ranks exchange is of no use: one of them has mixed up its calls
        self.board: dict[int, Any] = {}  # what each rank shows the others

    def meet(self, rank: int, key: str, payload: Any, fn: Work, timeout: float, told: Told = str) -> Any:
        """Wait until every rank has come with ``key``; the last one runs ``fn(payloads)``; returns this rank's result.

        ``fn`` gets the payloads in rank order and returns one result a rank; what it raises is raised on every rank.
        ``told``: what messages show in place of ``key``.
        Raises :class:`RanksDisagree` on all if the keys differ, :class:`PeerFailed` if a rank has left or does not come
        within ``timeout`` seconds.
        """
        with self._changed:
            step = self._step
            self._refuse_if_gone(key, told)
            step.arrived[rank] = (key, payload, told)
            last = len(step.arrived) == self.world
            if last:
                self._step = (
                    _Step()
                )  # ranks that leave early may begin the next meeting while others still read this one
            else:
                self._wait(step, rank, timeout)
                if rank in step.called_off:
                    raise _own(step.called_off[rank], first=False)
        if last:
            self._work(step, fn)
        if step.error is not None:
            raise _own(step.error, first=last)
        if self._void:
            self._refuse_if_gone(key, told)
        assert step.results is not None
        return step.results[rank]

    def leave(self, rank: int, why: str, void: bool = False) -> None:
        """``rank`` will never come again: release whoever waits for it, now and later.

        ``void``: nor does anybody get the result of the meeting that is under way.
        """
        with self._changed:
            self._gone.setdefault(rank, why)
            self._void = self._void or void
            step = self._step
            if step.arrived and step.error is None:
                key, _, told = next(iter(step.arrived.values()))
                step.error = self._gone_error(key, told)
                self._step = _Step()
            self._changed.notify_all()

    def interrupt(self, error: BaseException, key: str) -> None:
        """Raise ``error`` in every rank that waits for the others with ``key``, as if it had not come."""
        with self._changed:
            step = self._step
            for rank in [r for r, (named, *_) in step.arrived.items() if named == key]:
                step.called_off[rank] = error
                del step.arrived[rank]
            self._changed.notify_all()

    def _wait(self, step: _Step, rank: int, timeout: float) -> None:
        end = time.monotonic() + timeout
        while not step.over and rank not in step.called_off:
            # Once all have come, the worker is one of this process's threads: it ends by itself or with the process.
            if len(step.arrived) == self.world:
                self._changed.wait()
            elif not self._changed.wait(max(end - time.monotonic(), 0)) and time.monotonic() >= end:
                if step.over or rank in step.called_off or len(step.arrived) == self.world:
                    continue
                missing = [r for r in range(self.world) if r not in step.arrived]
                key, _, told = step.arrived[rank]
                step.error = PeerLate(
                    f"{ranks(missing)} did not come to {told() or key} within {timeout:g} s.\n"
                    "  Every rank of the group must make the same calls in the same order."
                )
                self._step = _Step()
                self._changed.notify_all()

    def _work(self, step: _Step, fn: Work) -> None:
        results: list[Any] | None = None
        error: BaseException | None = None
        try:
            came = [step.arrived[r] for r in range(self.world)]
            same([key for key, *_ in came], lambda: [told() for *_, told in came])
            results = fn([step.arrived[r][1] for r in range(self.world)])
            if len(results) != self.world:
                raise AssertionError(f"{len(results)} results for {self.world} ranks")
        except BaseException as caught:  # noqa: BLE001  it is every rank's error
            error, results = caught, None
        with self._changed:
            step.results, step.error = results, error
            self._changed.notify_all()

    def _refuse_if_gone(self, key: str, told: Told) -> None:
        if self._gone:
            raise self._gone_error(key, told)

    def _gone_error(self, key: str, told: Told) -> PeerFailed:
        rank, why = next(iter(self._gone.items()))
        return PeerFailed(f"rank {rank} {why}, so {told() or key} cannot go on.")


def ranks(which: list[int]) -> str:
    """``rank 3`` or ``ranks 0 and 2``."""
    if len(which) == 1:
        return f"rank {which[0]}"
    return f"ranks {', '.join(map(str, which[:-1]))} and {which[-1]}"


def differing(values: list[str]) -> str:
    """Rows of ``rank 0: value``, one for each different value, ranks that agree together."""
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return "\n".join(f"  {ranks(who)}: {value}" for value, who in groups.items())


def same(keys: list[str], told: Callable[[], list[str]]) -> None:
    """Raise :class:`RanksDisagree` unless all ``keys`` are equal; ``told()`` is what each rank is in, or ""."""
    if len(set(keys)) > 1:
        shown = [call or key for key, call in zip(keys, told(), strict=True)]
        if len({call.rsplit(" at ", 1)[0] for call in shown}) == 1:  # one call, which went different ways
            shown = [f"{call}: {key}" for call, key in zip(shown, keys, strict=True)]
        raise RanksDisagree(
            f"the ranks do different things at the same point:\n{differing(shown)}\n"
            "  Every rank of the group must make the same calls in the same order."
        )


def _own(error: BaseException, first: bool) -> BaseException:
    """The error for one more thread: a copy, since a traceback belongs to one thread; its cause is the original."""
    if first:
        return error
    try:
        mine = copy.copy(error)
    except Exception:  # noqa: BLE001  an exception class that cannot be rebuilt from its args
        return error
    if type(mine) is not type(error) or str(mine) != str(error):
        return error
    mine.__traceback__ = None
    mine.__cause__ = error
    return mine
