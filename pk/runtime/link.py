"""How the ranks of a group meet when they are processes: through a torch store.  Every wait is bounded.

A link counts its exchanges, and the n-th exchange of one rank belongs to the n-th of every other; the name that
travels with the data tells on every rank when they do different things.  Values are cut into chunks, because stores
limit their size.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

from pk.errors import PeerFailed, PeerLate, PkError, RanksDisagree
from pk.runtime import alive
from pk.runtime.rendezvous import Work, ranks, same

LEFT = "pk/left"  # of a process that has ended: in the store of each of its process groups, whatever the incarnation
_LOOK_S = 0.1
_TOLD = "\x1f"  # in what is posted: between the key and what the rank is in, in words
_CHUNK = 4 << 20  # torch's TCPStore takes at most 8 MiB


class Link:
    """One rank's end of the exchange among ``world`` processes over ``store`` (any ``torch.distributed`` store)."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.store, self.rank, self.world = store, rank, world
        # A group made again over the same store (destroy and init) must not read what the earlier one left.
        self.incarnation = int(store.add(f"pk/incarnation/{rank}", 1))
        self._prefix = f"pk/{self.incarnation}"
        self._count = 0
        self._old: list[list[str]] = []
        self._next_look = 0.0  # when to look again whether a rank that is waited for still lives
        mine = alive.myself()
        self._processes: dict[int, alive.Process | None] = {}
        store.set(f"{self._prefix}/process/{rank}", mine.encode() if mine is not None else b"")

    def exchange(self, key: str, payload: bytes, timeout: float, told: str = "") -> list[bytes]:
        """Every rank's ``payload``, in rank order.  ``told``: what messages show in place of ``key``.

        Raises :class:`RanksDisagree` on all ranks if their keys differ, :class:`PeerFailed` if a rank failed or does
        not post within ``timeout`` seconds.
        """
        step, end, head = self._begin(), time.monotonic() + timeout, _head(key, told)
        mine = self._post(f"{step}/{self.rank}", head + payload)
        found = [self._take(f"{step}/{r}", r, told or key, end) for r in range(self.world)]
        heads, values = zip(*(value.split(b"\0", 1) for value in found), strict=True)
        try:
            _same(heads)
        except RanksDisagree as error:
            if self.rank == 0:  # others may be in a gather, where they wait for its result
                mine += self._answer(step, [_Failed(error)] * self.world)
            raise
        finally:
            self._forget(mine)
        self._refuse_void(told or key)
        return list(values)

    def gather(self, key: str, payload: Any, fn: Work, timeout: float, told: str = "") -> Any:
        """Rank 0 runs ``fn`` over all ranks' payloads (pickled); every rank gets its result, or the exception."""
        if self.rank == 0:
            return self._serve(key, payload, fn, timeout, told)
        step, end = self._begin(), time.monotonic() + timeout
        mine = self._post(f"{step}/{self.rank}", _head(key, told) + pickle.dumps(payload))
        answer = pickle.loads(self._take(f"{step}/result/{self.rank}", 0, told or key, end))
        self._forget(mine)
        if isinstance(answer, _Failed):
            raise answer.error
        return answer.value

    def _serve(self, key: str, payload: Any, fn: Work, timeout: float, told: str) -> Any:
        step, end, head = self._begin(), time.monotonic() + timeout, _head(key, told)
        answers: list[_Failed] | list[_Result]
        mine: list[str] = []
        try:
            taken = [self._take(f"{step}/{r}", r, told or key, end).split(b"\0", 1) for r in range(1, self.world)]
            _same([head.rstrip(b"\0"), *(name for name, _ in taken)])
            results = fn([payload, *(pickle.loads(value) for _, value in taken)])
            self._refuse_void(told or key)
            answers = [_Result(value) for value in results]
        except Exception as error:  # noqa: BLE001  it is every rank's error
            answers = [_Failed(error)] * self.world
            if isinstance(error, RanksDisagree):  # others may be in an exchange, where they wait for this rank's post
                mine += self._post(f"{step}/0", head)
        mine += self._answer(step, answers)
        self._forget(mine)
        own = answers[0]
        if isinstance(own, _Failed):
            raise own.error
        return own.value

    def _answer(self, step: str, answers: list[_Failed] | list[_Result]) -> list[str]:
        """Post every other rank's answer; the names."""
        return [name for r in range(1, self.world) for name in self._post(f"{step}/result/{r}", _pickled(answers[r]))]

    def leave(self, why: str, void: bool = False) -> None:
        """This rank will never come again: release whoever waits for it.  Never raises: the store may be gone.

        ``void``: nor does anybody get the result of the exchange that is under way.
        """
        try:
            if void:
                self.store.set(f"{self._prefix}/void", f"{self.rank} {why}".encode())
            self.store.set(f"{self._prefix}/gone/{self.rank}", why.encode())
            self.store.set(f"{self._prefix}/gone", str(self.rank).encode())
        except Exception:  # noqa: BLE001  nobody is left to tell
            return

    def gone(self, awaited: int | None = None) -> tuple[int, str] | None:
        """A rank that will never come again, and why.  Does not wait.

        A process that has ended in its own time may have given all it owed: with ``awaited``, such an end counts only
        if that rank has ended too.
        """
        for name in (f"{self._prefix}/gone", LEFT):
            if name == LEFT and awaited is not None and not self.store.check([f"{LEFT}/{awaited}"]):
                continue
            if self.store.check([name]):
                rank = int(self.store.get(name))
                return rank, bytes(self.store.get(f"{name}/{rank}")).decode()
        return None

    def ended(self, rank: int) -> str:
        """What became of rank ``rank``, if its process has ended, whatever way; "" if it lives, or nobody can know.

        Looks at the process itself, and at the store only once for each rank.
        """
        if rank == self.rank:
            return ""
        if rank not in self._processes:
            name = f"{self._prefix}/process/{rank}"
            if not self.store.check([name]):
                return ""
            self._processes[rank] = alive.decode(bytes(self.store.get(name)))
        process = self._processes[rank]
        if process is None or not alive.ended(process):
            return ""
        return f"has died: its process (pid {process.pid}) was killed, or ended without a word"

    def parted(self, rank: int) -> str:
        """Why rank ``rank`` has left this group, if it said so; its process may live on."""
        name = f"{self._prefix}/gone/{rank}"
        return bytes(self.store.get(name)).decode() if self.store.check([name]) else ""

    def learn(self) -> None:
        """Find out which processes the ranks are, while the store is sure to be there."""
        for rank in range(self.world):
            self.ended(rank)

    def note(self, name: str, payload: bytes) -> None:
        """Leave ``payload`` where every rank can :meth:`peek` at it."""
        self.store.set(f"{self._prefix}/note/{name}", payload)

    def peek(self, name: str) -> bytes | None:
        """A note, or None if nobody has left it yet.  Does not wait."""
        full = f"{self._prefix}/note/{name}"
        return bytes(self.store.get(full)) if self.store.check([full]) else None

    def _refuse_void(self, shown: str) -> None:
        if self.store.check([f"{self._prefix}/void"]):
            rank, _, why = bytes(self.store.get(f"{self._prefix}/void")).decode().partition(" ")
            raise PeerFailed(f"rank {rank} {why}, so {shown} cannot go on.")

    def _begin(self) -> str:
        self._count += 1
        return f"{self._prefix}/{self._count}"

    def _post(self, name: str, value: bytes) -> list[str]:
        chunks = [value[i : i + _CHUNK] for i in range(0, len(value), _CHUNK)] or [b""]
        names = [f"{name}/{i}" for i in range(len(chunks))]
        for each, chunk in zip(names[1:], chunks[1:], strict=True):
            self.store.set(each, chunk)
        self.store.set(names[0], len(chunks).to_bytes(4, "little") + chunks[0])  # last: it announces the others
        return names

    def _take(self, name: str, rank: int, key: str, end: float) -> bytes:
        self._wait(f"{name}/0", rank, key, end)
        first = bytes(self.store.get(f"{name}/0"))
        count = int.from_bytes(first[:4], "little")
        return b"".join([first[4:], *(bytes(self.store.get(f"{name}/{i}")) for i in range(1, count))])

    def _wait(self, name: str, rank: int, key: str, end: float) -> None:
        pause = 0.0002
        while (found := self._look(name, rank, key)) is not True:
            if found is not None:
                raise PeerFailed(f"rank {found[0]} {found[1]}, so {key} cannot go on.")
            if time.monotonic() > end:
                raise PeerLate(
                    f"{ranks([rank])} did not come to {key} in time.\n"
                    "  Every rank of the group must make the same calls in the same order."
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def _look(self, name: str, rank: int, key: str) -> tuple[int, str] | Literal[True] | None:
        """True if ``name``, of rank ``rank``, is there; else who has gone, or None."""
        try:
            if self.store.check([name]):
                return True
            gone = self.gone(rank) or self._died(rank)
            return True if gone is not None and self.store.check([name]) else gone  # it may have come before it left
        except RuntimeError as error:  # torch's DistNetworkError and DistStoreError among them
            raise PeerFailed(
                f"rank {self.rank} cannot reach the store of its process group, so {key} cannot go on: "
                f"{str(error).splitlines()[0]}\n"
                "  The process that keeps the store, which is rank 0's or the launcher's, has probably ended."
            ) from error

    def _died(self, rank: int) -> tuple[int, str] | None:
        """Whether rank ``rank``, which is waited for, ended without a word; then all others are told."""
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + _LOOK_S
        why = self.ended(rank)
        if not why:
            return None
        self.store.set(f"{LEFT}/{rank}", why.encode())
        if not self.store.check([LEFT]):  # the first to leave is why others do
            self.store.set(LEFT, str(rank).encode())
        return rank, why

    def _forget(self, names: list[str]) -> None:
        # A rank that finishes exchange n has seen every rank's post of n, so all of them have finished n - 1.
        self._old.append(names)
        if len(self._old) > 2:
            for name in self._old.pop(0):
                self.store.delete_key(name)


def leave_store(store: Any, rank: int, why: str, seconds: float) -> None:
    """``rank`` leaves every group that was or will be made over ``store``.  Takes ``seconds`` at most, never raises."""
    with contextlib.suppress(Exception):  # the store may be gone, and then nobody is left to tell
        store.set_timeout(timedelta(seconds=seconds))
        store.set(f"{LEFT}/{rank}", why.encode())
        if not store.check([LEFT]):  # the first to leave is why others do
            store.set(LEFT, str(rank).encode())


class _Result:
    def __init__(self, value: Any) -> None:
        self.value = value


class _Failed:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def _pickled(answer: _Result | _Failed) -> bytes:
    try:
        data = pickle.dumps(answer)
        pickle.loads(data)  # an exception may pickle and yet not come back
        return data
    except Exception as failure:  # noqa: BLE001
        original = answer.error if isinstance(answer, _Failed) else failure
        return pickle.dumps(_Failed(PkError(f"{type(original).__name__}: {original}")))


def _head(key: str, told: str) -> bytes:
    return f"{key}{_TOLD}{told}".encode() + b"\0"


def _same(heads: Sequence[bytes]) -> None:
    """Of what all ranks posted, before their payloads."""
    keys, _, told = zip(*(head.decode().partition(_TOLD) for head in heads), strict=True)
    same(list(keys), lambda: list(told))
