"""NumPy's view of a tensor's memory, which must leave the tensor as it was; and tensors without memory."""

from __future__ import annotations

import ast
import gc
from pathlib import Path

import numpy as np
import pytest
import torch

import pk
from pk.errors import ArgumentError
from pk.runtime.tensors import numpy_view

PK = Path(pk.__file__).parent


@pk.kernel
def doubled(x: pk.Global, y: pk.Global, B: pk.constexpr = 64):  # y := 2 x, (m, n)
    for i, j in pk.tasks(x.rows, pk.cdiv(x.cols, B)):
        pk.store(y, pk.load(x, (i, j), (1, B)) * 2.0, (i, j))


@pytest.mark.parametrize(
    ("dtype", "storage"),
    [
        (torch.float32, None), (torch.int32, None), (torch.float64, None), (torch.bfloat16, "uint16"),
        (torch.float16, "uint16"), (torch.float8_e4m3fn, "uint8"),
    ],
)  # fmt: skip
def test_a_view_is_the_memory(dtype: torch.dtype, storage: str | None) -> None:
    x = (torch.arange(24) // 2).to(dtype).view(4, 6)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for tensor in (x, x.t(), x[1:, 2:4], x[0].expand(3, 6), x[2, 3]):
        array = numpy_view(tensor, storage)
        assert array.shape == tuple(tensor.shape)
        copy = np.ascontiguousarray(array).view(np.dtype(str(bits).removeprefix("torch.")))
        assert copy.ravel().tolist() == tensor.contiguous().view(-1).view(bits).tolist()
        assert tensor.untyped_storage().resizable()
    array = numpy_view(x, storage)
    array[1, 2] = array[3, 5]
    assert float(x[1, 2]) == 11.0
    assert numpy_view(x[:0], storage).shape == (0, 6)


def test_a_view_keeps_its_memory() -> None:
    array = numpy_view(torch.full((1000,), 3.0))
    gc.collect()
    others = [torch.full((1000,), 5.0) for _ in range(8)]
    assert np.all(array == 3.0) and len(others) == 8


def test_kernels_leave_storage_that_can_be_resized() -> None:
    """As FSDP does with the parameters that an operator was given."""

    def run(rank: int) -> None:
        x, w = torch.randn(16, 32).bfloat16(), torch.nn.Parameter(torch.randn(32, 64).bfloat16())
        y = pk.ops.matmul(x, w)
        z = pk.ops.all_gather_matmul(x, w)
        z.sum().backward()
        plain = torch.randn(16, 64)
        out = torch.empty(16, 64)
        doubled(plain, out)
        assert torch.equal(out, plain * 2)
        kept = [x, w, y, z, w.grad, plain, out]
        assert [t.untyped_storage().resizable() for t in kept] == [True] * len(kept)

    pk.spawn(run, 2, "sim")


def test_a_check_leaves_its_reference_alone() -> None:
    x, wanted = torch.randn(16, 64), torch.zeros(16, 64, dtype=torch.float64)
    made = pk.check(doubled, x, torch.zeros(16, 64), world_size=1, schedules=1, reference={"y": wanted})
    assert not made.ok
    assert x.untyped_storage().resizable()
    assert wanted.untyped_storage().resizable()


def test_nobody_calls_numpy() -> None:
    """``tensor.numpy()`` is what forbids to resize a storage."""
    for path in PK.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr
            assert called != "numpy", f"{path.name}:{node.lineno}: use pk.runtime.tensors.numpy_view"


def test_memory_that_has_been_freed_is_refused() -> None:
    x, w = torch.randn(16, 32).bfloat16(), torch.randn(32, 64).bfloat16()
    w.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match=r"`b` of pk.ops.matmul has shape \(32, 64\), and its memory has been fr"):
        pk.ops.matmul(x, w)
    y = torch.randn(16, 64)
    y.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match=r"`x` of kernel `doubled` has shape .* its memory has been freed"):
        doubled(y, torch.empty(16, 64))
