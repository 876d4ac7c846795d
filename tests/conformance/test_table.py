"""``docs/conformance.md`` is current, and no cell of it that makes sense is empty."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from tests.conformance import table

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
HOW = "Write a case in tests/conformance/cases_*.py (and say in table.SENSIBLE which dtypes the operation is for)."


def test_the_table_knows_every_operation() -> None:
    unknown = table.unknown()
    assert not unknown, f"no conformance for: {', '.join(unknown)}.\n  {HOW}"


def test_no_cell_that_makes_sense_is_empty() -> None:
    empty = table.empty()
    assert not empty, "untested:\n  " + "\n  ".join(empty) + f"\n  {HOW}"


def test_the_page_is_current(request: pytest.FixtureRequest) -> None:
    text = table.text()
    if request.config.getoption("--update-golden"):
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text, encoding="utf-8")
    kept = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if text != kept:
        diff = difflib.unified_diff(kept.splitlines(), text.splitlines(), "docs/conformance.md", "now", "", "", 1, "")
        pytest.fail("\n".join([*diff, "Rewrite it: pytest tests/conformance/test_table.py --update-golden"]), False)
