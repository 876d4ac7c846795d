"""``@pk.kernel``: from a Python function and the arguments of a call to a finished launch.

The pipeline, top to bottom::

    arguments -> Specialization -> ir.Kernel -> check -> simulate                                        (sim)
                                                      -> Source -> Binary -> Module -> launch            (cuda)

A ``Kernel`` is the user's function; a ``Program`` is one specialisation of it (dtypes, numbers of dimensions,
constexprs). Dims, ranks and ``int``/``float`` parameters are run-time values: a new shape is the same ``Program``.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from pk import env, errors
from pk.dsl.captures import Captures
from pk.dsl.frontend import Specialization, TensorSpec, build, typed
from pk.dsl.signature import Signature
from pk.dsl.source import MISSING, checked, global_name, unwrap
from pk.dsl.values import plain
from pk.ir import extents, ops, split, vectors
from pk.ir import nodes as ir
from pk.ir.check import check
from pk.ir.index import evaluate
from pk.ir.sanitize import sanitized
from pk.ir.text import text
from pk.ir.types import DTYPES, DType
from pk.runtime import tensors as rules
from pk.runtime import warm
from pk.runtime.group import current

if TYPE_CHECKING:
    import torch

    from pk.artifact import Source
    from pk.runtime.compile import Binary, Resources
    from pk.runtime.group import Group
    from pk.runtime.launch import Call as Request


_timeout, _entry_timeout = env.peek(env.TIMEOUT_S), env.peek(env.ENTRY_TIMEOUT_S)
_sanitize = env.peek(env.SANITIZE)
MAX_SMS = 1024  # that the simulator takes for a GPU's


@dataclass(frozen=True, slots=True)
class Spec:
    """Stands for a tensor where only its type matters: ``pk.spec(torch.bfloat16, 2)``."""

    dtype: DType
    ndim: int


def spec(dtype: Any, ndim: int) -> Spec:
    """A tensor of ``dtype`` (torch's, pk's, or a name) with ``ndim`` dimensions, for ``source()`` and friends."""
    if not isinstance(ndim, int) or isinstance(ndim, bool) or not 1 <= ndim <= 4:
        raise errors.ArgumentError(
            f"pk.spec({errors.short(dtype)}, {errors.short(ndim)}): pk's tensors have 1 to 4 dimensions.\n"
            "  Pass the number of dimensions."
        )
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
    """The bound arguments of one call: tensors and run-time scalars by parameter name; how many SMs it may fill."""

    tensors: dict[str, torch.Tensor]
    scalars: dict[str, int | float]
    sms: int | None = None


class Program:
    """One specialisation of a kernel.  Everything is made on first use and kept."""

    def __init__(
        self, fn: Callable[..., Any], spec: Specialization, multicast: bool = False, level: int = 0, trace: bool = False
    ) -> None:
        env.warn_unknown()
        self.multicast, self.sanitize, self.trace = multicast, level, trace
        self.captures = Captures()
        self.ir: ir.Kernel = build(fn, spec, self.captures)
        self.captures.close()
        check(self.ir)
        self.ir = sanitized(self.ir, level) if level else self.ir

    @functools.cached_property
    def source(self) -> Source:
        """The CUDA text and its tables; needs no GPU."""
        from pk.codegen import generate

        return generate(self.ir, multicast=self.multicast, sanitize=self.sanitize, trace=self.trace)

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
        return frozenset(
            operand.tensor
            for _, block in self.ir.classes
            for s in split.statements(block)
            if isinstance(s, ir.Do) and ops.TABLE[s.op].asynchronous
            for operand in split.walk(s.operands)
            if isinstance(operand, ir.Memory)
        )

    @functools.cached_property
    def stored(self) -> frozenset[str]:
        """Tensors that TMA stores to: it writes whole chunks of 16 bytes."""
        return frozenset(vectors.stored_tensors(self.ir))

    @functools.cached_property
    def written(self) -> frozenset[str]:
        """Tensors that the kernel writes."""
        return frozenset(
            operand.tensor
            for _, block in self.ir.classes
            for s in split.statements(block)
            if isinstance(s, ir.Do)
            for operand in split.walk(s.operands[i] for i in ops.TABLE[s.op].writes)
            if isinstance(operand, ir.Memory)
        )

    @functools.cached_property
    def types(self) -> str:
        """The tensors' types in words; ranks run one program, so they are the same on all."""
        return ", ".join(f"{t.name} {t.dtype}[{t.ndim}]" for t in self.ir.tensors)

    def environment(self, call: Call, group: Group) -> dict[str, int | float]:
        """What ``ir.index.evaluate`` needs: dims, rank, world and scalar parameters."""
        values: dict[str, int | float] = {"rank": group.rank, "world": group.world_size, **call.scalars}
        for name, tensor in call.tensors.items():
            values.update({f"{name}.{axis}": int(extent) for axis, extent in enumerate(tensor.shape)})
        return values

    def counters(self, values: dict[str, int | float]) -> dict[str, tuple[int, ...]]:
        """Shape of every array of counters that the launch needs, evaluated."""
        name = self.ir.name
        shapes = {s.name: extents.extents(s, values, name) for s in split.counters_of(self.ir)}
        extents.bounded_counters(shapes, name)
        return shapes

    def scratch(self, values: dict[str, int | float]) -> dict[str, tuple[tuple[int, ...], DType]]:
        """Shape and dtype of every ``pk.scratch``, evaluated."""
        name = self.ir.name
        found = {s.name: (extents.extents(s, values, name), s.dtype) for s in self.ir.scratch}
        extents.bounded_scratch({n: math.prod(shape) * d.bits // 8 for n, (shape, d) in found.items()}, name)
        return found

    @functools.cached_property
    def sized_by_scalars(self) -> bool:
        """Whether a run-time scalar decides the shape of signals or scratch."""
        shapes = [s.shape for s in split.counters_of(self.ir)] + [s.shape for s in self.ir.scratch]
        dims = {f"{t.name}.{axis}": 8 for t in self.ir.tensors for axis in range(t.ndim)}
        try:
            for e in (e for shape in shapes for e in shape):
                evaluate(e, {"rank": 0, "world": 1, **dims})
        except (KeyError, ZeroDivisionError):  # a scalar, or extents of 8 happen not to work
            return True
        return False


class Kernel:
    """A kernel function.  Call it with tensors: ``k(a, b, c, group=None, config=None, sms=None, **constexprs)``.

    Parameters annotated ``pk.Global`` take tensors of this rank, ``pk.Parallel`` symmetric tensors (``pk.empty``,
    ``pk.symmetric``), ``pk.constexpr`` Python values (also through ``config``, a dict), ``int`` and ``float``
    run-time numbers.  ``sms``: how many thread blocks, and so SMs, the launch may fill; by default all of this rank.

    A call whose tensors (address, shape, strides, dtype) and constants have been seen before only submits a packed
    launch; :meth:`prepare` skips even the look-up.  Under graph capture a call is recorded; what needs memory, a
    kernel's first call above all, must have happened before.

    Raises :class:`pk.errors.ArgumentError` for arguments that cannot work, :class:`pk.errors.CompileError` for mistakes
    in the function, :class:`pk.errors.BackendError` if the machine cannot run it, :class:`pk.errors.HangError` if an
    earlier launch of the group gave up.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.name = fn.__name__
        self.signature = Signature.of(fn)
        self._programs: dict[tuple[Specialization, bool, int, bool], Program] = {}  # multicast, PK_SANITIZE, traced
        self._captures = Captures()  # of all programs
        self._contexts: weakref.WeakSet[Any] = weakref.WeakSet()  # that remember launches
        self._lock, self.alike = threading.Lock(), False  # alike: not only tensors that peers address have one shape
        self._names = self.signature.names
        self._scalars = {p.name: p.default for p in self.signature.parameters if p.kind in ("int", "float")}

    def __repr__(self) -> str:
        code = unwrap(self.fn).__code__
        return f"<pk.kernel {self.name} of {code.co_filename}:{code.co_firstlineno}>"

    def __reduce__(self) -> str:
        """Pickled by name, as functions are; raises ArgumentError if it has none."""
        return global_name(self, "kernel")

    # ------------------------------------------------------------------------------------------------ calling
    def __call__(
        self, *args: Any, group: Any = None, config: dict[str, Any] | None = None, sms: int | None = None, **kwargs: Any
    ) -> None:
        """Launch on the current stream; see the class."""
        if config:
            kwargs = {**config, **kwargs}
        owner = current(group)
        if self._captures.any and not self._unchanged(self._captures.watched):
            self._refresh()
        context = owner.context
        key = None if context is None else self._find(self, context.warm, sms, args, kwargs)
        if key is not True:
            self._call(args, kwargs, owner, sms, key)

    def prepare(
        self, *args: Any, group: Any = None, config: dict[str, Any] | None = None, sms: int | None = None, **kwargs: Any
    ) -> Callable[[], None]:
        """The call with these arguments, ready to be made any number of times: ``prepared()`` costs a bare launch.

        Collective, compiles if it must, launches nothing.  The tensors' contents may change between launches; scalars
        and ``PK_TIMEOUT_S`` stay what they are now.  Raises as the call does.
        """
        owner = current(group)
        bound = self.signature.bind(args, {**(config or {}), **kwargs})
        call, program = self._prepare(bound, owner, sms)
        if owner.backend == "sim":
            from pk.simulate import simulate_call

            return functools.partial(simulate_call, self, program, call, owner)
        from pk.runtime import launch
        from pk.runtime.packed import Prepared

        request = self._request(program, call, owner)
        return Prepared(launch.prepare(request), request.values, lambda: launch.repack(request))

    @functools.cached_property
    def _find(self) -> Callable[..., Any]:
        """The quickest twin of :meth:`_repeat`."""
        return warm.finder(self._names, self._scalars, Kernel._repeat)

    @functools.cached_property
    def _unchanged(self) -> Callable[[Any], bool]:
        return warm.unchanged()

    def _repeat(
        self, table: dict[Any, Any], sms: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...] | Literal[True] | None:
        """Launch what ``table`` has for an equal call, and return True; else the key to remember the call under.

        None: there is no key, because a constexpr cannot be hashed, which is refused later.
        """
        key, values = self._key(args, kwargs, sms)
        try:
            packed = table.get(key)
        except TypeError:
            return None
        return True if packed is not None and packed.submit(values) else key

    def _key(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], sms: int | None
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """What decides the packed parameters of a call but for the scalars' values; and these, in order."""
        values: tuple[Any, ...] = ()
        if self._scalars:
            args, kwargs, values = warm.aside(self._names, self._scalars, args, kwargs)
        tensor = _tensor_type()
        key: list[Any] = [self, sms, _timeout(), _entry_timeout(), _sanitize()]
        for value in chain(args, *kwargs.items()) if kwargs else args:
            if isinstance(value, tensor):
                key += (value.data_ptr(), value.shape, value.stride(), value.dtype, value.is_neg())
            else:
                key.append(typed(value))
        return tuple(key), values

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], owner: Group, sms: int | None, key: Any) -> None:
        """The long way: specialise, pack and launch; remember the packed launch under ``key``."""
        call, program = self._prepare(self.signature.bind(args, kwargs), owner, sms)
        if owner.backend == "sim":
            from pk.simulate import simulate_call

            simulate_call(self, program, call, owner)
            return
        from pk.runtime import launch

        packed = launch.launch(self._request(program, call, owner))
        # Shapes that scalars decide are evaluated at every call; empty tensors have no address to be known by.
        repeats = key is not None and not (program.trace or program.sized_by_scalars)
        if repeats and all(t.numel() for t in call.tensors.values()):
            launch.remember(packed.context.warm, key, packed)
            self._contexts.add(packed.context)

    def _prepare(self, bound: dict[str, Any], owner: Group, sms: int | None) -> tuple[Call, Program]:
        import torch

        self._limit(owner, sms)
        tensors: dict[str, torch.Tensor] = {}
        for name in self.signature.tensors:
            value = bound[name]
            if isinstance(value, torch.Tensor):
                rules.plain(value, name, f"kernel `{self.name}`")
                tensors[name] = value
            elif value is not None or not self.signature.optional(name):
                raise errors.ArgumentError(errors.no_tensor(f"`{name}` of kernel `{self.name}`", name, value))
        scalars = {name: self.signature.scalar(name, bound[name]) for name in self.signature.scalars}
        return Call(tensors, scalars, sms), self._program({**bound, **tensors}, owner.tracer is not None)

    def _limit(self, owner: Group, sms: int | None) -> None:
        most = owner.sms or MAX_SMS
        if sms is not None and (not isinstance(sms, int) or isinstance(sms, bool) or not 1 <= sms <= most):
            raise errors.ArgumentError(
                f"kernel `{self.name}` is called with sms={errors.short(sms)}, and this rank may fill 1 to {most} "
                "SMs.\n"
                f"  Pass a whole number from 1 to {most}, or leave it out."
            )

    def _request(self, program: Program, call: Call, group: Group) -> Request:
        from pk.runtime import launch, module, multicast
        from pk.runtime.context import refuse_capture

        try:
            for name in program.written & call.tensors.keys():
                rules.separate(call.tensors[name], name, self.name)
            values = program.environment(call, group)
            counters, scratch = program.counters(values), program.scratch(values)
            multicast.refuse(program.source)
            if not module.loaded(program.binary, program.source.entry):
                refuse_capture(group, f"kernel `{self.name}` is called for the first time and has to be loaded")
            with group.driver.on(group.gpu):
                loaded = module.load(program.binary, program.source.entry)
        except errors.PkError as error:
            launch.refuse(group, self.name, error)  # the other ranks must not wait for this launch
        return launch.Call(
            group,
            program.source,
            loaded,
            call.tensors,
            call.scalars,
            counters,
            {name: (shape, torch_dtype(dtype)) for name, (shape, dtype) in scratch.items()},
            self._identity(program, call, counters, scratch),
            call.sms,
        )

    def _identity(
        self, program: Program, call: Call, counters: dict[str, tuple[int, ...]],
        scratch: dict[str, tuple[tuple[int, ...], DType]],
    ) -> str:  # fmt: skip
        """What all ranks must agree on: the program and the shapes of everything that peers address."""
        alike = [(n, tuple(call.tensors[n].shape)) for n in (call.tensors if self.alike else program.remote)]
        signals = ", ".join(f"{name} {shape}" for name, shape in counters.items())
        buffers = ", ".join(f"{name} {shape}" for name, (shape, _) in scratch.items())
        constants = ", ".join(f"{k}={v!r}" for k, v in program.ir.constants)
        level = f"; PK_SANITIZE={program.sanitize}" * (program.sanitize > 0) + "; early" * program.source.early
        symmetric = ", ".join(f"{name} {shape}" for name, shape in alike)
        tensors = f"tensors: {program.types}; {'shapes' if self.alike else 'symmetric'}: {symmetric}{level}"
        return f"{self.name}({constants}) {tensors}; signals: {signals}; scratch: {buffers}"

    # --------------------------------------------------------------------------------------------- specialising
    def _program(self, values: dict[str, Any], trace: bool = False) -> Program:
        key = self._specialization(values), env.multicast()[0], env.SANITIZE.get(), trace
        self._refresh()
        with self._lock:
            if key not in self._programs:
                made = self._programs[key] = Program(self.fn, *key)
                self._captures.add(made.captures)
            return self._programs[key]

    def _refresh(self) -> None:
        """Forget the programs (and their launches) that captured what has changed since: globals, helpers, closures."""
        if self._captures.current():
            return
        with self._lock:
            self._programs = {key: p for key, p in self._programs.items() if p.captures.current()}
            self._captures = Captures()
            for program in self._programs.values():
                self._captures.add(program.captures)
            for context in self._contexts:
                context.forget_kernel(self)

    def _specialization(self, values: dict[str, Any]) -> Specialization:
        tensors = {}
        for name, kind in self.signature.tensors.items():
            value = values[name]
            if value is None:
                continue
            if not 1 <= (ndim := value.ndim) <= 4:
                raise errors.ArgumentError(
                    f"`{name}` of kernel `{self.name}` has {ndim} dimensions; pk's tensors have 1 to 4.\n  Pass a view."
                )
            tensors[name] = TensorSpec(kind, as_dtype(value.dtype, name), ndim)
        return Specialization(tensors, {name: plain(values[name]) for name in self.signature.constants})

    def specialise(self, *args: Any, **kwargs: Any) -> Program:
        """The program for these tensors or specs (``pk.spec``), without a launch and without a GPU.

        Tensors not given are taken as 2-D bfloat16, optional ones as None; a dtype stands for a 2-D tensor of it.
        """
        default = Spec(DTYPES["bfloat16"], 2)
        given = dict(zip(self.signature.names, args, strict=False)) | kwargs
        for name in self.signature.tensors:
            given.setdefault(name, None if self.signature.optional(name) else default)
        for name in self.signature.scalars:
            given.setdefault(name, 0)
        bound = self.signature.bind((), given)
        return self._program({**bound, **{name: self._spec(name, bound[name]) for name in self.signature.tensors}})

    def _spec(self, name: str, value: Any) -> Any:
        """What stands for tensor ``name`` in :meth:`specialise`."""
        import torch

        if isinstance(value, Spec | _tensor_type()) or (value is None and self.signature.optional(name)):
            return value
        if isinstance(value, torch.dtype | DType | str):
            return Spec(as_dtype(value, name), 2)
        raise errors.ArgumentError(
            f"`{name}` of kernel `{self.name}` is {errors.shown(value)}, "
            "which says nothing of a tensor's type.\n  Pass a tensor, pk.spec(dtype, ndim), or a dtype (2-D)."
        )

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


@functools.cache
def _tensor_type() -> type[Any]:
    import torch

    return torch.Tensor


def torch_dtype(dtype: DType) -> Any:
    """torch's dtype for one of pk's."""
    import torch

    return getattr(torch, {"float8_e4m3": "float8_e4m3fn"}.get(dtype.name, dtype.name))


def kernel(fn: Callable[..., Any] = MISSING, **options: Any) -> Kernel:
    """Decorator: make a tile function a kernel.  See the language reference in ``docs/language.md``."""
    return Kernel(checked(fn, "pk.kernel", options))


def debug_level() -> int:
    """``PK_DEBUG``."""
    return int(env.get("PK_DEBUG"))
