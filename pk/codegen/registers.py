"""Register tiles: expressions of them as C++ values; the headers' tiles have the arithmetic operators."""

from __future__ import annotations

from pk.codegen import render
from pk.codegen.expressions import OPERATORS, Expressions, float_literal
from pk.codegen.names import Names
from pk.codegen.operands import Operands, RegisterType
from pk.codegen.plan import RolePlan
from pk.ir import nodes as ir
from pk.ir import split
from pk.ir.types import Tile

ATOM = 12


class Registers:
    """Writes expressions of register tiles."""

    def __init__(self, names: Names, scalar: Expressions, operand: Operands, role: RolePlan, warpgroups: int) -> None:
        self._names, self._scalar, self._operand, self._warpgroups = names, scalar, operand, max(warpgroups, 1)
        self.accumulators = _accumulators(role.body)

    def type(self, tile: Tile) -> RegisterType:
        """The C++ type of ``tile`` as one warpgroup holds it."""
        return RegisterType(tile.dtype.cuda, tile.rows // self._warpgroups, tile.cols)

    def declared(self, v: ir.Var) -> str:
        """The type that variable ``v`` is declared with: one that an mma adds to is an accumulator."""
        assert isinstance(v.type, Tile)
        kind = self.type(v.type)
        return f"accumulator<{kind.rows}, {kind.cols}>" if v.name in self.accumulators else str(kind)

    def assign(self, s: ir.Assign, declare: bool) -> list[str]:
        """The lines of ``s``, an assignment to a register tile.

        An accumulator is cleared, though the first mma could overwrite it (the headers' ``zero``): a loop over k may
        run no time at all, and registers that are cleared on one path only make ptxas serialise the mma of some
        kernels (C7518).
        """
        name, is_accumulator = self._names.local(s.var.name), s.var.name in self.accumulators
        full = isinstance(s.value, ir.Call) and s.value.op == "full"
        if not (full or (declare and is_accumulator)):
            return [f"{self.declared(s.var)} {name} = {self(s.value)};" if declare else f"{name} = {self(s.value)};"]
        lines = [f"{self.declared(s.var)} {name};"] if declare else []
        if not full:
            return [*lines, f"{name} = {self(s.value)};"]
        assert isinstance(s.value, ir.Call)  # in place: no second tile of registers
        return [*lines, f"fill({name}, {self._number(s.value.attr('value'))});"]

    def __call__(self, e: ir.Operand, above: int = 0) -> str:
        """The text of ``e``, a tile or a scalar that meets one; in parentheses where ``above`` binds tighter."""
        text, precedence = self._write(e)
        return f"({text})" if precedence < above else text

    def _write(self, e: ir.Operand) -> tuple[str, int]:
        if isinstance(e, ir.Var):
            return self._names.local(e.name), ATOM
        if isinstance(e, ir.Call):
            return self._call(e), ATOM
        if isinstance(e, ir.Unary):
            return (f"abs({self(e.x)})", ATOM) if e.op == "abs" else (f"-{self(e.x, 11)}", 10)
        assert isinstance(e, ir.Binary), f"not a register tile: {e!r}"
        assert isinstance(e.type, Tile)
        if e.op in ("min", "max"):
            return f"{e.op}({self._side(e.x, e.type)}, {self._side(e.y, e.type)})", ATOM
        text, precedence = OPERATORS[e.op]
        return f"{self._side(e.x, e.type, precedence)} {text} {self._side(e.y, e.type, precedence + 1)}", precedence

    def _side(self, e: ir.Expr, tile: Tile, above: int = 0) -> str:
        """One side of an operator on tiles: a tile, or a scalar in the tile's element type."""
        if isinstance(e.type, Tile):
            return self(e, above)
        if isinstance(e, ir.Const) and tile.dtype.kind == "float":
            return float_literal(float(e.value))
        return self._scalar(e, above) if e.type.dtype == tile.dtype else f"{tile.dtype.cuda}({self._scalar(e)})"

    def _call(self, e: ir.Call) -> str:
        assert isinstance(e.type, Tile)
        operands = [self._operand(o) if isinstance(o, ir.Shared) else self(o) for o in e.operands]
        attributes = {k: self._number(v) for k, v in e.attrs}
        return render.op(e.op, *operands, type=self.type(e.type), **attributes)

    @staticmethod
    def _number(value: object) -> str:
        return float_literal(value) if isinstance(value, float) else str(value)


def _accumulators(block: ir.Block) -> frozenset[str]:
    """Variables that an mma adds to."""
    multiplied = [s.operands[0] for s in split.statements(block) if isinstance(s, ir.Do) and s.op == "mma"]
    return frozenset(acc.name for acc in multiplied if isinstance(acc, ir.Var))
