"""What every operator says to a caller's mistake: what is wrong, with the caller's names, and what to do.

All are :class:`pk.ArgumentError`, raised before anything is launched; those of tensors are the same through
``torch.ops.pk`` and in a trace.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pk
import pk.ops
from pk import errors
from pk.ops.model import CONFIGS
from tests.ops.random_problems import BF16, F32, FP8, PARALLEL

PUBLIC = ("matmul", *PARALLEL)
META = torch.device("meta")


def matrix(*shape: int, dtype: torch.dtype = BF16, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def odd(*shape: int) -> torch.Tensor:
    """At an address that is no multiple of 16."""
    return matrix(1 + shape[0] * shape[1])[1:].view(shape)


A, B = matrix(16, 32), matrix(32, 48, seed=2)
A8, B8 = A.to(FP8), B.T.contiguous().to(FP8).T
TMA = "TMA needs a multiple of 16 bytes"
# name: (a, b, options), what is said, what to do; {op} is the operator.  A few say other things for `a` of matmul.
Mistake = tuple[Any, Any, dict[str, Any], str, str]
VALUES: dict[str, Mistake] = {
    "a is None": (None, B, {}, "`a` of pk.ops.{op} is NoneType, and must be a torch.Tensor", "torch.as_tensor(a)"),
    "b of numpy": (A, B.float().numpy(), {}, "`b` of pk.ops.{op} is ndarray", "Pass `torch.from_numpy(b)`"),
    "bias is a list": (A, B, {"bias": [1.0]}, "`bias` of pk.ops.{op} is list", "torch.as_tensor(bias)"),
    "scale is a number": (A, B, {"scale_a": 0.5}, "`scale_a` of pk.ops.{op} is float", "torch.as_tensor(scale_a)"),
    "a is a vector": (A[0], B, {}, "`a` has shape (32,), not 2 dimensions", "Pass a matrix"),
    "b is a batch": (A, B[None], {}, "`b` has shape (1, 32, 48), not 2 dimensions", "Pass a matrix"),
    "float32": (A.float(), B.float(), {}, "`a` is torch.float32, and must be torch.bfloat16", "`a.bfloat16()`"),
    "integers": (A.int(), B.int(), {}, "`a` is torch.int32, and must be torch.bfloat16", "`a.bfloat16()`"),
    "e5m2": (A.to(torch.float8_e5m2), B, {}, "`a` is torch.float8_e5m2, and must be", "`a.bfloat16()`"),
    "two dtypes": (A, B.half(), {}, "`a` is torch.bfloat16 and `b` is torch.float16", "Cast one"),
    "inner extents": (A, B[:16], {}, "the inner extents 32 and 16 differ", "a is (M, K) and b is (K, N)"),
    "activation": (A, B, {"activation": "tanh"}, "activation='tanh' does not exist", "'gelu_tanh', 'silu'; None or"),
    "bias too short": (A, B, {"bias": matrix(47)}, "`bias` has shape (47,), and must have 1 or 48 elements", ""),
    "bias of rows": (A, B, {"bias": matrix(48, 1)}, "`bias` has shape (48, 1), and must have (48,) or (1, 48)", ""),
    "bias float64": (A, B, {"bias": matrix(48).double()}, "`bias` is torch.float64, and must be", "`bias.float()`"),
    "bias integers": (A, B, {"bias": matrix(48).int()}, "`bias` is torch.int32, and must be", "`bias.float()`"),
    "scale_a short": (A, B, {"scale_a": torch.ones(7)}, "`scale_a` has shape (7,), and must have 1 or 16", ""),
    "scale_a of columns": (A, B, {"scale_a": torch.ones(1, 16)}, "`scale_a` has shape (1, 16), and must", "(16, 1)"),
    "scale_b of rows": (A, B, {"scale_b": torch.ones(48, 1)}, "`scale_b` has shape (48, 1), and must", "(1, 48)"),
    "scale dtype": (A, B, {"scale_b": matrix(1, 48)}, "`scale_b` is torch.bfloat16, and must be", "scale_b.float()"),
    "out_dtype": (A, B, {"out_dtype": torch.int32}, "the result cannot be torch.int32", "out_dtype is one of"),
    "out_dtype float8": (A, B, {"out_dtype": FP8}, f"the result cannot be {FP8}", "out_dtype is one of"),
}
NUMBER = "must be a number of SMs"
MEMORY: dict[str, Mistake] = {
    "a on meta": (A.to(META), B, {}, "`a` of pk.ops.{op} is on meta", "torch.empty_like(a, device=pk.device())"),
    "bias on meta": (A, B, {"bias": matrix(48).to(META)}, "`bias` of pk.ops.{op} is on meta", "torch.empty_like(bias"),
    "sparse": (A.float().to_sparse(), B, {}, "`a` of pk.ops.{op} is a tensor of layout torch.sparse_coo", "to_dense()"),
    "K": (matrix(16, 5), matrix(5, 48), {}, f"5 elements = 10 bytes, and {TMA}", "Pad it to a multiple of 8 elements"),
    "N": (A, matrix(5, 32).T, {}, "the result is (16, 5) torch.bfloat16: its rows are 10 bytes", "multiple of 8"),
    "K of float8": (matrix(16, 40).to(FP8), matrix(48, 40).to(FP8).T, {}, "40 elements = 40 bytes", "multiple of 16"),
    "b strided": (A, matrix(64, 96)[::2, ::2], {}, "`b` has strides (192, 2): neither its rows", "`b.contiguous()`"),
    "b at an odd address": (A, odd(32, 48), {}, "2 bytes past a multiple of 16", "pass a copy: `b.clone()`"),
    "b's rows apart": (A, matrix(32, 50)[:, :48], {}, f"50 elements = 100 bytes, and {TMA}", "Pad it to a multiple"),
    "b expanded": (A, matrix(1, 48).expand(32, 48), {}, "`b` of shape (32, 48) and strides (0, 1)", "`b.contiguous()`"),
    "b of float8": (A8, B.to(FP8), {}, "`b` of torch.float8_e4m3fn is not contiguous along K", "`b.T.contiguous().T`"),
    "out is a list": (A, B, {"out": [1]}, "`out` of pk.ops.{op} is list, and must be a torch.Tensor", "leave it away"),
    "out on meta": (A, B, {"out": matrix(16, 48).to(META)}, "`out` of pk.ops.{op} is on meta", "torch.empty_like(out"),
    "out of a shape": (A, B, {"out": matrix(16, 40)}, "`out` is (16, 40) torch.bfloat16", "torch.empty((16, 48)"),
    "out one by one": (A, B, {"out": matrix(48)}, "`out` is (48,) torch.bfloat16, and the result is", "(16, 48)"),
    "out of a dtype": (A, B, {"out": matrix(16, 48), "out_dtype": F32}, "the result is (16, 48) torch.float32", ""),
    "out by columns": (A, B, {"out": matrix(48, 16).T}, "`out` has strides (1, 16), and its rows must be", "empty"),
    "out expanded": (A, B, {"out": matrix(1, 48).expand(16, 48)}, "overlaps itself", "Pass memory of its own"),
    "out requires a gradient": (A, B, {"out": matrix(16, 48).requires_grad_()}, "requires a gradient", "out.detach()"),
}  # fmt: skip
OPTIONS: dict[str, Mistake] = {
    "activation of a kind": (A, B, {"activation": ["relu"]}, "activation=['relu'] does not exist", "'relu', 'gelu'"),
    "config of numbers": (A, B, {"config": torch.ones(3)}, "config=Tensor of shape (3,)", "CONFIGS"),
    "out_dtype of numbers": (A, B, {"out_dtype": torch.ones(3)}, "the result cannot be Tensor of", "torch.float32"),
    "out_dtype's name": (A, B, {"out_dtype": "float32"}, "cannot be 'float32', which is str", "torch.float32"),
    "config": (A, B, {"config": "fast"}, "config='fast' is no configuration", "There are c128x256"),
    "config of a kind": (A, B, {"config": 3}, "config=3 is int, and must be a name or one of", "CONFIGS"),
    "group": (A, B, {"group": 7}, "group=7 is neither a pk group nor a process group", "Pass a torch.distributed"),
    "group's name": (A, B, {"group": "tp"}, "group='tp' is neither a pk group nor a", "group.group_name"),
}  # fmt: skip
ONLY_PARALLEL: dict[str, Mistake] = {
    "both": (A, B, {"config": "library", "deterministic": True}, 'config="library" does not fix', "one of them"),
    "deterministic": (A, B, {"deterministic": "yes"}, "deterministic='yes' is str, and must be True or False", ""),
    "deterministic 1": (A, B, {"deterministic": 1}, "deterministic=1 is int, and must be True or False", ""),
    "comm_sms": (A, B, {"comm_sms": "8"}, f"comm_sms='8' is str, and {NUMBER}", "a whole number"),
    "a bool": (A, B, {"comm_sms": True}, f"comm_sms=True is bool, and {NUMBER}", "a whole number"),
    "a fraction": (A, B, {"comm_sms": 2.5}, f"comm_sms=2.5 is float, and {NUMBER}", "a whole number"),
    "less": (A, B, {"comm_sms": -1}, "comm_sms=-1 must be at least 0", "a larger number"),
    "clusters": (A, B, {"config": CONFIGS["c128x256.b"]}, "'c128x256.b' has clusters or parts of K", "c128x192"),
}  # fmt: skip
ONLY_MATMUL: dict[str, Mistake] = {
    "sms": (A, B, {"sms": "x"}, f"sms='x' is str, and {NUMBER}", "a whole number"),
    "a bool": (A, B, {"sms": True}, f"sms=True is bool, and {NUMBER}", "a whole number"),
    "a fraction": (A, B, {"sms": 2.5}, f"sms=2.5 is float, and {NUMBER}", "a whole number"),
    "none": (A, B, {"sms": 0}, "sms=0 must be at least 1", "a larger number"),
    "more": (A, B, {"sms": 10**6}, "sms=1000000, and this rank has 1024 for it", "a smaller number"),
    "both": (A, B, {"config": "library", "sms": 4}, 'config="library" takes the SMs that it likes', "one of them"),
}  # fmt: skip
ONLY_SMS_ASIDE: dict[str, Mistake] = {
    "more": (A, B, {"comm_sms": 10**6}, "comm_sms=1000000, and this rank has 131 for it", "a smaller number"),
    "both": (A, B, {"config": "library", "comm_sms": 4}, 'config="library" takes the SMs that it likes', "one of them"),
}  # fmt: skip


def says(call: Callable[[], Any], what: str, advice: str) -> str:
    """The message."""
    with pytest.raises(errors.ArgumentError, match=re.escape(what)) as caught:
        call()
    text = str(caught.value)
    assert advice in text
    assert len(text.splitlines()[0]) < 250, "too long to read"
    return text


@pytest.mark.parametrize("operator", PUBLIC)
@pytest.mark.parametrize("mistake", [*VALUES, *MEMORY, *OPTIONS])
def test_functions(operator: str, mistake: str) -> None:
    a, b, options, what, advice = (VALUES | MEMORY | OPTIONS)[mistake]
    what = what.replace("{op}", operator)
    text = says(lambda: getattr(pk.ops, operator)(a, b, **options), what, advice)
    assert "`c`" not in text, "a name of the kernel's"
    assert "`x`" not in text
    assert "col_bias" not in text


def both_ways(operator: str, mistake: Mistake) -> None:
    """Straight to the kernel, through torch, and of matrices without rows."""
    a, b, options, what, advice = mistake
    w = b.clone().requires_grad_()
    for given in ((a, b), (a, w), (a[:0], b)):
        says(lambda given=given: getattr(pk.ops, operator)(*given, **options), what, advice)  # type: ignore[misc]


@pytest.mark.parametrize("operator", PARALLEL)
@pytest.mark.parametrize("mistake", ONLY_PARALLEL)
def test_parallel_functions(operator: str, mistake: str) -> None:
    if mistake == "clusters":  # where torch looks on it goes by its name, which is none of these operators'
        a, b, options, what, advice = ONLY_PARALLEL[mistake]
        says(lambda: getattr(pk.ops, operator)(a, b, **options), what, advice)
        return
    both_ways(operator, ONLY_PARALLEL[mistake])


@pytest.mark.parametrize("mistake", ONLY_MATMUL)
def test_sms(mistake: str) -> None:
    both_ways("matmul", ONLY_MATMUL[mistake])


@pytest.mark.parametrize("operator", ["all_gather_matmul", "matmul_reduce_scatter"])
@pytest.mark.parametrize("mistake", ONLY_SMS_ASIDE)
def test_comm_sms(operator: str, mistake: str) -> None:
    both_ways(operator, ONLY_SMS_ASIDE[mistake])


def test_an_option_without_a_meaning() -> None:
    """An all-reduce sets no SM aside in either direction; the reduce-scatter's backward pass does."""
    both_ways("matmul_all_reduce", (A, B, {"comm_sms": 2}, "pk.ops.matmul_all_reduce sets no SM aside", "Leave it"))
    pk.ops.matmul_reduce_scatter(A, B, comm_sms=2)
    says(lambda: pk.ops.all_gather_matmul(A, B, save_gathered="no"), "save_gathered='no' is str", "True or False")
    w = B.clone().requires_grad_()
    for b in (B, w):
        with pytest.raises(TypeError, match="unexpected keyword argument 'save_gathered'"):
            pk.ops.matmul(A, b, save_gathered=True)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="unexpected keyword argument 'sms'"):
            pk.ops.all_gather_matmul(A, b, sms=2)  # type: ignore[call-arg]
    own = dataclasses.replace(CONFIGS["c128x64"], stages=2)
    assert pk.ops.matmul(A, B, config=own).shape == (16, 48)
    says(lambda: pk.ops.matmul(A, w, config=own), "none of `pk.ops.model.CONFIGS`", "travel by name")


