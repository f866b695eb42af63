"""What commands say if a training keeps more in main memory than --host-memory."""

from typing import TYPE_CHECKING

from ligerprof.errors import DoesNotFitError
from ligerprof.units import format_bytes

if TYPE_CHECKING:
    from ligerprof.analyzers.estimate import MemoryEstimate


def require_host_memory(estimated: "MemoryEstimate") -> None:
    """Raise DoesNotFitError if a recipe needs more main memory than its limit."""
    host = estimated.host
    if host is not None and not host.fits:
        needed, limit = format_bytes(host.needed_bytes), format_bytes(host.limit_bytes)
        raise DoesNotFitError(
            f"it needs {needed} of main memory, over --host-memory {limit}. Allow more, or offload less with --offload."
        )
