"""Making groups: of the rank threads of one process, or of processes that tell each other where they are."""

from __future__ import annotations

import pickle
import socket
from typing import TYPE_CHECKING, Any

from pk import env
from pk.errors import BackendError
from pk.runtime.backends import Backend
from pk.runtime.link import Link
from pk.runtime.rendezvous import Rendezvous, ranks
from pk.runtime.team import Group, check_world_size

if TYPE_CHECKING:
    from pk.runtime.device import Driver


def threads(
    world_size: int, backend: Backend, devices: list[int] | None = None, driver: Driver | None = None
) -> list[Group]:
    """Groups for ``world_size`` rank threads of this process; ``devices``: the GPU of each rank."""
    check_world_size(world_size)
    meeting = Rendezvous(world_size)
    places: tuple[int | None, ...] = tuple(devices) if devices is not None else (None,) * world_size
    return [
        Group(
            rank, world_size, backend, device=places[rank], driver=driver, rendezvous=meeting, places=places,
            sharers=places.count(places[rank]) if backend == "cuda" else 1,
        )
        for rank in range(world_size)
    ]  # fmt: skip


def processes(
    link: Link, backend: Backend, device: int | None = None, driver: Driver | None = None, host: str | None = None
) -> Group:
    """The group of ranks that are processes of one host.  Collective: the ranks tell each other where they are.

    Raises :class:`pk.errors.BackendError` on every rank if they are on several hosts, of different backends, or on one
    GPU although there are enough.
    """
    here = {"host": host or _host(), "backend": backend, "uuid": "", "visible": 0, "device": device}
    if driver is not None and device is not None:
        here |= {"uuid": driver.uuid(device), "visible": len(driver.uuids())}
    told = [
        pickle.loads(data) for data in link.exchange("making a group", pickle.dumps(here), env.ENTRY_TIMEOUT_S.get())
    ]
    link.learn()
    _check_places(told)
    visible = driver.uuids() if driver is not None else []
    places = tuple(visible.index(t["uuid"]) if t["uuid"] in visible else None for t in told)
    sharers = [t["uuid"] for t in told].count(here["uuid"]) if backend == "cuda" else 1
    return Group(
        link.rank, link.world, backend, device=device, driver=driver, link=link, places=places, sharers=sharers
    )


def _host() -> str:
    try:  # two containers may have one name; the boot id tells hosts apart
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()}/{file.read().strip()}"
    except OSError:
        return socket.gethostname()


def _check_places(told: list[dict[str, Any]]) -> None:
    for what, advice in (
        ("backend", "Set PK_BACKEND to one value on all ranks."),
        (
            "host",
            "pk's groups stay inside one host: make a process group for each host with torch.distributed.new_group.",
        ),
    ):
        if len({t[what] for t in told}) > 1:
            listing = ", ".join(f"rank {r}: {t[what].split('/')[0]}" for r, t in enumerate(told))
            raise BackendError(f"the ranks of the group differ in their {what}: {listing}.\n  {advice}")
    for uuid in {t["uuid"] for t in told if t["uuid"]}:
        who = [r for r, t in enumerate(told) if t["uuid"] == uuid]
        if len(who) > 1 and min(told[r]["visible"] for r in who) >= len(told):
            raise BackendError(
                f"{ranks(who)} are all on GPU {told[who[0]]['device']}, though there are {told[who[0]]['visible']} "
                f"GPUs for {len(told)} ranks.\n"
                "  Call torch.cuda.set_device(local_rank) first.  "
                "To share a GPU on purpose, narrow CUDA_VISIBLE_DEVICES."
            )
