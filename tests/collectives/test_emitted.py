"""The CUDA of collectives: it compiles without spills, by loads and by multicast, and the PTX is what it should be."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

import pytest

import pk
from pk import env, errors
from pk.artifact import Source
from pk.codegen import generate
from pk.codegen.lines import readable
from pk.ir.types import DType, bfloat16, float16, float32
from pk.kernel import Kernel
from pk.runtime import compile as compiling
from pk.runtime import multicast, params
from tests.collectives import kernels

DTYPES = pytest.mark.parametrize("dtype", [bfloat16, float16, float32], ids=str)


@functools.cache
def emitted(kernel: Kernel, dtype: DType, ndim: tuple[int, ...], in_network: bool, **constants: object) -> Source:
    names = list(kernel.signature.tensors)
    specs = {name: pk.spec(dtype, n) for name, n in zip(names, ndim, strict=True)}
    return generate(kernel.specialise(**specs, **constants).ir, multicast=in_network)


def built(source: Source) -> str:
    """The PTX of ``source``, which must compile without spills or remarks."""
    binary = compiling.compile(source)
    assert binary.resources.spill_bytes == binary.resources.local_bytes == 0, source.name
    assert "warning" not in binary.log, binary.log
    return compiling.ptx(source)


@DTYPES
@pytest.mark.parametrize("op", ["sum", "min", "max"])
def test_reduce_by_loads(op: str, dtype: DType) -> None:
    source = emitted(kernels.reduce_2d, dtype, (2, 2), False, R=16, C=256, OP=op)
    ptx = built(source)
    assert ptx.count("ld.relaxed.sys.global.v4") == 3 * 8  # eight in flight, whatever the number of ranks
    assert "multimem" not in ptx
    assert not source.multicast
    assert source.outputs == ("out",)
    assert source.remote  # reads a user's memory on other ranks: exit words
    if op != "sum":
        assert f"{op}.NaN.f32" in ptx


@DTYPES
@pytest.mark.parametrize(("rows", "cols"), [(1, 8), (1, 8192), (256, 256), (5, 3)])
def test_all_reduce_by_loads(rows: int, cols: int, dtype: DType) -> None:
    built(emitted(kernels.all_reduce_2d, dtype, (2,), False, R=rows, C=cols))


@DTYPES
def test_reduce_in_the_network(dtype: DType) -> None:
    kind = {"bfloat16": "acc::f32.v4.bf16x2", "float16": "acc::f32.v4.f16x2", "float32": "v4.f32"}[dtype.name]
    source = emitted(kernels.reduce_2d, dtype, (2, 2), True, R=16, C=256)
    ptx = built(source)
    assert f"multimem.ld_reduce.weak.global.add.{kind}" in ptx
    assert "multimem.st" not in ptx
    assert ptx.count("fence.proxy.alias") == 2
    assert [f.key for f in source.fields if f.kind == "multicast"] == ["x"]
    source = emitted(kernels.all_reduce_2d, dtype, (2,), True, R=16, C=256)
    ptx = built(source)
    assert f"multimem.ld_reduce.weak.global.add.{kind}" in ptx
    assert f"multimem.st.weak.global.{kind.removeprefix('acc::f32.')}" in ptx
    assert source.multicast


@pytest.mark.parametrize("op", ["min", "max"])
def test_extremes_in_the_network(op: str) -> None:
    for dtype, kind in ((bfloat16, "bf16x2"), (float16, "f16x2")):
        ptx = built(emitted(kernels.all_reduce_2d, dtype, (2,), True, R=16, C=256, OP=op))
        assert f"multimem.ld_reduce.weak.global.{op}.v4.{kind}" in ptx
    # the switch cannot compare float32: by loads, and nothing is asked of the runtime
    source = emitted(kernels.all_reduce_2d, float32, (2,), True, R=16, C=256, OP=op)
    assert "multimem" not in built(source)
    assert not source.multicast


def test_copies_and_signals_in_the_network() -> None:
    for add in (False, True):
        ndim = (2, 2) if add else (2, 3)
        plain = emitted(kernels.broadcast, bfloat16, ndim, False, R=64, C=64, ADD=add)
        assert "to < p.ctx.world" in plain.text
        assert "multimem" not in built(plain)
        source = emitted(kernels.broadcast, bfloat16, ndim, True, R=64, C=64, ADD=add)
        assert "to < p.ctx.world" not in source.text
        assert [f.name for f in source.fields if f.kind == "multicast_map"] == ["out_multicast_map"]
        assert [f.name for f in source.fields if f.kind == "multicast"] == ["headers_multicast"]
        ptx = built(source)
        assert ptx.count("multimem.red.release.sys.global.add.s32") == 1
        fence, red = ptx.index("fence.proxy.alias"), ptx.index("multimem.red")
        assert fence < red
        assert "red.relaxed.sys" not in ptx


def test_waits_and_signals_of_a_multicast_kernel_fence_the_aliases() -> None:
    source = emitted(kernels.reduce_in_consumer, bfloat16, (2, 2), True)
    text = readable(source.text)
    assert "wait_multicast(role, there" in text
    assert "signal_multicast(role, there" in text
    assert "signal_all_multicast(role, p.headers_multicast, there" in text
    assert "reduce_multicast<combine::sum, 64, 64>" in text
    built(source)
    built(emitted(kernels.reduce_in_consumer, bfloat16, (2, 2), False))


def test_a_kernel_that_reaches_no_rank_is_the_same_either_way() -> None:
    for kernel, ndim in ((kernels.copy, (2, 2)),):
        plain, through = (emitted(kernel, bfloat16, ndim, m, R=64, C=64) for m in (False, True))
        assert plain == through


def test_fields_follow_each_other() -> None:
    source = emitted(kernels.broadcast, bfloat16, (2, 3), True, R=64, C=64)
    ends = [f.offset + f.size for f in source.fields]
    assert [f.offset for f in source.fields] == [0, *ends[:-1]]


def test_a_run_time_group_compiles() -> None:
    source = emitted(kernels.tiles_in_groups, float32, (2,), False)
    assert "coordinate_in_groups(max(p.group, 1), task, " in source.text
    built(source)


# ---------------------------------------------------------------------------------------------- the runtime refuses
def test_the_runtime_refuses_what_it_cannot_give(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"):
        monkeypatch.delenv(name, raising=False)
    source = emitted(kernels.broadcast, bfloat16, (2, 3), True, R=64, C=64)
    with env.overriding(PK_MULTICAST=None), pytest.raises(errors.BackendError, match="PK_MULTICAST=1 is not set"):
        multicast.refuse(source)
    with env.overriding(PK_MULTICAST="1"):
        with pytest.raises(errors.BackendError, match="cannot allocate multicast memory"):
            multicast.refuse(source)
        with env.overriding(NCCL_NVLS_ENABLE="0"), pytest.raises(errors.BackendError, match="=0 forbids"):
            multicast.refuse(source)
    multicast.refuse(dataclasses.replace(source, multicast=False))


def test_no_multicast_address_is_ever_made_up() -> None:
    source = emitted(kernels.reduce_2d, bfloat16, (2, 2), True, R=16, C=256)
    views = {name: params.View(name, 4096, (8, 8), (8, 1), "bfloat16", (4096,)) for name in ("x", "out")}
    values = params.Values(views, {}, {}, b"\0" * 128, 0)
    with pytest.raises(errors.BackendError, match="has no multicast address"):
        params.pack(source, values, lambda *_: b"\0" * 128)


def test_the_environment_decides_what_calls_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    specs = {"out": pk.spec(bfloat16, 3), "R": 64, "C": 64}
    with env.overriding(PK_MULTICAST="1", TORCH_SYMM_MEM_DISABLE_MULTICAST=None, NVSHMEM_DISABLE_NVLS=None):
        assert kernels.broadcast.specialise(**specs).source.multicast
        with env.overriding(NVSHMEM_DISABLE_NVLS="1"):
            assert not kernels.broadcast.specialise(**specs).source.multicast
    with env.overriding(PK_MULTICAST=None):
        assert not kernels.broadcast.specialise(**specs).source.multicast


def test_nothing_creates_multicast_objects() -> None:
    """NVLink multicast objects can take GPUs of a shared host out of service: pk has no code that makes one."""
    package = Path(pk.__file__).parent
    for file in [*package.rglob("*.py"), *package.rglob("*.cuh"), *(package.parent / "csrc").rglob("*.cpp")]:
        assert not re.search(r"MulticastCreate\s*\(", file.read_text()), file
