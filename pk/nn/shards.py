"""Which part of a whole parameter a rank holds: taking it, and putting the parts together again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pk.errors import ArgumentError
from pk.runtime.group import current

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


def shares(name: str, extent: int, parts: tuple[int, ...] | None, world: int) -> tuple[int, ...]:
    """The parts of ``extent`` features; :class:`pk.errors.ArgumentError` unless ``world`` ranks can share each."""
    parts = (extent,) if parts is None else tuple(parts)
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


def load_full_state_dict(
    module: torch.nn.Module, state: Mapping[str, Any], *, strict: bool = True, assign: bool = False, device: Any = None
) -> Any:
    """``module.load_state_dict`` with the whole parameters, as the module before :func:`pk.nn.parallelize` has them.

    Every rank reads its share only, so ``state`` may be mapped from a file.  ``strict``, ``assign`` and the result are
    ``load_state_dict``'s; a module on "meta" needs ``assign=True``, with which it gets copies on ``device``, by default
    where ``state`` has them.  Not collective.

    Raises :class:`pk.errors.ArgumentError` if a whole parameter does not have the whole shape.
    """
    if device is not None and not assign:
        raise ArgumentError("`device` is where `assign=True` puts parameters; without it they stay where they are.")
    found = dict(state)
    for name, layer, shard in shared_parameters(module):
        if name in found:
            found[name] = _mine(name, found[name], layer, shard)
    if assign:  # not what the caller, or another rank of this process, still has
        found = {
            name: x.clone(memory_format=torch.contiguous_format).to(device or x.device) if torch.is_tensor(x) else x
            for name, x in found.items()
        }
    return module.load_state_dict(found, strict=strict, assign=assign)


def _mine(name: str, whole: torch.Tensor, layer: torch.nn.Module, shard: Shard) -> torch.Tensor:
    mine = getattr(layer, name.rpartition(".")[2])
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

    ``cpu``: in host memory, one parameter at a time on the device.
    """
    from pk.nn.functional import stacked

    found = dict(module.state_dict())
    shards = {name: (layer, shard) for name, layer, shard in shared_parameters(module)}
    for name, value in found.items():
        if name in shards:
            layer, shard = shards[name]
            with torch.no_grad():
                value = shard.join(list(stacked(value, layer.group_name).unbind(0)))
        found[name] = value.cpu() if cpu and isinstance(value, torch.Tensor) else value
    return found


def common_seed(group: Any) -> int:
    """A random number that all ranks have alike: rank 0's.  Collective.

    Every process draws, so that generators which were equal stay equal; rank threads share one, so one draws.
    """
    owner = current(group)
    drawn = 0
    if owner.rank == 0 or not owner.threaded:
        drawn = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
    return int.from_bytes(owner.exchange("the seed of pk.nn's parameters", drawn.to_bytes(8, "little"))[0], "little")
