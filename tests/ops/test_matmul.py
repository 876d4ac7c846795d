"""``pk.ops.matmul`` in the simulator, against float64: every configuration, layout, dtype and epilogue."""

from __future__ import annotations

import random

import pytest
import torch

from pk import errors
from pk.ops import cublas, explain, matmul, model
from pk.ops.model import CONFIGS, Problem

FP8 = torch.float8_e4m3fn
FUNCTIONS = {
    None: lambda x: x, "relu": torch.relu, "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}  # fmt: skip


def numbers(gen: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=gen).to(dtype)


def laid(x: torch.Tensor, transposed: bool) -> torch.Tensor:
    """``x`` with its columns contiguous, or its rows."""
    return x.T.contiguous().T if transposed else x.contiguous()


def wanted(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None,
    scale_a: torch.Tensor | None = None, scale_b: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    r = a.double() @ b.double()
    for scale in (scale_a, scale_b):
        r = r if scale is None else r * scale.double()
    return FUNCTIONS[activation](r if bias is None else r + bias.double())


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within the rounding of the result's dtype, at most half of its last place, and of the float32 sums."""
    step = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}[got.dtype]
    assert not got.isnan().any()
    error = (got.double() - want).abs()
    assert bool((error <= step * want.abs() + 2e-5 * float(want.abs().max())).all()), float(error.max())


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations(name: str) -> None:
    c, rng = CONFIGS[name], random.Random(name)
    gen = torch.Generator().manual_seed(rng.randrange(1000))
    m = rng.randrange(1, min(c.cols, 200) + 1) if c.few else rng.randrange(1, 300)
    n, k = 8 * rng.randrange(1, 50), 8 * rng.randrange(1, 90)
    a, b = numbers(gen, m, k), laid(numbers(gen, k, n), rng.random() < 0.5)
    bias, activation = numbers(gen, n), rng.choice(list(FUNCTIONS))
    out = torch.full((m, n), float("nan"), dtype=torch.bfloat16)
    assert matmul(a, b, bias=bias, activation=activation, out=out, config=name) is out
    close(out, wanted(a, b, bias, activation))


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
@pytest.mark.parametrize("name", ["c128x256", "t64x32"])
def test_layouts_and_epilogues(name: str, a_transposed: bool, b_transposed: bool, activation: str | None) -> None:
    gen = torch.Generator().manual_seed(7)
    a = laid(numbers(gen, 32, 136, dtype=torch.float16), a_transposed)
    b = laid(numbers(gen, 136, 264, dtype=torch.float16), b_transposed)
    close(matmul(a, b, activation=activation, config=name), wanted(a, b, activation=activation))


@pytest.mark.parametrize(
    "name", ["c128x256", "t64x64.d128.a", "p128x192", "p128x128", "t64x64", "t64x64.d128.k2", "t128x64"]
)
@pytest.mark.parametrize("rows", ["row", "one", None])
@pytest.mark.parametrize("cols", ["col", "one", None])
def test_fp8_scales(name: str, rows: str | None, cols: str | None) -> None:
    gen = torch.Generator().manual_seed(11)
    m, n, k = 48, 272, 560
    a, b = numbers(gen, m, k, dtype=FP8), laid(numbers(gen, k, n).to(FP8), transposed=True)
    scale_a = {"row": torch.rand(m, 1, generator=gen) + 0.5, "one": torch.tensor(0.75), None: None}[rows]
    scale_b = {"col": torch.rand(1, n, generator=gen) + 0.5, "one": torch.tensor([[1.5]]), None: None}[cols]
    bias = numbers(gen, n)
    got = matmul(a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, config=name)
    assert got.dtype == torch.bfloat16
    close(got, wanted(a, b, bias, None, scale_a, scale_b))


@pytest.mark.parametrize("seed", range(12))
def test_the_models_choice(seed: int) -> None:
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    m, n, k = rng.choice([1, 3, 16, 40, 100, 130, 257]), 8 * rng.randrange(1, 60), 8 * rng.randrange(1, 60)
    a, b = numbers(gen, m, k), laid(numbers(gen, k, n), rng.random() < 0.5)
    dtype = rng.choice([torch.bfloat16, torch.float32, torch.float16])
    close(matmul(a, b, out_dtype=dtype), wanted(a, b))


@pytest.mark.parametrize("shape", [(0, 64, 64), (64, 0, 64), (64, 64, 0)])
def test_nothing_to_do(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b, bias = torch.ones(m, k).bfloat16(), torch.ones(k, n).bfloat16(), -torch.ones(n).bfloat16()
    assert torch.equal(matmul(a, b, bias=bias, activation="relu"), torch.zeros(m, n).bfloat16())
    assert torch.equal(matmul(a, b, bias=bias), (-torch.ones(m, n)).bfloat16())


def test_refusals() -> None:
    x = torch.ones(64, 64)
    for arguments, text in (
        ({"a": x, "b": x}, "must be torch.bfloat16"),
        ({"a": x.bfloat16(), "b": x.half()}, "same dtype"),
        ({"a": x.bfloat16(), "b": x[:32].bfloat16()}, "inner extents 64 and 32"),
        ({"a": x.to(FP8), "b": x.to(FP8)}, "contiguous along K"),
        ({"a": x.bfloat16(), "b": x.bfloat16(), "activation": "swish"}, "swish"),
        ({"a": x.bfloat16(), "b": x.bfloat16(), "config": "c1x1"}, "no configuration"),
        ({"a": x.bfloat16(), "b": x.bfloat16(), "bias": x[0, :8].bfloat16()}, "1 or 64 elements"),
        ({"a": x.bfloat16(), "b": x.bfloat16(), "scale_a": x[:, :1].bfloat16()}, "must be torch.float32"),
        ({"a": x.bfloat16(), "b": x.bfloat16(), "out": x[:32]}, "the result is"),
        ({"a": x.bfloat16()[:, ::2], "b": x.bfloat16()[:32]}, "neither its rows nor its columns"),
    ):
        with pytest.raises(errors.ArgumentError, match=text):
            matmul(**arguments)


def test_model() -> None:
    big = model.choose(Problem(8192, 8192, 8192))
    assert not big.few
    assert big.rows * big.cols >= 128 * 192
    assert model.choose(Problem(16, 8192, 8192)).cols == 16
    assert all(model.ranking(Problem(m, 4096, 7168)) for m in (1, 63, 64, 65, 128, 200, 256, 300, 4096))
    estimates = [us for _, us in model.ranking(Problem(4096, 4096, 4096))]
    assert estimates == sorted(estimates)
    assert 170 < estimates[0] < 190  # microseconds, measured 178


def test_model_knows_the_layout() -> None:
    """Three stages are too few for a b whose columns are contiguous, and quick where its rows are."""
    for k in (8192, 14336):
        assert model.choose(Problem(8192, 4096, k, layout="nk")).stages > 3
        assert model.choose(Problem(8192, 4096, k)).rows == 128
    assert model.clock(CONFIGS["c128x256"], Problem(8192, 4096, 8192)) != model.clock(
        CONFIGS["c128x256"], Problem(8192, 4096, 8192, layout="nk")
    )


@pytest.mark.parametrize(
    ("m", "n", "k", "measured"),
    [(1, 8192, 8192, 35.9), (16, 4096, 7168, 19.7), (128, 8192, 8192, 36.3), (256, 8192, 8192, 46.7),
     (4096, 4096, 4096, 179.8), (8192, 8192, 8192, 1363.5), (16384, 4096, 2048, 359.6), (8192, 4096, 14336, 1153.5),
     (4096, 7168, 4096, 302.1)],
)  # fmt: skip
def test_estimates_of_the_library(m: int, n: int, k: int, measured: float) -> None:
    error = cublas.microseconds(Problem(m, n, k)) / measured
    assert abs(error - 1) < (0.13 if m <= 256 else 0.03)


def test_explain() -> None:
    a, b = (torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta") for _ in range(2))
    text = explain(a, b)
    assert text.splitlines()[0] == "matmul 8192 x 8192 x 8192, 16-bit operands, 132 SMs"
    assert f"-> {model.choose(Problem(8192, 8192, 8192)).name}" in text
    assert text.count("->") == 1
    assert "-> c128x64" in explain(a, b, config="c128x64")
    assert "-> library" in explain(a, b, config="library")


def test_explain_names_the_library() -> None:
    """It is taken where it is quicker and does all that is asked for in one kernel."""
    a, b = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((64, 7168), (7168, 4096)))
    bias, scale = torch.empty(4096, dtype=torch.bfloat16, device="meta"), torch.empty(64, 1, device="meta")
    for options in ({}, {"bias": bias}, {"activation": "none"}):
        assert "-> library" in explain(a, b, **options)
    for options, why in (
        ({"activation": "gelu"}, "no such epilogue"), ({"scale_a": scale}, "no such epilogue"),
        ({"bias": bias.float()}, "would round"), ({"out_dtype": torch.float32}, "not measured"),
        ({"sms": 66}, "all SMs"),
    ):  # fmt: skip
        text = explain(a, b, **options)
        assert "-> library" not in text
        assert text.count("->") == 1
        assert why in text
