"""Random legal kernels, as Python text, each with its meaning in NumPy, made by the same choices and without pk.

A program is a sequence of phases.  A phase is a task loop that reads tensors (parameters, or what earlier phases made),
computes, and stores to this rank, to another one, to all, or adds into an owner.  Whoever stores a tile signals it, and
whoever reads it waits for it: a phase waits only for earlier phases, on any rank, so that no program can hang.

Every number is defined bit for bit: sums whose order is open (adds into an owner, mma) are made of small whole numbers.
"""

from __future__ import annotations

import functools
import getpass
import importlib.util
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.conformance.case import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    I32,
    Arg,
    Arguments,
    Array,
    Case,
    Want,
    blank,
    rounded,
    short,
)
from tests.conformance.random_chains import blocked, chain, joined
from tests.conformance.random_parts import Program, Unsuitable, Value, text

COUNT = 500
WORLDS = (1, 2, 4, 8)
LIMIT = 200_000  # bytes of shared memory a program may use


class Generator:
    """Makes one program from a seed."""

    def __init__(self, seed: int) -> None:
        self.gen = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        world = self.gen.choice(WORLDS)
        self.p = Program(seed, world, self.gen.random() < 0.6)
        self.p.scalars = {
            "alpha": float(self.gen.choice((-1, 2))) if self.p.whole else 0.625,
            "shift": self.gen.randint(-2, 2),
        }
        self.shape = (self.gen.randint(1, 150), 16 * self.gen.randint(1, 9))
        self.phases = 0
        self.dynamic = self.gen.random() < 0.25
        self.groups = self.gen.choice((1, 1, 2))  # all consumers of a class have the same

    # ------------------------------------------------------------------------------------------------- tensors
    def random(self, shape: tuple[int, ...], dtype: torch.dtype) -> Array:
        """Numbers for an input."""
        if self.p.whole or dtype == I32:
            return self.numbers.integers(-3, 4, shape).astype(np.int32 if dtype == I32 else np.float32)
        return rounded(self.numbers.standard_normal(shape), dtype)

    def input(self, dtype: torch.dtype, slots: bool = False, kind: str | None = None) -> Value:
        """A new parameter of the base shape."""
        name = f"x{len(self.p.params)}"
        shape = (self.p.world, *self.shape) if slots else self.shape
        kind = kind or self.gen.choice(("global", "parallel"))
        data = [self.random(shape, dtype) for _ in range(self.p.world)]
        value = Value(name, kind, dtype, slots, "x0.rows", "x0.cols", data)
        self.p.params.append(value)
        self.p.values.append(value)
        return value

    def output(self, like: tuple[str, str], dtype: torch.dtype, slots: bool, remote: bool, last: bool) -> Value:
        """A new tensor to store to: a parameter, or scratch if it need not be seen."""
        number = len(self.p.values)
        rows, cols = like
        if not last and self.gen.random() < 0.6:
            value = Value(f"t{number}", "scratch", dtype, slots, rows, cols, [])
            extents = f"W, {rows}, {cols}" if slots else f"{rows}, {cols}"
            self.p.top.append(f"{value.name} = pk.scratch(({extents}), pk.{short(dtype)})")
        else:
            kind = "parallel" if remote else self.gen.choice(("global", "parallel"))
            value = Value(f"y{number}", kind, dtype, slots, rows, cols, [])
            self.p.params.append(value)
        self.p.values.append(value)
        return value

    def pipe(self, role: str, tile: tuple[int, int], dtype: torch.dtype) -> str | None:
        """A new pipeline of one tile; None if shared memory is used up."""
        stages = self.gen.randint(1, 3)
        size = stages * max(1024, tile[0] * tile[1] * torch.empty(0, dtype=dtype).element_size())
        if self.p.shared + size > LIMIT:
            return None
        self.p.shared += size
        name = f"{role}{self.phases}"
        self.p.top.append(f"{name} = pk.pipeline({stages}, t=pk.shared(({tile[0]}, {tile[1]}), pk.{short(dtype)}))")
        return name

    # -------------------------------------------------------------------------------------------------- waiting
    def wait(self, value: Value, copy: str, tile: tuple[int, int], m: str = "m", n: str = "n") -> list[str]:
        """Lines that wait until tile (m, n) of copy (or slot) ``copy`` of ``value`` is there."""
        if value.made is None:
            return []
        made, amount = value.made
        done = f"done_{value.name}"
        if made == tile and m == "m" and self.gen.random() < 0.8:
            return [f"pk.wait({done}, ({copy}, {m}, {n}), {amount})"]
        return [
            f"for wm in pk.range(pk.cdiv({value.rows}, {made[0]})):",
            f"    for wn in pk.range(pk.cdiv({value.cols}, {made[1]})):",
            f"        pk.wait({done}, ({copy}, wm, wn), {amount})",
        ]

    def tell(self, value: Value, tile: tuple[int, int], index: str, holder: str) -> list[str]:
        """Lines of the storer that tell of a tile; declares the counters."""
        amount = self.gen.randint(1, 3)
        grid = f"pk.cdiv({value.rows}, {tile[0]}), pk.cdiv({value.cols}, {tile[1]})"
        self.p.top.append(f"done_{value.name} = pk.signals(W, {grid})")
        value.made = (tile, str(amount))
        if value.anyone:
            return [f"pk.signal_all(done_{value.name}, ({index}, m, n), {amount})"]
        return [f"pk.signal(done_{value.name}, ({index}, m, n), {holder}, {amount})"]

    # --------------------------------------------------------------------------------------------------- phases
    def build(self) -> Program:
        """The whole program."""
        gen = self.gen
        self.input(gen.choice((BF16, F16, F32)))
        if gen.random() < 0.4:
            self.input(gen.choice((BF16, F16, F32)))
        kinds: list[Callable[[bool], bool]] = [self.elementwise, self.elementwise, self.exchange, self.fold, self.copy]
        if self.p.whole:
            kinds += [self.reduce, self.product, self.product]
        count = gen.randint(1, 4)
        for _ in range(20):
            self.phases += gen.choice(kinds)(self.phases == count - 1)
            if self.phases == count:
                return self.p
        raise Unsuitable  # nothing more fits shared memory

    def tile(self, consumer: bool, columns: int = 128) -> tuple[int, int, int]:
        """Rows, columns and warpgroups of a phase."""
        groups = self.groups if consumer else 0
        rows = 64 * groups if consumer else self.gen.choice((8, 16, 32, 64))
        return rows, self.gen.choice([c for c in (16, 32, 64, 128) if c <= columns]), groups

    def sources(self, slots: bool, dtypes: tuple[torch.dtype, ...]) -> list[Value]:
        """Earlier tensors that a phase may read, of the base shape."""
        return [v for v in self.p.values if v.slots == slots and v.dtype in dtypes and v.shape == self.shape]

    def copy_of(self, value: Value) -> tuple[str, str, int]:
        """Whose copy to read: the operand, its rank, and the rank's distance from ``me``."""
        if value.kind == "global" or not value.anyone or self.gen.random() < 0.6:
            return value.read_as, "me", 0
        by = self.gen.randint(1, 3)
        return f"{value.name}[(me + {by}) % W]", f"(me + {by}) % W", by

    def emit(self, loop: str, shared: list[str], roles: dict[str, list[str]], first: bool) -> None:
        """A task loop of role blocks; ``first``: it may go to the communicators."""
        lines = [loop, *(f"    {line}" for line in shared)]
        for head, body in roles.items():
            lines += [f"    with pk.{head}:", *(f"        {line}" for line in body)]
        if self.dynamic:  # a class is all dynamic or not at all
            lines[0] = loop.removesuffix("):") + ", dynamic=True):"
        alone = first and not self.p.first and not self.p.body and self.gen.random() < 0.3
        (self.p.first if alone else self.p.body).extend(lines)

    def elementwise(self, last: bool) -> bool:
        """One or two tensors -> consumer -> this rank, a neighbour, or a slot of everyone."""
        gen, world = self.gen, self.p.world
        r, c, groups = self.tile(consumer=True, columns=64)
        tile = (r, c)
        sources = gen.choices(self.sources(False, (BF16, F16, F32)), k=gen.randint(1, 2))
        picks = [(v, *self.copy_of(v)) for v in sources]
        dtype = gen.choice((BF16, F16, F32))
        where = gen.choice(("own", "shift", "everyone"))
        pipes = [self.pipe("ab"[i] + "_", tile, v.dtype) for i, v in enumerate(sources)]
        output = self.pipe("o", tile, dtype)
        if output is None or None in pipes:
            return False
        made = chain(gen, [f"r{i}" for i in range(len(sources))], self.p.whole, gen.randint(1, 6), self.p.scalars, tile)
        by = gen.randint(1, 3)
        out = self.output((sources[0].rows, sources[0].cols), dtype, where == "everyone", where != "own", last)
        waits = [line for v, _, rank, _ in picks for line in self.wait(v, rank, tile)]
        shared = waits if gen.random() < 0.4 else []
        loader = [] if shared else list(waits)
        consumer = []
        for i, (_, operand, _, _) in enumerate(picks):
            loader += [f"with {pipes[i]}.fill() as s:", f"    pk.load_async(s.t, {operand}, (m, n))"]
            consumer += [f"with {pipes[i]}.drain() as s:", f"    r{i} = pk.load(s.t)"]
        consumer += [*made.lines, f"with {output}.fill() as s:", f"    pk.store(s.t, {made.result})"]
        targets = {
            "own": (out.read_as, "(m, n)", "me", "me"),
            "shift": (f"{out.name}[(me + {by}) % W]", "(m, n)", f"(me + {by}) % W", f"(me + {by}) % W"),
            "everyone": (out.name, "(me, m, n)", "me", "me"),
        }
        target, coord, index, holder = targets[where]
        out.anyone = where == "everyone" or gen.random() < 0.6
        storer = [f"with {output}.drain() as s:", f"    pk.store_async({target}, s.t, {coord})"]
        storer += self.tell(out, tile, index, holder)
        grid = f"pk.cdiv({sources[0].rows}, {r}), pk.cdiv({sources[0].cols}, {c})"
        loop = f"for m, n in pk.tasks({grid}, group={gen.choice((1, 2, 8))}):"
        roles = {"loader()": loader, f"consumer(warpgroups={groups})": consumer, "storer()": storer}
        self.emit(loop, shared, roles, first=True)
        results = []
        for me in range(world):
            tiles = {
                f"r{i}": blocked(v.data[(me + d) % world].astype(np.float32), tile)
                for i, (v, _, _, d) in enumerate(picks)
            }
            results.append(rounded(joined(made.run(tiles), self.shape), dtype))
        if where == "everyone":
            out.data = [np.stack(results)] * world
        else:
            shift = by if where == "shift" else 0
            out.data = [results[(q - shift) % world] for q in range(world)]
        return True

    def copy(self, last: bool) -> bool:
        """A tensor of any dtype, moved without a consumer: to a neighbour, or to a slot of everyone."""
        gen, world = self.gen, self.p.world
        kinds = (BF16, F16, F32, I32, E4M3, E5M2)
        value = self.input(gen.choice(kinds)) if gen.random() < 0.3 else gen.choice(self.sources(False, kinds))
        r, c, _ = self.tile(consumer=False)
        tile = (r, c)
        pipe = self.pipe("c", tile, value.dtype)
        if pipe is None:
            return False
        operand, rank, distance = self.copy_of(value)
        by, everyone = gen.randint(0, 3), gen.random() < 0.5
        out = self.output((value.rows, value.cols), value.dtype, everyone, True, last)
        out.anyone = everyone or gen.random() < 0.6
        loader = [
            *self.wait(value, rank, tile),
            f"with {pipe}.fill() as s:",
            f"    pk.load_async(s.t, {operand}, (m, n))",
        ]
        to = f"(me + {by}) % W"
        target = f"{out.name}, s.t, (me, m, n)" if everyone else f"{out.name}[{to}], s.t, (m, n)"
        storer = [f"with {pipe}.drain() as s:", f"    pk.store_async({target})"]
        storer += self.tell(out, tile, "me" if everyone else to, "me" if everyone else to)
        loop = (
            f"for m, n in pk.tasks(pk.cdiv({value.rows}, {r}), pk.cdiv({value.cols}, {c}), group={gen.choice((1, 3))}):"
        )
        self.emit(loop, [], {"loader()": loader, "storer()": storer}, first=True)
        seen = [value.data[(me + distance) % world] for me in range(world)]
        out.data = [np.stack(seen)] * world if everyone else [seen[(q - by) % world] for q in range(world)]
        return True

    def slotted(self, dtypes: tuple[torch.dtype, ...]) -> Value:
        """A tensor with a slot for each rank: an earlier one, or a new input."""
        known = self.sources(True, dtypes)
        return (
            self.gen.choice(known)
            if known and self.gen.random() < 0.8
            else self.input(self.gen.choice(dtypes), slots=True)
        )

    def exchange(self, last: bool) -> bool:
        """All to all: slot q of mine becomes slot ``me`` of rank q's copy."""
        gen, world = self.gen, self.p.world
        value = self.slotted((BF16, F16, F32, E4M3, I32))
        r, c, _ = self.tile(consumer=False)
        tile = (r, c)
        pipe = self.pipe("e", tile, value.dtype)
        if pipe is None:
            return False
        out = self.output((value.rows, value.cols), value.dtype, True, True, last)
        out.anyone = False
        loader = [
            *self.wait(value, "q", tile),
            f"with {pipe}.fill() as s:",
            f"    pk.load_async(s.t, {value.read_as}, (q, m, n))",
        ]
        storer = [f"with {pipe}.drain() as s:", f"    pk.store_async({out.name}[q], s.t, (me, m, n))"]
        storer += self.tell(out, tile, "me", "q")
        start = gen.randint(0, 2)
        grid = f"pk.cdiv({value.rows}, {r}), pk.cdiv({value.cols}, {c})"
        self.emit(
            f"for q, m, n in pk.tasks(pk.ranks_from(me + {start}), {grid}):",
            [],
            {"loader()": loader, "storer()": storer},
            True,
        )
        out.data = [np.stack([value.data[src][q] for src in range(world)]) for q in range(world)]
        return True

    def fold(self, last: bool) -> bool:
        """The slots of a tensor, combined in a fixed order."""
        gen, world = self.gen, self.p.world
        value = self.slotted((BF16, F16, F32))
        r, c, groups = self.tile(consumer=True, columns=64)
        tile, dtype = (r, c), gen.choice((BF16, F16, F32))
        pipe, output = self.pipe("f", tile, value.dtype), self.pipe("o", tile, dtype)
        if pipe is None or output is None:
            return False
        start = gen.choice((None, 1, 2))
        over = "pk.range(W)" if start is None else f"pk.ranks_from(me + {start})"
        text, run = gen.choice(
            (("acc + r", np.add), ("pk.max(acc, r)", np.maximum), ("r - acc", lambda acc, r: r - acc))
        )
        out = self.output((value.rows, value.cols), dtype, False, False, last)
        out.anyone = gen.random() < 0.6
        fill = [
            *self.wait(value, "q", tile),
            f"with {pipe}.fill() as s:",
            f"    pk.load_async(s.t, {value.read_as}, (q, m, n))",
        ]
        loader = [f"for q in {over}:", *(f"    {line}" for line in fill)]
        consumer = [
            f"acc = pk.zeros(({r}, {c}))", f"for q in {over}:",
            f"    with {pipe}.drain() as s:", "        r = pk.load(s.t)",
            f"    acc = {text}", f"with {output}.fill() as s:", "    pk.store(s.t, acc)",
        ]  # fmt: skip
        storer = [f"with {output}.drain() as s:", f"    pk.store_async({out.read_as}, s.t, (m, n))"]
        storer += self.tell(out, tile, "me", "me")
        loop = f"for m, n in pk.tasks(pk.cdiv({value.rows}, {r}), pk.cdiv({value.cols}, {c})):"
        roles = {"loader()": loader, f"consumer(warpgroups={groups})": consumer, "storer()": storer}
        self.emit(loop, [], roles, first=False)
        for me in range(world):
            acc = np.zeros(self.shape, np.float32)
            for q in range(world):
                slot = value.data[me][q if start is None else (me + start + q) % world].astype(np.float32)
                acc = run(acc, slot)
            out.data.append(rounded(acc, dtype))
        if self.p.whole and max(np.abs(d).max() for d in out.data) > 64:
            raise Unsuitable
        return True

    def reduce(self, last: bool) -> bool:
        """Slot q of every rank added into rank q's copy: the owner stores first, the others wait and add."""
        world = self.p.world
        value = self.slotted((BF16, F16, F32))
        r, c, _ = self.tile(consumer=False)
        tile = (r, c)
        pipe = self.pipe("d", tile, value.dtype)
        if pipe is None:
            return False
        out = self.output((value.rows, value.cols), value.dtype, False, True, last)
        out.anyone = False
        grid = f"pk.cdiv({value.rows}, {r}), pk.cdiv({value.cols}, {c})"
        self.p.top.append(f"begun{self.phases} = pk.signals(W, {grid})")
        begun = f"begun{self.phases}, (q, m, n)"
        loader = [
            *self.wait(value, "q", tile),
            f"with {pipe}.fill() as s:",
            f"    pk.load_async(s.t, {value.read_as}, (q, m, n))",
        ]
        storer = [
            "if q != me:", f"    pk.wait({begun}, 1)", f"with {pipe}.drain() as s:", "    if q == me:",
            f"        pk.store_async({out.name}[me], s.t, (m, n))", "    else:",
            f"        pk.store_add_async({out.name}[q], s.t, (m, n))", "if q == me:", f"    pk.signal_all({begun})",
        ]  # fmt: skip
        storer += self.tell(out, tile, "q", "q")
        out.made = (tile, f"{out.made[1]} * W" if out.made else "")
        self.emit(
            f"for q, m, n in pk.tasks(pk.ranks_from(me), {grid}):", [], {"loader()": loader, "storer()": storer}, True
        )
        out.data = [sum(value.data[src][q] for src in range(world)) for q in range(world)]
        if max(sum(np.abs(value.data[src][q]) for src in range(world)).max() for q in range(world)) > 250:
            raise Unsuitable
        return True

    def product(self, last: bool) -> bool:
        """``a @ b`` of an earlier tensor and a new one, with an epilogue in column pieces."""
        gen, world = self.gen, self.p.world
        sources = self.sources(False, (BF16, F16))
        if not sources:
            return False
        a = gen.choice(sources)
        (rows, depth), width = self.shape, 16 * gen.randint(1, 8)
        groups, bn, bk = self.groups, gen.choice((16, 32, 64, 128)), gen.choice((16, 32, 64))
        bm, turned = 64 * groups, gen.random() < 0.5
        piece, dtype = bn // gen.choice((1, 2)) if bn > 16 else bn, gen.choice((BF16, F16, F32))
        pa, pb = self.pipe("a", (bm, bk), a.dtype), self.pipe("b", (bn, bk) if turned else (bk, bn), a.dtype)
        output = self.pipe("o", (bm, piece), dtype)
        if pa is None or pb is None or output is None:
            return False
        b = Value(f"x{len(self.p.params)}", "global", a.dtype, False, "", "", [])
        b.data = [self.random((width, depth) if turned else (depth, width), a.dtype) for _ in range(world)]
        self.p.params.append(b)
        operand, rank, distance = self.copy_of(a)
        columns = f"{b.name}.rows" if turned else f"{b.name}.cols"
        out = self.output((a.rows, columns), dtype, False, False, last)
        out.anyone = gen.random() < 0.6
        steps = f"for k in pk.range(pk.cdiv({a.cols}, {bk})):"
        loader = [
            *self.wait(a, rank, (0, 0)), steps,
            f"    with {pa}.fill() as s:", f"        pk.load_async(s.t, {operand}, (m, k))",
            f"    with {pb}.fill() as s:", f"        pk.load_async(s.t, {b.name}, {'(n, k)' if turned else '(k, n)'})",
        ]  # fmt: skip
        made = chain(gen, ["acc"], True, gen.randint(0, 3), self.p.scalars, (bm, bn))
        pieces = f"for j in pk.static_range({bn // piece}):"
        consumer = [
            f"acc = pk.zeros(({bm}, {bn}), pk.float32)", steps,
            f"    with {pa}.drain() as s:", f"        with {pb}.drain() as t:",
            f"            pk.mma(acc, s.t, t.t{'.T' * turned})", *made.lines, pieces,
            f"    with {output}.fill() as s:",
            f"        pk.store(s.t, {made.result}[:, j * {piece} : (j + 1) * {piece}])",
        ]  # fmt: skip
        put = f"    pk.store_async({out.read_as}, s.t, (m, n * {bn // piece} + j))"
        storer = [pieces, f"    with {output}.drain() as s:", f"    {put}", *self.tell(out, (bm, bn), "me", "me")]
        loop = f"for m, n in pk.tasks(pk.cdiv({a.rows}, {bm}), pk.cdiv({columns}, {bn})):"
        roles = {"loader()": loader, f"consumer(warpgroups={groups})": consumer, "storer()": storer}
        self.emit(loop, [], roles, first=False)
        for me in range(world):
            x, y = a.data[(me + distance) % world].astype(np.float64), b.data[me].astype(np.float64)
            product = (x @ (y.T if turned else y)).astype(np.float32)
            out.data.append(joined(made.run({"acc": blocked(product, (bm, bn))}), (rows, width)))
        return True


