"""Whose frames a failed rank shows: of an error that pk raised on purpose, only the user's."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import TracebackType

from pk.errors import PkError

_PACKAGE = str(Path(__file__).parents[1])


def details(error: BaseException) -> str:
    """What to show beyond type and message: the traceback, or of a mistake in the use of pk the way into pk."""
    if not isinstance(error, PkError) or error.__cause__ is not None:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _of_pk(f.filename)]
    return "".join(["called at (most recent call last):\n", *traceback.format_list(frames)]) if frames else ""


def trimmed(error: BaseException) -> BaseException:
    """``error``; the traceback of one of pk's has no frames of pk any more."""
    if isinstance(error, PkError) and error.__cause__ is None:
        kept: list[TracebackType] = []
        at = error.__traceback__
        while at is not None:
            if not _of_pk(at.tb_frame.f_code.co_filename):
                kept.append(at)
            at = at.tb_next
        chain: TracebackType | None = None
        for tb in reversed(kept):
            chain = TracebackType(chain, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
        error.__traceback__ = chain
    return error


def _of_pk(file: str) -> bool:
    """Whether a frame's file is pk's: of the package, or text that pk wrote."""
    return file.startswith(("<pk ", _PACKAGE + "/", _PACKAGE + "\\"))
