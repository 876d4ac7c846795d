"""``pk.ops``' three tensor-parallel operators on this machine's GPUs, beside what others do: NCCL + cuBLAS, torch's
symmetric-memory operators, the product alone (cuBLAS and ``pk.ops.matmul``), NCCL alone, and the floor: the slower of
the product alone and the bytes that must cross a link.

A process for each GPU.  Random normal data; every contender is checked against float32 on every rank, on outputs that
held NaN, before and after timing.  A sample is some back-to-back calls behind a device-side meeting of the ranks (a
delay in front hides the host), so it is *sustained*; samples are interleaved in shuffled rounds; the maximum over the
ranks, then the median over the rounds counts.  "single" is one call on a rested card.  Ratios are to cuBLAS alone.
NVLink multicast is off.  On one GPU the ranks are threads that share it, and ratios are
to the same products on as many SMs of a rank, at the same time, without communication.

    python benchmarks/tensor_parallel.py --seconds 150 --out results      # all GPUs
    python benchmarks/tensor_parallel.py --check 50                       # correctness: random problems, float64
    python benchmarks/tensor_parallel.py --soak 20000                     # mixed shapes, device memory watched
    python benchmarks/tensor_parallel.py --trace --rows 2 --tiles c128x256 --out results   # where the time goes
    python benchmarks/tensor_parallel.py --parts --kinds large --tiles c128x256            # what each part costs
    PK_BACKEND=sim python benchmarks/tensor_parallel.py --ranks 2         # a rehearsal without GPUs
"""

from __future__ import annotations

import environment  # noqa: F401

# isort: split
import argparse
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import baselines
import torch
import what_if
from baselines import Contender
from report import facts, write
from rounds import Rounds, traced
from team import Team, Threads, processes
from tp_problems import AG, COMM_SMS, LINK_GB_S, Operands, Problem, checks, compile_all, problems
from tp_report import Row, finish, flat, lines

import pk
from pk.ops import fused
from pk.ops.model import SMS
from pk.runtime.group import default_backend

TOLERANCE = 6e-3  # two roundings to bfloat16 are 2.4e-3


class Bench(Rounds):
    """One problem of the table."""

    def __init__(
        self, team: Team, p: Problem, tiles: list[tuple[str, int]], default: bool, parts: bool = False
    ) -> None:
        super().__init__(team)
        self.p = p
        self.o = o = Operands(p, team)
        self.want = o.reference(torch.float32)
        found = [*baselines.gemm(o), *(baselines.library(o) if team.library else [])]
        if team.gpu and team.library and p.kind != "graph":
            ok, more = team.attempt("symmetric memory", lambda: baselines.symmetric_memory(o))
            found += more if ok else []
        for tile, comm in tiles:
            name = f"{tile}/{comm}" if p.operator == AG else tile
            found.append(Contender(name, "pk", lambda t=tile, c=comm: o.call(t, c), True))  # type: ignore[misc]
        if p.kind == "large":
            found += baselines.moving(o, sorted({comm for _, comm in tiles}))
        if parts:
            found += what_if.contenders(o)
        if default:
            found.append(Contender("pk default", "pk", lambda: o.call(None), True))
        self.tiles = {f"{t}/{c}" if p.operator == AG else t: (t, c) for t, c in tiles}
        for c in found:
            self.admit(c)
        if p.kind == "graph" and team.gpu:
            self.capture()

    def capture(self) -> None:
        """CUDA graphs of the operator and of the library's way."""
        for name in [n for n, c in self.contenders.items() if c.kind in ("pk", "rival")]:
            ok, captured = self.team.attempt(
                f"graph of {name}",
                lambda n=name: baselines.graphed(self.contenders[n]),  # type: ignore[misc]
            )
            if ok:
                self.admit(captured)

    def check(self, c: Contender) -> float:
        """Relative error of its result; 0 for a part."""
        if not c.whole:
            c.call()
            return 0.0
        self.o.poison()
        got = c.call()
        self.team.sync()
        return self.o.error(self.want, got if isinstance(got, torch.Tensor) else None)

    def row(self) -> Row:
        """What is reported."""
        world, m, n, k = self.team.world, *self.p.local(self.team.world)
        link = self.p.link_bytes(world) / LINK_GB_S * 1e-3
        us = {name: self.median(name) for name in self.times}
        right = {name for name, e in self.errors.items() if e < TOLERANCE}
        base = "cuBLAS" if "cuBLAS" in us else "pk.matmul"
        cublas = us.get(base, math.nan)
        ours, rivals = ([n for n in self.of_kind(kind) if n in right] for kind in ("pk", "rival"))
        floor = max(min((us[g] for g in self.of_kind("gemm")), default=math.nan), link)
        rate = {"tflops": 2e-6 * m * n * k / us[ours[0]]} if ours else {}
        if ours and ours[0] in self.tiles:
            rate["predicted_us"] = self.p.predicted_us(world, *self.tiles[ours[0]])
        return {
            "operator": self.p.operator, "m": self.p.m, "n": self.p.n, "k": self.p.k, "world": world,
            "layout": self.p.layout, "kind": self.p.kind, "base": base, "cublas_us": cublas,
            "link_us": link, "floor_us": floor,
            "best": ours[0] if ours else "", "best_us": us[ours[0]] if ours else math.nan,
            "rival": rivals[0] if rivals else "", "rival_us": us[rivals[0]] if rivals else math.nan, **rate,
            "kinds": {n: c.kind for n, c in self.contenders.items()}, "us": us, "single_us": self.single,
            "host_us": self.host, "errors": self.errors,
            "samples": {name: len(times) for name, times in self.times.items()},
            "p95_us": {name: sorted(times)[int(0.95 * (len(times) - 1) + 0.5)] for name, times in self.times.items()},
            "wrong": sorted(name for name, e in self.errors.items() if not e < TOLERANCE),
        }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- work
