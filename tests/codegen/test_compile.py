"""Every emitted kernel compiles to a cubin on a machine without a GPU, and to the instructions it is written for."""

from __future__ import annotations

import dataclasses
import re

import pytest

from pk.artifact import Source
from pk.codegen import generate
from pk.errors import CompileFailed
from pk.ir.types import float16
from pk.runtime.compile import Binary, compile, sass
from tests.codegen import odd
from tests.dsl import test_gallery as gallery
from tests.kernels import KERNELS, specs

ODD = odd.kernels()


def source_of(name: str) -> Source:
    """The source of a kernel of the repository."""
    source: Source = KERNELS[name][0].specialise(**specs(name)).source
    return source


def clean(source: Source) -> Binary:
    """``source`` compiled; it must not spill, nor make the compilers warn or report a loss of speed."""
    binary = compile(source)
    assert binary.resources.spill_bytes == 0, binary.log
    assert binary.resources.local_bytes == 0, binary.log
    assert not re.search(r"warning|C7\d\d\d|Performance Loss|setmaxnreg", binary.log), binary.log
    return binary


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_the_repository(name: str) -> None:
    clean(source_of(name))


@pytest.mark.parametrize("name", gallery.NDIM)
def test_reference_kernels(name: str) -> None:
    clean(generate(gallery.kernel(name, float16)))


@pytest.mark.parametrize("name", ODD)
def test_corners_of_the_language(name: str) -> None:
    clean(generate(ODD[name]))


def opcodes(name: str) -> str:
    return sass(clean(source_of(name)).cubin)


def test_gemm_reduce_scatter_is_tensor_core_and_bulk_copies() -> None:
    code = opcodes("matmul_reduce_scatter")
    assert len(re.findall(r"\bHGMMA\.64x256x16\.F32\.BF16", code)) == 4  # one a k16 of the 64-deep stage
    for moved in ("UTMALDG.3D", "UTMALDG.2D", "UTMASTG.2D", "UTMAREDG.2D.ADD"):
        assert moved in code
    assert "USETMAXREG" in code


def test_main_loop_has_no_fence_of_the_whole_gpu() -> None:
    """An mbarrier arrive with cluster scope would put one into every stage (1 us each)."""
    code = opcodes("matmul")
    first, last = (f(m.start() for m in re.finditer(r"\bHGMMA", code)) for f in (min, max))
    assert "MEMBAR" not in code[first:last]


def test_register_split_is_taken() -> None:
    """Ptxas ignores setmaxnreg, and says so, if anything leaves a role's branch: then 232 registers are not there."""
    assert source_of("matmul").registers == (232, 40)
    assert "USETMAXREG.TRY_ALLOC.CTAPOOL" in opcodes("matmul")


def test_layout_of_parameters_is_proven() -> None:
    """A host that packs a member elsewhere than the compiler puts it does not compile."""
    source = source_of("matmul")
    right = "PK_OFFSETOF(params, c) == 512"
    assert right in source.text
    wrong = dataclasses.replace(source, text=source.text.replace(right, "PK_OFFSETOF(params, c) == 516"))
    with pytest.raises(CompileFailed, match=r"static assertion failed with \"pk: params\.c\""):
        compile(wrong)


def test_params_size_is_proven() -> None:
    source = source_of("matmul")
    wrong = dataclasses.replace(
        source, text=source.text.replace(f"sizeof(params) == {source.params_size}", "sizeof(params) == 64")
    )
    with pytest.raises(CompileFailed, match="pk: params"):
        compile(wrong)


def test_errors_point_at_the_users_line() -> None:
    """``#line``: what the compiler finds wrong in a statement, it reports at the statement of the user's file."""
    source = generate(ODD["epilogue"])
    line = odd.EPILOGUE.splitlines().index("                pk.store_async(out, s.c, (m, 0))")
    broken = dataclasses.replace(
        source, text=source.text.replace("store_async(p.out_map, s.c,", "store_async(p.nowhere,")
    )
    assert broken.text != source.text
    with pytest.raises(CompileFailed) as caught:
        compile(broken)
    # The text of `read` begins with two lines of its own and leaves out the empty first one.
    assert f'File "kernel.py", line {line + 2}' in str(caught.value)


def test_errors_outside_the_users_code_point_at_the_emitted_text() -> None:
    source = generate(ODD["epilogue"])
    broken = dataclasses.replace(source, text=source.text.replace("launch_close(role", "launch_shut(role"))
    number = 1 + next(i for i, text in enumerate(broken.text.split("\n")) if "launch_shut" in text)
    with pytest.raises(CompileFailed, match=rf"k\.cu\({number}\): error"):
        compile(broken)


def test_shared_memory_of_a_block_is_what_the_plan_says() -> None:
    """The map of the emitted text fits into what the launch asks for: one byte less does not compile."""
    source = source_of("matmul")
    tight = source.text.replace(
        f"sizeof(shared_map) <= {source.shared_bytes}", f"sizeof(shared_map) <= {4 * 49152 + 2 * 16384}"
    )
    assert tight != source.text
    with pytest.raises(CompileFailed, match="static assertion failed"):
        compile(dataclasses.replace(source, text=tight))
