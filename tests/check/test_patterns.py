"""Each real mistake of ``patterns/`` is caught, exactly; its right form is clean."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pk
from pk import env
from pk.__main__ import main
from pk.codegen.cluster import shared_loads
from pk.ir import nodes as ir
from pk.ir import split
from pk.ir.types import float32
from pk.sim import SimTensor, simulate
from pk.sim.checker import Checker
from pk.sim.findings import Finding
from tests.check import patterns
from tests.check.patterns.pattern import Case, Pattern, Refused, tags

ROOT = Path(__file__).parents[2]
MODULES = {
    m.name: importlib.import_module(f"{patterns.__name__}.{m.name}")
    for m in pkgutil.iter_modules(patterns.__path__)
    if m.name != "pattern"
}
PATTERNS: dict[str, Pattern] = {name: module.PATTERN for name, module in MODULES.items()}
WRONG = [(name, case) for name, p in PATTERNS.items() for case in p.wrong]
RIGHT = [(name, case) for name, p in PATTERNS.items() for case in p.right]
WEAKENED = [(name, which) for name, p in PATTERNS.items() for which in p.weakened]
REFUSED = [(name, kernel) for name, p in PATTERNS.items() for kernel in p.refused]

SOURCES = {
    "ROCm/iris#462", "ROCm/iris#463", "ROCm/iris#465", "jax-ml/jax#30159", "NVIDIA/Megatron-LM#7263",
    "deepseek-ai/DeepGEMM#429", "flashinfer-ai/flashinfer#2665", "vllm-project/vllm#25892",
}  # fmt: skip
OWN = {
    "barrier_all, wait", "gemm_ar", "wait", "epilogue_kernel", "gemm_rs", "NUM_BLOCKS", "tile counts", "ag_gemm",
}  # fmt: skip


def test_every_mistake_has_its_pattern() -> None:
    assert {p.source for p in PATTERNS.values()} == SOURCES | {f"ParallelKittens {what}" for what in OWN}
    for name, p in PATTERNS.items():
        assert p.right, name
        assert p.wrong or (p.refused and p.weakened), name


# ------------------------------------------------------------------------------------------------ pk.check
def check(pattern: Pattern, case: Case, schedules: int, world: int | None = None, seed: int = 0) -> pk.Check:
    """``pk.check`` of one kernel of a pattern."""
    world = world or pattern.world
    per_rank = [pattern.arguments(rank, world) for rank in range(world)]
    given = [list(position) for position in zip(*per_rank, strict=True)]
    options = {"sms": pattern.sms, **pattern.options, **case.options}
    reference = {case.kernel.signature.names[pattern.result]: [pattern.reference(r, world) for r in range(world)]}
    return pk.check(
        case.kernel, *given, world_size=world, schedules=schedules, seed=seed, reference=reference, **options
    )


def tagged(findings: Iterable[Finding]) -> set[tuple[str, frozenset[str]]]:
    """Kinds and tagged places."""
    found = set()
    for f in findings:
        places = [(tags(p.span.file).get(p.span.line, f"line {p.span.line}"), p.role) for p in f.places]
        found.add((f.kind, frozenset(f"{tag}:{role}" for tag, role in places)))
    return found


@pytest.mark.parametrize(("schedules", "seed"), [(8, 0), (1, 11)])
@pytest.mark.parametrize(("name", "case"), WRONG, ids=str)
def test_the_mistake_is_caught(name: str, case: str, schedules: int, seed: int) -> None:
    """In eight schedules, and in one: races are seen in schedules in which they do no harm."""
    pattern = PATTERNS[name]
    expected = pattern.cases[case].expected
    result = check(pattern, pattern.cases[case], schedules=schedules, seed=seed)
    assert not result.ok
    assert tagged(result.findings) == {(e.kind, e.places) for e in expected}, str(result)
    for e in expected:
        texts = [str(f) for f in result.findings if f.kind == e.kind]
        assert any(all(word in text for word in e.says) for text in texts), (e.says, texts)


@pytest.mark.parametrize(("name", "case"), RIGHT, ids=str)
def test_the_right_form_is_clean(name: str, case: str) -> None:
    pattern = PATTERNS[name]
    result = check(pattern, pattern.cases[case], schedules=25)
    assert result.ok, str(result)


@pytest.mark.parametrize("world", [1, 3, 8])
@pytest.mark.parametrize(("name", "case"), RIGHT, ids=str)
def test_the_right_form_is_clean_on_any_number_of_ranks(name: str, case: str, world: int) -> None:
    result = check(PATTERNS[name], PATTERNS[name].cases[case], schedules=3, world=world)
    assert result.ok, str(result)


@pytest.mark.parametrize(("name", "kernel"), REFUSED, ids=str)
def test_what_cannot_be_written_is_a_compile_error(name: str, kernel: str) -> None:
    refused: Refused = PATTERNS[name].refused[kernel]
    with pytest.raises(pk.CompileError) as error:
        refused.kernel.ir(*refused.specs)
    for word in refused.says:
        assert word in str(error.value)


@pytest.mark.parametrize(("name", "case"), RIGHT, ids=str)
def test_right_results_without_a_checker(name: str, case: str) -> None:
    """The kernels are real: they compute what they say, under any schedule."""
    pattern = PATTERNS[name]
    for seed in range(4):
        with env.overriding(PK_SEED=str(seed)):
            results = pattern.launch(pattern.cases[case])
        for rank, result in enumerate(results):
            assert torch.equal(result, pattern.reference(rank, pattern.world))


# ------------------------------------------------------------------------------------- what a compiler could get wrong
def weakly(block: ir.Block, op: str, attrs: tuple[tuple[str, object], ...]) -> ir.Block:
    """``block`` with ``attrs`` on every op of name ``op``."""
    made: list[ir.Statement] = []
    for s in block:
        if isinstance(s, ir.Do) and s.op == op:
            made.append(replace(s, attrs=(*s.attrs, *attrs)))
        elif isinstance(s, ir.Tasks | ir.Role | ir.For | ir.Stage):
            made.append(replace(s, body=weakly(s.body, op, attrs)))
        else:
            made.append(s)
    return tuple(made)


@pytest.mark.parametrize(("name", "which"), WEAKENED, ids=str)
def test_the_checker_would_see_a_compiler_that_forgets(name: str, which: str) -> None:
    """Orders that the compiler always writes are known to the checker one by one: without one there is a race."""
    pattern = PATTERNS[name]
    w = pattern.weakened[which]
    kernel = pattern.cases[w.case].kernel
    given = [pattern.arguments(rank, pattern.world) for rank in range(pattern.world)]
    made = kernel.specialise(*(pk.spec(t.dtype, t.ndim) for t in given[0])).ir
    weak = replace(made, compute=weakly(made.compute, w.op, w.attrs))
    assert (weak != made) == bool(w.op)
    for k, exit_words in ((made, None), (weak, w.exit_words)):
        found = set()
        for seed in range(4):
            args = [
                {n: SimTensor(t.numpy().copy(), float32) for n, t in zip(kernel.signature.tensors, mine, strict=True)}
                for mine in given
            ]
            checker = Checker(exit_words=exit_words)
            simulate(k, args, seed=seed, checker=checker)
            found |= tagged(checker.findings)
        broken = k is weak or exit_words is not None
        assert found == ({(w.expected.kind, w.expected.places)} if broken else set())


def test_blocks_that_need_not_agree_do_not_share_loads() -> None:
    """The real DeepGEMM#429: the blocks of a pair bring each other halves only if both make every load."""
    clustered: pk.Kernel = MODULES["straddling_pair"].clustered
    specs = (pk.spec(torch.bfloat16, 2), pk.spec(torch.float32, 2))
    shared = {
        even: len(shared_loads(split.slice_role(clustered.specialise(*specs, EVEN=even).ir.compute, "loader")))
        for even in (False, True)
    }
    assert shared == {False: 0, True: 1}


