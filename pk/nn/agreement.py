"""Whether all ranks ask :func:`pk.nn.parallelize` for the same: shares of different wholes do not fit together."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from pk.errors import ArgumentError
from pk.nn.shards import shared_parameters
from pk.nn.styles import SequenceParallel, Style
from pk.runtime.team import Group

Step = tuple[Style, torch.nn.Module, "torch.nn.Module | None"]
"""A module of the plan: its style, itself, and the one it is in."""

_THREADS = (
    "The ranks are threads of one process and share torch's random generator, so torch.manual_seed in each of them is "
    "a race.\n  Make the module before pk.spawn and parallelize copy.deepcopy(module) on every rank, draw from a "
    "torch.Generator of each rank's own, or load one state dict on all of them."
)
_PROCESSES = "Seed all ranks alike before making the module, or load one checkpoint on all of them."


@dataclass(frozen=True, slots=True)
class Seen:
    """What one rank has."""

    steps: dict[str, dict[str, str]]  # by name: style, its options, type and parameters of the module
    places: dict[str, int]  # by name: which object a step changes
    checked: bool  # whether weights are compared: their names, and the sums of their bits
    names: list[str]
    sums: list[int]


def seen(module: torch.nn.Module, steps: dict[str, Step], check_weights: bool) -> Seen:
    """What :func:`check_alike` compares."""
    told = {name: _described(style, target) for name, (style, target, _) in steps.items()}
    places = {
        name: id(target)
        for name, (style, target, parent) in steps.items()
        if parent is not None or isinstance(style, SequenceParallel)
    }
    return Seen(told, places, check_weights, *(_sums(module) if check_weights else ([], [])))


def _described(style: Style, target: torch.nn.Module) -> dict[str, str]:
    parameters = {
        f"parameter {name}": f"{tuple(p.shape)} {p.dtype}" + (" on meta" if p.is_meta else "")
        for name, p in target.named_parameters(recurse=False)
    }
    options: dict[str, Any] = dataclasses.asdict(style)  # type: ignore[call-overload]
    given = {name: repr(value) for name, value in options.items()}
    return {"module": type(target).__name__, "style": type(style).__name__, **given, **parameters}


def _sums(module: torch.nn.Module) -> tuple[list[str], list[int]]:
    """Names of the parameters that all ranks should have alike, and the sums of their bits as integers."""
    shared = {name for name, _, _ in shared_parameters(module)}
    names, sums = [], []
    for name, parameter in module.named_parameters():
        if name not in shared and not parameter.is_meta:
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(parameter.element_size())
            held = parameter.detach().contiguous()
            names.append(name)
            sums.append(held.view(-1).view(bits or torch.int64).sum(dtype=torch.int64))
    devices = {x.device for x in sums}
    values = [x.item() for x in sums] if len(devices) != 1 else torch.stack(sums).tolist()
    return names, values


def check_alike(told: list[Seen], group: Group) -> None:
    """Raise :class:`pk.errors.ArgumentError`, the same on all ranks, unless they have the same."""
    first = told[0]
    for rank, mine in enumerate(told):
        _same_steps(first, mine, rank)
        if mine.checked != first.checked:
            raise ArgumentError(
                f"check_weights={mine.checked} on rank {rank}, and {first.checked} on rank 0.\n"
                "  Pass the same on every rank."
            )
        if mine.names != first.names:
            odd = next((n for n in (*first.names, *mine.names) if (n in first.names) != (n in mine.names)), "")
            what = f"only rank {0 if odd in first.names else rank} has `{odd}`" if odd else "their order differs"
            raise ArgumentError(
                f"the module of rank {rank} has not the parameters of rank 0's: {what}.\n"
                "  Make the same module on every rank."
            )
        other = [n for n, own, its in zip(mine.names, mine.sums, first.sums, strict=True) if own != its]
        if other:
            more = f" and {len(other) - 1} more" if len(other) > 1 else ""
            raise ArgumentError(
                f"`{other[0]}`{more} of rank {rank} is not what rank 0 has: shares of different wholes do not fit "
                f"together.\n  {_THREADS if group.threaded else _PROCESSES}"
            )
    if group.threaded:
        _refuse_shared(told)


def _same_steps(first: Seen, mine: Seen, rank: int) -> None:
    for name in (*first.steps, *mine.steps):
        here, there = mine.steps.get(name), first.steps.get(name)
        shown = f"`{name}`" if name else "the module"
        if here is None or there is None:
            has, lacks = (rank, 0) if there is None else (0, rank)
            raise ArgumentError(
                f"the plan of rank {has} is for {shown}, and that of rank {lacks} leaves it as it is.\n"
                "  Pass the same plan, for the same module, on every rank."
            )
        for what in (*there, *here):
            if here.get(what) != there.get(what):
                raise ArgumentError(
                    f"{shown} of the plan differs between ranks: {what} is {there.get(what, 'missing')} on rank 0, and "
                    f"{here.get(what, 'missing')} on rank {rank}.\n"
                    "  Pass the same plan, for the same module, on every rank."
                )


def _refuse_shared(told: list[Seen]) -> None:
    """Rank threads must not change one module: each would replace what another has put there."""
    owners: dict[int, int] = {}
    for rank, mine in enumerate(told):
        for name, place in mine.places.items():
            other = owners.setdefault(place, rank)
            if other != rank:
                shown = f"`{name}`" if name else "the module"
                raise ArgumentError(
                    f"ranks {other} and {rank} are threads of one process and pass the same module: each would put its "
                    f"own share in the place of {shown}.\n  Pass copy.deepcopy(module) on every rank."
                )
