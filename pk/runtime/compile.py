"""From CUDA text to a cubin: NVRTC behind the disk cache.  Needs neither a GPU nor a driver.

::

    binary = compile(source)              # cubin, ptxas log, registers / spills / shared memory
    print(sass(binary.cubin))             # machine code, by nvdisasm
    print(ptx(source))

Measured (NVRTC 13.5, 2 CPU cores): loading NVRTC 0.1 s, a 10-line kernel 0.05 s, a hit on disk 1 ms.  NVRTC does not
run in parallel in threads.  A process that finds its kernels on disk never loads it: the version in the key comes from
the wheel's metadata.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import linecache
import re
import shlex
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pk import env
from pk.artifact import Source
from pk.errors import BackendError, CompileFailed
from pk.runtime import cache, driver, dump, toolkit

_PLACES = 5  # lines of the user's file that an error shows


@dataclass(frozen=True, slots=True)
class Resources:
    """What one thread block needs.

    ``registers`` is a thread's at launch (setmaxnreg moves them between warps later), ``spill_bytes`` stores plus loads
    of all functions, ``local_bytes`` the stack frame of a thread, ``shared_bytes`` static plus dynamic shared memory.
    """

    registers: int
    spill_bytes: int
    local_bytes: int
    shared_bytes: int

    def __str__(self) -> str:
        return (
            f"registers {self.registers}  spills {self.spill_bytes} B  local {self.local_bytes} B  "
            f"shared {self.shared_bytes} B"
        )


@dataclass(frozen=True, slots=True)
class Binary:
    """A compiled kernel.  ``digest`` is the sha256 of the cubin; ``log`` what NVRTC and ptxas said."""

    cubin: bytes
    log: str
    resources: Resources
    digest: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", self.digest or hashlib.sha256(self.cubin).hexdigest())

    @property
    def warnings(self) -> tuple[str, ...]:
        """Lines of the log that a kernel's author should see, such as an ignored setmaxnreg."""
        return tuple(line for line in self.log.splitlines() if "warning" in line.lower() or "setmaxnreg" in line)


@dataclass(slots=True)
class Counts:
    """How this process got its cubins: for tests, and for ``PK_DEBUG``."""

    compiled: int = 0
    disk: int = 0
    memory: int = 0


counts = Counts()

_memory: dict[str, cache.Entry] = {}
_guard = threading.Lock()
_key_locks: dict[str, threading.Lock] = {}
_surprise: list[
    str
] = []  # version of the NVRTC that was loaded, if it is not the one that the wheel's metadata promised


class _OtherVersion(Exception):
    """The NVRTC that was loaded is not the one in the key."""


def compile(source: Source, ir_text: str | None = None, plan_text: str | None = None) -> Binary:
    """Compile ``source``, or take it from this process's memory or the disk cache.

    ``ir_text`` and ``plan_text`` only go to ``PK_DUMP`` and ``PK_DEBUG``.  Safe to call from any thread.  Raises
    :class:`pk.errors.CompileFailed` with the log and the user's lines, :class:`pk.errors.BackendError` without NVRTC.
    """
    name = _key(source).name
    source, path = dump.override(source, name)
    notes = {"10_ir.txt": ir_text, "20_plan.txt": plan_text, "30_kernel.cu": dump.readable(source.text)}
    dump.write(name, {**notes})
    for level, note in ((3, plan_text), (4, source.text), (5, ir_text)):
        if note:
            env.debug(level, f"{source.name}:\n{note}")
    try:
        entry = _obtain(source, path)
    except CompileFailed as error:
        dump.write(name, {"40_ptxas.txt": error.log})
        raise
    binary = Binary(entry.cubin, entry.log, resources(entry.log, source))
    meta = {**_facts(source), "resources": dataclasses.asdict(binary.resources), "cubin_sha256": binary.digest}
    dump.write(
        name, {"40_ptxas.txt": entry.log, "50_kernel.cubin": entry.cubin, "meta.json": json.dumps(meta, indent=1)}
    )
    env.debug(7, f"{source.name}:\n{entry.log}")
    for line in binary.warnings:
        env.debug(1, f"{source.name}: {line.strip()}")
    return binary


def ptx(source: Source) -> str:
    """The PTX of ``source``.  Compiles every time; errors as for :func:`compile`."""
    source, path = dump.override(source, _key(source).name)
    return _nvrtc(source, path, "PTX")[0].rstrip(b"\0").decode()