HARMLESS = ("elect.sync", "setmaxnreg", "%%globaltimer", '("" :', "wgmma.mma_async")
"""Instructions that touch no memory which C++ code touches."""


def test_no_wait_lets_the_compiler_move_memory_accesses() -> None:
    """ParallelKittens' mbarrier wait had no "memory" clobber: loads after it could be moved before it."""
    seen = 0
    for path in (ROOT / "pk" / "include" / "pk").rglob("*.cuh"):
        for match in re.finditer(r"asm volatile(\(.*?\));", path.read_text(encoding="utf-8"), re.DOTALL):
            seen += 1
            assert '"memory"' in match[1] or any(word in match[1] for word in HARMLESS), f"{path.name}: {match[1]}"
    assert seen > 90


# --------------------------------------------------------------------------------------------- by hand
@pytest.mark.parametrize("function", ["wrong", "fixed"])
@pytest.mark.parametrize("name", ["clear_after_barrier", "all_resident"])
def test_the_command(name: str, function: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(MODULES[name].__file__ or "")
    status = main(["check", f"{path}:{function}", "--schedules", "6"])
    out = capsys.readouterr().out
    assert status == (1 if function == "wrong" else 0), out
    for e in PATTERNS[name].cases[function].expected:
        assert e.kind in out


def test_tags_are_on_the_lines_that_say_so() -> None:
    """A tag that no expectation names, or the reverse, is a mistake of the tests."""
    for name, module in MODULES.items():
        p = PATTERNS[name]
        expected = [e for case in p.cases.values() for e in case.expected] + [w.expected for w in p.weakened.values()]
        named = {place.partition(":")[0] for e in expected for place in e.places}
        assert set(tags(str(module.__file__)).values()) == named, name
