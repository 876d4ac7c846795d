"""The mutation engine itself: every operator does what it says, to one place, and nothing else."""

from __future__ import annotations

import pytest

import pk
from pk.codegen import generate
from pk.ir import nodes as ir
from pk.ir.mutate import Mutant, mutants, weakened
from pk.ir.mutations import EDITS, OPERATORS
from pk.ir.split import statements
from pk.ir.text import text
from tests.sim import build
from tests.sim.build import RANK, WORLD, do, drain, fill, loop, memory, op, tensor, var


def _kernel() -> ir.Kernel:
    """x goes to the next rank's scratch and out again; ``begun`` and ``met`` are counters."""
    tile = build.shared(16, 16)
    s, t = ir.Shared("ring", "s", tile), ir.Shared("ring", "t", tile)
    right = op("%", op("+", RANK, 1), WORLD)
    at = op("*", var("m"), 16)
    loader = ir.Role(
        "loader",
        (
            loop("k", 0, 2, fill("ring", *(do("load_async", d, memory("x", at, c)) for d, c in ((s, 0), (t, 16))))),
            do("wait", build.counter("begun", var("m")), 2),
            fill("back", do("load_async", ir.Shared("back", "s", tile), memory("half", at, 0, rank=RANK))),
        ),
    )  # fmt: skip
    storer = ir.Role(
        "storer",
        (
            loop(
                "j", 0, 2,
                drain("ring", do("store_async", memory("half", at, 0, rank=right), s),
                      do("store_async", memory("out", at, 0, everyone=True), t)),
            ),
            do("signal", build.counter("begun", var("m")), right, 1),
            do("barrier", build.counter("met")),
            do("signal_all", build.counter("begun", var("m")), 1),
            drain("back", do("store_async", memory("y", at, 0), ir.Shared("back", "s", tile))),
        ),
    )  # fmt: skip
    rows = ir.Dim("x", 0)
    return ir.Kernel(
        "k",
        (tensor("x", 2), tensor("out", 2, parallel=True), tensor("y", 2)),
        (),
        (ir.Signals("begun", (rows,)), ir.Signals("met", ())),
        (ir.Scratch("half", (rows, ir.Const(16, build.INT)), build.bfloat16),),
        (ir.Pipeline("ring", 2, (("s", tile), ("t", tile))), ir.Pipeline("back", 1, (("s", tile),))),
        (),
        (ir.Tasks((var("m"),), (rows,), (loader, storer)),),
    )


KERNEL = _kernel()


def made(operator: str, words: str = "") -> Mutant:
    """The only mutant of an operator whose name has ``words`` in it."""
    (found,) = (m for m in mutants(KERNEL) if m.operator == operator and words in m.name)
    return found


def difference(mutant: Mutant) -> tuple[list[str], list[str]]:
    """Lines that the mutant has not, and lines that only it has, as the IR prints."""
    old, new = text(KERNEL).splitlines(), text(mutant.kernel).splitlines()
    gone, come = list(old), list(new)
    for line in new:
        if line in gone:
            gone.remove(line)
    for line in old:
        if line in come:
            come.remove(line)
    return [line.strip() for line in gone], [line.strip() for line in come]


BEGUN = "signal(begun[m], (rank + 1) % world, 1)"
LINES: dict[tuple[str, str], tuple[list[str], list[str]]] = {
    ("drop-wait", "without"): (["wait(begun[m], 2)"], []),
    ("drop-wait", "barrier"): (["barrier(met[])"], ["signal_all(met[], 1)"]),
    ("drop-signal", "without `signal("): ([BEGUN], []),
    ("drop-signal", "barrier"): (["barrier(met[])"], ["wait(met[], world)"]),
    ("wait-less", "begun"): (["wait(begun[m], 2)"], ["wait(begun[m], 1)"]),
    ("wait-more", "begun"): (["wait(begun[m], 2)"], ["wait(begun[m], 3)"]),
    ("wait-less", "barrier"): (["barrier(met[])"], ["signal_all(met[], 1)", "wait(met[], world - 1)"]),
    ("scope", "signal("): ([BEGUN], [BEGUN[:-1] + ", scope='block')"]),
    ("completion", "signal("): ([BEGUN], [BEGUN[:-1] + ", completion=False)"]),
    ("fence", ""): (["wait(begun[m], 2)"], ["wait(begun[m], 2, fence=False)"]),
    ("tile-off", "x[m * 16, 0]` of load_async: dimension 0"): (
        ["load_async(ring.s, x[m * 16, 0])"],
        ["load_async(ring.s, x[m * 16 + 16, 0])"],
    ),
    ("index-off", "of wait"): (["wait(begun[m], 2)"], ["wait(begun[m + 1], 2)"]),
    ("wrong-owner", "to the next rank"): ([BEGUN], ["signal(begun[m], ((rank + 1) % world + 1) % world, 1)"]),
    ("one-rank", "out@all"): (
        ["store_async(out@all[m * 16, 0], ring.t)"],
        ["store_async(out@rank[m * 16, 0], ring.t)"],
    ),
    ("one-rank", "signal_all"): (["signal_all(begun[m], 1)"], ["signal(begun[m], rank, 1)"]),
    ("skip-last", "loader"): (["for k in range(0, 2):"], ["for k in range(0, 1):"]),
    ("skip-last", "without the last `m`"): (
        ["for m in tasks(x.rows, group=8):"],
        ["for m in tasks(x.rows - 1, group=8):"],
    ),
    ("shrink-signals", "begun"): (["signals begun[x.rows]"], ["signals begun[x.rows - 1]"]),
    ("shrink-scratch", "dimension 1"): (["scratch half[x.rows, 16] bfloat16"], ["scratch half[x.rows, 15] bfloat16"]),
}  # fmt: skip


