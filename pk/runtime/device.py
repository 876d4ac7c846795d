"""What the launch side needs of a machine, as an interface.

``driver_memory.CudaDriver`` is the real one; tests bring their own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


def no_path(device: int, peer: int) -> str:
    """What to say when two GPUs have no peer-to-peer path."""
    return (
        f"GPU {device} cannot access the memory of GPU {peer}: the driver reports no peer-to-peer path.\n"
        "  See `nvidia-smi topo -p2p rw`: MIG, some virtual machines and PCIe switches with ACS turn P2P off."
    )


class Memory:
    """A piece of device memory as torch takes it; torch keeps it alive as long as a tensor points into it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes

    @property
    def interface(self) -> dict[str, object]:
        """The array interface: ``nbytes`` writable bytes."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3, "strides": None}


class Driver(Protocol):
    """Memory, peers, streams and launches.  Devices are torch's indices, addresses and streams plain integers.

    Whatever the machine refuses is raised as :class:`pk.errors.BackendError`.
    """

    def on(self, device: int) -> AbstractContextManager[None]:
        """Make the device's context current for a ``with`` block."""
        ...

    def sms(self, device: int) -> int:
        """Number of SMs."""
        ...

    def uuid(self, device: int) -> str:
        """What tells this GPU from every other, in all processes."""
        ...

    def uuids(self) -> list[str]:
        """The GPUs this process sees, by index."""
        ...

    def reachable(self, device: int, peer: int) -> bool:
        """Whether the driver reports a peer-to-peer path from ``device`` to ``peer``."""
        ...

    def connect(self, device: int, peer: int) -> None:
        """Let kernels on ``device`` access memory of ``peer``; BackendError says why they cannot."""
        ...

    def allocate(self, device: int, nbytes: int) -> int:
        """Device memory that can be shared with peers."""
        ...

    def free(self, device: int, address: int) -> None:
        """Give ``allocate``'s memory back."""
        ...

    def tensor(self, device: int, memory: Memory) -> torch.Tensor:
        """A uint8 tensor over ``memory``, which it keeps alive.  No copy."""
        ...

    def zero(self, device: int, address: int, nbytes: int) -> None:
        """Zero memory; done on return."""
        ...

    def poison(self, device: int, stream: int, address: int, nbytes: int) -> None:
        """Fill memory with ones (NaN in every floating-point type) in the order of ``stream``."""
        ...

    def read(self, device: int, address: int, nbytes: int) -> bytes:
        """Copy from device memory, past whatever kernels run."""
        ...

    def write(self, device: int, address: int, data: bytes) -> None:
        """Copy to device memory, past whatever kernels run."""
        ...

    def host_page(self, device: int, nbytes: int) -> tuple[int, int]:
        """Zeroed pinned host memory: its address here and on the device."""
        ...

    def free_host(self, device: int, address: int) -> None:
        """Give ``host_page``'s memory back."""
        ...

    def span(self, device: int, address: int) -> tuple[int, int]:
        """Base and size of the allocation that holds ``address``."""
        ...

    def exportable(self, device: int, address: int) -> bool:
        """Whether this memory can be shared with other processes by an IPC handle."""
        ...

    def export(self, device: int, address: int) -> bytes:
        """An IPC handle for the allocation at ``address``."""
        ...

    def open(self, device: int, handle: bytes) -> int:
        """Map another process's allocation."""
        ...

    def close(self, device: int, address: int) -> None:
        """Unmap what ``open`` mapped."""
        ...

    def synchronize(self, device: int) -> None:
        """Wait for all work on the device."""
        ...

    def stream(self, device: int) -> int:
        """torch's current stream of this thread; 0 is the legacy default stream."""
        ...

    def synchronize_stream(self, device: int, stream: int) -> None:
        """Wait for one stream."""
        ...

    def capturing(self, device: int, stream: int) -> bool:
        """Whether the stream is being captured into a graph."""
        ...

    def follow(self, device: int, stream: int, earlier: int) -> None:
        """Make ``stream`` wait for everything now in ``earlier``."""
        ...

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
        """A tensor map, as ``pk.runtime.tensormap.encode``."""
        ...

    def device_name(self, device: int) -> str:
        """``str(tensor.device)`` of a tensor that lives there."""
        ...

    def bind(
        self, device: int, function: object, shape: tuple[int, int, int], params: int, cluster: int = 1,
        *, cooperative: bool = True, close: bool = False,
    ) -> Callable[[int], None]:  # fmt: skip
        """A launch, complete but for the stream, which the result takes; one thread at a time calls it.

        ``shape``: blocks, threads, dynamic shared bytes; ``params``: host address of the struct, read at every call;
        ``cluster``: blocks of a thread-block cluster; ``cooperative``, ``close``: see ``driver.launch_config``.
        """
        ...