def tiles_for(p: Problem, args: argparse.Namespace, world: int) -> list[tuple[str, int]]:
    """Tiles and communicator SMs to try."""
    few = p.few(world)[:4] if p.m <= 256 else []
    if p.kind == "graph":
        return [(few[0] if few else "c128x256", fused.COMM_SMS)]
    if p.kind == "few" and not args.tiles:
        return [(tile, fused.COMM_SMS) for tile in (*few, "c64x128")]
    names = args.tiles.split(",") if args.tiles else fused.tiles(p.operator)
    comms = [int(c) for c in args.comm_sms.split(",")] if p.operator == AG else [fused.COMM_SMS]
    return [(tile, comm) for tile in names for comm in comms]


def table_problems(args: argparse.Namespace, world: int) -> list[Problem]:
    """The rows of the table, most important first."""
    kinds = [kind for kind in args.kinds.split(",") if kind != "graph" or not args.threads]
    found = [p for p in problems(kinds, args.layout, world, args.shrink) if p.operator in args.operators.split(",")]
    return found[: args.rows or None]


def measure(team: Team, args: argparse.Namespace) -> int:
    """The table; how many rows are wrong."""
    work = table_problems(args, team.world)
    rows: list[Row] = []
    for i, p in enumerate(work):
        left = team.left()
        if left < 2 + 0.5 * team.gpu:
            team.say(f"no time left for {len(work) - i} rows")
            break
        weights = [1.0 if q.kind == "large" else 0.5 for q in work[i:]]
        share = (left - 1) * weights[0] / sum(weights)
        began = time.time()
        bench = Bench(team, p, tiles_for(p, args, team.world), p.kind != "graph" and not args.no_default, args.parts)
        bench.run(share - (time.time() - began), args.rounds)
        rows.append(bench.row())
        team.say(lines(rows[-1]))
        del bench
        if team.rank == 0 and args.out:
            write(args.out, args.name, flat(rows))
    if team.rank == 0:
        finish(rows, args.out, args.name)
    return sum(bool(row["wrong"]) for row in rows)


def random_problems(args: argparse.Namespace, count: int, world: int, most: int) -> list[tuple[Problem, str, int]]:
    """For ``check`` and ``soak``, the same on all ranks; extents up to ``--most`` or ``most``."""
    few = args.threads or args.comm_sms == "1"
    found = checks(count, world, args.most or most, args.seed, (1, 2) if few else COMM_SMS)
    return [w for w in found if w[0].operator in args.operators.split(",")]