@pytest.mark.parametrize("operator", PUBLIC)
@pytest.mark.parametrize("mistake", ["a is None", "b of numpy", "bias is a list", "scale is a number", "out is a list"])
def test_what_is_no_tensor_where_a_gradient_is_wanted(operator: str, mistake: str) -> None:
    a, b, options, what, advice = (VALUES | MEMORY)[mistake]
    given = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in (a, b)]
    says(lambda: getattr(pk.ops, operator)(*given, **options), what.replace("{op}", operator), advice)


QUESTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "sms": ({"sms": "x"}, "sms='x' is str"),
    "count": ({"count": "x"}, "count='x' is str, and must be a number of rows"),
    "count 0": ({"count": 0}, "count=0 must be at least 1"),
    "comm_sms": ({"comm_sms": True}, "comm_sms=True is bool"),
    "all": ({"comm_sms": 132, "world_size": 2}, "comm_sms=132 leaves none of 132 SMs to compute"),
    "bias": ({"bias": 1.0}, "`bias` of pk.ops.explain is float"),
    "two worlds": ({"world_size": 2, "group": "x"}, "both say how many ranks"),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_explain(question: str) -> None:
    options, what = QUESTIONS[question]
    says(lambda: pk.ops.explain("all_gather_matmul", A, B, **options), what, "")


