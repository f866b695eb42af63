"""The time of a step: the GPU's seconds and the host's, part by part, and which of them bounds it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ligerprof.analyzers.step_time.rates import Kind, Ledger, Part, Rates, find_rates
from ligerprof.serialization import JsonKeys, select
from ligerprof.words import Word

# of the step's time: what 9 of 10 held-out steps were within on the measured GPU (docs/time.md), and a wider one
# for rates from data sheets
_MEASURED_SHARE = 0.15
_SHEET_SHARE = 0.35
# the host of another machine can be half or twice as fast
_HOST_SHARE = 0.5
_ORDER = (Part.FORWARD, Part.LOSS, Part.RECOMPUTE, Part.BACKWARD, Part.OPTIMIZER)


class Bound(Word):
    """What a part of the step, or the whole, waits for."""

    PRODUCTS = "products"
    ATTENTION = "attention"
    MEMORY = "memory"
    TRANSFER = "transfer"
    LAUNCHES = "launches"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartTime:
    """A part's time.

    Attributes:
        gpu_seconds: of its kernels, by what bounds them.
        host_seconds: until the host has launched them.
    """

    part: Part
    gpu_seconds: Mapping[Kind, float]
    host_seconds: float

    @property
    def seconds(self) -> float:
        """How long it takes by itself."""
        return max(math.fsum(self.gpu_seconds.values()), self.host_seconds)

    @property
    def bound(self) -> Bound:
        """What it waits for."""
        return _bound(self.gpu_seconds, self.host_seconds)

    def to_json(self) -> dict[str, Any]:
        """An entry of `time_parts` in the JSON."""
        gpu_seconds = {str(kind): seconds for kind, seconds in self.gpu_seconds.items()}
        return {**select(self, "part", "seconds", "bound", "host_seconds"), "gpu_seconds": gpu_seconds}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime(JsonKeys):
    """The predicted time of a step.

    Attributes:
        gpu: for which GPU.
        measured: whether its rates were measured, or come from data sheets.
        seconds: the step's time.
        tokens: trained per step.
        flops: of products and attention, what is recomputed included.
        useful_flops: the same without what is recomputed.
        peak_flops: the GPU's rate in the dtype of most products, by its data sheet.
    """

    gpu: str
    measured: bool
    seconds: float
    tokens: int
    flops: float
    useful_flops: float
    peak_flops: float
    parts: tuple[PartTime, ...] = field(default=())

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds between which the step's time is expected."""
        share = _MEASURED_SHARE if self.measured else _SHEET_SHARE
        if self.bound is Bound.LAUNCHES:
            share = max(share, _HOST_SHARE)
        return self.seconds * (1 - share), self.seconds * (1 + share)

    @property
    def gpu_seconds(self) -> float:
        """The sum of all kernels: the step's time with a host that launches them in time."""
        return math.fsum(math.fsum(part.gpu_seconds.values()) for part in self.parts)

    @property
    def parts_seconds(self) -> float:
        """The sum of the parts' times, each by itself."""
        return math.fsum(part.seconds for part in self.parts)

    @property
    def tokens_per_second(self) -> float:
        """Tokens trained per second."""
        return self.tokens / self.seconds

    @property
    def utilization(self) -> float:
        """Useful operations over what the GPU could do in the step's time."""
        return self.useful_flops / self.seconds / self.peak_flops

    @property
    def bound(self) -> Bound:
        """What the step waits for."""
        total: dict[Kind, float] = {}
        for part in self.parts:
            for kind, seconds in part.gpu_seconds.items():
                total[kind] = total.get(kind, 0.0) + seconds
        return _bound(total, math.fsum(part.host_seconds for part in self.parts))

    def to_json(self) -> dict[str, Any]:
        """The keys of the estimate's JSON about the time."""
        return {
            "step_seconds": self.seconds,
            "step_seconds_interval": list(self.interval),
            "gpu_seconds": self.gpu_seconds,
            "tokens_per_second": self.tokens_per_second,
            "flops_utilization": self.utilization,
            "time_bound": self.bound.value,
            "time_parts": [part.to_json() for part in self.parts],
            "time_unknown": None,
        }


def time_json(time: StepTime | str) -> dict[str, Any]:
    """The keys of the JSON about the time; null, with the reason, where it is not known."""
    if isinstance(time, StepTime):
        return time.to_json()
    keys = ("step_seconds", "step_seconds_interval", "gpu_seconds", "tokens_per_second", "flops_utilization")
    return {**dict.fromkeys((*keys, "time_bound", "time_parts")), "time_unknown": time}


def step_time(ledger: Ledger, gpu: str, tokens: int) -> StepTime | None:
    """The time of a step of `tokens` tokens on a GPU; None if no rates of it are known."""
    rates = find_rates(gpu)
    if rates is None:
        return None
    parts = tuple(_part_times(ledger, rates))
    multiplied: dict[str, float] = {}
    for (_, work), times in ledger.work.items():
        if work.kind is Kind.PRODUCTS:
            multiplied[work.name] = multiplied.get(work.name, 0.0) + work.flops * times
    dtype = max(multiplied, key=lambda name: multiplied[name], default="bf16")
    useful = ledger.flops(part for part in Part if part is not Part.RECOMPUTE)
    return StepTime(
        gpu=gpu,
        measured=rates.measured,
        seconds=_elapsed(parts),
        tokens=tokens,
        flops=ledger.flops(),
        useful_flops=useful,
        peak_flops=rates.peak_flops.get(dtype, rates.peak_flops["bf16"]),
        parts=parts,
    )


def _part_times(ledger: Ledger, rates: Rates) -> list[PartTime]:
    gpu: dict[Part, dict[Kind, float]] = {}
    host: dict[Part, float] = {}
    for (part, work), times in ledger.work.items():
        of_part = gpu.setdefault(part, {})
        of_part[work.kind] = of_part.get(work.kind, 0.0) + rates.gpu_seconds(work) * times
    for (part, call), times in ledger.calls.items():
        host[part] = host.get(part, 0.0) + rates.host_seconds(call) * times
    return [
        PartTime(part=part, gpu_seconds=gpu[part], host_seconds=host.get(part, 0.0)) for part in _ORDER if part in gpu
    ]


def _elapsed(parts: tuple[PartTime, ...]) -> float:
    """The GPU ends a part when its kernels have run, and not before the host has launched the last of them."""
    host_end = gpu_end = 0.0
    for part in parts:
        host_end += part.host_seconds
        gpu_end = max(gpu_end + math.fsum(part.gpu_seconds.values()), host_end)
    return gpu_end


def _bound(gpu_seconds: Mapping[Kind, float], host_seconds: float) -> Bound:
    if host_seconds > math.fsum(gpu_seconds.values()):
        return Bound.LAUNCHES
    return Bound(max(gpu_seconds, key=lambda kind: gpu_seconds[kind]).value)
