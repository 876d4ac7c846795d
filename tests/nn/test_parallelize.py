"""``pk.nn.parallelize``, whole state dicts, and training steps, against the module of torch's that they came from."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp

import pk
from pk.errors import ArgumentError, RankError
from tests.nn.problems import RTOL, Block, block, error, leaf, linear, mixed, plan, saved, share, tokens


def spawn(fn, world: int, *args):
    return pk.spawn(fn, world, backend="sim", args=args)


def whole_block(x: torch.Tensor, grad: torch.Tensor, **options: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The block after a forward and a backward pass, its result, and the gradient of ``x``, in float64."""
    reference, x = block(**options).double(), leaf(x.double())
    result = reference(x)
    result.backward(grad.double())
    return reference, result, x.grad


@pytest.mark.parametrize(("world", "sequence"), [(2, True), (4, True), (2, False)])
def test_block(world: int, sequence: bool) -> None:
    x, grad = tokens(4 * world, 2, 64).float(), tokens(4 * world, 2, 64, seed=2).float()
    reference, want, want_x = whole_block(x, grad)
    wanted = {name: p.grad for name, p in reference.named_parameters()}

    def run(rank: int) -> None:
        styles = plan()
        if not sequence:
            styles = {
                name: type(style)(sequence_parallel=False, **({"parts": (64,) * 3} if name == "qkv" else {}))
                for name, style in styles.items()
                if name != "norm*"
            }
        made = pk.nn.parallelize(block(), None, styles)
        assert isinstance(made, Block)
        assert isinstance(made.qkv, pk.nn.ColumnParallelLinear)
        assert made.qkv.weight.shape == (192 // world, 64)
        mine = leaf(share(x, rank, world) if sequence else x)
        with mixed():
            got = made(mine)
        assert error(got, share(want, rank, world) if sequence else want) < RTOL
        got.backward(share(grad, rank, world) if sequence else grad)
        assert error(mine.grad, share(want_x, rank, world) if sequence else want_x) < RTOL
        shards = {name: (layer, shard) for name, layer, shard in pk.nn.shards.shared_parameters(made)}
        for name, p in made.named_parameters():
            part = wanted[name]
            if name in shards:
                part = shards[name][1].take(part, rank, world)
            assert error(p.grad, part) < 2 * RTOL, name
        return {name: p.grad for name, p in made.named_parameters() if name not in shards}

    ranks = spawn(run, world)
    for found in ranks[1:]:
        for name, g in found.items():
            assert torch.equal(g, ranks[0][name]), f"{name} would drift apart"


@pytest.mark.parametrize("assign", [False, True])
def test_whole_state_dicts_go_in_and_come_out(assign: bool) -> None:
    want = block(seed=7).state_dict()
    world = 2

    def run(rank: int) -> None:
        if assign:
            with torch.device("meta"):
                empty = Block()
            made = pk.nn.parallelize(empty, None, plan())
            pk.nn.load_full_state_dict(made, want, assign=True)
            assert all(p.untyped_storage().data_ptr() != want[n].data_ptr() for n, p in made.named_parameters())
        else:
            made = pk.nn.parallelize(block(seed=1), None, plan())
            pk.nn.load_full_state_dict(made, want)
        q, k, _ = want["qkv.weight"].split(64)
        assert torch.equal(made.qkv.weight[:32], share(q, rank, world))
        assert torch.equal(made.qkv.weight[32:64], share(k, rank, world))
        assert torch.equal(made.down.weight, share(want["down.weight"], rank, world, 1))
        found = pk.nn.full_state_dict(made, cpu=True)
        assert list(found) == list(want)
        for name in want:
            assert torch.equal(found[name], want[name]), name
        # Shards go through torch.save as anything else does.
        other = pk.nn.parallelize(block(seed=3), None, plan())
        other.load_state_dict(torch.load(io.BytesIO(saved(made))))
        assert torch.equal(other.qkv.weight, made.qkv.weight)

    spawn(run, world)


def test_mistakes_of_state_dicts() -> None:
    def run(rank: int) -> None:
        made = pk.nn.parallelize(block(), None, plan())
        with pytest.raises(
            ArgumentError, match=r"`qkv.weight` has shape \(96, 64\).*\(192, 64\).*\n.*Load shards with"
        ):
            pk.nn.load_full_state_dict(made, made.state_dict())
        with pytest.raises(ArgumentError, match=r"`up.weight` has shape \(32, 64\).*\n.*Pass the whole"):
            pk.nn.load_full_state_dict(made, {**block().state_dict(), "up.weight": torch.zeros(32, 64)})
        with pytest.raises(RuntimeError, match="size mismatch"):
            made.load_state_dict(block().state_dict())
        with pytest.raises(RuntimeError, match="Missing key"):
            pk.nn.load_full_state_dict(made, {})
        assert pk.nn.load_full_state_dict(made, {}, strict=False).missing_keys
        with pytest.raises(ArgumentError, match="assign=True"):
            pk.nn.load_full_state_dict(made, block().state_dict(), device="cpu")

    spawn(run, 2)


def test_twenty_steps_follow_the_reference() -> None:
    steps, world, x = 20, 2, tokens(8, 2, 64).float()
    target = tokens(8, 2, 64, seed=9).float()

    def train(module: nn.Module, x: torch.Tensor, target: torch.Tensor, clip) -> list[float]:
        optimizer, losses = torch.optim.AdamW(module.parameters(), lr=3e-3), []
        for _ in range(steps):
            with mixed():
                y = module(x)
            loss = (y.float() - target).square().sum() / (8 * 2 * 64)
            optimizer.zero_grad()
            loss.backward()
            clip(module)
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    def run(rank: int) -> list[float]:
        made = pk.nn.parallelize(block(), None, plan())
        return train(made, share(x, rank, world), share(target, rank, world), lambda m: pk.nn.clip_grad_norm_(m, 1.0))

    want = train(block(), x, target, lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0))
    got = [sum(parts) for parts in zip(*spawn(run, world), strict=True)]
    assert want[-1] < 0.7 * want[0]
    for a, b in zip(want, got, strict=True):
        assert abs(a - b) < 0.02 * a, (want, got)


