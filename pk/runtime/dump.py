"""``PK_DUMP`` and ``PK_OVERRIDE``: every stage of a kernel as files, and an edited stage in place of the generated one.

::

    $PK_DUMP/<entry>-<16 hex>/{10_ir.txt, 20_plan.txt, 30_kernel.cu, 40_ptxas.txt, 50_kernel.cubin, meta.json}

``30_kernel.cu`` is written without ``#line``, so that an error in an edited copy points into the copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import sys
import warnings
from pathlib import Path

from pk import env
from pk.artifact import Source
from pk.errors import BackendError, CacheWarning

_LINE = re.compile(r"^[ \t]*#[ \t]*line\b.*\n?", re.MULTILINE)


def readable(text: str) -> str:
    """CUDA text without its ``#line`` directives."""
    return _LINE.sub("", text)


def override(source: Source, name: str) -> tuple[Source, str]:
    """``source`` with its text from ``PK_OVERRIDE``, if there is one for ``name``; and the file's path, or "".

    Says on stderr when it replaces a text, and when it finds only another version of the same kernel.
    Raises :class:`pk.errors.BackendError` if the folder or file is there and cannot be read.
    """
    chosen: str = env.OVERRIDE.get()
    if not chosen:
        return source, ""
    base = Path(chosen).expanduser()
    if not base.is_dir():
        raise BackendError(
            f"PK_OVERRIDE={chosen!r} is not a folder.\n"
            "  Set it to the folder that PK_DUMP wrote and you edited, or unset PK_OVERRIDE."
        )
    path = base / name / "30_kernel.cu"
    try:
        text = path.read_text()
    except FileNotFoundError:
        others = sorted(p.name for p in base.glob(f"{glob_escape(source.entry)}-*"))
        if others:
            known = ", ".join(others)
            print(f"pk: PK_OVERRIDE has no {name}, only {known}: the kernel has changed since.", file=sys.stderr)
        return source, ""
    except (OSError, UnicodeDecodeError) as error:
        raise BackendError(
            f"PK_OVERRIDE: cannot read {path} ({error}).\n  Correct it, or unset PK_OVERRIDE."
        ) from error
    print(f"pk: PK_OVERRIDE: {source.name} is compiled from {path}", file=sys.stderr)
    return dataclasses.replace(source, text=text), str(path)


def glob_escape(text: str) -> str:
    """``text`` as a glob pattern that matches only itself."""
    return re.sub(r"([*?[])", r"[\1]", text)


def write(name: str, files: dict[str, str | bytes | None]) -> None:
    """Write ``files`` (those that are not None) into ``$PK_DUMP/<name>``; nothing if ``PK_DUMP`` is not set.

    Ranks may write the same files at the same time: each appears whole.  A folder that cannot be written is a warning.
    """
    chosen: str = env.DUMP.get()
    if not chosen:
        return
    place = Path(chosen).expanduser() / name
    try:
        place.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            if content is not None:
                _replace(place / file, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        warnings.warn(f"PK_DUMP: cannot write {place} ({error}).", CacheWarning, stacklevel=2)


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
