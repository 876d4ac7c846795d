"""The source of a user's function: its syntax tree with positions in the file, and what its names mean outside it."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import linecache
import types
from collections.abc import Callable
from typing import Any

from pk import errors
from pk.ir.nodes import Span

MISSING = object()


class Source:
    """A function's tree, file and surroundings.  Raises SourceUnavailable where the text cannot be read."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.name = fn.__name__
        self.file = fn.__code__.co_filename
        self.lines = linecache.getlines(self.file, fn.__globals__)
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


def unwrap(fn: Any) -> Callable[..., Any]:
    """The plain function behind decorators that keep ``fn`` or ``__wrapped__``."""
    return inspect.unwrap(getattr(fn, "fn", fn))
