"""Measurements on disk: kept for later runs, and never the reason why one breaks."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

import pk
import pk.ops
from pk import errors
from pk.ops import baseline, choose, fused, tensor_parallel, tuning
from pk.runtime import tunings
from tests.ops.choose_jobs import operands

RS = "matmul_reduce_scatter"
KERNELS = (*fused.TILES, *fused.FEW)


def request(rank: int) -> fused.Request:
    return tensor_parallel.request(RS, *operands(rank), None, None, None, None, None, None, None)


def spawn(fn: Any, world: int = 2) -> list[Any]:
    return pk.spawn(fn, world, "sim")


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The library is a candidate, as on GPUs with NCCL; the disk is empty.  The folder of measurements."""
    monkeypatch.setattr(baseline, "unavailable", lambda group: "")
    monkeypatch.setenv("PK_CACHE_DIR", str(tmp_path))
    return tmp_path / "tuned"


def tuned(rank: int, save: bool = True) -> str:
    a, b = operands(rank)
    return pk.ops.tune(RS, a, b, limit=1, save=save).choice.name


def chosen(rank: int) -> str:
    return choose.decide(request(rank), False, None, None).name


@pytest.fixture
def quick_library(offered: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tuning, "timed", lambda q, way, repeats: 5.0 if way.library else 6.0)
    return offered


def test_kept_for_the_next_run(quick_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(spawn(chosen)) <= set(KERNELS)
    assert spawn(tuned) == ["library"] * 2
    assert spawn(chosen) == ["library"] * 2
    assert spawn(lambda rank: choose.decide(request(rank), True, None, None).library) == [False] * 2
    assert spawn(lambda rank: choose.decide(request(rank), False, None, None).library, 4) == [False] * 4
    monkeypatch.setattr(choose, "_versions", lambda: ("others",))
    assert set(spawn(chosen)) <= set(KERNELS)


@pytest.mark.parametrize("text", [
    "", "{", "[]", "null", '{"format": 1}', "\udcff".encode("utf-8", "surrogateescape"), "[" * 100_000,
])  # fmt: skip
def test_a_damaged_file_is_none(quick_library: Path, text: str | bytes) -> None:
    spawn(tuned)
    (path,) = quick_library.rglob("*.json")
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert set(spawn(chosen)) <= set(KERNELS)
    spawn(tuned)
    assert spawn(chosen) == ["library"] * 2


@pytest.mark.parametrize("value", [
    3, None, [3], [["library"]], [["library", "fast", ""]], [["library", -1.0, ""]], [["library", True, ""]],
    [[["library"], 1.0, ""]], [["no such", 1.0, ""]], {"library": 1.0}, [["library", 1.0, None]],
])  # fmt: skip
def test_a_file_that_holds_something_else(quick_library: Path, value: Any) -> None:
    spawn(tuned)
    (path,) = quick_library.rglob("*.json")
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "value": value}))
    assert set(spawn(chosen)) <= set(KERNELS)


def test_a_disk_that_refuses(quick_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick_library.write_text("a file where the folder should be")
    monkeypatch.setattr(tunings, "_warned", set())

    def run(rank: int) -> tuple[str, str]:
        return tuned(rank), chosen(rank)

    with pytest.warns(errors.CacheWarning, match="cannot keep a measurement"):
        assert spawn(run) == [("library", "library")] * 2


def test_no_cache(quick_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spawn(tuned)
    monkeypatch.setenv("PK_CACHE", "0")
    assert set(spawn(chosen)) <= set(KERNELS)
    monkeypatch.setenv("PK_CACHE_DIR", str(quick_library / "other"))
    assert spawn(lambda rank: (tuned(rank), chosen(rank))) == [("library", "library")] * 2
    assert not (quick_library / "other").exists()


def test_many_writers(offered: Path) -> None:
    def write(i: int) -> None:
        for j in range(20):
            assert tunings.save("machine", f"key {j % 3}", [i, j])
            assert all(len(value) == 2 for value in tunings.load("machine").values())

    writers = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(tunings.load("machine")) == ["key 0", "key 1", "key 2"]
    assert len(list(offered.rglob("*"))) == 4  # the machine's folder and three files: nothing is left behind
