"""Gradients of the operators in the simulator, against float64 on all ranks' values at once."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import pk
import pk.ops
from pk import errors

PARALLEL = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
functional = torch.nn.functional
FUNCTIONS: dict[str | None, Any] = {
    None: lambda x: x, "relu": torch.relu, "silu": functional.silu, "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}  # fmt: skip


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def laid(x: torch.Tensor, transposed: bool) -> torch.Tensor:
    """A leaf with its columns contiguous, or its rows."""
    return (x.T.contiguous().T if transposed else x.contiguous()).detach().requires_grad_()


def close(got: torch.Tensor, want: torch.Tensor, roundings: int = 4) -> None:
    """Within some roundings of intermediate values to 16 bits, relative to the largest value."""
    assert got.shape == want.shape
    assert not got.isnan().any()
    step = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-8}[got.dtype]
    error = float((got.detach().double() - want.detach()).abs().max()) if got.numel() else 0.0
    assert error <= roundings * step * float(want.detach().abs().max()) + 1e-6, error


def activated(name: str | None, z: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """In float64; which values a relu passes is taken from ``result``, where rounding may decide."""
    if name == "relu":
        assert float((z.detach() * ((result > 0) != (z > 0))).abs().max()) < 0.1
        return z * (result > 0)
    return FUNCTIONS[name](z)


# --------------------------------------------------------------------------------------------------------- one rank
@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
@pytest.mark.parametrize("through", ["function", "operator"])
def test_matmul(through: str, b_transposed: bool, a_transposed: bool, activation: str | None) -> None:
    a, b = laid(numbers(1, 32, 40), a_transposed), laid(numbers(2, 40, 48), b_transposed)
    bias = numbers(3, 48).requires_grad_()
    if through == "function":
        y = pk.ops.matmul(a, b, bias=bias, activation=activation)
    else:
        y = torch.ops.pk.matmul(a, b, bias, activation or "none")
    g = numbers(4, 32, 48)
    y.backward(g)
    A, B, C = (x.detach().double().requires_grad_() for x in (a, b, bias))
    want = activated(activation, A @ B + C, y)
    want.backward(g.double())
    for got, expected in ((y, want), (a.grad, A.grad), (b.grad, B.grad), (bias.grad, C.grad)):
        assert got is not None
        assert expected is not None
        close(got, expected)
    assert a.grad is not None
    assert a.grad.stride() == a.stride()


@pytest.mark.parametrize("wanted", range(1, 8))
@pytest.mark.parametrize("operator", ["matmul", "replicated_matmul", *PARALLEL])
def test_any_subset_of_gradients(operator: str, wanted: int) -> None:
    values = numbers(1, 16, 24), numbers(2, 24, 32), numbers(3, 32)
    some = [x.clone().requires_grad_(bool(wanted >> i & 1)) for i, x in enumerate(values)]
    every = [x.clone().requires_grad_() for x in values]
    op = getattr(torch.ops.pk, operator)
    for activation in ("none", "relu", "silu"):
        op(*some, activation).sum().backward()
        op(*every, activation).sum().backward()
    for i, (x, y) in enumerate(zip(some, every, strict=True)):
        if wanted >> i & 1:
            assert torch.equal(x.grad, y.grad)
        else:
            assert x.grad is None


@pytest.mark.parametrize(("m", "k", "n"), [(0, 16, 8), (8, 0, 16), (8, 16, 0)])
@pytest.mark.parametrize("operator", ["matmul", *PARALLEL])
def test_empty(operator: str, m: int, k: int, n: int) -> None:
    a, b = numbers(1, m, k).requires_grad_(), numbers(2, k, n).requires_grad_()
    bias = numbers(3, n).requires_grad_()
    getattr(pk.ops, operator)(a, b, bias=bias).sum().backward()
    for x, want in ((a, torch.zeros(m, k)), (b, torch.zeros(k, n)), (bias, torch.full((n,), float(m)))):
        assert x.grad is not None
        assert torch.equal(x.grad.float(), want)


def test_a_width_that_only_columns_can_have() -> None:
    """The gradient of a transposed operand lies as the operand does, so that TMA can store it too."""
    a, b = laid(numbers(1, 16, 5), transposed=True), laid(numbers(2, 5, 24), transposed=False)
    pk.ops.matmul(a, b).backward(g := numbers(3, 16, 24))
    assert a.grad is not None
    assert b.grad is not None
    close(a.grad, g.double() @ b.double().T)
    close(b.grad, a.double().T @ g.double())


def test_dtypes() -> None:
    a, b = (numbers(s, 16, 16, dtype=torch.float16).requires_grad_() for s in (1, 2))
    bias = numbers(3, 1, dtype=torch.float32).requires_grad_()
    y = pk.ops.matmul(a, b, bias=bias, out_dtype=torch.float32)
    assert y.dtype == torch.float32
    y.backward(g := numbers(4, 16, 16, dtype=torch.float32))
    for x, want in ((a, g.double() @ b.double().T), (b, a.double().T @ g.double()), (bias, g.double().sum()[None])):
        assert x.grad is not None
        assert x.grad.dtype == x.dtype
        close(x.grad, want)


def test_second_derivatives() -> None:
    a, b = numbers(1, 16, 24).requires_grad_(), numbers(2, 24, 32).requires_grad_()
    (da,) = torch.autograd.grad(pk.ops.matmul(a, b).float().pow(2).sum(), a, create_graph=True)
    (got,) = torch.autograd.grad(da.float().sum(), b)
    A, B = a.detach().double(), b.detach().double().requires_grad_()
    A.requires_grad_()
    (dA,) = torch.autograd.grad((A @ B).pow(2).sum(), A, create_graph=True)
    close(got, torch.autograd.grad(dA.sum(), B)[0], roundings=8)


@pytest.mark.parametrize("operator", ["replicated_matmul", "all_gather_matmul_saving", *PARALLEL])
def test_no_second_derivatives_across_ranks(operator: str) -> None:
    a = numbers(1, 16, 24).requires_grad_()
    y = getattr(torch.ops.pk, operator)(a, numbers(2, 24, 32))
    y = y[0] if isinstance(y, tuple) else y
    with pytest.raises(errors.ArgumentError, match=r"has no second derivative"):
        torch.autograd.grad(y.sum(), a, create_graph=True)


# -------------------------------------------------------------------------------------------------------- many ranks
def _rank(rank: int, p: dict[str, Any]) -> list[torch.Tensor]:
    world, operator = p["world"], p["operator"]
    own = rank if operator != "matmul_all_reduce" else 0
    rows = p["rows"] if operator == "all_gather_matmul" else p["rows"] * world
    a = laid(numbers(10 * p["seed"] + rank, rows, p["k"]), False)
    b = laid(numbers(10 * p["seed"] + 100 + rank, p["k"], p["n"]), p["b_transposed"])
    bias = numbers(p["seed"] + 200 + (rank if operator == "all_gather_matmul" else 0), p["n"]).requires_grad_()
    if p["through"] == "operator":
        y = getattr(torch.ops.pk, operator)(a, b, bias, p["activation"] or "none")
    else:
        saved = {"save_gathered": p["saved"]} if operator == "all_gather_matmul" else {}
        y = getattr(pk.ops, operator)(a, b, bias=bias, activation=p["activation"], **saved)
    g = numbers(p["seed"] + 300 + own, *y.shape)
    y.backward(g)
    return [x.detach() for x in (a, b, bias, g, y, a.grad, b.grad, bias.grad)]  # type: ignore[union-attr]


def _check(p: dict[str, Any], ranks: list[list[torch.Tensor]]) -> None:
    a, b, bias = ([r[i].double().requires_grad_() for r in ranks] for i in range(3))
    g = [r[3].double() for r in ranks]
    y = [r[4] for r in ranks]
    if p["operator"] == "all_gather_matmul":
        zs = [torch.cat(a) @ w + c for w, c in zip(b, bias, strict=True)]
    else:
        z = sum(x @ w for x, w in zip(a, b, strict=True)) + bias[0]
        zs = list(z.chunk(p["world"])) if p["operator"] == "matmul_reduce_scatter" else [z]
    want = [activated(p["activation"], z, result) for z, result in zip(zs, y, strict=False)]
    torch.autograd.backward(want, g[: len(want)])
    for r, (*_, result, grad_a, grad_b, grad_bias) in enumerate(ranks):
        close(result, want[r % len(want)])
        close(grad_a, a[r].grad, roundings=6)
        close(grad_b, b[r].grad, roundings=6)
        close(grad_bias, bias[r if p["operator"] == "all_gather_matmul" else 0].grad, roundings=6)


def problem(operator: str, world: int, seed: int) -> dict[str, Any]:
    rng = random.Random(f"{operator} {world} {seed}")
    return {
        "operator": operator, "world": world, "seed": seed, "rows": rng.choice([1, 7, 16, rng.randrange(1, 80)]),
        "k": 8 * rng.randrange(1, 20), "n": 8 * rng.randrange(1, 20), "b_transposed": rng.random() < 0.5,
        "activation": rng.choice(list(FUNCTIONS)), "saved": rng.random() < 0.5,
        "through": rng.choice(["function", "operator"]),
    }  # fmt: skip


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("operator", PARALLEL)
def test_tensor_parallel(operator: str, world: int) -> None:
    for seed in range(1 if world == 8 else 4):
        p = problem(operator, world, seed)
        _check(p, pk.spawn(_rank, world, "sim", (p,)))


def _replicated(rank: int) -> list[torch.Tensor]:
    a, b = numbers(1, 16, 24).requires_grad_(), numbers(2 + rank, 24, 32).requires_grad_()
    y = torch.ops.pk.replicated_matmul(a, b)
    g = numbers(10 + rank, 16, 32)
    y.backward(g)
    return [x.detach() for x in (a, b, g, y, a.grad, b.grad)]  # type: ignore[union-attr]


def test_replicated() -> None:
    ranks = pk.spawn(_replicated, 3, "sim")
    whole = sum(g.double() @ b.double().T for _, b, g, *_ in ranks)
    for a, b, g, y, grad_a, grad_b in ranks:
        close(y, a.double() @ b.double())
        close(grad_a, whole)
        close(grad_b, a.double().T @ g.double())