def test_explain_and_tune() -> None:
    for options in ({"world_size": 2}, {"deterministic": True}, {"comm_sms": 2}):
        says(lambda o=options: pk.ops.explain(A, B, **o), "has no such choice", "name another operator")  # type: ignore[misc]
    says(lambda: pk.ops.explain(A, B, B), "got three tensors", "an operator")
    says(lambda: pk.ops.explain("matmul", A[:0], B), "empty matrices takes no time", "elements")
    assert "4 SMs" in pk.ops.explain(A, B, sms=4)
    for name in ("limit", "repeats", "rounds"):
        says(lambda n=name: pk.ops.tune("matmul_all_reduce", A, B, **{n: 1.5}), f"{name}=1.5 is float", "")  # type: ignore[misc]
    says(lambda: pk.ops.tune("matmul_all_reduce", A, B, save="yes"), "save='yes' is str", "True, False or None")
    says(lambda: pk.ops.tune("matmul_all_reduce", A, B, bias=[1]), "`bias` of pk.ops.tune is list", "")


def _tensors_only(mistake: str) -> bool:
    a, b, *_ = VALUES[mistake]
    return all(isinstance(x, torch.Tensor) for x in (a, b)) and "bias is" not in mistake and "scale is" not in mistake


@pytest.mark.parametrize("operator", PUBLIC)
@pytest.mark.parametrize("mistake", [name for name in VALUES if _tensors_only(name)])
def test_operators_and_traces(operator: str, mistake: str) -> None:
    """The same words where memory is there, and where it is not."""
    a, b, options, what, advice = VALUES[mistake]
    op = getattr(torch.ops.pk, operator)
    says(lambda: op(a, b, **options), what, advice)
    fake = {k: v.to(META) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    says(lambda: op(a.to(META), b.to(META), **fake), what, advice)


@pytest.mark.parametrize("operator", PUBLIC)
def test_a_mistake_where_a_gradient_is_wanted(operator: str) -> None:
    fn, w = getattr(pk.ops, operator), B.clone().requires_grad_()
    for mistake in ("float32", "inner extents", "bias too short", "bias float64", "out_dtype"):
        a, b, options, what, advice = VALUES[mistake]
        says(lambda a=a, b=b, o=options: fn(a, b.detach().clone().requires_grad_(), **o), what, advice)  # type: ignore[misc]
    says(lambda: fn(A, w, out=matrix(16, 48)), "with `out` has no backward pass", "Leave `out` away")
    says(lambda: fn(A8, B8, bias=matrix(48).requires_grad_()), f"of {FP8} has no backward pass", "torch.no_grad()")
    says(lambda: fn(A, w, scale_b=torch.ones(1)), "with `scale_b` has no backward pass", "Multiply an operand")
    narrow = matrix(12, 32).requires_grad_()
    says(lambda: fn(A, narrow.T, out_dtype=F32), f"pk.ops.{operator} of 12 columns has no backward pass", "Pad N")


@pytest.mark.parametrize("operator", PUBLIC)
def test_out_is_not_what_is_read(operator: str) -> None:
    fn, square = getattr(pk.ops, operator), matrix(32, 32)
    a = matrix(32, 32, seed=3)
    says(lambda: fn(a, square, out=a), "`out` of pk.ops." + operator + " shares memory with an operand", "of its own")
    says(lambda: fn(a, square, out=square), "shares memory with an operand", "of its own")
    sides = matrix(32, 64)  # side by side in one matrix, they share nothing
    left, right = sides[:, :32], sides[:, 32:]
    want = fn(left.clone(), square)
    assert torch.equal(fn(left, square, out=right), want)
    says(lambda: fn(left, square, out=sides[:, 8:40]), "shares memory with an operand", "of its own")
    says(lambda: fn(sides[:, 8:40], square, out=left), "shares memory with an operand", "of its own")
    below = matrix(64, 32)
    assert torch.equal(fn(below[32:], square, out=below[:32]), fn(below[32:].clone(), square))


# -------------------------------------------------------------------------------------------------- across the ranks
def _shares(rank: int) -> None:
    pk.ops.matmul_reduce_scatter(matrix(16, 32), B)


def _one_wrong(rank: int, operator: str) -> None:
    getattr(pk.ops, operator)(matrix(18, 32), B if rank else B.float())


def test_rows_that_ranks_cannot_share() -> None:
    with pytest.raises(errors.RankError) as caught:
        pk.spawn(_shares, 3, "sim")
    assert "`a` has 16 rows, which 3 ranks cannot share equally.\n  Pad M to 18." in str(caught.value.__cause__)
    with pytest.raises(errors.RankError, match="cannot share equally"):
        pk.spawn(_shares_meta, 3, "sim")


def _shares_meta(rank: int) -> None:
    torch.ops.pk.matmul_reduce_scatter(matrix(16, 32).to(META), B.to(META))


@pytest.mark.parametrize("operator", PARALLEL)
def test_a_mistake_of_one_rank(operator: str) -> None:
    """It says so, and none waits for ever."""
    with pytest.raises(errors.RankError, match=r"`b` is torch\.float32") as caught:
        pk.spawn(_one_wrong, 3, "sim", (operator,))
    assert "rank 0" in str(caught.value)
