"""Register tiles in the simulator, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pk
from pk.ir.layout import Layout, linear
from pk.sim.ops_tiles import ordered_sum
from tests.tiles.kernels import fragment_softmax, layernorm, moe_weighted_sum, prefix_sum, reductions, scalars, softmax


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax(dtype: torch.dtype) -> None:
    x, y = normal(37, 200, dtype=dtype), torch.full((37, 200), float("nan"))
    softmax(x, y)
    assert torch.allclose(y.double(), torch.softmax(x.double(), 1), rtol=1e-6, atol=1e-9)


def test_layernorm() -> None:
    x, w, b = normal(11, 1000), normal(1000, seed=1), normal(1000, seed=2)
    y = torch.full((11, 1000), float("nan"))
    layernorm(x, w, b, y, 1e-5)
    want = torch.nn.functional.layer_norm(x.double(), (1000,), w.double(), b.double(), 1e-5)
    # The mean is of C columns with zeros outside: exact here, as the sum is divided by the true number.
    assert torch.allclose(y.double(), want, rtol=1e-5, atol=1e-5)


def test_moe_weighted_sum_of_a_strided_view() -> None:
    back, weight = normal(20, 3, 1100, dtype=torch.bfloat16).transpose(0, 1), torch.rand(20, 3)
    out = torch.full((20, 1100), float("nan"))
    moe_weighted_sum(back, weight, out)
    want = torch.einsum("kth,tk->th", back.double(), weight.double())
    assert torch.allclose(out.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("r", "c"), [(1, 2048), (2, 512), (3, 96), (8, 64), (16, 33), (37, 40), (5, 1), (1, 7)])
def test_reductions(r: int, c: int) -> None:
    x = normal(r, c)
    rows, cols = torch.full((r, 3), float("nan")), torch.full((3, c), float("nan"))
    reductions(x, rows, cols, R=r, C=c)
    for got, axis in ((rows.T, 1), (cols, 0)):
        want = (x.double().sum(axis), x.amax(axis), x.amin(axis))
        assert torch.allclose(got[0].double(), want[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(got[1], want[1])
        assert torch.equal(got[2], want[2])


def test_nan_wins() -> None:
    x = normal(8, 64)
    x[3, 5] = float("nan")
    rows, cols = torch.zeros(8, 3), torch.zeros(3, 64)
    reductions(x, rows, cols, R=8, C=64)
    assert rows[3].isnan().all()
    assert cols[:, 5].isnan().all()
    assert rows.isnan().sum() == cols.isnan().sum() == 3


def test_prefix_sum() -> None:
    x, y = torch.randint(-9, 9, (1, 256), dtype=torch.int32), torch.zeros(256, 1, dtype=torch.int32)
    prefix_sum(x, y)
    assert torch.equal(y[1:, 0], x[0].cumsum(0)[:-1].int())
    assert y[0] == 0


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_fragment(groups: int) -> None:
    m = 100 * groups
    a, b = normal(m, 64, dtype=torch.float16), normal(64, 56, dtype=torch.float16, seed=1)
    tasks = -(-m // (64 * groups))
    y, rows, cols = torch.zeros(m, 56), torch.zeros(m, 1), torch.zeros(tasks, 56)
    fragment_softmax(a, b, y, rows, cols, G=groups)
    s = a.double() @ b.double()
    assert torch.allclose(y.double(), torch.softmax(s, 1), rtol=1e-4, atol=1e-6)
    assert torch.allclose(rows[:, 0].double(), s.sum(1), rtol=1e-4, atol=1e-3)
    for t in range(tasks):
        assert torch.allclose(cols[t].double(), s[t * 64 * groups : (t + 1) * 64 * groups].sum(0), rtol=1e-4, atol=1e-3)


def _scalars(rank: int, world: int) -> torch.Tensor:
    x = normal(64, 64, dtype=torch.bfloat16, seed=rank)
    y = pk.empty((64, 64), torch.float32)
    y.zero_()
    scalars(x, torch.tensor([2, 3, 1], dtype=torch.int32), y, 5)
    return y


@pytest.mark.parametrize("world", [1, 3])
def test_scalars(world: int) -> None:
    for rank, y in enumerate(pk.spawn(_scalars, world, "sim", (world,))):
        mine, left = (normal(64, 64, dtype=torch.bfloat16, seed=s).float() for s in (rank, (rank - 1) % world))
        for block in (3, 1):
            top = 16 * block
            assert torch.equal(y[top : top + 5], 2 * left[top : top + 5])
            assert (y[top + 5 : top + 15] == 0).all()
            assert y[top + 15, 0] == mine[block, 3] + 2
            assert y[top + 15, 1] == 0  # y[0, 0] of some rank, which nobody writes
        assert (y[:16] == 0).all()


# ------------------------------------------------------------------------------------------- the order of sums
@pytest.mark.parametrize("layout", [linear(8, 8), linear(8, 1), linear(8, 3), linear(4, 2), Layout("fragment", 8)])
@pytest.mark.parametrize("axis", [0, 1])
def test_ordered_sum_adds_everything_once(layout: Layout, axis: int) -> None:
    rows = 128 if layout.kind == "fragment" else 24 // layout.share
    x = np.random.default_rng(0).integers(-99, 99, (rows, 136)).astype(np.float32)  # exact in any order
    assert (ordered_sum(x, axis, layout) == x.sum(axis, keepdims=True)).all()


def test_ordered_sum_is_not_the_sum_of_numpy() -> None:
    """Otherwise the order would not be the device's."""
    x = np.random.default_rng(0).standard_normal((8, 4096)).astype(np.float32)
    assert (ordered_sum(x, 1, linear(8, 8)) != x.sum(1, keepdims=True)).any()
