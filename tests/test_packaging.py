"""What an installed pk contains, with a compiler, without one and with a broken one.  Works offline."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what setuptools reads, so that builds leave nothing in the checkout."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("pk", "csrc"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return copy


def pip(tree: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    shutil.rmtree(tree / "build", ignore_errors=True)  # an extension left there would be taken for a fresh one
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", *arguments, *flags, str(tree)]
    return subprocess.run(
        command, env={**os.environ, **environment}, cwd=tree.parent, capture_output=True, text=True, timeout=300
    )


def wheel(tree: Path, where: Path, **environment: str) -> tuple[str, set[str]]:
    """The file name of a wheel and the names in it."""
    done = pip(tree, "wheel", "--wheel-dir", str(where), **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = where.glob("*.whl")
    return path.name, set(zipfile.ZipFile(path).namelist())


def test_wheel_has_every_file_of_the_package(tree: Path, tmp_path: Path) -> None:
    name, files = wheel(tree, tmp_path, PK_NATIVE="0")
    wanted = {
        str(path.relative_to(ROOT))
        for pattern in ("*.py", "include/**/*.cuh", "codegen/templates/**/*.j2")
        for path in (ROOT / "pk").rglob(pattern)
    }
    assert any(path.endswith(".cuh") for path in wanted)
    assert any(path.endswith(".j2") for path in wanted)
    assert wanted | {"pk/py.typed"} <= files, sorted(wanted - files)
    assert not [f for f in files if not f.startswith(("pk/", "pk-"))], "only pk belongs in the wheel"
    assert name.endswith("-py3-none-any.whl"), "PK_NATIVE=0 makes a wheel for every machine"
    assert not [f for f in files if f.endswith(".so")]


@pytest.mark.skipif(not shutil.which("g++") and not shutil.which("clang++"), reason="no C++ compiler here")
def test_wheel_has_the_native_module(tree: Path, tmp_path: Path) -> None:
    _, files = wheel(tree, tmp_path, PK_NATIVE="require")
    assert [f for f in files if f.startswith("pk/_C.") and f.endswith(".so")]


def test_required_native_module_fails_without_a_compiler(tree: Path, tmp_path: Path) -> None:
    done = pip(tree, "wheel", "--wheel-dir", str(tmp_path), PK_NATIVE="require", CC="/bin/false", CXX="/bin/false")
    assert done.returncode != 0


def test_broken_compiler_still_installs_and_says_why_there_is_no_native_module(tree: Path, tmp_path: Path) -> None:
    done = pip(tree, "install", "--target", str(tmp_path), CC="/bin/false", CXX="/bin/false", PK_NATIVE="")
    assert done.returncode == 0, done.stdout + done.stderr
    program = "from pk.runtime import native; print(native.__file__, native.native(), native.reason(), sep='\\n')"
    # -S: without the hook of an editable installation, which would offer the checkout's pk._C.
    path = os.pathsep.join([str(tmp_path), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    seen = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={**os.environ, "PYTHONPATH": path, "PK_NATIVE": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert seen.returncode == 0, seen.stderr
    file, module, reason = seen.stdout.splitlines()
    assert file.startswith(str(tmp_path)), "the installed copy, not the checkout, must be what was imported"
    assert module == "None"
    assert reason.startswith("pk._C cannot be imported")