# ------------------------------------------------------------------------------------------------------- finished
def case(seed: int) -> Case:
    """Random program ``seed``, ready to run in its one world."""
    return _case(seed)


@functools.cache
def _case(seed: int) -> Case:
    p, attempt = None, 0
    while p is None:
        try:
            p = Generator(seed + 1_000_000 * attempt).build()
            p.seed = seed
        except Unsuitable:
            attempt += 1
    made = {v.name for v in p.params if v.made is not None}

    def make(rank: int, world: int) -> Arguments:
        return {
            v.name: blank(v.data[rank].shape, v.dtype, v.kind == "parallel") if v.name in made
            else Arg(v.data[rank], v.dtype, v.kind == "parallel")
            for v in p.params
        }  # fmt: skip

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        return [{v.name: v.data[rank] for v in p.params if v.name in made} for rank in range(len(ranks))]

    return Case(
        f"program_{seed}", _load(text(p), seed), make, meaning, scalars=dict(p.scalars), worlds=(p.world,), signed=False
    )


def program(key: str) -> object:
    """The specialisation of ``program_<seed>``; a function that worker processes can find."""
    return case(int(key.removeprefix("program_"))).program()


@functools.cache
def _folder() -> Path:
    """The same for every process: emitted text names its file, and would be compiled again under another name."""
    folder = Path(tempfile.gettempdir()) / f"pk-random-programs-{getpass.getuser()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _load(source: str, seed: int) -> Any:
    path = _folder() / f"program_{seed}.py"
    whole = path.with_suffix(f".{os.getpid()}")
    whole.write_text(source, encoding="utf-8")
    whole.replace(path)  # other processes write the same
    spec = importlib.util.spec_from_file_location(f"pk_random_program_{seed}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, f"program_{seed}")
