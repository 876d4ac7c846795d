"""Fixtures and rules that all tests share: the compile cache, golden files, tests that need GPUs."""

from __future__ import annotations

import difflib
import functools
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"
# Set by a developer for a run by hand, these would change what the tests see.
PRIVATE = (
    "PK_BACKEND", "PK_CACHE", "PK_DEBUG", "PK_DUMP", "PK_NVRTC_FLAGS", "PK_OVERRIDE", "PK_SEED", "PK_SIM_SMS",
    "PK_SIM_STEPS",
)  # fmt: skip
CACHE = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the files of tests/golden instead of comparing"
    )
    parser.addoption(
        "--mutants", choices=["sample", "all"], default="sample", help="how many mutants of tests/mutants to run"
    )
    parser.addoption(
        "--problems", type=int, default=0, help="random problems of each operator and number of ranks (0: a sample)"
    )
    parser.addoption(
        "--schedules", type=int, default=0, help="schedules that tests/ops checks each kernel under (0: a sample)"
    )


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background, where Ctrl-C would go unheard
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in PRIVATE:
        os.environ.pop(name, None)
    # One compile cache for the whole session, xdist workers included (they inherit the environment): a kernel that
    # several tests use is compiled once, and no run sees what an earlier one left.
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.stash[CACHE] = tempfile.mkdtemp(prefix="pk-test-cache-")
        os.environ["PK_CACHE_DIR"] = config.stash[CACHE]


def pytest_unconfigure(config: pytest.Config) -> None:
    if CACHE in config.stash:
        shutil.rmtree(config.stash[CACHE], ignore_errors=True)


# ------------------------------------------------------------------------------------------------------------ GPUs
@functools.cache
def gpus() -> tuple[int, str]:
    """How many Hopper-class GPUs tests may use, and, if none, why."""
    import torch

    if not torch.cuda.is_available():
        return 0, "torch sees no GPU"
    major, minor = torch.cuda.get_device_capability(0)
    if major != 9:
        return 0, f"{torch.cuda.get_device_name(0)} (sm_{major}{minor}) is not Hopper-class"
    return torch.cuda.device_count(), ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    needed = marker.args[0] if marker.args else marker.kwargs.get("devices", 1)
    found, why = gpus()
    if found < needed:
        pytest.skip(f"needs {needed} GPU{'s' if needed > 1 else ''}: {why or f'there is only {found}'}")


# --------------------------------------------------------------------------------------------------------- goldens
@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden("name.ir.txt", text)`` fails, with a diff, if ``text`` is not what ``tests/golden/name.ir.txt`` holds.

    ``pytest --update-golden`` rewrites the file: look at ``git diff tests/golden`` before committing.
    """
    update: bool = request.config.getoption("--update-golden")

    def compare(name: str, text: str) -> None:
        __tracebackhide__ = True
        path = GOLDEN / name
        text = text.rstrip("\n") + "\n"
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        advice = f"pytest --update-golden '{request.node.nodeid}'"
        if not path.exists():
            pytest.fail(f"There is no golden file tests/golden/{name}.\n  Make it with: {advice}", pytrace=False)
        kept = path.read_text(encoding="utf-8")
        if text != kept:
            lines = difflib.unified_diff(
                kept.splitlines(), text.splitlines(), f"tests/golden/{name}", "this run", lineterm="", n=2
            )
            pytest.fail("\n".join([*lines, f"If the change is meant: {advice}"]), pytrace=False)

    return compare
