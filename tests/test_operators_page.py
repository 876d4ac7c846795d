"""docs/operators.md does what it says: its blocks run in order, and print what stands below them.

``pytest tests/test_operators_page.py --update-golden`` writes the output into the page.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import pk
import pk.ops
from tests.check.test_debugging_page import Block, blocks

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "operators.md"


def printed(block: Block, module: types.ModuleType) -> list[str]:
    """Run a block as a part of ``module``; what it prints.  Lines are counted in the block."""
    code = compile("\n".join(block.lines), "page.py", "exec", dont_inherit=True)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, module.__dict__)
    return out.getvalue().rstrip().splitlines()


def console(block: Block, folder: Path) -> list[str]:
    """The block as it should be: its commands, each followed by what it prints on stdout."""
    made = []
    for line in block.lines:
        if line.startswith("$ "):
            words = line[2:].split()
            assert words.pop(0) == "torchrun"
            environment = {**os.environ, "PK_BACKEND": "sim", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            command = [sys.executable, "-m", "torch.distributed.run", *words]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
            assert done.returncode == 0, done.stderr
            made += [line, *done.stdout.rstrip().splitlines()]
    return made


def played(page: str, folder: Path) -> list[Block]:
    """The blocks of the page as they should be."""
    made: list[Block] = []
    module = types.ModuleType("page")
    output: list[str] = []
    for block in blocks(page):
        lines = block.lines
        if block.mark.startswith("file: "):
            (folder / block.mark.removeprefix("file: ")).write_text("\n".join(lines) + "\n", encoding="utf-8")
        elif block.language == "python":
            assert not output, f"nothing shows what the block before line {block.at} prints: {output}"
            output = printed(block, module)
        elif block.language == "text":
            lines, output = output, []
        elif block.language == "console":
            lines = console(block, folder)
        else:
            pytest.fail(f"line {block.at}: a block of {block.language or 'nothing'}, which no test runs")
        made.append(Block(block.mark, block.language, lines, block.at))
    assert not output
    return made


@pytest.mark.timeout(280)
def test_the_page(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_BACKEND", "sim")
    monkeypatch.setenv("PK_CACHE_DIR", str(tmp_path / "cache"))
    page = PAGE.read_text(encoding="utf-8")
    wanted = page.splitlines()
    made = played(page, tmp_path)
    for block in reversed(made):
        wanted[block.at : wanted.index("```", block.at)] = block.lines
    text = "\n".join(wanted) + "\n"
    if request.config.getoption("--update-golden"):
        PAGE.write_text(text, encoding="utf-8")
        return
    difference = "\n".join(difflib.unified_diff(page.splitlines(), text.splitlines(), "page", "real", "", "", 1))
    assert not difference, f"{difference}\nIf this is right, run this test with --update-golden."
    assert sum(block.language == "python" for block in made) >= 15


def test_every_public_name_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    names = [*pk.ops.__all__, *pk.nn.__all__]
    missing = [name for name in names if name not in text and name != "Shard"]
    assert not missing, f"docs/operators.md does not mention {missing}"


def test_every_option_is_on_the_page() -> None:
    from pk.ops import options

    text = PAGE.read_text(encoding="utf-8")
    names = {name for operator in ("matmul", "all_gather_matmul") for name in options.names_of(operator)}
    assert not [name for name in names if f"`{name}" not in text]


def test_the_readme_names_the_page() -> None:
    assert "`docs/operators.md`" in (ROOT / "README.md").read_text(encoding="utf-8")
