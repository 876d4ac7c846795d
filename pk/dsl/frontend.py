"""From a Python function to IR: ``build``; and what its text depends on: ``fingerprint``."""

from __future__ import annotations

import ast
import hashlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pk.dsl.builder import Builder
from pk.dsl.captures import Captures
from pk.dsl.signature import Parameter, Signature
from pk.dsl.source import MISSING, Source, unwrap
from pk.dsl.statements import Reader
from pk.dsl.types import Function
from pk.dsl.values import TensorValue
from pk.ir import nodes as ir
from pk.ir.types import FLOAT, INT, DType


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a kernel is specialised for in a tensor argument; extents and strides stay run-time values."""

    kind: Literal["global", "parallel"]
    dtype: DType
    ndim: int


@dataclass(frozen=True)
class Specialization:
    """Tensor types and compile-time constants of a kernel.  A tensor parameter left out folds to None."""

    tensors: dict[str, TensorSpec]
    constants: dict[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((frozenset(self.tensors.items()), frozenset(self.constants)))

    def __eq__(self, other: object) -> bool:
        # 1 == 1.0 == True to Python, but they make different kernels.
        return isinstance(other, Specialization) and self._key() == other._key()

    def _key(self) -> tuple[Any, ...]:
        return self.tensors, {name: typed(value) for name, value in self.constants.items()}


def typed(value: Any) -> Any:
    """``value`` with its type, so that equal values of different types differ."""
    if isinstance(value, tuple):
        return tuple(typed(v) for v in value)
    if isinstance(value, float) and (value == 0 or value != value):
        return float, repr(value)  # -0.0 == 0.0, and NaN differs from itself
    return type(value), value


def build(fn: Callable[..., Any], spec: Specialization, captures: Captures | None = None) -> ir.Kernel:
    """The IR of kernel function ``fn`` for ``spec``.  The body is read, never run.

    What it reads outside the arguments is added to ``captures``.

    Raises a :class:`pk.errors.CompileError` for anything outside the language and SourceUnavailable if ``fn`` has no
    text.
    """
    fn = unwrap(fn)
    signature, source, builder = Signature.of(fn), Source(fn), Builder(captures)
    reader = Reader(builder, source)
    constants = []
    for p in signature.parameters:
        value = _parameter(builder, p, spec, source)
        reader.bind(p.name, value, source.header())
        if p.kind == "constexpr":
            constants.append((p.name, value))
    reader.block(source.tree.body)
    return builder.finish(fn.__name__, tuple(constants), source.header())


def _parameter(builder: Builder, p: Parameter, spec: Specialization, source: Source) -> Any:
    if p.kind == "constexpr":
        return spec.constants.get(p.name, None if p.required else p.default)
    if p.kind in ("int", "float"):
        scalar = ir.Param(builder.unique(p.name), INT if p.kind == "int" else FLOAT, source.header())
        builder.scalars.append(scalar)
        return scalar
    tensor = spec.tensors.get(p.name)
    if tensor is None:
        return None
    builder.unique(p.name)
    builder.tensors.append(ir.Tensor(p.name, tensor.kind, tensor.dtype, tensor.ndim, source.header()))
    dims = tuple(ir.Dim(p.name, axis) for axis in range(tensor.ndim))
    return TensorValue(p.name, tensor.kind, tensor.dtype, dims)


# -------------------------------------------------------------------------------------------- fingerprint
def fingerprint(fn: Callable[..., Any]) -> str:
    """A hash of everything outside the arguments that ``build`` reads.

    The text of ``fn``, of the helpers it reaches, and the constants they capture from modules and closures.
    """
    digest = hashlib.sha256()
    for line in _reached(unwrap(fn), set()):
        digest.update(line.encode() + b"\0")
    return digest.hexdigest()


def _reached(fn: Callable[..., Any], seen: set[Any]) -> Iterator[str]:
    if fn in seen:
        return
    seen.add(fn)
    source = Source(fn)
    yield ast.unparse(source.tree)
    paths = sorted({p for node in ast.walk(source.tree) if (p := _path(node)) is not None})
    for path in paths:
        value = source.outside(path[0])
        for name in path[1:]:
            value = getattr(value, name, MISSING) if isinstance(value, types.ModuleType) else MISSING
        if isinstance(value, Function):
            yield from _reached(value.fn, seen)
        elif isinstance(value, int | float | str | bool | DType | tuple | types.NoneType):
            yield f"{'.'.join(path)}={value!r}"


def _path(node: ast.AST) -> tuple[str, ...] | None:
    """("pk", "float32") for ``pk.float32``."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return (node.id, *names) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else None
