"""Types of the optional native module (``csrc/module.cpp``); ``pk.runtime.native`` is its only importer."""

def launch(entry: int, config: int, function: int, params: int, /) -> int:
    """``cuLaunchKernelEx`` at address ``entry``; its CUresult.  Releases the GIL.  See ``csrc/launch.cpp``."""

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
