"""Run a kernel call on the simulator: the ranks' operands meet, one thread simulates all ranks, results go back."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pk import env, errors
from pk.ir.types import DTYPES
from pk.runtime import symm, tensors
from pk.runtime.rendezvous import differing

if TYPE_CHECKING:
    import torch

    from pk.kernel import Call, Kernel, Program
    from pk.runtime.group import Group
    from pk.sim.image import Arguments

# Runs a launch in place of the simulator: the program, all ranks' operands, SMs of each rank, whether with multicast.
Substitute = Callable[["Program", "list[Arguments]", int, bool], None]

_everywhere: list[Substitute] = []
_here = threading.local()


@contextlib.contextmanager
def substituted(by: Substitute, everywhere: bool = False) -> Iterator[None]:
    """Inside, simulated launches go to ``by``: those of this rank thread, or of the whole process."""
    if everywhere:
        _everywhere.append(by)
        try:
            yield
        finally:
            _everywhere.remove(by)
        return
    before = getattr(_here, "by", None)
    _here.by = by
    try:
        yield
    finally:
        _here.by = before


def simulate_call(kernel: Kernel, program: Program, call: Call, group: Group) -> None:
    """Simulate one launch on all ranks of ``group`` and leave the results in the callers' tensors."""
    _refuse(kernel, program, call, group)
    remote = [name for name in program.remote if name in call.tensors] if group.world_size > 1 else []
    payload = {
        "tensors": {name: _portable(t) for name, t in call.tensors.items()},
        "dtypes": {name: t.dtype for name, t in call.tensors.items()},
        "scalars": call.scalars, "shapes": _shapes(kernel, program, call), "sms": call.sms,
        "called": group.turn.told(), "team": group.team,
        "types": program.types, "places": {name: symm.place(call.tensors[name], group) for name in remote},
    }  # fmt: skip
    constants = ", ".join(f"{k}={v!r}" for k, v in program.ir.constants)
    what = f"launch of {kernel.name}({constants})"
    result = group.meet(what, payload, lambda ranks: _simulate(kernel, program, ranks))
    for name, tensor in result.items():
        # Ranks in other processes get copies back: of what the kernel writes, since autograd counts writes to a tensor.
        if name in program.written and tensor.data_ptr() != call.tensors[name].data_ptr():
            call.tensors[name].copy_(tensor.view(call.tensors[name].dtype))


def _portable(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, float8 as a view of bytes: torch cannot unpickle float8."""
    import torch

    return tensor.detach().view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _simulate(kernel: Kernel, program: Program, ranks: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    from pk.sim.run import DEFAULT_SMS, SimTensor, simulate

    _agree(kernel, ranks)
    args: list[Arguments] = [
        {name: SimTensor(*_raw(tensor.view(rank["dtypes"][name]))) for name, tensor in rank["tensors"].items()}
        | rank["scalars"]
        for rank in ranks
    ]
    limits = [rank["sms"] for rank in ranks if rank["sms"] is not None]
    sms, seed = min([int(env.get("PK_SIM_SMS")) or DEFAULT_SMS, *limits]), int(env.get("PK_SEED"))
    substitute: Substitute | None = getattr(_here, "by", None) or (_everywhere[-1] if _everywhere else None)
    if substitute is not None:
        teams: set[int] = getattr(substitute, "teams", set())
        teams.add(ranks[0]["team"])
        substitute(program, args, sms, env.multicast()[0])
    else:
        simulate(program.ir, args, sms=sms, seed=seed, multicast=env.multicast()[0])
    return [rank["tensors"] for rank in ranks]


def forget(tensor: torch.Tensor) -> None:
    """Mark a CPU tensor as memory that nobody has written: it reads as NaN, and a check follows what is read of it."""
    from pk.sim.written import forget_contents

    if tensor.dtype in _known_dtypes():
        forget_contents(*_raw(tensor))


def _known_dtypes() -> set[torch.dtype]:
    import torch

    names = (name.replace("float8_e4m3", "float8_e4m3fn") for name in DTYPES if name != "bool")
    return {getattr(torch, name) for name in names}


def _raw(tensor: torch.Tensor) -> tuple[Any, Any]:
    """The storage of a CPU tensor as NumPy sees it, strides kept, and its pk dtype."""
    from pk.sim.memory import storage_of

    dtype = DTYPES[str(tensor.dtype).removeprefix("torch.").replace("float8_e4m3fn", "float8_e4m3")]
    return tensors.numpy_view(tensor, storage_of(dtype)), dtype


def _shapes(kernel: Kernel, program: Program, call: Call) -> dict[str, tuple[int, ...]]:
    """Of the tensors that have one shape on all ranks."""
    names = call.tensors if kernel.alike else program.remote
    return {name: tuple(call.tensors[name].shape) for name in names if name in call.tensors}


def _agree(kernel: Kernel, ranks: list[dict[str, Any]]) -> None:
    calls = [rank["called"] for rank in ranks]
    if all(calls) and len({(rank["types"], tuple(rank["shapes"].items())) for rank in ranks}) > 1:
        raise errors.RanksDisagree(
            f"the ranks make different calls at the same point:\n{differing(calls)}\n"
            "  Pass the same shapes, dtypes, layouts and options on every rank."
        )
    types = [rank["types"] for rank in ranks]
    if len(set(types)) > 1:
        raise errors.RanksDisagree(
            f"the ranks call kernel `{kernel.name}` with tensors of different types:\n{differing(types)}\n"
            "  Pass tensors of the same dtype and number of dimensions on every rank."
        )
    for name in ranks[0]["shapes"]:
        seen = [rank["shapes"].get(name) for rank in ranks]
        if len(set(seen)) > 1:
            listing = ", ".join(f"rank {r}: {shape}" for r, shape in enumerate(seen))
            raise errors.RanksDisagree(
                f"the ranks call kernel `{kernel.name}` with different shapes of `{name}`: {listing}.\n"
                "  A Parallel tensor has one shape on all ranks."
            )
    symm.same_places(kernel.name, [rank["places"] for rank in ranks])


def _refuse(kernel: Kernel, program: Program, call: Call, group: Group) -> None:
    """The same arguments are refused here as on a GPU, so that what runs on a laptop runs there."""
    from pk.runtime.tensormap import validate, validate_stored

    env.TIMEOUT_S.get(), env.ENTRY_TIMEOUT_S.get(), env.DEBUG.get()  # raise if they cannot be read
    values = program.environment(call, group)
    for name, tensor in call.tensors.items():
        if tensor.device.type != "cpu":
            raise errors.ArgumentError(
                f"`{name}` of kernel `{kernel.name}` is a {tensor.device.type.upper()} tensor, "
                "but the group is simulated.\n"
                f'  Use `{name}.cpu()`, or run with `backend="cuda"`.'
            )
        if name in program.remote:
            symm.lookup(tensor, group, name)
        if name in program.tiled and tensor.numel():
            dtype_name = str(tensor.dtype).removeprefix("torch.")
            validate(name, dtype_name, tuple(tensor.shape), tensor.stride(), tensor.data_ptr())
            if name in program.stored:
                validate_stored(name, dtype_name, tuple(tensor.shape))
        if name in program.written:
            tensors.separate(tensor, name, kernel.name)
    program.counters(values)
    for name, (shape, dtype) in program.scratch(values).items():
        if name in program.tiled and all(shape):
            strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
            validate(name, dtype.name, shape, strides)
            if name in program.stored:
                validate_stored(name, dtype.name, shape)
