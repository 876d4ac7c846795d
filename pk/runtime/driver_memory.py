"""The driver calls of the launch side: memory, IPC, peers, streams, launches.

Beside ``driver.py`` the only importer of ``cuda``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pk.errors import BackendError, DriverError
from pk.runtime import tensormap
from pk.runtime.device import Memory, no_path
from pk.runtime.driver import can_access_peer, check, cu, devices, launch_config, on_device, primary_context
from pk.runtime.driver import device as facts
from pk.runtime.native import native

if TYPE_CHECKING:
    import torch

_HANDLE_BYTES = 64
_IPC_FLAGS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_HOST_FLAGS = 0x1 | 0x2  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
_NON_BLOCKING = 1
_NO_TIMING = 2
_NO_CONTEXT = ("CUDA_ERROR_INVALID_CONTEXT", "CUDA_ERROR_INVALID_HANDLE")


class _CudaArray:
    """What torch reads; it holds the Memory, so that the tensor does."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = memory.interface


def _call(name: str, *args: Any) -> Any:
    """Call a driver function by name; its single result, or None."""
    return check(getattr(cu(), name)(*args), name)


def _current_stream() -> Callable[[int], int]:
    """torch's current stream of a device, as a number."""
    import torch

    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # what Triton uses: makes no Stream object
    return raw or (lambda device: int(torch.cuda.current_stream(device).cuda_stream))


