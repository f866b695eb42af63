import dataclasses
import random
from collections.abc import Mapping
from typing import Any

import pytest

from ligerprof.analyzers.explain.analysis import analyze, explain
from ligerprof.analyzers.explain.failure import Cause, FailedAllocation, FreeReason
from ligerprof.reports.peak import failure_lines
from ligerprof.roles import Phase, Role
from ligerprof.snapshots.reader import Snapshot, read_snapshot
from tests.paths import PROGRAMS, RECORDINGS
from tests.recorded import report
from tests.sampling import sampled
from tests.torch_memory.allocator.programs import MIB, SlowAllocator, random_program

# the out-of-memory observer's figures: limit, allocated, reserved, and the segment that the allocator asked for
MEASURED = {
    "oom-leak": (4000 * MIB, 3752631808, 3980394496, 262144000),
    "oom-loss-graph": (2600 * MIB, 2645694976, 2722103296, 20971520),
    "oom-longer": (3600 * MIB, 3107538432, 3275751424, 524288000),
}
# recordings of steps that fit, to be cut short
LARGE = tuple(pytest.param(name, marks=pytest.mark.slow) for name in ("hf-nockpt-8x1024", "stamped-amp-ckpt-4x1024"))
COMPLETE = ("small-graphs", "small-streams", "small-expandable", *LARGE)


def failure_of(source: str | Snapshot) -> FailedAllocation:
    found = (report(source) if isinstance(source, str) else explain(source)).out_of_memory
    assert found is not None
    return found


def adds_up(oom: FailedAllocation) -> None:
    assert oom.roles.total_bytes == oom.allocated_bytes
    assert min(oom.roles.roles.values()) >= 0
    for role in Role:
        blocks = sum(block.size_bytes for block in oom.blocks if block.role is role)
        assert blocks == (0 if role is Role.ALLOCATOR_ROUNDING else oom.roles[role])
    assert sum(free.size_bytes for free in oom.free) == oom.reserved_free_bytes


def with_failure(snapshot: Snapshot, index: int, *, events_after: int = 0, **event: Any) -> Snapshot:
    """The recording up to an event, then an allocation that fails, then further events of the recording."""
    events = [dict(each) for each in snapshot.trace_of(0)[: index + events_after]]
    failed = {"action": "oom", "device_free": 0, "size": 2**40, "stream": 0, "time_us": 2**50, "frames": []}
    copied = {key: events[index - 1][key] for key in ("time_us", "user_metadata") if key in events[index - 1]}
    events.insert(index, failed | copied | event)
    return dataclasses.replace(snapshot, device_traces=[events], segments=[])


@pytest.mark.parametrize("name", sorted(MEASURED))
def test_figures_of_a_failure_are_those_of_the_observer(name: str) -> None:
    limit, allocated, reserved, segment = MEASURED[name]

    oom = failure_of(name)

    adds_up(oom)
    assert (oom.allocated_bytes, oom.reserved_bytes, oom.needed_bytes) == (allocated, reserved, segment)
    assert (oom.cause, oom.caught, oom.earlier_count) == (Cause.LIMIT, False, 0)
    # the recording lacks the limit, so this is a bound
    assert oom.missing_is_bound
    assert oom.missing_bytes is not None
    assert reserved + segment - limit <= oom.missing_bytes <= segment


def test_the_failing_step_is_the_answer_and_the_peak_stays_that_of_the_recording() -> None:
    found = report("oom")

    oom = found.out_of_memory
    assert oom is not None
    adds_up(oom)
    assert (found.peak_bytes, found.peak_phase) == (16000161792, Phase.BACKWARD)
    assert found.roles.total_bytes == found.peak_bytes
    assert found.roles[Role.OPTIMIZER_STATES] == 0
    assert (oom.requested_bytes, oom.allocated_bytes, oom.reserved_bytes) == (2101346304, 15725704192, 16057892864)
    assert (oom.phase, oom.step) == (Phase.FORWARD, 2)
    assert (oom.frame, oom.called_from) == ("loss_utils.py:59 ForCausalLMLoss", "train.py:82 run")
    assert oom.frames[:2] == (
        "transformers/loss/loss_utils.py:59 ForCausalLMLoss",
        "transformers/models/llama/modeling_llama.py:484 forward",
    )
    # two moments of 16 bits for each of the weights
    assert oom.roles[Role.PARAMETERS] == pytest.approx(2471628800, rel=0.001)
    assert oom.roles[Role.OPTIMIZER_STATES] == pytest.approx(4943257600, rel=0.001)
    assert oom.growth == ()


