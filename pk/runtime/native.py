"""The optional native module ``pk._C``, and why it is missing where it is.  Else only ``pk.sim.explore`` imports it.

Each native service has a Python twin with the same interface, and nothing that decides a result depends on ``pk._C``:
a pk that was installed without a compiler does the same work, only the watchdog then needs the GIL.
"""

from __future__ import annotations

import functools
from types import ModuleType

from pk import env


@functools.cache
def _load() -> tuple[ModuleType | None, str]:
    try:
        from pk import _C
    except ImportError as error:  # not built, or built for another Python or C++ library
        return None, f"pk._C cannot be imported ({error}); pk was installed without a C++ compiler, or with PK_NATIVE=0"
    return _C, ""


def native() -> ModuleType | None:
    """The native module, or None where it was not built or ``PK_NATIVE=0`` turns it off; ``reason()`` says which."""
    return _load()[0] if env.NATIVE.get() else None


def reason() -> str:
    """Why ``native()`` is None; "" if it is not."""
    return _load()[1] if env.NATIVE.get() else "PK_NATIVE=0 is set"
