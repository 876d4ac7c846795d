"""Every Python snippet of the language reference runs, in order, on the simulator."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def snippets(text: str) -> str:
    """The snippets of a page as one module; snippets keep their line numbers, so that errors point into the page."""
    lines, inside = [], False
    for line in text.splitlines():
        fence = line.startswith("```")
        keep = inside and not fence
        if fence:
            inside = not inside and line.strip() == "```python"
        lines.append(line if keep else "")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("page", ["language.md"])
def test_snippets_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_BACKEND", "sim")
    source = snippets((ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert len(re.findall(r"^@pk\.kernel", source, re.MULTILINE)) >= 8
    path = tmp_path / "page.py"  # a file: the front end reads source text
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("page", path)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_every_public_name_is_in_the_reference() -> None:
    from pk.dsl import language

    text = (ROOT / "docs" / "language.md").read_text(encoding="utf-8")
    types = {"Function", "function", "bfloat16", "float16", "float32", "float8_e4m3", "float8_e5m2", "int32"}
    missing = [name for name in language.__all__ if name not in types and not re.search(rf"\b{name}\b", text)]
    assert not missing, f"docs/language.md does not mention {missing}"


def test_a_newcomer_is_told_where_pk_is_before_the_first_command() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    activate = readme.index(". .venv/bin/activate")
    assert activate < readme.index("\npython -m pk ")
    assert "activate" in readme[readme.index("`python -m pk check FILE`") :].split("```")[0]
    example = (ROOT / "examples" / "01_matmul_reduce_scatter.py").read_text(encoding="utf-8")
    assert "activate" in example[example.index("Next") : example.index("python -m pk show")]


def test_what_the_simulator_does_not_do_is_said() -> None:
    page = (ROOT / "docs" / "debugging.md").read_text(encoding="utf-8")
    assert "On the simulator nothing is compiled, so `PK_DEBUG` and `PK_DUMP`" in page
