"""Names that C++, CUDA or the device headers keep for themselves, and names that are not ASCII."""

from __future__ import annotations

import re

import pytest

from pk.artifact import Source
from pk.codegen import generate
from pk.codegen.names import Names, entry, enumerator, shared_member
from pk.ir import nodes as ir
from pk.ir.types import float32
from pk.runtime.compile import compile
from tests.dsl.reading import read

# One kernel with every kind of name: kernel, tensors, pipelines, fields, stages, signals, scratch, scalars, variables.
KERNEL = """
@pk.kernel
def NAME(T0: pk.Global, T1: pk.Parallel, V0: int, V1: float):
    P0 = pk.pipeline(2, F0=pk.shared((64, 64), T0.dtype))
    P1 = pk.pipeline(1, F0=pk.shared((64, 64), T0.dtype), F1=pk.shared((64, 64), T0.dtype))
    S0 = pk.signals(4)
    for m, n in pk.tasks(pk.cdiv(T0.rows, 64), pk.cdiv(T0.cols, 64)):
        with pk.loader():
            with P0.fill() as G0:
                pk.load_async(G0.F0, T0, (m, n))
        with pk.consumer():
            with P0.drain() as G0:
                with P1.fill() as G1:
                    L0 = pk.load(G0.F0) + V1
                    L1 = m + V0
                    pk.store(G1.F0, L0)
                    pk.store(G1.F1, L0 + L1)
        with pk.storer():
            with P1.drain() as G0:
                pk.store_async(T1[pk.rank()], G0.F0, (m, n))
                pk.signal(S0, m % 4, rank=0)
                pk.wait(S0, m % 4, 1)
"""
KINDS = ("NAME", "T0", "T1", "V0", "V1", "P0", "P1", "F0", "F1", "G0", "G1", "S0", "L0", "L1")
WORDS = """ünputs 名 größe ẞ NULL CUDART_VERSION CUDA_VERSION printf sin malloc free std va_list isnan unix PK_DEVICE
    INFINITY NAN launch claims exchanged context tensor_map params site u32 shared memory main main_kernel loader
    config double template threadIdx task role P_ring P_stage P_turn a__b __x _X ctx p min
    stage full cursor""".split()  # fmt: skip
PAIRS = [("a", "a_ring"), ("a", "a_stage"), ("x_", "x__"), ("名", "u540d"), ("ü", "u"), ("NULL", "NULL_"), ("é", "è"),
         ("user_launch", "launch"), ("a_at", "a"), ("ß", "ẞ"), ("a_map", "a"), ("a_rows", "a"), ("a_peers", "a"),
         ("a_full", "a"), ("launch", "launch_ring"), ("x_ring", "user_x"), ("site", "Site"), ("名", "前")]  # fmt: skip


def kernel(names: dict[str, str]) -> ir.Kernel:
    """KERNEL with some of its names replaced."""
    text = KERNEL
    for old, new in names.items():
        text = re.sub(rf"\b{old}\b", new, text)
    name = names.get("NAME", "NAME")
    tensors = [names.get("T0", "T0"), names.get("T1", "T1")]
    return read(text + f"\nk = {name}\n", dtype=dict.fromkeys(tensors, float32))


def written(source: Source) -> None:
    """Check that the text is ASCII but for comments."""
    code = "\n".join(line.split("//")[0] for line in source.text.split("\n") if not line.startswith("#line"))
    assert code.isascii(), re.findall(r".*[^\x00-\x7f].*", code)


def rotated(words: list[str], by: int) -> dict[str, str]:
    """A word for each kind of name, all different."""
    kinds = KINDS[:-3] + KINDS[-2:]  # S0 and a variable may share
    return {kind: words[(i + by) % len(words)] for i, kind in enumerate(kinds)}


@pytest.mark.parametrize("word", WORDS)
def test_a_word_in_every_place_is_emitted(word: str) -> None:
    for kind in KINDS:
        written(generate(kernel({kind: word})))


@pytest.mark.parametrize("by", range(0, len(WORDS), 7))
def test_words_in_every_place_compile(by: int) -> None:
    compile(generate(kernel(rotated(WORDS, by))))


@pytest.mark.parametrize("word", ["größe", "NULL", "printf", "context", "launch"])
def test_one_word_for_things_of_all_kinds_compiles(word: str) -> None:
    compile(generate(kernel({"NAME": word, "P0": word, "F0": word, "G1": f"{word}_", "T0": f"{word}_1"})))
    compile(generate(kernel({"T0": word, "F1": word, "L1": f"{word}_rows"})))


@pytest.mark.parametrize("pair", PAIRS)
def test_two_words_in_every_place(pair: tuple[str, str]) -> None:
    first, second = pair
    for x, y in (("P0", "P1"), ("T0", "T1"), ("V0", "V1"), ("F0", "F1"), ("L0", "L1"), ("P0", "S0"), ("T0", "S0")):
        written(generate(kernel({x: first, y: second})))
    kinds = {"P0": first, "P1": second, "F0": first, "F1": second, "L0": f"{first}x", "V0": f"{second}x"}
    compile(generate(kernel(kinds | {"T0": f"{first}t", "T1": f"{second}t"})))


def test_words_are_identifiers_and_differ() -> None:
    every = [*WORDS, *(w for pair in PAIRS for w in pair), *(f"{w}_" for w in WORDS)]
    words = sorted(set(every))
    names = Names()
    for made in ([shared_member(w) for w in words], [names.member(w) for w in words], [names.local(w) for w in words]):
        assert len(set(made)) == len(words)
        assert all(re.fullmatch(r"[A-Za-z_]\w*", w, re.ASCII) for w in made)
    assert entry("printf") == "pk_printf" and entry("ünputs") == "pk_unputs" and entry("_x") == "pk_x"
    assert enumerator("SITE_größe_fill") == "SITE_GROUDFE_FILL"
