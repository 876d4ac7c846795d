"""pk's GEMM body on one rank against cuBLAS (``torch.matmul``), side by side in one run on the same random data.

Burst protocol: one launch at a time, then the card rests three times as long (it is power-limited); warm-ups, then
timed launches in shuffled rounds; the median counts.  Both are checked against float32 before and after.  A delay
kernel in front keeps host time out of the events.

    python benchmarks/gemm.py --out benchmarks/results/gemm.json
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch

import pk
from pk.ops.kernels import matmul

SHAPES = [(4096, 4096, 4096), (8192, 8192, 8192), (8192, 8192, 4096)]


def burst(fn: Callable[[], object]) -> float:
    """Microseconds of one call on an idle card."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(400_000)
    start.record()
    fn()
    stop.record()
    stop.synchronize()
    us = start.elapsed_time(stop) * 1e3
    time.sleep(3e-6 * us + 2e-4)
    return us


def compare(m: int, n: int, k: int, rounds: int, repeats: int) -> dict[str, object]:
    """Medians of both, and their ratio (above 1: pk is faster)."""
    gen = torch.Generator(device="cuda").manual_seed(m + n + k)
    a = torch.randn(m, k, device="cuda", generator=gen).bfloat16()
    b = torch.randn(k, n, device="cuda", generator=gen).bfloat16()
    ours, theirs = (torch.full((m, n), float("nan"), device="cuda").bfloat16() for _ in range(2))
    contenders = {"pk": lambda: matmul(a, b, ours), "cublas": lambda: torch.matmul(a, b, out=theirs)}
    for fn in contenders.values():
        for _ in range(15):
            burst(fn)
    before = difference(ours, theirs)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        order = list(contenders)
        random.shuffle(order)
        for name in order:
            times[name] += [burst(contenders[name]) for _ in range(repeats)]
    pk.synchronize()
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "m": m, "n": n, "k": k, "pk_us": median["pk"], "cublas_us": median["cublas"],
        "ratio": median["cublas"] / median["pk"], "pk_tflops": 2e-6 * m * n * k / median["pk"],
        "difference_before": before, "difference_after": difference(ours, theirs),
    }  # fmt: skip


def difference(x: torch.Tensor, y: torch.Tensor) -> float:
    """||x - y|| / ||y||; NaN if x has one."""
    return float((x.float() - y.float()).norm() / y.float().norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="write the rows as JSON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=17)
    args = parser.parse_args()
    rows = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("     M      N      K     pk us  cuBLAS us  cuBLAS / pk  TFLOP/s  difference")
    for m, n, k in SHAPES:
        row = compare(m, n, k, args.rounds, args.repeats)
        rows.append(row)
        print(f"{m:6} {n:6} {k:6} {row['pk_us']:9.1f} {row['cublas_us']:10.1f} {row['ratio']:12.3f} "
              f"{row['pk_tflops']:8.0f} {row['difference_after']:11.2e}")  # fmt: skip
    if args.out:
        facts = {"command": " ".join(sys.argv), "device": torch.cuda.get_device_name(), "torch": torch.__version__,
                 "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}  # fmt: skip
        with open(args.out, "w") as f:
            json.dump({**facts, "rows": rows}, f, indent=1)


if __name__ == "__main__":
    main()
