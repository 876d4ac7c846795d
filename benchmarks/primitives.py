"""What moving data and synchronising costs on this machine, in the tile language: bandwidth of each mechanism against
message size and number of SMs, latency of signals and of barriers in an SM, cost of a launch, and the same transfers
written by hand in CUDA beside them.

    python benchmarks/primitives.py --out benchmarks/results

On one GPU loop-back (a rank writes to itself; two ranks that share it exchange signals), on two or more a process for
each of two GPUs, each sending to the other.  All data are checked.  GB/s are per direction, the slower rank counts.
After ``--seconds`` (90) what is left is skipped, and said so.
"""

from __future__ import annotations

import argparse
import os
import pickle
import statistics
import time
from collections.abc import Callable
from typing import Any

import primitive_kernels as kernels
import torch
from handwritten import STAGES, Handwritten
from report import Row, table, write

import pk
from pk.runtime import symm
from pk.runtime.group import current

MiB = 1 << 20
ROW_BYTES = 128  # 64 bfloat16
MOST_BYTES = 256 * MiB
SM_BYTES = 32 * MiB  # moved by each SM, up to MOST_BYTES together
MESSAGES = (256, 64, 16)  # rows: 32, 8 and 2 KiB
SMS = (8, 1, 4, 20, 132)
COPY_BYTES = (256 * MiB, 64 * MiB, 16 * MiB, MiB, 64 * 1024)
SAMPLES = 3
SAMPLE_MS = 2.0

Launch = Callable[[], object]


