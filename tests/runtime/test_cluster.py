"""How many blocks a kernel in clusters, or with several communicators, is launched with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pk.artifact import Source
from pk.errors import BackendError
from pk.runtime import symm
from pk.runtime.group import Group
from pk.runtime.launch import Call, launch
from tests.runtime.fake import FakeDriver, FakeModule, source

PAIRS = replace(source(), cluster=2, least_blocks=2)


def blocks(made: Source, sms: int = 0, clusters: int = 1 << 20) -> int:
    """Blocks of a launch on a GPU of 132 SMs; ``sms``: as many as the caller allows; ``clusters``: that fit it."""
    driver = FakeDriver()
    group = Group(0, 1, "cuda", device=0, driver=driver)
    module = FakeModule(made)
    module.clusters = clusters
    tensors = {"a": torch.zeros(200, 128, dtype=torch.float16), "c": symm.empty((64, 128), torch.bfloat16, group)}
    scratch = {"parts": ((8, 64), torch.float32)}
    signals = {"begun": (2, 3, 5), "done": (4,)}
    launch(Call(group, made, module, tensors, {"n": 1, "x": 0.5}, signals, scratch, "gather", sms))
    return driver.launches[0][1][0]


def test_grids_are_whole_pairs() -> None:
    assert blocks(PAIRS) == 132
    assert blocks(PAIRS, sms=131) == 130
    assert blocks(PAIRS, clusters=60) == 120  # clusters lie in one group of SMs each, and groups may be odd
    assert blocks(replace(PAIRS, cluster=1), sms=131) == 131


def test_too_few_blocks() -> None:
    with pytest.raises(BackendError, match=r"in clusters: it needs at least 2 blocks, in clusters of 2, .* launch 0"):
        blocks(PAIRS, sms=1)
    two = replace(source(comm_sms=3), least_blocks=4)
    assert blocks(two, sms=4) == 4
    with pytest.raises(BackendError, match=r"has communicators, .* needs at least 4 blocks, and rank 0 may launch 3"):
        blocks(two, sms=3)
