"""The device headers compile: every function, N, swizzle and element type; no spills, no serialised wgmma.

Needs NVRTC only, no GPU.  Each test is one translation unit of many small kernels.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from pk.ir.order import coordinate

nvrtc = pytest.importorskip("cuda.bindings.nvrtc")

INCLUDE = Path(__file__).resolve().parents[2] / "pk" / "include"
HEADERS = sorted(p.relative_to(INCLUDE).as_posix() for p in INCLUDE.rglob("*.cuh"))


def compile_text(text: str) -> str:
    """The log of compiling ``text`` for sm_90a; fails the test with the log if it does not compile."""
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"headers.cu", 0, [], [])
    options = ["--gpu-architecture=sm_90a", "--std=c++17", "--ptxas-options=-v", f"--include-path={INCLUDE}"]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(program)
    decoded = log.decode(errors="replace")
    assert int(error) == 0, decoded
    return decoded


def check_log(log: str, kernels: int) -> None:
    """All kernels are there; none uses local memory or lost the asynchrony of wgmma; no warnings."""
    assert len(re.findall(r"Compiling entry function", log)) == kernels, log
    used = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert len(used) == kernels, log
    assert all(numbers == ("0", "0", "0") for numbers in used), log
    assert not re.search(r"C7[56]\d\d|warning", log), log


def kernel(name: str, body: str, threads: int = 128) -> str:
    """A kernel that moves one box in, waits, runs ``body`` on shared memory ``memory`` and warpgroup 0."""
    return f"""
