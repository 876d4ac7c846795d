"""What the benchmarks of several ranks share: contenders for one problem, checked and timed in interleaved rounds."""

from __future__ import annotations

import random
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from baselines import Contender
from team import Team

import pk

SAMPLE_US = 8_000.0  # that a sample should take
MOST_CALLS = 50
BEHIND = 1.12  # times the best of pk: dropped after two rounds
BURSTS = 7
KINDS = ("pk", "rival", "gemm", "comm", "part")  # of contenders


class Rounds(ABC):
    """One problem: contenders, their errors and times.  ``kept``: of pk's, never dropped."""

    kept = "pk default"

    def __init__(self, team: Team) -> None:
        self.team = team
        self.contenders: dict[str, Contender] = {}
        self.errors: dict[str, float] = {}
        self.host: dict[str, float] = {}
        self.single: dict[str, float] = {}
        self.times: dict[str, list[float]] = {}

    @abstractmethod
    def check(self, c: Contender) -> float:
        """Run it on a poisoned output: the relative error of its result; 0 for a part."""

    def admit(self, c: Contender) -> None:
        """Run, check and warm a contender up; left out if a rank fails."""
        ok, error = self.team.attempt(c.name, lambda: self.check(c))
        if not ok:
            return
        ok, host = self.team.attempt(c.name, lambda: self.team.host_us(c.call, 3 if self.team.gpu else 1))
        if ok:
            self.errors[c.name], self.host[c.name] = self.team.worst([error, host])
            self.contenders[c.name], self.times[c.name] = c, []

    def median(self, name: str) -> float:
        """Microseconds."""
        return statistics.median(self.times[name])

    def of_kind(self, kind: str) -> list[str]:
        """Names, fastest first."""
        return sorted((n for n, c in self.contenders.items() if c.kind == kind), key=self.median)

    def run(self, seconds: float, most_rounds: int) -> None:
        """Rounds for about ``seconds``, at least three; then single calls of those that matter, and their errors."""
        team, rng = self.team, random.Random(0)
        least = 3 if team.gpu else 1
        alive, rounds, until = list(self.contenders), 0, team.left() - seconds
        counts = dict.fromkeys(alive, 1)
        if team.gpu:
            firsts = team.worst(team.sample(self.contenders[n].call, 2, self.host[n]) for n in alive)
            counts = {n: int(min(max(SAMPLE_US / us, 4), MOST_CALLS)) for n, us in zip(alive, firsts, strict=True)}
        while rounds < least or (rounds < most_rounds and team.left() > until):
            rng.shuffle(alive)
            found = [team.sample(self.contenders[n].call, counts[n], self.host[n]) for n in alive]
            for name, us in zip(alive, team.worst(found), strict=True):
                self.times[name].append(us)
            rounds += 1
            ours = self.of_kind("pk")
            if rounds == 2 and ours:
                limit = BEHIND * self.median(ours[0])
                alive = [n for n in alive if n not in ours or n == self.kept or self.median(n) < limit]
        main = [n for kind in KINDS for n in self.of_kind(kind)[:2] if n in alive]
        for name in main if team.gpu else []:
            singles = []
            for _ in range(BURSTS):
                singles.append(team.sample(self.contenders[name].call, 1, self.host[name], first=False))
                time.sleep(3e-6 * singles[-1] + 1e-4)
            self.single[name] = statistics.median(team.worst(singles))
        for name in main:
            again = team.worst([self.check(self.contenders[name])])[0]
            self.errors[name] = max(self.errors[name], again)


def traced(call: Callable[[], object], path: Path | None) -> str:
    """What every role of this rank's last launches waits for, of a warm ``call``; ``path``: a file for the timeline."""
    for _ in range(3):
        call()
    with pk.trace(path, launches=4) as timeline:
        for _ in range(2):
            call()
    return "\n\n".join(map(str, timeline.launches[len(timeline.launches) // 2 :]))
