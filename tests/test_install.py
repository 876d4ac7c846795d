"""scripts/install.sh without a network: which torch it asks pip for, and under which constraints, when wheels lack."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PINNED = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]  # type: ignore[index]

# Stands for the environment's python: logs what pip is asked to install, and refuses what matches $REFUSE.
PYTHON = r"""#!/usr/bin/env bash
case "$*" in
*"-m pip --version"*) exit 0 ;;
*"--dry-run"*)
    [[ "$*" == *"$FOUND_WITH"* && -n "$FOUND" ]] || exit 1
    echo '{"install": [{"metadata": {"version": "'"$FOUND"'"}}]}'
    exit 0 ;;
*"-m pip install"*)
    for word in "$@"; do case "$word" in torch* | .*) what=$word ;; *constraints.txt) constraints=$word ;; esac; done
    [ -n "$what" ] || exit 0
    [[ -n "$REFUSE" && "$what" =~ $REFUSE ]] && exit 1
    echo "$what | $(grep -c '^nvidia-\|^torch==' "$constraints")" >>"$LOG"
    exit 0 ;;
*metadata*version*"torch"*) [[ "$*" == *json* ]] || exit 1 ;;
*"import torch"*) exit 0 ;;
esac
exec python3 "$@"
"""

pytestmark = pytest.mark.skipif(
    os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi") is not None, reason="with a GPU no CPU build is wanted"
)


def install(tmp_path: Path, **environment: str) -> list[str]:
    """What was installed of torch and pk, with the number of torch and CUDA packages held to a version then."""
    fake = tmp_path / "venv" / "bin" / "python"
    fake.parent.mkdir(parents=True)
    fake.write_text(PYTHON)
    fake.chmod(0o755)
    log = tmp_path / "log"
    variables = {"REFUSE": "", "FOUND": "", "FOUND_WITH": "--no-index", **environment, "LOG": str(log)}
    script = ROOT / "scripts" / "install.sh"
    done = subprocess.run(
        ["bash", str(script), str(tmp_path / "venv")], env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "said").write_text(done.stdout + done.stderr)
    return log.read_text().splitlines()


def test_the_pinned_cpu_build(tmp_path: Path) -> None:
    assert install(tmp_path) == [f"torch=={PINNED}+cpu | 6", ".[dev] | 6"]


@pytest.mark.parametrize("place", ["--no-index", "--index-url"])
def test_another_cpu_build_where_the_pinned_one_lacks(tmp_path: Path, place: str) -> None:
    refuse = re.escape(f"torch=={PINNED}")
    found = install(tmp_path, REFUSE=refuse, FOUND="2.9.1+cpu", FOUND_WITH=place)
    assert found == ["torch==2.9.1+cpu | 5", ".[dev] | 5"]
    said = (tmp_path / "said").read_text()
    assert f"there is no CPU wheel of torch {PINNED} for this Python: taking 2.9.1+cpu" in said


@pytest.mark.parametrize("other", ["", "2.9.1+cu130"])
def test_the_default_build_chooses_its_own_cuda_packages(tmp_path: Path, other: str) -> None:
    assert install(tmp_path, REFUSE=r"\+cpu$", FOUND=other) == [f"torch=={PINNED} | 0", ".[dev] | 0"]
    assert "taking the default build, which may be several gigabytes" in (tmp_path / "said").read_text()


def test_a_default_build_of_another_version(tmp_path: Path) -> None:
    assert install(tmp_path, REFUSE=re.escape(f"torch=={PINNED}")) == ["torch>=2.6 | 0", ".[dev] | 0"]
