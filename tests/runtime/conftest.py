"""Fixtures of the runtime tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pk.runtime import cache, compile, module, params
from pk.runtime.group import Group
from pk.runtime.native import native
from tests.runtime.fake import FakeDriver, FakeModule
from tests.runtime.warm import KERNELS


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


@pytest.fixture(params=["native", "python"])
def twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Which implementation of the warm path is used."""
    if request.param == "native" and native() is None:
        pytest.skip("pk._C is not built")
    if request.param == "python":
        monkeypatch.setenv("PK_NATIVE", "0")
    for kernel in KERNELS:
        kernel.__dict__.pop("_find", None)
    yield request.param
    for kernel in KERNELS:
        kernel.__dict__.pop("_find", None)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are neither compiled nor loaded."""
    modules: dict[str, FakeModule] = {}

    def compiled(source: Any, ir_text: str = "") -> Any:
        return SimpleNamespace(source=source, digest=id(source))

    monkeypatch.setattr(compile, "compile", compiled)
    monkeypatch.setattr(module, "loaded", lambda binary, entry: True)
    monkeypatch.setattr(module, "load", lambda binary, entry: modules.setdefault(entry, FakeModule(binary.source)))


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by a name whenever parameters are packed."""
    found: list[str] = []
    original = params.pack

    def pack(source: Any, *rest: Any) -> bytes:
        found.append(source.name)
        return original(source, *rest)

    monkeypatch.setattr(params, "pack", pack)
    return found


@pytest.fixture
def solo() -> Iterator[Group]:
    group = Group(0, 1, "cuda", device=0, driver=FakeDriver())
    yield group
    group.close()
