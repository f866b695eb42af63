import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ligerprof.errors import RecipeError
from ligerprof.roles import Phase
from ligerprof.runs.measured.ranks import Rank, merge_ranks, rank_from_environment
from ligerprof.runs.outcome import OutOfMemory, StepOutcome

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29400"}
REFUSED = OutOfMemory(
    requested_bytes=1, allocated_bytes=2, reserved_bytes=3, limit_bytes=4, phase=Phase.FORWARD, step=1
)


def outcome(peak_bytes: int, **others: Any) -> StepOutcome:
    plain = StepOutcome(
        backend="measured",
        gpu="a GPU",
        peak_bytes=peak_bytes,
        reserved_bytes=0,
        first_step_peak_bytes=0,
        first_step_reserved_bytes=0,
        phases={},
        after_phase={},
        profiled_step=2,
        snapshot={},
    )
    return dataclasses.replace(plain, **others)


def test_a_process_without_a_launcher_is_not_a_rank() -> None:
    assert rank_from_environment({}) is None
    # leftovers do not define a group
    assert rank_from_environment({"LOCAL_RANK": "0", "MASTER_PORT": "1"}) is None


def test_torchruns_variables_name_a_rank() -> None:
    assert rank_from_environment(TORCHRUN) == Rank(rank=3, world_size=8, local=1)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_a_group_is_one_line(missing: str) -> None:
    with pytest.raises(RecipeError, match=missing):
        rank_from_environment({name: value for name, value in TORCHRUN.items() if name != missing})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_a_rank_is_a_number(name: str) -> None:
    with pytest.raises(RecipeError, match="numbers"):
        rank_from_environment({**TORCHRUN, name: "first"})


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=6))
def test_the_worst_rank_is_the_headline(ranks: list[tuple[int, bool]]) -> None:
    outcomes = {
        rank: outcome(peak_bytes, oom=REFUSED if ran_out else None) for rank, (peak_bytes, ran_out) in enumerate(ranks)
    }
    merged = merge_ranks(outcomes)
    candidates = [each for each in outcomes.values() if each.oom is not None] or list(outcomes.values())
    assert merged.peak_bytes == max(each.peak_bytes for each in candidates)
    assert (merged.oom is not None) == any(ran_out for _, ran_out in ranks)
    assert merged.ranks == outcomes
    order = [(each.oom is None, -each.peak_bytes) for each in merged.ranks.values()]
    assert order == sorted(order)
    assert merged.peak_bytes == next(iter(merged.ranks.values())).peak_bytes


def test_the_headlines_snapshot_is_the_worst_ranks() -> None:
    outcomes = {0: outcome(1, snapshot={"segments": [0]}), 1: outcome(2, snapshot={"segments": [1]})}
    merged = merge_ranks(outcomes)
    assert merged.snapshot is outcomes[1].snapshot
    assert "rank 1's, the highest of 2" in merged.notes[0]


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    merged = merge_ranks({0: outcome(1, step_seconds=(1.0, 4.0)), 1: outcome(2, step_seconds=(3.0, 2.0))})
    assert merged.step_seconds == (3.0, 4.0)
    # a rank that ran out of memory timed nothing
    assert merge_ranks({0: outcome(1, step_seconds=(1.0,)), 1: outcome(2, oom=REFUSED)}).step_seconds == (1.0,)


def test_equal_notes_are_merged() -> None:
    merged = merge_ranks({0: outcome(1, notes=("same", "one")), 1: outcome(2, notes=("same",))})
    assert merged.notes[1:] == ("same", "one")
