"""Flash attention: the example's kernel against float64 on the simulator."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import pk
from tests.kernels import relative_error

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def example(name: str) -> ModuleType:
    """The module of an example, whose file name is no identifier."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


Shape = tuple[int, int, int, int, int, int]


def check(shape: Shape, causal: bool, dtype: torch.dtype = torch.bfloat16, backend: str = "sim", **tiles: Any) -> None:
    """Attention of (batch, heads, kv heads, queries, keys, D): output to 16 bits, log-sum-exp to float32."""
    attention = example("06_attention")
    q, k, v = attention.operands(*shape, dtype)
    ((o, lse),) = pk.spawn(attention.run_rank, 1, backend, (q, k, v, causal, tiles))
    want, want_lse = attention.reference(q, k, v, causal)
    assert float((o.double() - want).norm() / want.norm()) <= 5e-3
    seen = torch.isfinite(want_lse)
    assert float((lse.double() - want_lse)[seen].abs().max()) <= 1e-4
    assert torch.equal(lse[~seen].double(), want_lse[~seen])  # a row that sees no key: -inf
    assert not o[~seen.expand_as(o)].any()


SHAPES = [
    (1, 2, 1, 128, 128, 128),
    (2, 2, 2, 200, 200, 128),  # tails in queries and keys
    (1, 4, 1, 72, 300, 64),  # more keys than queries, four heads on one of k and v
    (1, 3, 3, 300, 200, 64),  # more queries than keys: the first 100 rows see nothing when causal
]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(shape: Shape, causal: bool) -> None:
    check(shape, causal)


TILES = [{"BQ": 192, "WG": 3}, {"BQ": 64, "WG": 1}, {"KV": 64}, {"BQ": 192, "WG": 3, "KV": 96}]


@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_tile_sizes(tiles: dict[str, int]) -> None:
    check((1, 2, 1, 250, 250, 64), True, **tiles)


def test_float16() -> None:
    check((1, 2, 1, 200, 200, 128), True, torch.float16)


@pytest.mark.parametrize("options", [{"STAGGER": False}, {"DYNAMIC": False}], ids=str)
def test_options_change_nothing(options: dict[str, bool]) -> None:
    attention = example("06_attention")
    q, k, v = attention.operands(1, 2, 1, 300, 300, 64, torch.bfloat16)
    for got, want in zip(attention.run(q, k, v, True, **options), attention.run(q, k, v, True), strict=True):
        assert torch.equal(got, want)


def ring(world: int, sizes: tuple[int, int, int, int], causal: bool, backend: str, **tiles: int) -> float:
    """The largest relative error of a rank."""
    module = example("07_ring_attention")
    outputs = pk.spawn(module.run, world, backend, (world, sizes, torch.bfloat16, causal, tiles))
    expected = module.reference(*module.operands(world, *sizes, torch.bfloat16), causal)
    wanted = [module.mine(expected, rank, world) for rank in range(world)]
    return max(relative_error(got, want) for got, want in zip(outputs, wanted, strict=True))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_ring_attention(world: int, causal: bool) -> None:
    """Tails in queries and keys; two query heads on one of k and v."""
    assert ring(world, (4, 2, 136, 64), causal, "sim") <= 5e-3


@pytest.mark.parametrize("seed", range(6))
def test_ring_attention_under_other_schedules(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_SEED", str(seed))
    monkeypatch.setenv("PK_SIM_SMS", str(2 + seed))
    assert ring(4, (2, 1, 200, 64), seed % 2 == 1, "sim") <= 5e-3
