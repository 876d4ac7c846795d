"""Print a kernel: stable text, close to what the user wrote, one line a statement."""

from __future__ import annotations

from collections.abc import Iterator

from pk.ir import nodes as ir
from pk.ir.index import to_text
from pk.ir.types import Tile


def text(kernel: ir.Kernel) -> str:
    """``kernel`` as text.  The same kernel prints the same everywhere: no positions, no addresses."""
    return _Printer(kernel).kernel() + "\n"


def words(kernel: ir.Kernel, e: ir.Statement | ir.Operand) -> str:
    """The first line of a statement of ``kernel``, or one of its operands, as :func:`text` prints it."""
    printer = _Printer(kernel)
    if isinstance(e, ir.Statement):
        return next(printer.statement(e))
    return printer.expr(e)


class _Printer:
    def __init__(self, kernel: ir.Kernel) -> None:
        self.k = kernel
        self.dims = {t.name: t.ndim for t in kernel.tensors} | {s.name: len(s.shape) for s in kernel.scratch}

    def expr(self, e: ir.Operand) -> str:
        return to_text(e, self.dims)

    def items(self, es: tuple[ir.Operand, ...]) -> str:
        return ", ".join(map(self.expr, es))

    def kernel(self) -> str:
        k = self.k
        params = [f"{t.name}: {t.kind} {t.dtype} {t.ndim}-d" for t in k.tensors]
        params += [f"{p.name}: {p.type}" for p in k.scalars]
        lines = [f"kernel {k.name}({', '.join(params)})"]
        if k.constants:
            lines.append("  constants " + ", ".join(f"{name}={value!r}" for name, value in k.constants))
        for p in k.pipelines:
            tiles = ", ".join(f"{name}={_extents(t)} {t.dtype}" for name, t in p.tiles)
            lines.append(
                f"  pipeline {p.name} = {f'over {p.over}' if p.over else f'{p.stages} x ({tiles})'}, {p.owner}"
            )
        lines += [f"  shared {t.name} = {_extents(t.type)} {t.type.dtype}, {t.owner}" for t in k.shared]
        lines += [f"  signals {s.name}[{self.items(s.shape)}]" for s in k.signals]
        lines += [f"  scratch {s.name}[{self.items(s.shape)}] {s.dtype}" for s in k.scratch]
        lines += self.block(k.prologue, 1)
        for c in k.communicators:
            lines.append(f"  communicator sms={self.expr(c.sms)}{', joins' * c.joins}:")
            lines += self.block(c.body, 2)
        lines.append("  compute:")
        lines += self.block(k.compute, 2)
        return "\n".join(lines)

    def block(self, block: ir.Block, depth: int) -> list[str]:
        """The lines of a block, indented; an empty one is ``pass``."""
        lines = [f"{'  ' * depth}{line}" for s in block for line in self.statement(s)]
        return lines or [f"{'  ' * depth}pass"] if depth > 1 else lines

    def statement(self, s: ir.Statement) -> Iterator[str]:
        """The lines of a statement."""
        if isinstance(s, ir.Assign):
            yield f"{s.var.name}: {s.var.type} = {self.expr(s.value)}"
        elif isinstance(s, ir.Do):
            yield f"{s.op}({', '.join([*map(self.expr, s.operands), *(f'{k}={v!r}' for k, v in s.attrs)])})"
        elif isinstance(s, ir.Assert):
            yield f"assert {self.expr(s.cond)}, {s.text!r}"
        elif isinstance(s, ir.Bounds):
            guard = f"if {self.expr(s.guard)}: " if s.guard is not None else ""
            slack = f" + {s.slack}" if s.slack else ""
            yield f"{guard}check {s.least} <= {self.expr(s.index)} < {self.expr(s.bound)}{slack}, {s.what!r}"
        elif isinstance(s, ir.If):
            yield f"if {self.expr(s.cond)}:"
            yield from self.block(s.then, 1) or ["  pass"]
            if s.orelse:
                yield "else:"
                yield from self.block(s.orelse, 1)
        else:
            yield self.header(s)
            yield from self.block(s.body, 1) or ["  pass"]

    def header(self, s: ir.For | ir.While | ir.Tasks | ir.Role | ir.Stage) -> str:
        """The first line of a statement with one body."""
        if isinstance(s, ir.For):
            return f"for {s.var.name} in range({self.items((s.start, s.stop))}):"
        if isinstance(s, ir.Tasks):
            names = ", ".join(v.name for v in s.vars)
            options = f", group={self.expr(s.group)}" + ", dynamic" * s.dynamic
            options += f", cluster={s.cluster}" if s.cluster > 1 else ""
            return f"for {names} in tasks({self.items(s.extents)}{options}):"
        if isinstance(s, ir.While):
            return f"while {self.expr(s.cond)}:"
        if isinstance(s, ir.Role):
            groups = f"warpgroups={s.warpgroups * s.teams}{', pingpong' * (s.teams > 1)}{', stagger' * s.stagger}"
            return f"with {s.kind}({groups if s.kind == 'consumer' else ''}):"
        return f"with {s.pipeline}.{s.mode}():"


def _extents(tile: Tile) -> str:
    return "x".join(map(str, tile.shape))
