"""What a report says beyond who holds the peak: phases of each step, why memory ran out, what helps, what grows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ligerprof.roles import Phase, Role


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPeaks:
    """The highest allocated bytes while each phase of one training step ran.

    Attributes:
        step: as our stamps count, or counted from 1 where there are none.
        phases: only those that allocated or freed something.
    """

    step: int
    phases: Mapping[Phase, int]

    def to_json(self) -> dict[str, Any]:
        """An entry of `steps` in the JSON."""
        return {"step": self.step, **{phase.value: size_bytes for phase, size_bytes in self.phases.items()}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """A segment that cannot be given back although part of it is free.

    Attributes:
        segment_bytes: its size.
        free_bytes: the free part.
        roles: requested bytes of the blocks that hold it, by role.
    """

    segment_bytes: int
    free_bytes: int
    roles: Mapping[Role, int]

    def to_json(self) -> dict[str, Any]:
        """An entry of `pins` in the JSON."""
        roles = {role.value: size_bytes for role, size_bytes in self.roles.items()}
        return {"segment_bytes": self.segment_bytes, "free_bytes": self.free_bytes, "roles": roles}


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """The first allocation that did not fit.

    Attributes:
        requested_bytes: what was asked for.
        reserved_free_bytes: reserved but in no block.
        largest_free_bytes: the largest piece of that.
        device_free_bytes: what the driver had left, None where the recording does not say.
        fragmented: whether enough was reserved and free, and in pieces too small.
        pins: segments with free parts, the largest part first.
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    reserved_free_bytes: int
    largest_free_bytes: int
    device_free_bytes: int | None
    fragmented: bool
    pins: tuple[Pin, ...]

    def to_json(self) -> dict[str, Any]:
        """The object `oom` of the JSON."""
        keys = ("requested_bytes", "allocated_bytes", "reserved_bytes", "reserved_free_bytes", "largest_free_bytes")
        figures = {key: getattr(self, key) for key in (*keys, "device_free_bytes", "fragmented")}
        return {**figures, "pins": [pin.to_json() for pin in self.pins]}


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """The next-highest moment if some roles held nothing.

    Attributes:
        without: those roles.
        peak_bytes: the peak then.
        saved_bytes: by how much it is lower.
        change: what does it.
        option: how `ligerprof step` is told.
    """

    without: tuple[Role, ...]
    peak_bytes: int
    saved_bytes: int
    change: str
    option: str

    def to_json(self) -> dict[str, Any]:
        """An entry of `what_if` in the JSON."""
        return {
            "without": [role.value for role in self.without],
            "peak_bytes": self.peak_bytes,
            "saved_bytes": self.saved_bytes,
            "change": self.change,
            "command": f"ligerprof step {self.option}",
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """Blocks that steps leave behind, one step after the other.

    Attributes:
        per_step_bytes: what stood at the end of a step more than at the end of the one before, the least of all steps.
        steps: how many steps in a row grew.
        role: of the largest group of blocks that stayed.
        who: its module and frame.
    """

    per_step_bytes: int
    steps: int
    role: Role
    who: str

    def to_json(self) -> dict[str, Any]:
        """The object `growth` of the JSON."""
        return {
            "per_step_bytes": self.per_step_bytes,
            "steps": self.steps,
            "role": self.role.value,
            "who": self.who,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """All of them; what does not apply is empty or None."""

    steps: tuple[StepPeaks, ...] = ()
    out_of_memory: OutOfMemory | None = None
    what_if: tuple[WhatIf, ...] = ()
    growth: Growth | None = None

    def to_json(self) -> dict[str, Any]:
        """The keys that stand beside the contract's."""
        return {
            "steps": [peaks.to_json() for peaks in self.steps],
            "oom": self.out_of_memory.to_json() if self.out_of_memory else None,
            "what_if": [what_if.to_json() for what_if in self.what_if],
            "growth": self.growth.to_json() if self.growth else None,
        }
