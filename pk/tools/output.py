"""Printing for a reader who may leave early, such as `head`, and tracebacks that begin in the user's program."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from pathlib import Path
from typing import TextIO


def put(text: str, stream: TextIO) -> None:
    """Print ``text`` at once.  If nobody reads ``stream`` any more, what goes to it from now on is dropped."""
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        drop(stream)


def drop(stream: TextIO) -> None:
    """Send what ``stream`` still holds and what is written to it from now on nowhere, in this process."""
    with contextlib.suppress(OSError, ValueError):  # not a file, or closed: there is nothing to redirect
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


def drop_unread() -> None:
    """Drop those of stdout and stderr that nobody reads any more; the others are flushed."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            try:
                stream.flush()
            except BrokenPipeError:
                drop(stream)


def failure(error: BaseException, path: Path) -> str:
    """The traceback of ``error``, without the frames of pk and Python that led to the program at ``path``."""
    frames = error.__traceback__
    while frames is not None and not _is(frames.tb_frame.f_code.co_filename, path):
        frames = frames.tb_next
    if frames is None and not isinstance(error, SyntaxError):  # which names the line itself, before anything ran
        frames = error.__traceback__
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def _is(name: str, path: Path) -> bool:
    return os.path.abspath(name) == os.path.abspath(path)
