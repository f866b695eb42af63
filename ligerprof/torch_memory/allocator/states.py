"""The caching allocator for long runs: states.c, compiled when a process first needs it, or caching.py in its place.

Sizes and addresses are in units of 512 bytes, the smallest block.
"""

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from ligerprof.errors import UnsupportedError
from ligerprof.torch_memory.allocator.caching import (
    LARGE_SEGMENT_BYTES,
    MIN_OWN_SEGMENT_BYTES,
    SEGMENT_ROUND_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorFullError,
    Block,
    CachingAllocator,
)
from ligerprof.torch_memory.allocator.settings import MIN_BLOCK_BYTES, SMALL_REQUEST_BYTES, AllocatorSettings

UNIT_BYTES = MIN_BLOCK_BYTES
# segments are made downwards from here
_FIRST_ADDRESS = 2**40 - 1
# requests up to here come from the small pool
_SMALL_UNITS = SMALL_REQUEST_BYTES // UNIT_BYTES
# segments do not touch, so that free blocks of two segments never merge
_GAP_UNITS = 1

Operations = npt.NDArray[np.int32]
Sizes = npt.NDArray[np.int64]

_SOURCE = Path(__file__).with_name("states.c")
# as Triton looks for one
_COMPILERS = ("cc", "gcc", "clang")
_NO_MEMORY = -1
_SECONDS = 60


