"""``pk.ops``' collectives on this machine's GPUs, beside NCCL and torch's symmetric-memory all-reduce.

A process for each GPU, bfloat16, random normal data.  Sizes are of the whole message, as NCCL counts it: the gathered
result of an all-gather, one rank's input of the others.  GB/s are of the bytes that must cross the link, each way, of
a rank: (world - 1) / world of the message, twice that for an all-reduce.  "pk" writes ordinary memory, "pk, symmetric"
memory of ``pk.empty``, "graph" is a CUDA graph of one call.  Every contender is checked on every rank, on outputs that
held NaN, before and after timing.  A sample is some back-to-back calls behind a device-side meeting of the ranks;
samples are interleaved in shuffled rounds; the maximum over the ranks, then the median over the rounds counts.  NVLink
multicast is off.  On one GPU the ranks are threads that share it, without rivals.

    python benchmarks/collectives.py --seconds 200 --out results          # all GPUs
    python benchmarks/collectives.py --check 300                          # correctness: random problems, float64
    python benchmarks/collectives.py --sweep --sizes 64KB,1MB,64MB        # tiles, signals, blocks, hops
    python benchmarks/collectives.py --trace --sizes 64KB,64MB            # where the time goes
    PK_BACKEND=sim python benchmarks/collectives.py --ranks 2             # a rehearsal without GPUs
"""

from __future__ import annotations

import environment  # noqa: F401

# isort: split
import argparse
import math
import random
import statistics
import sys
import time
import zlib
from functools import partial
from pathlib import Path

import baselines
import collective_calls
import collective_problems as problems
import torch
from baselines import Contender
from collective_problems import LINK_GB_S, OPERATORS, Operands, Problem, Way, size
from report import Row, facts, table, write
from rounds import Rounds, traced
from team import Team, Threads, processes
from tp_problems import compile_all

import pk
from pk.runtime.group import current, default_backend

SIZES = ("1KB", "4KB", "16KB", "64KB", "256KB", "1MB", "4MB", "16MB", "64MB", "256MB", "1GB")
SWEPT = ("16KB", "256KB", "1MB", "16MB", "256MB")
SMALL = 256 << 10  # bytes up to which calls are captured in CUDA graphs too
TOLERANCE = 6e-3  # a rounding to bfloat16 is 1.7e-3
COLUMNS = ("operator", "size", "us", "GB/s", "of link", "symmetric us", "rival", "rival us", "rival / pk", "single us")


class Bench(Rounds):
    """One problem of the table, or of the sweep."""

    kept = "pk"

    def __init__(self, team: Team, p: Problem, ways: list[tuple[Way, bool]]) -> None:
        super().__init__(team)
        self.p = p
        self.o = o = Operands(p, team)
        self.want = o.reference()
        for c in [*problems.ours(o), *problems.variants(o, ways)]:
            self.admit(c)
        if team.library and not ways:
            for what, make in (("NCCL", problems.nccl), ("symmetric memory", problems.symmetric_memory)):
                if what == "NCCL" or team.gpu:
                    ok, found = team.attempt(what, partial(make, o))
                    for c in found if ok else ():
                        self.admit(c)
        if team.gpu and team.library and not ways and p.nbytes <= SMALL:
            for c in list(self.contenders.values()):
                ok, captured = team.attempt(f"graph of {c.name}", partial(baselines.graphed, c))
                if ok:
                    self.admit(captured)

    def check(self, c: Contender) -> float:
        """As declared."""
        if not c.whole:
            c.call()
            return 0.0
        self.o.poison()
        got = c.call()
        self.team.sync()
        if not isinstance(got, torch.Tensor):  # a graph
            got = self.o.there if "symmetric" in c.name else self.o.out
        assert got is not None
        return self.o.error(self.want, got)

    def row(self) -> Row:
        """What is reported."""
        us = {name: self.median(name) for name in self.times}
        right = {name for name, e in self.errors.items() if e < TOLERANCE}
        plain = {name for name in right if ", graph" not in name}
        best = {kind: [n for n in self.of_kind(kind) if n in plain] for kind in ("pk", "rival")}
        moved, world = self.p.link_bytes(self.team.world), self.team.world
        mine = us.get("pk", math.nan) if "pk" in right else math.nan
        rival = best["rival"][0] if best["rival"] else ""
        return {
            "operator": self.p.operator, "nbytes": self.p.nbytes, "size": size(self.p.nbytes), "world": world,
            "us": mine, "GB/s": moved / mine * 1e-3, "of link": moved / mine * 1e-3 / LINK_GB_S,
            "symmetric us": us.get("pk, symmetric", ""), "best": best["pk"][0] if best["pk"] else "",
            "best us": us[best["pk"][0]] if best["pk"] else math.nan,
            "rival": rival, "rival us": us[rival] if rival else math.nan,
            "rival / pk": us[rival] / mine if rival else math.nan, "single us": self.single.get("pk", math.nan),
            "NCCL us": us.get("NCCL", ""), "host us": self.host.get("pk", math.nan),
            "graph us": us.get("pk, graph", ""), "NCCL graph us": us.get("NCCL, graph", ""),
            "all": us, "errors": self.errors, "single": self.single,
            "samples": {name: len(times) for name, times in self.times.items()},
            "wrong": sorted(name for name, e in self.errors.items() if not e < TOLERANCE),
        }  # fmt: skip


