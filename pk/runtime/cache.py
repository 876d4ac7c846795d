"""Compiled kernels on disk, addressed by content.  Nothing that happens to the cache breaks or hangs a run.

::

    <root>/<pk version>-<NVRTC version>/<arch>/<entry>-<16 hex digits of the key>/{kernel.cu, kernel.cubin, meta.json}

* The key covers text, device headers, options, NVRTC version, architecture and parameter layout.
* An entry is written into a hidden sibling folder, fsynced, and published by renaming the folder: whole or absent.
* One process compiles a key, under an OS-level lock that dies with its holder; the others wait a bounded time and then
  compile privately.  The lock only saves work: of two publishers the second rename fails, and its copy is dropped.
* meta.json holds the sha256 of the cubin.  An entry that does not add up is deleted and rebuilt, under the lock, with
  one warning.
* No directory, no space, no permission, no locks: one warning, and the cubin is used without being kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pk import env
from pk.artifact import Source
from pk.errors import CacheWarning
from pk.runtime import toolkit

FORMAT = 1  # of meta.json and of the key
_STALE_S = 3600.0  # a temporary folder this old belongs to a process that was killed
_POLL_S = 0.02
_NAME = re.compile(r"\.?.+-[0-9a-f]{16}(\.lock|\.[0-9]+\.[0-9a-f]+\.tmp)?")

_warned: set[str] = set()
_warned_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Key:
    """Address of an entry: ``digest`` decides, the rest says where a person finds it."""

    entry: str
    arch: str
    label: str
    digest: str

    @property
    def name(self) -> str:
        """Folder name of the entry, in the cache and in dumps."""
        return f"{self.entry[:80]}-{self.digest[:16]}"


@dataclass(frozen=True, slots=True)
class Entry:
    """What is kept of a compilation."""

    cubin: bytes
    log: str


@dataclass(frozen=True, slots=True)
class _Corrupt:
    why: str


Origin = Literal["compiled", "disk"]


def key(source: Source, options: tuple[str, ...], nvrtc_version: str) -> Key:
    """The key of ``source`` compiled with ``options``.  Does not load NVRTC."""
    parts = {
        "format": FORMAT,
        "text": source.text,
        "include": toolkit.include_digest(),
        "headers": toolkit.header_versions(),
        "options": options,
        "nvrtc": nvrtc_version,
        "arch": source.arch,
        "entry": source.entry,
        "fields": [asdict(field) for field in source.fields],
        "params_size": source.params_size,
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return Key(source.entry, source.arch, f"{toolkit.pk_version()}-{nvrtc_version}", digest)


def root() -> Path:
    """``PK_CACHE_DIR``, else the user's cache folder (``~/.cache/pk``)."""
    chosen: str = env.CACHE_DIR.get()
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_path("pk", appauthor=False))


def folder(key: Key) -> Path:
    """Where the entry of ``key`` is, or would be."""
    return root() / key.label / key.arch / key.name


def fetch(key: Key, text: str, facts: dict[str, Any], build: Callable[[], Entry]) -> tuple[Entry, Origin]:
    """The entry of ``key``: from disk, or from ``build()`` and then kept on disk.

    ``text`` and ``facts`` (plain JSON values) are stored beside the cubin for people and tools.  Raises only what
    ``build`` raises.
    """
    place = folder(key)
    found = _read(place, key)
    if isinstance(found, Entry):
        return found, "disk"
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        _warn(f"cannot make the folder {place.parent} ({error})")
        return build(), "compiled"
    with _locked(place, key) as (held, published):
        if published is not None:
            return published, "disk"
        if held:
            found = _read(place, key)  # the process that had the lock before may just have published it
            if isinstance(found, Entry):
                return found, "disk"
            if isinstance(found, _Corrupt):
                _warn(f"the entry {place} is damaged ({found.why}); it is deleted and compiled again", advice="")
                _remove(place)
            _sweep(place)
        entry = build()
        _publish(place, key, entry, text, facts)
        return entry, "compiled"


