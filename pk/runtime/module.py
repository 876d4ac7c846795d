"""Cubins on a device: loaded eagerly, once a context, before anything spins.

Eagerly because the first launch of a lazily loaded kernel may wait for the device, which never comes to rest while a
persistent kernel of another rank waits for this one.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from pk.errors import BackendError
from pk.runtime import driver
from pk.runtime.compile import Binary

_STATIC_LIMIT = 48 * 1024  # dynamic shared memory that a kernel may use without asking


@dataclass(slots=True)
class Module:
    """A kernel loaded into one context.  ``function`` is a ``CUfunction``; valid while the context lives."""

    handle: Any
    function: Any
    entry: str
    binary: Binary
    _allowed: int = _STATIC_LIMIT
    _occupancy: dict[tuple[int, int], int] = field(default_factory=dict)

    def allow_shared(self, nbytes: int) -> None:
        """Let a launch use ``nbytes`` of dynamic shared memory.

        Raises :class:`pk.errors.BackendError` if the device has less.
        """
        if nbytes <= self._allowed:
            return
        cu = driver.cu()
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        result = cu.cuFuncSetAttribute(self.function, attribute, nbytes)
        if result[0].name == "CUDA_ERROR_INVALID_VALUE":
            raise BackendError(
                f"Kernel `{self.entry}` needs {nbytes} bytes of shared memory in a block, more than this GPU allows.\n"
                "  Use smaller tiles or fewer stages."
            )
        driver.check(result, "cuFuncSetAttribute")
        self._allowed = nbytes

    def max_blocks_per_sm(self, threads: int, shared_bytes: int) -> int:
        """How many blocks of ``threads`` threads and ``shared_bytes`` dynamic shared memory fit on one SM.  Cached."""
        known = self._occupancy.get((threads, shared_bytes))
        if known is not None:
            return known
        self.allow_shared(shared_bytes)
        blocks = driver.check(
            driver.cu().cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, threads, shared_bytes),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
        )
        self._occupancy[threads, shared_bytes] = int(blocks)
        return int(blocks)

    def max_clusters(self, threads: int, shared_bytes: int, cluster: int) -> int:
        """How many clusters of ``cluster`` such blocks fit the device at once."""
        self.allow_shared(shared_bytes)
        config = driver.launch_config((1024 * cluster, threads, shared_bytes), cluster)
        found = driver.check(
            driver.cu().cuOccupancyMaxActiveClusters(self.function, config), "cuOccupancyMaxActiveClusters"
        )
        return int(found)


_modules: dict[tuple[int, str, str], Module] = {}
_lock = threading.Lock()


def load(binary: Binary, entry: str, shared_bytes: int = 0) -> Module:
    """``binary`` in the current context, ready to launch ``entry`` with ``shared_bytes`` dynamic shared memory.

    The same binary is loaded once a context.  Raises :class:`pk.errors.BackendError` if no context is current or the
    driver refuses the cubin.
    """
    key = (driver.context_id(), binary.digest, entry)
    module = _modules.get(key)
    if module is None:
        with _lock:
            module = _modules.get(key) or _load(binary, entry)
            _modules[key] = module
    module.allow_shared(shared_bytes)
    return module


def loaded(binary: Binary, entry: str) -> bool:
    """Whether some context of this process has it: then `load` costs a look-up, in that context."""
    return any(key[1:] == (binary.digest, entry) for key in tuple(_modules))


def _load(binary: Binary, entry: str) -> Module:
    cu = driver.cu()
    handle = driver.check(cu.cuModuleLoadData(binary.cubin), "cuModuleLoadData")
    function = driver.check(cu.cuModuleGetFunction(handle, entry.encode()), f"cuModuleGetFunction({entry})")
    # under CUDA_MODULE_LOADING=LAZY, which is the default, nothing is on the device before this
    driver.check(cu.cuFuncLoad(function), "cuFuncLoad")
    return Module(handle, function, entry, binary)
