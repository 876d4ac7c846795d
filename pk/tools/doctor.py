"""``python -m pk doctor``: what works on this machine, what does not, and the fix for it.

Every line is the result of a probe: NVRTC really compiles, the cache folder is really written.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from pk import env
from pk.artifact import Source
from pk.errors import EnvError, PkError
from pk.runtime import cache, compile, driver, native, toolkit

State = Literal["ok", "no", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: ``ok``, ``no`` (with the fix) or ``note``.  ``needed``: without it kernels cannot even be compiled."""

    name: str
    state: State
    detail: str
    fix: str = ""
    needed: bool = False

    def __str__(self) -> str:
        mark = {"ok": "ok  ", "no": "no  ", "note": "    "}[self.state]
        head, *rest = self.detail.splitlines() or [""]
        lines = [f"{mark}{self.name:<24} {head}", *(f"{'':<29}{line.strip()}" for line in rest)]
        if self.fix:
            lines.append(f"{'':<29}fix: {self.fix}")
        return "\n".join(lines)


def main() -> int:
    """Print every finding.  Returns 1 if kernels cannot be compiled here, else 0."""
    findings = []
    for probe in PROBES:
        for finding in _safely(probe):
            print(finding, flush=True)
            findings.append(finding)
    return int(any(f.needed and f.state == "no" for f in findings))


def _safely(probe: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from probe()
    except PkError as error:  # such as a PK_* variable that cannot be read: the other probes still run
        what, _, fix = str(error).partition("\n  ")
        yield Finding(probe.__name__.strip("_"), "no", what, fix)


# ------------------------------------------------------------------------------------------------- software
def _python() -> Iterator[Finding]:
    ok = sys.version_info >= (3, 10)
    yield Finding(
        "python", "ok" if ok else "no", sys.version.split()[0], "" if ok else "use Python >= 3.10", needed=True
    )


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", "no", str(error), "pip install torch")
        return
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build: simulator only"
    wanted = not torch.version.cuda and driver.available()
    fix = "install a CUDA build of torch to use this machine's GPUs" if wanted else ""
    yield Finding("torch", "no" if wanted else "ok", f"{torch.__version__}, {built}", fix)


def _bindings() -> Iterator[Finding]:
    found = toolkit.version("cuda-bindings")
    fix = "" if found else "pip install cuda-bindings"
    yield Finding("cuda-bindings", "ok" if found else "no", found or "not installed", fix, needed=True)


def _nvrtc() -> Iterator[Finding]:
    text = '#include <cuda_fp16.h>\nextern "C" __global__ void probe(__half* p) { p[0] = __float2half(1.0f); }\n'
    source = Source(
        name="probe", entry="probe", text=text, arch="sm_90a", options=(), fields=(), params_size=0, threads=1,
        shared_bytes=0, sites=(), outputs=(), remote=False, uses_signals=False,
    )  # fmt: skip
    began = time.perf_counter()
    try:
        with env.overriding(PK_CACHE="0", PK_DUMP=None, PK_OVERRIDE=None, PK_NVRTC_FLAGS=None):
            compile.compile(source)
    except PkError as error:
        what, _, fix = str(error).rpartition("\n  ")
        yield Finding("NVRTC", "no", what, fix, needed=True)
        return
    took = time.perf_counter() - began
    detail = f"{toolkit.nvrtc_version() or 'not from a wheel'}: compiled a kernel for sm_90a in {took:.2f} s"
    yield Finding("NVRTC", "ok", detail, needed=True)


def _headers() -> Iterator[Finding]:
    count = sum(1 for _ in toolkit.INCLUDE.rglob("*.cuh"))
    fix = "" if count else "pk was installed without its package data: reinstall it"
    yield Finding("device headers", "ok" if count else "no", f"{count} files in {toolkit.INCLUDE}", fix, needed=True)


def _tools() -> Iterator[Finding]:
    try:
        yield Finding("nvdisasm", "ok", str(toolkit.binary("nvdisasm")))
    except PkError as error:
        yield Finding(
            "nvdisasm", "note", "not installed: only `show --stage sass` needs it", str(error).split("\n  ")[-1]
        )


def _native() -> Iterator[Finding]:
    reason = native.reason()
    yield Finding("native extension", "note" if reason else "ok", reason or "pk._C", "")


def _cache() -> Iterator[Finding]:
    if not env.CACHE.get():
        yield Finding("compile cache", "note", "PK_CACHE=0: off, every process compiles")
        return
    root = cache.root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=root):
            pass
    except OSError as error:
        yield Finding("compile cache", "no", f"{root}: {error}", "set PK_CACHE_DIR to a folder that you may write")
        return
    found = cache.entries()
    yield Finding("compile cache", "ok", f"{root}: {len(found)} kernels, {sum(n for _, n in found) / 2**20:.1f} MiB")


