"""The device that kernels are measured on: its clock, its memory, and its synchronizations with the host."""

import functools
import gc
import platform
import time
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version

import torch

from ligerprof import __version__
from ligerprof.errors import MissingDependencyError
from ligerprof.runs.bench.timing import Clock
from ligerprof.runs.measured.nvml import NvmlDevice
from ligerprof.units import MIB

# several times any L2 cache
_FLUSHED_BYTES = 256 * MIB
# about a millisecond in which the host gets ahead, so that no launch delays the device
_HEAD_START_CYCLES = 2_000_000
_HOST_CALLS = 20
_HOST_BATCHES = 11
_PACKAGES = ("torch", "triton", "liger-kernel", "cut-cross-entropy")

Run = Callable[[], object]


class CudaClock:
    """CUDA events around work; the cache is flushed before, unless that is unwanted, and launches are queued ahead."""

    def __init__(self, *, flush: bool = True) -> None:
        self._scratch = torch.empty(_FLUSHED_BYTES if flush else 0, dtype=torch.uint8, device="cuda")

    def time(self, run: Run, *, head_start: bool) -> Callable[[], float]:
        """Queue `run`, after a flush of the cache; the returned function waits for its end."""
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        if self._scratch.numel():
            self._scratch.zero_()
        if head_start:
            torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        started.record()
        run()
        ended.record()

        def read() -> float:
            ended.synchronize()
            return float(started.elapsed_time(ended)) / 1000

        return read

    def now(self) -> float:
        """Wall-clock seconds."""
        return time.perf_counter()


class CudaMachine:
    """The current CUDA device; creating it raises MissingDependencyError without one."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise MissingDependencyError(
                "bench: torch finds no CUDA device, and times on a CPU would be meaningless."
                " Run it on a GPU, or show earlier results with --from FILE."
            )
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.clock: Clock = CudaClock()

    def copy(self, moved_bytes: int) -> Run:
        """A copy on the device that reads and writes `moved_bytes` in total."""
        source = torch.randint(256, (moved_bytes // 2,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def extra_peak_bytes(self, run: Run) -> int:
        """The highest allocated bytes during `run`, minus those before it."""
        self.release()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        # held until it is counted
        kept = run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        del kept
        return peak - before

    def conditions(self) -> dict[str, int | float]:
        """The chip's clock, power and temperature now, as far as the driver reports them."""
        return {} if self._nvml is None else self._nvml.conditions()

    @functools.cached_property
    def _nvml(self) -> NvmlDevice | None:
        return NvmlDevice.find(f"GPU-{torch.cuda.get_device_properties(self.device).uuid}")

    def host_seconds(self, run: Run) -> float:
        """The host's median time per call to launch a batch of calls; the device is idle before each batch."""
        seconds = []
        for _ in range(_HOST_BATCHES):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(_HOST_CALLS):
                run()
            seconds.append((time.perf_counter() - started) / _HOST_CALLS)
        torch.cuda.synchronize()
        return sorted(seconds)[_HOST_BATCHES // 2]

    def synchronizations(self, run: Run) -> tuple[int, str | None]:
        """How often the host waits for the device in `run`, and torch's message about the first wait.

        Torch's sync debug mode is set to `error`; if that raises, the warnings under `warn` are counted.
        """
        torch.cuda.synchronize()
        before = torch.cuda.get_sync_debug_mode()
        try:
            torch.cuda.set_sync_debug_mode("error")
            run()
        except RuntimeError as error:
            return self._count_waits(run), str(error).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return 0, None

    def _count_waits(self, run: Run) -> int:
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
        return max(1, sum("synchronizing CUDA operation" in str(warning.message) for warning in caught))

    def release(self) -> None:
        """Collect cycles and release cached memory."""
        gc.collect()
        torch.cuda.empty_cache()

    def environment(self) -> dict[str, str]:
        """GPU, CUDA, Python, packages, date in UTC."""
        versions = {"ligerprof": __version__, "cuda": str(torch.version.cuda), "python": platform.python_version()}
        for package in _PACKAGES:
            try:
                versions[package] = version(package)
            except PackageNotFoundError:
                versions[package] = "missing"
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return {"gpu": torch.cuda.get_device_name(self.device), "date": now, **versions}