# ------------------------------------------------------------------------------------------------- reading
def _read(place: Path, key: Key) -> Entry | _Corrupt | None:
    try:
        meta = json.loads((place / "meta.json").read_bytes())
        cubin = (place / "kernel.cubin").read_bytes()
        log, digest, full = meta["log"], meta["cubin_sha256"], meta["key"]
    except FileNotFoundError as error:
        return _Corrupt(f"{Path(error.filename).name} is missing") if os.path.lexists(place) else None
    except OSError as error:
        return _Corrupt(str(error))
    except (ValueError, KeyError, TypeError):
        return _Corrupt("meta.json cannot be read")
    if full != key.digest or not isinstance(log, str):
        return _Corrupt("meta.json is of another kernel")
    if hashlib.sha256(cubin).hexdigest() != digest:
        return _Corrupt("kernel.cubin does not match its sha256")
    return Entry(cubin, log)


# ------------------------------------------------------------------------------------------------- locking
@contextlib.contextmanager
def _locked(place: Path, key: Key) -> Iterator[tuple[bool, Entry | None]]:
    """Yields (whether this process holds the key's lock, the entry if another process published it meanwhile)."""
    import filelock

    lock = filelock.FileLock(str(place.with_name(f"{place.name}.lock")))
    limit = env.CACHE_WAIT_S.get()
    deadline = time.monotonic() + limit
    held, published = False, None
    while not held:
        try:
            lock.acquire(timeout=0)
            held = True
        except filelock.Timeout:
            found = _read(place, key)
            if isinstance(found, Entry):
                published = found
                break
            if time.monotonic() >= deadline:
                _warn(f"another process has held {place.name} for {limit:g} s; this one compiles it too", advice="")
                break
            time.sleep(_POLL_S)
        except (OSError, NotImplementedError, RuntimeError) as error:  # no locks here, no space, no permission
            _warn(f"cannot lock {lock.lock_file} ({error})")
            break
    try:
        yield held, published
    finally:
        if held:
            with contextlib.suppress(OSError):
                lock.release()


# ------------------------------------------------------------------------------------------------- writing
def _publish(place: Path, key: Key, entry: Entry, text: str, facts: dict[str, Any]) -> None:
    temporary = place.with_name(f".{place.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    meta = {
        **facts,
        "format": FORMAT,
        "key": key.digest,
        "cubin_sha256": hashlib.sha256(entry.cubin).hexdigest(),
        "log": entry.log,
    }
    try:
        temporary.mkdir(mode=0o700)
        _write(temporary / "kernel.cu", text.encode())
        _write(temporary / "kernel.cubin", entry.cubin)
        _write(temporary / "meta.json", json.dumps(meta, indent=1).encode())
        _sync_folder(temporary)
        os.rename(temporary, place)
        _sync_folder(place.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(_read(place, key), Entry):  # else somebody else published the same: nothing is lost
            _warn(f"cannot keep {place.name} in {place.parent} ({error})")


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(place: Path) -> None:
    """Take an entry away in one step, then delete it: a reader sees it whole or not at all."""
    aside = place.with_name(f".{place.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        os.rename(place, aside)
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink()
    except OSError as error:
        _warn(f"cannot delete {place} ({error})")


def _sweep(place: Path) -> None:
    """Delete what killed compilations of this key left behind."""
    for old in place.parent.glob(f".{place.name}.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _STALE_S:
                shutil.rmtree(old, ignore_errors=True)


def _warn(what: str, advice: str = "Set PK_CACHE_DIR to a folder that this user may write, or PK_CACHE=0.") -> None:
    with _warned_lock:
        if what in _warned:
            return
        _warned.add(what)
    warnings.warn(f"pk's compile cache: {what}." + (f"\n  {advice}" if advice else ""), CacheWarning, stacklevel=2)


# ------------------------------------------------------------------------------------------------- housekeeping
def entries() -> list[tuple[Path, int]]:
    """Every published entry below the root, with its size in bytes."""
    return [
        (path, sum(f.stat().st_size for f in path.iterdir()))
        for path in sorted(root().glob("*/*/*"))
        if _NAME.fullmatch(path.name) and path.is_dir() and not path.name.startswith(".")
    ]


def clear() -> int:
    """Delete every entry, lock and left-over of pk's below the root, nothing else.  Returns the number of entries."""
    count = len(entries())
    for path in list(root().glob("*/*/*")) + list(root().glob("*/*/.*")):
        if not _NAME.fullmatch(path.name):
            continue
        if path.is_dir():
            _remove(path)
        else:
            path.unlink(missing_ok=True)
    for path in [*root().glob("*/*"), *root().glob("*")]:
        if path.is_dir():
            with contextlib.suppress(OSError):  # not empty: somebody else's
                path.rmdir()
    return count
