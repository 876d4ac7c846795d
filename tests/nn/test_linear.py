"""The linear layers and the MLP in the simulator: results and gradients against torch.nn in float64."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import pk
from pk.errors import ArgumentError
from tests.nn.problems import RTOL, double, error, leaf, linear, mixed, share, tokens

FUNCTIONS = {None: lambda x: x, "relu": torch.relu, "gelu": nn.functional.gelu, "silu": nn.functional.silu}


def spawn(fn, world: int, *args):
    return pk.spawn(fn, world, backend="sim", args=args)


@pytest.mark.parametrize(
    ("world", "sequence", "dim", "activation", "bias", "saved"),
    [
        (1, True, 0, None, True, True),
        (2, True, 0, "relu", True, True),
        (2, True, 1, "gelu", False, False),
        (3, True, 0, None, False, True),
        (4, True, 0, "silu", True, False),
        (2, False, 0, "gelu", True, True),
        (3, False, 0, None, True, True),
        (4, False, 0, "relu", False, True),
    ],
)
def test_column(world: int, sequence: bool, dim: int, activation: str | None, bias: bool, saved: bool) -> None:
    into, out = 48, 16 * world
    shape = (2 * world, 2, into) if dim == 0 else (2, 2 * world, into)
    whole = linear(out, into, bias)
    x, grad = tokens(*shape), tokens(*shape[:-1], out, seed=2)
    reference, want_x = double(whole), leaf(x.double())
    want = FUNCTIONS[activation](reference(want_x))
    want.backward(grad.double())

    def run(rank: int) -> None:
        layer = pk.nn.ColumnParallelLinear.from_linear(
            whole, sequence_parallel=sequence, sequence_dim=dim, activation=activation, save_gathered=saved
        )
        mine = leaf(share(x, rank, world, dim) if sequence else x)
        got = layer(mine)
        assert error(got, share(want, rank, world, -1)) < RTOL
        got.backward(share(grad, rank, world, -1))
        assert error(mine.grad, share(want_x.grad, rank, world, dim) if sequence else want_x.grad) < RTOL
        assert error(layer.weight.grad, share(reference.weight.grad, rank, world)) < RTOL
        assert layer.weight.grad.is_contiguous()
        if bias:
            assert error(layer.bias.grad, share(reference.bias.grad, rank, world)) < RTOL
        with torch.no_grad():
            assert torch.equal(layer(mine), got) or error(layer(mine), got) < RTOL

    spawn(run, world)


@pytest.mark.parametrize(
    ("world", "sequence", "dim", "bias"),
    [
        (1, True, 0, True), (2, True, 0, True), (2, True, 1, False), (3, True, 0, True), (2, False, 0, True),
        (4, False, 0, False),
    ],
)  # fmt: skip
def test_row(world: int, sequence: bool, dim: int, bias: bool) -> None:
    into, out = 16 * world, 40
    shape = (2 * world, 3, into) if dim == 0 else (3, 2 * world, into)
    whole = linear(out, into, bias)
    x, grad = tokens(*shape), tokens(*shape[:-1], out, seed=2)
    reference, want_x = double(whole), leaf(x.double())
    want = reference(want_x)
    want.backward(grad.double())

    def run(rank: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        layer = pk.nn.RowParallelLinear.from_linear(whole, sequence_parallel=sequence, sequence_dim=dim)
        mine = leaf(share(x, rank, world, -1))
        got = layer(mine)
        assert error(got, share(want, rank, world, dim) if sequence else want) < RTOL
        got.backward(share(grad, rank, world, dim) if sequence else grad)
        assert error(mine.grad, share(want_x.grad, rank, world, -1)) < RTOL
        assert error(layer.weight.grad, share(reference.weight.grad, rank, world, 1)) < RTOL
        if bias:
            assert error(layer.bias.grad, reference.bias.grad) < RTOL
        return got, layer.bias.grad if bias else None

    ranks = spawn(run, world)
    for got, bias_grad in ranks[1:]:
        assert sequence or torch.equal(got, ranks[0][0])
        assert bias_grad is None or torch.equal(bias_grad, ranks[0][1]), "the ranks' biases would drift apart"


@pytest.mark.parametrize(("gated", "sequence"), [(False, True), (False, False), (True, True), (True, False)])
def test_mlp(gated: bool, sequence: bool) -> None:
    world, features, hidden, activation = 2, 32, 48, "silu" if gated else "gelu"
    up, gate = linear(hidden, features, seed=1), linear(hidden, features, seed=3)
    down = linear(features, hidden, seed=2)
    x, grad = tokens(4 * world, features), tokens(4 * world, features, seed=5)
    want_x, references = leaf(x.double()), [double(m) for m in (up, down, gate)]
    h = references[0](want_x)
    h = nn.functional.silu(references[2](want_x)) * h if gated else nn.functional.gelu(h)
    want = references[1](h)
    want.backward(grad.double())

    def run(rank: int) -> None:
        layer = pk.nn.ParallelMLP.from_linear(
            up, down, gate if gated else None, activation=activation, sequence_parallel=sequence
        )
        fresh = pk.nn.ParallelMLP(
            features, hidden, activation=activation, gated=gated, sequence_parallel=sequence, dtype=torch.bfloat16
        )
        assert fresh.load_state_dict(layer.state_dict()).missing_keys == []
        for made in (layer, fresh):
            mine = leaf(share(x, rank, world) if sequence else x)
            got = made(mine)
            assert error(got, share(want, rank, world) if sequence else want) < RTOL
            got.backward(share(grad, rank, world) if sequence else grad)
            assert error(mine.grad, share(want_x.grad, rank, world) if sequence else want_x.grad) < 2 * RTOL
            parts = [references[2], references[0]] if gated else [references[0]]
            wanted = torch.cat([share(p.weight.grad, rank, world) for p in parts])
            assert error(made.up.weight.grad, wanted) < 2 * RTOL
            assert error(made.down.weight.grad, share(references[1].weight.grad, rank, world, 1)) < 2 * RTOL

    spawn(run, world)


def test_gathered_output_and_autocast() -> None:
    world, whole = 2, linear(32, 16, dtype=torch.float32)
    x, grad = tokens(6, 16, dtype=torch.float32), tokens(6, 32, seed=2, dtype=torch.float32)
    reference, want_x = double(whole), leaf(x.double())
    want = reference(want_x)
    want.backward(grad.double())

    def run(rank: int) -> None:
        layer = pk.nn.ColumnParallelLinear.from_linear(whole, gather_output=True)
        mine = leaf(share(x, rank, world))
        with mixed():
            got = layer(mine)
        assert got.dtype == torch.bfloat16
        assert error(got, want) < RTOL
        got.backward(grad.bfloat16())
        assert layer.weight.grad.dtype == mine.grad.dtype == torch.float32
        assert error(mine.grad, share(want_x.grad, rank, world)) < RTOL
        assert error(layer.weight.grad, share(reference.weight.grad, rank, world)) < RTOL

    spawn(run, world)


def test_no_tokens() -> None:
    def run(rank: int) -> None:
        layer = pk.nn.ParallelMLP(16, 32, dtype=torch.bfloat16)
        x = leaf(tokens(0, 16))
        y = layer(x)
        assert y.shape == (0, 16)
        y.sum().backward()
        assert float(layer.up.weight.grad.abs().sum()) == 0.0
        assert x.grad.shape == (0, 16)

    spawn(run, 2)


def test_one_token_without_dimensions_in_front() -> None:
    whole = linear(16, 32)
    want = double(whole)(tokens(32).double())

    def run(rank: int) -> None:
        layer = pk.nn.RowParallelLinear.from_linear(whole, sequence_parallel=False)
        assert error(layer(share(tokens(32), rank, 2)), want) < RTOL

    spawn(run, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_initial_parameters_do_not_depend_on_the_world(dtype: torch.dtype) -> None:
    def run(rank: int) -> dict[str, torch.Tensor]:
        layer = pk.nn.ParallelMLP(16, 64, dtype=dtype)
        bound = layer.up.in_features**-0.5
        values = layer.up.weight.detach().float()
        assert float(values.abs().max()) <= bound * 1.01
        assert float(values.std()) > 0.4 * bound
        assert torch.equal(layer.down.bias, pk.nn.functional.stacked(layer.down.bias.detach(), "")[0])
        return pk.nn.full_state_dict(layer)

    torch.manual_seed(5)
    one, *_ = spawn(run, 1)
    torch.manual_seed(5)  # rank threads share the generator: rank 0 draws, and only it
    for state in spawn(run, 2):
        for name in one:
            assert torch.equal(state[name], one[name]), name


def test_modules_are_copied_and_pickled() -> None:
    def run(rank: int) -> None:
        layer = pk.nn.ColumnParallelLinear.from_linear(linear(32, 16), activation="gelu")
        x = share(tokens(8, 16), rank, 2)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(other(x), layer(x))
        assert "in_features=16, out_features=32" in repr(layer)

    spawn(run, 2)


def test_frozen_parameters_and_modes_are_kept() -> None:
    whole = linear(32, 16).requires_grad_(False).eval()

    def run(rank: int) -> None:
        layer = pk.nn.ColumnParallelLinear.from_linear(whole)
        assert not layer.weight.requires_grad
        assert not layer.training
        assert layer.weight.untyped_storage().nbytes() == layer.weight.numel() * 2, "the whole weight is kept alive"
        x = leaf(share(tokens(8, 16), rank, 2))
        layer(x).sum().backward()
        assert layer.weight.grad is None
        assert x.grad is not None

    spawn(run, 2)


@pytest.mark.parametrize("sequence", [True, False])
def test_compiled_whole(sequence: bool) -> None:
    torch._dynamo.reset()
    up, down = linear(32, 16, seed=1), linear(16, 32, seed=2)
    x = tokens(4, 16)
    layer = pk.nn.ParallelMLP.from_linear(up, down, sequence_parallel=sequence)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for call in (layer, compiled):
        layer.zero_grad()
        mine = leaf(x)
        y = call(mine)
        y.backward(torch.ones_like(y))
        results.append((y, mine.grad, layer.up.weight.grad.clone(), layer.down.bias.grad.clone()))
    for eager, other in zip(*results, strict=True):
        assert error(other, eager) < 1e-2


# -------------------------------------------------------------------------------------------------------- mistakes
def refused(make, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make()


def test_mistakes_of_extents() -> None:
    def run(rank: int) -> None:
        refused(lambda: pk.nn.ColumnParallelLinear(16, 24), r"out_features=24: 2 ranks cannot .*\n.*such as 32")
        refused(lambda: pk.nn.ColumnParallelLinear(12, 32), "in_features=12 must be a positive multiple of 8")
        refused(lambda: pk.nn.RowParallelLinear(24, 16), "in_features=24: 2 ranks")
        refused(lambda: pk.nn.RowParallelLinear(32, 12), "out_features=12")
        refused(lambda: pk.nn.ColumnParallelLinear(16, 32, parts=(16, 32)), "add up to 48")
        refused(lambda: pk.nn.ColumnParallelLinear(16, 32, activation="tanh"), "activation='tanh' does not exist")
        refused(lambda: pk.nn.ColumnParallelLinear(16, 64, parts=(32, 32), gather_output=True), "would mix them")
        refused(lambda: pk.nn.ParallelMLP(16, 32, activation="tanh"), "activation='tanh'")
        up, down, gate = linear(32, 16), linear(16, 32), linear(16, 16)
        refused(lambda: pk.nn.ParallelMLP.from_linear(up, down, gate), "differ in shape")

    spawn(run, 2)


def test_mistakes_of_inputs() -> None:
    def run(rank: int) -> None:
        row, column = pk.nn.RowParallelLinear(32, 16), pk.nn.ColumnParallelLinear(16, 32)
        refused(lambda: row.bfloat16()(tokens(3, 16)), "3 tokens along dimension 0, which 2 ranks .*\n.*Pad them to 4")
        refused(lambda: column.bfloat16()(tokens(16)), "no tokens along dimension 0")
        column.sequence_dim = 1
        refused(lambda: column(tokens(4, 16)), "no tokens along dimension 1")

    spawn(run, 2)
