"""``pk.ops.matmul`` on a GPU: every configuration on random shapes, layouts and epilogues, against float64."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pk.ops import cublas, explain, matmul, model
from pk.ops.model import CONFIGS, Problem
from tests.kernels import relative_error
from tests.ops.builds import build, compile_all
from tests.ops.test_matmul import FP8, FUNCTIONS, laid, wanted

pytestmark = pytest.mark.gpu(1)


@dataclass(frozen=True)
class Case:
    """A product; ``a_t``, ``b_t``: columns of a, of b contiguous."""

    m: int
    n: int
    k: int
    fp8: bool = False
    a_t: bool = False
    b_t: bool = False
    activation: str | None = None
    bias: bool = True

    def operands(self, device: str, gen: torch.Generator | None) -> dict[str, Any]:
        """Tensors, random or of no content."""

        def numbers(*shape: int, scale: bool = False) -> torch.Tensor:
            if device == "meta":
                return torch.empty(shape, device=device)
            if scale:
                return torch.rand(shape, generator=gen, device=device) + 0.5
            return torch.randn(shape, generator=gen, device=device)

        kind = FP8 if self.fp8 else torch.bfloat16
        a, b = numbers(self.m, self.k).to(kind), numbers(self.k, self.n).to(kind)
        found = {"a": laid(a, self.a_t), "b": laid(b, self.b_t)}
        if self.bias:
            found["bias"] = numbers(self.n).bfloat16()
        if self.fp8:
            found |= {"scale_a": numbers(self.m, 1, scale=True), "scale_b": numbers(1, self.n, scale=True)}
        return found


def cases(name: str) -> list[Case]:
    """Of one configuration: both layouts and 8 bits, each on two shapes."""
    c, rng = CONFIGS[name], random.Random(name)
    activation = rng.choice(list(FUNCTIONS))
    found = []
    for turn in range(6):
        m = rng.randrange(1, c.cols + 1) if c.few else rng.randrange(1, 1500)
        n, k = 16 * rng.randrange(1, 120), 16 * rng.randrange(1, 200)
        found.append(Case(m, n, k, turn % 3 == 2, b_t=turn % 3 > 0, activation=activation))
    return found


def choices() -> list[tuple[Case, str]]:
    """Random products and what the model chooses for them."""
    found = []
    for seed in range(20):
        rng = random.Random(seed)
        m = rng.choice([1, 7, 16, 50, 64, 128, 200, 256, 300, 1000, 4096])
        n, k = 8 * rng.randrange(1, 600), 8 * rng.randrange(1, 600)
        case = Case(m, n, k, a_t=m % 8 == 0 and rng.random() < 0.3, b_t=rng.random() < 0.5, bias=False)
        found.append((case, model.choose(Problem(m, n, k, layout="nk" if case.b_t else "kn")).name))
    return found


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All kernels of this file, which is quicker than one by one; no cubin spills or serialises its mma."""
    work = [(case, name) for name in CONFIGS for case in cases(name)] + choices()
    builds = [build(name=name, activation=case.activation, **case.operands("meta", None)) for case, name in work]
    assert compile_all(builds) == []


def guarded(m: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN memory for a result with 8 columns and 2 rows around it, and the result's part of it."""
    whole = torch.full((m + 2, n + 8), float("nan"), dtype=torch.bfloat16, device="cuda")
    return whole, whole[:m, :n]


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations(name: str) -> None:
    gen = torch.Generator(device="cuda").manual_seed(random.Random(name).randrange(1000))
    for case in cases(name):
        given = case.operands("cuda", gen)
        want = wanted(activation=case.activation, **given)
        first = None
        for _ in range(3):
            whole, out = guarded(case.m, case.n)
            matmul(out=out, activation=case.activation, config=name, **given)
            error = relative_error(out, want)
            assert error <= (1e-2 if case.fp8 else 3e-3), (case, error)
            assert bool(whole[case.m :].isnan().all()) and bool(whole[:, case.n :].isnan().all()), "outside the result"
            assert first is None or torch.equal(out, first), "other bits in another run"
            first = out


@pytest.mark.parametrize(("case", "name"), choices())
def test_the_models_choice(case: Case, name: str) -> None:
    """The configuration, and whatever the operator takes by itself: that, or the library."""
    given = case.operands("cuda", torch.Generator(device="cuda").manual_seed(case.m + case.n))
    want = wanted(**given)
    for config in (name, None):
        assert relative_error(matmul(config=config, **given), want) <= 3e-3


def test_library_is_taken() -> None:
    """Bit for bit torch's, where ``explain`` says so; not with an epilogue that it lacks, or on fewer SMs."""
    a = torch.randn(64, 7168, device="cuda").bfloat16()
    b = torch.randn(7168, 4096, device="cuda").bfloat16()
    assert cublas.preferred(Problem(64, 4096, 7168)) and "-> library" in explain(a, b)
    assert torch.equal(matmul(a, b), torch.matmul(a, b))
    for options in ({"activation": "silu"}, {"sms": 66}):
        assert "-> library" not in explain(a, b, **options)
        activation = options.get("activation")
        assert relative_error(matmul(a, b, **options), wanted(a, b, activation=activation)) <= 3e-3
