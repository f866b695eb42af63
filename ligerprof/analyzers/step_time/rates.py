"""Predict times from rates that were measured on one GPU, and carried over to others by their data sheets.

A measured time is kept as its ratio to a bound from the data sheet: operations over the peak rate, or bytes over the
bandwidth. Between measured shapes the ratio is interpolated; another GPU has its own bounds and the same ratios.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from heapq import nsmallest
from math import prod
from pathlib import Path
from typing import Any

from ligerprof.serialization import JsonKeys, select
from ligerprof.words import Word


class Part(Word):
    """A part of the step, in the order in which they first run."""

    FORWARD = "forward"
    LOSS = "loss"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Kind(Word):
    """What bounds the time of an operator on the GPU.

    `products` of matrices; `attention`, fused; `memory`: kernels that move bytes; `transfer` between the GPU and main
    memory; `offload`: transfers on a stream of their own, while kernels run.
    """

    PRODUCTS = "products"
    ATTENTION = "attention"
    MEMORY = "memory"
    TRANSFER = "transfer"
    OFFLOAD = "offload"


class Host(Word):
    """What a call costs the host: an operator from Python, from autograd's engine, or a kernel of Triton's.

    `selection`: in addition, an operator of a layer under selective checkpointing, whose policy is a Python function.
    """

    OPERATOR = "operator"
    BACKWARD = "backward"
    TRITON = "triton"
    OPTIMIZER = "optimizer"
    SELECTION = "selection"


@dataclass(frozen=True, slots=True)
class Work:
    """One call's work on the GPU.

    Attributes:
        name: of products, their dtype (bf16, fp32); of attention, the kernel; of memory, how it moves bytes.
        shape: of products, (batch, m, n, k); of attention, (batch, heads, queries, keys, head_dim).
        halves: whether attention is causal.
        is_backward: of attention, whether it computes gradients.
    """

    kind: Kind
    name: str
    moved_bytes: int = 0
    shape: tuple[int, ...] = ()
    halves: bool = False
    is_backward: bool = False

    @property
    def flops(self) -> float:
        """Floating-point operations of products and attention; those of other kernels do not bound them."""
        if self.kind is Kind.PRODUCTS:
            return 2.0 * prod(self.shape)
        if self.kind is Kind.ATTENTION:
            batch, heads, queries, keys, width = self.shape
            # two products in forward, five in backward
            products = 2.5 if self.is_backward else 1.0
            return 4.0 * batch * heads * queries * keys * width * products / (2 if self.halves else 1)
        return 0.0


def product(dtype: str, batch: int, m: int, n: int, k: int, width: int) -> Work:
    """`batch` products of [m, k] and [k, n], with `width` bytes per element."""
    moved_bytes = batch * (m * k + k * n + m * n) * width
    return Work(Kind.PRODUCTS, dtype, moved_bytes, (batch, m, n, k))


@dataclass(slots=True)
class Ledger:
    """The work of a step.

    Attributes:
        work: how often each call happens, by part.
        calls: how often the host calls, by part and kind.
    """

    work: Counter[tuple[Part, Work]] = field(default_factory=Counter)
    calls: Counter[tuple[Part, Host]] = field(default_factory=Counter)

    def add(self, part: Part, work: Work | None, host: Host | None, times: int = 1) -> None:
        """Count a call; None: it does no work, or the host does not notice it."""
        if work is not None:
            self.work[part, work] += times
        if host is not None:
            self.calls[part, host] += times

    def add_all(self, other: "Ledger", times: int = 1) -> None:
        """Count another ledger's calls, `times` times."""
        for key, count in other.work.items():
            self.work[key] += count * times
        for call, count in other.calls.items():
            self.calls[call] += count * times

    def flops(self, parts: Iterable[Part] = tuple(Part)) -> float:
        """Floating-point operations of products and attention in these parts."""
        wanted = set(parts)
        return sum(work.flops * times for (part, work), times in self.work.items() if part in wanted)

    def moved_bytes(self, kind: Kind) -> int:
        """Bytes that all calls of a kind move."""
        return sum(work.moved_bytes * times for (_, work), times in self.work.items() if work.kind is kind)


