"""Render a failed allocation: what was requested, what was held, why the free memory did not serve, and what grew."""

from collections.abc import Iterator

from ligerprof.analyzers.explain.failure import Cause, FailedAllocation, Failure, FreeReason
from ligerprof.analyzers.explain.growth import Growth
from ligerprof.reports.terminal import percent_share
from ligerprof.roles import MemoryBreakdown, Role
from ligerprof.units import format_bytes, format_like

_MOST_HOLDERS = 3
_MOST_GROWTHS = 3
# smaller differences are those of one batch to the next
_LARGER_RATIO = 1.05


def failure_lines(oom: FailedAllocation) -> list[str]:
    """The failure in sentences; the first two say that memory ran out."""
    return [*heading_lines(oom), *earlier_lines(oom), *growth_lines(oom), *free_lines(oom)]


def heading_lines(oom: FailedAllocation) -> Iterator[str]:
    """What was requested, when and where, and the largest holders."""
    caught = ", caught" if oom.failure.caught else ""
    requested = format_like(oom.requested_bytes, oom.allocated_bytes) if oom.requested_bytes else "an allocation"
    held = format_bytes(oom.allocated_bytes)
    yield f"Out of memory{_when(oom.failure)}{caught}: {requested} requested, {held} allocated."
    yield f"Out of memory {_where(oom)}."
    yield f"Held then: {holders(oom.roles)}."


def holders(roles: MemoryBreakdown) -> str:
    """The largest roles with their shares, such as `logits 11.74 GiB (76.6 %)`."""
    largest = sorted((role for role in Role if roles[role]), key=lambda role: -roles[role])[:_MOST_HOLDERS]
    return ", ".join(
        f"{role.value} {format_like(roles[role], roles.total_bytes)} ({percent_share(roles[role], roles.total_bytes)})"
        for role in largest
    )


def free_lines(oom: FailedAllocation) -> Iterator[str]:
    """What was free, why it did not serve, and how much was missing."""
    reserved, free = format_bytes(oom.reserved_bytes), format_like(oom.reserved_free_bytes, oom.reserved_bytes)
    yield f"Reserved {reserved}, of which {free} free{_pieces(oom)}."
    if oom.fragmented:
        yield "Fragmentation: enough is free, but in pieces that are too small" + _remedy(oom)
    needed, left = format_bytes(oom.needed_bytes), oom.device_free_bytes
    if oom.limit_bytes is not None and oom.missing_bytes is not None:
        yield (
            f"The limit on reserved memory is {format_bytes(oom.limit_bytes)}, and a new segment takes {needed}: "
            f"{format_bytes(oom.missing_bytes)} were missing."
        )
        return
    if left is None or oom.missing_bytes is None:
        return
    missing = format_bytes(oom.missing_bytes)
    if oom.cause is Cause.LIMIT:
        yield (
            f"The device had {format_bytes(left)} left: a limit on this process was reached. A new segment takes "
            f"{needed}; {'at most ' if oom.missing_is_bound else ''}{missing} more would have been enough."
        )
    else:
        yield f"The device had {format_bytes(left)} left, a new segment takes {needed}: {missing} were missing."


def growth_lines(oom: FailedAllocation) -> Iterator[str]:
    """What grew from step to step before the failure, and larger tensors than before."""
    if len(oom.growth) > 1:
        total = format_bytes(oom.growth_per_step_bytes)
        yield f"{len(oom.growth)} call sites grew from step to step, together by {total} in each. The fastest:"
    for growth in oom.growth[:_MOST_GROWTHS]:
        yield growth_sentence(growth)
    ratio = oom.larger_than_before
    if ratio is not None and ratio >= _LARGER_RATIO:
        yield (
            f"The forward pass's tensors are {ratio:.2g} times as large as in any step before: "
            "a longer sequence or a larger batch."
        )


def growth_sentence(growth: Growth) -> str:
    """What grew by how much in how many steps."""
    size, held = format_bytes(growth.per_step_bytes), format_bytes(growth.held_bytes)
    blocks = f"{growth.held_blocks} blocks of {held}" if growth.held_blocks > 1 else held
    kept = "none freed" if growth.per_step_blocks else "the old one freed for a larger one each time"
    called = f", called from {growth.called_from}" if growth.called_from not in ("", growth.frame) else ""
    who = growth.who or "an unknown call site"
    return (
        f"Grew by {size} in each of {growth.steps} steps: {growth.role.value} of {who}{called}; {blocks} held, {kept}."
    )


def earlier_lines(oom: FailedAllocation) -> Iterator[str]:
    """Whether the program went on, and what failed before."""
    if oom.failure.caught:
        yield "The program caught this failure and went on."
    if oom.earlier_count:
        first = oom.earlier[0]
        size = format_bytes(first.requested_bytes)
        failures = "failure" if oom.earlier_count == 1 else "failures"
        yield f"{oom.earlier_count} earlier {failures}, caught; the newest{_when(first)}: {size} requested."


def _when(failure: Failure) -> str:
    phase = f" in {failure.phase.value}" if failure.phase else ""
    return f"{phase} of step {failure.step}" if failure.step else phase


def _where(oom: FailedAllocation) -> str:
    """Such as "in `to` at loss_utils.py:59 ForCausalLMLoss", with the module and the script's line if known."""
    if oom.frame and ":" not in oom.frame:
        # an autograd node says what it computes
        called = f"in {oom.frame}"
    else:
        # a function that allocates itself is its own operation
        names_itself = oom.operation in ("", oom.frame.rpartition(" ")[2])
        called = " at ".join(filter(None, ("" if names_itself else f"`{oom.operation}`", oom.frame)))
        called = called and f"{'at' if names_itself else 'in'} {called}"
    module = f"{'of' if called else 'in'} {oom.module}" if oom.module else ""
    place = " ".join(filter(None, (called, module))) or "at an unknown call site"
    return f"{place}, called from {oom.called_from}" if oom.called_from not in ("", oom.frame) else place


def _pieces(oom: FailedAllocation) -> str:
    parts = []
    for free in oom.free[:_MOST_HOLDERS]:
        size = f"{format_bytes(free.size_bytes)} " if len(oom.free) > 1 else ""
        # the largest piece shows how far the request was from fitting
        largest = f" (largest {format_bytes(free.largest_bytes)})" if free.reason is FreeReason.TOO_SMALL else ""
        parts.append(f"{size}{free.reason.meaning}{largest}")
    return f": {'; '.join(parts)}" if parts else ""


def _remedy(oom: FailedAllocation) -> str:
    text = "."
    if oom.pins:
        pin = oom.pins[0]
        held = ", ".join(f"{role.value} {format_bytes(size)}" for role, size in pin.roles.items())
        text += f" The segment with most of it ({format_bytes(pin.free_bytes)}) is held by {held}."
    return text
