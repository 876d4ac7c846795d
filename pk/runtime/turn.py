"""One thread at a time: what a rank does with a group is one sequence, which all ranks go through in step.

Two threads of a rank that are in calls of one group at once would meet the other ranks in an order that nobody chose,
and compute with each other's values.  The second one is refused, the first one fails when its call ends, and the rank
leaves the group, so that no other rank takes what it sent for something else.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from pk.errors import ThreadsCollide

if TYPE_CHECKING:
    from pk.runtime.team import Group

_PK = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Turn:
    """Which thread of a rank is in a call of ``group``, and which operator's call that is.

    ``with turn:`` is one step, a meeting or a launch; ``with turn.of(call):`` all of an operator, whose text messages
    show in place of the step's name.  Both may be nested.  ``lock`` is held inside.

    Entering raises :class:`pk.errors.ThreadsCollide` if another thread is inside, and from then on; leaving does if
    another thread has tried.
    """

    __slots__ = ("_call", "_frame", "_group", "lock", "misuse")

    def __init__(self, group: Group) -> None:
        self._group = weakref.ref(group)
        self._call: Any = None
        self._frame: FrameType | None = None
        self.lock = threading.RLock()
        self.misuse = ""  # what was wrong, for good

    def __enter__(self) -> None:
        if not self.lock.acquire(False):
            self.collide()
        if self.misuse:
            self.lock.release()
            raise ThreadsCollide(self.misuse)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.lock.release()
        if self.misuse and not isinstance(error, ThreadsCollide):
            raise ThreadsCollide(self.misuse) from error

    def of(self, call: object) -> Calling:
        """For a whole operator: ``call`` is what messages show, by ``str()``, with the line that made it."""
        return Calling(self, call)

    def collide(self) -> NoReturn:
        """Raise for this thread, which has found another one inside."""
        owner = re.search(r"owner=(\d+)", repr(self.lock))  # nothing else tells
        if not self.misuse:
            self.spoil(_name(int(owner[1]) if owner else 0))
        raise ThreadsCollide(self.misuse)

    def spoil(self, other: str) -> None:
        """Thread ``other`` and this one were in calls of the group at once: leave it, for good."""
        group, mine = self._group(), _name(threading.get_ident())
        self.misuse = collision(repr(group), other, mine)
        if group is not None:
            group.leave(f"was in calls of the group from two threads at once (`{other}` and `{mine}`)", void=True)

    def told(self) -> str:
        """The operator's call that is under way, and the line that made it; "" if there is none.  For any thread."""
        call, frame = self._call, self._frame
        return "" if call is None else f"{call}{_line(frame)}"


class Calling:
    """See :meth:`Turn.of`."""

    __slots__ = ("_before", "_call", "_turn")

    def __init__(self, turn: Turn, call: object) -> None:
        self._turn, self._call = turn, call

    def __enter__(self) -> None:
        turn = self._turn
        turn.__enter__()
        self._before = turn._call, turn._frame
        if turn._call is None:  # what the caller called, not what that calls
            turn._call, turn._frame = self._call, sys._getframe(1)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._turn._call, self._turn._frame = self._before
        self._turn.__exit__(kind, error, trace)


def collision(group: str, one: str, other: str) -> str:
    """What to say of two threads, by their names."""
    return (
        f"threads `{one}` and `{other}` of {group} are in calls of it at once: the ranks could not tell which of one "
        "rank's calls belongs to which of another's.\n"
        "  Call from one thread at a time, in one order on all ranks, or give each thread a group of its own "
        "(torch.distributed.new_group).  This rank has left the group."
    )


_makers: dict[int, list[str]] = {}  # threads that make a group for a process group, by its id, at once
_lock = threading.Lock()


def once(process_group: object, make: Callable[[], Group]) -> Group:
    """``make()``, a collective, for ``process_group``.  If several threads do so at once, a group of no use to any.

    Raises :class:`pk.errors.ThreadsCollide` for all but the first, which hears of it at its first call.
    """
    name, key = threading.current_thread().name, id(process_group)
    with _lock:
        makers = _makers.setdefault(key, [])
        makers.append(name)
    if len(makers) > 1:
        raise ThreadsCollide(collision("a process group that pk meets for the first time", makers[0], name))
    try:
        made = make()
    finally:
        with _lock:
            del _makers[key]
    if len(makers) > 1:
        made.turn.spoil(makers[1])
    return made


def _name(ident: int) -> str:
    return next((t.name for t in threading.enumerate() if t.ident == ident), "that has just left")


def _line(frame: FrameType | None) -> str:
    """`` at file:line`` of the caller, who is neither pk nor torch; "" in a thread that has no such caller."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    inside = (_PK, os.path.dirname(torch) + os.sep) if torch else (_PK,)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*inside, "<")) and "torchinductor_" not in file:
            shown = os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
            return f" at {shown}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
