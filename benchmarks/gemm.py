"""``pk.ops.matmul`` on one rank against cuBLAS, side by side in one run on the same random data.

bfloat16 against ``torch.matmul`` (nine large shapes, and few rows), float8 with row-wise ("fp8") and with tensor-wise
scales ("fp8t") against ``torch._scaled_mm``; b row-major ("kn") and as a transposed view ("nk").

Burst protocol: one launch at a time, then the card rests three times as long (it is power-limited); warm-ups, then
timed launches in shuffled rounds; medians count.  A delay kernel in front keeps host time out of the events.  With few
rows a read of 256 MB comes before that, so that the weights come from memory, as they do in a model.  Results are
checked against float32 before and after, on outputs that held NaN.

    python benchmarks/gemm.py --out gemm.json            # what the model chooses
    python benchmarks/gemm.py --sweep --out sweep.json   # every legal configuration; those far behind are dropped
    python benchmarks/gemm_fit.py sweep.json             # the model's constants from that
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from report import facts

import pk
from pk.ops import cublas, dense, kernels, model

LARGE = [
    (4096, 4096, 4096), (8192, 8192, 8192), (8192, 8192, 4096), (16384, 4096, 2048), (16384, 4096, 4096),
    (8192, 4096, 8192), (8192, 14336, 4096), (8192, 4096, 14336), (4096, 7168, 4096),
]  # fmt: skip
SMALL = [(m, n, k) for n, k in ((4096, 7168), (8192, 8192)) for m in (1, 16, 64, 128, 256)]
FP8 = torch.float8_e4m3fn
REPEATS = 5  # launches of a contender in a round
COLD_BYTES = 256 << 20
MAX_CLOCK = 1.98e9


@dataclass
class Case:
    """One product and what was measured of it; ``choice``: the kernel's configuration, by the model."""

    kind: str  # "large", "small", "fp8" or "fp8t"
    layout: str
    m: int
    n: int
    k: int
    choice: str = ""
    times: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """Of the operands."""
        return FP8 if self.kind.startswith("fp8") else torch.bfloat16

    @property
    def scales(self) -> tuple[int, int] | None:
        """Elements of the scales of a and b."""
        return {"fp8": (self.m, self.n), "fp8t": (1, 1)}.get(self.kind)

    @property
    def problem(self) -> model.Problem:
        """As the model takes it."""
        return model.Problem(self.m, self.n, self.k, 8 * self.dtype.itemsize, 16, sms(), self.layout)

    def median(self, name: str) -> float:
        """Microseconds."""
        return statistics.median(self.times[name])

    def row(self) -> dict[str, Any]:
        """What is reported of it.

        ``library``: ``pk.ops.matmul`` would take not the choice, but the library; ``wrong``: contenders whose error no
        rounding explains.
        """
        ours = [name for name in self.times if name != "cublas"]
        best = min(ours, key=self.median)
        us = self.median("cublas")
        found = {k: v for k, v in asdict(self).items() if k not in ("times", "errors")}
        return {
            **found, "library": self.dtype != FP8 and cublas.preferred(self.problem),
            "cublas_us": us, "choice_us": self.median(self.choice),
            "ratio": us / self.median(self.choice), "best": best, "best_us": self.median(best),
            "best_ratio": us / self.median(best), "tflops": 2e-6 * self.m * self.n * self.k / self.median(best),
            "error": max(self.errors.values()), "us": {name: self.median(name) for name in self.times},
            "samples": {name: len(values) for name, values in self.times.items()},
            "wrong": sorted(name for name, e in self.errors.items() if not e < 6e-3),
        }  # fmt: skip


def sms() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def cases(kinds: list[str], layouts: list[str]) -> list[Case]:
    found = [Case("small", layout, *s) for layout in layouts for s in SMALL]
    found += [Case("large", layout, *s) for layout in layouts for s in LARGE]
    found += [Case(kind, "nk", *s) for kind in ("fp8", "fp8t") for s in LARGE]
    return [c for c in found if c.kind in kinds]


