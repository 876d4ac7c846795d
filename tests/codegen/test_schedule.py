"""Scheduling options as code: clusters, teams in turn, claimed tasks, queued signals.  Compiled, not run."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import pk
from pk.artifact import Source
from pk.codegen import generate, readable
from pk.codegen.plan import plan
from pk.errors import CompileError
from pk.ops.kernels import matmul
from pk.runtime.compile import sass
from tests import schedule_kernels
from tests.codegen.test_compile import clean, source_of
from tests.dsl.reading import read

# Pipelines, tiles and schedules of the GEMM that are meant to be fast.
SCHEDULES: dict[str, dict[str, Any]] = {
    "c128x256": {},
    "c128x256, cluster 2": {"CLUSTER": 2},
    "p128x128, 5 stages": {"PINGPONG": True, "BN": 128, "STAGES": 5},
    "p128x128, 6 stages": {"PINGPONG": True, "BN": 128, "STAGES": 6},
    "p128x128, cluster 2": {"PINGPONG": True, "BN": 128, "STAGES": 6, "CLUSTER": 2},
    "p128x192, 5 stages": {"PINGPONG": True, "BN": 192, "STAGES": 5, "P": 32},
    "p64x256, 5 stages": {"PINGPONG": True, "BM": 64, "STAGES": 5},
    "c256x192, 3 stages": {"BM": 256, "BN": 192, "STAGES": 3, "P": 32},
    "c128x192, cluster 2": {"BN": 192, "CLUSTER": 2},
}


def gemm(name: str) -> Source:
    source: Source = matmul.specialise(**SCHEDULES[name]).source
    return source


@pytest.mark.parametrize("name", SCHEDULES)
def test_gemm_schedules(name: str) -> None:
    """No spill, no note of the compilers, and no fence of the whole GPU between the first wgmma and the last."""
    code = sass(clean(gemm(name)).cubin)
    first, last = (f(m.start() for m in re.finditer(r"\bHGMMA", code)) for f in (min, max))
    assert "MEMBAR" not in code[first:last]
    assert ("UTMALDG.2D.MULTICAST" in code) == (SCHEDULES[name].get("CLUSTER") == 2)


def test_a_pair_shares_what_does_not_depend_on_its_coordinate() -> None:
    source, text = gemm("c128x256, cluster 2"), readable(gemm("c128x256, cluster 2").text)
    assert (source.cluster, source.least_blocks) == (2, 2)
    assert "load_expected(s.a, p.a_map, full, m * 128, k * 64);" in text
    assert "load_expected_shared(s.b, p.b_map, full, k * 64, n * 256);" in text
    assert "pipeline<4, config::cluster> inputs_ring;" in text
    assert "shared.inputs_ring.init(/*fill arrivals=*/1, /*drain arrivals=*/16);" in text  # 2 blocks x 8 warps
    assert "pipeline<2> output_ring;" in text


def test_halves_of_an_odd_number_of_panels_are_halves_of_their_rows() -> None:
    maps = {m.name: m.box for m in plan(matmul.specialise(BN=192, CLUSTER=2).ir).maps}
    assert maps["b_map"] == (32, 64)  # 3 panels of 64 columns: half of the 64 rows of each
    assert {m.name: m.box for m in plan(matmul.specialise(CLUSTER=2).ir).maps}["b_map"] == (64, 64)


def test_padding_tasks_keep_their_results() -> None:
    text = readable(gemm("c128x256, cluster 2").text)
    storer = text[text.index("void storer(") : text.index("- main kernel")]
    stores = re.findall(r"(.*)\n.*if \(role.issues\(\)\) store_async", storer)
    assert len(stores) == 4
    assert all("if (is_real) {" in line for line in stores)


CLUSTER = """
@pk.kernel
def k(a: pk.Global, b: pk.Global, c: pk.Global):
    p = pk.pipeline(2, a=pk.shared((128, 64), a.dtype), b=pk.shared((64, 128), b.dtype))
    for m, n in pk.tasks(pk.cdiv(c.rows, 128), pk.cdiv(c.cols, 128), cluster=2):
        x = m + 1
        with pk.loader():
            TURNS
                with p.fill() as s:
                    pk.load_async(s.a, a, (m, k))
                    pk.load_async(s.b, b, (COORD, n))
        with pk.storer():
            TURNS
                with p.drain() as s:
                    pk.store_async(c, s.a, (m, n))
