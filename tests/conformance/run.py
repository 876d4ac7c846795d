"""The one runner of conformance cases: the simulator or a GPU, many cases to a spawn.

A tensor whose rows are no multiple of 16 bytes (which TMA needs) is a view of a padded one; the padding is checked
after the launch.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

import pk
from tests.conformance import case as c
from tests.conformance.case import Arg, Case

Results = list[list[dict[str, torch.Tensor]]]
"""By rank, by case: the tensors after the launch, on the CPU."""


def _padded(arg: Arg) -> tuple[int, ...]:
    *lead, cols = arg.value.shape
    size = torch.empty(0, dtype=arg.dtype).element_size()
    unit = 16 // size
    return (*lead, -(-cols // unit) * unit) if lead else (cols,)


def place(arg: Arg) -> tuple[torch.Tensor, torch.Tensor]:
    """The argument as a tensor of this rank, and the whole allocation that it is a view of."""
    shape = _padded(arg)
    if arg.parallel:
        whole = pk.empty(shape, arg.dtype)
    else:
        whole = torch.empty(shape, dtype=arg.dtype, device=pk.device())
    whole.copy_(torch.from_numpy(c.untouched(shape, arg.dtype)).to(arg.dtype))
    view = whole[..., : arg.value.shape[-1]]
    view.copy_(torch.from_numpy(arg.value).to(arg.dtype))
    return view, whole


def _rank(rank: int, world: int, cases: list[Case]) -> list[dict[str, torch.Tensor]]:
    launched = []
    for case in cases:
        placed = {name: place(arg) for name, arg in case.arguments(world)[rank].items()}
        arguments: dict[str, Any] = {name: view for name, (view, _) in placed.items()}
        arguments |= case.scalars | case.constants
        case.kernel(**arguments)
        launched.append(placed)
    pk.synchronize()
    results = []
    for case, placed in zip(cases, launched, strict=True):
        for name, (view, whole) in placed.items():
            _check_padding(case, name, view, whole)
        results.append({name: view.cpu() for name, (view, _) in placed.items()})
    return results


def _check_padding(case: Case, name: str, view: torch.Tensor, whole: torch.Tensor) -> None:
    extra = whole[..., view.shape[-1] :].cpu()
    fresh = torch.from_numpy(c.untouched(tuple(extra.shape), extra.dtype)).to(extra.dtype)
    if extra.numel() and (c.bits(extra) != c.bits(fresh)).any():
        raise AssertionError(f"{case}: the kernel wrote beyond the columns of `{name}`")


def run(cases: list[Case], world: int, backend: str) -> Results:
    """Run ``cases`` one after the other on ``world`` ranks of ``backend``."""
    # Threads also where there is a GPU for each rank: cases hold functions, which do not pickle.
    how = "cuda-threads" if backend == "cuda" else backend
    return pk.spawn(_rank, world, how, (world, cases))


def failures(case: Case, world: int, got: list[dict[str, torch.Tensor]]) -> list[str]:
    """What is wrong with every rank's tensors after the launch of ``case``.  Inputs must be unchanged."""
    arguments = case.arguments(world)
    found = []
    for rank, wanted in enumerate(case.meaning(arguments)):
        for name, arg in arguments[rank].items():
            told = c.complain(got[rank][name], wanted.get(name, arg.value), case.signed)
            found += [f"{case}, world {world}, rank {rank}, `{name}`: {told}"] if told else []
    return found


def disagreements(
    case: Case, world: int, got: list[dict[str, torch.Tensor]], simulated: list[dict[str, torch.Tensor]]
) -> list[str]:
    """Where a GPU's results are not the simulator's."""
    found = []
    for rank, wanted in enumerate(case.meaning(case.arguments(world))):
        for name, want in wanted.items():
            told = c.disagree(got[rank][name], simulated[rank][name], want, case.signed)
            found += [f"{case}, world {world}, rank {rank}, `{name}`: {told}"] if told else []
    return found


# ------------------------------------------------------------------------------------------------------ compiling
def _compile(load: Any, key: str) -> str:
    """In a process of its own: one kernel into the disk cache.  What is wrong, if anything is."""
    try:
        binary = load(key).binary
    except Exception as error:  # noqa: BLE001  reported by the test
        lines = str(error).splitlines()
        said = next((line for line in lines if "error:" in line), lines[0] if lines else "")
        return f"error: {type(error).__name__}: {said.strip()}"
    bad = [line for line in binary.log.splitlines() if re.search(r"C7\d\d\d|Performance Loss|warning", line)]
    spilled = binary.resources.spill_bytes + binary.resources.local_bytes
    return " ".join(([f"{spilled} bytes of local memory"] if spilled else []) + bad)


def compile_all(load: Any, keys: list[str], workers: int | None = None) -> dict[str, str]:
    """Compile the programs ``load(key)`` into the disk cache, several at a time (NVRTC wants processes, not threads).

    ``load`` is a function of a module: the workers import it.  Returns what went wrong, by key.
    """
    workers = workers or min(os.cpu_count() or 1, 14)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        told = pool.map(_compile, [load] * len(keys), keys, chunksize=4)
        return {key: text for key, text in zip(keys, told, strict=True) if text}