def line(row: Row) -> str:
    """A row in words, contenders fastest first."""
    us = row["all"]
    moved = Problem(row["operator"], row["nbytes"]).link_bytes(row["world"])
    named = sorted(us, key=us.__getitem__)
    said = [f"{row['operator']:<15}{row['size']:>7}:"]
    said += [f"{n} {us[n]:.1f} ({moved / us[n] * 1e-3:.0f} GB/s)" for n in named]
    return "  ".join(said) + (f"  WRONG {' '.join(row['wrong'])}" if row["wrong"] else "")


# ---------------------------------------------------------------------------------------------------------- work
def work(args: argparse.Namespace, world: int) -> list[tuple[Problem, list[tuple[Way, bool]]]]:
    """The rows, and of the sweep the ways to try."""
    found = []
    for operator in args.operators.split(","):
        for text in args.sizes.split(","):
            p = Problem(operator, max(problems.nbytes_of(text), 2 * world))
            found.append((p, swept(p, world) if args.sweep else []))
    return found


def swept(p: Problem, world: int) -> list[tuple[Way, bool]]:
    """Tiles, bytes behind a signal and blocks; of large sums, SMs that send; for an all-reduce one hop and two."""
    hops = (1, 2) if p.operator == "all_reduce" else (None,)
    small, sums = p.nbytes <= 1 << 20, p.operator in ("all_reduce", "reduce_scatter")
    large = problems.TILES[1:3] if sums else problems.TILES[1:]  # sums of larger ones have too few registers
    ways = [
        Way(tile, signal, blocks, h)
        for h in hops
        for tile in ((512, 1024, 2048, 4096) if small else large)
        for signal in ((32,) if small or h == 2 else problems.SIGNAL_KB)
        for blocks in ((0, 32) if small else problems.BLOCKS)
    ]
    if sums and not small:
        ways += [Way(blocks=0, hops=h, senders=senders) for h in hops for senders in (0, 24, 44, 66, 88)]
    return [(way, False) for way in ways] + [
        (way, True) for way in ways if way.blocks in (0, 32) and p.operator != "reduce_scatter" and way.hops != 1
    ]


def measure(team: Team, args: argparse.Namespace) -> int:
    """The table; how many rows are wrong."""
    todo, rows = work(args, team.world), list[Row]()
    for i, (p, ways) in enumerate(todo):
        left = team.left()
        if left < 2:
            team.say(f"no time left for {len(todo) - i} rows")
            break
        share, began = (left - 1) / (len(todo) - i), time.time()
        bench = Bench(team, p, ways)
        bench.run(share - (time.time() - began), args.rounds)
        rows.append(bench.row())
        team.say(line(rows[-1]))
        del bench
        if team.rank == 0 and args.out:
            write(args.out, args.name, rows)
    if team.rank == 0:
        print("\n" + table(rows, COLUMNS))
        for operator in args.operators.split(","):
            ratios = [r["rival / pk"] for r in rows if r["operator"] == operator and r["rival / pk"] == r["rival / pk"]]
            if ratios:
                mean = statistics.geometric_mean(ratios)
                print(f"{operator}: geometric mean of best rival / pk {mean:.3f}, least {min(ratios):.3f}")
    return sum(bool(row["wrong"]) for row in rows)


def trace(team: Team, args: argparse.Namespace) -> int:
    """Each problem's calls traced, not timed: what they wait for, on rank 0; how many failed."""
    failed = 0
    for p, _ in work(args, team.world):
        for c in problems.ours(Operands(p, team)):
            name = f"trace_{p.title()}_{c.name}.json".replace(" ", "_").replace(",", "")
            ok, text = team.attempt(p.title(), partial(traced, c.call, Path(args.out) / name if args.out else None))
            failed += not ok
            team.say(f"\n{p.title()}, {c.name}\n{text if ok else ''}")
    return failed