"""


@pytest.mark.parametrize(
    ("turns", "coord", "shared"),
    [
        ("for k in pk.range(4):", "k", True),
        ("for k in pk.range(4):", "m", False),
        ("for k in pk.range(4):", "x", False),
        ("for k in pk.range(n):", "k", True),
        ("for k in pk.range(x):", "k", False),  # the blocks of a pair would fill the ring a different number of times
    ],
)
def test_what_depends_on_the_pair_is_not_shared(turns: str, coord: str, shared: bool) -> None:
    text = generate(read(CLUSTER.replace("TURNS", turns).replace("COORD", coord))).text
    assert ("load_expected_shared(s.b" in text) == shared
    assert "load_expected_shared(s.a" not in text
    assert ("/*drain arrivals=*/2" in text) == shared


def test_teams_pass_each_pipeline_on_after_its_last_use() -> None:
    text = readable(gemm("p128x128, 6 stages").text)
    consumer = text[text.index("void consumer(") : text.index("- storer")]
    steps = ["has_turn", "inputs_turn.take", "mma(acc", "inputs_turn.give", "finish_mma", "output_turn.take"]
    places = [consumer.index(step) for step in [*steps, "publish_stores", "output_turn.give", "inputs_turn.close"]]
    assert places == sorted(places)
    assert consumer.count("_turn.take") == consumer.count("_turn.give") == 2
    assert "role<4, 0, 1, 2>" in text
    assert "shared.inputs_ring.init(/*fill arrivals=*/1, /*drain arrivals=*/4);" in text


BRANCH = """
@pk.kernel
def k(a: pk.Global, c: pk.Global):
    x = pk.pipeline(2, t=pk.shared((64, 64), a.dtype))
    y = pk.pipeline(2, t=pk.shared((64, 64), a.dtype))
    out = pk.pipeline(2, t=pk.shared((64, 64), c.dtype))
    for m in pk.tasks(4):
        with pk.loader():
            if m > 0:
                with x.fill() as s:
                    pk.load_async(s.t, a, (m, 0))
            else:
                with y.fill() as s:
                    pk.load_async(s.t, a, (m, 0))
        with pk.consumer(warpgroups=2, pingpong=True):
            if m > 0:
                with x.drain() as s:
                    r = pk.load(s.t)
                with out.fill() as o:
                    pk.store(o.t, r)
            else:
                with y.drain() as s:
                    r = pk.load(s.t)
                with out.fill() as o:
                    pk.store(o.t, r)
        with pk.storer():
            with out.drain() as o:
                pk.store_async(c, o.t, (m, 0))
"""


def test_a_branch_takes_and_gives_inside() -> None:
    """Around it, no warpgroup would work while another does; what only the other half uses is passed on at once."""
    text = readable(generate(read(BRANCH)).text)
    consumer = text[text.index("void consumer(") : text.index("- storer")]
    then, orelse = consumer[consumer.index("if (m > 0)") :].split("} else {")
    for half, used, idle in ((then, "x", "y"), (orelse, "y", "x")):
        passed = half.index(f"{idle}_turn.take"), half.index(f"{idle}_turn.give")
        work = half.index(f"{used}_turn.take"), half.index("load(r, s.t"), half.index("publish_stores")
        assert passed[0] < passed[1] < work[0] < work[1] < half.index("out_turn.take") < work[2]
        assert half.index(f"{used}_turn.give") < half.index("out_turn.give")
        assert all(half.count(f"{p}_turn.{how}") == 1 for p in ("x", "y", "out") for how in ("take", "give"))
    assert "_turn.take" not in consumer[: consumer.index("if (m > 0)")]


MANY = """
@pk.kernel
def k(a: pk.Global, c: pk.Global, N: pk.constexpr):
    x = pk.pipeline(1, t=pk.shared((64, 64), a.dtype))
    y = pk.pipeline(1, t=pk.shared((64, 64), a.dtype))
    z = pk.pipeline(1, t=pk.shared((64, 64), a.dtype))
    u = pk.pipeline(1, t=pk.shared((64, 64), a.dtype))
    v = pk.pipeline(1, t=pk.shared((64, 64), a.dtype))
    for m in pk.tasks(4):
        with pk.loader():
            for p in (x, y, z, u, v):
                with p.fill() as s:
                    pk.load_async(s.t, a, (m, 0))
        with pk.consumer(warpgroups=N, pingpong=True):
            for p in (x, y, z, u, v):
                with p.drain() as s:
                    t = pk.load(s.t)