def test_logits_kept_by_a_list_are_named_by_their_line() -> None:
    oom = failure_of("oom-leak")

    (growth,) = oom.growth
    assert (growth.role, growth.frame) == (Role.LOGITS, "modeling_llama.py:480 forward")
    assert growth.called_from == "programs.py:630 oom_leak"
    # 4 sequences of 512 tokens, 32000 words, 16 bits
    assert (growth.per_step_bytes, growth.per_step_blocks) == (4 * 512 * 32000 * 2, 1)
    assert (oom.step, growth.steps, growth.held_blocks) == (16, 15, 16)
    assert oom.larger_than_before == 1


def test_graphs_kept_by_a_sum_of_losses_grow_at_many_call_sites() -> None:
    oom = failure_of("oom-loss-graph")

    assert (oom.phase, oom.step) == (Phase.FORWARD, 5)
    assert len(oom.growth) > 5
    assert all(growth.steps == 4 and growth.called_from == "programs.py:645 oom_loss_graph" for growth in oom.growth)
    assert not {growth.role for growth in oom.growth} & {Role.PARAMETERS, Role.LIBRARY_WORKSPACE}
    # almost all memory but the weights is theirs
    assert 4 * oom.growth_per_step_bytes > 0.7 * (oom.allocated_bytes - oom.roles[Role.PARAMETERS])


def test_a_longer_sequence_is_no_growth_but_larger_tensors() -> None:
    oom = failure_of("oom-longer")

    assert oom.growth == ()
    assert oom.step == 5
    # 2048 tokens after at most 384
    assert oom.larger_than_before == pytest.approx(2048 / 384)
    assert "5.3 times as large as in any step before" in "\n".join(failure_lines(oom))


def test_a_loop_over_the_rows_of_a_batch_is_not_taken_for_steps() -> None:
    failed = explain(PROGRAMS / "oom-dpo.pickle.xz").out_of_memory

    assert failed is not None
    assert (failed.phase, failed.step) == (Phase.FORWARD, 2)


def test_caught_failures_are_counted_and_the_last_is_explained() -> None:
    found = report("oom-caught")

    oom = found.out_of_memory
    assert oom is not None
    adds_up(oom)
    assert found.peak_bytes == 2433378304
    assert (oom.caught, oom.earlier_count) == (True, 2)
    assert all(failure.caught for failure in oom.earlier)
    # the program halves its batch each time
    assert oom.earlier[0].requested_bytes == 2 * oom.requested_bytes
    lines = failure_lines(oom)
    assert lines[0].startswith("Out of memory in forward of step 1, caught: ")
    assert "The program caught this failure and went on." in lines


@pytest.mark.parametrize(
    ("operation", "frame", "module", "called_from", "place"),
    [
        ("to", "loss_utils.py:59 forward", "", "", "in `to` at loss_utils.py:59 forward"),
        ("linear", "llama.py:9 forward", "lm_head", "a.py:1 f", "in `linear` at llama.py:9 forward of lm_head, called"),
        ("forward", "llama.py:9 forward", "", "llama.py:9 forward", "at llama.py:9 forward"),
        ("mm", "MmBackward0", "lm_head", "", "in MmBackward0 of lm_head"),
        ("mm", "", "", "", "in `mm`"),
        ("", "", "lm_head", "", "in lm_head"),
        ("", "", "", "", "at an unknown call site"),
    ],
)
def test_a_failure_names_the_operation_and_its_place(
    operation: str, frame: str, module: str, called_from: str, place: str
) -> None:
    known = report("oom-leak").out_of_memory
    assert known is not None
    oom = dataclasses.replace(known, operation=operation, frame=frame, module=module, called_from=called_from)

    line = failure_lines(oom)[1]
    assert line.startswith(f"Out of memory {place}")
    assert line.removeprefix(f"Out of memory {place}") in (".", " from a.py:1 f.")


