"""The native lookup of a warm call's launch: ``csrc/warm.cpp``, which reads tensors through DLPack's C functions.

Its Python twin is ``Kernel._repeat`` of ``pk/kernel.py``; the two keep keys of their own in one table.  A call that the
native one cannot describe (a subclass of Tensor, a dtype without a DLPack code, memory that is not there) goes to the
twin by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from pk import env
from pk.runtime.native import native

Repeat = Callable[..., Any]  # (kernel, table, sms, args, kwargs) -> True if it launched, else the call's key or None


def unchanged() -> Callable[[Any], bool]:
    """Tells of variables (dict, name, value) whether all still have these values; False: look closer."""
    return getattr(native(), "unchanged", None) or (lambda entries: False)


def finder(names: Sequence[str], scalars: Mapping[str, Any], twin: Repeat) -> Repeat:
    """The native twin of ``twin`` for a kernel with parameters ``names``, or ``twin`` where there is none.

    ``scalars``: the default of each run-time scalar, in order.  There is none without ``pk._C``, with ``PK_NATIVE=0``,
    and where torch (before 2.10) does not have ``__dlpack_c_exchange_api__``.
    """
    import torch

    make = getattr(native(), "finder", None)
    table, variables = env.raw(env.TIMEOUT_S, env.ENTRY_TIMEOUT_S, env.SANITIZE)
    if make is None or table is None:
        return twin
    types = (torch.Tensor, torch.nn.Parameter)  # exactly these: a subclass may mean something else by its methods
    places = {name: index for index, name in enumerate(scalars)}
    return make(types, torch.Tensor, table, variables, tuple(names), places, tuple(scalars.values()), twin) or twin


def aside(
    names: Sequence[str], scalars: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """The arguments with types in place of run-time scalars; and the scalars, in the order of the parameters."""
    given = {name: v for name, v in zip(names, args, strict=False) if name in scalars}
    given.update({name: v for name, v in kwargs.items() if name in scalars})
    args = tuple([type(v) if n in scalars else v for n, v in zip_longest(names[: len(args)], args)])
    kwargs = {name: type(v) if name in scalars else v for name, v in kwargs.items()}
    return args, kwargs, tuple([given.get(name, default) for name, default in scalars.items()])
