"""live.json: the figures of a running recording, for `ligerprof watch`, rewritten at most once per step."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ligerprof.errors import LigerprofError, RunDirectoryError
from ligerprof.files import FileKind, read_json
from ligerprof.roles import Phase, Role
from ligerprof.runs.recording.device import DeviceMoment, DeviceProcess, DeviceReport, DeviceWatch, device_reports
from ligerprof.runs.recording.summary import PREFIX
from ligerprof.serialization import to_json
from ligerprof.torch_memory.allocator.caching import LARGE_SEGMENT_BYTES

if TYPE_CHECKING:
    import torch

LIVE = "live.json"
# a note may take this share of the time since the one before
_MOST_SHARE = 0.01
_LEAST_SECONDS = 0.2
# asking the driver takes longest, and what others use hardly changes
_DRIVER_SECONDS = 10.0
_MOST_SAMPLES = 64
# of the whole GPU; while the history is on, a look copies the stacks of all blocks
_DEVICE_SECONDS, _DEVICE_SHARE, _MOST_MOMENTS = 1.0, 0.03, 256
# the first step creates the optimizer's states
_SETTLED_STEP = 3
_LEAST_GROWTHS = 3
_MOST_EXCEPTIONS = 0.2
_LEAST_GROWTH_BYTES = 512
_KIND = FileKind(error=RunDirectoryError, hint="Record the command again.")
_ROLE_OF = {Phase.BACKWARD: Role.GRADIENTS, Phase.OPTIMIZER: Role.OPTIMIZER_STATES}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The figures at the beginning of a step, or at the end of the process.

    Attributes:
        seconds: since the process started.
        roles: bytes of weights, gradients and optimizer states, of those optimizers that have stepped.
    """

    step: int
    seconds: float
    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int
    peak_reserved_bytes: int
    roles: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Live:
    """A process that is recorded, as live.json has it.

    Attributes:
        samples: the oldest first; of a long run not every step.
        limit_bytes: the most that the process can reserve: what it has, and what the driver had left.
        gpu: identifies the GPU among all processes; "" if it is simulated.
        moments: the GPU over time, the oldest first; of a long run not every one.
        emptied: calls of torch.cuda.empty_cache, and the bytes that they freed.
    """

    pid: int
    limit_bytes: int
    samples: tuple[Sample, ...]
    ended: bool = False
    gpu: str = ""
    moments: tuple[DeviceMoment, ...] = ()
    emptied: tuple[int, int] = (0, 0)

    @property
    def growth_bytes(self) -> int:
        """By how much the allocated bytes at the beginning of a step grow in a typical one; 0 if they do not."""
        settled = [sample for sample in self.samples if sample.step >= _SETTLED_STEP]
        grown = [
            (after.allocated_bytes - before.allocated_bytes) / (after.step - before.step)
            for before, after in pairwise(settled)
            if after.step > before.step
        ]
        exceptions = sum(each < _LEAST_GROWTH_BYTES for each in grown)
        if len(grown) < _LEAST_GROWTHS or exceptions > _MOST_EXCEPTIONS * len(grown):
            return 0
        return int(median(grown))

    @property
    def fails_in_step(self) -> int | None:
        """The step in which memory runs out if the growth continues; None if nothing grows."""
        growth_bytes = self.growth_bytes
        if not growth_bytes:
            return None
        last = self.samples[-1]
        # the allocator asks for whole segments
        left_bytes = self.limit_bytes - LARGE_SEGMENT_BYTES - last.peak_bytes
        return last.step + max(0, left_bytes) // growth_bytes + 1

    @classmethod
    def read(cls, folder: Path) -> "Live":
        """Read live.json of a folder; raises RunDirectoryError if it is missing or damaged."""
        values = read_json(folder / LIVE, _KIND)
        try:
            samples = tuple(Sample(**sample) for sample in values["samples"])
            moments = tuple(map(DeviceMoment.from_json, values.get("moments", ())))
            calls, freed_bytes = map(int, values.get("emptied", (0, 0)))
            found = cls(**{**values, "samples": samples, "moments": moments, "emptied": (calls, freed_bytes)})
            if not samples or not all(isinstance(each.allocated_bytes, int) for each in samples):
                raise ValueError
        except (TypeError, ValueError, KeyError):
            raise RunDirectoryError(f"{folder / LIVE}: not what a recorder writes. {_KIND.hint}") from None
        return found

    def on_device(self, name: str) -> DeviceProcess:
        return DeviceProcess(
            name=name, pid=self.pid, uuid=self.gpu, moments=self.moments, ended=self.ended, emptied=self.emptied
        )


def recorded_devices(output: Path, ranks: Mapping[int, Path]) -> tuple[DeviceReport, ...]:
    """The GPUs as the ranks, and all other processes recorded into `output`, noted them; () of a simulated run."""
    folders = {f"rank {rank}": folder for rank, folder in ranks.items()}
    folders |= {folder.name.replace("-", " "): folder for folder in sorted(output.glob(f"{PREFIX}*"))}
    noted = []
    for name, folder in folders.items():
        with suppress(LigerprofError):
            noted.append(Live.read(folder).on_device(name))
    return device_reports(noted)


