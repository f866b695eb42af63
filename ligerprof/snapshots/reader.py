"""Read torch's memory snapshot files without resolving, calling or building anything that a file names."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from ligerprof.errors import SnapshotFormatError
from ligerprof.files import STANDARD_INPUT, UnpackError, opened, unpacked
from ligerprof.roles import Phase
from ligerprof.snapshots import SNAPSHOT_NAME
from ligerprof.snapshots.pickles import HOW_TO_RECORD, PICKLE_START, load_snapshot_data
from ligerprof.snapshots.stamp import SavedTensor, phase_peaks_of, saved_tensors_of
from ligerprof.snapshots.trace import Bytes, DeviceTrace, Event, unknown_actions
from ligerprof.snapshots.watch import AnalysisLimitError, claim
from ligerprof.text import short_repr
from ligerprof.units import GIB, MIB, format_bytes

# xz shrinks real recordings 12 to 60 times, and repetitive ones a few hundred times
_LARGEST_EXPANSION = 1000
_ALWAYS_ALLOWED_BYTES = 64 * MIB
# beyond this size, a compressed file may only expand as real recordings do
_UNUSUAL_BYTES = GIB
_USUAL_EXPANSION = 100
# one read returns at most 2147479552 bytes on Linux
_BYTES_AT_ONCE = GIB
_SHOWN_BYTES = 16
_PACKED_HINT = "No recording compresses that well; decompress it yourself if you trust it."


def read_bytes(file: IO[bytes]) -> Bytes:
    """The pickle in an open file, decompressed if it is gzip or xz data; always reads from the start.

    Raises:
        SnapshotFormatError: damaged data, or more than this machine's memory.
        OSError: not readable.
    """
    file.seek(0)
    chunks = unpacked(file, allowed_bytes, _PACKED_HINT)
    if chunks is None:
        return _read_plain(file)
    content = bytearray()
    try:
        for chunk in chunks:
            content += chunk
    except UnpackError as error:
        raise SnapshotFormatError(str(error)) from None
    return np.frombuffer(content, dtype=np.uint8)


def allowed_bytes(packed_bytes: int) -> int:
    """The most bytes that a compressed snapshot may unpack to."""
    expanded = max(_ALWAYS_ALLOWED_BYTES, packed_bytes * _LARGEST_EXPANSION)
    return min(expanded, max(_UNUSUAL_BYTES, packed_bytes * _USUAL_EXPANSION), memory_bytes())


def memory_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read_plain(file: IO[bytes]) -> Bytes:
    size = os.fstat(file.fileno()).st_size
    start = file.read(_SHOWN_BYTES)
    file.seek(0)
    if start[:1] != PICKLE_START:
        # enough for the error, and a sparse file can have any size
        return np.frombuffer(bytearray(start), dtype=np.uint8)
    if size > memory_bytes():
        raise SnapshotFormatError(
            f"{format_bytes(size)}, more than the {format_bytes(memory_bytes())} of memory that this machine has."
            " Record fewer steps, or read it on a larger machine."
        )
    # unlike a bytearray, it is not cleared first
    content = np.empty(size, dtype=np.uint8)
    filled = 0
    while filled < size and (count := file.readinto(content.data[filled : filled + _BYTES_AT_ONCE])):  # type: ignore[attr-defined]
        filled += count
    return content[:filled]


@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedMemory:
    """Page-locked main memory in torch's caching host allocator, which rounds each block up to a power of two.

    From torch 2.14, with `_record_memory_history(record_pinned_host_memory=True)`: `host_segments` has the blocks at
    the end, `host_traces` the events (getSegments and record_trace in ATen/core/CachingHostAllocator.h).

    Attributes:
        held_bytes, blocks: what it held at the time of the snapshot, cached blocks included.
        used_bytes: of this, in use, or waiting for a copy.
        peak_bytes: the most that it held since the first recorded event.
        site: the line that allocated most of what is in use, such as `offload.py:12`; None without stacks.
    """

    held_bytes: int
    blocks: int
    used_bytes: int
    peak_bytes: int
    site: str | None

    @property
    def text(self) -> str:
        """A note in `ligerprof explain`."""
        site = f", most of it by {self.site}" if self.site else ""
        return (
            f"page-locked main memory: {format_bytes(self.held_bytes)} in {self.blocks} blocks, each a power of two;"
            f" {format_bytes(self.used_bytes)} in use{site}; {format_bytes(self.peak_bytes)} at most"
        )


def _pinned_memory(values: Mapping[str, Any]) -> PinnedMemory | None:
    """The page-locked memory of a snapshot; None if it was not recorded. Entries that lack a size are left out."""
    if not isinstance(values.get("host_segments"), list):
        return None
    segments = [each for each in values["host_segments"] if isinstance(each, dict) and _size_of(each)]
    used = [each for each in segments if _state_of(each) != "inactive"]
    sites: Counter[str] = Counter()
    for each in used:
        frames = each.get("frames") or next((block.get("frames") for block in _blocks_of(each)), None)
        if isinstance(frames, list) and frames and isinstance(frames[0], dict):
            sites[f"{Path(str(frames[0].get('filename'))).name}:{frames[0].get('line')}"] += _size_of(each)
    held_bytes = peak_bytes = left = sum(map(_size_of, segments))
    for event in reversed(list(_host_events(values.get("host_traces")))):
        left += {"segment_alloc": -1, "segment_free": 1}.get(str(event.get("action")), 0) * _size_of(event)
        peak_bytes = max(peak_bytes, left)
    return PinnedMemory(
        held_bytes=held_bytes,
        blocks=len(segments),
        used_bytes=sum(map(_size_of, used)),
        peak_bytes=peak_bytes,
        site=next((short_repr(site)[1:-1] for site, _ in sites.most_common(1)), None),
    )


def _host_events(traces: Any) -> Iterator[Mapping[str, Any]]:
    """The events of one host allocator, in a list of their own or in one per allocator."""
    for each in traces if isinstance(traces, list) else ():
        yield from (event for event in (each if isinstance(each, list) else [each]) if isinstance(event, dict))


def _blocks_of(segment: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    blocks = segment.get("blocks")
    return [block for block in blocks if isinstance(block, dict)] if isinstance(blocks, list) else []


def _state_of(segment: Mapping[str, Any]) -> Any:
    """Host blocks are not split: a segment has the state of its block."""
    return segment.get("state") or next((block.get("state") for block in _blocks_of(segment)), None)


def _size_of(entry: Mapping[str, Any]) -> int:
    size = entry.get("total_size", entry.get("size"))
    return size if type(size) is int and 0 < size < 2**63 else 0


# torch's DeviceIndex is an int8 (c10/core/Device.h)
_MOST_DEVICES = 2**7
_SHOWN_ACTIONS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The result of torch.cuda.memory._snapshot(), checked in shape and otherwise unchanged.

    Attributes:
        source: its file, for messages.
        segments: memory from the driver at the time of the snapshot, with its blocks.
        device_traces: events of each device, in order.
        settings: `allocator_settings`, {} if the file has none.
        annotations: `external_annotations`, named ranges of time.
        saved_tensors: what autograd saved, if a recorder of ligerprof noted it.
        phase_peaks: what phases reached at least, in events that the recording leaves out.
        pinned: page-locked main memory; None if it was not recorded.
    """

    source: str
    segments: Sequence[Mapping[str, Any]]
    device_traces: Sequence[DeviceTrace]
    settings: Mapping[str, Any] = field(default_factory=dict)
    annotations: Sequence[Mapping[str, Any]] = ()
    saved_tensors: Sequence[SavedTensor] = ()
    phase_peaks: Mapping[Phase, int] = field(default_factory=dict)
    pinned: PinnedMemory | None = None
    _segments_by_device: dict[int, list[Mapping[str, Any]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        traces = [_trace(trace, device, self.source) for device, trace in enumerate(self.device_traces)]
        object.__setattr__(self, "device_traces", traces)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, source: str = "snapshot") -> "Snapshot":
        """Check the dict of torch.cuda.memory._snapshot(), or the list of segments of memory_snapshot().

        Raises:
            SnapshotFormatError: `segments` and `device_traces` are missing or have another shape.
        """
        if isinstance(values, list) and values:
            values = {"segments": values}
        if not isinstance(values, Mapping) or not {"segments", "device_traces"} & set(values):
            raise SnapshotFormatError(f"{source}: has neither 'segments' nor 'device_traces'. {HOW_TO_RECORD}")
        settings, annotations = values.get("allocator_settings"), values.get("external_annotations")
        notes = annotations if isinstance(annotations, list) else ()
        # a device without events can have None
        found = {**values, "device_traces": _or_empty(values.get("device_traces"))}
        traces = _list_of(found, "device_traces", Sequence, source)
        if len(traces) > _MOST_DEVICES:
            raise SnapshotFormatError(f"{source}: has {len(traces)} devices; torch knows {_MOST_DEVICES} at most.")
        return cls(
            source=source,
            segments=_list_of(values, "segments", dict, source),
            device_traces=traces,
            settings=settings if isinstance(settings, dict) else {},
            annotations=[note for note in notes if isinstance(note, dict)],
            saved_tensors=saved_tensors_of(values, source),
            phase_peaks=phase_peaks_of(values, source),
            pinned=_pinned_memory(values),
        )

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices that have events or segments."""
        traced = {device for device, trace in enumerate(self.device_traces) if trace}
        return tuple(sorted(traced.union(self._segments_of_devices())))

    def trace_of(self, device: int) -> DeviceTrace:
        """Events of one device, in order."""
        return self.device_traces[device] if device < len(self.device_traces) else DeviceTrace(())

    def segments_of(self, device: int) -> list[Mapping[str, Any]]:
        """Segments of one device at the end."""
        return list(self._segments_of_devices().get(device, ()))

    def drop_blocks(self, device: int) -> None:
        """Remove the blocks of a device's segments, in the values that the snapshot was made from."""
        for segment in self.segments_of(device):
            # the reader makes dicts
            if isinstance(segment, dict):
                segment.pop("blocks", None)

    def notes_of(self, device: int) -> list[str]:
        """What this version does not know about a device's events."""
        notes = []
        if unknown := unknown_actions(self.trace_of(device)):
            names = ", ".join(short_repr(name) for name in sorted(unknown)[:_SHOWN_ACTIONS])
            notes.append(
                f"{sum(unknown.values())} events have actions that this version does not know ({names}) and leaves out"
            )
        if self.trace_of(device) and _of_device(self.settings.get("trace_alloc_overflowed"), device) is True:
            kept = _of_device(self.settings.get("trace_alloc_max_entries"), device)
            size = f" of {kept} events" if type(kept) is int else ""
            notes.append(f"torch's buffer{size} overflowed: the oldest events are lost")
        if self.pinned is not None:
            notes.append(self.pinned.text)
        return notes

    def _segments_of_devices(self) -> Mapping[int, Sequence[Mapping[str, Any]]]:
        if not self._segments_by_device:
            for segment, device in zip(self.segments, self._devices_of_segments(), strict=True):
                self._segments_by_device.setdefault(device, []).append(segment)
        return self._segments_by_device

    def _devices_of_segments(self) -> list[int]:
        devices: list[Any] = [segment.get("device", 0) for segment in self.segments]
        are_known = {int}.issuperset(map(type, devices)) and (
            not devices or (min(devices) >= 0 and max(devices) < _MOST_DEVICES)
        )
        if not are_known:
            device = next(one for one in devices if type(one) is not int or not 0 <= one < _MOST_DEVICES)
            raise SnapshotFormatError(f"{self.source}: a segment's device is {short_repr(device)}. {HOW_TO_RECORD}")
        return devices


def read_snapshot(path: str | Path) -> Snapshot:
    """Read a snapshot file, plain or compressed with gzip or xz, or the snapshot of a run directory.

    The path `-` reads standard input.

    Raises:
        SnapshotFormatError: not a snapshot, cut short, or not safe to load.
    """
    file = Path(path)
    if file.is_dir():
        file /= SNAPSHOT_NAME
    source = "standard input" if file == STANDARD_INPUT else str(file)
    try:
        with opened(file) as stream:
            claimed = claim(source)

            def read() -> Bytes:
                content = read_bytes(stream)
                claimed.unpacked_bytes = len(content)
                return content

            values = load_snapshot_data(read)
    except OSError as error:
        raise SnapshotFormatError(f"{source}: cannot be read ({error.strerror}).") from None
    except AnalysisLimitError:
        raise
    except SnapshotFormatError as error:
        raise SnapshotFormatError(f"{source}: {error}") from None
    return Snapshot.from_dict(_in_columns(values), source=source)


def _in_columns(values: Any) -> Any:
    """The values with their events as columns, where the loader did not do so."""
    traces = values.get("device_traces") if isinstance(values, dict) else None
    if isinstance(traces, list):
        for place, trace in enumerate(traces[:_MOST_DEVICES]):
            if type(trace) is list and {dict}.issuperset(map(type, trace)):
                traces[place] = DeviceTrace.in_columns(trace)
    return values


def _or_empty(traces: Any) -> Any:
    if isinstance(traces, list):
        return [[] if trace is None else trace for trace in traces]
    return [] if traces is None else traces


def _of_device(setting: Any, device: int) -> Any:
    """A setting that has one value, or one per device."""
    return setting[device] if isinstance(setting, list) and device < len(setting) else setting


def _trace(events: Sequence[Event], device: int, source: str) -> DeviceTrace:
    if isinstance(events, DeviceTrace):
        return events
    if not isinstance(events, list) or not set(map(type, events)) <= {dict}:
        raise SnapshotFormatError(f"{source}: device_traces[{device}] is not a list of events. {HOW_TO_RECORD}")
    return DeviceTrace(events)


def _list_of(values: Mapping[str, Any], key: str, item: type, source: str) -> list[Any]:
    items = values.get(key, [])
    if not isinstance(items, list) or not all(isinstance(each, item) for each in items):
        what = "dicts" if item is dict else "lists"
        raise SnapshotFormatError(f"{source}: '{key}' is not a list of {what}. {HOW_TO_RECORD}")
    return items


_SNAPSHOT_FILE = re.compile(r".*\.(?:pickle|pkl)(?:\.gz|\.xz)?", re.IGNORECASE)
_RANK = re.compile(r"(?<![a-z])rank[-_.]?(\d{1,6})(?!\d)", re.IGNORECASE)
_NUMBER = re.compile(r"(?<!\d)\d{1,6}(?!\d)")
_MOST_ENTRIES = 100_000
_RANK_HINT = "Name the files rank0.pickle, rank1.pickle and so on, or give one file."


def rank_snapshots(folder: Path) -> dict[int, Path]:
    """The snapshot of each rank, by rank: files in the folder, and run directories in it.

    A rank is the number after `rank` in a name. If no name has one, it is the one number in which the names differ.

    Returns:
        At least two ranks, or {} if the folder is a run directory itself.

    Raises:
        SnapshotFormatError: the folder cannot be read, has no snapshots of ranks, or two of one rank.
    """
    if (folder / SNAPSHOT_NAME).exists():
        return {}
    found = _snapshots_in(folder)
    named = {int(match[1]): path for name, path in found.items() if (match := _RANK.search(name))}
    ranks = named or _numbered_ranks(found)
    if not named and len(found) > 1 and all((path.parent / "result.json").exists() for path in found.values()):
        first, second = sorted(path.parent for path in found.values())[:2]
        raise SnapshotFormatError(
            f"{folder}: its {len(found)} folders are runs of their own. Name one of them,"
            f" or compare two: ligerprof diff {first} {second}"
        )
    if len(ranks) != len(found):
        raise SnapshotFormatError(f"{folder}: which of its {len(found)} snapshots are ranks of one run? {_RANK_HINT}")
    if len(found) < 2:
        raise SnapshotFormatError(
            f"{folder}: neither {SNAPSHOT_NAME} nor snapshots of several ranks in it. {_RANK_HINT}"
        )
    return dict(sorted(ranks.items()))


def _snapshots_in(folder: Path) -> dict[str, Path]:
    """Snapshot files by name, and those of run directories by the name of the directory."""
    found: dict[str, Path] = {}
    try:
        for number, entry in enumerate(folder.iterdir()):
            if number >= _MOST_ENTRIES:
                raise SnapshotFormatError(f"{folder}: more than {_MOST_ENTRIES} files. Give one file.")
            if entry.is_dir():
                if (entry / SNAPSHOT_NAME).exists():
                    found[entry.name] = entry / SNAPSHOT_NAME
            elif _SNAPSHOT_FILE.fullmatch(entry.name):
                found[entry.name] = entry
    except OSError as error:
        raise SnapshotFormatError(f"{folder}: cannot be read ({error.strerror}).") from None
    return found


def _numbered_ranks(found: dict[str, Path]) -> dict[int, Path]:
    """Ranks by the only number that differs between the names; {} if more than one does."""
    numbers = {name: _NUMBER.findall(name) for name in found}
    if len({(_NUMBER.sub("#", name), len(own)) for name, own in numbers.items()}) != 1:
        return {}
    differing = [set(place) for place in zip(*numbers.values(), strict=True)]
    places = [place for place, values in enumerate(differing) if len(values) > 1]
    return {int(numbers[name][places[0]]): path for name, path in found.items()} if len(places) == 1 else {}