def test_the_norm_of_all_gradients() -> None:
    def filled(module: nn.Module) -> nn.Module:
        for p in module.parameters():
            p.grad = p.detach().clone() * 3
        return module

    reference = filled(block())
    want = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)

    def run(rank: int) -> None:
        made = filled(pk.nn.parallelize(block(), None, plan()))
        made.out.bias.grad = None
        made.out.bias.requires_grad_(False)
        missing = reference_bias = 3 * block().out.bias.detach().norm()
        got = pk.nn.clip_grad_norm_(made, 0.5)
        assert float(got) == pytest.approx(float((want.square() - missing.square()).sqrt()), rel=1e-5)
        assert reference_bias > 0
        clipped = 3 * 0.5 / float(got)
        assert torch.allclose(made.norm1.weight.grad, made.norm1.weight * clipped, rtol=1e-4)

    spawn(run, 2)


# ------------------------------------------------------------------------------------------------------------ the plan
class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(32, 16), linear(16, 32)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(3))
        self.norm = nn.RMSNorm(16)
        self.head = linear(32, 16)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("layers.*.up", ["layers.0.up", "layers.1.up", "layers.2.up"]),
        ("layers.1.up", ["layers.1.up"]),
        ("**.up", ["layers.0.up", "layers.1.up", "layers.2.up"]),
        ("layers.2.**", ["layers.2.up", "layers.2.down"]),
        ("hea*", ["head"]),
        ("**.head", ["head"]),
        ("*.up", []),
        ("layersx1.up", []),
        ("layers.[0].up", []),
    ],
)
def test_names(pattern: str, names: list[str]) -> None:
    module = Net()
    style = pk.nn.ColwiseParallel()
    if not names:
        with pytest.raises(ArgumentError, match=r"no module is named `.*\n.*There are "):
            pk.nn.parallelize(module, None, {pattern: style})
        return
    assert pk.nn.parallelize(module, None, {pattern: style}) is module
    assert [n for n, m in module.named_modules() if isinstance(m, pk.nn.ColumnParallelLinear)] == names


def test_a_style_alone() -> None:
    made = pk.nn.parallelize(linear(32, 16), None, pk.nn.RowwiseParallel())
    assert isinstance(made, pk.nn.RowParallelLinear)


def test_torchs_styles() -> None:
    def run(rank: int) -> None:
        made = pk.nn.parallelize(
            Net(), None,
            {
                "layers.0.up": tp.ColwiseParallel(input_layouts=Shard(1)), "layers.0.down": tp.RowwiseParallel(),
                "layers.1.up": tp.ColwiseParallel(), "layers.1.down": tp.RowwiseParallel(output_layouts=Shard(0)),
                "norm": tp.SequenceParallel(), "head": tp.ColwiseParallel(output_layouts=Replicate()),
            },
        )  # fmt: skip
        first, second = made.layers[0], made.layers[1]
        assert (first.up.tokens, first.down.tokens) == (1, None)
        assert (second.up.tokens, second.down.tokens) == (None, 0)
        assert made.head.gather_output
        assert made.head.tokens is None
        assert type(made.norm) is pk.nn.RMSNorm
        for style in (tp.ColwiseParallel(use_local_output=False), tp.RowwiseParallel(input_layouts=Replicate())):
            with pytest.raises(ArgumentError, match=r"with these layouts is none of pk's.*\n.*Use pk.nn's"):
                pk.nn.parallelize(Net(), None, {"head": style})

    spawn(run, 2)


def refused(module: nn.Module, plan: object, words: str, group: object = None) -> None:
    before = {name: type(m) for name, m in module.named_modules()}
    with pytest.raises(ArgumentError, match=words):
        pk.nn.parallelize(module, group, plan)
    assert {name: type(m) for name, m in module.named_modules()} == before, "changed although refused"


