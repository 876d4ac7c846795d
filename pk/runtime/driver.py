"""The CUDA driver and NVRTC: the only import of ``cuda.bindings`` in pk, and a lazy one.

::

    cu = driver.cu()                                  # cuda.bindings.driver, initialised; BackendError if it cannot be
    free, total = driver.check(cu.cuMemGetInfo(), "cuMemGetInfo")
    driver.require_hopper(0)                          # Device, or BackendError "no Hopper-class GPU"
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pk.errors import BackendError, DriverError
from pk.runtime import toolkit

_SIMULATE = 'or run in the simulator: PK_BACKEND=sim, or pk.spawn(..., backend="sim")'

_ADVICE = {
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "The cubin is for another architecture: pk's sm_90a code runs on Hopper GPUs only.",
    "CUDA_ERROR_INVALID_IMAGE": "Update the NVIDIA driver or use an older nvidia-cuda-nvrtc: `python -m pk doctor`.",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "Update the NVIDIA driver; see `python -m pk doctor`.",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "The process's CUDA context is lost: restart it.",
    "CUDA_ERROR_SYSTEM_NOT_READY": "Start nvidia-fabricmanager (NVSwitch machines need it).",
}


@dataclass(frozen=True, slots=True)
class Device:
    """Facts of one visible GPU.  ``index`` counts visible GPUs, ``uuid`` is the same in every process of the host."""

    index: int
    name: str
    capability: tuple[int, int]
    sms: int
    shared_bytes: int  # dynamic shared memory that a block may opt in to
    uuid: bytes

    @property
    def hopper(self) -> bool:
        """Whether sm_90a code runs on it: such code is not forward compatible."""
        return self.capability == (9, 0)

    @property
    def mig(self) -> bool:
        """Whether it is a slice of a GPU in MIG mode, which has no peers."""
        return " MIG " in self.name

    def __str__(self) -> str:
        major, minor = self.capability
        return f"GPU {self.index}: {self.name}, sm_{major}{minor}, {self.sms} SMs"


# ------------------------------------------------------------------------------------------------- loading
@functools.lru_cache(maxsize=1)
def cu() -> Any:
    """``cuda.bindings.driver`` after ``cuInit``.

    Raises :class:`pk.errors.BackendError` if cuda-bindings, the driver or every GPU is missing.
    """
    module = _import("driver")
    try:
        result = module.cuInit(0)
    except RuntimeError as error:  # cuda-pathfinder: libcuda.so.1 was not found
        raise BackendError(
            "No NVIDIA driver (libcuda.so.1 cannot be loaded), so kernels cannot run on a GPU here.\n"
            f"  Install the NVIDIA driver, {_SIMULATE}."
        ) from error
    if result[0].name == "CUDA_ERROR_NO_DEVICE":
        raise BackendError(_no_gpu())
    check(result, "cuInit")
    return module


@functools.lru_cache(maxsize=1)
def nvrtc() -> Any:
    """``cuda.bindings.nvrtc`` with its library loaded; needs neither driver nor GPU.

    Raises :class:`pk.errors.BackendError` with the pip command if NVRTC is missing.
    """
    module = _import("nvrtc")
    try:
        module.nvrtcVersion()
    except RuntimeError as error:
        raise BackendError(
            f"NVRTC {toolkit.cuda_major()}.x is not installed, so kernels cannot be compiled.\n"
            f"  pip install {toolkit.wheel('nvrtc')} {toolkit.wheel('runtime')}"
        ) from error
    return module


def _import(name: str) -> Any:
    try:
        return __import__(f"cuda.bindings.{name}", fromlist=[name])
    except ImportError as error:
        raise BackendError(
            f"cuda-bindings is not installed ({error}), so pk can neither compile nor launch kernels.\n"
            "  pip install cuda-bindings nvidia-cuda-nvrtc nvidia-cuda-runtime"
        ) from error


def _no_gpu() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    why = f" (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None else ""
    return f"No GPU: the NVIDIA driver found none{why}.\n  Make a GPU visible, {_SIMULATE}."


def check(result: Sequence[Any], call: str = "a CUDA call") -> Any:
    """The values of a cuda-bindings result ``(status, *values)``: None, the value, or a tuple of them.

    Raises :class:`pk.errors.DriverError` naming ``call`` and the driver's error if the status is not success.
    """
    status, *values = result
    if int(status) != 0:
        raise DriverError(call, status.name, _describe(status), _ADVICE.get(status.name, ""))
    return None if not values else values[0] if len(values) == 1 else tuple(values)


def _describe(status: Any) -> str:
    if status.name.startswith("NVRTC"):
        return bytes(nvrtc().nvrtcGetErrorString(status)[1]).decode()
    found, text = _import("driver").cuGetErrorString(status)
    return text.decode() if int(found) == 0 and text else "no description"


# ------------------------------------------------------------------------------------------------- devices
@functools.lru_cache(maxsize=1)
def devices() -> tuple[Device, ...]:
    """Every visible GPU.  Raises :class:`pk.errors.BackendError` if there is none."""
    module = cu()
    count = check(module.cuDeviceGetCount(), "cuDeviceGetCount")
    if count == 0:
        raise BackendError(_no_gpu())
    return tuple(_facts(module, index) for index in range(count))


def _facts(module: Any, index: int) -> Device:
    handle = check(module.cuDeviceGet(index), "cuDeviceGet")
    attributes = module.CUdevice_attribute

    def attribute(name: str) -> int:
        return int(check(module.cuDeviceGetAttribute(getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}"), handle), name))

    # CUDA 13 dropped the suffix that 12's bindings need for the MIG-aware form
    get_uuid = getattr(module, "cuDeviceGetUuid_v2", module.cuDeviceGetUuid)
    name = check(module.cuDeviceGetName(128, handle), "cuDeviceGetName")
    return Device(
        index=index,
        name=name.split(b"\0")[0].decode(),
        capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        sms=attribute("MULTIPROCESSOR_COUNT"),
        shared_bytes=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        uuid=bytes(check(get_uuid(handle), "cuDeviceGetUuid").bytes),
    )


def device(index: int) -> Device:
    """Facts of GPU ``index``.  Raises :class:`pk.errors.BackendError` if there is no such GPU."""
    found = devices()
    if not 0 <= index < len(found):
        raise BackendError(f"There is no GPU {index}: {len(found)} visible.\n  Use 0 to {len(found) - 1}.")
    return found[index]


def require_hopper(index: int) -> Device:
    """GPU ``index`` if it runs sm_90a code; :class:`pk.errors.BackendError` otherwise."""
    found = device(index)
    if not found.hopper:
        raise BackendError(
            f"No Hopper-class GPU: {found}, and pk compiles for sm_90a, which runs on sm_90 alone.\n"
            f"  Use an H100, H200 or GH200, {_SIMULATE}."
        )
    return found


def why_unavailable() -> str | None:
    """None if there is a GPU that can run pk's kernels, else the reason.  Never raises."""
    try:
        found = devices()
    except BackendError as error:
        return str(error)
    if any(d.hopper for d in found):
        return None
    return (
        f"No Hopper-class GPU: {'; '.join(map(str, found))}, and pk's kernels need sm_90.\n"
        f"  Use an H100, H200 or GH200, {_SIMULATE}."
    )


