"""All schedules of one launch: what they show together, made smaller, explored further."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pk import errors
from pk.ir.split import roles_of
from pk.sim import compare, residency, trial
from pk.sim.explore import explore_kernel
from pk.sim.findings import Finding, causes, distinct
from pk.sim.image import Arguments
from pk.sim.pool import Pool
from pk.sim.schedule import FAMILY, describe, plan
from pk.sim.shrink import Smallest, alike, shrink
from pk.sim.skeleton import NotExplorable
from pk.sim.trial import Case, Trial

_SHRUNK = 3  # findings of a launch that are made smaller


@dataclass(frozen=True, slots=True)
class Campaign:
    """What ``schedules`` schedules of a launch showed.  ``results``: of one that ended, None if none did."""

    findings: list[Finding]
    results: list[Arguments] | None
    schedules: int
    notes: list[str]

    def names(self, case: Case) -> dict[int, str]:
        """What the schedules do that showed findings, by seed."""
        return {f.seed: describe(f.seed, case.world, case.sms) for f in self.findings if f.seed is not None}


def run(case: Case, seed: int, schedules: int, pool: Pool, exhaustive: bool = False) -> Campaign:
    """Run ``case`` under ``schedules`` schedules from ``seed`` on, and merge what they show.

    Raises the :class:`pk.errors.PkError` of a launch that cannot be simulated at all.
    """
    # Others are compared with one fixed schedule, so that one that led to other results can be replayed alone.
    base = trial.run(case, trial.BASELINE, keep=True)
    first = base if seed == trial.BASELINE else trial.run(case, seed, base.results)
    # Where a loop does not end, each schedule would take as long.
    results, seeds = base.results, _seeds(case, first, seed, 1 if first.endless else schedules)
    trials = [first, *pool.run(case, results, seeds[1:])]
    for each in trials:
        if each.broken is not None:
            raise each.broken
    ended = next((t.seed for t in trials if t.report is not None), None)
    if results is None and ended is not None:
        results = trial.run(case, ended, keep=True).results
    findings = _merged(trials)
    if not causes(findings):
        findings = distinct([*_not_all_resident(case, seed), *findings])
    notes: list[str] = []
    if first.endless and schedules > 1:
        notes.append("no other schedule was run, because a loop did not end in this one")
    if exhaustive:
        more, note = _explored(case)
        findings = _with_traces(findings, more)
        notes.append(note)
    if results is None:  # no schedule lets it end
        findings = _with_more(case, findings, seeds)
    if compare.any_order(case.kernel):
        notes.append("results of schedules were not compared: fetch_add deals out places in order of arrival")
    return Campaign(findings, results, len(trials), notes)


def smallest(case: Case, findings: list[Finding], seconds: float) -> dict[int, Smallest]:
    """For the first few findings, by position, the smallest launch that shows them; ``seconds`` for all together."""
    end, found = time.monotonic() + seconds, dict[int, Smallest]()
    for at, finding in enumerate(findings[:_SHRUNK]):
        left = end - time.monotonic()
        if finding.seed is not None and left > 0:
            found[at] = shrink(case, finding, findings, left / min(_SHRUNK - at, len(findings) - at))
    return found


def _seeds(case: Case, first: Trial, seed: int, schedules: int) -> list[int]:
    counts = dict.fromkeys(("land", "signal", "load", "read"), 64)  # of a launch that did not end
    if (report := first.report) is not None:
        counts = {"land": report.stores, "signal": report.signals, "load": report.loads, "read": report.stores}
    roles = frozenset(kind for _, block in case.kernel.classes for kind in roles_of(block))
    return plan(seed, schedules, case.world, case.sms, counts, roles)


def _merged(trials: list[Trial]) -> list[Finding]:
    """The findings of all schedules, each mistake as the first schedule showed it.

    Results that differ are a consequence, where there are other mistakes.
    """
    found = distinct(f for t in trials for f in t.findings)
    if all(f.kind == "wrong-result" for f in causes(found)):
        return found
    return [f for f in found if f.kind != "wrong-result"]


def _with_traces(findings: list[Finding], explored: list[Finding]) -> list[Finding]:
    """What schedules found, with the shortest traces of the same mistakes, then what only the exploration found."""
    found = list(findings)
    for finding in explored:
        at = next((i for i, f in enumerate(found) if alike(f, finding) or alike(finding, f)), None)
        if at is None:
            found.append(finding)
        elif not found[at].trace:
            found[at] = replace(found[at], trace=finding.trace)
    return distinct(found)


def _not_all_resident(case: Case, seed: int) -> list[Finding]:
    """What goes wrong because not all blocks fit on a device at once; pk asks for more only if ``sms`` says so."""

    def run(resident: int, order: Sequence[int]) -> list[Finding]:
        return list(trial.run(case, seed, resident=resident, order=order).findings)

    return residency.probe(run, case.sms, residency.capacity(case.kernel))


def _with_more(case: Case, findings: list[Finding], seeds: list[int]) -> list[Finding]:
    """The findings of a launch that never ends; deadlocks that a device with more SMs would not have say so."""

    def run(sms: int) -> list[Finding]:
        larger = replace(case, sms=sms)
        tried = dict.fromkeys([*seeds[:4], 6 * FAMILY, 6 * FAMILY + 1])  # blocks in both orders
        return [f for seed in tried for f in trial.run(larger, seed).findings]

    return residency.with_more(findings, run, case.sms)


def _explored(case: Case) -> tuple[list[Finding], str]:
    """What exploring every interleaving found, and how many states that was, or why it was not done."""
    ranks = range(case.world)
    shapes = [{name: shape for name, (shape, _) in case.image.shapes(rank).items()} for rank in ranks]
    scalars = [{n: v for n, v in mine.items() if isinstance(v, int | float)} for mine in case.image.ranks]
    try:
        explored = explore_kernel(case.kernel, shapes, case.world, case.sms, scalars)
    except (NotExplorable, errors.SimulationError) as error:  # the latter is a finding of the schedules too
        return [], f"not every interleaving was explored: {error}"
    return list(explored.findings), explored.note
