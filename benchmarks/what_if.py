"""What the parts of a fused kernel cost: the same kernel with parts taken out, for ``tensor_parallel.py --parts``.

The kernels are edited as text, so that what remains is the code that runs otherwise.  Most of their results are wrong.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from baselines import PLAIN, Contender
from tp_problems import AG, AR, RS, Build, Operands, Problem, builds

from pk.ops import fused, parallel_kernels
from pk.ops.model import CONFIGS
from pk.runtime import cache
from pk.runtime.group import current

Edits = list[tuple[str, str]]


@dataclass(frozen=True)
class Variant:
    """A kernel edited so, with this number of communicating SMs (all-gather), or with other constants (sums).

    ``engine``: messages in which a copy engine sends as many bytes beside it.
    """

    edits: Edits
    comm_sms: int = 0
    constants: dict[str, int] = field(default_factory=dict)
    engine: int = 0


_OWN_ROWS = (
    "pk.wait(ready, (owner, m), parts)\n                feed_rows(inputs, full[me], (owner, m), b",
    "feed_rows(inputs, x, (m,), b",
)
_SENDS = ("pk.tasks(rows * pk.min(peers, 1), parts, group=1)", "pk.tasks(rows * 0, parts, group=1)")
_TO_ITSELF = ("pk.store(full[r], piece, pk.at(me,", "pk.store(full[me], piece, pk.at(me,")
_LINK: Edits = [
    ("pk.load_async(s.c, part[r], at)", "pk.load_async(s.c, part[pk.rank()], at)"),
    ("part[(pk.rank() + 1 + q) % pk.world_size()], at", "part[pk.rank()], at"),
]
_SUMS: Edits = [
    ("put_sums(output, parts, part, row, c, peers, m, n, SHAPE, AHEAD)", "put_rows(output, c, (m,), n, SHAPE)"),
    ("        finish_rows(output, acc, parts, vectors", "        finish_rows(output, acc, None, vectors"),
]
_WAITS = ("pk.wait(arrived, (m, n), W - 1)", "pk.wait(arrived, (m, n), 0)")

_JOINS = ("JOIN: pk.constexpr = False", "JOIN: pk.constexpr = True")
_SENT_BY_SMS = ("pk.tasks(rows, PARTS, group=1)", "pk.tasks(rows * 0, PARTS, group=1)")

_APART = {"IN_PLACE": False, "PARTS": 3, "AHEAD": 3, "LAG": 132}
_PLACE = {"IN_PLACE": True, "PARTS": 5, "AHEAD": 5, "LAG": 132}

TAKEN_OUT: dict[str, dict[str, Variant]] = {
    AG: {
        "sent, not waited for": Variant([_OWN_ROWS]), "nothing sent": Variant([_SENDS, _OWN_ROWS]),
        "sent to itself": Variant([_OWN_ROWS, _TO_ITSELF]),
        "a copy engine sends": Variant([_SENDS, _OWN_ROWS], engine=16),
        "8 SMs that join": Variant([_JOINS], 8), "4 SMs that join": Variant([_JOINS], 4),
        "8 SMs that join, nothing sent": Variant([_JOINS, _SENT_BY_SMS, _OWN_ROWS], 8),
    },
    RS: {
        "sums not over the link": Variant(_LINK), "no sums": Variant(_SUMS, 0, _APART),
        "a copy engine sends": Variant(_LINK, engine=16),
        "no sums, no waits": Variant([*_SUMS, _WAITS], 0, _APART),
        "2 + 3 pieces": Variant([], 0, _APART), "5 pieces in place": Variant([], 0, _PLACE),
        "2 + 3 pieces, 1.5 waves": Variant([], 0, _APART | {"LAG": 99}),
        "5 pieces in place, 1.5 waves": Variant([], 0, _PLACE | {"LAG": 99}),
    },
    AR: {
        "sums not over the link": Variant(_LINK),
        "2 + 3 pieces": Variant([], 0, _APART), "5 pieces in place": Variant([], 0, _PLACE),
    },
}  # fmt: skip
"""By operator: what is taken out, put in (``pk.communicator(joins=True)``) or sized differently, and how.

