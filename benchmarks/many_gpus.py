"""Everything that is to be run once on a machine of four or eight GPUs, inside ten minutes, most important first.

Correctness on all GPUs; the paper's shapes, with the cost model's prediction beside each figure; odd numbers of ranks
(two groups at once where the GPUs suffice, ranks that share GPUs where they do not); the collectives; the shapes of the
tables for two GPUs, and few rows; mixed shapes with device memory watched; the primitives.  A step that does not end in
its time is killed, and those that no longer fit are named.  NVLink multicast is off.

    python benchmarks/many_gpus.py --out benchmarks/results/eight
    PK_BACKEND=sim python benchmarks/many_gpus.py --gpus 4 --seconds 300      # a rehearsal
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import torch

from pk.runtime.group import default_backend

HERE = Path(__file__).parent
START_S = 25  # of a step: processes, torch, NCCL, kernels from the cache
REHEARSAL_START_S = 40  # of simulated ranks, on a small machine
SIMULATED_PROCESSES = 4  # more ranks than these are threads in a rehearsal
LINES = threading.Lock()


@dataclass
class Job:
    """One process tree: ``options`` of a script, on ``gpus`` from the first."""

    name: str
    options: list[str]
    gpus: range = range(0)
    script: str = "tensor_parallel.py"


@dataclass
class Step:
    """Jobs that run at the same time, and the seconds for their work."""

    seconds: float
    jobs: list[Job] = field(default_factory=list)


def steps(gpus: int, gpu: bool, out: str) -> list[Step]:
    """The plan."""
    everything = range(gpus)
    checks, calls = ("50", "4000") if gpu else ("2", "20")
    few_checks = "25" if gpu else "1"
    sizes, few_rows = ([], []) if gpu else (["--most", "48"], ["--rows", "4"])
    to = ["--out", out] if out else []

    def check(world: int, place: range) -> Job:
        sharing = ["--threads"] if world > (len(place) if gpu else SIMULATED_PROCESSES) else []
        return Job(f"check {world}", ["--ranks", str(world), "--check", few_checks, *sizes, *sharing], place)

    whole = ["--ranks", str(gpus), *(["--threads"] if not gpu and gpus > SIMULATED_PROCESSES else [])]
    plan = [
        Step(80, [Job(f"check {gpus}", [*whole, "--check", checks, *sizes], everything)]),
        Step(130, [Job("paper", [*whole, "--kinds", "paper", "--name", f"paper_{gpus}", *to, *few_rows], everything)]),
    ]
    if gpus >= 8:
        plan += [
            Step(45, [check(3, range(3)), check(5, range(3, 8))]),
            Step(40, [check(7, range(7))]),
            Step(40, [check(6, range(6)), check(2, range(6, 8))]),
        ]
    else:
        plan += [Step(40, [check(3, range(3))]), *(Step(30, [check(world, everything)]) for world in (5, 6, 7))]
    moves = [*whole, "--check", "100" if gpu else "8", "--table", "--name", f"collectives_{gpus}", *to]
    return [
        *plan,
        Step(60, [Job("collectives", moves, everything, "collectives.py")]),
        Step(
            80,
            [Job("tables", [*whole, "--kinds", "large,few", "--name", f"tables_{gpus}", *to, *few_rows], everything)],
        ),
        Step(25, [Job("soak", [*whole, "--soak", calls, *sizes], everything)]),
        *([Step(40, [Job("primitives", to, everything[:2], "primitives.py")])] if gpu else []),
    ]


def startup(gpu: bool) -> float:
    """Seconds that a step may take beside its work."""
    return START_S if gpu else REHEARSAL_START_S


def command(job: Job, seconds: float) -> list[str]:
    ready = ["--compiled"] if job.script == "tensor_parallel.py" else []
    return [sys.executable, str(HERE / job.script), *job.options, *ready, "--seconds", f"{seconds:.0f}"]


def start(job: Job, seconds: float, gpu: bool) -> subprocess.Popen[str]:
    """In a session of its own, so that all of it can be killed."""
    more = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    }
    if gpu:
        visible = (
            os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if os.environ.get("CUDA_VISIBLE_DEVICES") else []
        )
        more["CUDA_VISIBLE_DEVICES"] = ",".join(visible[i] if visible else str(i) for i in job.gpus)
    return subprocess.Popen(
        command(job, seconds), env={**os.environ, **more}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip


def copy_lines(name: str, process: subprocess.Popen[str], log: TextIO | None) -> None:
    """What the process prints, marked with its name."""
    assert process.stdout is not None
    for line in process.stdout:
        with LINES:
            print(f"[{name}] {line}", end="", flush=True)
            if log is not None:
                log.write(f"[{name}] {line}")
                log.flush()


def run(step: Step, seconds: float, gpu: bool, log: TextIO | None) -> dict[str, str]:
    """How each job ended."""
    began, ended = time.time(), {}
    running = [(job, start(job, seconds, gpu)) for job in step.jobs]
    readers = [threading.Thread(target=copy_lines, args=(job.name, p, log), daemon=True) for job, p in running]
    for reader in readers:
        reader.start()
    for job, process in running:
        try:
            code = process.wait(max(began + seconds + startup(gpu) - time.time(), 0.1))
            ended[job.name] = "right" if code == 0 else f"FAILED, status {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ended[job.name] = f"KILLED after {time.time() - began:.0f} s"
        ended[job.name] += f" ({time.time() - began:.0f} s)"
    for reader in readers:
        reader.join(5)
    return ended


def compile_first(gpus: int, log: TextIO | None) -> dict[str, str]:
    """Every kernel of the tables and checks, so that no step waits for a compiler."""
    what = ["--ranks", str(gpus), "--table", "--compile-only", "--check"]
    products = [*what, "50", "--soak", "1", "--kinds", "paper,large,few"]
    jobs = [Job("compile", products), Job("compile collectives", [*what, "100"], script="collectives.py")]
    ended = {}
    for job in jobs:
        process = subprocess.Popen(
            [sys.executable, str(HERE / job.script), *job.options], text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(HERE.parent)}, start_new_session=True,
        )  # fmt: skip
        copy_lines(job.name, process, log)
        ended[job.name] = "right" if process.wait() == 0 else "FAILED"
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=0, help="default: all; without GPUs 4 simulated ranks")
    parser.add_argument("--seconds", type=float, default=570, help="for everything")
    parser.add_argument("--out", default="", help="folder for the results and the log")
    args = parser.parse_args()
    until = time.time() + args.seconds
    gpu = default_backend() == "cuda"
    gpus = args.gpus or (torch.cuda.device_count() if gpu else 4)
    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
    log = open(Path(args.out) / "log.txt", "w", encoding="utf-8") if args.out else None  # noqa: SIM115  until the end
    ended = compile_first(gpus, log) if gpu else {}
    plan = steps(gpus, gpu, args.out)
    for i, step in enumerate(plan):
        wanted = sum(s.seconds + startup(gpu) / 2 for s in plan[i:])
        left = until - time.time()
        seconds = step.seconds * min(1.0, left / wanted) if i else min(step.seconds, left - startup(gpu))
        if left < startup(gpu) + 10 or seconds < 5:
            ended |= {job.name: "skipped, no time left" for job in step.jobs}
            continue
        ended |= run(step, seconds, gpu, log)
    print("\n" + "\n".join(f"{name:12} {how}" for name, how in ended.items()), flush=True)
    sys.exit(any("right" not in how for how in ended.values()))


if __name__ == "__main__":
    main()
