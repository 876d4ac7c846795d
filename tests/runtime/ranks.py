"""Ranks for tests: threads that stand for processes, each with its own store client and driver."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as distributed

from pk.runtime import group as groups
from pk.runtime.group import Group
from pk.runtime.link import Link
from tests.runtime.fake import FakeDriver, Machine


def links(path: Path, world: int) -> list[Link]:
    return [Link(distributed.FileStore(str(path / "store"), -1), rank, world) for rank in range(world)]


def together(fn: Callable[[int], Any], world: int, seconds: float = 20) -> list[Any]:
    """``fn(rank)`` in one thread each; its value or its exception, in rank order."""
    found: list[Any] = [None] * world

    def body(rank: int) -> None:
        try:
            found[rank] = fn(rank)
        except BaseException as error:  # noqa: BLE001
            found[rank] = error

    workers = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(world)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(seconds)
        assert not worker.is_alive(), "a rank hangs"
    return found


def as_processes(
    fn: Callable[[Group], Any], path: Path, world: int, machine: Machine, drivers: list[FakeDriver] | None = None,
    devices: list[int] | None = None,
) -> list[Any]:  # fmt: skip
    """``fn(group)`` for every rank of a group whose ranks are processes of ``machine``."""
    ends = links(path, world)
    drivers = drivers or [FakeDriver(machine) for _ in range(world)]
    devices = devices or list(range(world))

    def run(rank: int) -> Any:
        group = groups.processes(ends[rank], "cuda", devices[rank], drivers[rank])
        groups.enter(group)
        try:
            return fn(group)
        except BaseException as error:
            group.leave(f"raised {type(error).__name__}")
            raise
        finally:
            groups.enter(None)

    return together(run, world)