n + m: pieces of results and of partial sums that are under way, in place: of both; waves: by which own tiles follow
those of the other of two ranks.
"""


def module(operator: str, what: str) -> ModuleType:
    """The module of kernels with that taken out."""
    text = Path(parallel_kernels.__file__).read_text(encoding="utf-8")
    for old, new in TAKEN_OUT[operator][what].edits:
        if old not in text:
            raise ValueError(f"{what!r} of {operator}: the kernels have no {old!r} any more")
        text = text.replace(old, new)
    name = f"pk_what_if_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    folder = cache.root() / "what_if"  # of one place: it is in the cache's key
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{name}.py"
    whole = path.with_suffix(f".{os.getpid()}")
    whole.write_text(text, encoding="utf-8")
    whole.replace(path)  # other ranks write the same
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found
    spec.loader.exec_module(found)
    for kernel in (found.all_gather_matmul, found.matmul_reduce_scatter_ordered, found.matmul_all_reduce_ordered):
        kernel.alike = True
    return found


@contextmanager
def using(kernels: ModuleType, constants: dict[str, int]) -> Iterator[None]:
    """Inside, the operators launch ``kernels``, those of sums with these ``constants``."""
    kept = fused.parallel_kernels, fused._summing

    def summing(*given: Any) -> dict[str, Any]:
        return kept[1](*given) | constants

    fused.parallel_kernels, fused._summing = kernels, summing  # type: ignore[assignment]
    try:
        yield
    finally:
        fused.parallel_kernels, fused._summing = kept


def contenders(o: Operands) -> list[Contender]:
    """What to time beside the operator itself, in the configuration PLAIN."""
    q = fused.Request(o.p.operator, current(), o.a, o.b, o.out_dtype)
    found = []
    for what, variant in TAKEN_OUT[o.p.operator].items():
        kernels = module(o.p.operator, what)

        def call(kernels: ModuleType = kernels, variant: Variant = variant) -> torch.Tensor:
            with using(kernels, variant.constants):
                return fused.run(q, o.out, CONFIGS[PLAIN], variant.comm_sms)[0]

        found.append(Contender(what, "part", beside(o, variant.engine, call) if variant.engine else call))
    return found


def beside(o: Operands, messages: int, call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """``call`` while a copy engine sends the peer what the kernel otherwise would; without GPUs ``call`` alone."""
    if not o.a.is_cuda:
        return call
    import torch.distributed._symmetric_memory as symm_mem

    ranks, peer = dist.get_world_size(), (dist.get_rank() + 1) % dist.get_world_size()
    sent = o.a if o.p.operator == AG else torch.empty((o.p.m // ranks, o.p.n), dtype=o.out_dtype, device=o.a.device)
    there = symm_mem.empty(sent.shape, dtype=sent.dtype, device=sent.device)
    with warnings.catch_warnings():  # newer versions of torch need no enabling, and say so
        warnings.simplefilter("ignore")
        symm_mem.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    theirs = symm_mem.rendezvous(there, dist.group.WORLD.group_name).get_buffer(peer, sent.shape, sent.dtype)
    side, kept = torch.cuda.Stream(), there

    def both() -> torch.Tensor:
        assert kept is not None
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for source, target in zip(sent.chunk(messages), theirs.chunk(messages), strict=True):
                target.copy_(source)
        result = call()
        torch.cuda.current_stream().wait_stream(side)
        return result

    return both


def compiled(p: Problem, world: int) -> list[tuple[str, Build]]:
    """What has to be compiled for :func:`contenders`: what is taken out, and the kernel's name and arguments."""
    found = []
    for what, variant in TAKEN_OUT[p.operator].items():
        name, arguments = builds(p, [(PLAIN, variant.comm_sms)], world)[0]
        found.append((what, (name, arguments | variant.constants)))
    return found


def compile_part(operator: str, what: str, build: Build) -> str:
    """As ``tp_problems.compile_one``."""
    resources = getattr(module(operator, what), build[0]).resources(**build[1])
    return f"{what}: {resources}" if resources.spill_bytes or resources.local_bytes else ""
