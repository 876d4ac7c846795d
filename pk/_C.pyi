"""Types of the optional native module (``csrc/module.cpp``); for ``pk.runtime.native`` and ``pk.sim.explore`` only."""

from collections.abc import Callable
from typing import Any

def launcher(
    entry: int, config: int, function: int, params: int, failed: Callable[[int], None], /
) -> Callable[[int], None]:
    """``cuLaunchKernelEx`` at address ``entry``, but for the stream; ``failed(status)`` if it fails.

    See ``csrc/launch.hpp``.
    """

def finder(
    tensor_types: tuple[type, ...],
    base_type: type,
    environment: dict[Any, Any],
    variables: tuple[Any, ...],
    names: tuple[str, ...],
    scalars: dict[str, int],
    defaults: tuple[Any, ...],
    fallback: Callable[..., Any],
    /,
) -> Callable[..., Any] | None:
    """The first half of a kernel's warm calls, or None where these tensors cannot be read; see ``csrc/warm.hpp``."""

def unchanged(entries: Any, /) -> bool:
    """Whether ``space[name] is value`` for all entries (space, name, value); False if ``entries`` is no tuple."""

def explore(
    flat: list[list[int]], max_states: int, reduce: bool, deadlocks: bool, stop: bool
) -> tuple[int, int, int, int, int, int, int, bool, list[tuple[bool, int, list[int]]]]:
    """Every order of the steps of a system, like ``pk.sim.twin.explore``; see ``csrc/explore.hpp``."""

def reach(flat: list[list[int]], events: list[int]) -> bytes:
    """How far each actor comes without each event (actor, step): int32, a row an event; see ``pk.sim.order``."""

class Submit:
    """The second half: a packed launch, called with the values of its scalars; see ``csrc/submit.hpp``."""

    def __init__(
        self,
        context: Any,
        state: int,
        buffer: int,
        scalars: tuple[tuple[str, int, int], ...],
        stream_of: Callable[[int], int],
        device: int,
        launch: Callable[[int], None],
        /,
    ) -> None: ...
    def __call__(self, values: tuple[int | float, ...], /) -> bool: ...

class Watch:
    """Watches a page of 128-byte device records from a thread that needs no GIL; see ``csrc/watch.hpp``."""

    def __init__(self, address: int, slots: int, interval_ms: int = 100, grace_ms: int = 0, fd: int = 2) -> None: ...
    def name(self, kernel_id: int, text: str) -> None:
        """The text that reports use for records of this kernel."""

    def start(self) -> None:
        """Begin watching; nothing if it already does."""

    def stop(self) -> None:
        """End and join the thread; the page may be freed afterwards."""

    def poll(self) -> int:
        """Look now, report what is due; returns how many records."""

    def acknowledge(self) -> None:
        """The records on the page now need no report from here."""

    @property
    def running(self) -> bool:
        """Whether the thread runs."""

    @property
    def reported(self) -> int:
        """How many records have been reported so far."""
