"""Savings under DDP, whose first buckets live longer in some runs than in others."""

import numpy as np
import pytest

from ligerprof.analyzers.suggestions.case import Case
from ligerprof.analyzers.suggestions.find import bytes_after, find_suggestions, other_timings
from ligerprof.analyzers.suggestions.rows import ROWS
from tests.recorded import analysis


@pytest.fixture(scope="module", params=["ddp-bf16-hook", "ddp-bucket-view"])
def case(request: pytest.FixtureRequest) -> Case:
    found = analysis(request.param)
    whole = found.attribution
    return Case(attribution=whole, whole=whole, window=slice(None), peak_moment=found.peak_moment)


def test_each_timing_differs_from_the_others_by_whole_buckets(case: Case) -> None:
    row = next(row for row in ROWS if row.name == "half-batch")
    # what is looked up on the way makes the roles of more blocks known
    assert row.edit(case) is not None
    *timings, recorded = [*(change() for change in other_timings(row, case)), row.edit(case)]
    assert recorded is not None
    assert len(timings) > 1

    first = case.blocks_from(r"nn/parallel/distributed\.py:_ddp_init_helper$")
    buckets_bytes = int(case.replayed.block_bytes[first].sum())
    earliest, *later = (edit.allocated_bytes(None) for edit in (*timings, recorded))

    for other in later:
        assert set(np.unique(other - earliest).tolist()) <= {0, buckets_bytes}


def test_the_saving_is_that_of_the_highest_new_peak(case: Case) -> None:
    on_timing = [one for one in find_suggestions(case) if one.least_peak_bytes is not None]
    for suggestion in on_timing:
        assert suggestion.least_peak_bytes is not None
        assert suggestion.new_peak_bytes is not None
        assert suggestion.least_peak_bytes < suggestion.new_peak_bytes
        after = bytes_after(suggestion, case)
        assert after is not None
        assert after.max() == suggestion.new_peak_bytes
