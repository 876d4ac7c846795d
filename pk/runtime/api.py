"""What a user calls on the host, beside kernels: memory, devices, groups.  Re-exported by ``pk``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def device(group: Any = None) -> torch.device:
    """Where this rank's tensors belong: its GPU, or the CPU in the simulator."""
    import torch

    from pk.runtime.group import current

    owner = current(group)
    return torch.device("cpu") if owner.backend == "sim" else torch.device("cuda", owner.device)


def empty(shape: Sequence[int] | int, dtype: Any, group: Any = None) -> torch.Tensor:
    """A symmetric tensor: the same shape on every rank, reachable by all.  Collective.  Contents undefined.

    ``shape``: extents, or one.  ``dtype``: torch's, pk's, or a name.
    """
    from pk.runtime import symm
    from pk.runtime.group import current
    from pk.runtime.tensors import torch_dtype

    return symm.empty(_extents(shape), torch_dtype(dtype), current(group))


def _extents(shape: Any) -> tuple[int, ...]:
    from pk.errors import ArgumentError, short

    try:
        given = (shape,) if not isinstance(shape, Iterable) else tuple(shape)
        if not any(isinstance(extent, bool) for extent in given):
            return tuple(operator.index(extent) for extent in given)
    except TypeError:  # an extent that is no integer
        pass
    raise ArgumentError(
        f"pk.empty: shape {short(shape)} has an extent that is not a whole number.\n"
        "  Pass integers, such as `pk.empty((rows, cols), torch.bfloat16)`."
    )


def symmetric(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Make an existing tensor symmetric: exchange its address with all ranks.  Collective.

    Raises :class:`pk.errors.BackendError` on every rank if one rank's memory cannot be shared.
    """
    from pk.runtime import symm
    from pk.runtime.group import current

    return symm.symmetric(tensor, current(group))


def spawn(fn: Callable[..., Any], world_size: int, backend: str | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
    """Run ``fn(rank, *args)`` on ``world_size`` ranks and return every rank's value, in rank order.

    ``backend``: ``"sim"`` threads of this process on the CPU; ``"cuda"`` a GPU per rank (processes) if there are
    enough, else ranks sharing a GPU (threads); None: ``"cuda"`` if there is a Hopper-class GPU, else ``"sim"``.  An
    exception on one rank ends all of them and is raised here as :class:`pk.errors.RankError` with that rank's
    traceback.

    Ranks that are threads share what a process has once, such as torch's random generator: ``torch.manual_seed`` in
    the ranks, followed by random numbers, is a race, and gives other numbers on each rank and in each run.  Draw from a
    generator of the rank's own, ``torch.Generator().manual_seed(rank)``, or make what all ranks have alike before
    ``pk.spawn``, and let each rank change only a copy: ``copy.deepcopy(module)``.
    """
    from pk.runtime.spawn import spawn as run

    return run(fn, world_size, backend, args)


def synchronize(group: Any = None) -> None:
    """Wait for this rank's launches; raise :class:`pk.errors.HangError` if one gave up."""
    from pk.runtime import launch
    from pk.runtime.group import current

    launch.synchronize(current(group))


def reset(group: Any = None) -> None:
    """Recover a group after a HangError.  Collective: every rank must call it."""
    from pk.runtime.group import current

    current(group).reset()


def finalize() -> None:
    """Free what pk holds.  Collective over every group this rank belongs to."""
    from pk.runtime import group

    group.finalize()


def describe_backend(world_size: int, backend: str | None = None) -> str:
    """One phrase: where ``spawn`` would run ``world_size`` ranks."""
    from pk.runtime.spawn import describe

    return describe(world_size, backend)
