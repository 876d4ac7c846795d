"""A tensor-parallel language model from layers of torch's: pk.nn.parallelize and a plan, beside the same model whole.

Every rank holds its share of the tokens between the layers (the sequence form), its heads in the attention and its
columns of the feed-forward block; the products gather and scatter tokens inside their kernels.  The model learns which
token follows which; the losses of the whole model and of the ranks together must be the same, up to rounding.

    python examples/10_transformer.py                4 ranks: on GPUs if there are any, else simulated (minutes)
    python examples/10_transformer.py --ranks 2 --steps 5 --features 64 --hidden 128
    python examples/10_transformer.py --features 2048 --heads 16 --hidden 8192 --tokens 2048 --layers 4     on a GPU
"""

import argparse
import math
import time

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  as everybody calls it

import pk

COLUMN, ROW, TOKENS = pk.nn.ColwiseParallel, pk.nn.RowwiseParallel, pk.nn.SequenceParallel


class Block(nn.Module):
    """Attention and feed-forward, on (tokens, batch, features).  Nothing here knows of ranks."""

    def __init__(self, features: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.head = features // heads
        self.norm1, self.norm2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.up, self.down = nn.Linear(features, hidden), nn.Linear(hidden, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, batch, features) to the same."""
        qkv = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (-1, self.head)).permute(1, 2, 0, 3) for t in qkv)  # however many heads are here
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Token numbers (tokens, batch) to scores (tokens, batch, vocabulary)."""

    def __init__(self, vocabulary: int, features: int, heads: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, features)
        self.blocks = nn.ModuleList(Block(features, heads, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(features)
        self.head = nn.Linear(features, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """See the class."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def plan(features: int) -> dict[str, object]:
    """What becomes of which layer; the three parts of qkv are shared each by itself."""
    return {
        "blocks.*.qkv": COLUMN(parts=(features, features, features)),
        "blocks.*.out": ROW(),
        "blocks.*.up": COLUMN(),
        "blocks.*.down": ROW(),
        "**.norm*": TOKENS(),
        "embed": TOKENS(),
        "head": TOKENS(),
    }


def model_and_data(args: argparse.Namespace) -> tuple[nn.Module, torch.Tensor]:
    """The whole model on the CPU and a batch of sequences (tokens + 1, batch), the same on every call."""
    with torch.random.fork_rng(devices=[]):  # of the process: rank threads must not come here
        torch.manual_seed(0)
        model = Model(args.vocabulary, args.features, args.heads, args.hidden, args.layers)
        follower = torch.randperm(args.vocabulary)
        data = [torch.randint(args.vocabulary, (args.batch,))]
        for _ in range(args.tokens):
            data.append(follower[data[-1]])
    return model, torch.stack(data)


def train(
    model: nn.Module, seen: torch.Tensor, wanted: torch.Tensor, total: int, args: argparse.Namespace
) -> list[float]:
    """The losses of ``args.steps`` steps: of these tokens' part of the mean over ``total``."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    losses = []
    for _ in range(args.steps):
        with torch.autocast(seen.device.type, torch.bfloat16):
            scores = model(seen)
        loss = F.cross_entropy(scores.float().flatten(0, 1), wanted.flatten(), reduction="sum") / total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def run(
    rank: int, world: int, args: argparse.Namespace, state: dict[str, torch.Tensor], data: torch.Tensor
) -> tuple[list[float], float, int]:
    """What every rank does: losses of its tokens, seconds, and how many parameters it holds."""
    with torch.device("meta"):
        model = Model(args.vocabulary, args.features, args.heads, args.hidden, args.layers)
    model = pk.nn.parallelize(model, None, plan(args.features))  # shapes alone: no rank ever holds the whole model
    pk.nn.load_full_state_dict(model, state, assign=True, device=pk.device())
    seen, wanted = (pk.nn.split(x.to(pk.device())) for x in (data[:-1], data[1:]))
    start = time.perf_counter()
    losses = train(model, seen, wanted, args.tokens * args.batch, args)
    return losses, time.perf_counter() - start, sum(p.numel() for p in model.parameters())


def compare(args: argparse.Namespace) -> tuple[list[float], list[float], float, int]:
    """Losses of the whole model and of the ranks together, the ranks' seconds, and parameters a rank."""
    model, data = model_and_data(args)
    results = pk.spawn(run, args.ranks, args=(args.ranks, args, model.state_dict(), data))
    device = "cpu" if "simulated" in pk.describe_backend(args.ranks) else "cuda"
    data = data.to(device)
    whole = train(model.to(device), data[:-1], data[1:], args.tokens * args.batch, args)
    together = [sum(parts) for parts in zip(*(losses for losses, *_ in results), strict=True)]
    return whole, together, max(seconds for _, seconds, _ in results), results[0][2]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="a tensor-parallel language model")
    sizes = {
        "ranks": 4, "steps": 20, "layers": 1, "features": 64, "heads": 4, "hidden": 256, "tokens": 64, "batch": 2,
        "vocabulary": 32,
    }  # fmt: skip
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args(given)
    if args.tokens % args.ranks or args.heads % args.ranks:
        parser.error("--tokens and --heads must be multiples of --ranks")
    return args


def main() -> None:
    args = arguments()
    where = pk.describe_backend(args.ranks)
    print(
        f"transformer, {args.layers} x (features {args.features}, hidden {args.hidden}), {args.tokens} tokens, {where}"
    )
    whole, together, seconds, held = compare(args)
    for step, (a, b) in enumerate(zip(whole, together, strict=True), 1):
        if step in (1, 2, 5) or step % 10 == 0 or step == args.steps:
            print(f"  step {step:3}: loss {a:.4f} whole, {b:.4f} on the ranks together")
    worst = max(abs(a - b) / a for a, b in zip(whole, together, strict=True))
    print(
        f"  {seconds / args.steps * 1000:.1f} ms a step, {held} parameters a rank; losses differ by at most {worst:.1e}"
    )
    if not (worst <= 0.02 and math.isfinite(together[-1])):
        raise SystemExit(f"wrong: the losses differ by {worst:.1e} > 2e-2")


if __name__ == "__main__":
    main()
