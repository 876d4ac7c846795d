"""Which part of a whole parameter a rank holds: taking it, and putting the parts together again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pk.errors import ArgumentError, short
from pk.nn.arguments import check_device, check_module, whole_number
from pk.runtime.group import current
from pk.runtime.names import named

ALIGNMENT = 8  # elements: the 16 bytes to which TMA addresses a row of 16-bit numbers


@dataclass(frozen=True, slots=True)
class Shard:
    """A parameter shared along ``dim``; of ``parts`` extents along it, each is shared by itself.

    A fused projection of queries, keys and values has three parts: every rank holds its heads of each.
    """

    dim: int
    parts: tuple[int, ...]

    def take(self, whole: torch.Tensor, rank: int, world: int) -> torch.Tensor:
        """Rank ``rank``'s share of ``whole``: a view if there is one part."""
        begins = itertools.accumulate(self.parts, initial=0)
        pieces = [
            whole.narrow(self.dim, begin + part // world * rank, part // world)
            for begin, part in zip(begins, self.parts, strict=False)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def join(self, shares: list[torch.Tensor]) -> torch.Tensor:
        """The whole parameter from the shares of all ranks, in rank order."""
        sizes = [part // len(shares) for part in self.parts]
        pieces = [share.split(sizes, self.dim) for share in shares]
        return torch.cat([pieces[r][i] for i in range(len(sizes)) for r in range(len(shares))], self.dim)

    @property
    def extent(self) -> int:
        """Of the whole parameter along ``dim``."""
        return sum(self.parts)


def shares(name: str, extent: int, parts: Any, world: int) -> tuple[int, ...]:
    """The parts of ``extent`` features; :class:`pk.errors.ArgumentError` unless ``world`` ranks can share each.

    ``parts``: extents, or None for one.
    """
    if parts is not None and (not isinstance(parts, Sequence) or isinstance(parts, str)):
        raise ArgumentError(
            f"parts={short(parts)} is {type(parts).__name__}.\n  Pass a tuple of ints, such as ({extent},)."
        )
    parts = (extent,) if parts is None else tuple(whole_number("one of parts", part) for part in parts)
    if sum(parts) != extent:
        raise ArgumentError(f"parts={parts} of {name}={extent} add up to {sum(parts)}, and must to {extent}.")
    for part in parts:
        if part <= 0 or part % (world * ALIGNMENT):
            step = world * ALIGNMENT
            raise ArgumentError(
                f"{name}={extent}: {world} ranks cannot share {part} features in multiples of {ALIGNMENT}.\n"
                f"  Use a multiple of {step}, such as {max(-(-part // step), 1) * step}."
            )
    return parts


def shared_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, Shard]]:
    """Dotted name, layer and share of every parameter of ``module`` that the ranks share."""
    for prefix, layer in module.named_modules():
        for name, shard in getattr(layer, "shards", {}).items():
            if getattr(layer, name, None) is not None:
                yield (f"{prefix}.{name}" if prefix else name), layer, shard


def check_place(layer: torch.nn.Module) -> None:
    """Raise :class:`pk.errors.ArgumentError` unless this rank is the one whose share ``layer`` holds.

    It is not where a module was pickled or copied on another rank, or in a group of another size.
    """
    rank, world = _place(layer.group_name)
    if (rank, world) != (layer.rank, layer.world_size):
        raise ArgumentError(
            f"this {type(layer).__name__} of {layer.in_features} to {layer.out_features} features holds the share of "
            f"rank {layer.rank} of {layer.world_size}, and is used by rank {rank} of {world}: it was made, pickled or "
            "copied elsewhere.\n"
            "  Take pk.nn.full_state_dict(module) there; here, make the module anew on every rank and "
            "pk.nn.load_full_state_dict it."
        )


def _place(group: str) -> tuple[int, int]:
    owner = named(group)
    return owner.rank, owner.world_size


# In a graph the place is a constant, as the shares are: the mark of torch.compiler.assume_constant_result, which would
# import all of dynamo here.
_place._dynamo_marked_constant = True  # type: ignore[attr-defined]


def load_full_state_dict(
    module: torch.nn.Module, state: Mapping[str, Any], *, strict: bool = True, assign: bool = False, device: Any = None
) -> Any:
    """``module.load_state_dict`` with the whole parameters, as the module before :func:`pk.nn.parallelize` has them.

    Every rank reads its share only, so ``state`` may be mapped from a file.  ``strict``, ``assign`` and the result are
    ``load_state_dict``'s; a module on "meta" needs ``assign=True``, with which it gets copies on ``device``, by default
    where ``state`` has them.  Not collective.

    Raises :class:`pk.errors.ArgumentError` if a whole parameter does not have the whole shape, and for parameters on
    "meta", which hold nothing, in ``state`` or without ``assign=True``.
    """
    check_module(module, "pk.nn.load_full_state_dict")
    if not isinstance(state, Mapping):
        raise ArgumentError(
            f"pk.nn.load_full_state_dict got {type(state).__name__} as the state, and needs a mapping of names to "
            "tensors.\n  Pass what `torch.load` gives for a checkpoint, or `module.state_dict()`."
        )
    if device is not None and not assign:
        raise ArgumentError("`device` is where `assign=True` puts parameters; without it they stay where they are.")
    check_device(device)
    found = dict(state)
    _check_memory(module, found, assign)
    for name, layer, shard in shared_parameters(module):
        if name in found:
            found[name] = _mine(name, found[name], layer, shard)
    if assign:  # not what the caller, or another rank of this process, still has
        found = {
            name: x.clone(memory_format=torch.contiguous_format).to(device or x.device) if torch.is_tensor(x) else x
            for name, x in found.items()
        }
    return module.load_state_dict(found, strict=strict, assign=assign)


def _check_memory(module: torch.nn.Module, state: dict[str, Any], assign: bool) -> None:
    """Neither what is loaded nor where it goes is on "meta": torch would copy nothing, and say that all is well."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise ArgumentError(f"`{name}` of the state is on meta: it has no values.\n  Load it onto a real device.")
    held_by = dict(itertools.chain(module.named_parameters(remove_duplicate=False), module.named_buffers()))
    for name in [name for name, held in held_by.items() if name in state and hasattr(held, "full_tensor")]:
        raise ArgumentError(
            f"`{name}` of the module is a DTensor: FSDP has sharded it.\n"
            "  Load the module before fully_shard, on meta with `assign=True` if it is large."
        )
    if assign:
        return
    for name, held in held_by.items():
        if name in state and held.is_meta:
            raise ArgumentError(
                f"`{name}` of the module is on meta, where nothing can be loaded into it.\n"
                "  Pass `assign=True`, and `device=` for where the parameters are to be."
            )


def _mine(name: str, whole: Any, layer: torch.nn.Module, shard: Shard) -> torch.Tensor:
    mine = getattr(layer, name.rpartition(".")[2])
    if not isinstance(whole, torch.Tensor):
        raise ArgumentError(
            f"`{name}` of the state is {type(whole).__name__}, and must be a torch.Tensor.\n"
            "  Pass a tensor, such as `torch.as_tensor(...)`."
        )
    shape = list(mine.shape)
    shape[shard.dim] = shard.extent
    if list(whole.shape) != shape:
        advice = "Load shards with `module.load_state_dict`." if whole.shape == mine.shape else "Pass the whole one."
        raise ArgumentError(
            f"`{name}` has shape {tuple(whole.shape)}, and the whole parameter is {tuple(shape)}.\n  {advice}"
        )
    return shard.take(whole, layer.rank, layer.world_size)


def full_state_dict(module: torch.nn.Module, *, cpu: bool = False) -> dict[str, Any]:
    """``module.state_dict()`` with whole parameters, on every rank, as one without shares would give them.  Collective.

    ``cpu``: in host memory, one parameter at a time on the device.  What FSDP has sharded is gathered too.
    Raises :class:`pk.errors.ArgumentError` for a layer that holds another rank's share.
    """
    from pk.nn.functional import stacked

    check_module(module, "pk.nn.full_state_dict")
    shards = {name: (layer, shard) for name, layer, shard in shared_parameters(module)}
    _check_places(shards)
    found = dict(module.state_dict())
    for name, value in found.items():
        if name in shards:
            layer, shard = shards[name]
            with torch.no_grad():
                value = gathered(value)
                value = shard.join(list(stacked(value, layer.group_name).unbind(0)))
        if isinstance(value, torch.Tensor):
            value = gathered(value).cpu() if cpu else gathered(value)
        found[name] = value
    return found


def gathered(x: torch.Tensor) -> torch.Tensor:
    """``x``, whole where FSDP has spread it over the ranks of its mesh, as a DTensor.  Collective over that mesh."""
    full: torch.Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return full


def _check_places(shards: dict[str, tuple[torch.nn.Module, Shard]]) -> None:
    """:func:`check_place` of all layers, on all ranks or on none; and all have shares of the same parameters."""
    for group in dict.fromkeys(layer.group_name for layer, _ in shards.values()):
        mine = {name: layer for name, (layer, _) in shards.items() if layer.group_name == group}

        def look(mine: dict[str, torch.nn.Module] = mine) -> list[str]:
            for layer in mine.values():
                check_place(layer)
            return list(mine)

        told = named(group).attempt("pk.nn.full_state_dict", look)
        for rank, names in enumerate(told):
            odd = sorted(set(names) ^ set(told[0]))
            if names != told[0]:
                what = f"only rank {0 if odd[0] in told[0] else rank} has `{odd[0]}`" if odd else "their order differs"
                raise ArgumentError(
                    f"ranks 0 and {rank} have modules with different shares: {what}.\n"
                    "  Pass the same module on every rank."
                )


def common_seed(group: Any) -> int:
    """A random number that all ranks have alike: rank 0's.  Collective.

    Every process draws, so that generators which were equal stay equal; rank threads share one, so one draws.
    """
    owner = current(group)
    drawn = 0
    if owner.rank == 0 or not owner.threaded:
        drawn = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
    return int.from_bytes(owner.exchange("the seed of pk.nn's parameters", drawn.to_bytes(8, "little"))[0], "little")
