"""PK_* variables: defaults, errors that name the variable, the table, the multicast policy."""

from __future__ import annotations

import re

import pytest

from pk import env
from pk.errors import EnvError
from tests.runtime.toy import ROOT


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in env.TABLE:
        monkeypatch.delenv(name, raising=False)
    assert (env.get("PK_DEBUG"), env.get("PK_TIMEOUT_S"), env.get("PK_ENTRY_TIMEOUT_S")) == (0, 30.0, 600.0)
    assert (env.CACHE.get(), env.MULTICAST.get(), env.BACKEND.get()) == (True, False, "")
    monkeypatch.setenv("PK_TIMEOUT_S", " ")  # empty means unset
    assert env.TIMEOUT_S.get() == 30.0


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("PK_DEBUG", "8", "PK_DEBUG='8' is not a whole number from 0 to 7.\n"
         "  Set PK_DEBUG to a whole number from 0 to 7, or unset it (default: 0)."),
        ("PK_DEBUG", "x", "PK_DEBUG='x' is not a whole number from 0 to 7.\n"
         "  Set PK_DEBUG to a whole number from 0 to 7, or unset it (default: 0)."),
        ("PK_TIMEOUT_S", "0", "PK_TIMEOUT_S='0' is not seconds, more than 0 and at most 1000000.\n"
         "  Set PK_TIMEOUT_S to seconds, more than 0 and at most 1000000, or unset it (default: 30.0)."),
        ("PK_TIMEOUT_S", "nan", "PK_TIMEOUT_S='nan' is not seconds, more than 0 and at most 1000000.\n"
         "  Set PK_TIMEOUT_S to seconds, more than 0 and at most 1000000, or unset it (default: 30.0)."),
        ("PK_BACKEND", "gpu", "PK_BACKEND='gpu' is not \"sim\" or \"cuda\".\n"
         "  Set PK_BACKEND to \"sim\" or \"cuda\", or unset it."),
        ("PK_CACHE", "maybe", "PK_CACHE='maybe' is not 0 or 1.\n"
         "  Set PK_CACHE to 0 or 1, or unset it (default: True)."),
    ],
)  # fmt: skip
def test_bad_values(name: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(EnvError) as caught:
        env.get(name)
    assert str(caught.value) == text


def test_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_CACHE", "off")
    monkeypatch.setenv("PK_ENTRY_TIMEOUT_S", "1.5")
    assert (env.CACHE.get(), env.ENTRY_TIMEOUT_S.get()) == (False, 1.5)
    with env.overriding(PK_CACHE="1", PK_ENTRY_TIMEOUT_S=None):
        assert (env.CACHE.get(), env.ENTRY_TIMEOUT_S.get()) == (True, 600.0)
    assert (env.CACHE.get(), env.ENTRY_TIMEOUT_S.get()) == (False, 1.5)


def test_table_shows_values_and_misspellings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_SEED", "12")
    monkeypatch.setenv("PK_TIMEOUT", "5")
    monkeypatch.setenv("PK_SIM_SMS", "many")
    table = env.table()
    assert re.search(r"^\* PK_SEED +number +12 ", table, re.MULTILINE)
    assert re.search(r"^\* PK_SIM_SMS +number +INVALID 'many'", table, re.MULTILINE)
    assert "! PK_TIMEOUT is set, but pk has no such variable.  Did you mean PK_TIMEOUT_S?" in table


@pytest.mark.parametrize(
    ("name", "value"),
    [("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"), ("NVSHMEM_DISABLE_NVLS", "1")],
)
def test_multicast_is_off_unless_asked_for_and_never_when_forbidden(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("PK_MULTICAST", "NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"):
        monkeypatch.delenv(variable, raising=False)
    assert env.multicast() == (False, "PK_MULTICAST=1 is not set")
    monkeypatch.setenv("PK_MULTICAST", "1")
    assert env.multicast() == (True, "PK_MULTICAST=1")
    monkeypatch.setenv(name, value)
    assert env.multicast() == (False, f"{name}={value} forbids it")


def test_nothing_else_reads_pk_variables() -> None:
    read = re.compile(r"""environ(?:\.get\(|\[)\s*["'](PK_\w+)""")
    found = [
        f"{path}: {match[1]}"
        for path in (ROOT / "pk").rglob("*.py")
        if path.name != "env.py"
        for match in read.finditer(path.read_text())
    ]
    assert not found, "read it through pk.env"
