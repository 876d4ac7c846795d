"""Where kernels run by default, and the real machine if there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pk import env
from pk.errors import BackendError

if TYPE_CHECKING:
    from pk.runtime.device import Driver

Backend = Literal["sim", "cuda"]


def default_backend() -> Backend:
    """``PK_BACKEND``, else ``"cuda"`` if there is a Hopper-class GPU and torch can use it, else ``"sim"``."""
    chosen = env.BACKEND.get()
    if chosen:
        return "cuda" if chosen == "cuda" else "sim"
    return "cuda" if not _why_no_cuda() else "sim"


def _why_no_cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        return "torch finds no CUDA device (a CPU build of torch, or no NVIDIA driver)"
    from pk.runtime import driver

    return driver.why_unavailable() or ""


def cuda_driver(device: int) -> Driver:
    """The real machine, if GPU ``device`` runs pk's kernels; :class:`pk.errors.BackendError` says why not."""
    import torch

    from pk.runtime import driver
    from pk.runtime.driver_memory import cuda

    driver.require_hopper(device)
    if not torch.cuda.is_available():
        raise BackendError(
            "torch cannot use the GPU: this is a CPU build of torch.\n  Install a CUDA build, or set PK_BACKEND=sim."
        )
    return cuda()


def current_device() -> int:
    """torch's current GPU; 0 without one."""
    import torch

    return int(torch.cuda.current_device()) if torch.cuda.is_available() else 0
