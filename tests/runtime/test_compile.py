"""From text to cubin: resources, errors in the user's lines, a missing NVRTC, PK_DUMP and PK_OVERRIDE."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pk import env
from pk.errors import BackendError, CompileFailed
from pk.runtime import compile, driver, toolkit
from tests.runtime import toy

USER = """\
def kernel(a):
    x = q + 1
    return x
"""


# ------------------------------------------------------------------------------------------------- resources
def test_resources_of_a_small_kernel(cold: Path) -> None:
    binary = compile.compile(toy.source())
    assert binary.cubin.startswith(b"\x7fELF")
    assert 0 < binary.resources.registers < 32
    assert (binary.resources.spill_bytes, binary.resources.local_bytes) == (0, 0)
    assert binary.resources.shared_bytes == 2048, "what the launch asks for counts"


def test_resources_show_spills_local_and_static_shared_memory(cold: Path) -> None:
    text = """
extern "C" __global__ void __launch_bounds__(1024, 2) toy(float* p) {
    __shared__ float s[256];
    float a[64];
    for (int i = 0; i < 64; i++) a[i] = p[i * 1024 + threadIdx.x];
    for (int k = 0; k < 8; k++)
        for (int i = 0; i < 64; i++) a[i] = a[i] * a[(i + 1) % 64] + p[k];
    s[threadIdx.x % 256] = a[int(p[0]) & 63];
    __syncthreads();
    for (int i = 0; i < 64; i++) p[i * 1024 + threadIdx.x] = a[i] + s[i];
}
"""
    found = compile.compile(toy.source(text=text)).resources
    assert found.registers <= 32
    assert found.spill_bytes > 0
    assert found.local_bytes >= 256
    assert found.shared_bytes == 2048 + 1024
    assert str(found.spill_bytes) in str(found)


def test_resources_agree_with_cuobjdump(cold: Path) -> None:
    """The second source of the numbers, for an NVRTC that prints no report."""
    binary = compile.compile(toy.source())
    assert compile.resources(compile._tool("cuobjdump", "-res-usage", binary.cubin), toy.source()) == binary.resources


def test_a_log_without_a_report_is_an_error_and_not_zeros() -> None:
    with pytest.raises(BackendError, match="no resource report on `toy`"):
        compile.resources("ptxas info: nothing", toy.source())


def test_sass_and_ptx() -> None:
    assert "STG.E" in compile.sass(compile.compile(toy.source()).cubin)
    assert ".entry toy" in compile.ptx(toy.source())


def test_a_tool_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "_wheel_roots", tuple)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BackendError, match=r"^`nvdisasm` is not installed\.\n  pip install nvidia-cuda-nvdisasm$"):
        compile.sass(b"")


def test_cuda_headers_come_from_the_wheels() -> None:
    compile.compile(toy.source(text="#include <cuda_bf16.h>\n#include <cuda/std/cstdint>\n" + toy.TEXT))


# ------------------------------------------------------------------------------------------------- errors
def test_an_error_points_into_the_users_file(cold: Path, tmp_path: Path) -> None:
    user = tmp_path / "mine.py"
    user.write_text(USER)
    text = f'extern "C" __global__ void toy(float* p) {{\n#line 2 "{user}"\n    int x = q + 1;\n}}\n'
    with pytest.raises(CompileFailed) as caught:
        compile.compile(toy.source(text=text))
    lines = str(caught.value).splitlines()
    assert lines[0] == "NVRTC could not compile kernel `toy` for sm_90a."
    assert lines[1:3] == [f'  File "{user}", line 2', "    x = q + 1"]
    assert f'{user}(2): error: identifier "q" is undefined' in lines
    assert lines[-1].startswith("  The emitted CUDA is at fault")
    assert not list(cold.glob("*/*/toy-*/")), "nothing of a failure is kept"


def test_an_error_without_line_directives_shows_the_emitted_line(cold: Path) -> None:
    with pytest.raises(CompileFailed) as caught:
        compile.compile(toy.source(text='extern "C" __global__ void toy(float* p) {\n  nonsense;\n}\n'))
    assert caught.value.places == ('  File "toy.cu", line 2\n    nonsense;',)


def test_a_wrong_parameter_layout_does_not_compile(cold: Path) -> None:
    text = 'struct params { int n; };\nstatic_assert(__builtin_offsetof(params, n) == 4, "pk: params.n");\n' + toy.TEXT
    with pytest.raises(CompileFailed, match=r"pk: params\.n"):
        compile.compile(toy.source(text=text))


def test_a_missing_header_names_the_wheel(cold: Path) -> None:
    with pytest.raises(CompileFailed, match=r"pip install nvidia-cuda-runtime nvidia-cuda-cccl$"):
        compile.compile(toy.source(text='#include "nope.h"\n' + toy.TEXT))


def test_flags_that_nvrtc_refuses(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_NVRTC_FLAGS", "--no-such-flag")
    with pytest.raises(CompileFailed, match="PK_NVRTC_FLAGS='--no-such-flag' was in force: try without"):
        compile.compile(toy.source())
    monkeypatch.setenv("PK_NVRTC_FLAGS", "'open")
    with pytest.raises(BackendError, match="PK_NVRTC_FLAGS cannot be split into flags"):
        compile.compile(toy.source())


# ------------------------------------------------------------------------------------------------- NVRTC missing
def test_without_cuda_bindings() -> None:
    program = (
        "import sys\n"
        "sys.modules['cuda'] = sys.modules['cuda.bindings'] = None  # as if not installed\n"
        "import pk.runtime.compile as c, pk.errors\n"
        "from tests.runtime import toy\n"
        "try: c.compile(toy.source())\n"
        "except pk.errors.BackendError as error: print(error)\n"
    )
    environment = {"PYTHONPATH": toy.PYTHONPATH, "PK_CACHE": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("cuda-bindings is not installed"), done.stderr
    assert done.stdout.rstrip().endswith("pip install cuda-bindings nvidia-cuda-nvrtc nvidia-cuda-runtime")


def test_without_the_nvrtc_library(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError("Failure finding libnvrtc.so")  # what cuda-pathfinder raises is a RuntimeError

    monkeypatch.setattr(driver, "_import", lambda name: SimpleNamespace(nvrtcVersion=missing))
    driver.nvrtc.cache_clear()
    try:
        with pytest.raises(BackendError) as caught:
            compile.compile(toy.source())
    finally:
        driver.nvrtc.cache_clear()
    assert str(caught.value) == (
        f"NVRTC {toolkit.cuda_major()}.x is not installed, so kernels cannot be compiled.\n"
        "  pip install nvidia-cuda-nvrtc nvidia-cuda-runtime"
    )


def test_nvrtc_in_parts_that_do_not_match() -> None:
    error = compile._failure(toy.source(), "toy.cu", "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE", "no builtins")
    assert isinstance(error, BackendError)
    assert "pip install --force-reinstall nvidia-cuda-nvrtc" in str(error)


# ------------------------------------------------------------------------------------------------- PK_DUMP, PK_OVERRIDE
def test_dump_writes_every_stage(cold: Path, tmp_path: Path) -> None:
    text = '#line 1 "mine.py"\n' + toy.TEXT
    with env.overriding(PK_DUMP=str(tmp_path / "dump")):
        binary = compile.compile(toy.source(text=text), ir_text="the ir")
    (place,) = (tmp_path / "dump").iterdir()
    names = ["10_ir.txt", "30_kernel.cu", "40_ptxas.txt", "50_kernel.cubin", "meta.json"]
    assert sorted(p.name for p in place.iterdir()) == names
    assert (place / "10_ir.txt").read_text() == "the ir"
    assert (place / "30_kernel.cu").read_text() == toy.TEXT, "for reading: without #line"
    assert (place / "50_kernel.cubin").read_bytes() == binary.cubin
    meta = json.loads((place / "meta.json").read_text())
    assert meta["resources"]["registers"] == binary.resources.registers


def test_dump_of_a_kernel_that_does_not_compile(cold: Path, tmp_path: Path) -> None:
    with env.overriding(PK_DUMP=str(tmp_path)), pytest.raises(CompileFailed):
        compile.compile(toy.source(text="nonsense"))
    (place,) = tmp_path.glob("toy-*")
    assert "error" in (place / "40_ptxas.txt").read_text()


def test_override_compiles_the_edited_text(cold: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with env.overriding(PK_DUMP=str(tmp_path)):
        first = compile.compile(toy.source())
    (file,) = tmp_path.glob("toy-*/30_kernel.cu")
    file.write_text(toy.TEXT.replace("2.0f", "3.0f"))
    with env.overriding(PK_OVERRIDE=str(tmp_path)):
        edited = compile.compile(toy.source())
    assert edited.digest != first.digest
    assert f"pk: PK_OVERRIDE: toy is compiled from {file}" in capfd.readouterr().err
    assert compile.compile(toy.source()).digest == first.digest, "and only while the variable is set"


def test_an_error_in_an_override_points_into_it(cold: Path, tmp_path: Path) -> None:
    file = tmp_path / compile._key(toy.source()).name / "30_kernel.cu"
    file.parent.mkdir()
    file.write_text("nonsense\n")
    with env.overriding(PK_OVERRIDE=str(tmp_path)), pytest.raises(CompileFailed) as caught:
        compile.compile(toy.source())
    assert f'File "{file}", line 1' in str(caught.value)
    assert str(caught.value).endswith(f"The text came from PK_OVERRIDE: correct {file}, or unset PK_OVERRIDE.")


def test_an_override_of_another_version_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "toy-0123456789abcdef").mkdir()
    with env.overriding(PK_OVERRIDE=str(tmp_path)):
        compile.compile(toy.source())
    assert "only toy-0123456789abcdef: the kernel has changed since" in capfd.readouterr().err


def test_debug_levels(cold: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with env.overriding(PK_DEBUG="1"):
        compile.compile(toy.source())
    one = capfd.readouterr().err
    assert "pk: toy: compiled for sm_90a" in one
    assert "__global__" not in one
    with env.overriding(PK_DEBUG="7"):
        compile.compile(toy.source(), ir_text="the ir")
    seven = capfd.readouterr().err
    assert all(part in seven for part in ("__global__", "the ir", "ptxas info"))
