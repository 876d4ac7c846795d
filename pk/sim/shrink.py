"""Make a launch that fails smaller while it fails in the same way: fewer ranks, smaller tensors, fewer blocks.

Extents that are equal are taken to mean the same (the K of ``a`` and of ``b``) and change together; what changes too
much shows itself, because the smaller launch then fails in another way, and is not taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pk.sim.findings import Finding, causes
from pk.sim.schedule import FAMILY
from pk.sim.trial import BASELINE, Case, run

_TRIALS = 250
_ALIGNMENT = 16  # of extents that are cut without a tile size to go by: rows stay whole chunks of 16 bytes


@dataclass(frozen=True, slots=True)
class Smallest:
    """The smallest launch found that shows a mistake, the seed of a schedule that does, and what it shows."""

    case: Case
    seed: int
    finding: Finding

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {_tuple(shape)}" for name, (shape, _) in self.case.image.shapes().items())
        return f"world_size={self.case.world}, sms={self.case.sms}, {shapes}{', ' * bool(shapes)}seed {self.seed}"

    def as_json(self) -> dict[str, object]:
        """Plain data, for ``--format json``."""
        shapes = {name: list(shape) for name, (shape, _) in self.case.image.shapes().items()}
        return {"world_size": self.case.world, "sms": self.case.sms, "shapes": shapes, "seed": self.seed}


def alike(found: Finding, wanted: Finding) -> bool:
    """Whether a smaller launch shows the same mistake: the same kind, at lines that are among those of ``wanted``."""
    same = found.kind == wanted.kind or {found.kind, wanted.kind} == {"deadlock", "not-resident"}
    return same and (found.key == wanted.key or _lines(found) <= _lines(wanted))


def _lines(finding: Finding) -> frozenset[object]:
    return frozenset((p.span.file, p.span.line, p.role) for p in finding.places)


def shrink(case: Case, wanted: Finding, known: list[Finding], seconds: float) -> Smallest:
    """The smallest launch that still shows ``wanted``, as far as ``seconds`` of trying get.

    ``known``: all that the launch shows.  A smaller one may show less, but nothing else.
    """
    assert wanted.seed is not None
    search = _Search(case, wanted, known, time.monotonic() + seconds)
    improved = True
    while improved:
        improved = False
        for step in (_fewer_ranks, _half_of_all, _smaller_extents, _fewer_sms):
            improved |= search.walk(step)
    return search.best


class _Search:
    def __init__(self, case: Case, wanted: Finding, known: list[Finding], end: float) -> None:
        assert wanted.seed is not None
        self.best = Smallest(case, wanted.seed, wanted)
        self._wanted, self._known, self._end = wanted, known, end
        self._trials = 0
        self._tried: set[tuple[object, ...]] = set()

    def walk(self, step: Callable[[Case], Iterator[Case]]) -> bool:
        """Take the smaller cases that ``step`` proposes as long as one of them fails."""
        moved, again = False, True
        while again:
            again = False
            for smaller in step(self.best.case):
                name = (smaller.world, smaller.sms, *smaller.image.extents())
                if name not in self._tried:
                    self._tried.add(name)
                    if (found := self._fails(smaller)) is not None:
                        self.best, moved, again = found, True, True
                        break
        return moved

    def _fails(self, case: Case) -> Smallest | None:
        seeds = dict.fromkeys((self.best.seed, 0, 1, 2, 3, 6 * FAMILY, 6 * FAMILY + 4))
        for seed in seeds:
            if self._trials >= _TRIALS or time.monotonic() > self._end:
                return None
            self._trials += 1
            try:
                # Results differ from those of another schedule: the one that checks compare with.
                baseline = run(case, BASELINE, keep=True).results if self._wanted.kind == "wrong-result" else None
                trial = run(case, seed, baseline)
            except Exception:  # noqa: BLE001  what is cut badly may fail anyhow
                return None
            more = [f for f in causes(trial.findings) if not any(alike(f, k) for k in self._known)]
            if trial.broken is not None or more:
                return None
            for finding in trial.findings:
                if alike(finding, self._wanted):
                    return Smallest(case, seed, finding)
        return None


# ----------------------------------------------------------------------------------------------------- smaller cases
def _fewer_ranks(case: Case) -> Iterator[Case]:
    for world in range(1, case.world):
        yield _cut(case, lambda e, w=world: w if e == case.world else e, world)
        # The whole of something that is dealt to the ranks: every rank's share stays what it is.
        yield _cut(case, lambda e, w=world: e // case.world * w if e % case.world == 0 else e, world)


def _half_of_all(case: Case) -> Iterator[Case]:
    unit = min([t for t in _tiles(case) if t >= _ALIGNMENT], default=_ALIGNMENT)
    yield _cut(case, lambda e: e if e == case.world else _half(e, unit))


def _half(extent: int, unit: int = _ALIGNMENT) -> int:
    """Half of ``extent``, as a multiple of ``unit``."""
    return extent if extent <= unit else -(-extent // (2 * unit)) * unit


def _tiles(case: Case) -> list[int]:
    """What is likely to be a tile size."""
    return sorted({v for _, v in case.kernel.constants if isinstance(v, int) and 8 <= v <= 1024})


def _smaller_extents(case: Case) -> Iterator[Case]:
    shapes, tiles = [shape for shape in case.image.extents() if shape], _tiles(case)
    extents = sorted({e for shape in shapes for e in shape if e > 1 and e != case.world}, reverse=True)
    inner = {shape[-1] for shape in shapes}  # rows stay whole chunks of 16 bytes
    for extent in extents:
        fitting = [t for t in tiles if t < extent]
        sizes = {t * k + extent % t * tail for t in fitting for k in (0, 1, 2, 3) for tail in (0, 1)}
        if not fitting and extent not in tiles:
            sizes = {_half(extent), _ALIGNMENT} | ({1} if extent not in inner else set())
        for size in sorted(s for s in sizes if 0 < s < extent):
            yield _cut(case, lambda e, old=extent, new=size: new if e == old else e)


def _cut(case: Case, change: Callable[..., int], world: int | None = None) -> Case:
    return replace(case, image=case.image.cut(world or case.world, change))


def _fewer_sms(case: Case) -> Iterator[Case]:
    for sms in range(max(1, 2 * len(case.kernel.communicators)), case.sms):
        yield replace(case, sms=sms)


def _tuple(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