class Bench:
    """One rank: its buffers, how it times, and what it found."""

    def __init__(self, rank: int, world: int, seconds: float) -> None:
        self.rank, self.world, self.group = rank, world, current()
        self.right, self.left = (rank + 1) % world, (rank - 1) % world
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.end = time.monotonic() + seconds
        self.stream = torch.cuda.current_stream()
        count = MOST_BYTES // ROW_BYTES
        self.x, self.z = self.data(rank, count), torch.empty(count, 64, dtype=torch.bfloat16, device=pk.device())
        self.y = pk.empty((count, 64), torch.bfloat16)
        self.hand = Handwritten()

    def data(self, rank: int, count: int) -> torch.Tensor:
        """Rows of a rank: integers below 128, so that sums of a few are exact."""
        place = torch.arange(count * 64, device=pk.device(), dtype=torch.int32)
        return ((place // 3 + 41 * rank) % 127).bfloat16().view(count, 64)

    def settle(self) -> None:
        """All ranks are here, their streams idle."""
        self.stream.synchronize()
        self.group.barrier("a step of the benchmark", 60)

    def worst(self, value: float) -> float:
        """The largest over the ranks."""
        return max(pickle.loads(data) for data in self.group.exchange("a number", pickle.dumps(value), 60))

    def late(self, what: str) -> bool:
        """Whether time is up, on all ranks alike; then `what` is noted as skipped."""
        if self.worst(time.monotonic() - self.end) < 0:
            return False
        self.notes.append(f"skipped for lack of time: {what}")
        return True

    # --------------------------------------------------------------------------------------------------- timing
    def once_ms(self, launch: Launch, count: int) -> float:
        """Milliseconds of a launch, of ``count`` that follow one which brings the ranks together."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.settle()
        launch()
        start.record(self.stream)
        for _ in range(count):
            launch()
        end.record(self.stream)
        end.synchronize()
        return start.elapsed_time(end) / count

    def ms(self, *launches: Launch, samples: int = SAMPLES) -> list[float]:
        """The same for several, interleaved: median over samples, worst over ranks."""
        counts = [int(min(max(SAMPLE_MS / self.worst(self.once_ms(f, 1)), 1), 50)) for f in launches]
        found: list[list[float]] = [[] for _ in launches]
        for _ in range(samples):
            for times, launch, count in zip(found, launches, counts, strict=True):
                times.append(self.once_ms(launch, count))
        return [self.worst(statistics.median(times)) for times in found]

    def launch_us(self, launch: Launch, count: int = 100) -> float:
        """Microseconds of an empty launch behind others: a delay in front hides the host."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        launch()
        self.settle()
        torch.cuda._sleep(4_000_000)
        start.record(self.stream)
        for _ in range(count):
            launch()
        end.record(self.stream)
        end.synchronize()
        return self.worst(start.elapsed_time(end) / count * 1e3)

    def latency(self, what: str, us: float, **more: Any) -> None:
        """A row that is a time."""
        self.rows.append({"what": what, "world": self.world, "us": us, **more})

    # ------------------------------------------------------------------------------------------------ transfers
    def transfer(
        self, what: str, launch: Launch, nbytes: int, message: int, sms: int, right: Callable[[], bool]
    ) -> None:
        """Check that one launch moved the data, then time it."""
        self.settle()
        launch()
        self.settle()
        wrong = self.worst(float(not right()))
        (ms,) = self.ms(launch)
        self.bandwidth(what, nbytes / ms * 1e-6, message, sms, not wrong)

    def bandwidth(self, what: str, gb_s: float, message: int, sms: int, right: bool = True) -> None:
        """A row that is a rate."""
        self.rows.append(
            {"what": what, "world": self.world, "message": message, "sms": sms, "GB/s": gb_s, "right": right}
        )
        if not right:
            self.notes.append(f"WRONG DATA: {what}, messages of {message} bytes, {sms} SMs")

    def push(self, kernel: Any, rows: int, sms: int) -> tuple[Launch, int, torch.Tensor, int]:
        """``store`` or ``store_add``: the launch, its bytes, what arrives here, how often each tile is repeated."""
        total = min(MOST_BYTES, SM_BYTES * sms)
        repeats = total // (sms * rows * ROW_BYTES)
        lanes, moved = sms * rows, sms * rows * repeats
        launch = kernel.prepare(self.x[:lanes], self.y[:moved], repeats, R=rows, sms=sms)
        return launch, moved * ROW_BYTES, self.y[:moved].view(repeats, lanes, 64), lanes


def sweep(b: Bench) -> None:
    """Bandwidth of every mechanism of the language."""
    for rows in MESSAGES:
        for sms in dict.fromkeys(min(n, b.group.sms) for n in SMS):
            message = rows * ROW_BYTES
            if b.late(f"bandwidth of {message}-byte messages, {sms} SMs"):
                return
            total = min(MOST_BYTES, SM_BYTES * sms) // message * rows
            x, y, z = b.x[:total], b.y[:total], b.z[:total]
            for name in ("store", "store_add"):
                launch, nbytes, arrived, lanes = b.push(getattr(kernels, name), rows, sms)
                b.y.fill_(-1 if name == "store" else 0)
                want = b.data(b.left, lanes)
                label = {"store": "TMA store", "store_add": "TMA reduce-add"}[name]
                b.transfer(label, launch, nbytes, message, sms, lambda a=arrived, w=want: bool((a == w).all()))
            b.y.fill_(-1)
            b.transfer("TMA load + store", kernels.copy.prepare(x, y, R=rows, sms=sms), total * ROW_BYTES, message, sms,
                       lambda y=y, n=total: torch.equal(y, b.data(b.left, n)))  # fmt: skip
            loads(b, kernels.load, "TMA load", z, y, rows, sms, KEEP=True)
            if rows <= 64:  # a tile of 8 KiB is 16 numbers a thread
                b.y.fill_(-1)
                launch = kernels.register_store.prepare(x, y, R=rows, sms=sms)
                b.transfer("register store", launch, total * ROW_BYTES, message, sms,
                           lambda y=y, n=total: torch.equal(y, b.data(b.left, n)))  # fmt: skip
                loads(b, kernels.register_load, "register load", z, y, rows, sms)


def loads(
    b: Bench, kernel: Any, what: str, z: torch.Tensor, y: torch.Tensor, rows: int, sms: int, **check: bool
) -> None:
    """From the right's y.  ``check``: constants under which the kernel keeps what it loads; timed without them."""
    y.copy_(b.data(b.rank, y.shape[0]))
    z.fill_(-1)
    b.settle()
    kernel(z, y, R=rows, sms=sms, **check)
    b.settle()
    right = not b.worst(float(not torch.equal(z, b.data(b.right, y.shape[0]))))
    (ms,) = b.ms(kernel.prepare(z, y, R=rows, sms=sms))
    b.bandwidth(what, y.numel() * 2 / ms * 1e-6, rows * ROW_BYTES, sms, right)


def copy_engine(b: Bench) -> None:
    """``cuMemcpyAsync`` from here to the right."""
    there = symm.lookup(b.y, b.group)[b.right]
    for nbytes in COPY_BYTES:
        if b.late(f"copy engine, {nbytes} bytes"):
            return
        stream = b.hand.cu.CUstream(b.stream.cuda_stream)

        def launch(nbytes: int = nbytes, stream: Any = stream) -> None:
            if int(b.hand.cu.cuMemcpyAsync(there, b.x.data_ptr(), nbytes, stream)[0]):
                raise RuntimeError("cuMemcpyAsync failed")

        b.y.fill_(-1)
        count = nbytes // ROW_BYTES
        b.transfer("copy engine", launch, nbytes, nbytes, 0,
                   lambda n=count: torch.equal(b.y[:n], b.data(b.left, n)))  # fmt: skip


def against_hand(b: Bench) -> None:
    """The language's store and copy beside the hand-written loops: 32 KiB messages, 4 in flight."""
    rows, there = MESSAGES[0], symm.lookup(b.y, b.group)[b.right]
    message = rows * ROW_BYTES
    for sms in dict.fromkeys(min(n, b.group.sms) for n in (8, 1, 4, 132)):
        if b.late(f"hand-written loops, {sms} SMs"):
            return
        mine, nbytes, arrived, lanes = b.push(kernels.store, rows, sms)
        args = (b.x.data_ptr(), there, nbytes // message // sms, message)
        theirs = b.hand.ready("hand_store", sms, STAGES * message, args, b.stream.cuda_stream)
        total = min(MOST_BYTES, SM_BYTES * sms) // ROW_BYTES
        pairs = [
            ("store", mine, theirs, nbytes, lambda a=arrived, n=lanes: bool((a == b.data(b.left, n)).all())),
            ("copy", kernels.copy.prepare(b.x[:total], b.y[:total], R=rows, sms=sms),
             b.hand.ready("hand_copy", sms, STAGES * message, (b.x.data_ptr(), there, total // rows, message),
                          b.stream.cuda_stream),
             total * ROW_BYTES, lambda n=total: torch.equal(b.y[:n], b.data(b.left, n))),
        ]  # fmt: skip
        for name, ours, by_hand, moved, right in pairs:
            checked = []
            for launch in (ours, by_hand):
                b.y.fill_(-1)
                b.settle()
                launch()
                b.settle()
                checked.append(not b.worst(float(not right())))
            ms = b.ms(ours, by_hand, samples=7)
            b.bandwidth(f"hand-written {name}", moved / ms[1] * 1e-6, message, sms, checked[1])
            b.rows.append({"what": f"pk / hand-written, {name}", "world": b.world, "message": message, "sms": sms,
                           "ratio": ms[1] / ms[0], "GB/s": moved / ms[0] * 1e-6, "right": checked[0]})  # fmt: skip


def synchronisation(b: Bench) -> None:
    """Inside an SM, through memory, and launches."""
    if b.late("synchronisation and launches"):
        return
    count = 20_000
    (ms,) = b.ms(kernels.handshakes.prepare(b.x, count, sms=1))
    b.latency("mbarrier, warp to warp in an SM", ms * 1e3 / (2 * count))
    count = 2_000
    (ms,) = b.ms(kernels.through_memory.prepare(b.x, count, sms=2))
    b.latency("counter in memory, SM to SM", ms * 1e3 / (2 * count))
    stream = b.stream.cuda_stream
    ways = {
        "launch, plain": b.hand.ready("hand_nothing", b.group.sms, 0, (), stream),
        "launch, cooperative": b.hand.ready("hand_nothing", b.group.sms, 0, (), stream, cooperative=True),
        "launch, pk" + (" with entry words" if b.world > 1 else ""): kernels.nothing.prepare(b.x),
    }
    if b.world > 1:
        ways["launch, pk with entry and exit words"] = kernels.meet.prepare(b.y)
    for name, launch in ways.items():
        b.latency(name, min(b.launch_us(launch) for _ in range(3)))


def signals(b: Bench, count: int = 2_000) -> None:
    """Between ranks 0 and 1, one way."""
    if b.late("signals"):
        return
    (ms,) = b.ms(kernels.ping_pong.prepare(b.x, count, sms=1))
    b.latency("signal, rank to rank", ms * 1e3 / (2 * count))
    rows = 128
    y = b.y[: count * rows]
    y.fill_(-1)
    launch = kernels.ping_pong_tile.prepare(b.x, y, count, R=rows, sms=1)
    b.settle()
    launch()
    b.settle()
    want = b.data(b.left, rows)
    right = bool((y.view(count, rows, 64) == want).all())
    (ms,) = b.ms(launch)
    b.latency("16 KiB + signal, rank to rank", ms * 1e3 / (2 * count), right=right)
    if not right:
        b.notes.append("WRONG DATA: 16 KiB + signal")


PARTS = {"sync": synchronisation, "signals": signals, "hand": against_hand, "copy": copy_engine, "sweep": sweep}


def measure(rank: int, world: int, seconds: float, parts: tuple[str, ...]) -> tuple[list[Row], list[str]]:
    """One rank's run of the named parts."""
    b = Bench(rank, world, seconds)
    for part in parts:
        PARTS[part](b)
    pk.synchronize()
    return b.rows, b.notes


# ------------------------------------------------------------------------------------------------------------ reporting
def plot(path: str, rows: list[Row]) -> str:
    """Two panels, GB/s against SMs and against message size; a note if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    rates = [r for r in rows if "GB/s" in r and "ratio" not in r and r["sms"] > 0]
    for panel, across, fixed, value in ((panels[0], "sms", "message", 8192), (panels[1], "message", "sms", 8)):
        for name in dict.fromkeys(r["what"] for r in rates):
            points = sorted((r[across], r["GB/s"]) for r in rates if r["what"] == name and r[fixed] == value)
            if points:
                panel.plot(*zip(*points, strict=True), marker="o", label=name)
        panel.set_xscale("log", base=2)
        panel.set_xlabel({"sms": "SMs (8 KiB messages)", "message": "bytes a message (8 SMs)"}[across])
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("GB/s, one direction")
    panels[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    return f"plot: {path}"


def show(rows: list[Row], notes: list[str]) -> None:
    """The tables."""
    rates = [r for r in rows if "GB/s" in r and "ratio" not in r]
    wide = []
    columns = sorted({r["sms"] for r in rates})
    for what, message in dict.fromkeys((r["what"], r["message"]) for r in rates):
        here = {r["sms"]: r["GB/s"] for r in rates if (r["what"], r["message"]) == (what, message)}
        wide.append({"GB/s, one direction": what, "message": message} | {f"{n} SMs": here.get(n, "") for n in columns})
    print(table(wide, ["GB/s, one direction", "message", *(f"{n} SMs" for n in columns)]))
    print(table([r for r in rows if "us" in r], ["what", "world", "us"]))
    print(table([r for r in rows if "ratio" in r], ["what", "sms", "GB/s", "ratio"]))
    for note in notes:
        print(note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="", help="folder for primitives.csv, .json and .png")
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--one", action="store_true", help="loop-back on one GPU, even where there are more")
    args = parser.parse_args()
    os.environ.setdefault("PK_TIMEOUT_S", "10")
    os.environ.setdefault("PK_ENTRY_TIMEOUT_S", "60")
    start, gpus = time.monotonic(), torch.cuda.device_count()
    if gpus >= 2 and not args.one:
        where = "two GPUs, a process each"
        parts = ("sync", "signals", "hand", "copy", "sweep")
        rows, notes = pk.spawn(measure, 2, "cuda-processes", (2, args.seconds, parts))[0]
    else:
        where = "one GPU, loop-back; signals between two ranks that share it"
        rows, notes = pk.spawn(measure, 2, "cuda-threads", (2, args.seconds, ("signals",)))[0]
        left = args.seconds - (time.monotonic() - start)
        more = pk.spawn(measure, 1, "cuda-threads", (1, left, ("sync", "hand", "copy", "sweep")))[0]
        rows, notes = rows + more[0], notes + more[1]
    notes.append(f"{where}; {time.monotonic() - start:.0f} s")
    write(args.out, "primitives", rows, notes)
    if args.out:
        notes.append(plot(os.path.join(args.out, "primitives.png"), rows))
    print(torch.cuda.get_device_name())
    show(rows, notes)
    ratios = [r["ratio"] for r in rows if r["what"] == "pk / hand-written, store" and r["sms"] == 8]
    print("pk's store with 8 SMs / hand-written: " + (f"{ratios[0]:.3f} (target 0.97)" if ratios else "not measured"))
    if any(row.get("right") is False for row in rows):
        raise SystemExit("some data were wrong: see above")


if __name__ == "__main__":
    main()
