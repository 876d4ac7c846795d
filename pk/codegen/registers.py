"""Register tiles: a statement on tiles becomes one loop over the elements that a thread holds.

What cannot stand inside that loop (loads, reductions, casts to narrow types) is computed before it, into a tile of its
own; ``lines`` collects those statements.  A reduction is itself one loop over the expression that it reduces, so that
what is summed needs no registers.
"""

from __future__ import annotations

from typing import cast

from pk.codegen import render
from pk.codegen.direct import Direct
from pk.codegen.expressions import ARGUMENT, ATOM, OPERATORS, UNARY, Expressions, float_literal, int_literal
from pk.codegen.names import Names
from pk.codegen.operands import Operands, RegisterType
from pk.codegen.plan import RolePlan
from pk.ir import nodes as ir
from pk.ir import split
from pk.ir.layout import Layout, Layouts, exchanged, is_grouped
from pk.ir.types import DType, Tile, boolean, float32, int32

TERNARY = 1  # precedence of ``? :``
FIRST = {
    ("sum", "float"): "0.0f", ("sum", "int"): "0",
    ("max", "float"): float_literal(float("-inf")), ("max", "int"): "-2147483647 - 1",
    ("min", "float"): float_literal(float("inf")), ("min", "int"): "2147483647",
}  # fmt: skip
"""What a reduction begins with."""
WORDS = {"sum": "total", "max": "most", "min": "fewest", "load": "loaded", "load_global": "loaded", "columns": "part",
         "cast": "rounded", "iota": "number"}  # fmt: skip
"""Names of the tiles that hold what a loop needs."""
OUTSIDE = frozenset(WORDS) - {"cast"}


