"""What a group owns once for all its launches: counters, entry and exit words, record page, scratch; and hangs.

The header and the counters are one symmetric segment (layout: ``pk/include/pk/comm/context.cuh``)::

    0 entry[8] u64   128 exit[8] u64   256 abort u32   384 gen, used[4], done, record_slots u32   512 ctr[4][capacity]
    s32 then 256 zero bytes, the address that empty tensors get, then two sets of scratch for early launches
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

from pk import env
from pk.artifact import MAX_RANKS, Source
from pk.errors import BackendError, HangError
from pk.runtime import records, symm, watch
from pk.runtime.records import Finding, Launched

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pk.runtime.group import Group
    from pk.runtime.symm import Segment

HEADER_BYTES = 512
ABORT_OFFSET = 256
GEN_OFFSET = 384
PAD_BYTES = 256
COUNTER_SETS = 4
EXIT_WORDS, EARLY = 1, 2
EARLY_BYTES = 4 << 20  # of scratch, from which on a launch waits until every rank has begun: it takes longer anyway
CAPACITY = 65536  # counters of a set, at first
CONTEXT_BYTES = 128
_CONTEXT = struct.Struct("<8Q Q Q Q 7I 12x")
TRACE = struct.Struct("<I Q")  # in the place of the last 12 bytes: notes of a log, address of the logs
TRACE_OFFSET = CONTEXT_BYTES - TRACE.size
assert _CONTEXT.size == CONTEXT_BYTES
LAUNCHING = "a launch"  # the key under which rank threads meet to launch
_SETTLE_S = 0.02  # the other blocked roles leave within microseconds of the first record
_COLLECT_S = 2.0


class Context:
    """The launch state of a group on one rank.  Made by :func:`of`, collectively."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.capacity = 0
        self.segment: Segment | None = None
        self.scratch: Segment | None = None
        self.outgrown: list[Segment] = []  # earlier headers: launches under way and graphs may still use them
        self.retired: list[Segment] = []  # earlier scratch, likewise
        self.generation = 0  # changes when launches packed before have to be packed again
        self.kernels: list[Launched] = []
        self.numbers: dict[tuple[int, tuple[tuple[str, tuple[int, ...]], ...], str], int] = {}
        self.hang: HangError | None = None
        self.told = False  # the hang has been raised on this rank
        self.gone: tuple[int, str] | None = None  # a rank whose process has ended while this one waited, and how
        self.attempts = 0  # calls of launch(), the same number on all ranks
        self.submitted = False  # whether the last of them got to the device
        self.closed = False
        self.incarnation = 0
        self.stream: int | None = None  # of the last launch that was not captured
        self.captured: int | None = None  # of the last launch that was
        self.ordered: int | None = None  # a launch on this stream comes after all earlier ones by itself
        # Held from ordering a launch to submitting it: where ranks meet, by one thread at a time (`Turn`).
        self.waits = group.world_size == 1  # for the lock; else whoever finds it taken is refused
        self.order: Any = threading.Lock() if self.waits else group.turn.lock
        self.cache: dict[tuple[Any, ...], Any] = {}  # packed launches, see pk.runtime.launch
        self.warm: dict[tuple[Any, ...], Any] = {}  # the same by the arguments of the call, see pk.kernel
        self.seen: set[str] = set()  # identities that the ranks have compared
        self.host_page, self.device_page = group.driver.host_page(group.gpu, records.PAGE_BYTES)
        self.state = ctypes.c_uint32.from_address(self.host_page)  # of the first record: not 0 when a launch gave up
        self._lock = threading.RLock()
        self._page_lock = threading.Lock()

    # ------------------------------------------------------------------------------------------------- memory
    def fits(self, counters: int, scratch: int) -> bool:
        """Whether a launch with so many counters and bytes of scratch needs no new memory."""
        return counters <= self.capacity and (
            scratch == 0 or (self.scratch is not None and scratch <= self.scratch.nbytes)
        )

    def grow(self, counters: int, scratch: int) -> None:
        """Make the launch fit.  Collective; raises :class:`pk.errors.BackendError` during graph capture."""
        if counters > self.capacity:
            capacity = max(CAPACITY, 1 << (counters - 1).bit_length())
            nbytes = _pad_offset(capacity) + PAD_BYTES + 2 * EARLY_BYTES * (self.group.world_size > 1)
            segment = symm.heap(self.group).allocate(nbytes, f"room for {capacity} counters")
            if self.segment is not None:
                self.outgrown.append(self.segment)
            self.segment, self.capacity = segment, capacity
            self.group.attempt("zeroing counters", lambda: self._zero([segment]))
            self.forget()
        if scratch and (self.scratch is None or scratch > self.scratch.nbytes):
            segment = symm.heap(self.group).allocate(scratch, f"{scratch} bytes of scratch")
            if self.scratch is not None:
                self.retired.append(self.scratch)
            self.scratch = segment
            self.forget()

    def collide(self) -> None:
        """Raise for a thread that has found another one at the group's launches."""
        self.group.turn.collide()

    def forget(self) -> None:
        """Packed launches hold addresses that are no longer right: pack anew."""
        self.generation += 1
        self.cache.clear()
        self.warm.clear()

    def forget_kernel(self, kernel: object) -> None:
        """Calls of ``kernel`` go the long way again."""
        for key in [k for k in list(self.warm) if any(part is kernel for part in k)]:
            self.warm.pop(key, None)

    def _zero(self, headers: list[Segment]) -> None:
        for segment in headers:
            self.group.driver.zero(self.group.gpu, segment.base, segment.nbytes)

    def _headers(self) -> list[Segment]:
        """The header in use, then the outgrown ones, which captured launches still use."""
        return [self._segment(), *self.outgrown]

    def _segment(self) -> Segment:
        assert self.segment is not None, "grow() comes first"
        return self.segment

    @property
    def pad(self) -> int:
        """Address of 256 zero bytes."""
        return self._segment().base + _pad_offset(self.capacity)

    def early_scratch(self, odd: bool) -> tuple[int, ...]:
        """Where the scratch of an early launch begins on every rank, by whether its number is odd.

        With the number, in the header: launches of another header, as in a graph, may use theirs in between.
        """
        at = _pad_offset(self.capacity) + PAD_BYTES + odd * EARLY_BYTES
        return tuple(base + at for base in self._segment().reach.peers)

    # ------------------------------------------------------------------------------------------------- launches
    def number(self, source: Source, signals: Mapping[str, tuple[int, ...]], identity: str) -> int:
        """The ``kernel_id`` that stands for this kernel in records; what launches it now is told with them."""
        key = (id(source), tuple(signals.items()), identity)
        with self._lock:
            if key not in self.numbers:
                self.numbers[key] = len(self.kernels)
                told = self.group.turn.told()
                shown = f"{told}: {identity}" if told else identity
                self.kernels.append(Launched(source, dict(signals), shown))  # holds the source: its id stays taken
                watch.name(self, self.numbers[key], source.name)
            return self.numbers[key]

    def pack(self, kernel: int, hash_: int, counters: int, meeting: int) -> bytes:
        """The context struct of one launch."""
        peers = self._segment().reach.peers
        return _CONTEXT.pack(
            *peers, *(0,) * (MAX_RANKS - len(peers)),
            self.device_page, int(env.TIMEOUT_S.get() * 1e9), int(env.ENTRY_TIMEOUT_S.get() * 1e9),
            self.group.rank, self.group.world_size, hash_, kernel, counters, self.capacity, meeting,
        )  # fmt: skip

    def follow(self, stream: int) -> None:
        """Launches of a context are a sequence: order ``stream`` after the stream of the previous launch.

        What a graph holds is ordered inside the graph; its replays by the stream that they are issued on.
        """
        driver, device = self.group.driver, self.group.gpu
        if stream == 0 and self.group.beside:
            raise legacy_stream(self.group)
        if driver.capturing(device, stream):
            # Eager work cannot be waited for inside a capture, and nothing outside can wait for captured work.
            earlier = [s for s in (self.captured, self.stream) if s not in (None, stream)]
            self.captured, self.ordered = stream, None
            for other in dict.fromkeys(s for s in earlier if s is not None and driver.capturing(device, s)):
                driver.follow(device, stream, other)
            return
        self.precede(stream)
        self.stream, self.ordered = stream, stream

    def precede(self, stream: int) -> None:
        """What comes on ``stream`` from now on comes after the launches so far that were not captured."""
        driver, device, previous = self.group.driver, self.group.gpu, self.stream
        if previous is not None and previous != stream and not driver.capturing(device, previous):
            driver.follow(device, stream, previous)

    # ---------------------------------------------------------------------------------------------------- hangs
    def check(self) -> None:
        """Raise :class:`pk.errors.HangError` if a launch of this group gave up, on whichever rank."""
        if self.hang is None and any(context.stopped for context in self._reachable()):
            self.report(self.incarnation)
        if self.hang is not None:
            self.told = True
            raise HangError(*self.hang.args)

    @property
    def stopped(self) -> bool:
        """Whether this rank has a record."""
        return not self.closed and self.state.value != 0

    def _reachable(self) -> list[Context]:
        """The contexts of all ranks in this process."""
        meeting = self.group.rendezvous
        return [self] if meeting is None else [c for c in list(meeting.board.values()) if isinstance(c, Context)]

    def aborted(self) -> bool:
        """Whether a rank raised this rank's abort word."""
        driver, device = self.group.driver, self.group.gpu
        return any(any(driver.read(device, header.base + ABORT_OFFSET, 4)) for header in self._headers())

    def abort(self, culprit: int) -> None:
        """Make this rank's kernels leave, as if rank ``culprit`` had given up."""
        word = (1 + culprit).to_bytes(4, "little")
        for header in self._headers():
            self.group.driver.write(self.group.gpu, header.base + ABORT_OFFSET, word)

    def page(self) -> list[records.Record]:
        """This rank's complete records."""
        with self._page_lock:
            return [] if self.closed else records.read(ctypes.string_at(self.host_page, records.PAGE_BYTES))

    def findings(self) -> list[Finding]:
        """This rank's records in words."""
        return [records.describe(record, self.kernels) for record in self.page()]

    def report(self, incarnation: int) -> None:
        """Make the HangError of what happened, of all ranks that can be reached within 2 s.  Any thread may call.

        ``incarnation``: the one that hung; nothing happens if the group was reset since, or the error is already there.
        """
        with self._lock:
            if incarnation != self.incarnation:
                return
            if self.hang is None:
                time.sleep(_SETTLE_S)
                found, notes = self._gather()
                limits = (env.TIMEOUT_S.get(), env.ENTRY_TIMEOUT_S.get())
                self.hang = HangError(records.explain(found, notes, limits, self._cause()))
            error = HangError(*self.hang.args)
        if self.group.rendezvous is not None:  # who waits for this rank's next launch would wait for ever
            self.group.rendezvous.interrupt(error, LAUNCHING)

    def _gather(self) -> tuple[list[Finding], list[str]]:
        if self.group.link is not None:
            return self._gather_from_processes()
        return [finding for context in self._reachable() for finding in context.findings()], []

    def _gather_from_processes(self) -> tuple[list[Finding], list[str]]:
        link = self.group.link
        assert link is not None
        tag = f"hang/{self.incarnation}"
        told = {link.rank: self.findings()}
        end = time.monotonic() + _COLLECT_S
        try:
            link.note(f"{tag}/{link.rank}", pickle.dumps(told[link.rank]))
            link.note(tag, b"1")
            while (missing := [r for r in range(link.world) if r not in told]) and time.monotonic() < end:
                for rank in missing:
                    data = link.peek(f"{tag}/{rank}")
                    if data is not None:
                        told[rank] = pickle.loads(data)
                if all(map(link.ended, missing)):  # they will not answer any more
                    break
                time.sleep(0.005)
            refusal = self.refusal()
        except RuntimeError as error:  # the process that kept the store may be the one that has ended
            return told[link.rank], [f"the other ranks' records cannot be read: {str(error).splitlines()[0]}"]
        notes = [f"rank {refusal[0]} did not launch: {refusal[1]}"] if refusal is not None else []
        silent = f"did not answer within {_COLLECT_S:g} s"
        notes += [f"rank {r} {link.ended(r) or silent}" for r in range(link.world) if r not in told]
        return [finding for rank in sorted(told) for finding in told[rank]], notes

    def _cause(self) -> str:
        """What the watcher found out before any record: a rank that is no more."""
        return "" if self.gone is None else f"rank {self.gone[0]} {self.gone[1]}"

    def departed(self) -> tuple[int, str] | None:
        """A rank that a launch of this rank waits for, and that will never begin it: its process has ended.

        A process that ended after its part of the work is no such rank: what this one runs still comes to its end.
        """
        link = self.group.link
        if link is None or self.hang is not None or self.closed:
            return None
        for rank in range(link.world):
            why = link.ended(rank) or link.parted(rank)
            if why and any(self._waits_for(rank, header) for header in self._headers()):
                return rank, why
        return None

    def _waits_for(self, rank: int, header: Segment) -> bool:
        """Whether the launch that uses ``header`` has begun here, has not ended, and has not seen ``rank`` begin."""
        data = self.group.driver.read(self.group.gpu, header.base, HEADER_BYTES)
        numbers = [word & 0xFFFFFFFF for word in struct.unpack_from(f"<{MAX_RANKS}Q", data)]
        number = struct.unpack_from("<I", data, GEN_OFFSET)[0] + 1 & 0xFFFFFFFF
        return numbers[self.group.rank] == number and (numbers[rank] - number) & 0x80000000 != 0

    def peers_hang(self) -> bool:
        """Whether another process of the group reported a hang."""
        link = self.group.link
        return link is not None and self.hang is None and link.peek(f"hang/{self.incarnation}") is not None

    def refuse(self, error: Exception) -> None:
        """Tell the other processes that this rank does not launch what they may already have launched."""
        if self.group.link is not None:
            told = (self.group.rank, f"{type(error).__name__}: {error}")
            with contextlib.suppress(Exception):  # without a store there is nobody to tell, and `error` is what matters
                self.group.link.note(f"refused/{self.incarnation}/{self.attempts}", pickle.dumps(told))

    def refusal(self) -> tuple[int, str] | None:
        """The rank that refused the launch which this rank has begun, and its error."""
        link = self.group.link
        data = link.peek(f"refused/{self.incarnation}/{self.attempts}") if link is not None and self.submitted else None
        return None if data is None else pickle.loads(data)

    def reset(self) -> None:
        """See :meth:`pk.runtime.group.Group.reset`."""
        group = self.group
        group.driver.synchronize(group.gpu)
        group.barrier("pk.reset, all ranks at rest")  # nobody zeroes while another rank's old launch could still write
        ctypes.memset(self.host_page, 0, records.PAGE_BYTES)
        with self._lock:
            self.hang, self.told, self.gone = None, False, None
            self.incarnation += 1
            self.attempts, self.submitted = 0, False
        self.forget()
        # Ends in a meeting: nobody launches before all are zero.
        group.attempt("pk.reset", lambda: self._zero(self._headers()))


