"""What a launch costs: on the host, a bare ``cuLaunchKernelEx`` with everything packed beforehand, ``prepared()``, and
an ordinary warm call; on the device, the time from one launch to the next, with the attribute by which blocks come when
those of the launch before leave, without it, and of ``torch.matmul``.  In one run, interleaved.

    python benchmarks/launch.py --out benchmarks/results

On one GPU world 1; with two GPUs also two processes.  Batches are short, so that the queue never fills and the host
never waits for the device.  Target: a warm call within 1.5 times the bare launch.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from report import Row, table, write

import pk
from pk.kernel import Kernel
from pk.ops import dense
from pk.ops.kernels import matmul, matmul_reduce_scatter
from pk.ops.model import CONFIGS

BATCH = 100  # launches between two synchronisations
NEXT = 20  # launches of one product, one behind the other
PRODUCTS = {
    (16, 4096, 4096): "t64x16.d128", (64, 8192, 8192): "t64x64.d128", (2048, 2048, 2048): "c128x128.b",
    (4096, 4096, 4096): "c128x256.s3", (8192, 4096, 4096): "p128x192",
}  # fmt: skip


def bare(prepared: Any, world: int = 1, **how: bool) -> Callable[[], None]:
    """The same launch by cuda-bindings alone: configuration, parameters and pointers made once.  ``how``: in place of
    the attributes that pk gives it.
    """
    import ctypes

    from pk.runtime import driver
    from pk.runtime.packed import submission

    packed, cu = prepared._packed, driver.cu()
    source, module = packed._kept
    config = driver.launch_config(packed.shape, source.cluster, **(submission(source, world) | how))
    function = module.function
    config.hStream = cu.CUstream(torch.cuda.current_stream().cuda_stream)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(packed._buffer))
    submit, address = cu.cuLaunchKernelEx, ctypes.addressof(pointers)

    def launch(kept: Any = pointers) -> None:
        if int(submit(config, function, address, 0)[0]):
            raise RuntimeError("cuLaunchKernelEx failed")

    return launch


def host_us(call: Callable[[], Any]) -> float:
    """Microseconds of the host for one call, mean of a batch."""
    start = time.perf_counter()
    for _ in range(BATCH):
        call()
    us = (time.perf_counter() - start) / BATCH * 1e6
    torch.cuda.current_stream().synchronize()
    return us


def compare(
    ways: dict[str, Callable[[], Any]], rounds: int, timed: Callable[[Callable[[], Any]], float] = host_us
) -> dict[str, float]:
    """Median of each way.  All ranks take the same order, since they launch together."""
    order, rng = list(ways), random.Random(1)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        rng.shuffle(order)
        for name in order:
            us = timed(ways[name])
            if number >= 2:
                times[name].append(us)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(rank: int, world: int, rounds: int) -> list[Row]:
    """Rows of one rank."""

    def operand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=pk.device()).bfloat16()

    if world == 1:
        kernel, args, name = matmul, (operand(128, 64), operand(64, 256), operand(128, 256)), "matmul"
    else:
        c = pk.empty((128, 256), torch.bfloat16)
        kernel, args = matmul_reduce_scatter, (operand(world, 128, 64), operand(64, 256), c)
        name = "matmul_reduce_scatter"
    kernel(*args)
    pk.synchronize()
    prepared = kernel.prepare(*args)
    ways: dict[str, Callable[[], Any]] = {
        "bare": bare(prepared, world), "prepared": prepared, "warm": lambda: kernel(*args),
        "torch, in place": lambda: args[0].mul_(1.0),
    }  # fmt: skip
    found = compare(ways, rounds)
    pk.synchronize()
    return [
        {"kernel": name, "world": world, "rank": rank, "way": way, "host us": us, "to bare": us / found["bare"]}
        for way, us in found.items()
    ]


def device_us(call: Callable[[], Any]) -> float:
    """Microseconds from one launch to the next, of a batch that the device finds submitted."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(2_000_000)
    start.record()
    for _ in range(NEXT):
        call()
    stop.record()
    stop.synchronize()
    time.sleep(2e-3)
    return float(start.elapsed_time(stop)) * 1e3 / NEXT


def back_to_back(rank: int, rounds: int) -> list[Row]:
    """Rows of products, from small to large."""
    rows: list[Row] = []
    for (m, n, k), name in PRODUCTS.items():
        a, b, out = (torch.randn(*s, device=pk.device()).bfloat16() for s in ((m, k), (k, n), (m, n)))
        prepared = matmul.prepare(**dense.arguments(a, b, out, {}, "none", CONFIGS[name]))
        ways = {
            "close": prepared, "apart": bare(prepared, cooperative=True, close=False),
            "torch.matmul": lambda a=a, b=b, out=out: torch.matmul(a, b, out=out),
        }  # fmt: skip
        found = compare(ways, rounds, device_us)
        rows += [
            {"product": f"{m} x {n} x {k}, {name}", "way": way, "device us": us, "to apart": us / found["apart"]}
            for way, us in found.items()
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="", help="folder for launch.csv and launch.json")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    os.environ.setdefault("PK_TIMEOUT_S", "20")
    rows = pk.spawn(measure, 1, "cuda-threads", (1, args.rounds))[0]
    if torch.cuda.device_count() >= 2:
        for found in pk.spawn(measure, 2, "cuda-processes", (2, args.rounds)):
            rows += found
    write(args.out, "launch", rows)
    behind = pk.spawn(back_to_back, 1, "cuda-threads", (args.rounds,))[0]
    write(args.out, "launch_back_to_back", behind)
    print(table(behind, ["product", "way", "device us", "to apart"]))
    native = matmul._find is not Kernel._repeat
    print(f"{torch.cuda.get_device_name()}; warm calls are looked up {'natively' if native else 'in Python'}")
    print(table(rows, ["kernel", "world", "rank", "way", "host us", "to bare"]))
    worst = max(row["to bare"] for row in rows if row["way"] == "warm")
    print(f"a warm call costs at most {worst:.2f} x a bare launch (target 1.5)")


if __name__ == "__main__":
    main()
