"""No finding in any correct kernel: ``python -m tests.check.sweep [--schedules 200] [--worlds 1-8] [--only NAME]``.

Every kernel of ``sweep_items`` is checked by the driver of ``pk.check``, with all detectors, on 1 to 8 ranks.  What is
done is kept, a line of JSON for each, in ``--results``: a sweep that was stopped goes on from there, and what had
findings is run again.  ``--tiers 0-2`` chooses kernels by kind (see ``sweep_items``), ``--minutes`` ends it early,
``--table`` shows what ran and runs nothing.  The exit code is 1 if anything was found.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pk
from pk import errors
from pk.checking import Checks, Options
from pk.sim.pool import Pool
from pk.simulate import forget, substituted
from tests.check.sweep_items import Item, everything, of_program
from tests.conformance.case import Arg, untouched
from tests.conformance.run import place

RESULTS = Path(__file__).parents[2] / "build" / "sweep.jsonl"
PROGRAMS = 100


@dataclass(frozen=True)
class Outcome:
    """One kernel on one number of ranks: ``findings``, as text, and ``error`` if it could not be checked."""

    name: str
    world: int
    schedules: int
    seconds: float
    findings: tuple[str, ...] = ()
    error: str = ""

    @property
    def clean(self) -> bool:
        """Whether it ran, and nothing was found."""
        return not self.findings and not self.error


def check(item: Item, world: int, schedules: int, seed: int = 0) -> Outcome:
    """Check ``item`` on ``world`` ranks, as ``pk.check`` and ``python -m pk check`` do, on this core alone."""
    began = time.monotonic()
    ready = {**item.scalars(world), **item.constants(world)}
    with Pool(1) as pool:
        checks = Checks(Options(schedules, item.sms, seed, shrink=0.0), pool)

        def launch(rank: int) -> None:
            mine = {name: _tensor(arg) for name, arg in item.make(rank, world).items()}
            item.kernel(*item.kernel.signature.bind((), mine | ready).values())  # one has a parameter `group`

        error = ""
        with substituted(checks, everywhere=True):
            try:
                pk.spawn(launch, world, "sim")
            except errors.PkError as failure:
                if not isinstance(failure.__cause__, errors.CheckError):  # that one has findings
                    error = f"{type(failure.__cause__ or failure).__name__}: {failure.__cause__ or failure}"
    found = [f for made in checks.done for f in made.findings if f.kind not in item.ignored]
    ran = sum(made.schedules for made in checks.done)
    return Outcome(item.name, world, ran, time.monotonic() - began, tuple(map(str, found)), error)


def _tensor(arg: Arg) -> torch.Tensor:
    """The argument; what a kernel has to write is memory that nobody has written."""
    view, whole = place(arg)
    if np.array_equal(arg.value, untouched(arg.value.shape, arg.dtype), equal_nan=True) and whole.numel():
        forget(whole)
    return view


# ------------------------------------------------------------------------------------------------------ the sweep
_items: dict[str, Item] = {}


def _job(name: str, world: int, schedules: int) -> Outcome:
    """In a worker."""
    if not _items:
        torch.set_num_threads(1)
        _items.update({item.name: item for item in everything()})
    try:
        _, program, seed = name.partition("program_")  # those are made one by one: it takes time
        return check(of_program(int(seed)) if program else _items[name], world, schedules)
    except Exception as error:  # noqa: BLE001  told, and the sweep goes on
        return Outcome(name, world, 0, 0.0, error=f"{type(error).__name__}: {error}")


def kept(path: Path) -> dict[tuple[str, int], Outcome]:
    """The last outcome of every kernel and number of ranks."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        fields = json.loads(line)
        made = Outcome(**{**fields, "findings": tuple(fields["findings"])})
        found[made.name, made.world] = made
    return found


def sweep(jobs: list[tuple[str, int]], schedules: int, path: Path, workers: int, minutes: float) -> int:
    """Run the jobs, in their order, in ``workers`` processes (1: in this one); how many were not clean."""
    path.parent.mkdir(parents=True, exist_ok=True)
    end, bad, done = time.monotonic() + 60 * minutes, 0, 0
    in_time = itertools.takewhile(lambda job: time.monotonic() < end, jobs)
    with path.open("a", encoding="utf-8") as file:
        for outcome in _outcomes(in_time, schedules, workers):
            done += 1
            bad += not outcome.clean
            file.write(json.dumps(vars(outcome)) + "\n")
            file.flush()
            print(f"[{done}/{len(jobs)}] {line(outcome)}", flush=True)
    if done < len(jobs):
        print(f"out of time: {len(jobs) - done} of {len(jobs)} did not run")
    return bad


def _outcomes(jobs: Iterator[tuple[str, int]], schedules: int, workers: int) -> Iterator[Outcome]:
    """The outcomes of the jobs, as they come; a job is taken when a worker is free."""
    if workers <= 1:
        yield from (_job(*job, schedules) for job in jobs)
        return
    running: set[Future[Outcome]] = set()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        while True:
            for job in itertools.islice(jobs, workers - len(running)):
                running.add(pool.submit(_job, *job, schedules))
            if not running:
                return
            ready, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in ready)


def line(outcome: Outcome) -> str:
    """One outcome, in words."""
    head = f"{outcome.name} world {outcome.world}: {outcome.schedules} schedules, {outcome.seconds:.1f} s"
    told = [outcome.error] if outcome.error else list(outcome.findings)
    return head + (": clean" if outcome.clean else "\n" + "\n".join(told))


def table(items: Iterable[Item], outcomes: dict[tuple[str, int], Outcome]) -> str:
    """What ran: by kernel, the schedules on each number of ranks; ``-`` did not run, ``!`` had findings."""
    lines = ["| kernel | " + " | ".join(map(str, range(1, 9))) + " |", "|---" + "|--:" * 8 + "|"]
    for item in items:
        cells = []
        for world in range(1, 9):
            o = outcomes.get((item.name, world))
            ran = "-" if o is None else str(o.schedules) + "!" * (not o.clean)
            cells.append(ran if world in item.worlds else "")
        lines.append(f"| {item.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _range(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.check.sweep", description=__doc__.split("\n")[0])
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--worlds", type=_range, default=list(range(1, 9)), help="such as 1-8 or 2,3")
    parser.add_argument("--tiers", type=_range, default=[0, 1, 2], help="0 examples and operators, 1 tests, ...")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--table", action="store_true")
    return parser.parse_args()


def main() -> int:
    """The command."""
    o = _options()
    items = [i for i in everything(PROGRAMS if 4 in o.tiers else 0) if i.tier in o.tiers and o.only in i.name]
    before = kept(o.results)
    if o.table:
        print(table(items, before))
        return int(any(not before[key].clean for i in items for w in i.worlds if (key := (i.name, w)) in before))

    def done(name: str, world: int) -> bool:
        known: Any = before.get((name, world))
        return known is not None and known.clean and known.schedules >= o.schedules

    # Small numbers of ranks first: they are quick, and show most.
    jobs = [(i.tier, w, i.name) for i in items for w in i.worlds if w in o.worlds and not done(i.name, w)]
    jobs.sort(key=lambda job: job[:2])
    bad = sweep([(name, world) for _, world, name in jobs], o.schedules, o.results, o.workers, o.minutes)
    print(f"{bad} of {len(jobs)} were not clean" if bad else "no findings")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