"""


def test_named_barriers_run_out() -> None:
    generate(read(MANY, N=2))
    with pytest.raises(CompileError, match="a pingpong consumer of 3 warpgroups uses 5 pipelines"):
        generate(read(MANY, N=3))


@pytest.mark.parametrize("name", schedule_kernels.__all__)
@pytest.mark.parametrize("dynamic", [False, True])
def test_kernels_with_options(name: str, dynamic: bool) -> None:
    ndim = {"out": 3, "twice": 3, **({"x": 3} if name == "ring_gather" else {})}
    kernel = getattr(schedule_kernels, name)
    specs = {t: pk.spec(torch.bfloat16, ndim.get(t, 2)) for t in kernel.signature.tensors}
    source = kernel.specialise(**specs, DYNAMIC=dynamic).source
    assert ("task_claims claims;" in source.text) == dynamic
    clean(source)


def test_one_role_claims_and_all_read() -> None:
    specs = {"a": pk.spec(torch.bfloat16, 2), "b": pk.spec(torch.bfloat16, 2), "out": pk.spec(torch.bfloat16, 3)}
    source = schedule_kernels.copy_halves.specialise(**specs, DYNAMIC=True).source
    text = readable(source.text)
    loader, storer = text[text.index("void loader(") : text.index("- storer")], text[text.index("void storer(") :]
    assert loader.count("claims.next<true>(claims_at, role, p.compute_work_offset)") == 2
    assert storer.count("claims.next<false>(claims_at, role, p.compute_work_offset)") == 2
    assert "shared.claims.init(/*warps=*/2);" in text
    assert ("int", "compute.work.offset") in [(f.kind, f.key) for f in source.fields]
    assert source.uses_signals


def test_choice_between_tensors_is_one_between_maps() -> None:
    specs = {"x": pk.spec(torch.bfloat16, 3), "out": pk.spec(torch.bfloat16, 3)}
    text = schedule_kernels.ring_gather.source(**specs)
    assert "load_expected(s.x, (step == 0 ? p.x_map : p.hop_maps[me]), full, here, m * 64, c * 64);" in text


def test_blocks_of_two_communicators() -> None:
    specs = {t: pk.spec(torch.bfloat16, 3 if t in ("out", "twice") else 2) for t in ("x", "out", "twice", "mine")}
    source = schedule_kernels.two_communicators.specialise(**specs).source
    assert (source.comm_sms, source.least_blocks) == (3, 4)
    assert "return max(1, min(config::communicator_sms, int(gridDim.x) / 2 - 1));" in source.text
    assert "return max(1, min(config::communicator_2_sms, int(gridDim.x) / 2 - communicator_blocks()));" in source.text


def test_signals_of_a_storer_wait_in_a_queue() -> None:
    text = readable(source_of("all_gather_matmul").text)
    storer = text[text.index("void communicator_storer(") : text.index("- main kernel")]
    assert "signal_queue<2> deferred(shared.signal_slots);" in storer  # a ring of 3: two groups may be under way
    assert "ring_ring.wait_full(ring_at, role, SITE_RING_DRAIN, deferred);" in storer
    order = ["release_after_store", "deferred.committed(role)", "deferred.signal(role, ready", "deferred.flush(role)"]
    places = [storer.index(step) for step in order]
    assert places == sorted(places)
    assert storer.index("deferred.flush(role)") < storer.index("store_wait<0>()")


def test_the_queue_is_flushed_before_a_wait() -> None:
    text = readable(source_of("matmul_reduce_scatter").text)
    lines = [line.strip() for line in text.splitlines()]
    waits = [i for i, line in enumerate(lines) if line.startswith("wait(role")]
    assert waits
    assert all(lines[i - 1] == "deferred.flush(role);" for i in waits)


def test_signals_to_ranks_in_a_row_share_a_release() -> None:
    text = generate(
        read("""
@pk.kernel
def k(n: int):
    ready = pk.signals(pk.world_size())
    for i in pk.tasks(n):
        for r in pk.ranks_from(pk.rank() + 1, pk.world_size() - 1):
            pk.signal(ready, pk.rank(), r)
""")
    ).text
    assert text.count("signals_begin(role") == 1
    assert "signal_next(role, adds, ready" in text
    assert text.index("signals_begin(role") < text.index("for (int r_i") < text.index("signal_next(role")


def test_warpgroups_that_stagger_multiply_in_turn() -> None:
    kernel = read("""
@pk.kernel
def k(a: pk.Global, b: pk.Global, c: pk.Global):
    qs = pk.pipeline(1, q=pk.shared((128, 64), a.dtype))
    ks = pk.pipeline(2, k=pk.shared((64, 128), b.dtype))
    out = pk.pipeline(1, o=pk.shared((128, 128), c.dtype))
    for m in pk.tasks(pk.cdiv(c.rows, 128)):
        with pk.loader():
            with qs.fill() as s:
                pk.load_async(s.q, a, (m, 0))
            for j in pk.range(pk.cdiv(b.cols, 128)):
                with ks.fill() as s:
                    pk.load_async(s.k, b, (0, j))
        with pk.consumer(warpgroups=2, stagger=True):
            total = pk.zeros((128, 128), pk.float32)
            with qs.drain() as q:
                for j in pk.range(pk.cdiv(b.cols, 128)):
                    with ks.drain() as t:
                        s = pk.zeros((128, 128), pk.float32)
                        pk.mma(s, q.q, t.k)
                    total = total + s * s
            with out.fill() as s:
                pk.store(s.o, total)
        with pk.storer():
            with out.drain() as s:
                pk.store_async(c, s.o, (m, 0))
""")
    source = generate(kernel)
    clean(source)
    consumer = source.text[source.text.index("void consumer(") : source.text.index("void storer(")]
    steps = ["for (int j", "mma_order.take", "mma(s,", "mma_order.give", "finish_mma", "total(ri, ci) +"]
    places = [consumer.index(step) for step in [*steps, "mma_order.close"]]
    assert places == sorted(places)
