"""``pk.spawn`` with a process for each rank: start them, pass values, notice at once when one ends badly."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from pk.errors import ArgumentError, PeerFailed, RankError
from pk.runtime import frames, launch, pickled
from pk.runtime import group as groups
from pk.runtime.link import Link

_GRACE_S = 5.0  # for the other ranks to report, when one failed

# What a rank sends: ("value", value) or ("error", exception or None, type and text, traceback, whether a peer failed)
Message = tuple[Any, ...]


def run_processes(
    fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], backend: groups.Backend, gpus: Callable[[], int]
) -> list[Any]:
    """Run ``fn(rank, *args)`` in ``world_size`` new processes; their values in rank order.

    Raises :class:`pk.errors.RankError` as soon as a rank raises or is killed, after ending the others.
    """
    job = _pickled(fn, args)
    devices = [rank % gpus() for rank in range(world_size)] if backend == "cuda" else [None] * world_size
    import torch.distributed as distributed

    # The store lives here, so that it outlives whichever rank dies.
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    context = multiprocessing.get_context("spawn")
    members: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for rank in range(world_size):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_main,
                args=(theirs, rank, world_size, store.port, backend, devices[rank], job),
                name=f"pk-rank-{rank}",
            )
            process.start()
            theirs.close()  # so that the pipe ends when the rank does
            members.append(process)
            pipes.append(mine)
        return _collect(members, pipes)
    finally:
        _end(members)
        for pipe in pipes:
            pipe.close()


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickled.dumps((fn, args))
    except Exception as error:  # noqa: BLE001  pickle raises TypeError, AttributeError, PicklingError and the object's own
        name = getattr(fn, "__qualname__", repr(fn))
        raise ArgumentError(
            f"pk.spawn: `{name}` or its arguments cannot be sent to other processes: {error}.\n"
            '  Define the function at module level, or pass backend="cuda-threads" to run the ranks as threads.'
        ) from None


# ---------------------------------------------------------------------------------------------------------- the parent
def _collect(members: list[BaseProcess], pipes: list[Connection]) -> list[Any]:
    messages: dict[int, Message] = {}
    ranks = {pipe: rank for rank, pipe in enumerate(pipes)}
    while len(messages) < len(members):
        for pipe in wait([p for p in pipes if ranks[p] not in messages]):
            assert isinstance(pipe, Connection)
            rank = ranks[pipe]
            messages[rank] = _receive(pipe, members[rank])
        if any(m[0] == "error" for m in messages.values()):
            _drain(members, pipes, messages)
            raise _rank_error(messages)
    return [messages[rank][1] for rank in range(len(members))]


def _receive(pipe: Connection, process: BaseProcess) -> Message:
    try:
        message: Message = pickled.loads(pipe.recv_bytes())
        return message
    except EOFError:  # it ended without a word
        process.join(_GRACE_S)
        return ("error", None, _fate(process.exitcode), "", False)
    except Exception as error:  # noqa: BLE001  its value does not unpickle here
        return ("error", None, f"returned a value that cannot be received: {error}", "", False)


def _fate(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name} ({-code})"
    return (
        f"exited with status {code} before it returned; see its output above.\n"
        '  A script that calls pk.spawn does so under `if __name__ == "__main__":`.'
    )


def _drain(members: list[BaseProcess], pipes: list[Connection], messages: dict[int, Message]) -> None:
    """Give the ranks that a failure has just released a moment: one of them may have been the first to fail."""
    end = time.monotonic() + _GRACE_S
    while not any(m[0] == "error" and not m[4] for m in messages.values()):  # else the culprit is known
        left = [p for rank, p in enumerate(pipes) if rank not in messages]
        ready = wait(left, timeout=max(end - time.monotonic(), 0)) if left else []
        if not ready:
            return
        for pipe in ready:  # maybe not all that are about to come: peers may notice a death before its pipe ends
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            messages[rank] = _receive(pipe, members[rank])


def _rank_error(messages: dict[int, Message]) -> RankError:
    failed = {rank: m for rank, m in messages.items() if m[0] == "error"}
    own = {rank: m for rank, m in failed.items() if not m[4]} or failed
    rank = min(own)
    _, error, what, details, _ = own[rank]
    made = RankError(rank, what, details)
    made.__cause__ = error
    return made


def _end(members: list[BaseProcess]) -> None:
    for process in members:
        if process.is_alive():
            process.terminate()
    for process in members:
        process.join(_GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()


# ------------------------------------------------------------------------------------------------------------- a rank
def _main(
    pipe: Connection, rank: int, world: int, port: int, backend: groups.Backend, device: int | None, job: bytes
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends us
    threading.Thread(target=_end_with_parent, name="pk-parent", daemon=True).start()
    link: Link | None = None
    try:
        fn, args = pickled.loads(job)
        import torch.distributed as distributed

        store = distributed.TCPStore(
            "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        link = Link(store, rank, world)
        message: Message = ("value", _host(_run(link, fn, args, backend, device)))
        data = pickled.dumps(message)
    except BaseException as error:  # noqa: BLE001  sent to the parent
        if link is not None:
            link.leave(f"raised {type(error).__name__}")
        data = _failure(error)
    with contextlib.suppress(OSError):  # the parent has gone
        pipe.send_bytes(data)
    pipe.close()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)  # it was killed, and nobody waits for us


def _run(link: Link, fn: Callable[..., Any], args: tuple[Any, ...], backend: groups.Backend, device: int | None) -> Any:
    driver = None
    if device is not None:
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
        import torch

        torch.cuda.set_device(device)
        torch.empty(1, device="cuda")  # the context exists from here on
        driver = groups.cuda_driver(device)
    group = groups.processes(link, backend, device, driver)
    groups.enter(group, whole_process=True)
    value = fn(link.rank, *args)
    launch.finish(group)
    value = _host(value)
    group.close()
    group.leave("has returned")
    return value


def _failure(error: BaseException) -> bytes:
    what = f"raised {type(error).__name__}: {error}"
    details = frames.details(error)
    blames = isinstance(error, PeerFailed)
    try:
        data = pickled.dumps(("error", error, what, details, blames))
        pickled.loads(data)  # an exception may pickle and yet not come back
        return data
    except Exception:  # noqa: BLE001
        return pickled.dumps(("error", None, what, details, blames))


def _host(value: Any) -> Any:
    """``value`` with its CUDA tensors on the CPU: device memory does not outlive its process."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu() if value.is_cuda else value
    if isinstance(value, dict):
        return {k: _host(v) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_host(v) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_host(v) for v in value)
    return value