def _pad_offset(capacity: int) -> int:
    """From the header to what lies behind its counters."""
    return HEADER_BYTES + 4 * COUNTER_SETS * capacity


def of(group: Group) -> Context:
    """The group's context on this rank.  Collective on the first call.

    Raises :class:`pk.errors.BackendError` where ranks as threads cannot work (environment variables, see protocol).
    """
    if group.context is None:
        group.opened()
        _check_environment(group)
        made: list[Context] = []
        # A rank that captures refuses on all of them: the others must not wait for it.
        group.attempt("making the launch context", lambda: made.append(_make(group)))
        context = made[0]
        context.grow(CAPACITY, 0)
        if group.rendezvous is not None:
            group.rendezvous.board[group.rank] = context
        group.context = context
        watch.add(context)
    return group.context


def _make(group: Group) -> Context:
    refuse_capture(group, "the group's first launch needs memory")
    return Context(group)


def reset(group: Group) -> None:
    """Collective recovery."""
    if group.context is not None:
        group.context.reset()


def close(group: Group) -> None:
    """Drop the context; its memory goes with the heap.  Collective."""
    if group.context is None:
        return
    group.driver.synchronize(group.gpu)
    group.barrier("closing the launch context")
    drop(group)


def drop(group: Group) -> None:
    """As :func:`close`, for this rank alone.  The device is done with it."""
    context, group.context = group.context, None
    if context is None:
        return
    watch.remove(context)
    with context._page_lock:
        context.closed = True
    context.forget()
    for segment in (context.segment, context.scratch, *context.outgrown, *context.retired):
        if segment is not None and group.heap is not None:
            group.heap.free.add(segment.number)
    if group.rendezvous is not None:
        group.rendezvous.board.pop(group.rank, None)
    group.driver.free_host(group.gpu, context.host_page)


