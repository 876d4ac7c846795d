"""Layers of torch's whose parameters all ranks have alike and use on different tokens: their gradients are summed.

Between a row and a column layer of the sequence form every rank has its share of the tokens, and knows only their part
of the gradients of what it applies to them.  With torch's own layers, the ranks' parameters would drift apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812  torch's own name for it

from pk.errors import ArgumentError
from pk.nn.functional import sum_gradients
from pk.nn.shards import common_seed
from pk.runtime.names import name_of


class Replicated:
    """Mixin: ``group_name``, the ranks that have these parameters alike ("" for the caller's group)."""

    group_name = ""

    def own(self, name: str) -> Any:
        """Parameter ``name``, with the sum over the ranks as its gradient; None if there is none."""
        value = getattr(self, name)
        return None if value is None else sum_gradients(value, self.group_name)

    def init_alike(self) -> None:
        """Initialise again, from a seed that all ranks have alike.  Collective."""
        weight: Any = self.weight  # type: ignore[attr-defined]
        if weight.is_meta:
            return
        seed = common_seed(self.group_name)
        generator = torch.Generator(device=weight.device).manual_seed(seed)
        with torch.no_grad():
            self.draw(generator)

    def draw(self, generator: torch.Generator) -> None:
        """Random parameters; the constants that norms begin with need none."""


class LayerNorm(Replicated, torch.nn.LayerNorm):  # type: ignore[misc]
    """``torch.nn.LayerNorm`` of this rank's tokens."""

    def __init__(self, *args: Any, group: Any = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.group_name = name_of(group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As torch's."""
        return F.layer_norm(x, self.normalized_shape, self.own("weight"), self.own("bias"), self.eps)


class RMSNorm(Replicated, torch.nn.RMSNorm):  # type: ignore[misc]
    """``torch.nn.RMSNorm`` of this rank's tokens."""

    def __init__(self, *args: Any, group: Any = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.group_name = name_of(group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As torch's."""
        return F.rms_norm(x, self.normalized_shape, self.own("weight"), self.eps)


class Linear(Replicated, torch.nn.Linear):  # type: ignore[misc]
    """``torch.nn.Linear`` of this rank's tokens, the whole of it on every rank.  Making one is collective."""

    def __init__(self, *args: Any, group: Any = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.group_name = name_of(group)
        self.init_alike()

    def draw(self, generator: torch.Generator) -> None:
        """As torch does."""
        bound = self.in_features**-0.5
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                parameter.uniform_(-bound, bound, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As torch's."""
        return F.linear(x, self.own("weight"), self.own("bias"))


class Embedding(Replicated, torch.nn.Embedding):  # type: ignore[misc]
    """``torch.nn.Embedding`` of this rank's tokens, the whole table on every rank.  Making one is collective.

    Raises :class:`pk.errors.ArgumentError` for ``max_norm`` and ``sparse``.
    """

    def __init__(self, *args: Any, group: Any = None, **options: Any) -> None:
        super().__init__(*args, **options)
        refuse_drifting("an Embedding of pk.nn", self)
        self.group_name = name_of(group)
        if len(args) < 8 and options.get("_weight") is None:  # given as torch's eighth argument
            self.init_alike()

    def draw(self, generator: torch.Generator) -> None:
        """As torch does."""
        self.weight.normal_(generator=generator)
        if self.padding_idx is not None:
            self.weight[self.padding_idx].zero_()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """As torch's."""
        return F.embedding(
            tokens, self.own("weight"), self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq
        )


def refuse_drifting(name: str, module: torch.nn.Module) -> None:
    """Raise :class:`pk.errors.ArgumentError` for an embedding whose tables would differ between ranks after a step."""
    for option in ("max_norm", "sparse"):
        value = getattr(module, option, None)
        if value is not None and value is not False:
            raise ArgumentError(
                f"{name} has {option}={value}, with which the ranks' tables would drift apart.\n"
                f"  Leave `{option}` away."
            )


CLASSES: dict[type, type] = {
    torch.nn.LayerNorm: LayerNorm,
    torch.nn.RMSNorm: RMSNorm,
    torch.nn.Linear: Linear,
    torch.nn.Embedding: Embedding,
}
"""Torch's class to the one that sums gradients: the same attributes, so an object can become one in place."""
