"""The peaks of a run over sequences of given lengths."""

from dataclasses import dataclass
from typing import Any

from ligerprof.recipe.lengths import BatchShape, RunShapes
from ligerprof.serialization import select, to_json


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMoment:
    """A step of the run and the longest of its micro-batches."""

    step: int
    shape: BatchShape

    def to_json(self) -> dict[str, Any]:
        """The object of a moment in JSON."""
        return {"step": self.step, **to_json(select(self.shape, "rows", "tokens", "masked"))}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFailure:
    """The allocation that did not fit."""

    moment: RunMoment
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    limit_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The object of `oom` in JSON."""
        return {
            **self.moment.to_json(),
            **select(self, "requested_bytes", "allocated_bytes", "reserved_bytes", "limit_bytes"),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeRun:
    """Peaks over all steps of one pass over the data; of the steps that ran, if memory ran out.

    Attributes:
        shapes: the micro-batches.
        steps: steps that ran to their end.
        distinct_shapes: different shapes among the micro-batches.
        traced_shapes: those whose steps were simulated; the others follow from them.
        peak_bytes, peak: the most allocated bytes, and when.
        reserved_bytes, reserved: the most reserved bytes, and when they were first reached.
        first_step_peak_bytes: the most allocated bytes of the first step.
        oom: the allocation that did not fit the limit, or None.
        bounded_bytes: the largest temporary that counts with an upper bound; 0 without.
    """

    shapes: RunShapes
    steps: int
    distinct_shapes: int
    traced_shapes: int
    peak_bytes: int
    peak: RunMoment
    reserved_bytes: int
    reserved: RunMoment
    first_step_peak_bytes: int
    oom: RunFailure | None
    bounded_bytes: int

    @property
    def fragmentation_bytes(self) -> int:
        """Bytes that the allocator reserved beyond the most that was ever allocated."""
        return self.reserved_bytes - self.peak_bytes

    @property
    def padding_share(self) -> float:
        """Share of the micro-batches' tokens that are padding."""
        return 1 - self.shapes.tokens / self.shapes.batch_tokens

    def to_json(self) -> dict[str, Any]:
        """The value of `whole_run` in JSON."""
        return {
            **select(self, "steps", "shapes.sequences", "shapes.cut", "distinct_shapes", "traced_shapes"),
            **select(self, "padding_share", "peak_bytes", "peak", "reserved_bytes", "reserved"),
            **select(self, "fragmentation_bytes", "first_step_peak_bytes", "oom", "bounded_bytes"),
        }