def available() -> bool:
    """Whether there is a GPU that can run pk's kernels."""
    return why_unavailable() is None


def version() -> tuple[int, int]:
    """The CUDA version that the driver supports, such as (13, 0)."""
    number = int(check(cu().cuDriverGetVersion(), "cuDriverGetVersion"))
    return number // 1000, number % 1000 // 10


def can_access_peer(index: int, peer: int) -> bool:
    """Whether the driver says that GPU ``index`` can address GPU ``peer``."""
    module = cu()
    handles = [check(module.cuDeviceGet(i), "cuDeviceGet") for i in (index, peer)]
    return bool(check(module.cuDeviceCanAccessPeer(*handles), "cuDeviceCanAccessPeer"))


# ------------------------------------------------------------------------------------------------- contexts
@functools.lru_cache(maxsize=64)
def primary_context(index: int) -> Any:
    """The primary context of GPU ``index`` (the one torch uses), retained until the process ends."""
    module = cu()
    device(index)
    handle = check(module.cuDeviceGet(index), "cuDeviceGet")
    return check(module.cuDevicePrimaryCtxRetain(handle), "cuDevicePrimaryCtxRetain")


@contextlib.contextmanager
def on_device(index: int) -> Iterator[None]:
    """Make GPU ``index``'s primary context current in this thread for a ``with`` block."""
    module = cu()
    check(module.cuCtxPushCurrent(primary_context(index)), "cuCtxPushCurrent")
    try:
        yield
    finally:
        check(module.cuCtxPopCurrent(), "cuCtxPopCurrent")


