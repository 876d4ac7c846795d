"""What TMA cannot address, word for word; what it can, as the driver is told."""

from __future__ import annotations

from typing import Any

import pytest

from pk.errors import ArgumentError
from pk.runtime import driver, tensormap

A = "`a` of shape {} and strides {} (bfloat16)"


@pytest.mark.parametrize(
    ("shape", "strides", "ptr", "text"),
    [
        ((64, 128), (1, 64), 0,
         A + " is not contiguous in its last dimension: its stride there is 64, and TMA needs 1.\n"
         "  Pass a copy: `a.contiguous()`."),
        ((64, 100), (100, 1), 0,
         A + ": the stride of dimension 0 is 100 elements = 200 bytes, and TMA needs a multiple of 16 bytes.\n"
         "  Pad it to a multiple of 8 elements, and pass a view of the padded tensor."),
        ((4, 64, 128), (8195, 128, 1), 0,
         A + ": the stride of dimension 0 is 8195 elements = 16390 bytes, and TMA needs a multiple of 16 bytes.\n"
         "  Pad it to a multiple of 8 elements, and pass a view of the padded tensor."),
        ((64, 128), (128, 1), 0x1002,
         A + " begins at address 0x1002, 2 bytes past a multiple of 16; TMA needs a 16-byte aligned base.\n"
         "  Slice at multiples of 8 elements, or pass a copy: `a.clone()`."),
        ((64, 128), (0, 1), 0,
         A + ": dimension 0 is expanded (stride 0); its elements share memory.\n"
         "  Pass a copy: `a.contiguous()`."),
        ((2, 2**32 + 8), (2**32 + 8, 1), 0,
         A + ": dimension 1 has extent 4294967304, and TMA allows at most 2**32.\n"
         "  Split the tensor with views."),
        ((2, 8), (2**39, 1), 0,
         A + ": the stride of dimension 0 is 1099511627776 bytes, and TMA allows less than 2**40.\n"
         "  Pass a copy that is packed more densely."),
        ((0, 128), (128, 1), 0, A + " is empty: dimension 0 has extent 0, and there is nothing to address."),
        ((1, 1, 1, 1, 8), (8, 8, 8, 8, 1), 0, A + " has 5 dimensions; pk's tensors have 1 to 4.\n  Pass a view."),
    ],
)  # fmt: skip
def test_what_tma_cannot_address(shape: tuple[int, ...], strides: tuple[int, ...], ptr: int, text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        tensormap.validate("a", "bfloat16", shape, strides, ptr)
    assert str(caught.value) == text.format(shape, strides)


@pytest.mark.parametrize(
    ("box", "swizzle", "text"),
    [
        ((257, 64), 128, "has 257 elements along dimension 0, and TMA moves 1 to 256.\n  Use a smaller tile."),
        ((64, 512), 0, "has 512 elements along dimension 1, and TMA moves 1 to 256.\n  Use a smaller tile."),
        ((64, 4), 32, "has rows of 8 bytes, and TMA needs a multiple of 16 bytes.\n"
         "  Make it a multiple of 8 elements wide."),
        ((64, 128), 128, "has rows of 256 bytes, wider than its swizzle of 128 bytes.\n"
         "  Move it in panels of 64 elements."),
    ],
)  # fmt: skip
def test_boxes_tma_cannot_move(box: tuple[int, ...], swizzle: int, text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        tensormap.validate_box("a", "bfloat16", box, swizzle)
    assert str(caught.value) == f"the tile {box} of `a` (bfloat16) {text}"


def test_a_dtype_tma_cannot_move() -> None:
    with pytest.raises(ArgumentError, match="`a` has dtype int64, which TMA cannot move"):
        tensormap.validate("a", "int64", (8, 8), (8, 1))


@pytest.mark.parametrize(
    ("shape", "strides", "size", "want"),
    [
        ((64, 128), (128, 1), 2, (128, 1)),
        ((1, 128), (3, 1), 2, (128, 1)),  # the odd stride of one row means nothing
        ((1, 100), (100, 1), 2, (104, 1)),  # nor must it be made one that TMA refuses
        ((128, 1), (8, 5), 2, (8, 1)),
        ((1, 64, 128), (7, 128, 1), 2, (8192, 128, 1)),
        ((64, 1, 128), (128, 1, 1), 2, (128, 128, 1)),
        ((1,), (9,), 4, (1,)),
    ],
)
def test_strides_of_extent_1_do_not_matter(
    shape: tuple[int, ...], strides: tuple[int, ...], size: int, want: tuple[int, ...]
) -> None:
    assert tensormap.normalised(shape, strides, size) == want
    tensormap.validate("a", {2: "bfloat16", 4: "float32"}[size], shape, strides)


def test_a_column_with_a_row_pitch_tma_cannot_step_is_refused() -> None:
    with pytest.raises(ArgumentError, match="the stride of dimension 0 is 1 elements = 2 bytes"):
        tensormap.validate("a", "bfloat16", (128, 1), (1, 1))


def test_encode_tells_the_driver_innermost_first_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def encode_tiled(*arguments: Any) -> bytes:
        calls.append(arguments)
        return bytes(128)

    monkeypatch.setattr(driver, "encode_tiled", encode_tiled)
    tensormap.encode.cache_clear()
    arguments = (0x7000, "bfloat16", (2, 96, 200), (19968, 208, 1), (1, 64, 64), 128)
    for _ in range(3):
        assert len(tensormap.encode(*arguments, "a")) == 128
    tensormap.encode(0x7000, "float8_e4m3fn", (1, 64), (5, 1), (1, 32), 32)
    tensormap.encode.cache_clear()
    assert calls == [
        ("BFLOAT16", 0x7000, (200, 96, 2), [416, 39936], (64, 64, 1), "128B"),
        ("UINT8", 0x7000, (64, 1), [64], (32, 1), "32B"),
    ]


def test_encode_validates(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="`c` of shape"):
        tensormap.encode(8, "float32", (8, 8), (8, 1), (8, 8), 32, "c")
    with pytest.raises(ArgumentError, match=r"the tile \(512, 8\) of `c`"):
        tensormap.encode(0, "float32", (8, 8), (8, 1), (512, 8), 32, "c")
    with pytest.raises(ArgumentError, match=r"the tile \(8,\) of `c` has 1 dimensions, the tensor 2"):
        tensormap.encode(0, "float32", (8, 8), (8, 1), (8,), 32, "c")