# ---------------------------------------------------------------------------------------------------- compiling
def builds(case: Case, names: list[str]) -> list[dict[str, Any]]:
    """Arguments of ``specialise`` for these configurations of a case; no GPU needed."""
    found = []
    for name in names:
        a = torch.empty(case.m, case.k, dtype=case.dtype, device="meta")
        b = laid(torch.empty(case.k, case.n, dtype=case.dtype, device="meta"), case.layout)
        out = torch.empty(case.m, case.n, dtype=torch.bfloat16, device="meta")
        vectors = {}
        if case.scales:
            vectors = {f"scale_{x}": torch.empty(e, device="meta") for x, e in zip("ab", case.scales, strict=True)}
        given = dense.arguments(a, b, out, vectors, "none", model.CONFIGS[name])
        found.append({k: pk.spec(v.dtype, v.ndim) if isinstance(v, torch.Tensor) else v for k, v in given.items()})
    return found


def compile_one(arguments: dict[str, Any]) -> str:
    """In a process of its own: fills the disk cache; what is wrong with the cubin, or nothing."""
    resources = kernels.matmul.resources(**arguments)
    return f"{resources}" if resources.spill_bytes or resources.local_bytes else ""


def compile_all(work: list[tuple[Case, list[str]]]) -> None:
    wanted = {repr(b): b for case, names in work for b in builds(case, names)}
    began = time.time()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=context) as pool:
        for problem in pool.map(compile_one, wanted.values()):
            if problem:
                print(f"!! {problem}", flush=True)
    print(f"compiled {len(wanted)} kernels in {time.time() - began:.0f} s", flush=True)


# -------------------------------------------------------------------------------------------------------- running
def laid(b: torch.Tensor, layout: str) -> torch.Tensor:
    return b if layout == "kn" else b.T.contiguous().T


class Bench:
    """One case on the GPU: operands, contenders, timing."""

    def __init__(self, case: Case, names: list[str], cold: torch.Tensor, behind: float) -> None:
        self.behind = behind
        self.case, self.cold = case, cold if case.kind == "small" else None
        self.delay, self.late = 400_000, 0  # cycles; calls that came too late
        gen = torch.Generator(device="cuda").manual_seed(case.m + case.n + case.k)
        a = torch.randn(case.m, case.k, device="cuda", generator=gen)
        b = torch.randn(case.k, case.n, device="cuda", generator=gen)
        a, b = a.to(case.dtype), laid(b.to(case.dtype), case.layout)
        self.out = torch.empty(case.m, case.n, device="cuda", dtype=torch.bfloat16)
        self.reference = a.float() @ b.float()
        vectors: dict[str, torch.Tensor] = {}
        if case.scales:
            rows, cols = (torch.rand(e, device="cuda", generator=gen) + 0.5 for e in case.scales)
            vectors = {"scale_a": rows[:, None], "scale_b": cols[None]}
            self.reference *= rows[:, None] * cols
        self.contenders: dict[str, Callable[[], object]] = {"cublas": self._cublas(a, b, vectors)}
        for name in names:
            given = dense.arguments(a, b, self.out, vectors, "none", model.CONFIGS[name])
            self.contenders[name] = kernels.matmul.prepare(**given)

    def _cublas(self, a: torch.Tensor, b: torch.Tensor, vectors: dict[str, torch.Tensor]) -> Callable[[], object]:
        if vectors:
            scales = vectors["scale_a"], vectors["scale_b"]
            options = {"out_dtype": torch.bfloat16, "use_fast_accum": True, "out": self.out}
            return lambda: torch._scaled_mm(a, b, *scales, **options)
        return lambda: torch.matmul(a, b, out=self.out)

    def check(self, name: str) -> None:
        """||x - y|| / ||y||; NaN, which is wrong, if x has one."""
        self.out.fill_(float("nan"))
        self.contenders[name]()
        error = float((self.out.float() - self.reference).norm() / self.reference.norm())
        self.case.errors[name] = max(self.case.errors.get(name, 0.0), error) if error == error else error

    def burst(self, fn: Callable[[], object]) -> float:
        """Microseconds of one call on an idle card.

        The host must have submitted the call before the delay kernel ends; where it has not, the call is repeated
        behind a longer delay.
        """
        for attempt in range(6):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if self.cold is not None:
                self.cold.sum()
            began = time.perf_counter()
            torch.cuda._sleep(self.delay)
            start.record()
            fn()
            stop.record()
            host_us = 1e6 * (time.perf_counter() - began)
            stop.synchronize()
            us = float(start.elapsed_time(stop)) * 1e3
            rest = time.perf_counter() + 3e-6 * us + 1e-4
            while time.perf_counter() < rest:  # awake: a host that sleeps is slow at the next call
                pass
            if host_us < 0.8e6 * self.delay / MAX_CLOCK or attempt == 5:
                break
            self.delay, self.late = min(2 * self.delay, 4_000_000), self.late + 1
        return us

    def run(self, seconds: float, warmups: int) -> None:
        """Shuffled rounds for about ``seconds``, at least three."""
        case, began = self.case, time.time()
        for name, fn in self.contenders.items():
            self.check(name)
            for _ in range(warmups):
                self.burst(fn)
        case.times = {name: [] for name in self.contenders}
        alive, rounds = list(self.contenders), 0
        while rounds < 3 or (time.time() - began < seconds and rounds < 20):
            random.shuffle(alive)
            for name in alive:
                case.times[name] += [self.burst(self.contenders[name]) for _ in range(REPEATS)]
            rounds += 1
            if rounds == 2:
                least = min(case.median(name) for name in alive)
                kept = {"cublas", case.choice}
                alive = [name for name in alive if name in kept or case.median(name) < self.behind * least]
        for name in alive:
            self.check(name)
        if self.late:
            print(f"  {self.late} calls came after their delay and were repeated", flush=True)


