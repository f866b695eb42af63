"""Load a snapshot's pickle: its events as tables if their bytes allow it, else as any pickle of plain data."""

from collections.abc import Callable
from typing import Any

from ligerprof.snapshots.pickles.columns import load_with_tables
from ligerprof.snapshots.pickles.plain import load_plain_data
from ligerprof.snapshots.trace import Bytes


def load_snapshot_data(read: Callable[[], Bytes], *, fast: bool = True) -> Any:
    """Load dicts, lists, text and numbers; no global is resolved, and nothing is called or built.

    Args:
        read: returns the pickle's bytes. The fast path overwrites them; if it gives up, they are read again.
        fast: read the events as tables where possible, which gives lists of events as DeviceTraces.

    Raises:
        SnapshotFormatError: the pickle holds anything else, or is damaged.
    """
    values = load_with_tables(read()) if fast else None
    # what the fast path cannot read may be invalid: reading it as any pickle names the problem and its place
    return load_plain_data(read().tobytes()) if values is None else values
