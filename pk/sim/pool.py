"""Run the schedules of a check on all cores: this process and a few helpers, each a fresh interpreter.

Helpers are started only when there is work for seconds, and are not forked: a process with rank threads and BLAS
threads cannot be forked safely, and ``multiprocessing`` would import the user's program again.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO, Any

from pk.sim.image import Arguments
from pk.sim.trial import Case, Trial, crashed, run

_START = "import sys; sys.path[:] = {path!r}; from pk.sim.pool import serve; serve()"
_WORTH_S = 2.5  # of work left, before helpers are started: they need about a second themselves
_MOST = 8


class Pool:
    """Helpers, kept from one launch to the next.  A context manager: they end with it."""

    def __init__(self, cores: int | None = None) -> None:
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.helpers = min(cores or available, _MOST) - 1
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._running:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._running.clear()

    def run(self, case: Case, baseline: list[Arguments] | None, seeds: list[int]) -> Iterator[Trial]:
        """A trial for each seed, in the order of ``seeds``.

        The order and what is found do not depend on how many helpers there are.
        """
        began = time.monotonic()
        for done, seed in enumerate(seeds):
            left = len(seeds) - done
            if done and self.helpers and left > 1 and (time.monotonic() - began) / done * left > _WORTH_S:
                yield from self._together(case, baseline, seeds[done:])
                return
            yield _guarded(case, seed, baseline)

    def _together(self, case: Case, baseline: list[Arguments] | None, seeds: list[int]) -> Iterator[Trial]:
        try:
            message = pickle.dumps((case, baseline))
        except Exception:  # noqa: BLE001  a constant of the kernel that cannot be pickled: one core will do
            yield from (_guarded(case, seed, baseline) for seed in seeds)
            return
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for at in range(len(seeds)):
            todo.put(at)
        results: dict[int, Trial] = {}
        arrived = threading.Condition()

        def put(at: int, trial: Trial) -> None:
            with arrived:
                results[at] = trial
                arrived.notify_all()

        def feed(process: subprocess.Popen[bytes]) -> None:
            first = message
            while (at := _next(todo)) is not None:
                trial, first = _ask(process, first, seeds[at]), b""
                if trial is None:  # the helper is gone, or the check is over
                    todo.put(at)
                    return
                put(at, trial)

        self._start(min(self.helpers, len(seeds) - 1))
        feeders = [threading.Thread(target=feed, args=(p,), daemon=True) for p in self._running]
        for thread in feeders:
            thread.start()
        try:
            for wanted, seed in enumerate(seeds):
                while wanted not in results:
                    if (mine := _next(todo)) is not None:
                        put(mine, _guarded(case, seeds[mine], baseline))
                        continue
                    with arrived:
                        if wanted not in results:
                            arrived.wait(0.5)
                assert results[wanted].seed == seed
                yield results.pop(wanted)
        finally:
            while _next(todo) is not None:
                pass
        for thread in feeders:  # their helpers are free for the next launch
            thread.join()

    def _start(self, number: int) -> None:
        self._running = [process for process in self._running if process.poll() is None]
        while len(self._running) < number:
            code = _START.format(path=[p or os.getcwd() for p in sys.path])
            self._running.append(
                subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )


def _guarded(case: Case, seed: int, baseline: list[Arguments] | None) -> Trial:
    try:
        return run(case, seed, baseline)
    except Exception as error:  # noqa: BLE001  told as what it is: a fault of pk
        return Trial(seed, (), broken=crashed(seed, error))


def _next(todo: queue.SimpleQueue[int]) -> int | None:
    try:
        return todo.get_nowait()
    except queue.Empty:
        return None


def _ask(process: subprocess.Popen[bytes], case: bytes, seed: int) -> Trial | None:
    """The trial of ``seed`` from a helper; ``case`` is sent if it is not empty.  None: the helper is gone."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        _send(process.stdin, pickle.dumps((case, seed)))
        trial = pickle.loads(_receive(process.stdout))
    except (OSError, EOFError, ValueError):
        return None
    assert isinstance(trial, Trial)
    return trial


def serve() -> None:
    """The main program of a helper: trials, until its input ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not get between the answers
    case: Any = None
    baseline: Any = None
    while True:
        try:
            message, seed = pickle.loads(_receive(sys.stdin.buffer))
        except (EOFError, KeyboardInterrupt):
            return
        if message:
            case, baseline = pickle.loads(message)
        _send(out, pickle.dumps(_guarded(case, seed, baseline)))


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(8, "little") + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes:
    head = pipe.read(8)
    if len(head) < 8:
        raise EOFError
    return pipe.read(int.from_bytes(head, "little"))