class CudaDriver:
    """:class:`pk.runtime.device.Driver` on the CUDA driver API and torch's primary contexts."""

    def __init__(self) -> None:
        cu()
        self._streams: dict[int, Any] = {}
        self._connected: set[tuple[int, int]] = set()
        self._lock = threading.RLock()
        self.__dict__["stream"] = _current_stream()  # in the method's place: one call less

    def on(self, device: int) -> contextlib.AbstractContextManager[None]:
        """Make the device's primary context current for a ``with`` block."""
        return on_device(device)

    # ------------------------------------------------------------------------------------------------- devices
    def sms(self, device: int) -> int:
        """Number of SMs."""
        return facts(device).sms

    def uuid(self, device: int) -> str:
        """The GPU's UUID, in hexadecimal."""
        return facts(device).uuid.hex()

    def uuids(self) -> list[str]:
        """UUIDs of all visible GPUs."""
        return [d.uuid.hex() for d in devices()]

    def reachable(self, device: int, peer: int) -> bool:
        """Whether the driver reports a peer-to-peer path.  Makes no context on the peer."""
        return device == peer or can_access_peer(device, peer)

    def connect(self, device: int, peer: int) -> None:
        """Enable access from ``device`` to ``peer``'s memory.  Idempotent."""
        if device == peer or (device, peer) in self._connected:
            return
        if not can_access_peer(device, peer):
            raise BackendError(no_path(device, peer))
        with on_device(device), self._lock:
            status = cu().cuCtxEnablePeerAccess(primary_context(peer), 0)[0]
            if status.name != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":  # by torch or NCCL
                check((status,), "cuCtxEnablePeerAccess")
            self._connected.add((device, peer))

    # -------------------------------------------------------------------------------------------------- memory
    def allocate(self, device: int, nbytes: int) -> int:
        """``cuMemAlloc``; if memory has run out, once more without what torch's allocator keeps in reserve."""
        with on_device(device):
            try:
                return int(_call("cuMemAlloc", nbytes))
            except DriverError as error:
                if "OUT_OF_MEMORY" not in str(error):
                    raise
            import torch

            torch.cuda.empty_cache()
            return int(_call("cuMemAlloc", nbytes))

    def free(self, device: int, address: int) -> None:
        """``cuMemFree``."""
        with on_device(device):
            _call("cuMemFree", address)

    def tensor(self, device: int, memory: Memory) -> torch.Tensor:
        """Zero-copy uint8 tensor."""
        import torch

        return torch.as_tensor(_CudaArray(memory), device=torch.device("cuda", device))

    def zero(self, device: int, address: int, nbytes: int) -> None:
        """Memset on a private stream: the default stream may be behind a kernel that waits."""
        with on_device(device):
            stream = self._stream(device)
            _call("cuMemsetD8Async", address, 0, nbytes, stream)
            _call("cuStreamSynchronize", stream)

    def poison(self, device: int, stream: int, address: int, nbytes: int) -> None:
        """Memset, as work of ``stream``."""
        with on_device(device):
            _call("cuMemsetD8Async", address, 0xFF, nbytes, stream)

    def read(self, device: int, address: int, nbytes: int) -> bytes:
        """Copy to the host on a private stream."""
        buffer = (ctypes.c_ubyte * nbytes)()
        with on_device(device):
            stream = self._stream(device)
            _call("cuMemcpyDtoHAsync", ctypes.addressof(buffer), address, nbytes, stream)
            _call("cuStreamSynchronize", stream)
        return bytes(buffer)

    def write(self, device: int, address: int, data: bytes) -> None:
        """Copy from the host on a private stream."""
        with on_device(device):
            stream = self._stream(device)
            _call("cuMemcpyHtoDAsync", address, data, len(data), stream)
            _call("cuStreamSynchronize", stream)

    def _stream(self, device: int) -> Any:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = _call("cuStreamCreate", _NON_BLOCKING)
            return self._streams[device]

    def host_page(self, device: int, nbytes: int) -> tuple[int, int]:
        """Pinned, mapped and zeroed."""
        with on_device(device):
            host = int(_call("cuMemHostAlloc", nbytes, _HOST_FLAGS))
            ctypes.memset(host, 0, nbytes)
            return host, int(_call("cuMemHostGetDevicePointer", host, 0))

    def free_host(self, device: int, address: int) -> None:
        """``cuMemFreeHost``."""
        with on_device(device):
            _call("cuMemFreeHost", address)

    # ----------------------------------------------------------------------------------------------------- IPC
    def span(self, device: int, address: int) -> tuple[int, int]:
        """``cuMemGetAddressRange``."""
        with on_device(device):
            base, size = _call("cuMemGetAddressRange", address)
            return int(base), int(size)

    def exportable(self, device: int, address: int) -> bool:
        """False for virtual-memory allocations, such as torch's expandable segments."""
        attribute = cu().CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        with on_device(device):
            return bool(_call("cuPointerGetAttribute", attribute, address))

    def export(self, device: int, address: int) -> bytes:
        """The 64 bytes of a ``CUipcMemHandle``."""
        with on_device(device):
            return ctypes.string_at(_call("cuIpcGetMemHandle", address).getPtr(), _HANDLE_BYTES)

    def open(self, device: int, handle: bytes) -> int:
        """``cuIpcOpenMemHandle``."""
        token = cu().CUipcMemHandle()
        ctypes.memmove(token.getPtr(), handle, _HANDLE_BYTES)  # cuda-bindings has no field for it
        with on_device(device):
            return int(_call("cuIpcOpenMemHandle", token, _IPC_FLAGS))

    def close(self, device: int, address: int) -> None:
        """``cuIpcCloseMemHandle``."""
        with on_device(device):
            _call("cuIpcCloseMemHandle", address)

    # ------------------------------------------------------------------------------------- streams and launches
    def synchronize(self, device: int) -> None:
        """``cuCtxSynchronize``."""
        with on_device(device):
            _call("cuCtxSynchronize")

    def stream(self, device: int) -> int:
        """torch's current stream."""
        return _current_stream()(device)

    def synchronize_stream(self, device: int, stream: int) -> None:
        """``cuStreamSynchronize``; in the main thread, which alone hears Ctrl-C, without closing its ears."""
        with on_device(device):
            if threading.current_thread() is threading.main_thread():
                _listen_until(lambda: cu().cuStreamQuery(stream)[0].name != "CUDA_ERROR_NOT_READY")
            _call("cuStreamSynchronize", stream)

    def capturing(self, device: int, stream: int) -> bool:
        """Whether the stream records into a graph (an invalidated capture counts)."""
        if stream == 0:  # the legacy stream cannot capture, and asking about it would break another stream's capture
            return False
        with on_device(device):
            return int(_call("cuStreamIsCapturing", stream)) != 0

    def follow(self, device: int, stream: int, earlier: int) -> None:
        """An event on ``earlier`` that ``stream`` waits for."""
        with on_device(device):
            event = _call("cuEventCreate", _NO_TIMING)
            _call("cuEventRecord", event, earlier)
            _call("cuStreamWaitEvent", stream, event, 0)
            _call("cuEventDestroy", event)

    def encode(
        self,
        ptr: int,
        dtype_name: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, ...],
        swizzle: int,
        name: str = "tensor",
    ) -> bytes:
        """A tensor map; the same arguments are encoded once."""
        return tensormap.encode(ptr, dtype_name, shape, strides, box, swizzle, name)

    def device_name(self, device: int) -> str:
        """torch's name of the device."""
        return f"cuda:{device}"

    def bind(
        self, device: int, function: object, shape: tuple[int, int, int], params: int, cluster: int = 1,
        *, cooperative: bool = True, close: bool = False,
    ) -> Callable[[int], None]:  # fmt: skip
        """``cuLaunchKernelEx`` with these attributes, complete but for the stream."""
        api, pointers = cu(), (ctypes.c_void_p * 1)(params)
        config = launch_config(shape, cluster, cooperative=cooperative, close=close)
        address, stream_of = ctypes.addressof(pointers), api.CUstream
        submit, number = api.cuLaunchKernelEx, int(function)  # type: ignore[call-overload]
        bound = -1

        def launch(stream: int) -> None:
            nonlocal bound
            if stream != bound:
                config.hStream, bound = stream_of(stream), stream
            status = int(submit(config, function, address, 0)[0])
            if status != 0:
                failed(status)

        def failed(code: int, kept: Any = pointers) -> None:
            # Torch's threads have the device's context current, which saves pushing it; this one does not.
            status = api.CUresult(code)
            if status.name not in _NO_CONTEXT:
                check((status,), "cuLaunchKernelEx")
            with on_device(device):
                _call("cuLaunchKernelEx", config, function, address, 0)

        launcher = getattr(native(), "launcher", None)
        if launcher is None:
            return launch
        return launcher(_launch_address(), int(config.getPtr()), number, address, failed)


def _listen_until(done: Callable[[], bool]) -> None:
    """Return soon after ``done()``: late by a thirtieth of the time that it took, and by 1 ms at most."""
    start = time.monotonic()
    while not done():
        time.sleep(min(max((time.monotonic() - start) / 32, 20e-6), 1e-3))


def _launch_address() -> int:
    """Of the driver's ``cuLaunchKernelEx``."""
    return ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx, ctypes.c_void_p).value or 0


@functools.cache
def cuda() -> CudaDriver:
    """The process's driver.  Raises BackendError where there is none."""
    return CudaDriver()
