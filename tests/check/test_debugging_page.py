"""docs/debugging.md does what it says: its files are written, its edits made, its commands run, their output compared.

``pytest tests/check/test_debugging_page.py --update-golden`` writes the output into the page.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import multiprocessing
import os
import re
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import pk
from pk import env
from pk.runtime import records
from pk.sim.findings import KINDS
from tests.check.patterns import lock_array
from tests.runtime.test_launch import record

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "debugging.md"
PATTERNS = ROOT / "tests" / "check" / "patterns"


@dataclass
class Block:
    """A fenced block of the page; ``mark`` is the comment in the line before, ``at`` the line of its first line."""

    mark: str
    language: str
    lines: list[str]
    at: int


def blocks(page: str) -> list[Block]:
    """All fenced blocks, in order."""
    found: list[Block] = []
    mark, inside = "", False
    for number, line in enumerate(page.splitlines()):
        if line.startswith("```"):
            inside = not inside
            if inside:
                found.append(Block(mark, line[3:].strip(), [], number + 1))
        elif inside:
            found[-1].lines.append(line)
        else:
            comment = re.fullmatch(r"<!-- (.*) -->", line)
            mark = comment[1] if comment else ""
    return found


def settled(text: str) -> str:
    """Output without what differs from run to run: times, and how small a case was made in the time there was."""
    text = re.sub(r"(smallest case that still fails:).*", r"\1", text)
    text = re.sub(r'"seconds": [\d.]+', '"seconds": 0.0', text)
    return re.sub(r"\d+\.\d+ ?s\b", "0.0 s", text).rstrip()


def edit(path: Path, diff: list[str]) -> None:
    """Apply a diff without line numbers: what it removes must be there, once."""
    old = "".join(f"{line[1:]}\n" for line in diff if line[0] in "- ")
    new = "".join(f"{line[1:]}\n" for line in diff if line[0] in "+ ")
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"not once in {path.name}:\n{old}"
    path.write_text(text.replace(old, new), encoding="utf-8")


def run(command: str, folder: Path) -> str:
    """What a command prints, stdout and stderr, run in ``folder`` by a process of its own.

    It is forked from a server that has imported torch, which takes most of the time that a command takes.
    """
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["torch", "pk.checking"])
    words, given = command.split(), {"PK_BACKEND": "sim", "COLUMNS": "100"}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        given[name] = value
    assert words.pop(0) == "python"
    out = folder / "out.txt"
    child = processes.Process(target=_python, args=(words, folder, given, out))
    child.start()
    child.join(timeout=300)
    assert child.exitcode in (0, 1), f"{command}: {child.exitcode}"
    return re.sub(r"\x1b\[[0-9;]*m", "", out.read_text(encoding="utf-8")).rstrip()


def _python(words: list[str], folder: Path, given: dict[str, str], out: Path) -> None:
    """In the child: what ``python`` does with these arguments."""
    for name in [name for name in os.environ if name.startswith(("PK_", "PYTEST"))]:
        del os.environ[name]
    os.environ.update(given)
    os.chdir(folder)
    with out.open("w", buffering=1, encoding="utf-8") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            if words[0] == "-m":
                sys.path[0], sys.argv = str(folder), words[1:]
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                sys.path[0], sys.argv = str(folder), words
                runpy.run_path(words[0], run_name="__main__")


def console(block: Block, folder: Path) -> list[str]:
    """The block as it should be."""
    made: list[str] = []
    for line in block.lines:
        if line.startswith("$ "):
            made += [line, *run(line[2:], folder).splitlines()]
    return made


def kinds() -> list[str]:
    return ["| kind | |", "|---|---|", *(f"| `{kind}` | {meaning} |" for kind, meaning in KINDS.items())]


def mistakes() -> list[str]:
    rows = ["| file | mistake |", "|---|---|"]
    for path in sorted(PATTERNS.glob("*.py")):
        if path.stem not in ("__init__", "pattern"):
            first = path.read_text(encoding="utf-8").split('"""')[1].splitlines()[0]
            rows.append(f"| `{path.name}` | {first} |")
    return rows