def measure(work: list[tuple[Case, list[str]]], until: float, behind: float) -> list[dict[str, Any]]:
    cold = torch.zeros(COLD_BYTES // 4, device="cuda")
    rows = []
    # A round's length decides how the time is shared out.
    weights = [len(names) * (4 * model.microseconds(model.choose(c.problem), c.problem) + 600) for c, names in work]
    print("kind  b        M      N      K  cuBLAS us  choice            us  ratio  best              us  ratio  error")
    for i, (case, names) in enumerate(work):
        share = (until - time.time()) * weights[i] / sum(weights[i:])
        bench = Bench(case, names, cold, behind)
        bench.run(share, warmups=6)
        row = case.row()
        rows.append(row)
        wrong = f" WRONG {' '.join(row['wrong'])}" if row["wrong"] else ""
        print(f"{case.kind:5} {case.layout} {case.m:7} {case.n:6} {case.k:6} {row['cublas_us']:10.1f}  "
              f"{case.choice:14} {row['choice_us']:7.1f} {row['ratio']:6.3f}  {row['best']:14} {row['best_us']:7.1f} "
              f"{row['best_ratio']:6.3f}  {row['error']:.1e}{wrong}",
              flush=True)  # fmt: skip
        del bench
    pk.synchronize()
    return rows


def summary(rows: list[dict[str, Any]]) -> None:
    for kind in dict.fromkeys(r["kind"] for r in rows):
        for what in ("ratio", "best_ratio"):
            values = [r[what] for r in rows if r["kind"] == kind]
            print(f"{kind:5} {what:10} geometric mean {statistics.geometric_mean(values):.4f}, least {min(values):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="write the rows as JSON")
    parser.add_argument("--sweep", action="store_true", help="time every legal configuration")
    parser.add_argument("--kinds", default="small,large,fp8,fp8t")
    parser.add_argument("--layouts", default="kn,nk")
    parser.add_argument("--configs", default="", help="only these, and the model's choice")
    parser.add_argument("--seconds", type=float, default=160, help="for everything, compiling included")
    parser.add_argument("--behind", type=float, default=1.06, help="times the best: dropped after two rounds")
    args = parser.parse_args()
    until = time.time() + args.seconds
    torch.backends.cuda.matmul.allow_tf32 = False
    work = []
    for case in cases(args.kinds.split(","), args.layouts.split(",")):
        ranked = [c.name for c, _ in model.ranking(case.problem)]
        case.choice = ranked[0]
        only = args.configs.split(",") if args.configs else ranked if args.sweep else []
        work.append((case, [n for n in ranked if n == case.choice or n in only]))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    compile_all(work)
    rows = measure(work, until, args.behind)
    summary(rows)
    if args.out:
        with open(args.out, "w") as f:
            json.dump({**facts(), "rows": rows}, f, indent=1)
    if any(r["wrong"] for r in rows):
        raise SystemExit("wrong results")


if __name__ == "__main__":
    main()
