"""What annotates and decorates the user's functions: ``Global``, ``Parallel``, ``constexpr``, ``function``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from pk import errors


def outside(name: str) -> NoReturn:
    """What every operation does when plain Python calls it: raises OutsideKernel."""
    raise errors.OutsideKernel(
        f"pk.{name} is an operation of the kernel language and was called by plain Python.\n"
        f"  Use it inside a function decorated with @pk.kernel (or @pk.function, called from one)."
    )


class Global:
    """Annotation: this rank's own tensor in device memory, 1 to 4 dimensions, strided (last dimension contiguous).

    In the kernel: ``x.rows .cols .depth .batch`` (counted from the end), ``x.shape``, ``x.shape[i]``, ``x.dtype``.
    """


class Parallel:
    """Annotation: the same tensor on every rank (symmetric memory, see ``pk.empty``).

    ``c[r]`` is rank r's copy; ``c`` alone, as a destination, is all of them.  Attributes as for :class:`Global`.
    """


class constexpr:  # noqa: N801  it reads as a keyword in signatures
    """Annotation: a Python value known when the kernel is compiled; each value makes a kernel of its own."""


class Function:
    """A helper made by ``@pk.function``: expanded in place where a kernel calls it."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn

    def __reduce__(self) -> str:
        """Pickled by name; raises ArgumentError if it has none."""
        from pk.dsl.source import global_name

        return global_name(self, "helper")

    def __repr__(self) -> str:
        return f"<pk.function {self.fn.__name__}>"

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Plain Python cannot call a helper: raises OutsideKernel."""
        raise errors.OutsideKernel(
            f"`{self.fn.__name__}` is a pk.function: it is expanded where a @pk.kernel function calls it.\n"
            f"  Call it in a kernel; for plain Python use `{self.fn.__name__}.fn`."
        )


_LEFT_OUT: Any = object()


def function(fn: Callable[..., Any] = _LEFT_OUT, **options: Any) -> Function:
    """Decorator: a helper that kernels expand in place.

    Tensors, pipelines and shared tiles pass by reference, scalars and register tiles by value: a helper returns what
    it computes, in one ``return`` at its end (branches on Python values may each have one).
    """
    from pk.dsl.source import MISSING, checked

    return Function(checked(MISSING if fn is _LEFT_OUT else fn, "pk.function", options))