class RunAllocator(ABC):
    """An allocator between two parts of a run.

    Args:
        settings: PYTORCH_CUDA_ALLOC_CONF.
        limit_bytes: limit on reserved bytes, or None.

    Attributes:
        limit: units of segments that fit, or None.
        allocated, reserved: units in blocks and in segments.
        highest, highest_reserved: the most of both since they were last set.

    Raises:
        UnsupportedError: settings whose effect depends on more than the free blocks.
    """

    def __init__(self, settings: AllocatorSettings, limit_bytes: int | None = None) -> None:
        rules = settings.rules
        if rules.max_split_bytes is not None or settings.garbage_collection_threshold:
            raise UnsupportedError(
                "--lengths does not go with max_split_size_mb or garbage_collection_threshold in --alloc-conf."
            )
        self._rules, self._expandable = rules, rules.expandable_segments
        # of the small and the large pool
        self._smallest_rests = (1, -(-rules.smallest_rest(SMALL_REQUEST_BYTES + 1) // UNIT_BYTES))
        self._pages = (SMALL_SEGMENT_BYTES // UNIT_BYTES, LARGE_SEGMENT_BYTES // UNIT_BYTES)
        self.limit = None if limit_bytes is None else limit_bytes // UNIT_BYTES
        self.allocated = self.reserved = self.highest = self.highest_reserved = 0

    @abstractmethod
    def run(self, operations: Operations, sizes: Sizes, name: Hashable = None) -> None:
        """Allocate and free in order.

        Args:
            operations: 0 allocates the next of `sizes`; n frees the n-th block of this run, -n the n-th block that was
                held before. At the end, blocks of this run take the places of those that were freed, then places behind
                them; places that stay empty close up (`place_left`).
            sizes: units of each allocation.
            name: of these operations and sizes; what a run of this name did to the large pool may be remembered.

        Raises:
            AllocatorFullError: an allocation does not fit the limit.
        """

    @abstractmethod
    def key(self) -> object:
        """What decides about coming events: equal for equal states."""

    def units_of(self, requested_bytes: Sizes) -> Sizes:
        """The sizes of the smallest blocks for requests."""
        if not self._rules.roundup_divisions:
            return np.maximum(-(-requested_bytes // UNIT_BYTES), 1)
        different, places = np.unique(requested_bytes, return_inverse=True)
        units = [-(-self._rules.round_request(size) // UNIT_BYTES) for size in different.tolist()]
        return np.array(units, np.int64)[places].reshape(requested_bytes.shape)

    def _refuse(self, size: int) -> NoReturn:
        assert self.limit is not None
        if self._expandable and self.allocated + size <= self.limit:
            raise UnsupportedError(
                "--lengths: under this limit torch gives back free pages of expandable segments, which is not covered."
                " Raise --memory-limit, or leave expandable_segments out."
            )
        raise AllocatorFullError(
            requested_bytes=size * UNIT_BYTES,
            allocated_bytes=self.allocated * UNIT_BYTES,
            reserved_bytes=self.reserved * UNIT_BYTES,
            limit_bytes=self.limit * UNIT_BYTES,
        )


class AllocatorState(RunAllocator):
    """The allocator of caching.py, for machines without a compiler."""

    def __init__(self, settings: AllocatorSettings, limit_bytes: int | None = None) -> None:
        super().__init__(settings, limit_bytes)
        limit_bytes = None if self.limit is None else self.limit * UNIT_BYTES
        self._allocator = CachingAllocator(settings=settings, limit_bytes=limit_bytes)
        self._held: list[Block] = []

    def key(self) -> object:
        """What decides about coming events: equal for equal states."""
        return self._allocator.state(), tuple(block.address for block in self._held)

    def run(self, operations: Operations, sizes: Sizes, name: Hashable = None) -> None:
        """Allocate and free in order, see `RunAllocator.run`; nothing is remembered."""
        del name
        blocks: list[Block | None] = []
        before: list[Block | None] = list(self._held)
        self._allocator.reset_peaks()
        upcoming = iter(sizes.tolist())
        try:
            for operation in operations.tolist():
                if operation == 0:
                    blocks.append(self._malloc(next(upcoming)))
                    continue
                own, place = (blocks, operation - 1) if operation > 0 else (before, -operation - 1)
                block, own[place] = own[place], None
                assert block is not None, "a block is freed once"
                self._allocator.free(block)
        finally:
            self._count()
        self._held = place_left(before, blocks)

    def _malloc(self, size: int) -> Block:
        retries = self._allocator.retries
        try:
            block = self._allocator.malloc(size * UNIT_BYTES)
        except AllocatorFullError:
            block = None
        if block is None or (self._expandable and self._allocator.retries > retries):
            self._count()
            self._refuse(size)
        return block

    def _count(self) -> None:
        allocator = self._allocator
        self.allocated, self.reserved = allocator.allocated_bytes // UNIT_BYTES, allocator.reserved_bytes // UNIT_BYTES
        self.highest = max(self.highest, allocator.peak_allocated_bytes // UNIT_BYTES)
        self.highest_reserved = max(self.highest_reserved, allocator.peak_reserved_bytes // UNIT_BYTES)


class _Fields(ctypes.Structure):
    """The beginning of `State` in states.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("allocated", "reserved", "highest", "highest_reserved", "changes")),
        *((name, ctypes.c_int64) for name in ("limit", "expandable", "next_address", "gap")),
        *((name, ctypes.c_int64 * 2) for name in ("smallest_rest", "segment")),
        *((name, ctypes.c_int64) for name in ("small", "round", "min_own")),
    )


@cache
def _library() -> ctypes.CDLL | None:
    """states.c as a library; None if it cannot be compiled and loaded here."""
    library = next(filter(None, map(_compiled, compilers("CC", _COMPILERS))), None)
    if library is None:
        return None
    library.state_new.argtypes = (ctypes.POINTER(_Fields), ctypes.c_size_t)
    library.state_new.restype = ctypes.c_void_p
    library.state_delete.argtypes = (ctypes.c_void_p,)
    library.state_delete.restype = None
    pointer = ctypes.c_void_p
    library.state_run.argtypes = (pointer, pointer, ctypes.c_int64, pointer, ctypes.c_int64, ctypes.c_int)
    library.state_held_sizes.argtypes = (pointer, pointer, ctypes.c_int64, pointer)
    library.state_held_sizes.restype = None
    library.state_key.argtypes = (pointer, pointer, ctypes.c_int64)
    library.state_run.restype = library.state_key.restype = ctypes.c_int64
    return library


def compilers(variable: str, usual: Iterable[str]) -> Iterator[list[str]]:
    """Commands that may compile, with their first arguments, as in "ccache gcc".

    Args:
        variable: of the environment, which may name one: CC or CXX.
        usual: the others.
    """
    named: list[str] = []
    with suppress(ValueError):
        # an open quotation mark
        named = shlex.split(os.environ.get(variable, ""))
    for command in (named, *([name] for name in usual)):
        if command and shutil.which(command[0]):
            yield command


def _compiled(compiler: list[str]) -> ctypes.CDLL | None:
    """states.c as a library; None if this compiler, or the folder for temporary files, does not serve."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "states.so")
            command = [*compiler, "-O2", "-shared", "-fPIC", "-o", str(path), str(_SOURCE)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS)
            return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None


def can_compile() -> bool:
    """Whether states.c can be compiled and loaded here."""
    return _library() is not None


class CompiledState(RunAllocator):
    """The allocator in machine code; `can_compile` is needed."""

    def __init__(self, settings: AllocatorSettings, limit_bytes: int | None = None) -> None:
        super().__init__(settings, limit_bytes)
        library = _library()
        assert library is not None, "can_compile was asked"
        fields = _Fields(
            limit=-1 if self.limit is None else self.limit,
            expandable=self._expandable,
            next_address=_FIRST_ADDRESS,
            gap=_GAP_UNITS,
            smallest_rest=self._smallest_rests,
            segment=self._pages,
            small=_SMALL_UNITS,
            round=SEGMENT_ROUND_BYTES // UNIT_BYTES,
            min_own=MIN_OWN_SEGMENT_BYTES // UNIT_BYTES,
        )
        self._library = library
        self._state: int | None = library.state_new(ctypes.byref(fields), ctypes.sizeof(fields))
        if self._state is None:
            raise MemoryError
        self._fields = _Fields.from_address(self._state)
        self._numbers = np.empty(1024, np.int64)
        # of runs that leave the present large pool as it is, the most units above those before the run, and the sizes
        # of the held blocks that the run freed
        self._rises: dict[Hashable, tuple[int, bytes]] = {}
        # of each name, the places of held blocks that its runs free
        self._places: dict[Hashable, npt.NDArray[np.int32]] = {}

    def __del__(self) -> None:
        if getattr(self, "_state", None) is not None:
            self._library.state_delete(self._state)

    def key(self) -> object:
        """What decides about coming events: equal for equal states."""
        count: int = self._library.state_key(self._state, self._numbers.ctypes.data, len(self._numbers))
        if count > len(self._numbers):
            self._numbers = np.empty(2 * count, np.int64)
            return self.key()
        return self._numbers[:count].tobytes()

    def run(self, operations: Operations, sizes: Sizes, name: Hashable = None) -> None:
        """Allocate and free in order, see `RunAllocator.run`."""
        fields = self._fields
        operations, sizes = np.ascontiguousarray(operations, np.int32), np.ascontiguousarray(sizes, np.int64)
        before, changes = fields.allocated, fields.changes
        rise, known_freed = self._rises.get(name, (0, None))
        freed = b"" if name is None else self._freed(operations, name)
        only_small = freed == known_freed and self._small_pool_has_room(sizes)
        fields.highest, fields.highest_reserved = before, self.highest_reserved
        refused: int = self._library.state_run(
            self._state, operations.ctypes.data, len(operations), sizes.ctypes.data, len(sizes), only_small
        )
        highest = before + rise if only_small else fields.highest
        self.highest, self.highest_reserved = max(self.highest, highest), fields.highest_reserved
        self.allocated, self.reserved = fields.allocated, fields.reserved
        if refused == _NO_MEMORY:
            raise MemoryError
        if refused:
            self._refuse(refused)
        if fields.changes != changes:
            self._rises.clear()
        elif name is not None:
            self._rises[name] = highest - before, freed

    def _freed(self, operations: Operations, name: Hashable) -> bytes:
        """The sizes of the held blocks that a run frees, in order."""
        places = self._places.get(name)
        if places is None:
            places = self._places[name] = -operations[operations < 0] - 1
        if not len(places):
            return b""
        sizes = np.empty(len(places), np.int64)
        self._library.state_held_sizes(self._state, places.ctypes.data, len(places), sizes.ctypes.data)
        return sizes.tobytes()

    def _small_pool_has_room(self, sizes: Sizes) -> bool:
        """Whether the small pool can grow for each of its requests, and no segment needs to be given back."""
        if self.limit is None:
            return True
        most = int(np.count_nonzero(sizes <= _SMALL_UNITS)) * self._pages[0]
        return self.reserved + most <= self.limit


def make_allocator(settings: AllocatorSettings, limit_bytes: int | None) -> RunAllocator:
    """An empty allocator: compiled if it can be, else the one of caching.py, some two hundred times as slow."""
    return (CompiledState if can_compile() else AllocatorState)(settings, limit_bytes)


_Held = TypeVar("_Held")


def place_left(before: Sequence[_Held | None], own: Sequence[_Held | None]) -> list[_Held]:
    """The blocks that a run leaves held, in order; None were freed.

    A block that replaces another one takes its place, so that a micro-batch that leaves as many blocks as it freed can
    follow itself.
    """
    left = iter([block for block in own if block is not None])
    filled = [next(left, None) if block is None else block for block in before]
    return [*(block for block in filled if block is not None), *left]