def check(team: Team, args: argparse.Namespace) -> int:
    """Random problems, each called twice (the bits must be the same), against float64; how many are wrong."""
    most = 4000 if team.gpu else 96
    bad = done = 0
    highest: dict[str, float] = {}
    took: Counter[str] = Counter()
    work = random_problems(args, args.check, team.world, most)
    for p, tile, comm in work:
        if done % 10 == 0 and team.left() < 1:
            team.say(f"no time left for {len(work) - done} checks")
            break
        with timed(took, "operands"):
            o = Operands(p, team, args.seed)
        with timed(took, "references"):
            want = o.reference()
            team.sync()
        results: list[torch.Tensor] = []

        def call(o: Operands = o, tile: str = tile, comm: int = comm, results: list[torch.Tensor] = results) -> None:
            o.poison()
            o.call(tile, comm)
            team.sync()
            results.append(o.out.clone())

        ok = True
        for what in ("first calls", "second calls"):
            with timed(took, what):
                ok = ok and team.attempt(f"{p} {tile} {comm}", call)[0]
        differ = float(ok and not torch.equal(*results))
        error, differ = team.worst([o.error(want), differ]) if ok else (math.inf, 0.0)
        limit = 1e-2 if p.dtype != "float16" else 2e-3
        key = f"{p.operator} {p.dtype}"
        highest[key] = max(highest.get(key, 0.0), error)
        if not error < limit or differ:
            bad += 1
            team.say(f"   WRONG {p} {tile}/{comm}: error {error:.2e}{' other bits' if differ else ''}")
        done += 1
    team.say(f"checked {done} problems on {team.world} ranks: {bad} wrong")
    team.say("seconds: " + ", ".join(f"{what} {seconds:.1f}" for what, seconds in took.items()))
    team.say("highest errors: " + ", ".join(f"{k} {v:.1e}" for k, v in sorted(highest.items())))
    return bad


@contextmanager
def timed(took: Counter[str], what: str) -> Iterator[None]:
    """Add the seconds that the body takes on the host."""
    began = time.perf_counter()
    try:
        yield
    finally:
        took[what] += time.perf_counter() - began


def soak(team: Team, args: argparse.Namespace) -> int:
    """``args.soak`` calls of 48 problems in random order, with results of their own.

    Returns how much is wrong: other bits than at first, or device memory that grew after the first thousand.
    """
    work, rng = random_problems(args, 16, team.world, 1536 if team.gpu else 48), random.Random(1)
    held = [(Operands(p, team), tile, comm) for p, tile, comm in work]
    firsts = [o.call(tile, comm, fresh=True).clone() for o, tile, comm in held]
    errors = team.worst(o.error(o.reference(), first) for (o, *_), first in zip(held, firsts, strict=True))
    bad = sum(not e < 1e-2 for e in errors)
    base, grown, done, warm = 0, 0, 0, min(1000, args.soak // 2)
    for done in range(1, args.soak + 1):
        i = rng.randrange(len(held))
        o, tile, comm = held[i]
        found = o.call(tile, comm, fresh=True)
        if done % 97 == 0 and not torch.equal(found, firsts[i]):
            bad += 1
            print(f"   WRONG rank {team.rank}: call {done} of {o.p} {tile}/{comm}", flush=True)
        if done == warm:
            base = used(team)
        if done > warm and done % 1000 == 0:
            grown = max(grown, used(team) - base)
            if done % 5000 == 0:
                team.say(f"   {done} calls, {team.left():.0f} s left, device memory {grown:+d} bytes since call {warm}")
        if done % 500 == 0 and team.left() < 1:
            break
    grown, bad = (int(x) for x in team.worst([max(grown, used(team) - base), bad]))
    team.say(f"soak: {done} calls on {team.world} ranks, {bad} wrong, device memory {grown:+d} bytes after call {warm}")
    return bad + (grown > 0)


def trace(team: Team, args: argparse.Namespace) -> int:
    """Each problem's calls traced, not timed: what every role waits for, on rank 0; how many failed."""
    failed = 0
    for number, p in enumerate(table_problems(args, team.world)):
        o = Operands(p, team)
        for tile, comm in [(None, None), *tiles_for(p, args, team.world)]:
            if team.left() < 1:
                team.say("no time left")
                return failed
            name = f"{tile}/{comm}" if p.operator == AG and tile else tile or "its own choice"
            path = Path(args.out or ".") / f"trace_{number}_{name.replace('/', '_').replace(' ', '_')}.json"

            calls = partial(traced, partial(o.call, tile, comm), path if args.out else None)
            ok, text = team.attempt(f"{p.title()}, {name}", calls)
            failed += not ok
            team.say(f"\n{p.title()}, {name}\n{text if ok else ''}")
    return failed


def used(team: Team) -> int:
    """Bytes of the device that are taken, by anybody."""
    pk.synchronize()
    team.told(None)  # the others are no further, and do not allocate
    if not team.gpu:
        return 0
    free, whole = torch.cuda.mem_get_info()
    team.told(None)
    return int(whole - free)


def run(team: Team, args: argparse.Namespace) -> int:
    """What the options ask for; how much is wrong."""
    where = facts()["device"]
    team.worst([0.0])
    ready = time.time() - team.began
    team.say(f"{team.world} ranks, {where}, torch {torch.__version__}, ready after {ready:.0f} s")
    wrong = check(team, args) if args.check else 0
    wrong += soak(team, args) if args.soak else 0
    if args.trace:
        return wrong + trace(team, args)
    if args.table or not (args.check or args.soak):
        wrong += measure(team, args)
    return wrong


def thread_main(rank: int, world: int, args: argparse.Namespace, began: float) -> int:
    """One rank's thread."""
    return run(Threads(rank, world, torch.device(pk.device()), began, args.seconds), args)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=0, help="default: all GPUs, or 2 simulated")
    parser.add_argument("--seconds", type=float, default=150, help="for everything, compiling included")
    parser.add_argument("--out", default="", help="folder for CSV, JSON and plot")
    parser.add_argument("--name", default="tensor_parallel", help="of these files")
    parser.add_argument("--kinds", default="large,few", help="large, few (rows), paper, graph (CUDA graphs)")
    parser.add_argument("--operators", default=",".join(fused.OPERATORS))
    parser.add_argument("--layout", default="kn", choices=("kn", "nk"), help="of b; nk: as F.linear's weight")
    parser.add_argument("--tiles", default="", help="default: all of pk.ops.fused.TILES")
    parser.add_argument("--comm-sms", default=",".join(map(str, COMM_SMS)))
    parser.add_argument("--rows", type=int, default=0, help="at most; default: all")
    parser.add_argument("--rounds", type=int, default=8, help="at most")
    parser.add_argument("--no-default", action="store_true", help="leave out the call that chooses for itself")
    parser.add_argument("--check", type=int, default=0, metavar="N", help="N random problems of each operator")
    parser.add_argument("--soak", type=int, default=0, metavar="N", help="N calls of mixed shapes, memory watched")
    parser.add_argument("--table", action="store_true", help="after --check or --soak, the table too")
    parser.add_argument("--parts", action="store_true", help="also the kernels with parts taken out: see what_if.py")
    parser.add_argument("--trace", action="store_true", help="trace the table's calls and show what they wait for")
    parser.add_argument(
        "--threads",
        action="store_true",
        help="ranks are threads that share one GPU, as they do if there is one; no torch.distributed",
    )
    parser.add_argument("--most", type=int, default=0, help="largest extent of these")
    parser.add_argument("--compile-only", action="store_true", help="fill the disk cache, run nothing")
    parser.add_argument("--compiled", action="store_true", help="the disk cache has been filled")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shrink", type=int, default=0, help="divide the shapes (default 1, in the simulator 64)")
    return parser.parse_args()


