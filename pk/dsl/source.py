"""The source of a user's function: its syntax tree with positions in the file, and what its names mean outside it."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import linecache
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

from pk import errors
from pk.ir.nodes import Span

MISSING: Any = object()


class Source:
    """A function's tree, file and surroundings.  Raises SourceUnavailable where the text cannot be read."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.name = fn.__name__
        self.file = fn.__code__.co_filename
        kept = _texts.get(fn)
        self.lines = linecache.getlines(self.file, fn.__globals__) if kept is None else kept
        self.tree = self._find()

    def _find(self) -> ast.FunctionDef:
        first = self.fn.__code__.co_firstlineno
        if self.lines:
            try:
                module = _parse("".join(self.lines))
            except SyntaxError:
                module = ast.Module([], [])
            for node in ast.walk(module):
                if isinstance(node, ast.FunctionDef) and node.name == self.name and first in _first_lines(node):
                    return node
        raise errors.SourceUnavailable(
            f"cannot read the source of `{self.name}` ({self.file}, line {first}): pk compiles a kernel from its text."
            "\n  Put the function in a file (not at a prompt, in `python -c` or in `exec`), and do not edit the file "
            "while it runs."
        )

    def span(self, node: ast.AST) -> Span:
        """Where ``node`` stands.  Columns count characters (Python's tree counts UTF-8 bytes)."""
        line, end = node.lineno, node.end_lineno  # type: ignore[attr-defined]
        text = self.lines[line - 1].rstrip("\n") if line <= len(self.lines) else ""
        last = self.lines[end - 1] if end <= len(self.lines) else ""
        column = _characters(text, node.col_offset)  # type: ignore[attr-defined]
        end_column = _characters(last, node.end_col_offset)  # type: ignore[attr-defined]
        return Span(self.file, line, column, end, end_column, self.name, text)

    def header(self) -> Span:
        """The ``def`` line."""
        tree = self.tree
        text = self.lines[tree.lineno - 1].rstrip("\n")
        return Span(self.file, tree.lineno, tree.col_offset, tree.lineno, len(text), self.name, text)

    @functools.cached_property
    def closure(self) -> dict[str, Any]:
        """Captured variables of enclosing functions."""
        cells = zip(self.fn.__code__.co_freevars, self.fn.__closure__ or (), strict=True)
        found = {}
        for name, cell in cells:
            try:
                found[name] = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        return found

    def outside(self, name: str) -> Any:
        """What ``name`` means around the function: closure, module, builtins; MISSING if nothing."""
        for space in (self.closure, self.fn.__globals__, vars(builtins)):
            if name in space:
                return space[name]
        return MISSING

    def home(self, name: str) -> dict[str, Any] | types.CellType | None:
        """The cell or module dict that ``outside`` reads ``name`` from; None for builtins."""
        if name in self.closure:
            return (self.fn.__closure__ or ())[self.fn.__code__.co_freevars.index(name)]
        return self.fn.__globals__ if name in self.fn.__globals__ else None


@functools.lru_cache(maxsize=64)
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def _first_lines(node: ast.FunctionDef) -> set[int]:
    return {node.lineno, *(d.lineno for d in node.decorator_list)}


def _characters(line: str, offset: int) -> int:
    return offset if line.isascii() else len(line.encode()[:offset].decode(errors="ignore"))


def checked(fn: Any, decorator: str, options: dict[str, Any]) -> Any:
    """``fn``, if it is a function written with ``def``.  Raises ArgumentError for anything else, and for options."""
    if fn is MISSING or options:
        shown = ", ".join(f"{name}={errors.short(value)}" for name, value in options.items())
        raise errors.ArgumentError(
            f"@{decorator}({shown}) {'has options' if options else 'is given no function'}.\n"
            f"  Write @{decorator} alone on the line before `def`; constants of a kernel are pk.constexpr parameters."
        )
    inner = unwrap(fn) if callable(fn) else fn
    what, advice = "", f"Decorate a function written with `def`: @{decorator}."
    if isinstance(fn, functools.partial):
        what = f"is {errors.short(fn)}"
        advice = "Decorate the function itself, and pass the bound values in the call or as pk.constexpr defaults."
    elif isinstance(fn, type):
        what = f"is the class `{fn.__name__}`"
    elif inspect.ismethod(inner):
        what = f"is the method `{inner.__qualname__}`"
    elif not inspect.isfunction(inner):
        what = f"is {errors.shown(fn)}" + (", which has no Python source" if callable(fn) else "")
    elif inner.__name__ == "<lambda>":
        what = f"is a lambda ({inner.__code__.co_filename}, line {inner.__code__.co_firstlineno})"
    elif inner.__code__.co_flags & (inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR):
        words = "`async def`" if inner.__code__.co_flags & _ASYNC else "a generator: it has `yield`"
        what, advice = f"`{inner.__name__}` is {words}", "Write a plain `def` without `yield`, `async` and `await`."
    if what:
        raise errors.ArgumentError(f"what @{decorator} is given {what}.\n  {advice}")
    _keep_text(inner)
    return fn


# Lines of the files of decorated functions, as they were then: an editor may change a file before the first call.
_texts: weakref.WeakKeyDictionary[Callable[..., Any], list[str]] = weakref.WeakKeyDictionary()


def _keep_text(fn: Callable[..., Any]) -> None:
    file = fn.__code__.co_filename
    linecache.checkcache(file)  # a module that is loaded again has another text
    lines = linecache.getlines(file, fn.__globals__)
    if lines:
        _texts[fn] = lines  # functions of one file share the list


_ASYNC = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def global_name(made: Any, what: str) -> str:
    """The qualified name of ``made``, for pickle; ArgumentError if it cannot be found by it, in another process say."""
    found: Any = sys.modules.get(made.__module__)
    for name in made.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is made:
        return str(made.__qualname__)
    raise errors.ArgumentError(
        f"{what} `{made.__qualname__}` cannot be pickled: module `{made.__module__}` has no such name, or another "
        "thing under it.\n  Define it at the top of a module, under the name of its function."
    )


def unwrap(fn: Any) -> Callable[..., Any]:
    """The plain function behind decorators that keep ``fn`` or ``__wrapped__``."""
    return inspect.unwrap(getattr(fn, "fn", fn))
