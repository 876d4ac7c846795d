"""The ranks of a benchmark: processes with a GPU each (``torch.distributed``), or threads of ``pk.spawn``."""

from __future__ import annotations

import math
import multiprocessing
import sys
import tempfile
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

import pk
from pk.runtime.group import current, default_backend

CYCLES_US = 1_980  # of the GPU's clock, at most
MOST_DELAY_US = 20_000
MEETING_US = 400  # host time of `align` and of two events
MESSAGE = 600  # characters of an error that are shown


class Team(ABC):
    """One rank among the others: how they agree, and how it times."""

    sms: int | None = None  # that a product without communication may fill
    library = True  # torch.distributed is there

    def __init__(self, rank: int, world: int, device: torch.device, began: float, seconds: float) -> None:
        self.rank, self.world, self.device, self.began, self.seconds = rank, world, device, began, seconds
        self.gpu = device.type == "cuda"

    @abstractmethod
    def worst(self, values: Iterable[float]) -> list[float]:
        """The largest over the ranks, element by element."""

    @abstractmethod
    def told(self, value: Any) -> list[Any]:
        """Every rank's value, in order."""

    @abstractmethod
    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' rows."""

    @abstractmethod
    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks; ``x`` may be used up."""

    @abstractmethod
    def align(self) -> None:
        """What is enqueued after this begins on no rank before all are here."""

    def left(self) -> float:
        """Seconds, on all ranks alike."""
        return -self.worst([time.time() - self.began - self.seconds])[0]

    def say(self, text: str) -> None:
        """Printed once."""
        if self.rank == 0:
            print(text, flush=True)

    def sync(self) -> None:
        """Wait for this rank's stream."""
        if self.gpu:
            torch.cuda.current_stream().synchronize()

    def attempt(self, what: str, fn: Callable[[], Any]) -> tuple[bool, Any]:
        """``fn()`` on every rank; whether it worked on all, else what went wrong is printed."""
        value, error = None, ""
        try:
            value = fn()
            pk.synchronize()  # says it if a launch gave up
        except Exception as problem:  # noqa: BLE001  one contender's failure is a line of the report
            error = f"{type(problem).__name__}: {problem}"[:MESSAGE]
            if not isinstance(problem, pk.PkError):
                error += traceback.format_exc(limit=-3)[:MESSAGE]
        if not self.worst([float(bool(error))])[0]:
            return True, value
        told = self.told(error)
        self.say(f"   !! {what} failed: " + "; ".join(f"rank {r}: {e}" for r, e in enumerate(told) if e))
        if any("Hang" in e or "Peer" in e for e in told):
            pk.reset()
        return False, None

    # --------------------------------------------------------------------------------------------------- timing
    def host_us(self, fn: Callable[[], object], count: int) -> float:
        """What a call costs the host."""
        self.sync()
        began = time.perf_counter()
        for _ in range(count):
            fn()
        took = time.perf_counter() - began
        self.sync()
        return 1e6 * took / count

    def sample(self, fn: Callable[[], object], count: int, host_us: float, first: bool = True) -> float:
        """Microseconds of a call on this rank, of ``count`` back to back; ``first``: after one that does not count."""
        if not self.gpu:
            return self.host_us(fn, count)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(int(min(1.3 * (count + 1) * host_us + MEETING_US, MOST_DELAY_US) * CYCLES_US))
        self.align()
        if first:
            fn()
        start.record()
        for _ in range(count):
            fn()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / count


class Processes(Team):
    """Ranks that are processes."""

    def __init__(self, rank: int, world: int, device: torch.device, began: float, seconds: float) -> None:
        super().__init__(rank, world, device, began, seconds)
        self.token = torch.zeros(1, device=device)

    def worst(self, values: Iterable[float]) -> list[float]:
        """As declared."""
        found = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return [float(x) for x in found.cpu()]

    def told(self, value: Any) -> list[Any]:
        """As declared."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """As declared."""
        parts = [torch.empty_like(x) for _ in range(self.world)]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """As declared."""
        dist.all_reduce(x)
        return x

    def align(self) -> None:
        """On the device."""
        dist.all_reduce(self.token)


class Threads(Team):
    """Ranks that are threads, and share a GPU."""

    library = False

    def __init__(self, rank: int, world: int, device: torch.device, began: float, seconds: float) -> None:
        super().__init__(rank, world, device, began, seconds)
        self.group = current()
        self.sms = self.group.sms or None

    def told(self, value: Any) -> list[Any]:
        """As declared."""
        found: list[Any] = self.group.meet("values", value, lambda values: [values] * len(values))
        return found

    def worst(self, values: Iterable[float]) -> list[float]:
        """As declared."""
        return [max(column) for column in zip(*self.told(list(values)), strict=True)]

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """As declared."""
        return self._of_all(x, torch.cat)

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """As declared."""
        return self._of_all(x, lambda parts: torch.stack(parts).sum(0))

    def _of_all(self, x: torch.Tensor, fn: Callable[[list[torch.Tensor]], torch.Tensor]) -> torch.Tensor:
        self.sync()
        made = fn([part.to(x.device) for part in self.told(x)])
        self.sync()
        self.told(None)  # the others have read x
        return made

    def align(self) -> None:
        """On the host: launches of all ranks are submitted together anyway."""
        self.told(None)


# ------------------------------------------------------------------------------------------------------- processes
def processes(run: Callable[[Team, Any], int], world: int, args: Any, began: float) -> int:
    """``run(team, args)`` in a process for each rank, under ``torch.distributed``; an exit code."""
    with tempfile.TemporaryDirectory(prefix="pk-bench-") as folder:
        context = multiprocessing.get_context("spawn")
        place = f"file://{folder}/store"
        return supervise(
            [context.Process(target=_rank, args=(run, rank, world, place, args, began)) for rank in range(world)]
        )


def _rank(run: Callable[[Team, Any], int], rank: int, world: int, place: str, args: Any, began: float) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # torch renames its collectives
    gpu = default_backend() == "cuda"
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(rank)
        torch.backends.cuda.matmul.allow_tf32 = False
    else:
        torch.set_num_threads(1)
    more = {"device_id": device} if gpu else {}
    dist.init_process_group("nccl" if gpu else "gloo", init_method=place, rank=rank, world_size=world, **more)
    wrong = run(Processes(rank, world, device, began, args.seconds), args)
    pk.synchronize()
    pk.finalize()
    dist.barrier()
    dist.destroy_process_group()
    if wrong:
        sys.exit("wrong results")


def supervise(ranks: list[Any]) -> int:
    """Start the processes and wait; when one fails, the others get some seconds."""
    for process in ranks:
        process.start()
    end = math.inf
    while any(process.is_alive() for process in ranks) and time.time() < end:
        time.sleep(0.05)
        if end == math.inf and any(process.exitcode for process in ranks):
            end = time.time() + 15
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)
