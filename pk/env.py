"""Every ``PK_*`` variable: name, type, default and one sentence.  Nothing else in pk reads one.

Variables are read when they are asked for, never at import, so that a test or a notebook may change one at any time::

    env.DEBUG.get()                      # typed
    env.get("PK_DEBUG")                  # by name
    with env.overriding(PK_DEBUG="2"): ...

``python -m pk env`` prints this table with the values in force.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pk.errors import EnvError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Variable(Generic[T]):
    """One variable.  ``parse`` turns its text into a value and raises ValueError with what it expected."""

    name: str
    kind: str
    default: T
    doc: str
    parse: Callable[[str], T]

    def get(self) -> T:
        """The value in force; unset and empty mean the default.

        Raises :class:`pk.errors.EnvError`, which names the variable, if the text cannot be read.
        """
        text = os.environ.get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise EnvError(self.name, text, str(error), str(self.default)) from None

    def given(self) -> bool:
        """Whether it is set, and not empty."""
        return bool(os.environ.get(self.name, "").strip())


def _switch(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("0 or 1")


def _integer(low: int, high: int | None = None) -> Callable[[str], int]:
    wanted = f"a whole number from {low} to {high}" if high is not None else f"a whole number, at least {low}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(wanted) from None
        if value < low or (high is not None and value > high):
            raise ValueError(wanted)
        return value

    return parse


def _native(text: str) -> bool:
    return text == "require" or _switch(text)  # "require" speaks to the build, and may still be set when pk runs


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value <= 1e6):  # also false for nan; 1e6 s in nanoseconds fits 64 bits with room
        raise ValueError("seconds, more than 0 and at most 1000000")
    return value


def _choice(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(" or ".join(f'"{n}"' for n in names))
        return text

    return parse


DEBUG = Variable(
    "PK_DEBUG", "0-7", 0,
    "How much to print: 1 launches and cache hits, 2 timings, 3 plan, 4 CUDA text, 5 IR, 6 IR of each pass, 7 ptxas.",
    _integer(0, 7),
)  # fmt: skip
DUMP = Variable(
    "PK_DUMP", "folder", "",
    "Write what each stage made into this folder: a folder for each kernel and key, files numbered by stage.",
    str,
)  # fmt: skip
OVERRIDE = Variable(
    "PK_OVERRIDE", "folder", "",
    "Compile an edited 30_kernel.cu from this folder, laid out as PK_DUMP writes it, in place of the generated text.",
    str,
)  # fmt: skip
CACHE_DIR = Variable("PK_CACHE_DIR", "folder", "", "Where compiled kernels are kept; default: ~/.cache/pk.", str)
CACHE = Variable("PK_CACHE", "0/1", True, "0: neither read nor write the disk cache.", _switch)
CACHE_WAIT_S = Variable(
    "PK_CACHE_WAIT_S", "seconds", 60.0,
    "How long to wait for another process that compiles the same kernel before compiling it privately.",
    _seconds,
)  # fmt: skip
NVRTC_FLAGS = Variable("PK_NVRTC_FLAGS", "flags", "", "More NVRTC flags for every kernel, such as --device-debug.", str)
BACKEND = Variable(
    "PK_BACKEND", "sim/cuda", "", 'Where kernels run: "sim" or "cuda"; default: cuda if there is a Hopper-class GPU.',
    _choice("sim", "cuda"),
)  # fmt: skip
TIMEOUT_S = Variable("PK_TIMEOUT_S", "seconds", 30.0, "Limit of one wait on the device, before HangError.", _seconds)
ENTRY_TIMEOUT_S = Variable(
    "PK_ENTRY_TIMEOUT_S", "seconds", 600.0, "Limit of the wait for a late rank to begin a launch.", _seconds,
)  # fmt: skip
MULTICAST = Variable(
    "PK_MULTICAST", "0/1", False,
    "1: allow NVLink multicast where the environment does not forbid it; else no multicast object is created.",
    _switch,
)  # fmt: skip
SANITIZE = Variable(
    "PK_SANITIZE", "0-2", 0,
    "1: check every index on the device, poison scratch and stages; 2: outputs and tiles wholly outside too.",
    _integer(0, 2),
)  # fmt: skip
SIM_SMS = Variable(
    "PK_SIM_SMS", "number", 0, "SMs of each simulated rank; 0: the simulator chooses.", _integer(0, 1024)
)
SIM_STEPS = Variable(
    "PK_SIM_STEPS", "number", 100_000_000,
    "Loop turns after which the simulator takes a role's loops for endless; a `while`: 100000 if not set.",
    _integer(1),
)  # fmt: skip
SEED = Variable("PK_SEED", "number", 0, "Seed of the simulator's scheduler.", _integer(0))
NATIVE = Variable(
    "PK_NATIVE", "0/1", True,
    "0: use the Python twins of the native extension.  When pk is built: 0 does not build it, require insists.",
    lambda text: text == "require" or _switch(text),
)  # fmt: skip

VARIABLES: tuple[Variable[Any], ...] = (
    DEBUG, DUMP, OVERRIDE, CACHE_DIR, CACHE, CACHE_WAIT_S, NVRTC_FLAGS, BACKEND, TIMEOUT_S, ENTRY_TIMEOUT_S, MULTICAST,
    SANITIZE, SIM_SMS, SIM_STEPS, SEED, NATIVE,
)  # fmt: skip
TABLE: dict[str, Variable[Any]] = {v.name: v for v in VARIABLES}

# What other libraries' users set to keep NVLink multicast off.  pk obeys all of them, whatever PK_MULTICAST says.
_FORBID_MULTICAST = (
    ("NCCL_NVLS_ENABLE", "0"),
    ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
    ("NVSHMEM_DISABLE_NVLS", "1"),
)


def get(name: str) -> Any:
    """The value of ``name`` (``"PK_DEBUG"``).  Raises KeyError for a name that is not in the table."""
    return TABLE[name].get()


def peek(variable: Variable[Any]) -> Callable[[], Any]:
    """A function that tells whether the variable changed: equal results, equal values.  For paths of microseconds."""
    table, (name,) = raw(variable)
    return functools.partial(os.environ.get if table is None else table.get, name)


def raw(*variables: Variable[Any]) -> tuple[dict[Any, Any] | None, tuple[Any, ...]]:
    """The dict under ``os.environ``, or None where Python has another, and the variables' keys in it."""
    table = getattr(os.environ, "_data", None)  # of CPython: a look-up costs a twentieth of one in os.environ
    if type(table) is not dict:
        return None, tuple(v.name for v in variables)
    return table, tuple(os.environ.encodekey(v.name) for v in variables)


