"""pk: overlapped multi-GPU kernels as Python tile functions.

Write a kernel with ``@pk.kernel`` and the tile language below, prove it right in the simulator on a laptop, run the
same function on GPUs. ``pk.ops`` holds finished operators for PyTorch.
"""

from pk import errors, testing
from pk.checking import Check, check
from pk.dsl.language import *  # noqa: F403  the language: its names are its __all__
from pk.dsl.language import __all__ as _language
from pk.errors import ArgumentError, BackendError, CheckError, CompileError, HangError, PkError
from pk.kernel import Kernel, kernel, spec
from pk.runtime.api import describe_backend, device, empty, finalize, reset, spawn, symmetric, synchronize
from pk.timeline import Timeline
from pk.tracing import trace

__version__ = "0.1.0"

__all__ = [
    *_language,
    "ArgumentError",
    "BackendError",
    "Check",
    "CheckError",
    "CompileError",
    "HangError",
    "Kernel",
    "PkError",
    "Timeline",
    "check",
    "describe_backend",
    "device",
    "empty",
    "errors",
    "finalize",
    "kernel",
    "nn",
    "ops",
    "reset",
    "spawn",
    "spec",
    "symmetric",
    "synchronize",
    "testing",
    "trace",
]


def __getattr__(name: str) -> object:
    if name in ("nn", "ops"):  # import torch: only when somebody asks
        import importlib

        return importlib.import_module(f"pk.{name}")
    raise AttributeError(f"module 'pk' has no attribute {name!r}")