class Registers:
    """Writes statements on register tiles of one role."""

    def __init__(self, names: Names, scalar: Expressions, operand: Operands, direct: Direct, role: RolePlan) -> None:
        self._names, self._scalar, self._operand, self._direct = names, scalar, operand, direct
        self._layouts, self._warps = Layouts(role.body, role.warps), role.warps
        self._temporaries = 0
        self.accumulators = frozenset(_written_by_mma(role.body))

    # ----------------------------------------------------------------------------------------------- types
    def type(self, tile: Tile, layout: Layout) -> RegisterType:
        """The C++ type of ``tile`` as a thread of ``layout`` holds it."""
        if layout.kind == "linear":
            return RegisterType(tile.dtype.cuda, tile.rows, tile.cols, layout.warps, layout.share)
        rows = 1 if tile.rows == 1 else tile.rows * 4 // layout.warps
        return RegisterType(tile.dtype.cuda, rows, tile.cols)

    def _copied(self, tile: Tile) -> str:
        """The C++ type of a tile that the role only copies."""
        warps = "" if self._warps == 1 else f", {self._warps}"
        return f"copied_tile<{tile.dtype.cuda}, {tile.rows}, {tile.cols}{warps}>"

    def layout(self, e: ir.Operand) -> Layout:
        """The layout in which expression ``e`` is computed."""
        return self._layouts.of(e)

    def declared(self, v: ir.Var) -> str:
        """The type that variable ``v`` is declared with: one that an mma adds to is an accumulator."""
        assert isinstance(v.type, Tile)
        if v.type.space == "copied":
            return self._copied(v.type)
        kind = self.type(v.type, self._layouts.of_name(v.name))
        return f"accumulator<{kind.rows}, {kind.cols}>" if v.name in self.accumulators else str(kind)

    # ------------------------------------------------------------------------------------------- statements
    def assign(self, s: ir.Assign, declare: bool, over: bool = False) -> list[str]:
        """The lines of ``s``, an assignment to a register tile; ``over``: an mma into it surely comes next.

        Otherwise an accumulator is cleared, though the first mma could overwrite it (the headers' ``zero``): a loop
        over k may run no time at all, and registers that are cleared on one path only make ptxas serialise the mma of
        some kernels (C7518).
        """
        name, e = self._names.local(s.var.name), s.value
        lines = [f"{self.declared(s.var)} {name};"] if declare else []
        if isinstance(s.var.type, Tile) and s.var.type.space == "copied":
            self._copy(name, e, lines)
            return lines
        layout = self._layouts.of_name(s.var.name)
        if isinstance(e, ir.Call) and e.op == "full":
            if over and s.var.name in self.accumulators and e.attr("value") == 0:
                return [*lines, f"zero({name});"]
            assert isinstance(e.type, Tile)
            if e.type.dtype.bits == 32:
                return [*lines, f"fill({name}, {_number(e.attr('value'))});"]
        if isinstance(e, ir.Var):
            return [*lines, f"{name} = {self._names.local(e.name)};"]
        self._into(name, e, layout, lines)
        if declare and s.var.name not in self.accumulators:
            return _declared(self.declared(s.var), name, lines[1:])
        return lines

    def tile(self, e: ir.Operand, lines: list[str], like: str = "") -> str:
        """A tile that holds ``e``: its name, or an expression that makes it; ``lines`` make what that needs.

        ``like``: the tile whose layout it must have, where ``e`` may name none.
        """
        if isinstance(e, ir.Var | ir.Call) and isinstance(e.type, Tile) and e.type.space == "copied":
            return self._names.local(e.name) if isinstance(e, ir.Var) else self._loaded_copy(e, lines)
        layout = self._layouts.of_name(like) if like else self._layouts.of(e)
        narrow = isinstance(e, ir.Call) and e.op == "cast" and isinstance(e.type, Tile) and e.type.dtype.bits < 32
        if isinstance(e, ir.Call) and (e.op == "columns" or narrow):
            assert isinstance(e.type, Tile)
            source = self._tile(e.operands[0], layout, lines)
            return render.op(e.op, source, type=self.type(e.type, layout), **dict(e.attrs))
        return self._tile(e, layout, lines)

    def _copy(self, name: str, e: ir.Operand, lines: list[str]) -> None:
        """Let ``name`` hold a window of a tensor as it lies in memory (``ir.communicator``)."""
        assert isinstance(e, ir.Call)
        window, other = e.operands
        assert isinstance(window, ir.Memory)
        assert isinstance(e.type, Tile)
        number = self._scalar(other, ARGUMENT)
        lines.append(render.op(e.op, self._direct(window), number, target=name, copied=True))

    def _loaded_copy(self, e: ir.Call, lines: list[str]) -> str:
        """The same under a name of its own."""
        self._temporaries += 1
        name = self._names.local(f"loaded {self._temporaries}", "temporary", "loaded")
        assert isinstance(e.type, Tile)
        lines.append(f"{self._copied(e.type)} {name};")
        self._copy(name, e, lines)
        return name

    def _tile(self, e: ir.Operand, layout: Layout, lines: list[str]) -> str:
        if isinstance(e, ir.Var):
            return self._names.local(e.name)
        assert is_grouped(e)
        word = WORDS.get(e.op, "value") if isinstance(e, ir.Call) else "value"
        self._temporaries += 1
        name = self._names.local(f"{word} {self._temporaries}", "temporary", word)
        inside: list[str] = []
        self._into(name, e, layout, inside)
        lines += _declared(f"{self.type(e.type, layout)}", name, inside)  # type: ignore[union-attr, arg-type]
        return name

    def _into(self, name: str, e: ir.Operand, layout: Layout, lines: list[str]) -> None:
        """Let tile ``name`` hold ``e``."""
        assert is_grouped(e)
        kind: Tile = e.type  # type: ignore[union-attr, assignment]
        of = self.type(kind, layout)
        if isinstance(e, ir.Call) and e.op in OUTSIDE:
            self._outside(name, e, of, layout, lines)
        elif kind.dtype.bits < 32 and kind.dtype != boolean:
            self._narrow(name, e, of, layout, lines)
        else:
            text = self._element(e, layout, lines)[0]
            lines.append(f"PK_EACH({of}) {name}(ri, ci) = {text};")

    def _outside(self, name: str, e: ir.Call, of: RegisterType, layout: Layout, lines: list[str]) -> None:
        """What one loop cannot do."""
        attrs = {k: v for k, v in e.attrs if k != "axis"}
        if e.op in ("sum", "max", "min"):
            self._reduce(name, e, layout, lines)
        elif e.op == "iota":
            lines.append(render.op(e.op, target=name, along=0 if of.rows > 1 else 1))
        elif e.op == "load":
            lines.append(render.op(e.op, self._operand(e.operands[0]), type=of, target=name))
        elif e.op == "load_global":
            window, other = e.operands
            assert isinstance(window, ir.Memory)
            assert isinstance(e.type, Tile)
            number = self._operand_text(other, e.type.dtype, layout, lines)
            lines.append(render.op(e.op, self._direct(window), number, target=name))
        elif _slices_shared_vector(e, of):
            load = cast(ir.Call, e.operands[0])  # only what is wanted of it
            shared = self._operand(load.operands[0])
            lines.append(render.op("load", shared, type=of, target=name, first=e.attr("start")))
        else:
            source = self._tile(e.operands[0], layout, lines)
            lines.append(f"{name} = {render.op(e.op, source, type=of, **attrs)};")

    def _narrow(self, name: str, e: ir.Operand, of: RegisterType, layout: Layout, lines: list[str]) -> None:
        """A tile of a narrow type, of which single elements cannot be assigned."""
        wide = e.operands[0] if isinstance(e, ir.Call) and e.op == "cast" else e
        if isinstance(wide, ir.Call) and wide.op == "full":
            assert isinstance(wide.type, Tile)
            value = _number(wide.attr("value"))
            filled = f"filled<{self.type(Tile(wide.type.shape, float32, 'register'), layout)}>({value})"
            lines.append(f"{name} = {render.op('cast', filled, type=of)};")
            return
        lines.append(f"{name} = {render.op('cast', self._tile(wide, layout, lines), type=of)};")

    def _reduce(self, name: str, e: ir.Call, layout: Layout, lines: list[str]) -> None:
        """One loop over what is reduced, then the lanes and warps among themselves."""
        assert isinstance(e.type, Tile)
        source = e.operands[0]
        kind: Tile = source.type  # type: ignore[union-attr, assignment]
        text = self._element(source, layout, lines)[0] if e.op != "sum" else self._element_in(source, 9, layout, lines)
        of, exchange = self.type(kind, layout), exchanged(e, layout)
        guard = f"if ({of}::holds(role, ri, ci)) " if _padded(kind, layout) else ""
        alone = (kind.cols if e.attr("axis") == 1 else kind.rows) == 1
        lines += render.op(
            e.op, text, target=name, first=FIRST[e.op, e.type.dtype.kind], type=of, guard=guard, alone=alone,
            axis=e.attr("axis"), exchange=bool(exchange),
        ).split("\n")  # fmt: skip

    # --------------------------------------------------------------------------------------------- elements
    def _element_in(self, e: ir.Operand, above: int, layout: Layout, lines: list[str]) -> str:
        """One element of ``e``, in parentheses where ``above`` binds tighter."""
        text, precedence = self._element(e, layout, lines)
        return f"({text})" if precedence < above else text

    def _element(self, e: ir.Operand, layout: Layout, lines: list[str]) -> tuple[str, int]:
        """One element of ``e``, a tile or a scalar, and how tight its operator binds."""
        if not is_grouped(e):
            return self._scalar(e, ATOM), ATOM
        if isinstance(e, ir.Var):
            return f"{self._names.local(e.name)}(ri, ci)", ATOM
        if isinstance(e, ir.Call):
            return self._call(e, layout, lines)
        if isinstance(e, ir.Unary):
            if e.op == "abs":
                return f"abs({self._element(e.x, layout, lines)[0]})", ATOM
            return f"{'!' if e.op == 'not' else '-'}{self._element_in(e.x, UNARY + 1, layout, lines)}", UNARY
        assert isinstance(e, ir.Binary), f"not a register tile: {e!r}"
        return self._binary(e, layout, lines)

    def _binary(self, e: ir.Binary, layout: Layout, lines: list[str]) -> tuple[str, int]:
        """In the type of arithmetic: float if one side is, or for a quotient."""
        kinds = {x.type.dtype for x in (e.x, e.y)}
        kind = boolean if e.op in ("and", "or") else float32 if e.op == "/" or float32 in kinds else int32
        function = {"min": "least", "max": "greatest", "//": "floor_div", "%": "floor_mod"}.get(e.op)
        if function is not None:
            sides = (self._operand_text(x, kind, layout, lines) for x in (e.x, e.y))
            return f"{function}({', '.join(sides)})", ATOM
        text, precedence = OPERATORS[e.op]
        x = self._operand_text(e.x, kind, layout, lines, precedence)
        y = self._operand_text(e.y, kind, layout, lines, precedence + 1)
        return f"{x} {text} {y}", precedence

    def _operand_text(
        self, e: ir.Operand, dtype: DType, layout: Layout, lines: list[str], above: int = ARGUMENT
    ) -> str:
        """An operand as a value of ``dtype``."""
        if isinstance(e, ir.Const) and dtype == float32:
            return float_literal(float(e.value))
        found: DType = e.type.dtype  # type: ignore[union-attr]
        if found != dtype and not (dtype == float32 and found.kind == "float"):
            return f"{dtype.cuda}({self._element(e, layout, lines)[0]})"
        return self._element_in(e, above, layout, lines)

    def _call(self, e: ir.Call, layout: Layout, lines: list[str]) -> tuple[str, int]:
        assert isinstance(e.type, Tile)
        if e.op in OUTSIDE:
            return f"{self._tile(e, layout, lines)}(ri, ci)", ATOM
        if e.op == "full":
            return _number(e.attr("value")), UNARY
        if e.op == "cast":
            return self._cast(e, layout, lines)
        if e.op == "where":
            cond = self._element_in(e.operands[0], TERNARY + 1, layout, lines)
            x, y = (self._operand_text(o, e.type.dtype, layout, lines, TERNARY + 1) for o in e.operands[1:])
            return render.op(e.op, cond, x, y), TERNARY
        operands = [self._operand_text(o, float32, layout, lines) for o in e.operands]
        return render.op(e.op, *operands, **dict(e.attrs)), ATOM

    def _cast(self, e: ir.Call, layout: Layout, lines: list[str]) -> tuple[str, int]:
        assert isinstance(e.type, Tile)
        source, dtype = e.operands[0], e.type.dtype
        if dtype == boolean:
            return f"{self._element_in(source, 7, layout, lines)} != 0", 6
        if dtype.bits < 32:
            return f"{self._tile(e, layout, lines)}(ri, ci)", ATOM
        return self._operand_text(source, dtype, layout, lines, UNARY), UNARY


