"""Run every mutant and write ``docs/mutants.md``: ``python -m tests.mutants.report [workers]``."""

from __future__ import annotations

import multiprocessing
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from pk.ir.mutations import OPERATORS
from tests.mutants.equivalents import EQUIVALENT
from tests.mutants.run import NOTES, all_verdicts
from tests.mutants.subject import Subject
from tests.mutants.subjects import SUBJECTS
from tests.mutants.subjects_tests import SUBJECTS as OF_TESTS

PAGE = Path(__file__).parents[2] / "docs" / "mutants.md"
COLUMNS = ("compiler", "race", "deadlock", "error", "result", "note")
HEAD = """# Mutants

Does the checker find mistakes? `pk.ir.mutate` makes them: every mutant is a kernel of this repository with one thing
changed. It must be refused by the compiler, or found by `pk.check`'s detectors, or end in a deadlock, an error or a
wrong result. This page is written by `python -m tests.mutants.report`; `pytest tests/mutants --mutants=all` runs the
same. Every mutant ran on two or three ranks with small problems and up to three schedules.

Columns: refused by the **compiler**; a data **race**; a **deadlock**; an **error** of the simulation (an index outside
its array, a rank that does not exist, a failed assert); another **result** than the kernel as it is; a **note** (a lost
signal, a tile outside its tensor, a read of memory that nothing wrote) and nothing else; **equivalent** (see below).
The first that applies counts, in the order race, deadlock, error, result, note.

"""


def _index(at: int) -> tuple[int, list[tuple[str, str, str]]]:
    subject = [*SUBJECTS, *OF_TESTS][at]
    return at, [(v.mutant.name, v.mutant.operator, v.by) for v in all_verdicts(subject)]


def column(by: str) -> str:
    """The column of the page for what caught a mutant."""
    if by in ("compiler", "race", "deadlock", "result", ""):
        return by
    return "note" if by in NOTES else "error"


def page(subjects: list[Subject], found: list[list[tuple[str, str, str]]]) -> str:
    """The page for the verdicts on all subjects."""
    lines = [HEAD.rstrip(), "", "| kernel | mutants | " + " | ".join(COLUMNS) + " | equivalent |"]
    lines.append("|---" + "|--:" * (len(COLUMNS) + 2) + "|")
    total: Counter[str] = Counter()
    for subject, verdicts in zip(subjects, found, strict=True):
        counts = Counter(column(by) for *_, by in verdicts)
        total += counts
        cells = [str(counts[c]) for c in (*COLUMNS, "")]
        lines.append(f"| {subject.name} | {len(verdicts)} | " + " | ".join(cells) + " |")
    cells = [f"**{total[c]}**" for c in (*COLUMNS, "")]
    lines.append(f"| **all** | **{sum(total.values())}** | " + " | ".join(cells) + " |")
    lines += ["", "## Operators", "", "| operator | what is wrong | mutants | equivalent |", "|---|---|--:|--:|"]
    by_operator = Counter(op for verdicts in found for _, op, _ in verdicts)
    same = Counter(op for verdicts in found for _, op, by in verdicts if not by)
    lines += [f"| {op} | {what} | {by_operator[op]} | {same[op]} |" for op, what in OPERATORS.items()]
    return "\n".join([*lines, "", *equivalents()]) + "\n"


def equivalents() -> list[str]:
    """The section on mutants that change nothing."""
    by_reason: dict[str, list[str]] = {}
    for kernel, listed in EQUIVALENT.items():
        for name, reason in listed.items():
            by_reason.setdefault(reason, []).append(f"{kernel}: {name}")
    lines = ["## Equivalent mutants", "", "They change nothing that can be seen, for the reason given.", ""]
    for reason, names in by_reason.items():
        lines += [f"- {reason}", *[f"    - {name}" for name in names]]
    return lines


def main() -> None:
    subjects = [*SUBJECTS, *OF_TESTS]
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    found: list[list[tuple[str, str, str]]] = [[] for _ in subjects]
    uncaught = 0
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for at, verdicts in pool.map(_index, range(len(subjects))):
            found[at] = verdicts
            listed = EQUIVALENT.get(subjects[at].name, {})
            for name, _, by in verdicts:
                if (not by) != (name in listed):
                    uncaught += 1
                    print(f"{subjects[at]}: {name}: {'nothing catches it' if not by else f'listed, caught by {by}'}")
    PAGE.write_text(page(subjects, found), encoding="utf-8")
    print(f"{sum(map(len, found))} mutants of {len(subjects)} kernels; {uncaught} are not as they should be")
    sys.exit(uncaught > 0)


if __name__ == "__main__":
    main()