def refuse_capture(group: Group, what: str) -> None:
    """Raise :class:`pk.errors.BackendError` if this rank's stream is being captured: ``what`` cannot happen then."""
    driver = group.driver
    if driver.capturing(group.gpu, driver.stream(group.gpu)):
        raise BackendError(
            f"{what}, which is impossible while a CUDA graph is being captured.\n"
            "  Make the same call eagerly once before the capture, on every rank."
        )


def legacy_stream(group: Group) -> BackendError:
    """What to raise where work on CUDA's stream 0 would wait for ranks that wait for it."""
    return BackendError(
        f"this rank shares GPU {group.device} with other ranks and is on the legacy default stream, which waits for "
        "theirs.\n  Stay on the stream that pk.spawn made current, or use torch.cuda.Stream()."
    )


def _check_environment(group: Group) -> None:
    """What makes ranks in one process wait for each other for ever, refused before the first launch."""
    if not group.threaded:
        return
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        raise BackendError(
            "CUDA_LAUNCH_BLOCKING is set: the first rank's launch would not return before the others' begin, and it "
            "waits for them.\n  Unset CUDA_LAUNCH_BLOCKING, or run a process per rank."
        )
    connections = int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") or 8)
    if group.sharers > connections:
        raise BackendError(
            f"{group.sharers} ranks share GPU {group.device}, but CUDA_DEVICE_MAX_CONNECTIONS={connections} lets only "
            f"{connections} of their kernels run side by side.\n"
            "  Set CUDA_DEVICE_MAX_CONNECTIONS=32 before the process first uses CUDA."
        )