def check(team: Team, args: argparse.Namespace) -> int:
    """Random calls, each made twice (the bits must be the same), against float64; how many are wrong."""
    bad, done = 0, 0
    for seed, (call, hops) in enumerate(random_calls(args, team.world)):
        if seed % 10 == 0 and team.left() < 1:
            break
        ok, results = team.attempt(f"{call}", partial(twice, call, team, seed, hops))
        wrong = "" if ok else "failed"
        if ok:
            try:
                assert torch.equal(*map(collective_calls.raw, results)), "other bits in the second call"
                call.check({team.rank: results[0]}, team.world, seed)
            except AssertionError as error:
                wrong = str(error)[:300]
        bits = zlib.crc32(collective_calls.raw(results[0]).numpy().tobytes()) if ok and call.alike else 0
        told = team.told((wrong, bits))
        done += 1
        if any(text for text, _ in told) or len({bits for _, bits in told}) > 1:
            bad += 1
            team.say(f"   WRONG {call}, {hops} hops: {told}")
    team.say(f"checked {done} calls on {team.world} ranks: {bad} wrong")
    return bad


def random_calls(args: argparse.Namespace, world: int) -> list[tuple[collective_calls.Call, int | None]]:
    """For ``check``, the same on all ranks; with the hops of an all-reduce."""
    rng, most = random.Random(args.seed), 1 << (22 if default_backend() == "cuda" or args.compile_only else 10)
    return [(collective_calls.make(rng, world, most), rng.choice((None, 1, 2))) for _ in range(args.check)]


def twice(call: collective_calls.Call, team: Team, seed: int, hops: int | None) -> list[torch.Tensor]:
    """The results of two calls."""
    with problems.planned(Way(hops=hops)):
        current().calls.clear()  # of plans that were made otherwise
        return [call.run(team.rank, team.world, seed) for _ in range(2)]


def run(team: Team, args: argparse.Namespace) -> int:
    """What the options ask for; how much is wrong."""
    team.worst([0.0])
    ready = time.time() - team.began
    team.say(f"{team.world} ranks, {facts()['device']}, torch {torch.__version__}, ready after {ready:.0f} s")
    wrong = check(team, args) if args.check else 0
    if args.trace:
        wrong += trace(team, args)
    if args.table or args.sweep or not (args.check or args.trace):
        wrong += measure(team, args)
    return wrong


def thread_main(rank: int, world: int, args: argparse.Namespace, began: float) -> int:
    """One rank's thread."""
    return run(Threads(rank, world, torch.device(pk.device()), began, args.seconds), args)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=0, help="default: all GPUs, or 2 simulated")
    parser.add_argument("--seconds", type=float, default=200, help="for everything, compiling included")
    parser.add_argument("--out", default="", help="folder for CSV and JSON")
    parser.add_argument("--name", default="collectives", help="of these files")
    parser.add_argument("--operators", default=",".join(OPERATORS))
    parser.add_argument("--sizes", default="", help="of the message, as 64KB,1GB; default: 1KB to 1GB")
    parser.add_argument("--rounds", type=int, default=8, help="at most")
    parser.add_argument("--check", type=int, default=0, metavar="N", help="N random problems")
    parser.add_argument("--table", action="store_true", help="after --check, the table too")
    parser.add_argument("--sweep", action="store_true", help="try tiles, bytes a signal, blocks and hops")
    parser.add_argument("--trace", action="store_true", help="trace calls of the operators and show what they wait for")
    parser.add_argument("--threads", action="store_true", help="ranks are threads that share one GPU")
    parser.add_argument("--compile-only", action="store_true", help="fill the disk cache, run nothing")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args, began = options(), time.time()
    gpu = default_backend() == "cuda"
    gpus = torch.cuda.device_count() if gpu else 0
    world = args.ranks or max(gpus, 2)
    args.threads = args.threads or (gpu and world > gpus)
    args.sizes = args.sizes or ",".join((SWEPT if args.sweep else SIZES) if gpu else ("1KB", "64KB"))
    args.rounds = args.rounds if gpu else 1
    if gpu or args.compile_only:
        precompile(world, args)
    if args.compile_only:
        return
    if args.threads:
        wrong = pk.spawn(thread_main, world, "cuda-threads" if gpu else "sim", (world, args, began))
        sys.exit("wrong results" if any(wrong) else 0)
    sys.exit(processes(run, world, args, began))


def precompile(world: int, args: argparse.Namespace) -> None:
    """Every kernel that will be needed, in parallel processes, into the disk cache."""
    found = []
    if args.table or args.sweep or args.trace or not args.check:
        for p, ways in work(args, world):
            found += problems.builds(p, [(Way(), False), (Way(), True), *ways], world)
    for call, hops in random_calls(args, world):
        found += problems.builds_of(call, Way(hops=hops), world)
    wanted = {repr(build): build for build in found}
    compile_all([], world, more=[(b[0], partial(problems.compile_one, b)) for b in wanted.values()])


if __name__ == "__main__":
    main()
