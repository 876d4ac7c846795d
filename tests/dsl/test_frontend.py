"""Signatures, specialisations, sources and fingerprints."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import pk
from pk import errors
from pk.dsl.frontend import Specialization, TensorSpec, build, fingerprint
from pk.dsl.signature import Signature
from pk.dsl.source import Source
from pk.ir.types import bfloat16, float16
from tests.dsl.reading import load, read, refusal

CONSTANT = 3


@pk.function
def helper(x: Any) -> Any:
    return x + CONSTANT


def kernel(a: pk.Global, b: pk.Parallel, n: int, s: float = 0.5, BM: pk.constexpr = 128, opt: pk.Global = None) -> None:  # type: ignore[assignment]
    """Uses a helper, a module constant and a name that a string annotation must resolve."""
    x = helper(n)
    for _m in pk.range(x):
        pass


def test_signature() -> None:
    signature = Signature.of(kernel)
    assert signature.names == ("a", "b", "n", "s", "BM", "opt")
    assert signature.tensors == {"a": "global", "b": "parallel", "opt": "global"}
    assert signature.scalars == {"n": "int", "s": "float"}
    assert signature.constants == ("BM",)
    assert signature.optional("opt")
    assert not signature.optional("a")
    assert signature.bind((1, 2), {"n": 3}) == {"a": 1, "b": 2, "n": 3, "s": 0.5, "BM": 128, "opt": None}
    assert signature.scalar("n", 7) == 7
    assert signature.scalar("s", 7) == 7.0


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((1,), {}, "kernel `kernel` is missing `b`, `n`.\n  Its parameters: a, b, n, s, BM, opt."),
        (range(7), {}, "kernel `kernel` takes 6 arguments and got 7.\n  Its parameters: a, b, n, s, BM, opt."),
        ((1, 2, 3), {"bm": 4}, "kernel `kernel` has no parameter `bm`. Did you mean `BM`?\n  "
                               "Its parameters: a, b, n, s, BM, opt."),
        ((1, 2, 3), {"optt": 4}, "kernel `kernel` has no parameter `optt`. Did you mean `opt`?\n  "
                                 "Its parameters: a, b, n, s, BM, opt."),
        ((1, 2, 3), {"a": 4}, "kernel `kernel` got two values for `a`.\n  Pass it once."),
        ((1, 2, 3), {"BM": [4]}, "constexpr `BM` of kernel `kernel` is list [4], which cannot be hashed.\n"
                                 "  Pass a number, a string, a dtype or a tuple of these."),
    ],
)  # fmt: skip
def test_calls_that_do_not_fit(args: Any, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ArgumentError) as caught:
        Signature.of(kernel).bind(tuple(args), kwargs)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "n",
            2**31,
            "`n` of kernel `kernel` is 2147483648, which does not fit int32.\n  Scalars of kernels are int32.",
        ),
        ("n", 0.5, "`n` of kernel `kernel` is float 0.5, and must be an int.\n  Pass a Python int."),
        ("s", "x", "`s` of kernel `kernel` is str 'x', and must be a float.\n  Pass a Python float."),
    ],
)
def test_scalars_that_do_not_fit(name: str, value: Any, message: str) -> None:
    with pytest.raises(errors.ArgumentError) as caught:
        Signature.of(kernel).scalar(name, value)
    assert str(caught.value) == message


def spec(**constants: Any) -> Specialization:
    return Specialization({"a": TensorSpec("global", bfloat16, 2)}, constants)


def test_specialisations_are_keys() -> None:
    assert spec(B=1) == spec(B=1)
    assert hash(spec(B=1)) == hash(spec(B=1))
    assert spec(B=1) != spec(B=2)
    assert spec(B=1) != spec(B=True), "1 and True compare equal, and fold differently"
    assert spec(B=(1, 2)) != spec(B=(1.0, 2))
    assert spec() != Specialization({"a": TensorSpec("global", float16, 2)}, {})
    assert len({spec(B=1): 0, spec(B=1.0): 1, spec(B=True): 2}) == 3


def test_source_that_cannot_be_read() -> None:
    space: dict[str, Any] = {"pk": pk}
    exec("def f(a: pk.Global):\n    pass\n", space)
    with pytest.raises(errors.SourceUnavailable) as caught:
        Source(space["f"])
    assert str(caught.value) == (
        "cannot read the source of `f` (<string>, line 1): pk compiles a kernel from its text.\n"
        "  Put the function in a file (not at a prompt, in `python -c` or in `exec`), and do not edit the file "
        "while it runs."
    )


def test_columns_count_characters_not_bytes() -> None:
    message = refusal(
        errors.UnknownName, '@pk.kernel\ndef k(a: pk.Global):\n    assert a.rows > 3, "größer als üblich" + größe'
    )
    assert message.splitlines()[2:4] == [
        '    assert a.rows > 3, "größer als üblich" + größe',
        "                                             ^^^^^",
    ]


def test_the_body_is_never_run() -> None:
    source = """
    RAN = []

    class Noisy:
        def __getattr__(self, name):
            RAN.append(name)
            raise AttributeError(name)

    noisy = Noisy()

    @pk.kernel
    def k(a: pk.Global):
        RAN.append(1)
    """
    refusal(errors.UnsupportedSyntax, source)
    assert load(source, "RAN") == []


def test_closures_are_captured() -> None:
    source = """
    def make(size):
        @pk.kernel
        def k(a: pk.Global):
            x = a.rows + size
        return k

    k = make(7)
    """
    from pk.ir.text import text

    assert "x: int32 = a.rows + 7" in text(read(source))


def test_fingerprint_follows_helpers_and_constants() -> None:
    source = """
    C = {c}

    @pk.function
    def inner(x):
        return x + {h}

    @pk.function
    def outer(x):
        return inner(x)

    @pk.kernel
    def k(a: pk.Global):
        x = outer(a.rows) + C
    """

    def of(file: str, c: int, h: int) -> str:
        return fingerprint(load(source.replace("{c}", str(c)).replace("{h}", str(h)), file=file))

    first = of("one.py", 1, 2)
    assert of("two.py", 1, 2) == first
    assert of("three.py", 5, 2) != first
    assert of("four.py", 1, 5) != first


def test_operations_outside_kernels() -> None:
    for name in ("load_async", "signal", "zeros", "tasks", "rank"):
        operation = getattr(pk, name)
        import inspect

        needed = [p for p in inspect.signature(operation).parameters.values() if p.default is p.empty and p.kind != 2]
        with pytest.raises(errors.OutsideKernel) as caught:
            operation(*[1] * len(needed))
        assert str(caught.value) == (
            f"pk.{name} is an operation of the kernel language and was called by plain Python.\n"
            "  Use it inside a function decorated with @pk.kernel (or @pk.function, called from one)."
        )
    assert pk.cdiv(7, 4) == 2
    with pytest.raises(errors.OutsideKernel, match=r"`helper` is a pk\.function"):
        helper(3)


def test_every_public_operation_is_documented() -> None:
    from pk.dsl import language

    for name in language.__all__:
        assert getattr(language, name).__doc__, name


def test_errors_pickle() -> None:
    build(kernel, Specialization({}, {"BM": 1}))
    with pytest.raises(errors.CompileError) as caught:
        read("@pk.function\ndef h(x):\n    return y\n\n@pk.kernel\ndef k(a: pk.Global):\n    x = h(a)")
    error = caught.value
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert "called at" in str(again)
    assert again.span == error.span
