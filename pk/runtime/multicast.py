"""NVLink multicast: what the runtime says to a kernel that was generated for it.

pk makes no multicast objects: no line of it calls ``cuMulticastCreate``, which on a shared host can take GPUs out of
service.  Kernels for multicast are compiled, inspected and simulated; a launch of one is refused here, never run in
another way behind the user's back.
"""

from __future__ import annotations

from typing import NoReturn

from pk import env
from pk.artifact import Source
from pk.errors import BackendError


def refuse(source: Source) -> None:
    """Raise :class:`pk.errors.BackendError` if ``source`` needs multicast memory."""
    if source.multicast:
        _refuse(f"kernel `{source.name}` was generated for NVLink multicast")


def no_memory(what: str) -> NoReturn:
    """A launch that was not refused in time needs a multicast address for ``what``."""
    _refuse(f"{what} has no multicast address")


def _refuse(what: str) -> NoReturn:
    allowed, why = env.multicast()
    if not allowed:
        raise BackendError(
            f"{what}, but multicast is off: {why}.\n"
            "  Generate it without (`generate(kernel)`), which is what calls do by default."
        )
    raise BackendError(
        f"{what}, and this version of pk cannot allocate multicast memory ({why} allows it).\n"
        "  Unset PK_MULTICAST: the same kernel then reaches every rank by its own address."
    )
