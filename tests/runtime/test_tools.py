"""``python -m pk``: every command, its output and its exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pk.__main__ import main
from pk.errors import ArgumentError
from pk.runtime import cache, compile
from pk.tools import doctor, show
from tests.runtime import toy

KERNEL = '''\
import pk


@pk.kernel
def scale(x: pk.Global, y: pk.Global, BM: pk.constexpr = 64, BN: pk.constexpr = 64):
    """Copy x to y."""
    tiles = pk.pipeline(2, x=pk.shared((BM, BN), x.dtype))
    for m, n in pk.tasks(pk.cdiv(x.rows, BM), pk.cdiv(x.cols, BN)):
        with pk.loader():
            with tiles.fill() as s:
                pk.load_async(s.x, x, (m, n))
        with pk.storer():
            with tiles.drain() as s:
                pk.store_async(y, s.x, (m, n))
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(KERNEL)
    return path


def test_env(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_TIMEOUT_S", "12.5")
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert "* PK_TIMEOUT_S         seconds   12.5" in out


def test_cache_lists_and_clears(cold: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compile.compile(toy.source())
    assert main(["cache"]) == 0
    out = capsys.readouterr().out
    assert "sm_90a/toy-" in out
    assert "1 kernels" in out
    assert main(["cache", "--clear"]) == 0
    assert "deleted 1 kernels" in capsys.readouterr().out
    assert cache.entries() == []


def test_the_module_runs_and_reports_errors_without_a_traceback() -> None:
    environment = {**os.environ, "PYTHONPATH": toy.PYTHONPATH}
    command = [sys.executable, "-m", "pk", "show", "nowhere.py:k"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "ArgumentError: There is no file nowhere.py.\n"


# ------------------------------------------------------------------------------------------------- show
def test_show_ir_and_constants(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["show", f"{file}:scale", "--stage", "ir", "-D", "BM=128", "--dtype", "x=float16", "--dtype", "y=float16"])
        == 0
    )
    out = capsys.readouterr().out
    assert "scale" in out
    assert "128" in out
    assert "float16" in out


@pytest.mark.parametrize(
    ("stage", "part"),
    [
        ("plan", "scale"),
        ("cuda", "__global__"),
        ("ptx", ".target sm_90a"),
        ("sass", "UTMALDG"),
        ("resources", "registers"),
    ],
)
def test_show_stages(stage: str, part: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(file), "--stage", stage]) == 0
    assert part in capsys.readouterr().out


def test_show_says_what_there_is(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"mine\.py has no kernel `other`; it has scale\."):
        show.find(f"{file}:other")
    file.write_text(KERNEL + KERNEL[KERNEL.index("@pk") :].replace("def scale", "def second"))
    with pytest.raises(ArgumentError, match=r"it has scale, second\."):
        show.find(str(file))
    assert show.find(f"{file}:second").name == "second"
    file.write_text("print(1)\n")
    with pytest.raises(ArgumentError, match=r"mine\.py has no kernel\.\n"):
        show.find(str(file))
    with pytest.raises(ArgumentError, match=r"is a folder\."):
        show.find(str(tmp_path))
    with pytest.raises(ArgumentError, match=r"^no\.such\.module is neither a Python file nor a module"):
        show.find("no.such.module:k")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["-D", "BZ=1"], "-D BZ=1: kernel `scale` has no such parameter; it has BM, BN."),
        (["-D", "BM"], "-D BM: write NAME=VALUE."),
        (["--dtype", "z=float16"], "--dtype z=float16: kernel `scale` has no such parameter; it has x, y."),
        (["--ndim", "x=two"], "--ndim x=two: not a number of dimensions."),
        (["--ndim", "x=5"], "--ndim x=5: pk's tensors have 1 to 4 dimensions."),
        (
            ["--dtype", "x=float8"],
            "--dtype x=float8: `x` has dtype float8, which pk cannot move.\n  Use one of bfloat16, "
            "float16, float8_e4m3, float8_e5m2, float32, int32.",
        ),
    ],
)
def test_show_refuses(flags: list[str], text: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(file), *flags]) == 1
    assert capsys.readouterr().err == f"ArgumentError: {text}\n"


# ------------------------------------------------------------------------------------------------- doctor
def findings() -> dict[str, doctor.Finding]:
    return {f.name: f for probe in doctor.PROBES for f in doctor._safely(probe)}


def test_doctor_compiles_for_real(cold: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main() == 0
    out = capsys.readouterr().out
    assert "compiled a kernel for sm_90a" in out
    assert compile.counts.compiled == 1


def test_doctor_sees_bad_settings(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:True")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("PK_TIMEOUT_S", "soon")
    monkeypatch.setenv("PK_CACHE", "perhaps")
    monkeypatch.setenv("PK_DEBGU", "1")
    found = findings()
    for name, fix in {
        "expandable segments": "allocate shared tensors with pk.empty, or take expandable_segments out of",
        "CUDA_DEVICE_MAX_CONN...": "set it to 32, or unset it",
        "CUDA_LAUNCH_BLOCKING": "unset it",
        "PK_TIMEOUT_S": "Set PK_TIMEOUT_S to seconds",
        "PK_DEBGU": "did you mean PK_DEBUG?",
    }.items():
        assert found[name].state == "no"
        assert found[name].fix.startswith(fix)


def test_doctor_fails_where_nothing_can_be_compiled(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise compile.BackendError("NVRTC is not installed.\n  pip install it")

    monkeypatch.setattr(compile.driver, "nvrtc", missing)
    assert doctor.main() == 1
    assert (findings()["NVRTC"].state, findings()["NVRTC"].fix) == ("no", "pip install it")


def test_doctor_on_gpus(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(
        doctor.driver.Device(i, name, capability, 132, 232448, bytes(16))
        for i, (name, capability) in enumerate(
            [("NVIDIA H200", (9, 0)), ("NVIDIA H200 MIG 1g.18gb", (9, 0)), ("L4", (8, 9))]
        )
    )
    monkeypatch.setattr(doctor.driver, "devices", lambda: gpus)
    monkeypatch.setattr(doctor.driver, "version", lambda: (12, 4))
    monkeypatch.setattr(doctor.driver, "can_access_peer", lambda a, b: {a, b} == {0, 2})
    found = findings()
    assert [found[f"GPU {i}"].state for i in range(3)] == ["ok", "ok", "no"]
    assert found["MIG mode"].state == "no"
    assert found["peer access"].state == "no"
    assert "GPU 0: x . x" in found["peer access"].detail
    assert found["driver"].state == "no", "NVRTC of CUDA 13 makes cubins that a CUDA 12 driver does not load"
