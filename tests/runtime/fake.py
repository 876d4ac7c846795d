"""A machine made of host memory, for what the launch side does around the driver: memory, IPC, streams, launches."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from pk.artifact import Field, Site, Source, TensorMap
from pk.errors import BackendError
from pk.runtime.device import Memory, no_path


class Machine:
    """What all processes of a host share: GPUs, P2P paths, exported memory; ``log`` has every call that changes it."""

    def __init__(self, gpus: int = 1, sms: int = 132, p2p: bool = True, ipc: bool = True) -> None:
        self.gpus, self.sms, self.p2p, self.ipc = gpus, sms, p2p, ipc
        self.buffers: dict[int, Any] = {}
        self.mapped: Counter[int] = Counter()
        self.log: list[tuple[Any, ...]] = []
        self.lock = threading.Lock()

    def freed_while_mapped(self) -> bool:
        return any(entry[0] == "free while mapped" for entry in self.log)


class _Host(Memory):
    @property
    def __array_interface__(self) -> dict[str, object]:
        return self.interface


class FakeDriver:
    """One process's driver."""

    def __init__(self, machine: Machine | None = None, visible: list[int] | None = None) -> None:
        self.machine = machine or Machine()
        self.visible = list(range(self.machine.gpus)) if visible is None else visible
        self.launches: list[tuple[int, tuple[int, int, int], int, bytes]] = []
        self.attributes: list[tuple[bool, bool]] = []  # of every launch bound: cooperative, close
        self.current_stream: dict[int, int] = {}  # by thread
        self.captured: set[int] = set()
        self.expandable: list[tuple[int, int]] = []  # address ranges that cannot be exported
        self.memory_left = 1 << 40

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        yield

    def sms(self, device: int) -> int:
        return self.machine.sms

    def uuid(self, device: int) -> str:
        return f"gpu-{self.visible[device]}"

    def uuids(self) -> list[str]:
        return [f"gpu-{i}" for i in self.visible]

    def reachable(self, device: int, peer: int) -> bool:
        return device == peer or self.machine.p2p

    def connect(self, device: int, peer: int) -> None:
        if not self.reachable(device, peer):
            raise BackendError(no_path(device, peer))

    def allocate(self, device: int, nbytes: int) -> int:
        if nbytes > self.memory_left:
            raise BackendError("cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY: out of memory.")
        self.memory_left -= nbytes
        buffer = (ctypes.c_ubyte * (nbytes + 1024))()
        address = -(-ctypes.addressof(buffer) // 1024) * 1024
        ctypes.memset(address, 0xCD, nbytes)
        with self.machine.lock:
            self.machine.buffers[address] = (buffer, nbytes)
            self.machine.log.append(("allocate", address, nbytes))
        return address

    def free(self, device: int, address: int) -> None:
        with self.machine.lock:
            self.machine.log.append(("free while mapped" if self.machine.mapped[address] else "free", address))
            self.memory_left += self.machine.buffers[address][1]

    def tensor(self, device: int, memory: Memory) -> torch.Tensor:
        return torch.from_numpy(np.asarray(_Keeping(memory)))

    def zero(self, device: int, address: int, nbytes: int) -> None:
        ctypes.memset(address, 0, nbytes)

    def poison(self, device: int, stream: int, address: int, nbytes: int) -> None:
        ctypes.memset(address, 0xFF, nbytes)
        self.machine.log.append(("poison", address, nbytes))

    def read(self, device: int, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    def write(self, device: int, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def host_page(self, device: int, nbytes: int) -> tuple[int, int]:
        address = self.allocate(device, nbytes)
        ctypes.memset(address, 0, nbytes)
        return address, address + (1 << 50)

    def free_host(self, device: int, address: int) -> None:
        self.machine.log.append(("free host", address))

    def span(self, device: int, address: int) -> tuple[int, int]:
        for base, (_, nbytes) in self.machine.buffers.items():
            if base <= address < base + nbytes:
                return base, nbytes
        return address, 1 << 20

    def exportable(self, device: int, address: int) -> bool:
        return not any(low <= address < high for low, high in self.expandable)

    def export(self, device: int, address: int) -> bytes:
        return address.to_bytes(8, "little").ljust(64, b"\0")

    def open(self, device: int, handle: bytes) -> int:
        if not self.machine.ipc:
            raise BackendError("cuIpcOpenMemHandle failed: CUDA_ERROR_INVALID_DEVICE: invalid device ordinal.")
        address = int.from_bytes(handle[:8], "little")
        with self.machine.lock:
            self.machine.mapped[address] += 1
        return address

    def close(self, device: int, address: int) -> None:
        with self.machine.lock:
            self.machine.mapped[address] -= 1
            self.machine.log.append(("unmap", address))

    def synchronize(self, device: int) -> None:
        self.machine.log.append(("synchronize", device))

    def stream(self, device: int) -> int:
        return self.current_stream.get(threading.get_ident(), 100)

    def synchronize_stream(self, device: int, stream: int) -> None:
        self.machine.log.append(("synchronize stream", stream))

    def capturing(self, device: int, stream: int) -> bool:
        return stream in self.captured

    def follow(self, device: int, stream: int, earlier: int) -> None:
        self.machine.log.append(("follow", stream, earlier))

    def device_name(self, device: int) -> str:
        return "cpu"  # its memory is the host's

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
        text = f"{name}|{ptr:x}|{dtype_name}|{shape}|{strides}|{box}|{swizzle}"
        assert len(text) <= 128
        return text.encode().ljust(128, b"\0")

    def bind(
        self, device: int, function: object, shape: tuple[int, int, int], params: int, cluster: int = 1,
        *, cooperative: bool = True, close: bool = False,
    ) -> Callable[[int], None]:  # fmt: skip
        assert shape[0] % cluster == 0
        self.attributes.append((cooperative, close))
        return lambda stream: self.launch(device, function, shape, stream, params)

    def launch(self, device: int, function: object, shape: tuple[int, int, int], stream: int, params: int) -> None:
        size, run = function  # type: ignore[misc]
        data = ctypes.string_at(params, size)
        self.launches.append((device, shape, stream, data))
        if run is not None:
            run(self, data)


class _Keeping:
    """What numpy reads; it holds the Memory, so that the tensor does."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.__array_interface__ = memory.interface


class FakeModule:
    """A loaded kernel.  ``run(driver, params)`` is what it does."""

    def __init__(self, source: Source, run: Callable[[FakeDriver, bytes], None] | None = None, per_sm: int = 1) -> None:
        self.function = (source.params_size, run)
        self.per_sm = per_sm
        self.clusters = 1 << 20

    def max_blocks_per_sm(self, threads: int, shared_bytes: int) -> int:
        return self.per_sm

    def max_clusters(self, threads: int, shared_bytes: int, cluster: int) -> int:
        return self.clusters


def source(*, comm_sms: int = 0) -> Source:
    """c: Parallel, addressed by maps and pointers; a: Global; signals `begun`; scratch `parts`; n (int), x (float)."""
    at = itertools.count()
    offset = 0
    fields = []

    def add(kind: Any, size: int, key: str = "", tensor: str = "", box: tuple[int, ...] = (64, 64)) -> None:
        nonlocal offset
        offset = -(-offset // size) * size if size < 64 else -(-offset // 64) * 64
        tmap = TensorMap(tensor, box, 128) if tensor else None
        fields.append(Field(f"f{next(at)}", kind, offset, size, key, tmap))
        offset += size

    add("map", 128, tensor="a")
    add("maps", 1024, tensor="c")
    add("map", 128, tensor="parts")
    add("context", 128)
    add("pointer", 8, "a")
    add("pointers", 64, "c")
    for key in ("a.0", "a.stride.0", "c.1", "begun.offset", "done.offset", "begun.1", "n"):
        add("int", 4, key)
    add("float", 4, "x")
    return Source(
        name="gather", entry="gather_0", text="", arch="sm_90a", options=(), fields=tuple(fields), params_size=offset,
        threads=384, shared_bytes=200_000, outputs=("c",), remote=True, uses_signals=True, comm_sms=comm_sms,
        least_blocks=2 if comm_sms else 1,
        sites=(
            Site("storer", "wait", "begun", "/home/me/kernels.py", 41, "            pk.wait(begun, (owner, m, n), 1)"),
            Site("loader", "fill", "inputs", "/home/me/kernels.py", 20, "        with inputs.fill() as s:"),
        ),
        signallers=(
            Site("storer", "signal_all", "begun", "/home/me/kernels.py", 50, "    pk.signal_all(begun, (me, m, n))"),
            Site("storer", "signal", "done", "/home/me/kernels.py", 51, "            pk.signal(done, m, owner)"),
        ),
    )  # fmt: skip
