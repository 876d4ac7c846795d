"""The reference kernels build, pass the checks and print as they should."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pk.dsl.frontend import Specialization, TensorSpec, build
from pk.dsl.signature import Signature
from pk.ir import nodes as ir
from pk.ir.check import check
from pk.ir.split import statements
from pk.ir.text import text
from pk.ir.types import bfloat16, float16
from tests.dsl import gallery

NDIM: dict[str, dict[str, int]] = {
    "matmul": {},
    "matmul_reduce_scatter": {"a": 3},
    "matmul_reduce_scatter_short": {"a": 3},
    "matmul_reduce_scatter_det": {"a": 3},
    "all_gather_matmul": {"c": 3},
    "decode_matmul_all_reduce": {},
    "all_reduce_ring": {"x": 3, "out": 3},
}
CONSTANTS: dict[str, dict[str, Any]] = {"all_reduce_ring": {"BM": 128, "BN": 128}}


def kernel(name: str, dtype: Any = bfloat16) -> ir.Kernel:
    fn = getattr(gallery, name).fn
    signature = Signature.of(fn)
    tensors = {t: TensorSpec(kind, dtype, NDIM[name].get(t, 2)) for t, kind in signature.tensors.items()}
    constants = {p.name: p.default for p in signature.parameters if p.kind == "constexpr"} | CONSTANTS.get(name, {})
    made = build(fn, Specialization(tensors, constants))
    check(made)
    return made


@pytest.mark.parametrize("name", NDIM)
def test_text(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"ir/{name}.txt", text(kernel(name)))


def test_helpers_make_the_same_kernel_as_writing_it_out() -> None:
    """2a with helpers is design.md's kernel, but for the branch that folds per call of ``put``."""
    long, short = kernel("matmul_reduce_scatter"), kernel("matmul_reduce_scatter_short")
    assert long.pipelines == short.pipelines
    loaders = [next(s for s in statements(k.compute) if isinstance(s, ir.Role)) for k in (long, short)]
    assert loaders[0] == loaders[1]


def test_every_node_carries_a_span_of_the_file() -> None:
    made = kernel("all_gather_matmul")
    lines = Path(gallery.__file__).read_text(encoding="utf-8").splitlines()
    assert made.communicator is not None
    for s in (*made.prologue, *statements(made.compute), *statements(made.communicator.body)):
        assert s.span.file == gallery.__file__
        assert s.span.text == lines[s.span.line - 1]
        assert s.span.text[s.span.column :].strip(), s
        assert s.span.function in ("all_gather_matmul", "feed", "accumulate", "emit", "put")


def test_dtypes_come_from_the_arguments() -> None:
    assert "float16" in text(kernel("matmul", float16))
    assert "bfloat16" not in text(kernel("matmul", float16))


def test_building_takes_milliseconds() -> None:
    kernel("matmul_reduce_scatter_det")
    start = time.perf_counter()
    kernel("matmul_reduce_scatter_det")
    assert time.perf_counter() - start < 0.5