@pytest.mark.parametrize(("operator", "words"), LINES)
def test_an_operator_changes_these_lines(operator: str, words: str) -> None:
    assert difference(made(operator, words)) == LINES[operator, words]


def test_a_signal_goes_before_all_its_stores_and_no_further() -> None:
    storer = next(s for s in statements(made("signal-early", "`signal(").kernel.compute) if _is_role(s, "storer"))
    assert isinstance(storer, ir.Role)
    assert [getattr(s, "op", type(s).__name__) for s in storer.body[:2]] == ["signal", "For"]


def _is_role(s: ir.Statement, kind: str) -> bool:
    return isinstance(s, ir.Role) and s.kind == kind


@pytest.mark.parametrize("mode", ["fill", "drain"])
def test_a_stage_taken_early(mode: str) -> None:
    mutant = made(f"early-{mode}", "ring")
    early = [s.pipeline for s in statements(mutant.kernel.compute) if isinstance(s, ir.Stage) and s.early]
    assert early == ["ring"]


def test_tiles_are_swapped_in_one_stage_only() -> None:
    gone, come = difference(made("swap-tiles", "in fill()"))
    assert gone == ["load_async(ring.s, x[m * 16, 0])", "load_async(ring.t, x[m * 16, 16])"]
    assert come == ["load_async(ring.t, x[m * 16, 0])", "load_async(ring.s, x[m * 16, 16])"]


def test_stages_are_swapped() -> None:
    two = (fill("ring", do("wait", build.counter("begun", 0), 1)), fill("back"))
    kernel = build.replace(KERNEL, compute=(ir.Role("loader", two),))
    (mutant,) = mutants(kernel, frozenset({"swap-stages"}))
    (role,) = mutant.kernel.compute
    assert isinstance(role, ir.Role)
    assert role.body == two[::-1]


def test_every_operator_has_mutants_and_its_line_of_explanation() -> None:
    assert set(OPERATORS) == set(EDITS) | {"shrink-signals", "shrink-scratch"}
    assert {m.operator for m in mutants(KERNEL)} == set(OPERATORS) - {"swap-stages"}


def test_names_are_unique_and_say_the_same_every_time() -> None:
    names = [m.name for m in mutants(KERNEL)]
    assert len(set(names)) == len(names) > 40
    assert names == [m.name for m in mutants(_kernel())]


def test_each_is_another_kernel() -> None:
    for mutant in mutants(KERNEL):
        assert mutant.kernel != KERNEL, mutant.name


def test_what_only_the_simulator_understands_gets_no_code() -> None:
    weak = {m.operator for m in mutants(KERNEL) if weakened(m.kernel) is not None}
    assert weak == {"scope", "completion", "fence", "early-fill", "early-drain"}
    assert weakened(KERNEL) is None
    for mutant in mutants(KERNEL):
        if mutant.operator in weak:
            with pytest.raises(ValueError, match="mutant"):
                generate(mutant.kernel)


def test_weak_mutants_only_where_they_concern_something() -> None:
    """A fence orders bulk copies after it; a completion is waited for by signals after bulk stores."""

    @pk.kernel
    def plain(x: pk.Global, y: pk.Global):
        done = pk.signals()
        for i in pk.tasks(4):
            pk.store(y, pk.load(x, (i, 0), (1, 32)), (i, 0))
            pk.signal(done, (), pk.rank())
            pk.wait(done, (), 1)

    found = {m.operator for m in mutants(plain.specialise().ir)}
    assert "scope" in found and "signal-early" in found
    assert not found & {"fence", "completion"}
