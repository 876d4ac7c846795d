"""The tensor-parallel operators' kernels for a few rows, in the simulator against float64, and in the checker."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import pk
from pk.ops import choose, few_rows, fused, model, parallel_kernels
from pk.ops.model import CONFIGS
from pk.runtime.group import Group

FP8 = torch.float8_e4m3fn
AG, RS, AR = fused.OPERATORS
FUNCTIONS = {None: lambda x: x, "relu": torch.relu, "gelu": torch.nn.functional.gelu}
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}


def operands(op: str, world: int, m: int, n: int, k: int, dtype: torch.dtype, rank: int) -> dict[str, Any]:
    """a, b and, for fp8, scales of one rank; m rows each for the all-gather, m in all else."""
    gen = torch.Generator().manual_seed(rank)
    b = torch.randn(n, k, generator=gen).to(dtype)
    found: dict[str, Any] = {"a": torch.randn(m // world if op == AG else m, k, generator=gen).to(dtype), "b": b.T}
    if dtype == FP8:
        found["scale_a"] = torch.rand(found["a"].shape[0], 1, generator=gen) + 0.5
        found["scale_b"] = torch.rand(1, n, generator=gen) + 0.5
    return found


def wanted(op: str, world: int, rank: int, every: list[dict[str, Any]]) -> torch.Tensor:
    """The product, in float64."""
    a, b = ([x[name].double() * x.get(f"scale_{name}", 1) for x in every] for name in ("a", "b"))
    if op == AG:
        return torch.cat(a) @ b[rank]
    whole = sum(x @ y for x, y in zip(a, b, strict=True))
    assert isinstance(whole, torch.Tensor)
    return whole.chunk(world)[rank] if op == RS else whole


def call(rank: int, op: str, world: int, shape: tuple[int, int, int], how: dict[str, Any]) -> torch.Tensor:
    """One call checked on one rank; its result."""
    how = dict(how)
    dtype, kn = how.pop("dtype", torch.bfloat16), how.pop("kn", False)
    every = [operands(op, world, *shape, dtype, r) for r in range(world)]
    mine = every[rank]
    if kn:
        mine["b"] = mine["b"].contiguous()
    if how.pop("bias", False):
        mine["bias"] = torch.randn(shape[1], generator=torch.Generator().manual_seed(99)).bfloat16()
    got = getattr(pk.ops, op)(**mine, **how)
    want = wanted(op, world, rank, every)
    want = FUNCTIONS[how.get("activation")](want + mine["bias"].double() if "bias" in mine else want)
    terms = 1 if op == AG else world + 1  # roundings to the result's dtype
    bound = terms * ROUNDING[got.dtype] * float(want.abs().max()) * (1 if op == AG else 2) + 1e-4
    error = float((got.double() - want).abs().max())
    assert got.shape == want.shape
    assert error <= bound, f"{op} {shape} {how}: {error} of {bound}"
    return got


@pytest.mark.parametrize("op", fused.OPERATORS)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_random(op: str, world: int) -> None:
    rng = random.Random(f"{op}{world}")
    for name in rng.sample(fused.FEW, 4):
        m = rng.choice([1, 3, 17, 40, 70]) if op == AR else world * rng.choice([1, 2, 5, 9])
        shape = m, 16 * rng.randrange(1, 14), 16 * rng.randrange(1, 40)
        dtype = rng.choice([torch.bfloat16, torch.float16, FP8])
        how = {
            "dtype": dtype, "kn": dtype != FP8 and rng.random() < 0.5, "config": name, "bias": rng.random() < 0.5,
            "activation": rng.choice(list(FUNCTIONS)),
        }  # fmt: skip
        results = pk.spawn(call, world, "sim", (op, world, shape, how))
        if op == AR:
            assert all(torch.equal(results[0], r) for r in results)


@pytest.mark.parametrize("name", fused.FEW)
@pytest.mark.parametrize("op", fused.OPERATORS)
def test_configurations(op: str, name: str) -> None:
    pk.spawn(call, 2, "sim", (op, 2, (6, 136, 1104), {"config": name, "kn": True}))


@pytest.mark.parametrize("op", fused.OPERATORS)
@pytest.mark.parametrize("m", [1, 16, 256])
def test_the_default(op: str, m: int) -> None:
    """By the rule, not by name, one row included; in float32 too."""
    m = m if op == AR else max(m, 2)
    for how in ({}, {"out_dtype": torch.float32, "bias": True}):
        pk.spawn(call, 2, "sim", (op, 2, (m, 128, 320), {"deterministic": True, **how}))


@pytest.mark.parametrize("op", fused.OPERATORS)
def test_the_rule(op: str) -> None:
    def tile(m: int, world: int) -> model.Config:
        a = torch.empty(m // world if op == AG else m, 8192, dtype=torch.bfloat16, device="meta")
        b = torch.empty(8192, 8192 if op != AG else 4096, dtype=torch.bfloat16, device="meta")
        return fused.choose_tile(fused.Request(op, Group(0, world, "sim"), a, b, torch.bfloat16), 0)

    assert all(tile(m, 2).few for m in (2, 16, 64, 256))
    assert not tile(258, 2).few
    assert tile(64, 8).few == (op != AR)  # whole terms to seven peers are too much
    assert CONFIGS["t64x16.d128"] in (tile(16, 2), tile(16, 4))


def test_gathered_rows() -> None:
    def kept(rank: int) -> bool:
        a = torch.full((3, 128), float(rank + 1)).bfloat16()
        b = torch.ones(128, 64).bfloat16()
        q = fused.Request(AG, pk.runtime.group.current(None), a, b, torch.bfloat16)
        result, whole = fused.run(q, None, CONFIGS["t64x16.d128"], 0, gathered=True)
        want = torch.tensor([1.0, 1, 1, 2, 2, 2])
        assert whole is not None
        return torch.equal(whole[:, 5].float(), want) and torch.equal(result[:, 7].float(), 128 * want)

    assert pk.spawn(kept, 2, "sim") == [True, True]


# ------------------------------------------------------------------------------------------------------- checker
SMALL = {"BM": 8, "P": 8, "BK": 32, "STAGES": 3, "PR": 8}


def random_matrix(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize(("world", "rows"), [(2, 3), (3, 5), (1, 9)])
def test_all_gather_is_clean(world: int, rows: int, split: int) -> None:
    n, k, m = 136, 136, world * rows
    vectors = {"row_scale": torch.rand(n, 1), "col_scale": torch.rand(1, m), "row_bias": torch.rand(n, 1)}
    pk.check(
        few_rows.few_all_gather_matmul, x=lambda _: random_matrix(rows, k), b=random_matrix(k, n),
        c=torch.full((m, n), float("nan")).bfloat16(), **(vectors if split == 1 else {}), **SMALL, ROW_STAGES=2,
        PC=32, SECTION=64, SPLIT=split, world_size=world, schedules=8,
    ).raise_if_found()  # fmt: skip


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize(("world", "rows"), [(2, 3), (3, 5), (1, 9)])
def test_reductions_are_clean(world: int, rows: int, split: int, scatter: bool) -> None:
    n, k, m = 136, 136, rows * (world if scatter else 1)
    vectors = {"row_scale": torch.rand(n, 1), "col_scale": torch.rand(1, m), "col_bias": torch.rand(1, n)}
    pk.check(
        few_rows.few_matmul_reduce, a=lambda _: random_matrix(m, k), b=lambda _: random_matrix(k, n),
        c=torch.full((rows, n), float("nan")).bfloat16(), **(vectors if split == 1 else {}), **SMALL, OUTS=1,
        SPLIT=split, SCATTER=scatter, WORLD=world, world_size=world, schedules=8,
    ).raise_if_found()  # fmt: skip


# ----------------------------------------------------------------------------------------------------- compiled
@pytest.mark.parametrize("op", fused.OPERATORS)
@pytest.mark.parametrize("name", ["t64x16.d128", "t64x64.d128.k2", "t128x128"])
def test_no_spills(op: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[str, dict[str, Any]]] = []

    class Recorder:
        def __getattr__(self, kernel: str) -> Any:
            return lambda **given: found.append((kernel, given))

    monkeypatch.setattr(fused, "few_rows", Recorder())
    monkeypatch.setattr(fused, "parallel_kernels", Recorder())
    monkeypatch.setattr(fused, "_gather_scales", lambda q, mine: mine.repeat(q.world))
    monkeypatch.setattr(
        fused, "symmetric_workspace", lambda group, name, shape, dtype: torch.empty(shape, dtype=dtype, device="meta")
    )
    a, b = (torch.empty(shape, dtype=FP8, device="meta") for shape in ((16, 1024), (1024, 1024)))
    scales = torch.empty(16, 1, device="meta"), torch.empty(1, 1024, device="meta")
    bias = torch.empty(1024, dtype=torch.bfloat16, device="meta")
    q = fused.Request(op, Group(0, 8, "sim"), a, b.T, torch.bfloat16, bias, "gelu", *scales)
    fused.run(q, None, CONFIGS[name], 0)
    kernel, given = found[-1]
    given.pop("group")
    assert not hasattr(parallel_kernels, kernel)
    specs = {k: pk.spec(v.dtype, v.ndim) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    resources = getattr(few_rows, kernel).resources(**specs)
    assert resources.spill_bytes == 0
    assert resources.local_bytes == 0


def test_names() -> None:
    assert all(CONFIGS[name].few and not CONFIGS[name].share for name in fused.FEW)
    with pytest.raises(pk.ArgumentError, match="up to 256 rows t64x8"):
        choose.forced(RS, False, None, "t1x1")
