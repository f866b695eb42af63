"""PYTORCH_CUDA_ALLOC_CONF, and how the caching allocator sizes blocks under it: rounding, splitting of free blocks."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ligerprof.errors import RecipeError, UnsupportedError
from ligerprof.text import short_repr, whole_number
from ligerprof.units import MIB

MIN_BLOCK_BYTES = 512
# requests up to here come from the small pool
SMALL_REQUEST_BYTES = 2**20
_FIRST_ROUNDUP_BYTES = 2**20
# no free block is as large
_NEVER_SPLIT = 2**64


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeRules:
    """The rules of c10/cuda/CUDACachingAllocator.cpp (round_size, should_split) under one configuration.

    Attributes:
        expandable_segments: rests of 512 bytes and more are split off in both pools.
        max_split_bytes: requests from this size on are not split from a larger block; None for no limit.
        roundup_divisions: divisions between powers of two, for requests from 1 MiB on; the
            last one holds for all larger ones; 0 or 1 leaves rounding to 512 bytes.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    roundup_divisions: Sequence[int] = ()

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "SizeRules":
        """Read a snapshot's `allocator_settings`; what it lacks takes the allocator's defaults."""
        max_split = settings.get("max_split_size")
        divisions = settings.get("roundup_power2_divisions")
        return cls(
            expandable_segments=settings.get("expandable_segments") is True,
            max_split_bytes=max_split if type(max_split) is int and max_split > 0 else None,
            roundup_divisions=_divisions(divisions) if isinstance(divisions, Mapping) else (),
        )

    def round_request(self, requested_bytes: int) -> int:
        """Bytes of the smallest block that serves a request."""
        if requested_bytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        power = max(0, requested_bytes.bit_length() - _FIRST_ROUNDUP_BYTES.bit_length())
        divisions = self.roundup_divisions[min(power, len(self.roundup_divisions) - 1)] if self.roundup_divisions else 0
        if divisions > 1 and requested_bytes > MIN_BLOCK_BYTES * divisions:
            return _round_between_powers(requested_bytes, divisions)
        return -(-requested_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES

    def splits_off(self, block_bytes: int, rest_bytes: int) -> bool:
        """Whether a block of `block_bytes` leaves the rest of the free block it was found in to others."""
        return rest_bytes >= self.smallest_rest(block_bytes)

    def smallest_rest(self, block_bytes: int) -> int:
        """The fewest bytes that a block of `block_bytes` leaves to others of the free block it was found in."""
        if self.expandable_segments or block_bytes <= SMALL_REQUEST_BYTES:
            return MIN_BLOCK_BYTES
        if self.max_split_bytes is not None and block_bytes >= self.max_split_bytes:
            return _NEVER_SPLIT
        return SMALL_REQUEST_BYTES + 1


def _divisions(by_mebibytes: Mapping[Any, Any]) -> Sequence[int]:
    """Divisions in rising order of the mebibytes that key them; none where all are off."""
    sizes = ((whole_number(key) if isinstance(key, str) else key, value) for key, value in by_mebibytes.items())
    known = {size: value for size, value in sizes if type(size) is int and type(value) is int}
    ordered = tuple(known[key] for key in sorted(known))
    return ordered if any(value > 1 for value in ordered) else ()


def _round_between_powers(requested_bytes: int, divisions: int) -> int:
    """Round up to the next of `divisions` steps between two powers of two."""
    floor = 1 << (requested_bytes.bit_length() - 1)
    if floor == requested_bytes:
        return requested_bytes
    step = floor >> (divisions.bit_length() - 1)
    if step == 0:
        return floor << 1
    return -(-requested_bytes // step) * step


# c10/core/AllocatorConfig.h: one entry for each power of two from 1 MiB up to 32 GiB and more
_POWERS = 16
_LARGE_SEGMENT_BYTES = 20 * MIB

# settings of the host side or of speed alone: they move no byte on the device
_HARMLESS = frozenset(
    {
        "pinned_num_register_threads",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_reserve_segment_size_mb",
        "release_lock_on_cudamalloc",
        "graph_capture_record_stream_reuse",
    }
)
_ENTRY = re.compile(r"([a-zA-Z0-9_]+):(\[[^\]]*\]|[^,\[\]]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSettings:
    """What PYTORCH_CUDA_ALLOC_CONF changes about which block an allocation gets.

    Attributes:
        text: the settings as given.
        rules: how sizes are rounded and blocks split.
        max_non_split_rounding_bytes: how much larger than asked an unsplit block may be.
        garbage_collection_threshold: share of the memory limit above which old free segments are given back; 0 never.
    """

    text: str = ""
    rules: SizeRules = field(default_factory=SizeRules)
    max_non_split_rounding_bytes: int = _LARGE_SEGMENT_BYTES
    garbage_collection_threshold: float = 0.0

    def to_snapshot(self) -> dict[str, Any]:
        """The `allocator_settings` of a snapshot."""
        return {
            "PYTORCH_CUDA_ALLOC_CONF": self.text,
            "max_split_size": -1 if self.rules.max_split_bytes is None else self.rules.max_split_bytes,
            "garbage_collection_threshold": self.garbage_collection_threshold,
            "expandable_segments": self.rules.expandable_segments,
            "pinned_num_register_threads": 1,
            "release_lock_on_cudamalloc": False,
            "pinned_use_cuda_host_register": False,
            "graph_capture_record_stream_reuse": False,
            "roundup_power2_divisions": {
                str(2**power): divisions
                for power, divisions in enumerate(self.rules.roundup_divisions or (0,) * _POWERS)
            },
        }


def parse_allocator_settings(text: str | None) -> AllocatorSettings:
    """Read the value of PYTORCH_CUDA_ALLOC_CONF, `key:value,key:[a:b,c:d]`.

    Raises:
        RecipeError: not written as torch reads it, or out of the range that torch accepts.
        UnsupportedError: a setting that changes device memory and is not modelled.
    """
    rules: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for key, value in _entries(text or ""):
        if key in _OF_RULES:
            name, read = _OF_RULES[key]
            rules[name] = read(key, value)
        elif key in _OTHERS:
            name, read = _OTHERS[key]
            others[name] = read(key, value)
        elif key not in _HARMLESS and (key, value) != ("backend", "native"):
            known = ", ".join((*_OF_RULES, *_OTHERS))
            raise UnsupportedError(f"--alloc-conf: {key}:{value} is not modelled; known are {known}. Leave it out.")
    return AllocatorSettings(text=text or "", rules=SizeRules(**rules), **others)


def _entries(text: str) -> list[tuple[str, str]]:
    compact = re.sub(r"\s", "", text)
    entries = _ENTRY.findall(compact)
    if ",".join(f"{key}:{value}" for key, value in entries) != compact:
        raise RecipeError(f"--alloc-conf {text!r} is not written as torch reads it. Write key:value,key:value.")
    return entries


def _mib(key: str, value: str) -> int:
    size_mib = whole_number(value)
    if size_mib is None or size_mib <= _LARGE_SEGMENT_BYTES // MIB:
        raise RecipeError(f"--alloc-conf: {key} is {short_repr(value)}. torch takes a whole number of MiB above 20.")
    return size_mib * MIB


def _share(key: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0.0 < share < 1.0:
        raise RecipeError(f"--alloc-conf: {key} is {short_repr(value)}. torch takes a share above 0 and below 1.")
    return share


def _truth(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise RecipeError(f"--alloc-conf: {key} is {short_repr(value)}. torch takes True or False.")
    return value == "True"


def _parse_divisions(_key: str, value: str) -> tuple[int, ...]:
    """Read `8` for all sizes, or `[256:1,512:2,>:4]`: sizes in MiB, `>` for those after the last one given."""
    if not value.startswith("["):
        return (_division(value),) * _POWERS
    divisions = [0] * _POWERS
    last, first = 0, True
    for item in value[1:-1].split(","):
        boundary, _, count = item.partition(":")
        if boundary == ">":
            divisions[last + (not first) :] = [_division(count)] * (_POWERS - last - (not first))
            continue
        index = _power_index(boundary)
        # torch gives everything up to the first boundary the first boundary's count
        start = 0 if first else index
        divisions[start : index + 1] = [_division(count)] * (index + 1 - start)
        last, first = index, False
    return tuple(divisions)


def _power_index(boundary: str) -> int:
    size = whole_number(boundary) or 0
    if size < 1 or size & (size - 1):
        raise RecipeError(f"--alloc-conf: roundup_power2_divisions names {boundary!r}, not a power of two in MiB.")
    return min(size.bit_length() - 1, _POWERS - 1)


def _division(count: str) -> int:
    number = whole_number(count)
    if number is None or number & (number - 1):
        raise RecipeError(f"--alloc-conf: roundup_power2_divisions has {count!r}, not a power of two.")
    return number


# the field and the reader of each key: of the rules, and of the other settings
_OF_RULES: Mapping[str, tuple[str, Callable[[str, str], Any]]] = {
    "max_split_size_mb": ("max_split_bytes", _mib),
    "roundup_power2_divisions": ("roundup_divisions", _parse_divisions),
    "expandable_segments": ("expandable_segments", _truth),
}
_OTHERS: Mapping[str, tuple[str, Callable[[str, str], Any]]] = {
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _mib),
    "garbage_collection_threshold": ("garbage_collection_threshold", _share),
}