def context_id() -> int:
    """A number for the current context that the process never uses again; BackendError if there is none."""
    module = cu()
    context = check(module.cuCtxGetCurrent(), "cuCtxGetCurrent")
    if int(context) == 0:
        raise BackendError("No CUDA context is current in this thread.\n  Call torch.cuda.set_device(...) first.")
    return int(check(module.cuCtxGetId(context), "cuCtxGetId"))


def launch_config(
    shape: tuple[int, int, int], cluster: int = 1, *, cooperative: bool = False, close: bool = False
) -> Any:
    """A launch of ``shape`` (blocks, threads, dynamic shared bytes) in clusters of ``cluster`` blocks.

    ``cooperative``: its blocks begin together, or not at all.  ``close``: they may come when those of the launch before
    leave (programmatic dependent launch).
    """
    api = cu()
    attributes = []
    if cooperative:
        attributes.append(api.CUlaunchAttribute())
        attributes[-1].id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attributes[-1].value.cooperative = 1
    if close:
        attributes.append(api.CUlaunchAttribute())
        attributes[-1].id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attributes[-1].value.programmaticStreamSerializationAllowed = 1
    if cluster > 1:
        attributes.append(api.CUlaunchAttribute())
        attributes[-1].id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attributes[-1].value.clusterDim
        size.x, size.y, size.z = cluster, 1, 1
    config = api.CUlaunchConfig()
    config.gridDimX, config.blockDimX, config.sharedMemBytes = shape
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def encode_tiled(
    dtype: str, address: int, dims: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: str
) -> bytes:
    """``cuTensorMapEncodeTiled``: 128 bytes.  Innermost dimension first, ``strides`` in bytes without the innermost.

    Called through ctypes because the driver wants the map 64-byte aligned, and the one that cuda-bindings allocates
    inside a Python object is aligned to 16 bytes only (in 13.5 too).
    """
    module = cu()
    rank = len(dims)
    u64, u32 = ctypes.c_uint64, ctypes.c_uint32
    raw = ctypes.create_string_buffer(128 + 64)
    aligned = ctypes.addressof(raw) + -ctypes.addressof(raw) % 64
    kinds, swizzles, promotions = module.CUtensorMapDataType, module.CUtensorMapSwizzle, module.CUtensorMapL2promotion
    call = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    code = call(
        ctypes.c_void_p(aligned),
        ctypes.c_int(int(getattr(kinds, f"CU_TENSOR_MAP_DATA_TYPE_{dtype}"))),
        u32(rank),
        ctypes.c_void_p(address),
        (u64 * rank)(*dims),
        (u64 * max(rank - 1, 1))(*strides),  # of a 1-D tensor the driver reads none, but the pointer must not be null
        (u32 * rank)(*box),
        (u32 * rank)(*[1] * rank),
        ctypes.c_int(0),  # CU_TENSOR_MAP_INTERLEAVE_NONE
        ctypes.c_int(int(getattr(swizzles, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"))),
        ctypes.c_int(int(promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_256B)),
        ctypes.c_int(0),  # CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE: zeros
    )
    what = f"dims={tuple(dims)}, strides={tuple(strides)}, box={tuple(box)}, swizzle={swizzle}"
    check((module.CUresult(code),), f"cuTensorMapEncodeTiled({what})")
    return ctypes.string_at(aligned, 128)
