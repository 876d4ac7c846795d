"""Run mutants and write ``docs/mutants.md``: ``python -m tests.mutants.report [--workers N] [kernel ...]``.

With names (or what they begin with) only those kernels run; the rows of the others stay as they are.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from pk.ir.mutate import mutants
from pk.ir.mutations import OPERATORS
from tests.mutants.equivalents import EQUIVALENT
from tests.mutants.run import NOTES, all_verdicts
from tests.mutants.subjects import SUBJECTS
from tests.mutants.subjects_ops import SUBJECTS as OF_OPERATORS
from tests.mutants.subjects_tests import SUBJECTS as OF_TESTS

PAGE = Path(__file__).parents[2] / "docs" / "mutants.md"
EVERY = [*SUBJECTS, *OF_OPERATORS, *OF_TESTS]
COLUMNS = ("compiler", "race", "deadlock", "error", "result", "note")
HEAD = """# Mutants

Does the checker find mistakes? `pk.ir.mutate` makes them: every mutant is a kernel of this repository with one thing
changed. It must be refused by the compiler, or found by the detectors of `pk.check`, or end in a deadlock, an error or
a wrong result. This page is written by `python -m tests.mutants.report`; `pytest tests/mutants --mutants=all` runs the
same. Kernels that meet run on two or three ranks (ring attention on four), each mutant under up to three schedules of
up to four small problems.

Columns: refused by the **compiler**; a data **race**; a **deadlock**; an **error** of the simulation (an index outside
its array, a rank that does not exist, a failed assert); another **result** than the kernel as it is; a **note** (a lost
signal, a tile outside its tensor, a read of memory that nothing wrote) and nothing else; **equivalent** (see below).
The first that applies counts, in the order compiler, deadlock, error, race, result, note.
"""
Row = list[int]  # mutants, one number a column, equivalent


def _run(at: int) -> list[tuple[str, str]]:
    """Name and catch of every mutant of a kernel; a function that worker processes can find."""
    return [(v.mutant.name, v.by) for v in all_verdicts(EVERY[at])]


def row(verdicts: list[tuple[str, str]]) -> Row:
    """The numbers of one kernel."""
    counts = Counter(_column(by) for _, by in verdicts)
    return [len(verdicts), *(counts[c] for c in (*COLUMNS, ""))]


def _column(by: str) -> str:
    if by in ("compiler", "race", "deadlock", "result", ""):
        return by
    return "note" if by in NOTES else "error"


def kept_rows() -> dict[str, Row]:
    """The numbers that the page has now, by kernel."""
    if not PAGE.exists():
        return {}
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in PAGE.read_text(encoding="utf-8").splitlines()]
    return {c[0]: [int(n) for n in c[1:]] for c in cells if len(c) == len(COLUMNS) + 3 and c[1].isdigit()}


def page(rows: dict[str, Row]) -> str:
    """The page for the numbers of every kernel."""
    lines = [HEAD, "| kernel | mutants | " + " | ".join(COLUMNS) + " | equivalent |"]
    lines.append("|---" + "|--:" * (len(COLUMNS) + 2) + "|")
    lines += [f"| {s.name} | " + " | ".join(map(str, rows[s.name])) + " |" for s in EVERY]
    total = [sum(numbers) for numbers in zip(*(rows[s.name] for s in EVERY), strict=True)]
    lines.append("| **all** | " + " | ".join(f"**{n}**" for n in total) + " |")
    lines += ["", "## Operators", "", "| operator | what is wrong | mutants | equivalent |", "|---|---|--:|--:|"]
    made = [(m.operator, m.name in EQUIVALENT.get(s.name, {})) for s in EVERY for m in mutants(s.ir)]
    number, same = Counter(op for op, _ in made), Counter(op for op, listed in made if listed)
    lines += [f"| {op} | {what} | {number[op]} | {same[op]} |" for op, what in OPERATORS.items()]
    return "\n".join([*lines, "", *_equivalents()]) + "\n"


def _equivalents() -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for kernel, listed in EQUIVALENT.items():
        for name, reason in listed.items():
            by_reason.setdefault(reason, []).append(f"{kernel}: {name}")
    lines = ["## Equivalent mutants", "", "They change nothing that can be seen, for the reason given.", ""]
    for reason, names in by_reason.items():
        lines += [f"- {reason}", *[f"    - {name}" for name in names]]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Run mutants and write docs/mutants.md")
    parser.add_argument("kernels", nargs="*", help="kernels to run, by what their names begin with; default: all")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    rows = kept_rows()
    run = [i for i, s in enumerate(EVERY) if not args.kernels or s.name.startswith(tuple(args.kernels))]
    run += [i for i, s in enumerate(EVERY) if i not in run and s.name not in rows]
    wrong = 0
    with ProcessPoolExecutor(args.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for at, verdicts in zip(run, pool.map(_run, run), strict=True):
            rows[EVERY[at].name] = row(verdicts)
            listed = EQUIVALENT.get(EVERY[at].name, {})
            for name, by in verdicts:
                if (not by) != (name in listed):
                    wrong += 1
                    print(f"{EVERY[at]}: {name}: {f'listed, and caught by {by}' if by else 'nothing catches it'}")
    PAGE.write_text(page(rows), encoding="utf-8")
    print(f"{sum(r[0] for r in rows.values())} mutants of {len(rows)} kernels; {wrong} are not as they should be")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
