"""``pk.ops.matmul`` on a GPU: every configuration on random shapes, layouts and epilogues, against float64."""

from __future__ import annotations

import random

import pytest
import torch

from pk.ops import matmul
from pk.ops.model import CONFIGS
from tests.kernels import relative_error
from tests.ops.test_matmul import FP8, FUNCTIONS, laid, wanted

pytestmark = pytest.mark.gpu(1)


def guarded(m: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN memory for a result with 8 columns and 2 rows around it, and the result's part of it."""
    whole = torch.full((m + 2, n + 8), float("nan"), dtype=torch.bfloat16, device="cuda")
    return whole, whole[:m, :n]


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations(name: str) -> None:
    c, rng = CONFIGS[name], random.Random(name)
    gen = torch.Generator(device="cuda").manual_seed(rng.randrange(1000))
    for turn in range(6):
        fp8 = turn % 3 == 2
        m = rng.randrange(1, c.cols + 1) if c.swap else rng.randrange(1, 1500)
        n, k = 16 * rng.randrange(1, 120), 16 * rng.randrange(1, 200)
        a = torch.randn(m, k, generator=gen, device="cuda").to(FP8 if fp8 else torch.bfloat16)
        b = laid(torch.randn(k, n, generator=gen, device="cuda").to(a.dtype), fp8 or rng.random() < 0.5)
        bias, activation = torch.randn(n, generator=gen, device="cuda").bfloat16(), rng.choice(list(FUNCTIONS))
        scales = {}
        if fp8:
            scales = {
                "scale_a": torch.rand(m, 1, device="cuda") + 0.5,
                "scale_b": torch.rand(1, n, device="cuda") + 0.5,
            }
        want = wanted(a, b, bias, activation, **scales)
        first = None
        for _ in range(3):
            whole, out = guarded(m, n)
            matmul(a, b, bias=bias, activation=activation, out=out, config=name, **scales)
            error = relative_error(out, want)
            assert error <= (1e-2 if fp8 else 3e-3), (m, n, k, activation, error)
            assert bool(whole[m:].isnan().all()) and bool(whole[:, n:].isnan().all()), "written outside the result"
            assert first is None or torch.equal(out, first), "other bits in another run"
            first = out


@pytest.mark.parametrize("seed", range(20))
def test_the_models_choice(seed: int) -> None:
    rng, gen = random.Random(seed), torch.Generator(device="cuda").manual_seed(seed)
    m, n, k = (
        rng.choice([1, 7, 16, 50, 64, 128, 200, 256, 300, 1000, 4096]),
        8 * rng.randrange(1, 600),
        8 * rng.randrange(1, 600),
    )
    a = laid(torch.randn(m, k, generator=gen, device="cuda").bfloat16(), m % 8 == 0 and rng.random() < 0.3)
    b = laid(torch.randn(k, n, generator=gen, device="cuda").bfloat16(), rng.random() < 0.5)
    assert relative_error(matmul(a, b), wanted(a, b)) <= 3e-3
