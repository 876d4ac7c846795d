"""``pk.spawn``: run a function on every rank, on whatever this machine has.

Ranks are threads in the simulator and where several share a GPU, processes where each has its own.  One rank's
exception ends all of them.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from pk import env
from pk.errors import ArgumentError, BackendError, PeerFailed, RankError, short
from pk.runtime import capturing, frames, launch, retired
from pk.runtime import group as groups
from pk.runtime.group import Group
from pk.runtime.processes import run_processes

Function = Callable[..., Any]

# What `backend` may be.  The last three choose between threads and processes: for tests, and functions without pickle.
BACKENDS = ("sim", "cuda", "cuda-threads", "cuda-processes", "sim-processes")
_GRACE_S = 5.0  # for rank threads to notice that another one failed


class _Abandoned(BaseException):
    """Raised inside a rank thread that computes on although another rank has failed."""


def spawn(fn: Function, world_size: int, backend: str | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
    """Run ``fn(rank, *args)`` on ``world_size`` ranks; every rank's return value, in rank order.

    See :func:`pk.spawn`.  Raises :class:`pk.errors.RankError` when a rank fails, :class:`pk.errors.ArgumentError` for
    a world size or backend that does not exist, :class:`pk.errors.BackendError` if the machine has no GPU for
    ``"cuda"``.
    """
    env.warn_unknown()
    groups.check_world_size(world_size)
    if not callable(fn):
        raise ArgumentError(
            f"pk.spawn: {short(fn)} is {type(fn).__name__}, and must be a function.\n  Pass a function of the rank."
        )
    if not isinstance(args, (tuple, list)):
        raise ArgumentError(
            f"pk.spawn: args={short(args)} is {type(args).__name__}, and must be a tuple.\n"
            "  Pass the arguments after the rank as a tuple, such as `args=(x,)`."
        )
    how = _choose(world_size, backend)
    if how == "sim":
        return run_threads(fn, tuple(args), groups.threads(world_size, "sim"))
    if how == "cuda-threads":
        return _cuda_threads(fn, world_size, tuple(args))
    return run_processes(fn, world_size, tuple(args), "sim" if how == "sim-processes" else "cuda", _gpus)


def describe(world_size: int, backend: str | None = None) -> str:
    """One phrase: where :func:`spawn` would run."""
    how = _choose(world_size, backend)
    ranks_ = f"{world_size} rank" + ("s" if world_size > 1 else "")
    if how.startswith("sim"):
        return f"{ranks_}, simulated on the CPU"
    used = min(_gpus(), world_size)
    if used == world_size:
        each = "one GPU" if world_size == 1 else "a GPU each"
        return f"{ranks_}, {each}" + (", threads" if how == "cuda-threads" and world_size > 1 else "")
    return f"{ranks_} sharing {used} GPU" + ("s" if used > 1 else "")


def _choose(world_size: int, backend: str | None) -> str:
    if backend is not None and backend not in BACKENDS:
        raise ArgumentError(
            f"pk.spawn: backend={short(backend)} does not exist.\n"
            '  Use "sim", "cuda" ("cuda-threads", "cuda-processes") or None.'
        )
    chosen = backend or groups.default_backend()
    if chosen != "cuda":
        return chosen
    # One rank runs as a thread of this process: nothing to isolate, and any function will do.
    return "cuda-processes" if 1 < world_size <= _gpus() else "cuda-threads"


def _gpus() -> int:
    """Visible GPUs that run pk's kernels; BackendError if there is none."""
    import torch

    from pk.runtime import driver

    driver.require_hopper(0)
    if not torch.cuda.is_available():
        raise BackendError("torch finds no CUDA device (a CPU build of torch?).\n  Install a CUDA build of torch.")
    return int(torch.cuda.device_count())


# ------------------------------------------------------------------------------------------------------------- threads
def _cuda_threads(fn: Function, world_size: int, args: tuple[Any, ...]) -> list[Any]:
    prepare_environment()
    import torch

    devices = [rank % _gpus() for rank in range(world_size)]
    driver = groups.cuda_driver(0)

    def on_gpu(rank: int, *rest: Any) -> Any:
        torch.cuda.set_device(devices[rank])
        torch.empty(1, device="cuda")  # the context exists from here on
        # Not the legacy default stream, behind which every rank's work would queue.
        # Backward passes run in the rank's own thread too: torch has one thread a GPU for them, in which a rank that
        # waits for another would hold that one's backward up for ever.
        with (
            torch.cuda.stream(torch.cuda.Stream(devices[rank])),
            torch.autograd.set_multithreading_enabled(False),
            capturing.refusing(rank, world_size),
        ):
            value = fn(rank, *rest)
            launch.finish(groups.current())  # the caller may read the value on any stream; and a hang is an error
            return value

    return run_threads(on_gpu, args, groups.threads(world_size, "cuda", devices, driver))


def prepare_environment() -> None:
    """Variables that CUDA reads when it starts; what it has not read is not claimed either."""
    import torch

    if torch.cuda.is_initialized():
        return
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


def run_threads(fn: Function, args: tuple[Any, ...], members: list[Group]) -> list[Any]:
    """Run ``fn`` in one thread for each group in ``members`` (one for each rank)."""
    results: list[Any] = [None] * len(members)
    failures: dict[int, BaseException] = {}
    changed = threading.Condition()
    ended: set[int] = set()

    def body(group: Group) -> None:
        groups.enter(group)
        try:
            results[group.rank] = fn(group.rank, *args)
            group.close()
            group.leave("has returned")
        except BaseException as error:  # noqa: BLE001  raised again by the caller of spawn
            failures[group.rank] = error
            group.leave(f"raised {type(error).__name__}")
        finally:
            groups.enter(None)
            with changed:
                ended.add(group.rank)
                changed.notify_all()

    workers = [threading.Thread(target=body, args=(g,), name=f"pk-rank-{g.rank}", daemon=True) for g in members]
    groups.count_team(+1)
    try:
        for worker in workers:
            worker.start()
        with changed:
            while len(ended) < len(members) and not failures:
                changed.wait(0.5)  # woken now and then, so that KeyboardInterrupt gets in
    finally:
        _end(workers, members, "was interrupted" if not failures and len(ended) < len(members) else "")
        groups.count_team(-1)
        if not any(worker.is_alive() for worker in workers):
            for group in members:  # of ranks that failed, or whose peers did: the others have closed theirs
                retired.leave(group, "has ended")
    if failures:
        raise _rank_error(dict(failures))
    return results


def _end(workers: list[threading.Thread], members: list[Group], why: str) -> None:
    """Wait for the threads; those that neither end nor meet the others within the grace period are interrupted."""
    if why:
        for group in members:
            group.leave(why)
    end = time.monotonic() + _GRACE_S
    for worker in workers:
        worker.join(max(end - time.monotonic(), 0))
    for worker in workers:
        if worker.is_alive() and worker.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident), ctypes.py_object(_Abandoned))


def _rank_error(failures: dict[int, BaseException]) -> BaseException:
    """The error of the rank that failed by itself; the lowest if several did."""
    own = {r: e for r, e in failures.items() if not isinstance(e, (PeerFailed, _Abandoned))} or failures
    rank = min(own)
    error = own[rank]
    if isinstance(error, KeyboardInterrupt):
        return error
    made = RankError(rank, f"raised {type(error).__name__}: {error}", frames.details(error))
    made.__cause__ = frames.trimmed(error)
    return made
