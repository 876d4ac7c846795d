"""Run mutants: each is caught by the compiler, by the checker, by an error of the simulator, or by a wrong result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from pk import errors
from pk.ir import nodes as ir
from pk.ir.check import check
from pk.ir.mutate import Mutant, mutants
from pk.sim.checker import Checker
from pk.sim.memory import SimTensor
from pk.sim.run import simulate
from tests.mutants.subject import Problem, Subject

SEEDS = (0, 1, 2)
NOTES = frozenset({"lost-signal", "out-of-range", "clipped", "uninitialised"})
"""Kinds of findings that a kernel may give rise to and do what is wanted all the same."""


@dataclass(frozen=True)
class Verdict:
    """What caught a mutant: ``by`` is ``compiler``, a kind of finding, the name of an error, ``result``, or empty."""

    mutant: Mutant
    by: str
    seconds: float = 0.0

    @property
    def caught(self) -> bool:
        """Whether anything did."""
        return bool(self.by)


def verdict(subject: Subject, mutant: Mutant) -> Verdict:
    """Run one mutant under every seed and problem until something catches it."""
    try:
        check(mutant.kernel)
    except errors.CompileError:
        return Verdict(mutant, "compiler")
    for problem_at in range(len(subject.problems)):
        for seed in SEEDS:
            by = caught_by(subject, problem_at, mutant.kernel, seed)
            if by:
                return Verdict(mutant, by)
    return Verdict(mutant, "")


def caught_by(subject: Subject, problem_at: int, kernel: ir.Kernel, seed: int) -> str:
    """What catches ``kernel`` on one problem under one schedule; empty if nothing does."""
    problem = subject.problems[problem_at]
    results, known = expected(subject, problem_at)
    arguments = problem.arguments()
    try:
        kinds = _simulate(kernel, problem, arguments, seed, known)
    except errors.DeadlockError:
        return "deadlock"
    except errors.PkError as error:
        return type(error).__name__
    serious = [kind for kind in kinds if kind not in NOTES]
    if serious:
        return serious[0]
    return "result" if _bits(arguments) != results else kinds[0] if kinds else ""


def _simulate(
    kernel: ir.Kernel, problem: Problem, arguments: list[dict[str, Any]], seed: int, known: frozenset[Any]
) -> list[str]:
    """Kinds of what one schedule finds, but for what is ``known`` of the kernel as it is."""
    checker = Checker()
    simulate(kernel, arguments, sms=problem.sms, seed=seed, checker=checker)
    return [f.kind for f in checker.findings if f.key not in known]


@cache
def expected(subject: Subject, problem_at: int) -> tuple[tuple[bytes, ...], frozenset[Any]]:
    """The results of the kernel as it is, which do not depend on the schedule, and what is found in it.

    Nothing but notes: of signals that nobody waits for, which some kernels of the tests have, and of tiles that lie
    outside.
    """
    problem = subject.problems[problem_at]
    results, known = set(), set()
    for seed in SEEDS:
        arguments, checker = problem.arguments(), Checker()
        simulate(subject.ir, arguments, sms=problem.sms, seed=seed, checker=checker)
        results.add(_bits(arguments))
        known |= {f.key for f in checker.findings}
        wrong = [str(f) for f in checker.findings if f.kind not in NOTES]
        assert not wrong, f"{subject}: the kernel as it is is wrong: {wrong[0]}"
    assert len(results) == 1, f"{subject}: the results of the kernel as it is depend on the schedule"
    return results.pop(), frozenset(known)


def _bits(arguments: list[dict[str, Any]]) -> tuple[bytes, ...]:
    tensors = [t for mine in arguments for t in mine.values() if isinstance(t, SimTensor)]
    return tuple(np.ascontiguousarray(t.array).tobytes() for t in tensors)


def all_verdicts(subject: Subject, only: frozenset[str] | None = None) -> Iterator[Verdict]:
    """Verdicts on all mutants of a subject."""
    for mutant in mutants(subject.ir, only):
        yield verdict(subject, mutant)
