"""Every mutant of every kernel is caught, or is in ``equivalent.toml`` with the reason why it changes nothing.

``pytest tests/mutants`` runs a sample, ``pytest tests/mutants --mutants=all`` all of them (minutes), and
``python -m tests.mutants.report`` all of them to write the page docs/mutants.md.
"""

from __future__ import annotations

import pkgutil
import zlib
from importlib import import_module

import pytest

import pk.ops
from pk.ir.mutate import Mutant, mutants
from pk.ir.mutations import OPERATORS
from tests.mutants import report
from tests.mutants.equivalents import EQUIVALENT
from tests.mutants.run import verdict
from tests.mutants.subject import EXAMPLES, Subject, example
from tests.mutants.subjects import SUBJECTS

EVERY = report.EVERY
SAMPLE = [s for s in SUBJECTS if not s.name.startswith(("07.", "08.moe_dispatch"))]  # these two are large
COMMON = frozenset({"tile-off", "drop-stage", "skip-last", "early-fill", "early-drain", "index-off", "wrong-owner"})


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--mutants") == "all"
        metafunc.parametrize("subject", EVERY if everything else SAMPLE, ids=str)


def _chosen(subject: Subject, everything: bool) -> list[Mutant]:
    """The mutants to run: all, or always the same sample, one in two of rare operators and one in twelve of others."""
    made = mutants(subject.ir)
    if everything:
        return list(made)
    return [m for m in made if zlib.crc32(f"{subject}{m.name}".encode()) % (12 if m.operator in COMMON else 2) == 0]


def test_mutants_are_caught(subject: Subject, request: pytest.FixtureRequest) -> None:
    everything = request.config.getoption("--mutants") == "all"
    listed = EQUIVALENT.get(subject.name, {})
    missed, wrong = [], []
    for mutant in _chosen(subject, everything):
        v = verdict(subject, mutant)
        if not v.caught and mutant.name not in listed:
            missed.append(f"{mutant.name} (line {mutant.span.line})")
        if v.caught and mutant.name in listed:
            wrong.append(f"{mutant.name}: caught by {v.by}")
    assert not missed, "nothing catches\n  " + "\n  ".join(missed)
    assert not wrong, "listed as equivalent, and caught:\n  " + "\n  ".join(wrong)


def test_the_sample_has_every_operator() -> None:
    assert {m.operator for s in SAMPLE for m in _chosen(s, False)} >= set(OPERATORS) - {"swap-tiles"}


def test_every_kernel_of_the_operators_and_examples_is_mutated() -> None:
    modules = [import_module(f"pk.ops.{m.name}") for m in pkgutil.iter_modules(pk.ops.__path__)]
    modules += [example(path.stem) for path in sorted(EXAMPLES.glob("[0-9]*.py"))]
    kernels = {id(v): f"{m.__name__}.{n}" for m in modules for n, v in vars(m).items() if isinstance(v, pk.Kernel)}
    assert len(kernels) >= 20
    missing = [name for ident, name in kernels.items() if ident not in {id(s.kernel) for s in EVERY}]
    assert not missing, f"tests/mutants/subjects_ops.py has no problem for {', '.join(missing)}"


def test_every_listed_mutant_exists_and_has_a_reason() -> None:
    names = {s.name: {m.name for m in mutants(s.ir)} for s in EVERY}
    for subject, listed in EQUIVALENT.items():
        assert subject in names, f"equivalent.toml names {subject}, which is no subject"
        assert not set(listed) - names[subject], f"{subject} has no such mutants"
        assert all(len(reason) > 20 for reason in listed.values()), subject


def test_the_page_is_up_to_date() -> None:
    rows = report.kept_rows()
    stale = [
        s.name
        for s in EVERY
        if [rows.get(s.name, [0])[i] for i in (0, -1)] != [len(list(mutants(s.ir))), len(EQUIVALENT.get(s.name, {}))]
    ]
    assert not stale, f"python -m tests.mutants.report {' '.join(stale)}"
    assert report.PAGE.read_text(encoding="utf-8") == report.page(rows), "python -m tests.mutants.report"
