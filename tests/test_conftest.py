"""The golden fixture and the GPU marker do what they say, seen from outside by running pytest on a small project."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os, pytest
def test_text(golden):
    golden("sub/a.txt", os.environ["TEXT"])
@pytest.mark.gpu(devices=1000)
def test_gpu():
    pass
def test_cache():
    assert os.path.isdir(os.environ["PK_CACHE_DIR"]) and "PK_DEBUG" not in os.environ
    print("cache", os.environ["PK_CACHE_DIR"])
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: GPUs\n")
    monkeypatch.setenv("PK_DEBUG", "3")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)

    def run(text: str, *flags: str) -> tuple[int, str]:
        monkeypatch.setenv("TEXT", text)
        command = [sys.executable, "-m", "pytest", "-rs", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", *flags, "."]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout + done.stderr

    return run


def test_golden_missing_written_equal_and_different(run, tmp_path: Path) -> None:
    code, out = run("one\ntwo\n", "-k", "text")
    assert code == 1
    assert "There is no golden file tests/golden/sub/a.txt." in out
    assert "pytest --update-golden 'test_it.py::test_text'" in out

    assert run("one\ntwo\n", "-k", "text", "--update-golden")[0] == 0
    assert (tmp_path / "golden/sub/a.txt").read_text() == "one\ntwo\n"
    assert run("one\ntwo", "-k", "text")[0] == 0  # a newline at the end is not a difference

    code, out = run("one\nthree\n", "-k", "text")
    assert code == 1
    assert "-two\n+three\n" in out
    assert (tmp_path / "golden/sub/a.txt").read_text() == "one\ntwo\n"


def test_gpu_tests_are_skipped_with_the_reason(run) -> None:
    code, out = run("", "-k", "gpu")
    assert code == 0
    assert "needs 1000 GPUs: " in out


def test_the_compile_cache_lives_as_long_as_the_session(run) -> None:
    code, out = run("", "-k", "cache")
    assert code == 0, out
    folder = next(line.split("cache ", 1)[1] for line in out.splitlines() if "cache /" in line)
    assert not Path(folder).exists()
