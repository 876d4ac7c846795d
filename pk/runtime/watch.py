"""A thread that notices when a kernel gives up, while the program is elsewhere: one line on stderr at once.

The error itself is raised by the rank's next call of pk.  If Python cannot speak, because something holds the GIL,
the native watchdog (``csrc/watch.hpp``) writes the raw record after a grace period.  Between processes the thread also
looks whether a peer reported a hang, so that a rank with nothing running learns of it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from pk.runtime import native, records

if TYPE_CHECKING:
    from pk.runtime.context import Context

_INTERVAL_S = 0.02
_PEERS_EVERY = 50  # rounds: a second
_GRACE_MS = 2000  # how long a record may wait for this thread before the native watchdog reports it

Said = weakref.WeakKeyDictionary["Context", int]  # the incarnation of each context that was reported last

_contexts: weakref.WeakSet[Context] = weakref.WeakSet()
_guards: weakref.WeakKeyDictionary[Context, Any] = weakref.WeakKeyDictionary()  # the native watchdog of each
_kept: list[Any] = []
_lock = threading.Lock()
_thread: threading.Thread | None = None


def add(context: Context) -> None:
    """Watch this context from now on."""
    global _thread  # noqa: PLW0603
    with _lock:
        _contexts.add(context)
        module = native.native()
        if module is not None and context not in _guards:
            _guards[context] = module.Watch(context.host_page, records.SLOTS, grace_ms=_GRACE_MS)
            _guards[context].start()
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_run, name="pk-watch", daemon=True)
            _thread.start()


def remove(context: Context) -> None:
    """Stop watching; on return nothing reads the context's page any more."""
    with _lock:
        _contexts.discard(context)
        guard = _guards.pop(context, None)
        if guard is not None:
            guard.stop()


def inherited() -> None:
    """In a forked child, which has no such thread and no contexts: the native watchdogs stay, and do nothing."""
    global _lock, _thread
    _lock, _thread = threading.Lock(), None
    _contexts.clear()
    _kept.extend(_guards.values())
    _guards.clear()


def name(context: Context, number: int, kernel: str) -> None:
    """Tell the native watchdog what ``kernel_id`` ``number`` of the context stands for."""
    guard = _guards.get(context)
    if guard is not None:
        guard.name(number, kernel)


def _run() -> None:
    said: Said = weakref.WeakKeyDictionary()
    rounds = 0
    while True:
        time.sleep(_INTERVAL_S)
        rounds += 1
        if not _round(said, rounds % _PEERS_EVERY == 0):
            return


def _round(said: Said, peers_too: bool) -> bool:
    """Look at every context; False if there is none.  A function, so that no context is held between two rounds."""
    global _thread  # noqa: PLW0603
    with _lock:
        everyone = tuple(_contexts)
        if not everyone:
            _thread = None
            return False
        for context in everyone:
            look(context, said)
    if peers_too:
        for context in everyone:
            with contextlib.suppress(Exception):  # the store goes away when the program ends
                look_at_peers(context, said)
    return True


def look(context: Context, said: Said) -> None:
    """Print the cause of a hang that has not been reported in the context's present incarnation."""
    incarnation = context.incarnation  # read first: what a reset overtakes belongs to the incarnation before it
    found = context.findings()
    guard = _guards.get(context)
    if found and guard is not None:
        guard.acknowledge()
    causes = [f for f in found if f.reason != records.TOLD]
    if causes and said.get(context) != incarnation:
        print(f"pk: {records.headline(causes[0])}; see HangError", file=sys.stderr, flush=True)
        _report_once(context, said, incarnation)


def look_at_peers(context: Context, said: Said) -> None:
    """Learn of a hang on another process; stop kernels that wait for a peer which refused to launch, or is no more."""
    incarnation = context.incarnation
    if said.get(context) == incarnation:
        return
    gone = context.departed()  # first: the store that the rest asks may have been kept by the process that is gone
    if gone is not None:
        context.gone = gone
        context.abort(gone[0])
        print(f"pk: rank {gone[0]} {gone[1]}, and a kernel waits for it; see HangError", file=sys.stderr, flush=True)
        _report_once(context, said, incarnation)
        return
    refusal = context.refusal()
    if refusal is not None:
        context.abort(refusal[0])
    if refusal is not None or context.peers_hang():
        _report_once(context, said, incarnation)


def _report_once(context: Context, said: Said, incarnation: int) -> None:
    said[context] = incarnation
    # In a thread of its own: it may wait for other ranks, and this one has other contexts to watch.
    threading.Thread(target=_report, args=(context, incarnation), name="pk-report", daemon=True).start()


def _report(context: Context, incarnation: int) -> None:
    with contextlib.suppress(Exception):  # the next call on the rank's own thread meets the same error
        context.report(incarnation)
