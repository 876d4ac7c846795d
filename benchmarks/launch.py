"""What a launch costs on the host: a bare ``cuLaunchKernelEx`` with everything packed beforehand, ``prepared()``, and
an ordinary warm call, in one run, interleaved.

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
from pk.ops.kernels import matmul, matmul_reduce_scatter

BATCH = 100  # launches between two synchronisations


def bare(prepared: Any) -> Callable[[], None]:
    """The same launch by cuda-bindings alone: configuration, parameters and pointers made once."""
    import ctypes

    from pk.runtime import driver

    packed, cu = prepared._packed, driver.cu()
    source, module = packed._kept
    config = driver.launch_config(packed.shape, cooperative=not source.local, close=True)
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


def compare(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median of each way.  All ranks take the same order, since they launch together."""
    order, rng = list(ways), random.Random(1)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        rng.shuffle(order)
        for name in order:
            us = host_us(ways[name])
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
        "bare": bare(prepared), "prepared": prepared, "warm": lambda: kernel(*args),
        "torch, in place": lambda: args[0].mul_(1.0),
    }  # fmt: skip
    found = compare(ways, rounds)
    pk.synchronize()
    return [
        {"kernel": name, "world": world, "rank": rank, "way": way, "host us": us, "to bare": us / found["bare"]}
        for way, us in found.items()
    ]


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
    native = matmul._find is not Kernel._repeat
    print(f"{torch.cuda.get_device_name()}; warm calls are looked up {'natively' if native else 'in Python'}")
    print(table(rows, ["kernel", "world", "rank", "way", "host us", "to bare"]))
    worst = max(row["to bare"] for row in rows if row["way"] == "warm")
    print(f"a warm call costs at most {worst:.2f} x a bare launch (target 1.5)")


if __name__ == "__main__":
    main()