@pytest.mark.parametrize("name", COMPLETE)
def test_roles_at_any_moment_add_up_to_the_allocated_bytes(name: str) -> None:
    whole = read_snapshot(RECORDINGS / f"{name}.pickle.xz")
    truth = analyze(whole, device_index=0)
    draw = random.Random(name)
    for _ in range(3):
        index = draw.randrange(1, len(whole.trace_of(0)))

        oom = failure_of(with_failure(whole, index))

        adds_up(oom)
        assert oom.allocated_bytes == truth.replayed.allocated_bytes[index]
        assert oom.reserved_bytes == truth.replayed.reserved_bytes[index]


@sampled("name", ["hf-nockpt-8x1024", "stamped-amp-ckpt-4x1024"], every=2)
def test_what_happens_after_a_failure_does_not_change_what_was_held(name: str) -> None:
    whole = read_snapshot(RECORDINGS / f"{name}.pickle.xz")
    index = 2 * len(whole.trace_of(0)) // 3

    alone, followed = (failure_of(with_failure(whole, index, events_after=after)) for after in (0, 2000))

    assert followed.caught
    assert (alone.roles, alone.blocks, alone.free) == (followed.roles, followed.blocks, followed.free)
    assert (alone.step, alone.phase) == (followed.step, followed.phase)