def tables(page: str) -> str:
    """The page with its generated tables as they should be."""
    for mark, rows in (("kinds", kinds()), ("patterns", mistakes())):
        page, many = re.subn(rf"(<!-- {mark} -->\n)(?:\|.*\n)+", lambda m, r=rows: m[1] + "\n".join(r) + "\n", page)
        assert many == 1, mark
    return page


def test_tables(request: pytest.FixtureRequest) -> None:
    page = PAGE.read_text(encoding="utf-8")
    if request.config.getoption("--update-golden"):
        PAGE.write_text(tables(page), encoding="utf-8")
    else:
        assert tables(page) == page, "run this test with --update-golden"


def test_every_output_is_real(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    page = PAGE.read_text(encoding="utf-8")
    wanted, ran = page.splitlines(), 0
    for block in reversed(_played(page, tmp_path)):
        ran += sum(line.startswith("$ ") for line in block.lines)
        end = wanted.index("```", block.at)
        wanted[block.at : end] = block.lines
    assert ran >= 6
    assert {"right on all ranks: True", "right on all ranks: False"} <= set(
        wanted[: wanted.index("## 3. A wait that never ends")]
    )
    text = "\n".join(wanted) + "\n"
    if request.config.getoption("--update-golden"):
        if settled(page) != settled(text):
            PAGE.write_text(text, encoding="utf-8")
    else:
        changes = difflib.unified_diff(
            settled(page).splitlines(), settled(text).splitlines(), "page", "real", "", "", 1
        )
        difference = "\n".join(line.rstrip("\n") for line in changes)
        assert not difference, f"{difference}\nIf this is right, run this test with --update-golden."


def _played(page: str, folder: Path) -> list[Block]:
    """Go through the page; the blocks of output, as they should be."""
    made, hung = [], ""
    for block in blocks(page):
        what, _, name = block.mark.partition(": ")
        if what == "file":
            (folder / name).write_text("\n".join(block.lines) + "\n", encoding="utf-8")
        elif what == "edit":
            edit(folder / name, block.lines)
        elif what == "hangs":
            hung = (folder / name).read_text(encoding="utf-8")
            made.append(Block("", "console", console(block, folder), block.at))
        elif what == "hang":
            made.append(Block("", "text", hang(hung, folder / "hung" / name), block.at))
        elif what == "outside":
            made.append(Block("", "text", outside(), block.at))
        elif block.language == "console":
            made.append(Block("", "console", console(block, folder), block.at))
    return made


def hang(source: str, path: Path) -> list[str]:
    """What the host makes of the records of two ranks that wait in kernel ``total`` for what never comes."""
    path.parent.mkdir()
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("hung", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stuck = [
        {"rank": r, "block": i, "flat": i, "seen": 1, "needed": 2, "tile": (i,), "seconds": 5.0}
        for r in range(2)
        for i in range(2)
    ]
    return told(module.total, "wait", "got", stuck, limit=5.0)


def outside() -> list[str]:
    """What the host makes of the record of an index that ``PK_SANITIZE=1`` refused."""
    with env.overriding(PK_SANITIZE="1"):
        where = {"reason": records.BOUNDS, "rank": 1, "block": 2, "seen": 2, "needed": 2, "tile": (2,), "seconds": 0.0}
        return told(lock_array.sized_for_another_call, "bounds", "the index of `ready`", [where])


def told(kernel: pk.Kernel, op: str, what: str, fields: list[dict[str, Any]], limit: float = 30.0) -> list[str]:
    """The text of a HangError for records with these fields, at the first site with ``op`` and ``what``."""
    made = kernel.specialise(*[pk.spec(torch.float32, 2)] * 2).source
    site = next(i for i, s in enumerate(made.sites) if (s.op, s.what) == (op, what))
    launched = records.Launched(made, {"got": (4,)}, kernel.name)
    pages = [record(site=site, **values).ljust(records.PAGE_BYTES, b"\0") for values in fields]
    found = [records.describe(records.read(page)[0], [launched]) for page in pages]
    text = records.explain(found, [], (limit, 600.0))
    return re.sub(r'File "[^"]*/', 'File "', text).splitlines()
