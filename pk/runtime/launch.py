"""Launching: from the arguments of one call to a kernel on a stream, with the checks that keep ranks from hanging.

A warm call (same tensors) does not come here: it finds its packed parameters and only submits.  Ranks that are threads
of one process do not launch themselves: they meet, and one thread submits all ranks' launches back to back, so that no
host call of a rank can fall between two launches that wait for each other.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from pk import env
from pk.artifact import Source
from pk.errors import ArgumentError, BackendError, PeerFailed, PeerLate, PkError, RanksDisagree
from pk.runtime import context as contexts
from pk.runtime import params, symm
from pk.runtime.context import Context
from pk.runtime.packed import Packed, Submit
from pk.runtime.rendezvous import differing

if TYPE_CHECKING:
    import torch

    from pk.runtime.group import Group

_SCRATCH_ALIGNMENT = 1024
_CACHED = 1024  # packed launches that a context keeps
_PATIENCE_S = 10.0  # for a peer's first launch of this shape; after it the device finds out whether the ranks agree


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of :func:`launch`.

    ``source``, loaded as ``module``; ``signals``: shape of every counter array; ``scratch``: shape and dtype of every
    scratch tensor; ``identity``: what all ranks must agree on, in words; ``sms``: how many blocks, None: all that fit.
    """

    group: Group
    source: Source
    module: Any
    tensors: Mapping[str, torch.Tensor]
    scalars: Mapping[str, int | float]
    signals: Mapping[str, tuple[int, ...]]
    scratch: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    identity: str
    sms: int | None = None

    def key(self) -> tuple[Any, ...]:
        """Equal keys have equal parameters, but for the scalars."""
        return (
            id(self.source), id(self.module), self.identity, env.TIMEOUT_S.get(), env.ENTRY_TIMEOUT_S.get(), self.sms,
            *((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in self.tensors.values()),
        )  # fmt: skip

    @property
    def values(self) -> tuple[int | float, ...]:
        """Of the scalars."""
        return tuple(self.scalars.values())

    @property
    def counters(self) -> int:
        """How many counters the launch declares."""
        return sum(params.size(shape) for shape in self.signals.values())

    @property
    def early(self) -> bool:
        """Whether its ranks need not see each other begin."""
        return self.source.early and self.group.world_size > 1 and self.scratch_layout()[1] <= contexts.EARLY_BYTES

    @property
    def room(self) -> tuple[int, int]:
        """Counters, and bytes of the arena of scratch, that it needs."""
        return self.counters, 0 if self.early else self.scratch_layout()[1]

    def scratch_layout(self) -> tuple[dict[str, int], int]:
        """Offset of every scratch tensor in the arena, and the arena's size."""
        offsets, at = {}, 0
        for name, (shape, dtype) in self.scratch.items():
            offsets[name] = at
            at += -(-params.size(shape) * dtype.itemsize // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT
        return offsets, at


@dataclass(frozen=True, slots=True)
class _Request:
    """What a rank thread brings to the meeting: a launch, the wish for more memory (``ready`` is None), or an error."""

    group: Group
    context: Context | None
    identity: str
    ready: Packed | None
    stream: int
    error: Exception | None = None


def launch(call: Call) -> Packed:
    """Launch on torch's current stream of this rank.  All ranks of the group call it.  Returns what launches it again.

    Raises on every rank: :class:`pk.errors.RanksDisagree` if identities or symmetric tensors differ,
    :class:`pk.errors.BackendError` if the blocks do not fit the device, :class:`pk.errors.HangError` if an earlier
    launch gave up.  :class:`pk.errors.ArgumentError` for a tensor that the kernel cannot use.
    """
    group = call.group
    # Threads of one rank may launch at once if no other rank waits for them.
    with group.turn if group.world_size > 1 else contextlib.nullcontext():
        return _launch_together(call) if group.threaded else _launch_alone(call)


def _launch_alone(call: Call) -> Packed:
    group = call.group
    context = contexts.of(group)
    context.check()
    context.attempts, context.submitted = context.attempts + 1, False
    try:
        packed = _packed(call, context) or _pack_alone(call, context)
        with context.order, group.driver.on(group.gpu):
            packed.fill(call.values)
            packed.enqueue(group.driver.stream(group.gpu))
    except Exception as error:
        context.refuse(error)
        raise
    context.submitted = True
    return packed


def prepare(call: Call) -> Packed:
    """All of :func:`launch` but the launch.  Collective, as that."""
    group = call.group
    context = contexts.of(group)
    if not group.threaded:
        return _packed(call, context) or _pack_alone(call, context)
    mine = (call.identity, context.fits(*call.room), group.turn.told())
    fits = group.meet("preparing a launch", mine, _agree)
    if not fits:
        context.grow(*call.room)
    return _packed(call, context) or _pack(call, context)


def repack(call: Call) -> Packed:
    """As :func:`prepare`, for a call that was prepared before: nothing to agree on, and memory only grows."""
    context = contexts.of(call.group)
    return _packed(call, context) or _pack(call, context)


def _agree(told: list[tuple[str, bool, str]]) -> list[bool]:
    _same_identity([identity for identity, _, _ in told], lambda: [call for *_, call in told])
    return [all(fits for _, fits, _ in told)] * len(told)


def synchronize(group: Group) -> None:
    """Wait for this rank's launches; :class:`pk.errors.HangError` if one of the group's gave up."""
    if group.backend == "sim":
        return
    if group.solo is not None:
        synchronize(group.solo)
    contexts.refuse_capture(group, "pk.synchronize() waits for this rank's stream")
    driver, device, context = group.driver, group.gpu, group.context
    stream = driver.stream(device)
    driver.synchronize_stream(device, stream)
    if context is None:
        return
    if context.stream is not None and context.stream != stream:
        driver.synchronize_stream(device, context.stream)
    if context.hang is None and not context.stopped and context.aborted():
        context.report(context.incarnation)
    context.check()


def finish(group: Group) -> None:
    """At the end of a rank's function: ``synchronize``, except that a hang it has been told of is its own to handle."""
    if group.context is None or not group.context.told:
        synchronize(group)


def refuse(group: Group, kernel: str, error: PkError) -> NoReturn:
    """Raise ``error``, found before ``launch``, on this rank, and release the ranks that wait for its launch."""
    if group.threaded:
        request = _Request(group, group.context, kernel, None, 0, error)
        group.meet(contexts.LAUNCHING, request, _submit)
    elif group.world_size > 1:
        context = contexts.of(group)
        context.attempts, context.submitted = context.attempts + 1, False
        context.refuse(error)
    raise error


# ----------------------------------------------------------------------------------------- ranks as processes, or one
def _pack_alone(call: Call, context: Context) -> Packed:
    group = call.group
    if group.world_size > 1 and call.identity not in context.seen:
        _compare(group, call.identity)
        context.seen.add(call.identity)
    if not context.fits(*call.room):
        context.grow(*call.room)
    return _pack(call, context)


def _compare(group: Group, identity: str) -> None:
    told = compare(group, "the first launch of a shape", f"{identity}\0{group.turn.told()}")
    pairs = [text.split("\0") for text in told]
    _same_identity([pair[0] for pair in pairs], lambda: [pair[1] for pair in pairs])


def compare(group: Group, key: str, text: str) -> list[str]:
    """Every rank's ``text``, in rank order; none if a rank does not come, whose launch then tells what it does.

    It compiles, or what is new to this rank is not new to it, so that it launches something else: then the entry words'
    hash tells.
    """
    try:
        found = group.exchange(key, text.encode(), _PATIENCE_S if group.backend == "cuda" and group.link else None)
    except PeerLate:
        return []
    return [data.decode() for data in found]


def _same_identity(identities: list[str], told: Callable[[], list[str]]) -> None:
    """``told()``: the call that each rank is in, or ""."""
    if len(set(identities)) > 1:
        calls = told()
        known = all(calls) and len(set(calls)) > 1
        raise RanksDisagree(
            "the ranks launch different kernels, or one kernel with different shapes:\n"
            f"{differing(calls if known else identities)}\n"
            "  All ranks launch the same kernel with the same constants and the same shapes of what peers address."
        )


# -------------------------------------------------------------------------------------------------- ranks as threads
def _launch_together(call: Call) -> Packed:
    group = call.group
    while True:
        if group.context is not None:
            group.context.check()
        request = _request(call, group.context)
        if _meet(request):
            assert request.ready is not None
            return request.ready
        contexts.of(group).grow(*call.room)


class PackedTogether(Packed):
    """Of a rank that is a thread: all ranks meet to launch."""

    __slots__ = ()

    def _submitter(self, address: int, scalars: tuple[tuple[str, int, int], ...]) -> Submit:
        return self._submit

    def _submit(self, values: tuple[int | float, ...]) -> bool:
        """As for other ranks; raises on all what one rank's launch raises."""
        context, group = self.context, self.context.group
        context.check()
        if not self.fill(values):
            return False
        try:
            request = _Request(group, context, self.identity, self, _rank_stream(group))
        except PkError as error:
            request = _Request(group, context, self.identity, None, 0, error)
        if not _meet(request):
            raise AssertionError("ranks that launch the same need the same memory")
        return True


def _meet(request: _Request) -> bool:
    """Launch together; False if the ranks need more memory first."""
    answer = request.group.meet(contexts.LAUNCHING, request, _submit)
    if isinstance(answer, Exception):
        raise answer
    return answer is None


def _rank_stream(group: Group) -> int:
    stream = group.driver.stream(group.gpu)
    if stream == 0 and group.beside:
        raise contexts.legacy_stream(group)
    return stream


def _request(call: Call, context: Context | None) -> _Request:
    group = call.group
    try:
        stream = _rank_stream(group)
        ready = None
        if context is not None and context.fits(*call.room):
            ready = _packed(call, context) or _pack(call, context)
            ready.fill(call.values)
        return _Request(group, context, call.identity, ready, stream)
    except PkError as error:
        return _Request(group, context, call.identity, None, 0, error)


def _submit(requests: list[_Request]) -> list[Exception | str | None]:
    """Run by one thread when all ranks are here: check, then launch all of them, or ask for more memory.

    The answer to a rank is None (launched), ``"grow"``, or what it has to raise.
    """
    failed = {rank: r.error for rank, r in enumerate(requests) if r.error is not None}
    if failed:
        first, why = next(iter(failed.items()))
        told = PeerFailed(f"rank {first} could not launch: {type(why).__name__}: {why}")
        return [failed.get(rank, told) for rank in range(len(requests))]
    _same_identity([r.identity for r in requests], lambda: [r.group.turn.told() for r in requests])
    if any(r.ready is None for r in requests):
        return ["grow"] * len(requests)
    ready = [r.ready for r in requests if r.ready is not None]
    _same_places(ready)
    _co_resident([(r.group, p) for r, p in zip(requests, ready, strict=True)])
    for request in requests:
        assert request.context is not None
        request.context.check()
    _enqueue(requests)
    return [None] * len(requests)


def _enqueue(requests: list[_Request]) -> None:
    launched: list[Context] = []
    try:
        for request in requests:
            ready, context, driver = request.ready, request.context, request.group.driver
            assert ready is not None
            assert context is not None
            with driver.on(request.group.gpu):
                ready.enqueue(request.stream)
            launched.append(context)
    except BaseException:
        for context in launched:  # these wait for a rank that will not begin
            context.abort(len(launched))
        raise


def _same_places(ready: list[Packed]) -> None:
    symm.same_places(ready[0].name, [dict(p.places) for p in ready])


def _co_resident(launches: list[tuple[Group, Packed]]) -> None:
    """Blocks of ranks that share a GPU wait for each other, so all of them must fit it at once."""
    for device in {group.gpu for group, _ in launches}:
        here = [(group, p) for group, p in launches if group.gpu == device]
        blocks, per_sm = sum(p.shape[0] for _, p in here), min(p.blocks_per_sm for _, p in here)
        sms = here[0][0].driver.sms(device)
        if blocks > per_sm * sms:
            raise BackendError(
                f"kernel `{here[0][1].name}`: {len(here)} ranks share GPU {device} and launch {blocks} blocks "
                f"together, but only {per_sm * sms} fit ({per_sm} on each of {sms} SMs), so they would wait "
                "for each other for ever.\n"
                "  Use fewer ranks on this GPU, or smaller tiles or fewer stages."
            )


# ----------------------------------------------------------------------------------------------------------- packing
def _packed(call: Call, context: Context) -> Packed | None:
    """What was packed for an equal call."""
    return context.cache.get(call.key())


def _pack(call: Call, context: Context) -> Packed:
    """Pack the parameters and remember them.  No communication."""
    group, source = call.group, call.source
    views, places = _views(call, context)
    kernel = context.number(source, call.signals, call.identity)
    hash_ = zlib.crc32(f"{call.identity}; at {places}".encode())
    meeting = contexts.EXIT_WORDS * source.remote | contexts.EARLY * call.early
    struct_ = context.pack(kernel, hash_, call.counters, meeting)
    values = params.Values(views, call.scalars, call.signals, struct_, context.pad)
    data = params.pack(source, values, group.driver.encode)
    with group.driver.on(group.gpu):
        per_sm = call.module.max_blocks_per_sm(source.threads, source.shared_bytes)
    packed = (PackedTogether if group.threaded else Packed)(
        context, source, call.module, call.identity, places, (_blocks(call, per_sm), source.threads,
        source.shared_bytes), per_sm, call.room, data, tuple(call.scalars),
        _poison(call, context, call.room[1]),
    )  # fmt: skip
    remember(context.cache, call.key(), packed)
    return packed


def _poison(call: Call, context: Context, scratch: int) -> list[tuple[int, int]]:
    """``PK_SANITIZE``: the memory (address, bytes) whose contents mean nothing when the launch begins.

    1: its scratch.  2: also outputs that it never reads, if they lie in one piece; a kernel that is to write a part of
    one, and keep the rest, must not run at this level.
    """
    source, found = call.source, []
    if source.sanitize and scratch and context.scratch is not None:
        found.append((context.scratch.base, scratch))
    if source.sanitize >= 2:
        for name in source.only_written:
            tensor = call.tensors.get(name)
            if tensor is not None and tensor.numel() and tensor.dtype.is_floating_point and _in_one_piece(tensor):
                found.append((tensor.data_ptr(), tensor.numel() * tensor.element_size()))
    return found


def _in_one_piece(tensor: torch.Tensor) -> bool:
    step = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1 and stride != step:
            return False
        step *= extent
    return True


def remember(cache: dict[tuple[Any, ...], Packed], key: tuple[Any, ...], packed: Packed) -> None:
    """Put a launch into one of its context's bounded caches."""
    if len(cache) >= _CACHED:
        cache.pop(next(iter(cache)))
    cache[key] = packed


def _blocks(call: Call, per_sm: int) -> int:
    """How many blocks the launch has; BackendError if they cannot be."""
    group, source = call.group, call.source
    if per_sm < 1 or group.sms < 1:
        raise BackendError(
            f"kernel `{source.name}` does not fit GPU {group.device}: {source.threads} threads and "
            f"{source.shared_bytes} bytes of shared memory a block, {group.sms} SMs for this rank.\n"
            "  Use smaller tiles or fewer stages" + (", or fewer ranks on this GPU." if group.shared else ".")
        )
    blocks = call.sms or group.sms
    if source.cluster > 1:
        with group.driver.on(group.gpu):
            fit = call.module.max_clusters(source.threads, source.shared_bytes, source.cluster)
        blocks = min(blocks // source.cluster, fit) * source.cluster
    if blocks < source.least_blocks:
        pairs = f", in clusters of {source.cluster}" if source.cluster > 1 else ""
        one = source.least_blocks <= 2 * source.cluster
        what = "a communicator, which fills SMs of its own" if one else "communicators, which fill SMs of their own"
        why = f"has {what}" if source.comm_sms else "runs in clusters"
        raise BackendError(
            f"kernel `{source.name}` {why}: it needs at least {source.least_blocks} blocks{pairs}, and rank "
            f"{group.rank} may launch {blocks}.\n"
            "  " + (f"Pass sms={source.least_blocks} or more." if call.sms else "Use fewer ranks on this GPU.")
        )
    return blocks


def _views(
    call: Call, context: Context
) -> tuple[dict[str, params.View], tuple[tuple[str, tuple[int, int] | None], ...]]:
    group, addressed = call.group, params.remote(call.source)
    views, places = {}, []
    for name, tensor in call.tensors.items():
        if str(tensor.device) != group.driver.device_name(group.gpu):
            raise ArgumentError(_elsewhere(call, name, tensor))
        peers: tuple[int, ...] = ()
        if name in addressed:
            peers = tuple(symm.lookup(tensor, group, name))
            places.append((name, symm.place(tensor, group) if group.world_size > 1 else None))
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        views[name] = params.View(name, tensor.data_ptr(), shape, strides, _dtype(tensor.dtype), peers)
    offsets, _ = call.scratch_layout()
    arenas = _arenas(call, context)
    for name, (shape, dtype) in call.scratch.items():
        even, odd = (tuple(base + offsets[name] for base in bases) for bases in arenas)
        views[name] = params.View(name, even[group.rank], tuple(shape), _contiguous(shape), _dtype(dtype), even, odd)
    return views, tuple(places)


def _arenas(call: Call, context: Context) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Addresses of scratch on every rank in launches of even numbers, and in those of odd ones."""
    if call.early:
        return context.early_scratch(odd=False), context.early_scratch(odd=True)
    arena = context.scratch.reach.peers if context.scratch is not None else (context.pad,) * call.group.world_size
    return arena, arena


def _elsewhere(call: Call, name: str, tensor: torch.Tensor) -> str:
    what = "a CPU tensor" if tensor.device.type == "cpu" else f"on {tensor.device}"
    return (
        f"`{name}` of kernel `{call.source.name}` is {what} of shape {tuple(tensor.shape)}, but rank "
        f"{call.group.rank} runs on GPU {call.group.device}.\n  Move it with `{name}.to(pk.device())`."
    )


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