def _slices_shared_vector(e: ir.Call, of: RegisterType) -> bool:
    """Whether ``e`` takes columns of what it loads from a shared tile, which is no fragment of several rows."""
    source = e.operands[0]
    return e.op == "columns" and not of.matrix and isinstance(source, ir.Call) and source.op == "load"


def _padded(tile: Tile, layout: Layout) -> bool:
    """Whether threads hold slots of ``tile`` that are no elements."""
    if layout.kind == "fragment":
        return False
    short_rows = tile.cols > 1 and tile.cols % (layout.vector(tile.cols) * layout.lanes) != 0
    return short_rows or (tile.rows > 1 and tile.rows % layout.groups != 0)


def _declared(kind: str, name: str, lines: list[str]) -> list[str]:
    """The declaration of ``name`` and the ``lines`` that give it its value, in one if they are one assignment."""
    if len(lines) == 1 and lines[0].startswith(f"{name} = "):
        return [f"{kind} {lines[0]}"]
    return [f"{kind} {name};", *lines]


def _number(value: object) -> str:
    return float_literal(value) if isinstance(value, float) else int_literal(int(cast(int, value)))


def _written_by_mma(block: ir.Block) -> set[str]:
    multiplied = [s.operands[0] for s in split.statements(block) if isinstance(s, ir.Do) and s.op == "mma"]
    return {acc.name for acc in multiplied if isinstance(acc, ir.Var)}
