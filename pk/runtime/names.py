"""Groups by name, for graphs and operators, which hold strings but no objects."""

from __future__ import annotations

import itertools
import sys
import weakref
from typing import TYPE_CHECKING, Any

from pk.errors import ArgumentError, short

if TYPE_CHECKING:
    from pk.runtime.group import Group

_numbers = itertools.count()
_named: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()
_met: set[str] = set()  # names of process groups that pk has used


def register(group: Group) -> str:
    """A name for ``group``, unique in this process for as long as the group lives."""
    name = f"pk:{next(_numbers)}"
    _named[name] = group
    return name


def every() -> list[Group]:
    """All groups that are alive."""
    return list(_named.values())


def meet(process_group: Any) -> None:
    """Remember the name of ``process_group``: should there be none of that name later, it has been destroyed."""
    _met.add(name_of(process_group))


def destroyed_text(name: str) -> str:
    """What to say of a process group that is no more."""
    return (
        f"the process group {name!r} passed as group= has been destroyed (torch.distributed.destroy_process_group).\n"
        "  Make one again with torch.distributed.new_group, or pass one that exists."
    )


def name_of(group: Any) -> str:
    """The name of a pk group or of a ``torch.distributed`` process group; "" for None, the caller's.

    Raises :class:`pk.errors.ArgumentError` for anything else.
    """
    if group is None:
        return ""
    if isinstance(group, str):
        return group
    found = getattr(group, "group_name", None)
    if isinstance(found, str):
        return found
    raise ArgumentError(
        f"group={short(group)} is neither a pk group nor a process group.\n"
        "  Pass a torch.distributed.ProcessGroup, or nothing."
    )


def named(name: str) -> Group:
    """The group that :func:`name_of` gave ``name``; the first use of a process group is collective.

    Raises :class:`pk.errors.ArgumentError` if there is none, else as :func:`pk.runtime.group.current`.
    """
    from pk.runtime.group import current

    return current(find(name))


def find(name: str) -> Any:
    """What :func:`name_of` gave ``name``: a pk group, a process group, or None for the caller's.

    Raises :class:`pk.errors.ArgumentError` if there is none.
    """
    if not name:
        return None
    if name.startswith("pk:"):
        found = _named.get(name)
        if found is None:
            raise ArgumentError(f"group={name!r}: there is no such group any more.\n  Keep it alive while it is used.")
        return found
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        return distributed._resolve_process_group(name)  # type: ignore[union-attr]
    except Exception as error:  # noqa: BLE001  torch raises RuntimeError or LookupError here
        if name in _met:
            raise ArgumentError(destroyed_text(name)) from None
        raise ArgumentError(
            f"group={name!r} is neither a pk group nor a process group's name: {error}.\n"
            "  Pass `group.group_name` of one that has not been destroyed, or nothing."
        ) from None
