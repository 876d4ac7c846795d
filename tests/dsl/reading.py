"""Kernels given as text: read, check, print.  Positions in messages are those of the text, as file ``kernel.py``."""

from __future__ import annotations

import linecache
import textwrap
from typing import Any

import pytest

from pk import errors
from pk.dsl.frontend import Specialization, TensorSpec, build
from pk.dsl.signature import Signature
from pk.dsl.source import unwrap
from pk.ir import nodes as ir
from pk.ir.check import check
from pk.ir.text import text
from pk.ir.types import DTYPES, DType, bfloat16

HEAD = "import pk\n\n"


def load(source: str, name: str = "k", file: str = "kernel.py") -> Any:
    """Object ``name`` of a module whose text is ``source``; pk reads the text as if it were a file."""
    source = HEAD + textwrap.dedent(source).strip() + "\n"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space: dict[str, Any] = {"__name__": "kernel"}
    exec(compile(source, file, "exec"), space)
    return space[name]


def read(
    source: str, ndim: dict[str, int] | None = None, dtype: dict[str, DType] | None = None, **constants: Any
) -> ir.Kernel:
    """Kernel ``k`` of ``source``, checked.  Tensors are 2-D bfloat16 unless said otherwise."""
    fn = unwrap(load(source))
    signature = Signature.of(fn)
    ndim, dtype = ndim or {}, dtype or {}
    tensors = {
        name: TensorSpec(kind, dtype.get(name, bfloat16), ndim.get(name, 2))
        for name, kind in signature.tensors.items()
        if ndim.get(name) != 0
    }
    given = {p.name: p.default for p in signature.parameters if p.kind == "constexpr"} | constants
    kernel = build(fn, Specialization(tensors, given))
    check(kernel)
    return kernel


def body(source: str, **kwargs: Any) -> str:
    """What ``read`` makes of ``source``, as text from ``compute:`` on, dedented."""
    printed = text(read(source, **kwargs))
    return textwrap.dedent(printed[printed.index("  compute:\n") + len("  compute:\n") :])


def refusal(kind: type[errors.PkError], source: str, **kwargs: Any) -> str:
    """The message of the error of class ``kind`` that reading ``source`` must raise."""
    with pytest.raises(errors.PkError) as caught:
        read(source, **kwargs)
    assert type(caught.value) is kind, f"{type(caught.value).__name__}: {caught.value}"
    return f"{kind.__name__}: {caught.value}"


__all__ = ["DTYPES", "body", "load", "read", "refusal"]
