"""What a kernel read outside its arguments while it was built, and whether that is still so.

Kernels capture: variables of modules and of enclosing functions, helpers, attributes of captured objects, the entries
of captured lists and dicts.  A kernel whose captured values have changed is built again at its next call.
"""

from __future__ import annotations

import math
import types
from typing import Any

from pk.ir.types import DType

MISSING = object()
_OWN = ("pk", "math")  # modules that hold the language: nobody changes them
_FIXED = (DType, int, float, str, bytes, tuple, types.NoneType)  # values whose attributes cannot change


class Captures:
    """Values by where they were read: variables of dicts and cells, attributes of objects."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], tuple[Any, str, Any]] = {}  # by id of the place: (place, name, value)
        self._variables: tuple[tuple[dict[str, Any], str, Any], ...] = ()  # that are compared by `is`
        self._others: tuple[tuple[Any, str, Any], ...] = ()  # with what `frozen` made of their values
        self._stale = False
        self.any = False  # whether anything was captured
        self.watched: tuple[tuple[dict[str, Any], str, Any], ...] | None = None  # if all is well while these `is` same

    def variable(self, space: dict[str, Any] | types.CellType, name: str, value: Any) -> None:
        """``name`` is ``value`` in the dict of a module, or in the cell of a closure."""
        if isinstance(space, types.CellType):
            self._add(space, "cell_contents", value)
        elif not _language(value):
            self._add(space, name, value)

    def attribute(self, base: Any, name: str, value: Any) -> None:
        """``base.name`` is ``value``; ``base`` is a module or any other Python object."""
        if isinstance(base, types.ModuleType):
            if not _language(base):
                self._add(vars(base) if name in vars(base) else base, name, value)
        elif not isinstance(base, _FIXED) and _same(frozen(_get(base, name)), frozen(value)):
            self._add(base, name, value)  # no property that makes something new each time

    def _add(self, place: Any, name: str, value: Any) -> None:
        self.any = True
        known = self._found.setdefault((id(place), name), (place, name, value))
        self._stale = self._stale or not _same(frozen(known[2]), frozen(value))  # it changed while the kernel was read

    def add(self, other: Captures) -> None:
        """Take what ``other``, which is closed, has captured; what both have is compared once."""
        self.any = self.any or other.any
        self._found.update(other._found)
        self._variables, self._others = (
            tuple({(id(place), name): (place, name, v) for place, name, v in entries}.values())
            for entries in (self._variables + other._variables, self._others + other._others)
        )
        self._stale = self._stale or other._stale
        self.watched = None if self._others or self._stale else self._variables

    def close(self) -> Captures:
        """What was captured, ready to be compared; to be called when the kernel has been read."""
        plain = [(o, n, v) for o, n, v in self._found.values() if type(o) is dict and frozen(v) is v]
        self._variables = tuple(plain)
        self._others = tuple(
            (o, n, frozen(v)) for o, n, v in self._found.values() if type(o) is not dict or frozen(v) is not v
        )
        return self

    def current(self) -> bool:
        """Whether everything that was captured is still the same."""
        try:
            for space, name, value in self._variables:
                if space[name] is not value and not _same(frozen(space[name]), value):
                    return False
            for place, name, value in self._others:
                now = place[name] if type(place) is dict else getattr(place, name)
                if now is not value and not _same(frozen(now), value):
                    return False
        except (KeyError, AttributeError, ValueError):  # deleted
            return False
        return not self._stale


def frozen(value: Any) -> Any:
    """``value`` itself, or for a container that may change a tuple of its contents as they are now."""
    if type(value) is tuple and all(frozen(v) is v for v in value):
        return value
    if isinstance(value, list | tuple | set):
        return (type(value), *map(frozen, value))
    if isinstance(value, dict):
        return (dict, *((frozen(k), frozen(v)) for k, v in value.items()))
    return value


def _same(x: Any, y: Any) -> bool:
    """Whether two values make the same kernel: identical, or equal numbers, strings, dtypes of one type."""
    if x is y:
        return True
    if type(x) is not type(y):
        return False
    if isinstance(x, tuple):
        return len(x) == len(y) and all(map(_same, x, y))
    if isinstance(x, float):
        return (x == y and math.copysign(1.0, x) == math.copysign(1.0, y)) or (x != x and y != y)
    return bool(isinstance(x, int | str | bytes | DType) and x == y)


def _language(value: Any) -> bool:
    """Whether ``value`` is pk or ``math``, or an operation of pk."""
    if isinstance(value, types.ModuleType):
        return value.__name__ in _OWN
    return isinstance(value, types.FunctionType) and value.__module__.startswith("pk.dsl.language")


def _get(base: Any, name: str) -> Any:
    try:
        return getattr(base, name)
    except Exception:  # noqa: BLE001  a property of the user's
        return MISSING
