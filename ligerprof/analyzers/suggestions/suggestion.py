"""A suggestion: a change to a program, what it saves, what it costs, and how to make it."""

from dataclasses import dataclass
from typing import Any

from ligerprof.analyzers.suggestions.case import Framework
from ligerprof.roles import Role
from ligerprof.serialization import select
from ligerprof.words import ExplainedWord


class Cost(ExplainedWord):
    """The price of a change; the cheapest first."""

    FREE = "free", "same results up to rounding, no slower"
    CHEAP = "cheap", "a few percent of the time"
    TIME = "time", "slower"
    TRAINING = "training", "changes precision or what is trained"


class Basis(ExplainedWord):
    """How exact a saving is."""

    REPLAYED = "replayed", "the recording replayed with the change"
    AT_LEAST = "at least", "replayed, without some of what the change saves"
    ESTIMATED = "estimated", "replayed, without activations that the change may shrink or enlarge"


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """One change that lowers the peak.

    Attributes:
        name: short name, such as `checkpointing`.
        change: what changes, in words.
        without: roles that the change removes or shrinks.
        saves_bytes: by how much the peak is lower; None if this cannot be computed.
        new_peak_bytes: the peak with the change, wherever it then is; None as above.
        cost_reason: what the cost consists of.
        how: lines to change, in the words of the framework.
        framework: whose settings these are.
        lets_pass: whether the allocation that failed would have succeeded; None without one, or if unknown.
        basis: how exact the saving is.
        least_peak_bytes: the new peak where it is lowest, if it differs from run to run; else None.
        condition: what else the new peak depends on, in a sentence; empty if on nothing.
        new_reserved_bytes: what is reserved with the change, of one that moves blocks and leaves the peak; else None.
        saves_reserved_bytes: by how much that is less; None as above.
    """

    name: str
    change: str
    without: tuple[Role, ...]
    saves_bytes: int | None
    new_peak_bytes: int | None
    cost: Cost
    cost_reason: str
    how: tuple[str, ...]
    framework: Framework
    lets_pass: bool | None = None
    basis: Basis = Basis.REPLAYED
    least_peak_bytes: int | None = None
    condition: str = ""
    new_reserved_bytes: int | None = None
    saves_reserved_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """An entry of `suggestions` in the JSON."""
        names = ("name", "change", "saves_bytes", "new_peak_bytes", "cost", "cost_reason", "how", "framework")
        reserved = () if self.new_reserved_bytes is None else ("new_reserved_bytes", "saves_reserved_bytes")
        return select(self, *names, "lets_pass", "basis", "least_peak_bytes", "condition", *reserved)

    def to_what_if(self) -> dict[str, Any]:
        """An entry of `what_if` in the JSON."""
        command = self.how[0] if self.framework is Framework.LIGERPROF else None
        figures = select(self, "without", "peak_bytes=new_peak_bytes", "saved_bytes=saves_bytes", "change")
        return {**figures, "command": command}