def multicast() -> tuple[bool, str]:
    """Whether NVLink multicast may be used, and why."""
    for name, value in _FORBID_MULTICAST:
        if os.environ.get(name, "").strip() == value:
            return False, f"{name}={value} forbids it"
    if not MULTICAST.get():
        return False, "PK_MULTICAST=1 is not set"
    return True, "PK_MULTICAST=1"


def debug(level: int, message: str) -> None:
    """Print ``message`` to stderr if ``PK_DEBUG`` is at least ``level``."""
    if DEBUG.get() >= level:
        print(f"pk: {message}", file=sys.stderr, flush=True)


def unknown() -> dict[str, str]:
    """``PK_*`` variables that are set and mean nothing to pk, each with the nearest real name or ""."""
    found = {}
    for name in sorted(os.environ):
        if name.startswith("PK_") and name not in TABLE:
            near = difflib.get_close_matches(name, TABLE, n=1)
            found[name] = near[0] if near else ""
    return found


_told: list[bool] = []  # not empty: the environment has been looked through


def warn_unknown() -> None:
    """Warn of each variable that :func:`unknown` finds, once in a process."""
    if _told:
        return
    _told.append(True)
    for name, near in unknown().items():
        advice = f"Did you mean {near}?" if near else "`python -m pk env` lists those that there are."
        warnings.warn(f"{name} is set, but pk has no such variable.  {advice}", UserWarning, stacklevel=2)


@contextlib.contextmanager
def overriding(**values: str | None) -> Iterator[None]:
    """Set (or, with None, unset) variables inside a ``with`` block.  Process-wide, as the environment is."""
    before = {name: os.environ.get(name) for name in values}
    try:
        _assign(values)
        yield
    finally:
        _assign(before)


def _assign(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def table() -> str:
    """The table as text: name, value in force, whether it is set, meaning."""
    rows = []
    for variable in VARIABLES:
        try:
            value = variable.get()
            shown = str(int(value)) if isinstance(value, bool) else str(value)
        except EnvError:
            shown = f"INVALID {os.environ[variable.name]!r}"
        mark = "*" if variable.given() else " "
        rows.append(f"{mark} {variable.name:<20} {variable.kind:<9} {shown or '-':<12} {variable.doc}")
    rows.append("(* set in the environment)")
    for name, near in unknown().items():
        rows.append(f"! {name} is set, but pk has no such variable." + (f"  Did you mean {near}?" if near else ""))
    return "\n".join(rows)