@sampled("name", ["hf-nockpt-8x1024", "hf-ckpt-4x1024", "stamped-amp-ckpt-4x1024"], every=3)
def test_roles_at_a_failure_are_almost_those_that_the_rest_of_the_recording_shows(name: str) -> None:
    whole = read_snapshot(RECORDINGS / f"{name}.pickle.xz")
    attribution = analyze(whole).attribution
    draw = random.Random(name)
    for _ in range(3):
        index = draw.randrange(len(whole.trace_of(0)) // 2, len(whole.trace_of(0)))

        oom = failure_of(with_failure(whole, index))

        known = attribution.breakdown(index, attribution.owners_at(index))
        wrong = sum(abs(known[role] - oom.roles[role]) for role in Role)
        assert wrong <= 0.05 * oom.allocated_bytes


def test_a_call_in_a_new_phase_determines_phase_and_step() -> None:
    whole = read_snapshot(RECORDINGS / "hf-nockpt-8x1024.pickle.xz")
    first = next(
        index for index, event in enumerate(whole.trace_of(0)) if is_call(event, "modeling_llama.py", "forward")
    )
    frames = whole.trace_of(0)[first]["frames"]

    oom = failure_of(with_failure(whole, first, frames=frames))

    assert (oom.phase, oom.step) == (Phase.FORWARD, 1)


def is_call(event: Mapping[str, Any], file: str, function: str) -> bool:
    frames = event.get("frames", ())
    return any(frame["filename"].endswith(file) and frame["name"] == function for frame in frames)


# why free memory does not serve ---------------------------------------------------------------------------------


def failed(program: SlowAllocator, size: int, *, device_free: int | None = 0, **event: Any) -> FailedAllocation:
    values = program.snapshot()
    oom = {"action": "oom", "size": size, "stream": 0, "time_us": 0, "frames": [], **event}
    if device_free is not None:
        oom["device_free"] = device_free
    values["device_traces"][0].append(oom)
    return failure_of(Snapshot.from_dict(values))


def expected_reasons(program: SlowAllocator, size: int, stream: int) -> dict[FreeReason, int]:
    sizes: dict[FreeReason, int] = {}
    for segment in program.segments:
        for piece in segment.pieces:
            if piece.waiting:
                reason = FreeReason.WAITING
            elif not piece.free:
                continue
            elif segment.stream != stream:
                reason = FreeReason.OTHER_STREAM
            elif segment.small and size > MIB:
                reason = FreeReason.SMALL_SEGMENTS
            elif not segment.small and size <= MIB:
                reason = FreeReason.LARGE_SEGMENTS
            else:
                reason = FreeReason.TOO_SMALL if piece.size < size else FreeReason.LARGE_ENOUGH
            sizes[reason] = sizes.get(reason, 0) + piece.size
    return sizes


@pytest.mark.parametrize("seed", range(12))
def test_free_memory_is_explained_as_the_allocator_sees_it(seed: int) -> None:
    program = random_program(seed, expandable=seed % 3 == 0, events=150)
    for size, stream in ((512, 0), (300 * 1024, 7), (5 * MIB, 0), (40 * MIB, 7)):
        oom = failed(program, size, stream=stream)

        adds_up(oom)
        assert {free.reason: free.size_bytes for free in oom.free} == expected_reasons(program, size, stream)
        assert oom.largest_free_bytes == max((free.largest_bytes for free in oom.free), default=0)


def small_pieces() -> SlowAllocator:
    """Every second of twelve blocks of 6 MiB is free."""
    program = SlowAllocator()
    for owner in range(12):
        program.alloc(owner, 6 * MIB)
    for owner in range(0, 12, 2):
        program.request_free(owner)
        program.complete_free(owner)
    return program


def test_enough_memory_in_small_pieces_is_fragmentation() -> None:
    oom = failed(small_pieces(), 16 * MIB)

    assert oom.fragmented
    assert oom.largest_free_bytes < 16 * MIB <= oom.reserved_free_bytes
    assert sum(pin.free_bytes for pin in oom.pins) <= oom.reserved_free_bytes
    assert "Fragmentation: enough is free" in "\n".join(failure_lines(oom))
    assert not failed(small_pieces(), 200 * MIB).fragmented


def test_graphs_keep_their_pools() -> None:
    program = small_pieces()
    program.alloc(100, 30 * MIB, stream=7)
    program.request_free(100)
    program.complete_free(100)
    program.segments[-1].pool = (0, 3)

    oom = failed(program, 16 * MIB)

    assert {free.reason: free.size_bytes for free in oom.free}[FreeReason.PRIVATE_POOL] == 30 * MIB
    in_pool = failed(program, 16 * MIB, stream=7, pool_id=(0, 3))
    assert FreeReason.LARGE_ENOUGH in {free.reason for free in in_pool.free}


def test_max_split_size_keeps_large_pieces_whole() -> None:
    program = SlowAllocator()
    program.alloc(1, 100 * MIB)
    program.request_free(1)
    program.complete_free(1)
    values = program.snapshot()
    values["allocator_settings"]["max_split_size"] = 64 * MIB
    values["device_traces"][0].append({"action": "oom", "size": 20 * MIB, "stream": 0, "device_free": 0})

    oom = failure_of(Snapshot.from_dict(values))

    assert [(free.reason, free.size_bytes) for free in oom.free] == [(FreeReason.NOT_SPLIT, 100 * MIB)]


@pytest.mark.parametrize(
    ("device_free", "cause", "missing", "is_bound"),
    [
        (3 * MIB, Cause.DEVICE, 13 * MIB, False),
        # the most that was ever reserved is what is reserved
        (900 * MIB, Cause.LIMIT, 16 * MIB, True),
        (None, Cause.UNKNOWN, None, False),
    ],
)
def test_what_was_missing(device_free: int | None, cause: Cause, missing: int | None, is_bound: bool) -> None:
    oom = failed(small_pieces(), 15 * MIB, device_free=device_free)

    # segments are multiples of 2 MiB
    assert oom.needed_bytes == 16 * MIB
    assert (oom.cause, oom.missing_bytes, oom.missing_is_bound) == (cause, missing, is_bound)


@pytest.mark.parametrize("event", [{"size": 0}, {"stream": None}, {"frames": 3}, {"device_free": 1.5}, {"pool_id": 7}])
def test_odd_values_in_the_event_are_unknown(event: dict[str, Any]) -> None:
    values = small_pieces().snapshot()
    values["device_traces"][0].append({"action": "oom", "frames": [], **event})

    oom = failure_of(Snapshot.from_dict(values))

    adds_up(oom)
    assert failure_lines(oom)[0].startswith("Out of memory")
