"""``@pk.kernel``: from a Python function and the arguments of a call to a finished launch.

The pipeline, top to bottom::

    arguments -> Specialization -> ir.Kernel -> check -> simulate                                        (sim)
                                                      -> Source -> Binary -> Module -> launch            (cuda)

A ``Kernel`` is the user's function; a ``Program`` is one specialisation of it (dtypes, numbers of dimensions,
constexprs). Dims, ranks and ``int``/``float`` parameters are run-time values: a new shape is the same ``Program``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pk import env, errors
from pk.dsl.frontend import Specialization, TensorSpec, build
from pk.dsl.signature import Signature
from pk.ir import nodes as ir
from pk.ir import ops, split
from pk.ir.check import check
from pk.ir.index import evaluate
from pk.ir.text import text
from pk.ir.types import DTYPES, DType

if TYPE_CHECKING:
    import torch

    from pk.artifact import Source
    from pk.runtime.compile import Binary, Resources
    from pk.runtime.group import Group


@dataclass(frozen=True, slots=True)
class Spec:
    """Stands for a tensor where only its type matters: ``pk.spec(torch.bfloat16, 2)``."""

    dtype: DType
    ndim: int


def spec(dtype: Any, ndim: int) -> Spec:
    """A tensor of ``dtype`` (torch's, pk's, or a name) with ``ndim`` dimensions, for ``source()`` and friends."""
    return Spec(as_dtype(dtype, "spec"), ndim)


def as_dtype(dtype: Any, name: str) -> DType:
    """pk's dtype for a torch dtype, a pk dtype or a name; ArgumentError if pk has none."""
    if isinstance(dtype, DType):
        return dtype
    plain = str(dtype).removeprefix("torch.").replace("float8_e4m3fn", "float8_e4m3")
    if plain not in DTYPES or plain == "bool":
        raise errors.ArgumentError(
            f"`{name}` has dtype {dtype}, which pk cannot move.\n"
            f"  Use one of {', '.join(d for d in DTYPES if d != 'bool')}."
        )
    return DTYPES[plain]


@dataclass(frozen=True, slots=True)
class Call:
    """The bound arguments of one call: tensors and run-time scalars by parameter name."""

    tensors: dict[str, torch.Tensor]
    scalars: dict[str, int | float]


class Program:
    """One specialisation of a kernel.  Everything is made on first use and kept."""

    def __init__(self, fn: Callable[..., Any], specialization: Specialization) -> None:
        self.ir: ir.Kernel = build(fn, specialization)
        check(self.ir)

    @functools.cached_property
    def source(self) -> Source:
        """The CUDA text and its tables; needs no GPU."""
        from pk.codegen import generate

        return generate(self.ir)

    @functools.cached_property
    def binary(self) -> Binary:
        """The cubin, from the disk cache or NVRTC; needs no GPU."""
        from pk.runtime.compile import compile

        return compile(self.source, ir_text=text(self.ir))

    @functools.cached_property
    def remote(self) -> tuple[str, ...]:
        """Tensor parameters that must be symmetric."""
        return tuple(t.name for t in self.ir.tensors if t.kind == "parallel")

    @functools.cached_property
    def tiled(self) -> frozenset[str]:
        """Tensors that TMA addresses: they must meet its rules of alignment, also in the simulator."""
        blocks = [self.ir.compute] + ([self.ir.communicator.body] if self.ir.communicator else [])
        return frozenset(
            operand.tensor
            for block in blocks
            for s in split.statements(block)
            if isinstance(s, ir.Do) and ops.TABLE[s.op].asynchronous
            for operand in s.operands
            if isinstance(operand, ir.Memory)
        )

    def environment(self, call: Call, group: Group) -> dict[str, int | float]:
        """What ``ir.index.evaluate`` needs: dims, rank, world and scalar parameters."""
        values: dict[str, int | float] = {"rank": group.rank, "world": group.world_size, **call.scalars}
        for name, tensor in call.tensors.items():
            values.update({f"{name}.{axis}": int(extent) for axis, extent in enumerate(tensor.shape)})
        return values

    def counters(self, values: dict[str, int | float]) -> dict[str, tuple[int, ...]]:
        """Shape of every ``pk.signals``, evaluated."""
        return {s.name: tuple(int(evaluate(e, values)) for e in s.shape) for s in self.ir.signals}

    def scratch(self, values: dict[str, int | float]) -> dict[str, tuple[tuple[int, ...], DType]]:
        """Shape and dtype of every ``pk.scratch``, evaluated."""
        return {s.name: (tuple(int(evaluate(e, values)) for e in s.shape), s.dtype) for s in self.ir.scratch}


