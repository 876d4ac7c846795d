"""Fixtures of the runtime tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pk.runtime import cache, compile


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A process that has compiled nothing yet, with an empty disk cache: its folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("PK_CACHE_DIR", str(folder))
    monkeypatch.setattr(compile, "counts", compile.Counts())
    monkeypatch.setattr(compile, "_memory", {})
    monkeypatch.setattr(compile, "_surprise", [])
    monkeypatch.setattr(cache, "_warned", set())
    return folder


@pytest.fixture
def forget(cold: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function after which the process knows nothing, but the disk cache stays: stands for a new process."""

    def again() -> None:
        monkeypatch.setattr(compile, "counts", compile.Counts())
        monkeypatch.setattr(compile, "_memory", {})

    return again
