"""Measurements on disk, beside the compile cache.  Nothing that happens to them breaks a run.

::

    <cache root>/tuned/<machine>/<16 hex digits of the key>.json

``<machine>`` names what measurements hold for: GPU, ranks, versions.  A file is one measurement, written aside and
renamed: whole or absent.  Files that cannot be read, or hold something else, are as good as none.  ``PK_CACHE=0``:
nothing is read or written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import warnings
from pathlib import Path
from typing import Any

from pk import env
from pk.errors import CacheWarning
from pk.runtime import cache

FORMAT = 1
_MOST = 1 << 20  # bytes of a file that is looked at

_warned: set[str] = set()


def folder(machine: str) -> Path:
    """Where the measurements for ``machine`` are."""
    return cache.root() / "tuned" / machine


def load(machine: str) -> dict[str, Any]:
    """Every measurement kept for ``machine``, by key.  Never raises."""
    found: dict[str, Any] = {}
    if not env.CACHE.get():
        return found
    with contextlib.suppress(OSError):
        for path in sorted(folder(machine).glob("*.json")):
            kept = _read(path)
            if kept is not None:
                found[kept[0]] = kept[1]
    return found


def save(machine: str, key: str, value: Any) -> bool:
    """Keep ``value``, plain JSON, under ``key``, in place of what was there.  Whether it worked; never raises.

    What goes wrong is a :class:`pk.errors.CacheWarning`, once.
    """
    if not env.CACHE.get():
        return False
    path = folder(machine) / f"{_digest(key)}.json"
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with aside.open("w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, "key": key, "value": value}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        _warn(f"cannot keep a measurement in {path.parent} ({error})")
        return False
    return True


def _read(path: Path) -> tuple[str, Any] | None:
    try:
        if path.stat().st_size > _MOST:
            return None
        kept = json.loads(path.read_bytes())
        fits = kept["format"] == FORMAT and path.stem == _digest(kept["key"])
        return (kept["key"], kept["value"]) if fits else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _warn(what: str) -> None:
    if what not in _warned:
        _warned.add(what)
        advice = "Set PK_CACHE_DIR to a folder that this user may write, or PK_CACHE=0."
        warnings.warn(f"pk's measurements: {what}.\n  {advice}", CacheWarning, stacklevel=3)
