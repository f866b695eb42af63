"""Memory management for millions of events: pause Python's garbage collector, and keep what arrays free."""

import gc
import os
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
    numpy, if it is not imported yet, asks for no huge pages, for which the system may have to move others first:
    that took up to a fifth of the time of `explain`.
    """
    os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")
    # every command imports this module, and few call this function
    import ctypes

    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST_FROM_HEAP_BYTES)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


def return_freed_memory() -> None:
    """Give the memory that arrays freed back to the system: Python's own objects do not use it."""
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
