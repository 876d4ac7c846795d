"""Layers, plans and inputs that the tests of pk.nn share, with torch's layer in float64 as the reference."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import torch
from torch import nn

import pk

RTOL = 2e-2  # bfloat16: weights, inputs and every partial sum are rounded


def linear(out: int, into: int, bias: bool = True, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    """The same on every call and on every rank."""
    made = nn.Linear(into, out, bias, device="meta").to_empty(device="cpu")
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=gen) / into**0.5)
    return made.to(dtype)


def tokens(*shape: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def double(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).double()


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Of the norm, relative."""
    assert got.shape == want.shape, (got.shape, want.shape)
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


def share(x: torch.Tensor, rank: int, world: int, dim: int = 0) -> torch.Tensor:
    return x.chunk(world, dim)[rank]


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_()


class Block(nn.Module):
    """A transformer block, (tokens, batch, features), with attention to whatever heads it holds."""

    def __init__(self, features: int = 64, head: int = 16, hidden: int = 128, bias: bool = True) -> None:
        super().__init__()
        self.head = head
        self.norm1, self.norm2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.qkv = nn.Linear(features, 3 * features, bias)
        self.out = nn.Linear(features, features, bias)
        self.up = nn.Linear(features, hidden, bias)
        self.down = nn.Linear(hidden, features, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head)).permute(1, 2, 0, 3) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(o.permute(2, 0, 1, 3).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def block(seed: int = 0, **options: Any) -> Block:
    """Equal on all ranks, norms included that are not at their constants."""
    made = Block(**options)
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=gen) * p.shape[-1] ** -0.5)
        for norm in (made.norm1, made.norm2):
            norm.weight.add_(1)
    return made


def plan(features: int = 64, prefix: str = "") -> dict[str, Any]:
    return {
        f"{prefix}qkv": pk.nn.ColwiseParallel(parts=(features,) * 3),
        f"{prefix}out": pk.nn.RowwiseParallel(),
        f"{prefix}up": pk.nn.ColwiseParallel(),
        f"{prefix}down": pk.nn.RowwiseParallel(),
        f"{prefix}norm*": pk.nn.SequenceParallel(),
    }


def saved(module: nn.Module) -> bytes:
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    return buffer.getvalue()


@contextlib.contextmanager
def mixed(device: str = "cpu") -> Any:
    """bfloat16 products of float32 parameters."""
    with torch.autocast(device, torch.bfloat16):
        yield