MEASURED = "h200"
# a kernel takes this long to start, if the host has launched it in time
_START_SECONDS = 1.5e-6
# measured neighbors that an interpolated ratio takes into account, and how fast their weight falls with the distance
_NEIGHBORS, _FALL = 8, 3.0
_TERA = 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    """Figures of a data sheet, without sparsity.

    Attributes:
        flops: operations per second by dtype.
        bytes_per_second: bandwidth of the GPU's memory.
        transfer_bytes_per_second: of the link to main memory, in one direction.
    """

    flops: Mapping[str, float]
    bytes_per_second: float
    transfer_bytes_per_second: float


def _sheet(bf16: float, tf32: float, fp32: float, terabytes: float, gigabytes: float) -> Sheet:
    """Rates in units of 1e12, the link's in 1e9."""
    flops = {"bf16": bf16 * _TERA, "tf32": tf32 * _TERA, "fp32": fp32 * _TERA}
    return Sheet(flops=flops, bytes_per_second=terabytes * _TERA, transfer_bytes_per_second=gigabytes * 1e9)


# NVIDIA's data sheets; the measured GPU's are bounds only
SHEETS: Mapping[str, Sheet] = {
    "h200": _sheet(989.5, 494.7, 66.9, 4.8, 64),
    "h200-nvl": _sheet(835.5, 417.5, 60, 4.8, 64),
    "h100": _sheet(989.5, 494.7, 66.9, 3.35, 64),
    "h100-nvl": _sheet(835.5, 417.5, 60, 3.9, 64),
    "h100-pcie": _sheet(756, 378, 51, 2.0, 64),
    "gh200": _sheet(989.5, 494.7, 66.9, 4.0, 450),
    "a100-80g": _sheet(312, 156, 19.5, 2.039, 32),
    "a100-40g": _sheet(312, 156, 19.5, 1.555, 32),
    "l40s": _sheet(362, 183, 91.6, 0.864, 32),
    "a10": _sheet(125, 62.5, 31.2, 0.6, 32),
    "rtx4090": _sheet(165.2, 82.6, 82.6, 1.008, 32),
    "rtx3090": _sheet(71, 35.6, 35.6, 0.936, 32),
}


class Surface:
    """A measured quantity over shapes: between them, the mean of the nearest in logarithms, weighted by closeness.

    Args:
        points: shapes of positive numbers with the measured value.
    """

    def __init__(self, points: Iterable[tuple[Sequence[float], float]]) -> None:
        self._points = [(tuple(map(math.log2, shape)), math.log(value)) for shape, value in points]

    def at(self, shape: Sequence[float]) -> float:
        """The value at a shape."""
        place = tuple(math.log2(max(size, 1)) for size in shape)
        near = nsmallest(_NEIGHBORS, ((math.dist(place, point), value) for point, value in self._points))
        here = [value for distance, value in near if distance < 1e-6]
        if here:
            return math.exp(math.fsum(here) / len(here))
        weights = [distance**-_FALL for distance, _ in near]
        # fsum, here and for seconds: `sum` rounds otherwise since Python 3.12
        return math.exp(math.fsum(w * value for w, (_, value) in zip(weights, near, strict=True)) / math.fsum(weights))


class Rates:
    """The rates of one GPU.

    Attributes:
        measured: whether these rates were measured on it.
    """

    def __init__(self, gpu: str) -> None:
        self.gpu, self.measured = gpu, gpu == MEASURED
        self._sheet = SHEETS[gpu]
        self._surfaces, self._host, self._apart = _measured()
        self._known: dict[Work, float] = {}

    def gpu_seconds(self, work: Work) -> float:
        """Seconds of one call on the GPU."""
        if work not in self._known:
            self._known[work] = self._seconds(work)
        return self._known[work]

    def _seconds(self, work: Work) -> float:
        bound = _bound_seconds(self._sheet, work)
        surface = self._surfaces.get(_surface_name(work)) or self._surfaces.get(_other_name(work))
        return self._apart * bound * (1.0 if surface is None else surface.at(_place(work)))

    def host_seconds(self, call: Host) -> float:
        """Seconds of the host until it has launched one call."""
        return self._host[call]

    @property
    def peak_flops(self) -> Mapping[str, float]:
        """Operations per second by dtype, from the data sheet."""
        return self._sheet.flops


@cache
def find_rates(gpu: str) -> Rates | None:
    """The rates of a GPU by its name in `ligerprof.gpus`, or None."""
    return Rates(gpu) if gpu in SHEETS else None