# ------------------------------------------------------------------------------------------------- hardware
def _driver() -> Iterator[Finding]:
    try:
        version = driver.version()
    except PkError as error:
        what, _, fix = str(error).partition("\n  ")
        yield Finding("driver", "no", what, fix)
        return
    found = toolkit.nvrtc_version()
    newer = found is not None and int(found.split(".")[0]) > version[0]
    fix = (
        f"update the driver, or install NVRTC {version[0]}.x: it cannot load what NVRTC {found} makes" if newer else ""
    )
    yield Finding("driver", "no" if newer else "ok", f"CUDA {version[0]}.{version[1]}", fix)


def _gpus() -> Iterator[Finding]:
    try:
        found = driver.devices()
    except PkError:
        return  # said by _driver already
    for gpu in found:
        fix = (
            "" if gpu.hopper else "pk compiles for sm_90a, which runs on H100, H200 and GH200 alone; use the simulator"
        )
        yield Finding(f"GPU {gpu.index}", "ok" if gpu.hopper else "no", str(gpu).partition(": ")[2], fix)
    if any(gpu.mig for gpu in found):
        fix = "ask for whole GPUs, or let ranks share one slice: pk.spawn(...)"
        yield Finding("MIG mode", "no", "some GPUs are MIG slices: they have no peer access", fix)
    else:
        yield Finding("MIG mode", "ok", "off")


def _peers() -> Iterator[Finding]:
    try:
        count = len(driver.devices())
        rows = [[a == b or driver.can_access_peer(a, b) for b in range(count)] for a in range(count)]
    except PkError:
        return  # said by _driver already
    if count < 2:
        yield Finding("peer access", "note", "one GPU: nothing to probe; ranks share it")
        return
    table = "\n".join(f"GPU {a}: " + " ".join("x" if ok else "." for ok in row) for a, row in enumerate(rows))
    full = all(map(all, rows))
    fix = (
        ""
        if full
        else "check `nvidia-smi topo -p2p rw`, IOMMU and ACS settings; ranks on GPUs without access cannot meet"
    )
    yield Finding("peer access", "ok" if full else "no", f"{'every pair' if full else 'not every pair'}\n{table}", fix)


# ------------------------------------------------------------------------------------------------- environment
def _visible() -> Iterator[Finding]:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    detail = "not set: every GPU" if value is None else f"{value!r}; ranks that see different GPUs are matched by UUID"
    yield Finding("CUDA_VISIBLE_DEVICES", "note", detail)


def _segments() -> Iterator[Finding]:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            fix = f"allocate shared tensors with pk.empty, or take expandable_segments out of {name}"
            yield Finding("expandable segments", "no", "on: torch's own tensors cannot be shared by CUDA IPC", fix)
            return
    yield Finding("expandable segments", "ok", "off")


def _connections() -> Iterator[Finding]:
    value = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if value is None:
        yield Finding("CUDA_DEVICE_MAX_CONN...", "ok", "CUDA_DEVICE_MAX_CONNECTIONS is not set")
        return
    few = not value.isdigit() or int(value) < 8
    fix = "set it to 32, or unset it: kernels of ranks that share a GPU may queue behind one another and never meet"
    yield Finding("CUDA_DEVICE_MAX_CONN...", "no" if few else "ok", value, fix if few else "")


def _blocking() -> Iterator[Finding]:
    on = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")
    fix = "unset it: a launch then returns only when all ranks have launched, and nothing overlaps" if on else ""
    yield Finding("CUDA_LAUNCH_BLOCKING", "no" if on else "ok", "on" if on else "off", fix)


def _multicast() -> Iterator[Finding]:
    try:
        allowed, why = env.multicast()
    except EnvError:
        return  # said by _variables
    yield Finding("NVLink multicast", "note", f"{'allowed' if allowed else 'not used'}: {why}")


def _variables() -> Iterator[Finding]:
    bad = False
    for variable in env.VARIABLES:
        try:
            variable.get()
        except EnvError as error:
            bad = True
            what, _, fix = str(error).partition("\n  ")
            yield Finding(variable.name, "no", what, fix)
    for name, near in env.unknown().items():
        bad = True
        yield Finding(
            name, "no", "is set, but pk has no such variable", f"did you mean {near}?" if near else "unset it"
        )
    if not bad:
        found = [v.name for v in env.VARIABLES if os.environ.get(v.name)]
        yield Finding("PK_* variables", "ok", ", ".join(found) or "none set")


PROBES: tuple[Callable[[], Iterator[Finding]], ...] = (
    _variables, _python, _torch, _bindings, _nvrtc, _headers, _tools, _native, _cache, _driver, _gpus, _peers, _visible,
    _segments, _connections, _blocking, _multicast,
)  # fmt: skip
