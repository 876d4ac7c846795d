"""The norm of all gradients, of which each rank holds a part."""

from __future__ import annotations

import torch

from pk.nn.functional import summed
from pk.nn.shards import shared_parameters


def clip_grad_norm_(module: torch.nn.Module, max_norm: float) -> torch.Tensor:
    """As ``torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)`` would on the whole module.  Collective.

    A shared parameter's norm is that of all ranks' shares; one that all ranks have alike counts once.  Returns the
    2-norm before clipping, the same on every rank.
    """
    where = {
        id(getattr(layer, name.rpartition(".")[2])): layer.group_name for name, layer, _ in shared_parameters(module)
    }
    squares: dict[str | None, list[torch.Tensor]] = {}
    parameters = list(module.parameters())
    for parameter in parameters:
        # A parameter without a gradient counts as 0, so that every rank meets the others in every group.
        norm = torch.zeros((), dtype=torch.float32, device=parameter.device)
        if parameter.grad is not None:
            norm = torch.linalg.vector_norm(parameter.grad.detach(), dtype=torch.float32)
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
