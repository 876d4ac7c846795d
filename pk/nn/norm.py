"""The norm of all gradients, of which each rank holds a part."""

from __future__ import annotations

import torch

from pk.errors import ArgumentError, short
from pk.nn.arguments import check_module
from pk.nn.functional import summed
from pk.nn.shards import gathered, shared_parameters


def clip_grad_norm_(module: torch.nn.Module, max_norm: float) -> torch.Tensor:
    """As ``torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)`` would on the whole module.  Collective.

    A shared parameter's norm is that of all ranks' shares; one that all ranks have alike counts once; what FSDP has
    sharded counts whole.  Returns the
    2-norm before clipping, the same on every rank.

    Raises :class:`pk.errors.ArgumentError` for a ``max_norm`` that is no number of at least 0.
    """
    check_module(module, "pk.nn.clip_grad_norm_")
    if not isinstance(max_norm, int | float | torch.Tensor) or not float(max_norm) >= 0:
        raise ArgumentError(f"max_norm={short(max_norm)} must be a number of at least 0.\n  Pass a float, such as 1.0.")
    where = {
        id(getattr(layer, name.rpartition(".")[2])): layer.group_name for name, layer, _ in shared_parameters(module)
    }
    squares: dict[str | None, list[torch.Tensor]] = {}
    parameters = list(module.parameters())
    for parameter in parameters:
        # A parameter without a gradient counts as 0, so that every rank meets the others in every group.
        norm = torch.zeros((), dtype=torch.float32, device=parameter.device)
        if parameter.grad is not None:
            norm = gathered(torch.linalg.vector_norm(parameter.grad.detach(), dtype=torch.float32))
        squares.setdefault(where.get(id(parameter)), []).append(norm.square())
    if not parameters:
        return torch.zeros(())
    sums = {group: torch.stack(found).sum() for group, found in squares.items()}
    total = torch.stack([x if group is None else summed(x.view(1), group)[0] for group, x in sums.items()]).sum().sqrt()
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.detach().mul_(factor.to(parameter.grad.dtype))
    return total
