"""A launch with its parameters packed: what is left of a call when all that repeats has been done once.

A warm call finds its :class:`Packed` by its arguments and submits it; ``kernel.prepare()`` hands it out as a
:class:`Prepared`.  Nothing in it depends on the time of the call: whether the group hangs, which stream is
current and whether that is being captured are asked at every launch; growth and reset of the context make it stale
(``generation``).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pk.runtime import tracing
from pk.runtime.native import native

if TYPE_CHECKING:
    from pk.artifact import Source
    from pk.runtime.context import Context
    from pk.runtime.device import Driver

_FORMATS = {"int": "<i", "float": "<f"}
_NATIVE_SCALARS = 32  # max_scalars of csrc/submit.cpp
Submit = Callable[[tuple[int | float, ...]], bool]  # of the scalars' values; see Packed._submit
Places = tuple[tuple[str, tuple[int, int] | None], ...]


class Packed:
    """The packed parameters of a launch of one context.

    name, identity: of the kernel, and what all ranks must agree on.  places: of the tensors that peers address.
    shape: blocks, threads, dynamic shared bytes.  room: counters and bytes of scratch that it uses.
    submit(values): launch it; see :meth:`_submit`.
    """

    __slots__ = (
        "_buffer", "_device", "_enqueue", "_kept", "_scalars", "_stream", "blocks_per_sm", "context", "generation",
        "identity", "name", "places", "room", "shape", "submit",
    )  # fmt: skip

    def __init__(
        self, context: Context, source: Source, module: Any, identity: str, places: Places,
        shape: tuple[int, int, int], blocks_per_sm: int, room: tuple[int, int], data: bytes, scalars: Sequence[str],
        poison: Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        driver, self._device = context.group.driver, context.group.gpu
        self.context, self.generation = context, context.generation
        self.name, self.identity, self.places = source.name, identity, places
        self.shape, self.blocks_per_sm, self.room = shape, blocks_per_sm, room
        self._kept = (source, module)  # caches hold their id()
        self._buffer = ctypes.create_string_buffer(data, len(data))
        found = tuple(
            (field.kind, field.offset, scalars.index(field.key))
            for field in source.fields
            if field.kind in _FORMATS and field.key in scalars
        )
        self._scalars = tuple((struct.Struct(_FORMATS[k]).pack_into, offset, index) for k, offset, index in found)
        self._stream = driver.stream
        address = ctypes.addressof(self._buffer)
        how = submission(source, context.group.world_size)
        bare = driver.bind(self._device, module.function, shape, address, source.cluster, **how)
        if source.trace:
            bare = tracing.tracing(context.group, source, shape[0], self._buffer, bare)
        self._enqueue = poisoning(driver, self._device, poison, bare) if poison else bare
        self.submit = self._submitter(address, found)

    def fill(self, values: Sequence[int | float]) -> bool:
        """Set the run-time scalars, in the order of the kernel's parameters; False if one does not fit its 32 bits."""
        try:
            for pack_into, offset, index in self._scalars:
                pack_into(self._buffer, offset, values[index])
        except (struct.error, OverflowError):
            return False
        return True

    def _submitter(self, address: int, scalars: tuple[tuple[str, int, int], ...]) -> Submit:
        """``submit``: the native one (``csrc/submit.cpp``) or its twin :meth:`_submit`."""
        make = getattr(native(), "Submit", None) if len(scalars) <= _NATIVE_SCALARS else None
        if make is None:
            return self._submit
        state = ctypes.addressof(self.context.state)
        return make(self.context, state, address, scalars, self._stream, self._device, self._enqueue)

    def _submit(self, values: tuple[int | float, ...]) -> bool:
        """Launch on torch's current stream.  Nothing happens, and it returns False, if a scalar does not fit.

        Raises :class:`pk.errors.HangError` if an earlier launch of the group gave up.
        """
        context = self.context
        if context.hang is not None or context.state.value:
            context.check()
        if not context.order.acquire(context.waits):
            context.collide()
        try:
            if self._scalars and not self.fill(values):
                return False
            context.attempts += 1
            try:
                stream = self._stream(self._device)
                if stream != context.ordered:
                    context.follow(stream)
                self._enqueue(stream)
            except Exception as error:
                context.submitted = False
                context.refuse(error)
                raise
            context.submitted = True
        finally:
            context.order.release()
        return True

    def enqueue(self, stream: int) -> None:
        """Put the launch on ``stream``, after the earlier launches of the context."""
        if stream != self.context.ordered:
            self.context.follow(stream)
        self._enqueue(stream)


def submission(source: Source, world: int) -> dict[str, bool]:
    """Attributes of a launch, for ``Driver.bind``.

    Blocks that wait for each other begin together.  Blocks that come before the launch in front has ended take room:
    where ranks share a GPU, perhaps that of blocks that it waits for; where each has its own it has not been measured.
    """
    return {"cooperative": not source.local, "close": source.local or world == 1}


def poisoning(
    driver: Driver, device: int, pieces: Sequence[tuple[int, int]], launch: Callable[[int], None]
) -> Callable[[int], None]:
    """``launch``, before which the stream fills ``pieces`` of memory (address, bytes) with NaN.

    The memory must be nobody's from the end of the launch before: scratch of kernels that exchange exit words.
    """

    def enqueue(stream: int) -> None:
        for address, nbytes in pieces:
            driver.poison(device, stream, address, nbytes)
        launch(stream)

    return enqueue


class Prepared:
    """One call of a kernel, ready to be made again and again: ``prepared()`` launches on torch's current stream.

    The tensors stay alive as long as this object; their contents may change, their memory may not.  Scalars and time
    limits are those of :meth:`pk.Kernel.prepare`.  Ranks may mix prepared and ordinary calls.
    """

    __slots__ = ("_again", "_packed", "_values")

    def __init__(self, packed: Packed, values: tuple[int | float, ...], again: Callable[[], Packed]) -> None:
        self._packed, self._values, self._again = packed, values, again

    def __repr__(self) -> str:
        return f"<prepared {self._packed.identity}>"

    def __call__(self) -> None:
        """Launch.  Collective, as the call itself; raises as the call does."""
        packed = self._packed
        if packed.generation != packed.context.generation:  # the group's memory has moved, or was reset
            packed = self._packed = self._again()
        packed.submit(self._values)