def test_mistakes_of_plans() -> None:
    column, row, sequence = pk.nn.ColwiseParallel(), pk.nn.RowwiseParallel(), pk.nn.SequenceParallel()

    def run(rank: int) -> None:
        refused(Net(), {"haed": column}, r"no module is named `haed`.\n.*There are .*head")
        refused(
            Net(), {"head": column, "norm": column}, "`norm` is RMSNorm, and ColwiseParallel is for torch.nn.Linear"
        )
        refused(Net(), {"head": column, "h*": row}, "two styles for `head`")
        refused(Net(), {"head": "colwise"}, r"the plan holds 'colwise'.\n.*Use ColwiseParallel")
        refused(Net(), {"layers": sequence}, r"`layers` is ModuleList, and SequenceParallel knows .*\n.*sum_gradients")
        refused(nn.Sequential(linear(8, 8)), {"0": column}, "`0`: out_features=8: 2 ranks cannot share")
        refused(nn.Sequential(nn.Embedding(8, 8, max_norm=1.0)), {"0": sequence}, "drift apart")
        attention = nn.TransformerEncoderLayer(32, 2, 64)
        refused(attention, {"linear1": column}, "part of a TransformerEncoderLayer, which reads its weights")
        tied = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32, bias=False))
        tied[1].weight = tied[0].weight
        refused(tied, {"1": column}, r"`1.weight` is the parameter of another module too.*\n.*Untie")
        hooked = Net()
        hooked.head.register_forward_hook(lambda *_: None)
        refused(hooked, {"head": column}, "`head` has hooks")

        class Mesh:
            ndim, mesh_dim_names, get_group = 2, ("dp", "tp"), None

        refused(Net(), {"head": column}, r'the mesh has 2 dimensions.*\n.*mesh\["tp"\]', Mesh())

    spawn(run, 2)


def test_ranks_with_other_weights_are_told() -> None:
    def run(rank: int) -> None:
        module = block()
        with torch.no_grad():
            module.norm2.bias[3] += rank
        refused(module, plan(), r"`norm2.bias` of rank 1 is not what rank 0 has.*\n.*is a race")
        pk.nn.parallelize(module, None, plan(), check_weights=False)

    spawn(run, 2)


def test_a_rank_with_another_plan_ends_all() -> None:
    def run(rank: int) -> None:
        pk.nn.parallelize(block(), None, {"qkvv" if rank else "qkv": pk.nn.ColwiseParallel()})

    with pytest.raises(RankError, match="no module is named `qkvv`"):
        spawn(run, 2)


# ------------------------------------------------------------------------------------------- what is whole on all ranks
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_tokens_are_split_and_gathered(dim: int) -> None:
    x, grad = tokens(6, 9, 3).float(), tokens(6, 9, 3, seed=4).float()

    def run(rank: int) -> None:
        mine = leaf(x)
        part = pk.nn.split(mine, dim)
        assert torch.equal(part, share(x, rank, 3, dim))
        whole = pk.nn.gather(part, dim)
        assert torch.equal(whole, x)
        whole.backward(grad)
        assert torch.equal(mine.grad, grad)
        with pytest.raises(ArgumentError, match="which 3 ranks cannot share equally"):
            pk.nn.split(tokens(4, 4, 4), dim)

    spawn(run, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_summed(dtype: torch.dtype) -> None:
    parts = [tokens(7, 51, seed=r, dtype=dtype) for r in range(3)]
    want = sum(p.float() for p in parts).to(dtype)

    def run(rank: int) -> None:
        parameter = leaf(tokens(7, 51, dtype=dtype))
        (pk.nn.sum_gradients(parameter) * parts[rank]).sum().backward()
        assert torch.equal(parameter.grad, want)

    spawn(run, 3)


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (lambda m: m.LayerNorm(16), tokens(6, 16).float()),
        (lambda m: m.RMSNorm(16, eps=1e-5), tokens(6, 16).float()),
        (lambda m: m.Linear(16, 5), tokens(6, 16).float()),
        (lambda m: m.Embedding(10, 6, padding_idx=2), torch.arange(6) % 4),
    ],
)
def test_layers_of_torch_on_a_share_of_the_tokens(make, x: torch.Tensor) -> None:
    def run(rank: int) -> None:
        layer = make(pk.nn)
        reference = make(nn)
        reference.load_state_dict(layer.state_dict())
        states = [pk.nn.functional.stacked(p.detach(), "") for p in layer.parameters()]
        assert all(torch.equal(s[0], s[1]) for s in states), "not alike on all ranks"
        want, got = reference(x), layer(share(x, rank, 2))
        assert torch.allclose(got, share(want, rank, 2), atol=1e-6)
        want.square().sum().backward()
        got.square().sum().backward()
        for mine, theirs in zip(layer.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(mine.grad, theirs.grad, rtol=1e-5, atol=1e-5)
        converted = pk.nn.parallelize(copy.deepcopy(reference), None, pk.nn.SequenceParallel())
        assert type(converted) is type(layer)
        assert torch.allclose(converted(share(x, rank, 2)), got)

    spawn(run, 2)