extern "C" __global__ void __launch_bounds__({threads}, 1)
{name}(const __grid_constant__ tensor_map map, const __grid_constant__ context ctx, float* out, int steps) {{
    extern __shared__ __align__(1024) u8 memory[];
    const int warpgroup = warp_index() / 4;
    {body}
}}
"""


PRELUDE = '#include "pk/pk.cuh"\nusing namespace pk;\n'
LAST = "for (int i = 0; i < {tile}.words; ++i) out[threadIdx.x * 128 + i] = {tile}.data[0][i];"


def gemm(a: str, b: str, n: int, rows: int = 64) -> str:
    """A pipelined loop of mma on operands written ``a`` and ``b``, then the accumulators to memory."""
    return f"""
    auto& ring = *reinterpret_cast<pipeline<2>*>(memory);
    auto& launch = *reinterpret_cast<launch_state*>(memory + 512);
    role<4, 0> me(ctx, launch);
    cursor<2> at;
    accumulator<{rows}, {n}> acc;
    zero(acc);
    for (int k = 0; k < steps; ++k) {{
        ring.wait_full(at, me, 0);
        mma(acc, {a}, {b}, warpgroup);
        ring.release_after_mma(at);
    }}
    ring.finish_mma(at, acc);
    {LAST.format(tile="acc")}
    """


def tile(element: str, rows: int, cols: int, offset: int = 1024) -> str:
    return f"(*reinterpret_cast<shared_tile<{element}, {rows}, {cols}>*>(memory + {offset} + 65536 * at.stage))"


@pytest.mark.parametrize("header", HEADERS)
def test_header_stands_alone(header: str) -> None:
    check_log(compile_text(f'#include "{header}"\n'), 0)


@pytest.mark.parametrize("element", ["bf16", "f16"])
@pytest.mark.parametrize("first", [8, 136])
def test_every_n(element: str, first: int) -> None:
    widths = range(first, first + 128, 8)
    text = PRELUDE
    for n in widths:  # b as (N, K), contiguous along k: any N
        text += kernel(f"n{n}", gemm(tile(element, 64, 64), f"transposed({tile(element, n, 64, 9216)})", n))
    check_log(compile_text(text), len(widths))


def test_operand_layouts() -> None:
    """Both ways of storing each operand, all swizzles, one and two slabs, a from registers."""
    text, count = PRELUDE, 0
    for element in ("bf16", "f16"):
        for k in (64, 32, 16):  # 128, 64 and 32 bytes a row when k is contiguous
            for n in (256, 32, 16):  # and when n is
                for a in (tile(element, 64, k), f"transposed({tile(element, k, 64)})"):
                    for b in (tile(element, k, n, 9216), f"transposed({tile(element, n, k, 9216)})"):
                        text += kernel(f"layout{count}", gemm(a, b, n))
                        count += 1
        text += kernel(f"slabs{count}", gemm(tile(element, 128, 128), tile(element, 128, 96, 33792), 96, rows=128))
        registers = (
            f"auto a = cast<{element}>(load<64>(*reinterpret_cast<shared_tile<{element}, 64, 64>*>(memory), 0));"
        )
        text += kernel(f"registers{count}", registers + gemm("a", tile(element, 64, 128, 9216), 128))
        count += 2
    check_log(compile_text(text), count)


@pytest.mark.parametrize("elements", ["e4m3 e4m3", "e4m3 e5m2", "e5m2 e4m3", "e5m2 e5m2", "float float"])
def test_operands_contiguous_along_k(elements: str) -> None:
    """8-bit floats and tf32: N of every kind, several panels, and the form that overwrites."""
    a, b = elements.split()
    size = 4 if a == "float" else 1
    text, count = PRELUDE, 0
    for n, k in ((8, 32), (24, 64), (128, 128), (248, 128), (256, 256)):  # k in bytes
        first = tile(a, 64, k // size)
        text += kernel(f"k{count}", gemm(first, f"transposed({tile(b, n, k // size, 32768)})", n))
        count += 1
    body = gemm(tile(a, 64, 128 // size), f"transposed({tile(b, 64, 128 // size, 32768)})", 64)
    assert "mma(acc" in body
    text += kernel("over", body.replace("mma(acc", "mma_over(acc"))
    check_log(compile_text(text), count + 1)


@pytest.mark.parametrize("element", ["bf16", "f16", "float"])
def test_register_tiles(element: str) -> None:
    """load, store, transposed store, cast and arithmetic for 128-, 64- and 32-byte panels and for none."""
    text, count = PRELUDE, 0
    for cols in (8, 16, 24, 32, 64, 96, 128):
        body = f"""
        auto& from = *reinterpret_cast<shared_tile<{element}, 64, {cols}>*>(memory);
        auto& to = *reinterpret_cast<shared_tile<{element}, 64, {cols}>*>(memory + 65536);
        auto& turned = *reinterpret_cast<shared_tile<{element}, {cols}, 64>*>(memory + 131072);
        auto x = load<64>(from, warpgroup);
        auto y = max(-x * 2.0f + x / 3.0f - 1.0f, abs(min(x, 0.5f)) + x);
        store(to, y, warpgroup);
        store(to, columns<0, {cols}>(cast<{element}>(y)), warpgroup);
        store(transposed(turned), y, warpgroup);
        accumulator<64, {cols}> z;
        zero(z);
        z = x + filled<register_tile<float, 64, {cols}>>(1.0f);
        {LAST.format(tile="z")}
        """
        text += kernel(f"cols{cols}", body)
        count += 1
    check_log(compile_text(text), count)


def test_tma() -> None:
    """Loads, stores and reduce-adds of 1 to 4 dimensions; tiles of several panels and boxes."""
    text, count = PRELUDE, 0
    for element in ("bf16", "float", "e4m3"):
        for rows, cols in ((1, 64), (128, 64), (512, 64), (64, 256), (384, 16)):
            for dims in range(1 if rows == 1 else 2, 5):
                at = ", ".join(["steps"] * dims)
                body = f"""
                auto& t = *reinterpret_cast<shared_tile<{element}, {rows}, {cols}>*>(memory);
                mbarrier& bar = *reinterpret_cast<mbarrier*>(memory + sizeof(t));
                prefetch(map);
                if (elect_one()) {{
                    load_async(t, map, bar, {at});
                    while (!mbarrier_try_wait(bar, 0)) {{}}
                    store_async(map, t, {at});
                    {"" if element == "e4m3" else f"store_add_async(map, t, {at});"}
                    store_commit();
                    store_wait_read<0>();
                    store_wait<0>();
                }}
                """
                text += kernel(f"tma{count}", body)
                count += 1
    check_log(compile_text(text), count)


def test_signals_and_launch() -> None:
    """Every call of comm, from a one-warp and from a many-warp role."""
    role_body = """
        enter(me, 0);
        me.visit(steps, 1, 2, 3);
        device_assert(me, steps > 0, 1);
        signal(me, many, many.index(steps, 1), 2, 1, 2);
        signal_all(me, one, one.index(), 1, 3);
        wait(me, many, many.index(0, steps), 4, 4);
        barrier(me, one, one.index(), 5, 2);
    """
    body = f"""
    auto& launch = *reinterpret_cast<launch_state*>(memory);
    const signal_array<2> many(4, steps, 8);
    const signal_array<0> one(2);
    const bool alive = launch_begin(ctx, launch);
    if (warp_index() < 4) {{
        registers_increase<120>();
        role<4, 0> me(ctx, launch);
        if (alive) {{ {role_body} }}
        leave();
    }} else {{
        registers_decrease<40>();
        if (warp_index() == 4) {{
            role<1, 4> me(ctx, launch);
            if (alive) {{ {role_body} }}
            leave();
        }} else if (warp_index() == 5) {{
            role<1, 5> me(ctx, launch);
            if (alive) launch_open(me, 6);
            leave();
            if (launch_close(me, 7)) {{
                fill_nan(out, steps, 1);
                fill_nan(reinterpret_cast<bf16*>(out), steps, steps, steps, 1);
                fill_nan(reinterpret_cast<f16*>(out), 2, 3, 4, steps, 12, 4, 1, 1);
            }}
        }} else {{
            leave();
        }}
    }}
    """
    check_log(compile_text(PRELUDE + kernel("comm", body, threads=256)), 1)


@pytest.mark.parametrize("extents", [(7,), (5, 3), (2, 5, 3), (2, 2, 3, 4)])
def test_order_of_tasks(extents: tuple[int, ...]) -> None:
    """``coordinate`` is the function of ``pk/ir/order.py``, compared by the compiler."""
    text = PRELUDE + 'extern "C" __global__ void order() {\n'
    for group in (1, 2, 8):
        for index in range(math.prod(extents)):
            call = f"coordinate<{group}>({', '.join(map(str, (index, *extents)))})"
            for axis, value in enumerate(coordinate(index, extents, group)):
                text += f"static_assert({call}[{axis}] == {value});\n"
    check_log(compile_text(text + "}\n"), 1)
