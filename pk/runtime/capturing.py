"""``torch.cuda.graph`` among ranks that are threads of one process: refused in the mode that cannot work."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from pk.errors import BackendError

_lock = threading.Lock()
_users = 0
_rank = threading.local()  # .of: the rank that this thread is, in words


@contextlib.contextmanager
def refusing(rank: int, world: int) -> Iterator[None]:
    """Refuse ``torch.cuda.graph`` in its global mode in this thread, which is rank ``rank`` of ``world``.

    Inside, entering one raises :class:`pk.errors.BackendError` before it has touched anything.
    """
    import torch

    _rank.of = f"rank {rank} of {world}" if world > 1 else ""
    _count(torch.cuda.graph, +1)
    try:
        yield
    finally:
        _rank.of = ""
        _count(torch.cuda.graph, -1)


def _count(graph: Any, change: int) -> None:
    """Wrap ``graph.__enter__`` while there are rank threads."""
    global _users
    with _lock:
        before, _users = _users, _users + change
        if before == 0:
            graph.__enter__ = _wrapped(graph.__enter__)
        elif _users == 0:
            graph.__enter__ = graph.__enter__.__wrapped__


def _wrapped(enter: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(enter)
    def checked(graph: Any) -> None:
        who = getattr(_rank, "of", "")
        if who and getattr(graph, "capture_error_mode", "global") == "global":
            raise BackendError(
                f'torch.cuda.graph on {who}, which are threads of one process: in its capture mode, "global", one '
                "rank's capture forbids the others to allocate, to synchronise and to begin theirs.\n"
                '  Write graph.capture_begin(capture_error_mode="thread_local") and graph.capture_end() on every rank, '
                "all of them idle when the first begins; or give each rank a process."
            )
        enter(graph)

    return checked
