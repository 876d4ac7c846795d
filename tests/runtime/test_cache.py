"""The compile cache: one compilation however many ask, and nothing that happens to it breaks or hangs a run."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from pk.artifact import Field
from pk.errors import CacheWarning
from pk.runtime import cache, compile
from tests.runtime import toy

HANG = "import time, pathlib; pathlib.Path({marker!r}).touch(); time.sleep(600)"


def entry(folder: Path) -> Path:
    (found,) = folder.glob("*/sm_90a/toy-" + "[0-9a-f]" * 16)
    return found


def wait_for(path: Path, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never appeared"
        time.sleep(0.01)


# ------------------------------------------------------------------------------------------------- processes
def test_eight_cold_processes_compile_once_and_a_warm_one_never_loads_nvrtc(tmp_path: Path) -> None:
    gate = tmp_path / "gate"  # all are at compile() before the first may begin
    before = f"import os, time\nprint('ready', flush=True)\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.005)"
    children = [toy.start(tmp_path / "cache", before) for _ in range(8)]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    gate.touch()
    results = [toy.finish(child) for child in children]
    assert sum(r["compiled"] for r in results) == 1
    assert sum(r["disk"] for r in results) == 7
    assert len({r["digest"] for r in results}) == 1
    assert not any(r["warnings"] for r in results)

    warm = toy.compile_in_child(tmp_path / "cache")
    assert (warm["compiled"], warm["disk"]) == (0, 1)
    assert not warm["nvrtc"]
    assert not warm["bindings"]


def test_kill_9_of_the_compiling_process_lets_a_waiting_one_go_on(tmp_path: Path) -> None:
    marker = tmp_path / "compiling"
    body = HANG.format(marker=str(marker))
    victim = toy.start(tmp_path / "cache", f"def hang(*_):\n    {body}\ncompile._nvrtc = hang")
    wait_for(marker)
    waiter = toy.start(tmp_path / "cache", "print('ready', flush=True)")
    assert waiter.stdout is not None
    assert waiter.stdout.readline() == "ready\n"
    time.sleep(0.2)
    assert waiter.poll() is None, "the second process did not wait for the first"
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    result = toy.finish(waiter)
    assert (result["compiled"], result["warnings"]) == (1, [])
    assert toy.compile_in_child(tmp_path / "cache")["disk"] == 1


def test_kill_9_while_publishing_leaves_no_half_entry(tmp_path: Path) -> None:
    marker = tmp_path / "publishing"
    body = HANG.format(marker=str(marker))
    victim = toy.start(tmp_path / "cache", f"import os\ndef hang(*_):\n    {body}\nos.rename = hang")
    wait_for(marker)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    (left,) = (tmp_path / "cache").glob("*/sm_90a/.toy-*.tmp")
    os.utime(left, (0, 0))
    result = toy.compile_in_child(tmp_path / "cache")
    assert (result["compiled"], result["warnings"]) == (1, [])
    assert not left.exists(), "an old left-over is swept by the next compilation of the same kernel"
    assert sorted(p.name for p in entry(tmp_path / "cache").iterdir()) == ["kernel.cu", "kernel.cubin", "meta.json"]


def test_full_disk(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))"  # every write past 1 kB fails
    result = toy.compile_in_child(tmp_path / "cache", limit)
    assert result["compiled"] == 1
    (warning,) = result["warnings"]
    assert "cannot keep toy-" in warning
    assert "File too large" in warning
    assert not list((tmp_path / "cache").glob("*/sm_90a/.*tmp")), "what was written in part is removed"


# ------------------------------------------------------------------------------------------------- threads
def test_threads_compile_once(cold: Path) -> None:
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(compile.compile(toy.source()).digest)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 8
    assert (compile.counts.compiled, compile.counts.memory) == (1, 7)


# ------------------------------------------------------------------------------------------------- locks
def test_a_stale_lock_file_is_no_lock(cold: Path) -> None:
    place = cache.folder(compile._key(toy.source()))
    place.parent.mkdir(parents=True)
    place.with_name(f"{place.name}.lock").write_text("999999 some-host\n")
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile.compile(toy.source())
    assert time.monotonic() - began < 10
    assert entry(cold) == place


def test_waiting_is_bounded(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = cache.folder(compile._key(toy.source()))
    place.parent.mkdir(parents=True)
    monkeypatch.setenv("PK_CACHE_WAIT_S", "0.3")
    with place.with_name(f"{place.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # a holder that is stopped
        began = time.monotonic()
        with pytest.warns(
            CacheWarning, match=r"another process has held toy-\w{16} for 0.3 s; this one compiles it too"
        ):
            compile.compile(toy.source())
        assert 0.3 <= time.monotonic() - began < 20
    assert entry(cold) == place, "what was compiled privately is published all the same"


def test_a_waiting_process_takes_what_another_published(cold: Path, forget: Callable[[], None]) -> None:
    compile.compile(toy.source())
    place = entry(cold)
    aside = place.with_name("aside")
    place.rename(aside)
    forget()
    with place.with_name(f"{place.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        threading.Timer(0.2, aside.rename, (place,)).start()
        compile.compile(toy.source())  # returns although the lock is never released
    assert (compile.counts.compiled, compile.counts.disk) == (0, 1)


# ------------------------------------------------------------------------------------------------- damage
def truncate(name: str, size: int) -> Callable[[Path], None]:
    return lambda place: os.truncate(place / name, size)


def flip_a_byte(place: Path) -> None:
    data = bytearray((place / "kernel.cubin").read_bytes())
    data[len(data) // 2] ^= 1
    (place / "kernel.cubin").write_bytes(data)


def other_key(place: Path) -> None:
    meta = json.loads((place / "meta.json").read_text())
    (place / "meta.json").write_text(json.dumps({**meta, "key": "0" * 64}))


def a_file_in_its_place(place: Path) -> None:
    for file in place.iterdir():
        file.unlink()
    place.rmdir()
    place.write_text("not a folder")


DAMAGE = {
    "cubin truncated": (truncate("kernel.cubin", 100), "kernel.cubin does not match its sha256"),
    "cubin changed": (flip_a_byte, "kernel.cubin does not match its sha256"),
    "cubin missing": (lambda place: (place / "kernel.cubin").unlink(), "kernel.cubin is missing"),
    "meta truncated": (truncate("meta.json", 40), "meta.json cannot be read"),
    "meta empty": (truncate("meta.json", 0), "meta.json cannot be read"),
    "meta missing": (lambda place: (place / "meta.json").unlink(), "meta.json is missing"),
    "meta no object": (lambda place: (place / "meta.json").write_text("[1]"), "meta.json cannot be read"),
    "another kernel": (other_key, "meta.json is of another kernel"),
    "a file": (a_file_in_its_place, "Not a directory"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_rebuilt(damage: str, cold: Path, forget: Callable[[], None]) -> None:
    first = compile.compile(toy.source()).digest
    hurt, why = DAMAGE[damage]
    hurt(entry(cold))
    forget()
    with pytest.warns(CacheWarning) as caught:
        assert compile.compile(toy.source()).digest == first
    assert len(caught) == 1
    assert why in str(caught[0].message)
    assert compile.counts.compiled == 1
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile.compile(toy.source()).digest == first
    assert (compile.counts.compiled, compile.counts.disk) == (0, 1), "and the rebuilt entry is good"


def test_a_file_where_the_cache_should_be(cold: Path, forget: Callable[[], None]) -> None:
    cold.write_text("not a folder")
    with pytest.warns(CacheWarning, match=r"cannot make the folder .*\n  Set PK_CACHE_DIR to a folder"):
        compile.compile(toy.source())
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        compile.compile(toy.source())
    assert compile.counts.compiled == 1


def test_no_lock_can_be_made(cold: Path) -> None:
    place = cache.folder(compile._key(toy.source()))
    place.with_name(f"{place.name}.lock").mkdir(parents=True)  # a directory cannot be locked like a file
    with pytest.warns(CacheWarning, match="cannot lock"):
        compile.compile(toy.source())
    assert entry(cold) == place


def test_a_folder_that_nobody_may_write(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_CACHE_DIR", "/proc/self/pk")  # not even root makes folders there
    with pytest.warns(CacheWarning, match=r"cannot make the folder /proc/self/pk"):
        compile.compile(toy.source())


def test_a_read_only_cache_is_still_read(
    cold: Path, forget: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile.compile(toy.source())
    forget()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("mkdir", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr(cache, "_write", refuse)
    compile.compile(toy.source())
    assert (compile.counts.compiled, compile.counts.disk) == (0, 1)


def test_pk_cache_0_touches_no_disk(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_CACHE", "0")
    compile.compile(toy.source())
    assert compile.counts.compiled == 1
    assert not cold.exists()


# ------------------------------------------------------------------------------------------------- keys
@pytest.mark.parametrize(
    "change",
    [
        {"text": toy.TEXT + "// changed"},
        {"options": ("--use_fast_math",)},
        {"arch": "sm_90"},
        {"fields": (Field("q", "pointer", 0, 8, "p"),)},
        {"fields": (Field("p", "pointer", 8, 8, "p"),)},
        {"params_size": 16},
    ],
)
def test_what_is_in_the_key(change: dict[str, object]) -> None:
    key = compile._key(toy.source())
    assert compile._key(toy.source(**change)).digest != key.digest
    assert compile._key(toy.source()).digest == key.digest


def test_headers_nvrtc_and_flags_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [compile._key(toy.source()).digest]
    with monkeypatch.context() as patch:
        patch.setattr(compile.toolkit, "include_digest", lambda: "another tree")
        keys.append(compile._key(toy.source()).digest)
    with monkeypatch.context() as patch:
        patch.setattr(compile.toolkit, "nvrtc_version", lambda: "99.1.2")
        keys.append(compile._key(toy.source()).digest)
    with monkeypatch.context() as patch:
        patch.setattr(compile.toolkit, "header_versions", lambda: "runtime 1, cccl 2")
        keys.append(compile._key(toy.source()).digest)
    monkeypatch.setenv("PK_NVRTC_FLAGS", "-DX=1 '-DY=a b'")
    keys.append(compile._key(toy.source()).digest)
    assert compile.options(toy.source())[-2:] == ("-DX=1", "-DY=a b")
    assert len(set(keys)) == 5


def test_every_header_is_in_the_digest(tmp_path: Path) -> None:
    digests = []
    for text in ("one", "two"):
        root = tmp_path / text
        (root / "pk").mkdir(parents=True)
        (root / "pk" / "tile.cuh").write_text(text)
        digests.append(compile.toolkit.include_digest(root))
    assert digests[0] != digests[1]


def test_another_nvrtc_than_the_wheel_says_gets_keys_of_its_own(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LD_LIBRARY_PATH or torch may have loaded another libnvrtc: its cubins must not pass for the wheel's."""
    monkeypatch.setattr(compile.toolkit, "nvrtc_version", lambda: "12.1.105")
    compile.compile(toy.source())
    assert compile.counts.compiled == 1
    actual = compile._version_of_library()
    assert entry(cold).parent.parent.name.endswith(f"-{actual}")


# ------------------------------------------------------------------------------------------------- housekeeping
def test_meta_tells_people_and_tools_what_the_entry_is(cold: Path) -> None:
    compile.compile(toy.source())
    meta = json.loads((entry(cold) / "meta.json").read_text())
    assert (meta["name"], meta["arch"], meta["threads"]) == ("toy", "sm_90a", 128)
    assert meta["sites"][0]["line"] == 7
    assert (entry(cold) / "kernel.cu").read_text() == toy.TEXT


def test_clear_deletes_entries_and_nothing_else(cold: Path) -> None:
    compile.compile(toy.source())
    mine = [cold / "notes.txt", cold / "project" / "src" / "main.py", entry(cold).parent / "mine.txt"]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
    assert [path for path, _ in cache.entries()] == [entry(cold)]
    assert cache.clear() == 1
    assert cache.entries() == []
    assert sorted(p for p in cold.rglob("*") if p.is_file()) == sorted(mine)


def test_the_cache_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PK_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.root() == tmp_path / "pk"
