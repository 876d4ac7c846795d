"""``pk.ops.explain`` of collectives: what it says is what is launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pk
from pk.ops import collective_plans, explain

X = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("operator", ["all_reduce", pk.ops.all_gather, "pk.ops.reduce_scatter", "all_to_all"])
def test_the_kernel_is_the_one_launched(operator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[str, int]] = []

    class Recorder:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda **given: launched.append((name, given["BN"]))

    monkeypatch.setattr(collective_plans, "collective_kernels", Recorder())
    call = operator if callable(operator) else getattr(pk.ops, operator.removeprefix("pk.ops."))
    x = torch.zeros(66, 48)

    def rank_main(rank: int) -> None:
        call(x)

    pk.spawn(rank_main, 3, "sim")
    assert len(set(launched)) == 1
    kernel, cols = launched[0]
    text = explain(operator, x, world_size=3)
    assert f"kernel {kernel}: tiles of" in text
    assert f" x {cols} " in text


def test_text() -> None:
    text = explain("all_reduce", X, world_size=8)
    assert text.startswith("all_reduce of (4096, 4096) bfloat16 on 8 ranks, 132 SMs\n  at least ")
    assert "kernel sum_and_share" in text and "two hops" in text
    assert "58.7 MB" in text  # a share sent to seven, and its sum again
    assert "one hop" in explain("all_reduce", X, world_size=2)
    assert "a copy" in explain("all_gather", X, world_size=1)
    assert "padded copies" in explain("all_gather", X[:, :3].bool(), dim=1, world_size=2)
    assert "on 2 ranks" in pk.spawn(_on_a_group, 2, "sim")[1]


def _on_a_group(rank: int) -> str:
    return explain(pk.ops.all_to_all, X, split_dim=1, concat_dim=-2)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"operator": "all_reduce", "dim": 0}, "`dim` is no dimension of all_reduce"),
        ({"operator": "all_gather", "dim": 7}, "dim=7"),
        ({"operator": "reduce_scatter", "world_size": 3}, "3 ranks cannot share"),
        ({"operator": "all_reduce", "a": X.bool()}, "sums are of"),
        ({"operator": "all_reduce", "activation": "silu"}, "activation='silu': all_reduce has no such option"),
        ({"operator": "all_gather", "b": X}, "needs one tensor for all_gather"),
        ({"operator": "all_gather", "a": None}, "needs one tensor for all_gather"),
        ({"operator": "matmul", "b": X, "dim": 1}, "dim=1: matmul has no such option"),
        ({"operator": "all_gather", "sms": "x"}, "sms='x' is str"),
        ({"operator": "all_gather", "sms": 0}, "sms=0 must be at least 1"),
        ({"operator": "all_gather", "count": 0}, "count=0"),
        ({"operator": "all_gather", "world_size": 0}, "a group of 0 ranks"),
    ],
    ids=str,
)
def test_mistakes(given: dict[str, Any], says: str) -> None:
    with pytest.raises(pk.errors.ArgumentError) as caught:
        explain(**{"a": X, "world_size": 2, **given})
    assert says in str(caught.value)
