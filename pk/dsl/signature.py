"""The parameters of a kernel: kinds, defaults, and binding of a call's arguments."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pk import errors
from pk.dsl.source import MISSING, Source
from pk.dsl.types import Global, Parallel, constexpr
from pk.dsl.values import plain

Kind = Literal["global", "parallel", "constexpr", "int", "float"]
_KINDS: dict[Any, Kind] = {Global: "global", Parallel: "parallel", constexpr: "constexpr", int: "int", float: "float"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter; ``default`` is ``inspect.Parameter.empty`` if it has none."""

    name: str
    kind: Kind
    default: Any

    @property
    def required(self) -> bool:
        """Whether a call must give it."""
        return self.default is inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of kernel ``kernel``, in order."""

    kernel: str
    parameters: tuple[Parameter, ...]

    @staticmethod
    def of(fn: Callable[..., Any]) -> Signature:
        """Read ``fn``'s signature.  Raises WrongDeclaration for a parameter without one of pk's annotations."""
        found = []
        spans = _Spans(fn)
        for p in inspect.signature(fn).parameters.values():
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                raise errors.WrongDeclaration(
                    f"parameter `{p.name}` of kernel `{fn.__name__}` takes any number of arguments",
                    spans.of(p.name),
                    "Name every parameter and annotate it.",
                )
            kind = _KINDS.get(_resolve(fn, p.annotation))
            if kind is None:
                raise errors.WrongDeclaration(
                    f"parameter `{p.name}` of kernel `{fn.__name__}` has {_described(p.annotation)}",
                    spans.of(p.name),
                    "Annotate it with pk.Global or pk.Parallel (tensors), pk.constexpr (compile-time), int or float.",
                )
            if kind in ("global", "parallel") and p.default is not p.empty and p.default is not None:
                raise errors.WrongDeclaration(
                    f"tensor parameter `{p.name}` of kernel `{fn.__name__}` has the default {errors.short(p.default)}",
                    spans.of(p.name),
                    "A tensor has no default, or None: then it may be absent, and folds to None.",
                )
            found.append(Parameter(p.name, kind, p.default))
        return Signature(fn.__name__, tuple(found))

    @property
    def names(self) -> tuple[str, ...]:
        """All parameters, in order."""
        return tuple(p.name for p in self.parameters)

    @property
    def tensors(self) -> dict[str, Literal["global", "parallel"]]:
        """Tensor parameters and their kinds."""
        return {p.name: p.kind for p in self.parameters if p.kind in ("global", "parallel")}

    @property
    def scalars(self) -> dict[str, Literal["int", "float"]]:
        """Run-time scalar parameters and their kinds."""
        return {p.name: p.kind for p in self.parameters if p.kind in ("int", "float")}

    @property
    def constants(self) -> tuple[str, ...]:
        """``constexpr`` parameters."""
        return tuple(p.name for p in self.parameters if p.kind == "constexpr")

    def optional(self, name: str) -> bool:
        """Whether tensor ``name`` may be absent (default None)."""
        return not next(p for p in self.parameters if p.name == name).required

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Every parameter's argument, defaults filled in.

        Raises ArgumentError for too many, missing or unknown arguments and for a constexpr that cannot be hashed.
        """
        if len(args) > len(self.parameters):
            raise errors.ArgumentError(
                f"kernel `{self.kernel}` takes {len(self.parameters)} arguments and got {len(args)}.\n"
                f"  Its parameters: {', '.join(self.names)}."
            )
        bound = dict(zip(self.names, args, strict=False))
        for name, value in kwargs.items():
            if name not in self.names:
                raise errors.ArgumentError(
                    f"kernel `{self.kernel}` has no parameter `{name}`.{errors.nearest(name, self.names)}\n"
                    f"  Its parameters: {', '.join(self.names)}."
                )
            if name in bound:
                raise errors.ArgumentError(f"kernel `{self.kernel}` got two values for `{name}`.\n  Pass it once.")
            bound[name] = value
        missing = [p.name for p in self.parameters if p.required and p.name not in bound]
        if missing:
            raise errors.ArgumentError(
                f"kernel `{self.kernel}` is missing {', '.join(f'`{m}`' for m in missing)}.\n"
                f"  Its parameters: {', '.join(self.names)}."
            )
        values = {p.name: bound.get(p.name, p.default) for p in self.parameters}
        for name in self.constants:
            self._hashable(name, values[name])
        return values

    def _hashable(self, name: str, value: Any) -> None:
        try:
            hash(value)
        except TypeError:
            raise errors.ArgumentError(
                f"constexpr `{name}` of kernel `{self.kernel}` is {errors.shown(value)}, "
                "which cannot be hashed.\n"
                "  Pass a number, a string, a dtype or a tuple of these."
            ) from None

    def scalar(self, name: str, value: Any) -> int | float:
        """``value`` as run-time parameter ``name``.  Raises ArgumentError if it is no number or does not fit int32."""
        kind, value = self.scalars[name], plain(value)
        if kind == "int" and hasattr(value, "__index__") and not isinstance(value, float):
            number = int(value)
            if -(2**31) <= number < 2**31:
                return number
            raise errors.ArgumentError(
                f"`{name}` of kernel `{self.kernel}` is {number}, which does not fit int32.\n"
                "  Scalars of kernels are int32."
            )
        if kind == "float" and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise errors.ArgumentError(
            f"`{name}` of kernel `{self.kernel}` is {errors.shown(value)}, and must be {_article(kind)}.\n"
            f"  Pass a Python {kind}."
        )


class _Spans:
    """Where parameters stand, read only when an error needs it."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def of(self, name: str) -> Any:
        source = Source(self.fn)
        a = source.tree.args
        every = [
            *a.posonlyargs,
            *a.args,
            *a.kwonlyargs,
            *([a.vararg] if a.vararg else []),
            *([a.kwarg] if a.kwarg else []),
        ]
        return source.span(next(arg for arg in every if arg.arg == name))


def _resolve(fn: Callable[..., Any], annotation: Any) -> Any:
    """An annotation, looked up by name if it is a string (``from __future__ import annotations``)."""
    if not isinstance(annotation, str):
        return annotation if isinstance(annotation, type) else None
    try:
        node = ast.parse(annotation, mode="eval").body
    except SyntaxError:
        return None
    path: list[str] = []
    while isinstance(node, ast.Attribute):
        path.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    value = {**fn.__globals__, **inspect.getclosurevars(fn).nonlocals}.get(node.id, MISSING)
    if value is MISSING:
        value = {"int": int, "float": float}.get(node.id)
    for name in path:
        value = getattr(value, name, None)
    return value if isinstance(value, type) else None


def _described(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return "no annotation"
    return (
        f"the annotation `{annotation if isinstance(annotation, str) else getattr(annotation, '__name__', annotation)}`"
    )


def _article(kind: str) -> str:
    return "an int" if kind == "int" else "a float"
