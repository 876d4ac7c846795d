"""mma in all its forms, private tiles, flash attention and ring attention on a GPU, against float64."""

from __future__ import annotations

import pytest
import torch

import pk
from tests.kernels import relative_error
from tests.tensor_core import FORMS, Form, run_gradients, run_private, run_product, run_recurrence
from tests.test_attention import SHAPES, TILES, Shape, check, ring

pytestmark = pytest.mark.gpu(1)
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def _product(rank: int, form: Form) -> Pairs:
    sizes = [(form.BM + 40, form.BN + 16, 2 * form.BK + 16), (3 * form.BM, 2 * form.BN, 5 * form.BK), (8, 8, 16)]
    return [run_product(form, *size, device=str(pk.device())) for size in sizes]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_product(form: Form) -> None:
    (pairs,) = pk.spawn(_product, 1, "cuda", (form,))
    for got, want in pairs:
        # The tensor core adds the products of 8-bit floats with fewer bits than float32.
        assert relative_error(got, want) <= form.limit, relative_error(got, want)


def _others(rank: int) -> dict[str, Pairs]:
    device, found = str(pk.device()), {}
    for dtype in (torch.bfloat16, torch.float16):
        for form in ("stored", "transposed", "loaded"):
            for out in (torch.float32, torch.bfloat16):
                found[f"private {form} {dtype} {out}"] = run_private(form, dtype, out, device)
        found[f"recurrence {dtype}"] = [run_recurrence(dtype, device)]
        found[f"gradients {dtype}"] = run_gradients(dtype, device)
    return found


def test_private_tiles_and_arithmetic_between_mmas() -> None:
    (found,) = pk.spawn(_others, 1, "cuda")
    for name, pairs in found.items():
        for got, want in pairs:
            limit = 1e-2 if name.endswith("float16 torch.bfloat16") else 1e-3
            assert relative_error(got, want) <= limit, name


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 8, 2, 1000, 1000, 128)], ids=str)
def test_attention(shape: Shape, causal: bool) -> None:
    check(shape, causal, backend="cuda")


@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_attention_tiles(tiles: dict[str, int]) -> None:
    check((1, 2, 1, 250, 250, 64), True, backend="cuda", **tiles)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_ring_attention(world: int, causal: bool) -> None:
    """Ranks share the GPU."""
    assert ring(world, (4, 2, 200, 128), causal, "cuda") <= 5e-3