def sass(cubin: bytes) -> str:
    """The machine code of a cubin, as nvdisasm prints it; BackendError if there is no nvdisasm."""
    return _tool("nvdisasm", "--print-code", cubin)


# ------------------------------------------------------------------------------------------------- memory, disk, NVRTC
def options(source: Source) -> tuple[str, ...]:
    """Every NVRTC flag for ``source`` but the include paths, which differ between machines and mean the same."""
    flags = list(source.options)
    for option, names in (
        (f"--gpu-architecture={source.arch}", r"--gpu-architecture=|-arch="),
        ("--std=c++17", r"--?std="),
        ("--ptxas-options=-v", r"--ptxas-options=-v$"),  # registers and spills, read from the log
    ):
        if not any(re.match(names, flag) for flag in flags):
            flags.append(option)
    try:
        extra = shlex.split(env.NVRTC_FLAGS.get())
    except ValueError as error:
        raise BackendError(f"PK_NVRTC_FLAGS cannot be split into flags: {error}.\n  Balance its quotes.") from None
    return (*flags, *extra)


def _key(source: Source) -> cache.Key:
    version = _surprise[0] if _surprise else toolkit.nvrtc_version() or _version_of_library()
    return cache.key(source, options(source), version)


def _version_of_library() -> str:
    module = driver.nvrtc()
    major, minor = driver.check(module.nvrtcVersion(), "nvrtcVersion")
    return f"{major}.{minor}"


def _obtain(source: Source, path: str) -> cache.Entry:
    """The entry of ``source``, made at most once in this process whichever threads ask for it."""
    key = _key(source)
    with _guard:
        lock = _key_locks.setdefault(key.digest, threading.Lock())
    held = lock.acquire(timeout=env.CACHE_WAIT_S.get())  # a thread that never comes back must not hang the others
    try:
        if key.digest in _memory:
            counts.memory += 1
            return _memory[key.digest]
        entry = _from_disk_or_nvrtc(source, path, key)
        _memory[key.digest] = entry
        return entry
    finally:
        if held:
            lock.release()


def _from_disk_or_nvrtc(source: Source, path: str, key: cache.Key) -> cache.Entry:
    began = time.perf_counter()
    try:
        entry, origin = _fetch(source, path, key)
    except _OtherVersion as other:  # rare: another libnvrtc was loaded first.  Its cubins have keys of their own
        _surprise[:] = [str(other)]
        key = _key(source)
        entry, origin = _fetch(source, path, key)
    took = time.perf_counter() - began
    if origin == "disk":
        counts.disk += 1
        env.debug(1, f"{source.name}: cubin from the cache, {cache.folder(key)}")
    else:
        env.debug(1, f"{source.name}: compiled for {source.arch}, NVRTC {key.label.split('-', 1)[-1]}")
    env.debug(2, f"{source.name}: {origin} in {took * 1e3:.1f} ms")
    return entry


def _fetch(source: Source, path: str, key: cache.Key) -> tuple[cache.Entry, cache.Origin]:
    def build() -> cache.Entry:
        actual = _version_of_library()
        expected = _surprise[0] if _surprise else toolkit.nvrtc_version() or actual
        if expected.split(".")[:2] != actual.split("."):
            raise _OtherVersion(actual)
        counts.compiled += 1
        cubin, log = _nvrtc(source, path, "CUBIN")
        if "registers" not in log:  # an NVRTC that keeps ptxas' report to itself
            log += _tool("cuobjdump", "-res-usage", cubin)
        return cache.Entry(cubin, log)

    if not env.CACHE.get():
        return build(), "compiled"
    return cache.fetch(key, source.text, _facts(source), build)


def _facts(source: Source) -> dict[str, Any]:
    return {
        "name": source.name,
        "entry": source.entry,
        "arch": source.arch,
        "options": options(source),
        "threads": source.threads,
        "dynamic_shared_bytes": source.shared_bytes,
        "params_size": source.params_size,
        "sites": [dataclasses.asdict(site) for site in source.sites],
    }


