"""Mistakes in calls of pk.nn: what they are told, and that nothing goes on with nonsense."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import pk
from pk.errors import ArgumentError, BackendError, RankError
from pk.nn import agreement
from tests.nn.problems import linear, tokens

Column, Row = pk.nn.ColumnParallelLinear, pk.nn.RowParallelLinear
BF16 = torch.bfloat16


def spawn(fn: Any, world: int = 2) -> list[Any]:
    return pk.spawn(fn, world, "sim")


def told(make: Any, kind: type[Exception] = ArgumentError) -> str:
    with pytest.raises(kind) as caught:
        make()
    return str(caught.value)


def column(x: Any, **options: Any) -> torch.Tensor:
    return Column(16, 32, dtype=BF16, **options)(x)


def row(x: Any, **options: Any) -> torch.Tensor:
    return Row(32, 16, dtype=BF16, **options)(x)


# ------------------------------------------------------------------------------------------------------------ arguments
CONSTRUCTION = {
    "a float": (lambda: Column(16.0, 32), r"in_features=16.0 is float, .*\n.*such as 16"),
    "a str": (lambda: Row(32, "16"), "out_features='16' is str, and must be a whole number"),
    "a bool": (lambda: Column(True, 32), "in_features=True is bool"),
    "a dimension": (lambda: Column(16, 32, sequence_dim="0"), "sequence_dim='0' is str"),
    "a form": (lambda: Row(32, 16, sequence_parallel="no"), "sequence_parallel='no' is str.*\n.*True or False"),
    "int8": (lambda: Column(16, 32, dtype=torch.int8), r"dtype=torch.int8 cannot be .*\n.*Use torch.bfloat16"),
    "float8": (lambda: Row(32, 16, dtype=torch.float8_e4m3fn), "dtype=torch.float8_e4m3fn cannot be"),
    "a dtype's name": (lambda: Column(16, 32, dtype="bfloat16"), "dtype='bfloat16' cannot be"),
    "a device": (lambda: Column(16, 32, device="gpu"), r"device='gpu' is no device of torch here"),
    "a part": (lambda: Column(16, 32, parts=32), r"parts=32 is int.\n.*Pass a tuple of ints, such as \(32,\)"),
    "float parts": (lambda: Row(32, 16, parts=(16.0, 16.0)), "one of parts=16.0 is float"),
    "activations": (lambda: Column(16, 32, activation=["relu"]), r"activation=\['relu'\] does not exist"),
    "a config": (lambda: Column(16, 32, config="zz"), r"config='zz' is no configuration.\n.*There are c128x256"),
    "a row config": (lambda: Row(32, 16, config="zz"), "config='zz' is no configuration"),
    "a whole config": (lambda: Column(16, 32, config="zz", sequence_parallel=False), "config='zz' is no config"),
    "a reduced config": (lambda: Row(32, 16, config=3, sequence_parallel=False), "config=3 is int"),
    "SMs": (lambda: Column(16, 32, comm_sms=-1), "comm_sms=-1 must be at least"),
    "contradictions": (lambda: Row(32, 16, deterministic=True, config="library"), "does not fix the order of its sums"),
    "determinism": (lambda: Row(32, 16, deterministic="yes"), "deterministic='yes' is str"),
    "a convolution": (lambda: Column.from_linear(nn.Conv1d(1, 1, 1)), "`linear` is Conv1d, and must be"),
    "an MLP's features": (lambda: pk.nn.ParallelMLP(16.0, 32), "features=16.0 is float"),
    "an MLP's config": (lambda: pk.nn.ParallelMLP(16, 32, config="zz"), "config='zz' is no configuration"),
    "an MLP's activation": (lambda: pk.nn.ParallelMLP(16, 32, activation=[]), r"activation=\[\] does not exist"),
    "an MLP of others": (lambda: pk.nn.ParallelMLP.from_linear(nn.ReLU(), linear(8, 8)), "`up` is ReLU"),
    "layers that do not fit": (
        lambda: pk.nn.ParallelMLP.from_linear(linear(32, 16), linear(16, 48)), "`up` has 32 outputs and `down` 48",
    ),
    "max_norm": (lambda: pk.nn.Embedding(10, 16, max_norm=1.0), r"max_norm=1.0.* drift apart.\n.*Leave `max_norm`"),
    "sparse": (lambda: pk.nn.Embedding(10, 16, sparse=True), "sparse=True.* drift apart"),
}  # fmt: skip
INPUTS = {
    "a list": (lambda: column([[1.0] * 16]), r"a layer of pk.nn got list, .*\n.*torch.as_tensor"),
    "a row's list": (lambda: row([[1.0] * 16], sequence_parallel=False), "a layer of pk.nn got list"),
    "no tensor": (lambda: column(None, sequence_parallel=False), "got NoneType"),
    "a number": (lambda: column(torch.tensor(1.0), sequence_parallel=False), r"shape \(\) has no features"),
    "features": (lambda: column(tokens(8, 24)), r"shape \(8, 24\) has 24 features, .* \(16, 16\) takes 16.\n.*Pass"),
    "no features": (lambda: row(tokens(8, 0), sequence_parallel=False), "has 0 features"),
    "whole features": (lambda: row(tokens(8, 32)), "has 32 features, .* takes 16"),
    "a dimension": (lambda: row(tokens(8, 16), sequence_dim=5), "has no tokens along dimension 5"),
    "float32": (lambda: column(tokens(8, 16).float()), r"torch.float32 meets a weight of torch.bfloat16.*\n.*autocast"),
    "float32 layers": (lambda: Column(16, 32)(tokens(8, 16).float()), "torch.float32 meets a weight of torch.float32"),
    "sparse": (lambda: column(tokens(8, 16).to_sparse()), "layout torch.sparse_coo"),
    "a meta layer": (lambda: column(tokens(8, 16), device="meta"), "the weight of a layer is on meta.*\n.*assign=True"),
    "meta input": (lambda: row(tokens(8, 16).to("meta")), "the input of a layer is on meta"),
    "a meta operand": (
        lambda: pk.ops.matmul(tokens(8, 16).requires_grad_(), tokens(16, 8).to("meta")), "`b` of pk.ops.matmul is on m",
    ),
    "gather a number": (lambda: pk.nn.gather(torch.tensor(1.0)), "pk.nn.gather got a tensor without dimensions"),
    "gather a list": (lambda: pk.nn.gather([1]), "pk.nn.gather got list"),
    "gather along 7": (lambda: pk.nn.gather(tokens(4, 4), 7), r"dim=7 and a tensor of shape \(4, 4\).\n.*from -2 to 1"),
    "gather along x": (lambda: pk.nn.gather(tokens(4, 4), "x"), "dim='x' is str"),
    "split a number": (lambda: pk.nn.split(torch.tensor(1.0)), "pk.nn.split got a tensor without dimensions"),
    "split along 7": (lambda: pk.nn.split(tokens(4, 4), 7), "pk.nn.split got dim=7"),
    "sum a list": (lambda: pk.nn.sum_gradients([1]), "pk.nn.sum_gradients got list"),
    "a sum's gradient": (
        lambda: torch.ops.pk.sum_over_ranks(tokens(8, 16).requires_grad_(), "").sum().backward(), "sum_gradients",
    ),
}  # fmt: skip
MODULES = {
    "no module": (lambda: pk.nn.full_state_dict([]), r"pk.nn.full_state_dict got list as the module.*\n.*Pass the mod"),
    "a class": (lambda: pk.nn.parallelize(nn.Linear, None, {}), "pk.nn.parallelize got the class Linear"),
    "loading a list": (lambda: pk.nn.load_full_state_dict(Column(16, 32), []), "got list as the state"),
    "loading into a list": (lambda: pk.nn.load_full_state_dict([], {}), "got list as the module"),
    "loading no tensor": (lambda: pk.nn.load_full_state_dict(Column(16, 32), {"weight": [1]}), "`weight` .* is list"),
    "parameters": (lambda: pk.nn.clip_grad_norm_(Column(16, 32).parameters(), 1.0), "got generator as the module"),
    "no norm": (lambda: pk.nn.clip_grad_norm_(Column(16, 32), "a"), "max_norm='a' must be a number of at least 0"),
    "a negative norm": (lambda: pk.nn.clip_grad_norm_(Column(16, 32), -1.0), "max_norm=-1.0"),
    "NaN": (lambda: pk.nn.clip_grad_norm_(Column(16, 32), float("nan")), "max_norm=nan"),
    "a plan's number": (lambda: pk.nn.parallelize(linear(32, 16), None, {3: None}), "has 3 as a name, which is int"),
    "a style's parts": (lambda: styled(parts=32), "`0`: parts=32 is int"),
    "a style's config": (lambda: styled(config="zz"), "`0`: config='zz' is no configuration"),
}  # fmt: skip


def styled(**options: Any) -> nn.Module:
    return pk.nn.parallelize(nn.Sequential(linear(32, 16)), None, {"0": pk.nn.ColwiseParallel(**options)})


@pytest.mark.parametrize("cases", [CONSTRUCTION, INPUTS, MODULES], ids=["construction", "inputs", "modules"])
def test_mistakes(cases: dict[str, tuple[Any, str]]) -> None:
    def run(rank: int) -> None:
        for name, (make, words) in cases.items():
            with pytest.raises(ArgumentError, match=words):
                print(name, make())

    spawn(run)


def test_a_mistake_on_one_rank_is_every_ranks() -> None:
    """Making layers is collective: the others must not wait."""

    def run(rank: int) -> str:
        text = told(lambda: Column(16, 32, config="zz" if rank else None), ArgumentError if rank else BackendError)
        told(lambda: pk.nn.ParallelMLP(16, 32 if rank else 32.5), BackendError if rank else ArgumentError)
        assert Column(16, 32).rank == rank
        return text

    first, second = spawn(run)
    assert second.startswith("config='zz' is no configuration")
    assert first.startswith("making a ColumnParallelLinear failed on rank 1: ArgumentError: config='zz' is no")


def test_ranks_that_make_different_layers() -> None:
    def run(rank: int) -> str:
        return told(lambda: Column(16, 32 * (rank + 1), activation="gelu"))

    first, second = spawn(run)
    assert first == second
    assert "rank 0: ColumnParallelLinear(in_features=16, out_features=32, " in first
    assert "rank 1: ColumnParallelLinear(in_features=16, out_features=64, " in first


def test_operands_on_meta_are_inferred() -> None:
    layer = Column(16, 32, dtype=BF16, device="meta")
    assert layer(torch.empty(8, 16, dtype=BF16, device="meta")).shape == (8, 32)


# ------------------------------------------------------------------------------------------------------- whose share
def pickled(world: int) -> list[bytes]:
    return spawn(lambda rank: pickle.dumps(Column(16, 64, dtype=BF16)), world)


def test_a_share_of_another_world_is_refused() -> None:
    first = pickled(2)[0]

    def run(rank: int) -> str:
        layer = pickle.loads(first)
        texts = {told(lambda: layer(tokens(8, 16))), told(lambda: copy.deepcopy(layer)(tokens(8, 16)))}
        (text,) = texts
        return text

    for rank, text in enumerate(spawn(run, 4)):
        assert text.startswith(
            "this ColumnParallelLinear of 16 to 64 features holds the share of rank 0 of 2, and is used by rank "
            f"{rank} of 4: it was made, pickled or copied elsewhere.\n"
        )
        assert "pk.nn.load_full_state_dict" in text


def test_a_share_of_another_rank_is_refused() -> None:
    first = pickled(2)[0]

    def run(rank: int) -> None:
        layer = pickle.loads(first)
        if rank:  # rank 0 holds its own
            assert "the share of rank 0 of 2, and is used by rank 1 of 2" in told(lambda: layer(tokens(8, 16)))

    spawn(run)


def test_a_layer_made_outside_of_the_ranks_is_refused() -> None:
    """Made before pk.spawn by the process alone, it holds everything."""
    torch._dynamo.reset()
    layer = Row(32, 16, dtype=BF16, sequence_parallel=False)
    assert layer(tokens(8, 32)).shape == (8, 16)

    def run(rank: int) -> None:
        assert f"the share of rank 0 of 1, and is used by rank {rank} of 2" in told(lambda: layer(tokens(8, 32)))

    spawn(run)
    layer.world_size = 2  # in a graph too
    words = "share of rank 0 of 2, and is used by rank 0 of 1"
    with pytest.raises(Exception, match=words):
        torch.compile(layer, backend="eager", fullgraph=True)(tokens(8, 32))


def test_whole_state_dicts_of_wrong_shares_are_refused() -> None:
    first = pickled(2)[0]

    def run(rank: int) -> str:
        layer = pickle.loads(first)
        return told(lambda: pk.nn.full_state_dict(layer), ArgumentError if rank else BackendError)

    texts = spawn(run)
    assert texts[0].startswith("pk.nn.full_state_dict failed on rank 1: ArgumentError: this ColumnParallelLinear of 16")
    assert texts[1].startswith("this ColumnParallelLinear of 16")


def test_another_rank_threads_group_is_refused() -> None:
    def run(rank: int) -> None:
        mine = pk.runtime.group.current()
        others = mine.meet("groups", mine, lambda told: [told] * 2)
        other = others[1 - rank]
        assert f"is that of another rank, and this thread is rank {rank}" in told(lambda: pk.device(other))
        told(lambda: pk.nn.gather(tokens(4, 4), group=other.group_name))
        assert pk.nn.gather(tokens(4, 4), group=mine.group_name).shape == (8, 4)

    spawn(run)


# ------------------------------------------------------------------------------------------------- what all ranks pass
def net() -> nn.Sequential:
    return nn.Sequential(linear(32, 16), nn.GELU(), linear(16, 32, seed=2), nn.LayerNorm(16, dtype=BF16))


def differing(make: Any) -> str:
    """What all ranks are told, the same, if each parallelizes the module and the plan that ``make(rank)`` gives."""

    def run(rank: int) -> str:
        module, plan, options = make(rank)
        before = [type(m) for m in module.modules()]
        text = told(lambda: pk.nn.parallelize(module, None, plan, **options))
        assert [type(m) for m in module.modules()] == before, "changed although refused"
        return text

    first, second = spawn(run)
    assert first == second
    return first


COLUMN, ROW = pk.nn.ColwiseParallel, pk.nn.RowwiseParallel


@pytest.mark.parametrize(
    ("plans", "words"),
    [
        (
            [{"0": COLUMN()}, {"0": COLUMN(activation="relu")}],
            "`0` of the plan differs between ranks: activation is None on rank 0, and 'relu' on rank 1.",
        ),
        ([{"0": COLUMN(parts=(16, 16))}, {"0": COLUMN()}], "parts is (16, 16) on rank 0, and None on rank 1."),
        ([{"0": COLUMN(), "2": ROW()}, {"0": COLUMN()}], "the plan of rank 0 is for `2`, and that of rank 1 leaves"),
        ([{"0": COLUMN()}, {"0": COLUMN(), "2": ROW()}], "the plan of rank 1 is for `2`, and that of rank 0 leaves"),
        ([{"0": COLUMN()}, {"0": ROW()}], "style is ColwiseParallel on rank 0, and RowwiseParallel on rank 1."),
        ([{"2": ROW(comm_sms=4)}, {"2": ROW(comm_sms=8)}], "comm_sms is 4 on rank 0, and 8 on rank 1."),
    ],
)
def test_plans_that_differ(plans: list[dict[str, Any]], words: str) -> None:
    text = differing(lambda rank: (net(), plans[rank], {}))
    assert words in text
    assert "Pass the same plan" in text


def test_modules_that_differ() -> None:
    def other(rank: int) -> nn.Sequential:
        return nn.Sequential(linear(32 * (rank + 1), 16))

    plan = {"0": COLUMN()}
    text = differing(lambda rank: (other(rank), plan, {"check_weights": False}))
    assert "parameter weight is (32, 16) torch.bfloat16 on rank 0, and (64, 16) torch.bfloat16 on rank 1." in text
    text = differing(lambda rank: (net() if rank else net()[:3], plan, {}))
    assert "the module of rank 1 has not the parameters of rank 0's: only rank 1 has `3.weight`." in text
    text = differing(lambda rank: (net(), plan, {"check_weights": rank == 0}))
    assert "check_weights=False on rank 1, and True on rank 0." in text


def test_a_list_of_parts_is_a_tuple() -> None:
    def run(rank: int) -> None:
        parts = [(16, 16), [16, 16]][rank]
        assert pk.nn.parallelize(net(), None, {"0": COLUMN(parts=parts)})[0].shards["weight"].parts == (16, 16)

    spawn(run)


def test_threads_that_pass_one_module() -> None:
    module = net()
    text = differing(lambda rank: (module, {"2": ROW()}, {}))
    assert "ranks 0 and 1 are threads of one process and pass the same module" in text
    assert "`2`.\n  Pass copy.deepcopy(module) on every rank." in text

    def run(rank: int) -> None:
        pk.nn.parallelize(copy.deepcopy(module), None, {"2": ROW()})
        pk.nn.parallelize(module[2], None, ROW())  # makes another layer, and leaves this one as it is

    spawn(run)


def test_what_threads_with_other_weights_are_told() -> None:
    """Seeding them alike, which is the advice for processes, is what they probably did."""

    def run(rank: int) -> None:
        pk.nn.parallelize(nn.Sequential(linear(32, 16, seed=rank)), None, {"0": COLUMN()})

    with pytest.raises(RankError, match=r"threads of one process and share torch's random generator.* a race.\n.*Make"):
        spawn(run)
    assert "is a race" in str(pk.spawn.__doc__)
    mine, other = (agreement.seen(net()[:1], {}, True) for _ in range(2))
    other.sums[0] += 1
    alone = pk.runtime.group.current()  # no threads: as in processes
    assert "Seed all ranks alike" in told(lambda: agreement.check_alike([mine, other], alone))


# ------------------------------------------------------------------------------------------------------- state dicts
def test_nothing_is_loaded_into_a_module_without_memory() -> None:
    made = pk.nn.parallelize(net().to("meta"), None, {"0": COLUMN()})
    state = net().state_dict()
    text = told(lambda: pk.nn.load_full_state_dict(made, state))
    assert text.startswith("`0.weight` of the module is on meta, where nothing can be loaded into it.\n  Pass `a")
    pk.nn.load_full_state_dict(made, state, assign=True)
    assert torch.equal(made[0].weight, state["0.weight"])
    nothing = {name: value.to("meta") for name, value in state.items()}
    assert "`0.weight` of the state is on meta" in told(lambda: pk.nn.load_full_state_dict(made, nothing, assign=True))
    partly = nn.Sequential(linear(32, 16), nn.LayerNorm(4, device="meta"))
    pk.nn.load_full_state_dict(partly, {"0.weight": linear(32, 16).weight}, strict=False)  # leaves what is on meta
    text = told(lambda: pk.nn.load_full_state_dict(partly, {"1.weight": torch.zeros(4)}, strict=False))
    assert text.startswith("`1.weight` of the module is on meta")
