"""A kernel of a few lines for the tests of compiler, cache and modules, and a way to run it in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pk.artifact import Field, Site, Source

ROOT = Path(__file__).parent.parent.parent
PYTHONPATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
TEXT = 'extern "C" __global__ void __launch_bounds__(128, 1) toy(float* p) { p[threadIdx.x] *= 2.0f; }\n'

# What a child process runs: `counts` says how the cubin was come by.
PROGRAM = """
import json, sys, warnings
from pk.runtime import cache, compile
from tests.runtime import toy
{before}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    binary = compile.compile(toy.source())
    {after}
print(json.dumps({{
    "compiled": compile.counts.compiled, "disk": compile.counts.disk, "memory": compile.counts.memory,
    "nvrtc": "cuda.bindings.nvrtc" in sys.modules, "bindings": "cuda.bindings" in sys.modules,
    "digest": binary.digest, "warnings": [str(w.message) for w in caught],
}}))
"""


def source(**changes: Any) -> Source:
    """The toy kernel's record; ``changes`` replace its fields."""
    fields: dict[str, Any] = {
        "name": "toy",
        "entry": "toy",
        "text": TEXT,
        "arch": "sm_90a",
        "options": (),
        "fields": (Field("p", "pointer", 0, 8, "p"),),
        "params_size": 8,
        "threads": 128,
        "shared_bytes": 2048,
        "sites": (Site("loader", "wait", "begun", "toy.py", 7, "pk.wait(begun, 0, 1)"),),
        "outputs": ("p",),
        "remote": False,
        "uses_signals": False,
    }
    return Source(**(fields | changes))


def start(cache_folder: Path, before: str = "", after: str = "pass", **variables: str) -> subprocess.Popen[str]:
    """A child that compiles the toy kernel; ``before`` and ``after`` are statements around that."""
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "PK_CACHE_DIR": str(cache_folder), **variables}
    program = PROGRAM.format(before=before, after=after)
    return subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(child: subprocess.Popen[str], seconds: float = 60) -> dict[str, Any]:
    """What the child printed; an AssertionError with its stderr if it failed, a time-out if it hangs."""
    out, err = child.communicate(timeout=seconds)
    assert child.returncode == 0, err
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def compile_in_child(cache_folder: Path, before: str = "", after: str = "pass", **variables: str) -> dict[str, Any]:
    """``start`` and ``finish``."""
    return finish(start(cache_folder, before, after, **variables))
