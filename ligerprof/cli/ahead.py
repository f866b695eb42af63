"""Import modules in a second thread while the main thread reads a file."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

# numpy's steps through a file take a fraction of a millisecond; with Python's 5 ms, the reader would wait for each
_SWITCH_SECONDS = 0.0002


@contextmanager
def imported_meanwhile(module: str) -> Iterator[None]:
    """Import a module, and all that it imports, while the body runs, and wait for both."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    thread = threading.Thread(target=_import, args=(module,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        sys.setswitchinterval(before)


def _import(module: str) -> None:
    try:
        import_module(module)
    except Exception:
        # the main thread's own import raises it again
        return
