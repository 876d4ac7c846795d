"""``mma`` in all its forms on the simulator, against float64."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import relative_error
from tests.tensor_core import FORMS, Form, run_gradients, run_private, run_product, run_recurrence

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_product(form: Form) -> None:
    """Tails in M, N and K; K over several stages."""
    got, want = run_product(form, form.BM + 40, form.BN + 16, 2 * form.BK + 16)
    assert relative_error(got, want) <= form.limit


@DTYPES
@pytest.mark.parametrize("form", ["stored", "transposed", "loaded"])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_private_tiles(form: str, dtype: torch.dtype, out: torch.dtype) -> None:
    for got, want in run_private(form, dtype, out):
        assert relative_error(got, want) <= (1e-5 if out == torch.float32 else 1e-2)


@DTYPES
def test_arithmetic_between_mmas(dtype: torch.dtype) -> None:
    got, want = run_recurrence(dtype)
    assert relative_error(got, want) <= 1e-3


@DTYPES
def test_several_accumulators(dtype: torch.dtype) -> None:
    for got, want in run_gradients(dtype):
        assert relative_error(got, want) <= 1e-3