class LiveFile:
    """Writes live.json; how often follows from what a note takes, so that training is not slowed.

    Args:
        tensors: gradients and states of the optimizers, with the phase that allocates them, and their weights.
        device: reads the counters of the GPU; None for a simulated one.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Callable[[], "Iterable[tuple[torch.Tensor, Role]]"],
        device: DeviceWatch | None = None,
    ) -> None:
        self._path, self._tensors, self._device = folder / LIVE, tensors, device
        self._moments: list[DeviceMoment] = []
        self._device_due = 0.0
        self._started = time.monotonic()
        self._due = 0.0
        self._samples: list[Sample] = []
        self._limit_bytes, self._asked = 0, -_DRIVER_SECONDS

    def note(self, step: int, *, is_last: bool = False, is_recorded: bool = True) -> None:
        """Note the figures as a step begins, if the last note is long enough ago.

        Args:
            is_recorded: whether the allocator's history is on.
        """
        before = time.monotonic()
        if before < self._due and not is_last:
            return
        if self._device is not None and (before >= self._device_due or is_last) and not self._device.is_capturing:
            self.note_device(step, "end" if is_last else "step", is_recorded=is_recorded)
            before = time.monotonic()
        self._add(step, before)
        last = self._samples[-1]
        if before - self._asked >= _DRIVER_SECONDS or is_last:
            import torch

            cuda: Any = torch.cuda
            self._limit_bytes, self._asked = last.reserved_bytes + int(cuda.mem_get_info()[0]), before
        live = Live(
            pid=os.getpid(),
            limit_bytes=self._limit_bytes,
            samples=tuple(self._samples),
            ended=is_last,
            gpu="" if self._device is None else self._device.uuid,
            moments=tuple(self._moments),
            emptied=(0, 0) if self._device is None else (self._device.emptied[0], self._device.emptied[1]),
        )
        text = json.dumps(to_json(live))
        partial = self._path.with_name(f".{LIVE}.partial")
        # without fsync: a reader sees the old file or the new one
        with suppress(OSError):
            partial.write_text(text, encoding="utf-8")
            partial.replace(self._path)
        _log_to_wandb(live)
        after = time.monotonic()
        self._due = after + max(_LEAST_SECONDS, (after - before) / _MOST_SHARE)

    def note_device(self, step: int, event: str, *, is_recorded: bool, freed_bytes: int | None = None) -> None:
        """Note what the GPU holds; the file has it with the next sample.

        Args:
            is_recorded: whether the allocator's history is on.
        """
        assert self._device is not None
        before = time.monotonic()
        if len(self._moments) >= _MOST_MOMENTS:
            highest = max(self._moments, key=lambda moment: moment.used_bytes)
            self._moments = [moment for moment in self._moments if moment is highest or moment in self._moments[::2]]
        self._moments.append(self._device.read(step, event, is_recorded=is_recorded, freed_bytes=freed_bytes))
        # the first one loads the symbols of the stacks, which the end of the recording needs anyway
        seconds = 0.0 if len(self._moments) == 1 else time.monotonic() - before
        self._device_due = time.monotonic() + max(_DEVICE_SECONDS, seconds / _DEVICE_SHARE)

    def _add(self, step: int, now: float) -> None:
        import torch

        counters: Any = torch.cuda.memory_stats_as_nested_dict()
        allocated, reserved = counters["allocated_bytes"]["all"], counters["reserved_bytes"]["all"]
        roles: dict[str, int] = {}
        for tensor, role in self._tensors():
            # of a sharded tensor, this rank's part
            local = getattr(tensor, "_local_tensor", tensor)
            if local.is_cuda:
                roles[role.value] = roles.get(role.value, 0) + local.nbytes
        sample = Sample(
            step=step,
            seconds=round(now - self._started, 3),
            allocated_bytes=int(allocated["current"]),
            reserved_bytes=int(reserved["current"]),
            peak_bytes=int(allocated["peak"]),
            peak_reserved_bytes=int(reserved["peak"]),
            roles=roles,
        )
        if len(self._samples) >= _MOST_SAMPLES:
            self._samples = self._samples[::2]
        self._samples.append(sample)


def tensors_by_role(optimizers: Iterable[Any]) -> "Iterable[tuple[torch.Tensor, Role]]":
    """Weights, gradients and states of optimizers."""
    from ligerprof.runs.recording.phases import tensors_of

    held = list(optimizers)
    for optimizer in held:
        for group in optimizer.param_groups:
            yield from ((weight, Role.PARAMETERS) for weight in group["params"])
    yield from ((tensor, _ROLE_OF[phase]) for tensor, phase in tensors_of(held) if phase in _ROLE_OF)


def scalars(live: Live) -> dict[str, float]:
    """The newest figures by the names that TensorBoard and wandb show, in MiB; the step of a failure as it is."""
    last = live.samples[-1]
    found = {
        "allocated": last.allocated_bytes,
        "reserved": last.reserved_bytes,
        "peak": last.peak_bytes,
        "growth_per_step": live.growth_bytes,
        **last.roles,
    }
    named = {f"memory_mib/{name}": size_bytes / 2**20 for name, size_bytes in found.items()}
    fails = live.fails_in_step
    return named if fails is None else {**named, "memory/fails_in_step": float(fails)}


def _log_to_wandb(live: Live) -> None:
    """Add the figures to the program's next log, if it uses wandb."""
    wandb: Any = sys.modules.get("wandb")
    run = getattr(wandb, "run", None)
    if run is not None:
        with suppress(Exception):
            run.log(scalars(live), commit=False)