def main() -> None:
    args, began = options(), time.time()
    gpu = default_backend() == "cuda"
    gpus = torch.cuda.device_count() if gpu else 0
    world = args.ranks or max(gpus, 2)
    args.threads = args.threads or (gpu and world > gpus)
    args.shrink = args.shrink or (1 if gpu else 64)
    if not gpu:
        args.tiles, args.comm_sms, args.rounds = args.tiles or "c128x256,c64x128", "1", 1
    elif args.threads and args.comm_sms == ",".join(map(str, COMM_SMS)):
        args.comm_sms = "2,1,4,8"
    if gpu and not args.compiled:
        precompile(world, args)
    if args.compile_only:
        return
    if args.threads:
        torch.backends.cuda.matmul.allow_tf32 = False
        wrong = pk.spawn(thread_main, world, "cuda-threads" if gpu else "sim", (world, args, began))
        sys.exit("wrong results" if any(wrong) else 0)
    sys.exit(processes(run, world, args, began))


def precompile(world: int, args: argparse.Namespace) -> None:
    """Every kernel that will be needed, in parallel processes, into the disk cache."""
    work = []
    if args.table or not (args.check or args.soak):
        for p in table_problems(args, world):
            tiles = tiles_for(p, args, world)
            moving = ("c128x64", "c128x256") if p.kind == "large" else ()  # see baselines.moving
            work.append((p, [*tiles, *((tile, comm) for tile in moving for _, comm in tiles)]))
    if args.check:
        work += [(p, [(tile, comm)]) for p, tile, comm in random_problems(args, args.check, world, 4000)]
    if args.soak:
        work += [(p, [(tile, comm)]) for p, tile, comm in random_problems(args, 16, world, 1536)]
    more = []
    if args.parts and not args.threads:
        more = [
            (what, partial(what_if.compile_part, p.operator, what, build))
            for p in table_problems(args, world)
            for what, build in what_if.compiled(p, world)
        ]
    compile_all(work, world, SMS // world if args.threads else SMS, more)


if __name__ == "__main__":
    main()