@cache
def _measured() -> tuple[Mapping[str, Surface], Mapping[str, float], float]:
    """The surfaces, what calls cost the host, and by how much kernels of a step take longer than alone."""
    raw = json.loads(Path(__file__).with_name(f"{MEASURED}.json").read_text(encoding="utf-8"))
    points: dict[str, list[tuple[Sequence[float], float]]] = {}
    for kind, name, moved_bytes, shape, halves, is_backward, seconds in raw["work"]:
        work = Work(Kind(kind), name, moved_bytes, tuple(shape), halves, is_backward)
        ratio = seconds / _bound_seconds(SHEETS[MEASURED], work)
        points.setdefault(_surface_name(work), []).append((_place(work), ratio))
    return {name: Surface(found) for name, found in points.items()}, raw["host"], raw["apart"]


def _bound_seconds(sheet: Sheet, work: Work) -> float:
    """The least time by the data sheet, and a start."""
    if work.kind in (Kind.TRANSFER, Kind.OFFLOAD):
        return _START_SECONDS + work.moved_bytes / sheet.transfer_bytes_per_second
    peak = sheet.flops.get(work.name, sheet.flops["bf16"])
    return _START_SECONDS + max(work.flops / peak, work.moved_bytes / sheet.bytes_per_second)


def _surface_name(work: Work) -> str:
    if work.kind is Kind.ATTENTION:
        direction = "backward" if work.is_backward else "forward"
        return f"{work.name} {direction}{'' if work.halves else ' masked'}"
    if work.kind is Kind.OFFLOAD:
        return f"{Kind.TRANSFER} {work.name}"
    return f"{work.kind} {work.name}"


def _other_name(work: Work) -> str:
    """The surface for what was not measured by itself."""
    if work.kind is Kind.ATTENTION:
        return _surface_name(replace(work, name="flash", halves=True))
    return {Kind.PRODUCTS: "products bf16", Kind.MEMORY: "memory pointwise"}.get(work.kind, "")


def _place(work: Work) -> Sequence[float]:
    """The shape by which a surface is measured."""
    if work.kind is Kind.PRODUCTS:
        return work.shape
    if work.kind is Kind.ATTENTION:
        batch, heads, queries, _, width = work.shape
        return batch * heads, queries, width
    return (max(work.moved_bytes, 1),)


# of the step's time: what 9 of 10 held-out steps were within on the measured GPU (docs/time.md), and a wider one
# for rates from data sheets
_MEASURED_SHARE = 0.15
_SHEET_SHARE = 0.35
# the host of another machine can be half or twice as fast
_HOST_SHARE = 0.5


class Bound(Word):
    """What a part of the step, or the whole, waits for."""

    PRODUCTS = "products"
    ATTENTION = "attention"
    MEMORY = "memory"
    TRANSFER = "transfer"
    OFFLOAD = "offload"
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
    def running_seconds(self) -> float:
        """The GPU's seconds: of its kernels, or of what is moved meanwhile if that takes longer."""
        moving = self.gpu_seconds.get(Kind.OFFLOAD, 0.0)
        return max(math.fsum(seconds for kind, seconds in self.gpu_seconds.items() if kind is not Kind.OFFLOAD), moving)

    @property
    def seconds(self) -> float:
        """How long it takes by itself."""
        return max(self.running_seconds, self.host_seconds)

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
        measured: whether its rates were measured, or come from data sheets.
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
        return math.fsum(part.running_seconds for part in self.parts)

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
        seconds=elapsed((part.host_seconds, part.running_seconds) for part in parts),
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
        PartTime(part=part, gpu_seconds=gpu[part], host_seconds=host.get(part, 0.0)) for part in Part if part in gpu
    ]


def elapsed(parts: Iterable[tuple[float, float]]) -> float:
    """The time of parts, of each the host's and the GPU's seconds.

    The GPU ends a part when its kernels have run, and not before the host has launched the last of them.
    """
    host_end = gpu_end = 0.0
    for host_seconds, gpu_seconds in parts:
        host_end += host_seconds
        gpu_end = max(gpu_end + gpu_seconds, host_end)
    return gpu_end


def _bound(gpu_seconds: Mapping[Kind, float], host_seconds: float) -> Bound:
    if host_seconds > math.fsum(gpu_seconds.values()):
        return Bound.LAUNCHES
    return Bound(max(gpu_seconds, key=lambda kind: gpu_seconds[kind]).value)