class Kernel:
    """A kernel function.  Call it with tensors: ``k(a, b, c, group=None, config=None, **constexprs)``.

    Parameters annotated ``pk.Global`` take tensors of this rank, ``pk.Parallel`` symmetric tensors (``pk.empty``,
    ``pk.symmetric``), ``pk.constexpr`` Python values (also through ``config``, a dict), ``int`` and ``float``
    run-time numbers.

    Raises :class:`pk.errors.ArgumentError` for arguments that cannot work, :class:`pk.errors.CompileError` for mistakes
    in the function, :class:`pk.errors.BackendError` if the machine cannot run it, :class:`pk.errors.HangError` if an
    earlier launch of the group gave up.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.name = fn.__name__
        self.signature = Signature.of(fn)
        self._programs: dict[Specialization, Program] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<pk.kernel {self.name} of {self.fn.__code__.co_filename}:{self.fn.__code__.co_firstlineno}>"

    # ------------------------------------------------------------------------------------------------ calling
    def __call__(self, *args: Any, group: Any = None, config: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Launch on the current stream; see the class."""
        from pk.runtime.group import current

        bound = self.signature.bind(args, {**(config or {}), **kwargs})
        owner = current(group)
        call, program = self._prepare(bound)
        if owner.backend == "sim":
            from pk.simulate import simulate_call

            simulate_call(self, program, call, owner)
        else:
            self._launch(program, call, owner)

    def _prepare(self, bound: dict[str, Any]) -> tuple[Call, Program]:
        import torch

        tensors: dict[str, torch.Tensor] = {}
        for name in self.signature.tensors:
            value = bound[name]
            if isinstance(value, torch.Tensor):
                tensors[name] = value
            elif value is not None or not self.signature.optional(name):
                raise errors.ArgumentError(
                    f"`{name}` of kernel `{self.name}` is {type(value).__name__} {value!r}, and must be a torch.Tensor."
                )
        scalars = {name: self.signature.scalar(name, bound[name]) for name in self.signature.scalars}
        return Call(tensors, scalars), self._program({**bound, **tensors})

    def _launch(self, program: Program, call: Call, group: Group) -> None:
        from pk.runtime import launch, module

        try:
            loaded = module.load(program.binary, program.source.entry)
        except errors.PkError as error:
            launch.refuse(group, self.name, error)  # the other ranks must not wait for this launch
        values = program.environment(call, group)
        counters, scratch = program.counters(values), program.scratch(values)
        launch.launch(
            group,
            program.source,
            loaded,
            call.tensors,
            call.scalars,
            counters,
            {name: (shape, torch_dtype(dtype)) for name, (shape, dtype) in scratch.items()},
            self._identity(program, call, counters, scratch),
        )

    def _identity(
        self,
        program: Program,
        call: Call,
        counters: dict[str, tuple[int, ...]],
        scratch: dict[str, tuple[tuple[int, ...], DType]],
    ) -> str:
        """What all ranks must agree on: the program and the shapes of everything that peers address."""
        symmetric = ", ".join(f"{name} {tuple(call.tensors[name].shape)}" for name in program.remote)
        signals = ", ".join(f"{name} {shape}" for name, shape in counters.items())
        buffers = ", ".join(f"{name} {shape}" for name, (shape, _) in scratch.items())
        constants = ", ".join(f"{k}={v!r}" for k, v in program.ir.constants)
        return f"{self.name}({constants}) symmetric: {symmetric}; signals: {signals}; scratch: {buffers}"

    # --------------------------------------------------------------------------------------------- specialising
    def _program(self, values: dict[str, Any]) -> Program:
        key = self._specialization(values)
        with self._lock:
            if key not in self._programs:
                self._programs[key] = Program(self.fn, key)
            return self._programs[key]

    def _specialization(self, values: dict[str, Any]) -> Specialization:
        tensors = {}
        for name, kind in self.signature.tensors.items():
            value = values[name]
            if value is None:
                continue
            ndim = value.ndim
            if not 1 <= ndim <= 4:
                raise errors.ArgumentError(
                    f"`{name}` of kernel `{self.name}` has {ndim} dimensions; pk's tensors have 1 to 4.\n"
                    "  Pass a view."
                )
            tensors[name] = TensorSpec(kind, as_dtype(value.dtype, name), ndim)
        return Specialization(tensors, {name: values[name] for name in self.signature.constants})

    def specialise(self, *args: Any, **kwargs: Any) -> Program:
        """The program for these tensors or specs (``pk.spec``), without a launch and without a GPU.

        Tensors not given are taken as 2-D bfloat16.
        """
        default = Spec(DTYPES["bfloat16"], 2)
        given = dict(zip(self.signature.names, args, strict=False)) | kwargs
        for name in self.signature.tensors:
            given.setdefault(name, default)
        for name in self.signature.scalars:
            given.setdefault(name, 0)
        return self._program(self.signature.bind((), given))

    # -------------------------------------------------------------------------------------------------- inspection
    def ir(self, *args: Any, **kwargs: Any) -> str:
        """The typed IR as text.  Arguments as for :meth:`specialise`."""
        return text(self.specialise(*args, **kwargs).ir)

    def source(self, *args: Any, **kwargs: Any) -> str:
        """The emitted CUDA."""
        return self.specialise(*args, **kwargs).source.text

    def resources(self, *args: Any, **kwargs: Any) -> Resources:
        """Registers, spills, local and shared memory of the cubin; compiles it, needs no GPU."""
        return self.specialise(*args, **kwargs).binary.resources

    def ptx(self, *args: Any, **kwargs: Any) -> str:
        """The PTX; needs no GPU."""
        from pk.runtime.compile import ptx

        return ptx(self.specialise(*args, **kwargs).source)

    def sass(self, *args: Any, **kwargs: Any) -> str:
        """The machine code as text; needs no GPU, but ``nvdisasm`` (``pip install nvidia-cuda-nvdisasm``)."""
        from pk.runtime.compile import sass

        return sass(self.specialise(*args, **kwargs).binary.cubin)


def torch_dtype(dtype: DType) -> Any:
    """torch's dtype for one of pk's."""
    import torch

    return getattr(torch, {"float8_e4m3": "float8_e4m3fn"}.get(dtype.name, dtype.name))


def kernel(fn: Callable[..., Any]) -> Kernel:
    """Decorator: make a tile function a kernel.  See the language reference in ``docs/language.md``."""
    return Kernel(fn)


def debug_level() -> int:
    """``PK_DEBUG``."""
    return int(env.get("PK_DEBUG"))
