"""Memory management for millions of events: pause Python's garbage collector, and keep what arrays free."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# parameters of mallopt (glibc's malloc.h), and values that no array of a recording reaches
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _LARGEST_FROM_HEAP_BYTES = 2**30, 2**29


@contextmanager
def collector_paused() -> Iterator[None]:
    """Avoid repeated walks of the collector over all objects."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def keep_freed_memory() -> None:
    """Let the memory of one array serve the next, instead of new pages from the system, which it must clear.

    For processes that analyze one recording and end. Only glibc has this setting; others go on as before.
    """
    # every command imports this module, and few call this function
    import ctypes

    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST_FROM_HEAP_BYTES)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