def _nvrtc(source: Source, path: str, product: str) -> tuple[bytes, str]:
    """Run NVRTC; ``product`` is ``"CUBIN"`` or ``"PTX"``.  Returns it and the log."""
    module = driver.nvrtc()
    file = path or f"{source.entry}.cu"
    program = driver.check(
        module.nvrtcCreateProgram(source.text.encode(), file.encode(), 0, [], []), "nvrtcCreateProgram"
    )
    try:
        flags = [f.encode() for f in (*options(source), *(f"--include-path={p}" for p in toolkit.include_folders()))]
        status = module.nvrtcCompileProgram(program, len(flags), flags)[0]
        log = _text(module, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
        if int(status) != 0:
            raise _failure(source, file, status.name, log)
        return _text(module, product, program), log
    finally:
        module.nvrtcDestroyProgram(program)


def _text(module: Any, what: str, program: Any) -> bytes:
    size = driver.check(getattr(module, f"nvrtcGet{what}Size")(program), f"nvrtcGet{what}Size")
    buffer = bytearray(size)
    driver.check(getattr(module, f"nvrtcGet{what}")(program, buffer), f"nvrtcGet{what}")
    return bytes(buffer)


# ------------------------------------------------------------------------------------------------- logs
def _failure(source: Source, file: str, status: str, log: str) -> Exception:
    if status == "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE":
        return BackendError(
            f"NVRTC is not whole: libnvrtc and libnvrtc-builtins do not belong together ({log.strip() or status}).\n"
            f"  pip install --force-reinstall {toolkit.wheel('nvrtc')}"
        )
    places, advice = _places(source, file, log), _advice(file, source, log)
    return CompileFailed(source.name, source.arch, log or status, places, advice)


def _places(source: Source, file: str, log: str) -> tuple[str, ...]:
    """The lines that errors in ``log`` point at, as traceback frames; ``#line`` makes them lines of the user's file."""
    places: list[str] = []
    for where, number in re.findall(r"^(.+?)\((\d+)\): (?:catastrophic )?error", log, re.MULTILINE):
        lines = source.text.splitlines() if where == file else linecache.getlines(where)
        line = lines[int(number) - 1].strip() if 0 < int(number) <= len(lines) else ""
        place = f'  File "{where}", line {number}' + (f"\n    {line}" if line else "")
        if place not in places:
            places.append(place)
    return tuple(places[:_PLACES])


def _advice(file: str, source: Source, log: str) -> str:
    if re.search(r"(cannot|could not) open source file", log):
        return f"If the missing file is one of CUDA's: pip install {toolkit.wheel('runtime')} {toolkit.wheel('cccl')}"
    if file != f"{source.entry}.cu":
        return f"The text came from PK_OVERRIDE: correct {file}, or unset PK_OVERRIDE."
    if env.NVRTC_FLAGS.get():
        return f"PK_NVRTC_FLAGS={env.NVRTC_FLAGS.get()!r} was in force: try without."
    return "The emitted CUDA is at fault, not your kernel: please report it, with what PK_DUMP=<folder> writes."


def resources(log: str, source: Source) -> Resources:
    """Read ptxas' report (or ``cuobjdump -res-usage``) on ``source``.

    Raises :class:`pk.errors.BackendError` if there is no report on the kernel in ``log``.
    """
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))
    entry = re.escape(source.entry)
    report = re.search(rf"entry function '{entry}'.*?Used (\d+) registers([^\n]*)", log, re.DOTALL)
    if report:
        frame = re.search(rf"properties for {entry}\s*\n\D*(\d+) bytes stack frame", log)
        static = re.search(r"(\d+) bytes smem", report[2])
        local = int(frame[1]) if frame else 0
        return Resources(int(report[1]), spills, local, (int(static[1]) if static else 0) + source.shared_bytes)
    usage = re.search(rf"Function {entry}:\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+)", log)
    if usage:
        reserved = 1024  # cuobjdump counts what the system keeps of every block on sm_90
        static_bytes = max(int(usage[3]) - reserved, 0)
        return Resources(int(usage[1]), spills, int(usage[2]), static_bytes + source.shared_bytes)
    raise BackendError(
        f"The compiler's log has no resource report on `{source.entry}`:\n{log.strip()}\n"
        f"  Update it: pip install --upgrade {toolkit.wheel('nvrtc')}"
    )


def _tool(name: str, flag: str, cubin: bytes) -> str:
    program = toolkit.binary(name)
    with tempfile.TemporaryDirectory(prefix="pk-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([program, flag, path], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip()
        raise BackendError(f"{program} failed: {said}.\n  Is this a cubin of a newer CUDA?")
    return done.stdout
