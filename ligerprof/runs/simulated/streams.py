"""CUDA streams and events of the simulated GPU: a block belongs to the stream that is current when it is allocated.

Operators run one after another, so waiting and recording have no effect on memory; what code keeps alive until an event
is what it keeps alive here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ligerprof.runs.simulated.device import SimulatedDevice


class Event:
    """torch.cuda.Event without time."""

    def record(self, stream: Any = None) -> None:
        """Do nothing."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Everything before it has run."""
        return True


class SimulatedStream:
    """torch.cuda.Stream: a number, 0 for the default stream."""

    def __init__(self, number: int) -> None:
        self.number = number

    def record_event(self, event: Event | None = None) -> Event:
        """An event."""
        return event or Event()

    def wait_stream(self, stream: Any) -> None:
        """Do nothing."""

    def wait_event(self, event: Any) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""


class DeviceModule:
    """The part of the module `torch.cuda` that torch's distributed code uses, for a simulated GPU."""

    Event = Event

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._streams = [SimulatedStream(0)]

    def Stream(self, device: Any = None, priority: int = 0) -> SimulatedStream:  # noqa: ARG002, N802 - torch.cuda's name
        """Make another stream."""
        self._streams.append(SimulatedStream(len(self._streams)))
        return self._streams[-1]

    def current_stream(self, device: Any = None) -> SimulatedStream:  # noqa: ARG002 - torch.cuda's signature
        """The stream that allocates."""
        return self._streams[self._device.stream]

    def default_stream(self, device: Any = None) -> SimulatedStream:  # noqa: ARG002 - torch.cuda's signature
        """The stream that allocates unless another is chosen."""
        return self._streams[0]

    @contextmanager
    def stream(self, stream: SimulatedStream | None) -> Iterator[None]:
        """Allocate on a stream."""
        before = self._device.stream
        self._device.stream = before if stream is None else stream.number
        try:
            yield
        finally:
            self._device.stream = before

    def current_device(self) -> int:
        """The only device."""
        return 0

    def device_count(self) -> int:
        """Number of devices of this process."""
        return 1

    def is_available(self) -> bool:
        """The device is there."""
        return True
