"""The decisions of states.py as machine code: states.c, compiled when a process first needs it."""

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ligerprof.torch_memory.allocator.caching import MIN_OWN_SEGMENT_BYTES, SEGMENT_ROUND_BYTES
from ligerprof.torch_memory.allocator.settings import AllocatorSettings
from ligerprof.torch_memory.allocator.states import (
    FIRST_ADDRESS,
    GAP_UNITS,
    SMALL_UNITS,
    UNIT_BYTES,
    AllocatorState,
    Operations,
    RunAllocator,
    Sizes,
)

_SOURCE = Path(__file__).with_name("states.c")
# as Triton looks for one
_COMPILERS = ("cc", "gcc", "clang")
_NO_MEMORY = -1
_SECONDS = 60


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


def make_allocator(settings: AllocatorSettings, limit_bytes: int | None) -> RunAllocator:
    """An empty allocator: compiled if it can be, else in Python, which takes some fifty times as long."""
    return (CompiledState if can_compile() else AllocatorState)(settings, limit_bytes)


class CompiledState(RunAllocator):
    """The allocator in machine code; `can_compile` is needed."""

    def __init__(self, settings: AllocatorSettings, limit_bytes: int | None = None) -> None:
        super().__init__(settings, limit_bytes)
        library = _library()
        assert library is not None, "can_compile was asked"
        fields = _Fields(
            limit=-1 if self.limit is None else self.limit,
            expandable=self._expandable,
            next_address=FIRST_ADDRESS,
            gap=GAP_UNITS,
            smallest_rest=self._smallest_rests,
            segment=self._pages,
            small=SMALL_UNITS,
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
        most = int(np.count_nonzero(sizes <= SMALL_UNITS)) * self._pages[0]
        return self.reserved + most <= self.limit
