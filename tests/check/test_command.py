"""``python -m pk check`` in a shell: readers who leave early, and what is said of a program that cannot be run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pk.__main__ import main
from tests.check import driver_kernels as kernels

ROOT = Path(__file__).parent.parent.parent
FILE = Path(kernels.__file__)


def test_a_folder_and_words_for_numbers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path)]) == 2
    assert f"{tmp_path} is a folder." in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["check", str(FILE), "--schedules", "abc"])
    assert "argument --schedules: 'abc' is not a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [("def f(:\n", "SyntaxError"), ("import pk\nimport no_such_module_of_pk\n", "ModuleNotFoundError")],
)
def test_tracebacks_begin_in_the_program(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text)
    for tool, expected in (("check", 2), ("show", 1)):
        assert main([tool, str(path)]) == expected
        err = capsys.readouterr().err
        assert says in err
        assert re.findall(r'File "(.*?)"', err) == [str(path)]


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_reader_who_leaves_early_changes_nothing(format: str) -> None:
    lines = f"{sys.executable} -m pk check {FILE} --schedules 2 --format {format} -- --wrong; echo $? >&3"
    for reader in ("head -1", "head -c 300", "true"):
        shell = subprocess.run(
            ["bash", "-c", f"exec 3>&1; {{ {lines}; }} | {reader} >/dev/null"],
            capture_output=True, text=True, cwd=ROOT, check=False,
        )  # fmt: skip
        assert shell.stdout == "1\n", shell.stderr
        assert "Broken" not in shell.stderr


def test_a_program_whose_own_output_nobody_reads_ends_quietly(tmp_path: Path) -> None:
    path = tmp_path / "talker.py"
    path.write_text("for i in range(100000):\n    print(i, flush=True)\n")
    shell = subprocess.run(
        ["bash", "-c", f"exec 3>&1; {{ {sys.executable} -m pk check {path} 2>&1; echo $? >&3; }} | head -1"],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert sorted(shell.stdout.split()) == ["0", "2"]
    assert shell.stderr == ""


def test_the_readme_example_from_a_shell() -> None:
    command = [
        sys.executable, "-m", "pk", "check", "examples/01_matmul_reduce_scatter.py:run_small", "--format", "json",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"].startswith("ArgumentError: examples/01_matmul_reduce_scatter.py has no")


def test_products_that_meet_no_rank_are_those_of_the_ranks_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "products.py"
    path.write_text(
        "import torch\n\nimport pk\n\n\ndef run(rank, world):\n"
        "    x = torch.ones(8 + 8 * rank, 16, dtype=torch.bfloat16)\n    pk.ops.matmul(x, x.T)\n"
    )
    assert main(["check", f"{path}:run", "--world-size", "3", "--schedules", "2", "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["error"] is None
    assert [(made["kernel"], made["world_size"]) for made in report["launches"]] == [("matmul", 1)] * 3
