"""Whether another process of this host is still there: what tells a rank that was killed from one that is late.

A killed process says nothing, so its peers look for it in ``/proc``.  They need to see it there: the same host, and the
same namespace of process ids.  Where they do not, a death is found out by time-outs.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_STATE, _STARTED = 0, 19  # fields of /proc/<pid>/stat, counted behind the command's name
_ENDED = "ZXx"  # a zombie has ended; it stays until its parent looks


@dataclass(frozen=True, slots=True)
class Process:
    """One process: its id, when it started (ticks since boot; ids are used again), and where that id means anything."""

    pid: int
    started: int
    space: str

    def encode(self) -> bytes:
        """For :func:`decode`, in another process."""
        return f"{self.pid} {self.started} {self.space}".encode()


def decode(data: bytes) -> Process | None:
    """What :meth:`Process.encode` made; None of b"", which stands for a process that cannot be looked for."""
    if not data:
        return None
    pid, started, space = data.decode().split(" ", 2)
    return Process(int(pid), int(started), space)


def myself() -> Process | None:
    """This process; None where there is no ``/proc``."""
    found = _look(os.getpid())
    return Process(os.getpid(), found[1], _space()) if found and _space() else None


def ended(process: Process) -> bool:
    """Whether ``process`` has certainly ended.  False if it lives, and if this process cannot know."""
    if process.space != _space():
        return False
    found = _look(process.pid)
    return found is None or found[0] in _ENDED or found[1] != process.started


def _look(pid: int) -> tuple[str, int] | None:
    """State and start of a process; None if there is none."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[_STATE], int(fields[_STARTED])


@functools.cache
def _space() -> str:
    """The boot of this host and the namespace of process ids; "" if unknown."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""
