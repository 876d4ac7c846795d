"""Compiles and launches ``handwritten.cu``, without pk's runtime."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

STAGES = 4
THREADS = 128


def check(result: tuple[Any, ...], what: str) -> Any:
    """The value of a cuda-bindings result; RuntimeError if it is an error."""
    if int(result[0]):
        raise RuntimeError(f"{what}: {result[0]}")
    return result[1] if len(result) == 2 else result[1:]


def cubin() -> bytes:
    """``handwritten.cu`` for sm_90a."""
    from cuda.bindings import nvrtc

    text = (Path(__file__).parent / "handwritten.cu").read_bytes()
    program = check(nvrtc.nvrtcCreateProgram(text, b"handwritten.cu", 0, [], []), "nvrtcCreateProgram")
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17", b"-default-device"]
    status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    if int(status):
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize")
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"handwritten.cu does not compile:\n{log.decode()}")
    image = b" " * check(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize")
    check(nvrtc.nvrtcGetCUBIN(program, image), "nvrtcGetCUBIN")
    return image


class Handwritten:
    """The kernels of ``handwritten.cu``, loaded into the current context."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.cu = driver
        self.module = check(driver.cuModuleLoadData(cubin()), "cuModuleLoadData")
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.functions = {}
        for name in ("hand_store", "hand_copy", "hand_nothing"):
            function = check(driver.cuModuleGetFunction(self.module, name.encode()), name)
            check(driver.cuFuncLoad(function), name)
            check(driver.cuFuncSetAttribute(function, limit, STAGES * 32 * 1024), name)
            self.functions[name] = function

    def ready(
        self, name: str, blocks: int, shared: int, args: tuple[int, ...], stream: int, cooperative: bool = False
    ) -> Callable[[], None]:
        """A launch with everything packed; pointers are 8 bytes in ``args``, the last two of four are ints."""
        cu = self.cu
        config = cu.CUlaunchConfig()
        config.gridDimX, config.blockDimX, config.sharedMemBytes = blocks, THREADS, shared
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.hStream = cu.CUstream(stream)
        if cooperative:
            attribute = cu.CUlaunchAttribute()
            attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            config.attrs, config.numAttrs = [attribute], 1
        kinds = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int, ctypes.c_int)
        values = [kind(value) for kind, value in zip(kinds, args, strict=False)]
        pointers = (ctypes.c_void_p * max(len(values), 1))(*[ctypes.addressof(v) for v in values])
        function, address = self.functions[name], ctypes.addressof(pointers)

        def launch(kept: Any = (values, pointers)) -> None:
            check(cu.cuLaunchKernelEx(config, function, address, 0), name)

        return launch
