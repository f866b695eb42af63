"""Build and load backend.cpp, torch's view of the simulated GPU in C++; built once per version of torch and source."""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ligerprof.errors import MissingDependencyError
from ligerprof.simulated_gpu.files import unwatched
from ligerprof.torch_memory.allocator.states import compilers

_SOURCE = Path(__file__).with_name("backend.cpp")
_COMPILERS = ("c++", "g++", "clang++")
_LIBRARIES = ("-lc10", "-ltorch_cpu")
_SECONDS = 600

_Allocate = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64)
_Release = ctypes.CFUNCTYPE(None, ctypes.c_uint64)
_Synchronize = ctypes.CFUNCTYPE(None, ctypes.c_int64)


class Backend:
    """The loaded library; raises MissingDependencyError if it is not built yet, and cannot be built."""

    def __init__(self) -> None:
        library = _loaded()
        self.stream: Callable[[], int] = library.gpu_stream
        self.set_stream: Callable[[int], None] = library.gpu_set_stream
        self.new_stream: Callable[[], int] = library.gpu_new_stream
        self.highest_pinned_bytes: Callable[[], int] = library.gpu_highest_pinned_bytes
        self.highest_host_bytes: Callable[[], int] = library.gpu_highest_host_bytes
        self.detach: Callable[[], None] = library.gpu_detach
        self.index: Callable[[], int] = library.gpu_index
        self.count: Callable[[], int] = library.gpu_count
        for name in ("stream", "new_stream", "highest_pinned_bytes", "highest_host_bytes", "index", "count"):
            getattr(library, f"gpu_{name}").restype = ctypes.c_int64
        library.gpu_claim.argtypes, library.gpu_claim.restype = (ctypes.c_int64,), ctypes.c_char_p
        library.gpu_place.argtypes = (ctypes.c_int64, ctypes.c_int64)
        self.place: Callable[[int, int], None] = library.gpu_place
        library.gpu_set_stream.argtypes = (ctypes.c_int64,)
        library.gpu_ran_out.argtypes = (ctypes.c_char_p,)
        library.gpu_resize_storage.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
        library.gpu_resize_storage.restype = ctypes.c_bool
        self._library = library
        self._callbacks: tuple[Any, ...] = ()

    def install(
        self, allocate: Callable[[int, int], int], release: Callable[[int], None], wait: Callable[[int], None]
    ) -> None:
        """Make this process's torch use the simulated GPU as `cuda`; it cannot be undone.

        Args:
            allocate: callback that receives size in bytes and stream, and returns an address; 0 after `ran_out`.
            release: callback that receives the address of a storage that ended.
            wait: callback that receives the stream that the host waits for, -1 for all.
        """
        # ctypes calls them for as long as the process lives
        self._callbacks = _Allocate(allocate), _Release(release), _Synchronize(wait)
        self._library.gpu_install(*self._callbacks)

    def require_own(self, index: int) -> None:
        """Raise as torch does for a GPU that this process does not have; the first one that it names is its own.

        Raises:
            torch.AcceleratorError: see above.
        """
        problem = self._library.gpu_claim(index)
        if problem is not None:
            raise torch.AcceleratorError(problem.decode())

    def ran_out(self, message: str) -> None:
        """Let the running allocation raise torch.OutOfMemoryError."""
        self._library.gpu_ran_out(message.encode())

    def resize_storage(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """Give a storage other memory; raises torch.OutOfMemoryError if there is not enough."""
        if not self._library.gpu_resize_storage(storage._cdata, size_bytes):
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size_bytes} bytes.")


def _loaded() -> Any:
    path = built_library()
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        # damaged, such as by a disk that was full
        with unwatched():
            path.unlink(missing_ok=True)
        return ctypes.CDLL(str(built_library()))


def built_library() -> Path:
    """The path of the built library, in the user's cache.

    Raises:
        MissingDependencyError: there is no C++ compiler, or it fails.
    """
    text = f"{torch.__version__} {torch.version.git_version} {torch._C._GLIBCXX_USE_CXX11_ABI}"
    mark = hashlib.sha256(_SOURCE.read_bytes() + text.encode()).hexdigest()[:16]
    name = f"simulated-gpu-{mark}.so"
    for folder in _folders():
        path = folder / name
        with suppress(OSError):
            if path.is_file() and path.stat().st_uid == os.getuid():
                return path
    with unwatched():
        return _build(name)


def _folders() -> Iterator[Path]:
    """Where the library may be, best first."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    yield Path(cache, "ligerprof")
    yield Path(tempfile.gettempdir(), f"ligerprof-{os.getuid()}")


def _build(name: str) -> Path:
    compiler = next(compilers("CXX", _COMPILERS), None)
    if compiler is None:
        raise MissingDependencyError(
            "the simulated GPU: no C++ compiler. Install one, such as g++ (Debian, Ubuntu: apt install g++)."
        )
    root, problem = Path(torch.__file__).parent, "no folder for it"
    arguments = [
        *("-std=c++20", "-O1", "-ftree-vectorize", "-fPIC", "-shared", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-I{root / folder}" for folder in ("include", "include/torch/csrc/api/include")),
        f"-L{root / 'lib'}",
    ]
    for folder in _folders():
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryDirectory(dir=folder) as build:
                made = Path(build, name)
                subprocess.run(
                    [*compiler, *arguments, str(_SOURCE), *_LIBRARIES, "-o", str(made)],
                    check=True,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=_SECONDS,
                )
                return made.replace(folder / name)
        except OSError as error:
            problem = f"{error.filename}: {error.strerror}"
        except subprocess.CalledProcessError as error:
            problem = next((line for line in error.stderr.decode(errors="replace").splitlines() if "error" in line), "")
            break
        except subprocess.TimeoutExpired:
            problem = f"it took over {_SECONDS} s"
            break
    raise MissingDependencyError(
        f"the simulated GPU: {compiler[0]} cannot build it for torch {torch.__version__} ({problem})."
        " Install g++ 11 or later, or name a compiler in CXX."
    )
