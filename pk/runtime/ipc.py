"""Making one rank's memory reachable by the others: plain pointers between threads, CUDA IPC between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pk.errors import BackendError
from pk.runtime.device import no_path

if TYPE_CHECKING:
    from pk.runtime.group import Group

# Small allocations share a 2 MiB block of the driver's, and an IPC handle exports the whole block: give each its own.
GRANULE = 2 << 20


@dataclass(frozen=True, slots=True)
class Reach:
    """``peers``: the address of every rank's copy as this rank sees it.  ``mapped``: what :func:`unmap` must undo."""

    peers: tuple[int, ...]
    mapped: tuple[int, ...] = ()


def share(group: Group, address: int, what: str) -> Reach:
    """Tell all ranks where this rank's memory is, and map theirs.  Collective.

    Raises on every rank if one rank's memory cannot be exported, mapped or accessed: :class:`pk.errors.BackendError`
    with the rank and the reason.  Nothing stays mapped then.
    """
    if group.world_size == 1:
        return Reach((address,))
    if group.backend == "sim":
        return Reach(tuple(group.attempt(f"sharing {what}", lambda: address)))
    if group.threaded:
        return Reach(tuple(group.attempt(f"sharing {what}", lambda: _expose(group, address, what))))
    exported = group.attempt(f"exporting {what}", lambda: _export(group, address, what))
    opened: list[tuple[int, int]] = []
    try:
        group.attempt(f"mapping {what}", lambda: _open(group, exported, opened))
    except Exception:
        # Every rank is on this path, unless one died: then the barrier raises, and nobody frees what others may map.
        unmap(group, tuple(base for _, base in opened))
        group.barrier(f"unmapping {what}")
        raise
    bases = dict(opened)
    peers = tuple(address if rank == group.rank else bases[rank] + offset for rank, (_, offset) in enumerate(exported))
    return Reach(peers, tuple(bases.values()))


def unmap(group: Group, mapped: tuple[int, ...]) -> None:
    """Undo the mappings of :func:`share`.  The exporters may free their memory only after all importers did this."""
    for base in mapped:
        group.driver.close(group.gpu, base)


def _expose(group: Group, address: int, what: str) -> int:
    others = {place for place in group.places if place is not None and place != group.device}
    for peer in sorted(others):
        group.driver.connect(group.gpu, peer)
    if others and not group.driver.exportable(group.gpu, address):
        raise BackendError(_not_exportable(what))
    return address


def _export(group: Group, address: int, what: str) -> tuple[bytes, int]:
    for peer in group.places:
        if peer is not None and not group.driver.reachable(group.gpu, peer):
            raise BackendError(no_path(group.gpu, peer))
    if not group.driver.exportable(group.gpu, address):
        raise BackendError(_not_exportable(what))
    base, _ = group.driver.span(group.gpu, address)
    return group.driver.export(group.gpu, base), address - base


def _open(group: Group, exported: list[tuple[bytes, int]], opened: list[tuple[int, int]]) -> None:
    for rank, (handle, _) in enumerate(exported):
        if rank == group.rank:
            continue
        try:
            opened.append((rank, group.driver.open(group.gpu, handle)))
        except BackendError as error:
            raise BackendError(
                f"the memory of rank {rank} cannot be mapped through CUDA IPC: {error}\n"
                "  The driver may report P2P and still refuse IPC: in containers, share the host's IPC and PID\n"
                "  namespaces (docker run --ipc=host --pid=host), and see `python -m pk doctor`."
            ) from None


def _not_exportable(what: str) -> str:
    return (
        f"{what} lies in memory that peers cannot map: the allocator made it with virtual-memory calls\n"
        "(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True).\n"
        "  Allocate it with pk.empty(shape, dtype) and copy, or turn expandable segments off."
    )
