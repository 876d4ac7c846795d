"""What all ranks must have alike in a call that meets: enforced, in the operator's words, and without rows too."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import pk
import pk.ops
from pk import errors
from pk.ops import collective_kernels, few_rows, parallel_kernels
from pk.ops.fused import OPERATORS
from pk.runtime.group import current
from tests.ops.choose_jobs import numbers

AG, RS, AR = OPERATORS
FP8 = torch.float8_e4m3fn
# What rank 1 passes in another way than the others: shapes of a and b, how b lies, options.
OTHERS: dict[str, dict[str, Any]] = {
    "rows": {"a": (24, 32)}, "no rows": {"a": (0, 32)}, "k": {"a": (12, 16), "b": (16, 48)}, "n": {"b": (32, 40)},
    "no columns": {"b": (32, 0)}, "layout": {"transposed": True}, "dtype": {"dtype": torch.float16},
    "bias": {"bias": torch.ones(48).bfloat16()}, "activation": {"activation": "relu"},
    "out_dtype": {"out_dtype": torch.float32}, "scale_a": {"scale_a": torch.ones(1)},
    "deterministic": {"deterministic": True}, "config": {"config": "c128x64"}, "library": {"config": "library"},
}  # fmt: skip


def called(operator: str, a: Any = (12, 32), b: Any = (32, 48), transposed: bool = False,
           dtype: torch.dtype = torch.bfloat16, **options: Any) -> torch.Tensor:  # fmt: skip
    x, w = numbers(1, *a).to(dtype), numbers(2, *b).to(dtype)
    return getattr(pk.ops, operator)(x, w.T.contiguous().T if transposed else w, **options)


def _other(rank: int, operator: str, known: bool) -> list[str]:
    """What every rank is told of each difference; with ``known``, all have made both calls before."""
    told = []
    for name, other in OTHERS.items():
        calls = {} if rank != 1 else other
        for given in ({}, other) if known else ():
            called(operator, **given)
        try:
            called(operator, **calls)
            told.append(f"{name}: nothing")
        except errors.RanksDisagree as error:
            told.append(str(error))
        current().barrier("all have been told")
    return told


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_difference_is_told_to_every_rank(operator: str, known: bool) -> None:
    ranks = pk.spawn(_other, 3, "sim", (operator, known))
    for i, name in enumerate(OTHERS):
        if known and name == "deterministic":
            continue  # it changes what may be chosen, and in the simulator nothing is: the launch is the same
        for told in ranks:
            assert f"rank 1: pk.ops.{operator}(a (" in told[i], (name, told[i])
            assert f"ranks 0 and 2: pk.ops.{operator}(a (" in told[i]
            assert "test_alike.py:" in told[i], "the line"
            for internal in ("signals", "scratch", "workspace", "launch of"):
                assert internal not in told[i], (name, told[i])


WORDS = """the ranks make different calls at the same point:
  rank 0: pk.ops.all_gather_matmul(a (0, 32) bfloat16, b (32, 48) bfloat16 transposed, out_dtype=float32, comm_sms=2)
  rank 1: pk.ops.all_gather_matmul(a (8, 32) bfloat16, b (32, 48) bfloat16, bias float32, activation='silu')
  Pass the same shapes, dtypes, layouts and options on every rank."""


def test_the_words() -> None:
    def run(rank: int) -> str:
        w, rows, options = numbers(2, 32, 48), 8, {"bias": torch.ones(48), "activation": "silu"}
        if rank == 0:
            w, rows, options = w.T.contiguous().T, 0, {"out_dtype": torch.float32, "comm_sms": 2}
        with pytest.raises(errors.RanksDisagree) as caught:
            pk.ops.all_gather_matmul(numbers(1, rows, 32), w, **options)
        return re.sub(r" at \S+:\d+", "", str(caught.value))

    assert pk.spawn(run, 2, "sim") == [WORDS] * 2


def _calls(rank: int) -> list[str]:
    """A rank without rows, another operator, and calls that all have made before."""
    found = []
    for warm in (False, True):
        for operator in OPERATORS:
            for odd in ({"a": (0, 32)}, {"b": (32, 0)}):
                if warm:
                    called(operator)
                with pytest.raises(errors.RanksDisagree) as caught:
                    called(operator, **(odd if rank == 0 else {}))
                found.append(str(caught.value))
    with pytest.raises(errors.RanksDisagree) as caught:
        called((AG, RS)[rank])
    return [*found, str(caught.value)]


@pytest.mark.parametrize("backend", ["sim", "sim-processes"])
def test_a_rank_without_rows(backend: str) -> None:
    first, second = pk.spawn(_calls, 2, backend)
    assert first == second
    for text, operator in zip(first, (*(AG, AG, RS, RS, AR, AR) * 2, AG), strict=True):
        assert f"rank 0: pk.ops.{operator}(a (" in text
    assert "rank 1: pk.ops.matmul_reduce_scatter(a (12, 32)" in first[-1]


def _gradients(rank: int, operator: str) -> str:
    """Only rank 0 wants the gradient of b: what is kept for it differs, or the backward pass waits for rank 1."""
    a, b = numbers(1, 12, 32).requires_grad_(), numbers(2, 32, 48).requires_grad_(rank == 0)
    with pytest.raises((errors.RanksDisagree, errors.PeerFailed)) as caught:
        getattr(pk.ops, operator)(a, b).sum().backward()
    return str(caught.value)


def test_gradients_that_one_rank_wants() -> None:
    for text in pk.spawn(_gradients, 2, "sim", (AG,)):
        assert "rank 0: pk.ops.all_gather_matmul(a (12, 32) bfloat16, b (32, 48) bfloat16, rows kept for" in text
    for text in pk.spawn(_gradients, 2, "sim", (RS,)):
        assert "rank 0: pk.ops.all_gather_matmul(" in text
        assert "rows kept for the backward pass" in text


def _symmetric(rank: int) -> str:
    out = pk.empty((12, 48), torch.bfloat16)
    with pytest.raises(errors.RanksDisagree) as caught:
        called(AR, out=out if rank else None)
    return str(caught.value)


def test_symmetric_memory_on_one_rank() -> None:
    for text in pk.spawn(_symmetric, 2, "sim"):
        assert "rank 1: pk.ops.matmul_all_reduce(a (12, 32) bfloat16, b (32, 48) bfloat16, out in symmetric" in text


def _alone(rank: int) -> None:
    if rank == 0:
        called(AG)


def test_a_rank_that_does_not_come() -> None:
    """The operator is named, whatever step of it waits."""
    with pytest.raises(errors.RankError) as caught:
        pk.spawn(_alone, 2, "sim")
    assert re.search(
        r"rank 1 has returned, so pk.ops.all_gather_matmul\(a \(12, 32\) bfloat16, b \(32, 48\) bfloat16\) at "
        r"\S+test_alike.py:\d+ cannot go on", str(caught.value.__cause__),
    )  # fmt: skip


def _questions(rank: int) -> list[str]:
    found = []
    a, b = numbers(1, 12, 32), numbers(2, 32, 48)
    for ask in (pk.ops.explain, pk.ops.tune):
        current().choices = None
        call = ask if rank == 0 else pk.ops.matmul_reduce_scatter
        with pytest.raises(errors.RanksDisagree) as caught:
            call(*([AR] if rank == 0 else []), a, b)
        found.append(str(caught.value))
    return found


def test_questions_are_named_too() -> None:
    for explain, tune in pk.spawn(_questions, 2, "sim"):
        assert "rank 0: pk.ops.explain(matmul_all_reduce) at" in explain
        assert "rank 0: pk.ops.tune of pk.ops.matmul_all_reduce(a (12, 32) bfloat16" in tune
        assert "rank 1: pk.ops.matmul_reduce_scatter(a (12, 32)" in explain


def test_kernels_of_the_operators_compare_all_shapes() -> None:
    """What a GPU compares at every launch, by a hash."""
    every = {
        n: k
        for m in (parallel_kernels, few_rows, collective_kernels)
        for n, k in vars(m).items()
        if isinstance(k, pk.Kernel)
    }
    assert len(every) == 8
    assert all(kernel.alike for kernel in every.values())


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_call_is_compared_once(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pk.ops import calls

    seen: list[int] = []
    kept = calls.compared

    def compared(group: Any, call: Any) -> None:
        seen.append(group.rank)
        kept(group, call)

    monkeypatch.setattr(calls, "compared", compared)

    def run(rank: int) -> None:
        for _ in range(3):
            called(operator)

    pk.spawn(run, 2, "sim")
    assert sorted(seen) == [0, 1]
