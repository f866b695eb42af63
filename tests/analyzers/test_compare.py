import pytest
from hypothesis import given
from hypothesis import strategies as st

from ligerprof.analyzers.compare import Figures, compare, figures_from_json
from ligerprof.analyzers.estimate import estimate
from ligerprof.analyzers.explain.peak import PeakReport, figures_from_peak
from ligerprof.errors import RecipeError, ResultFormatError
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import MemoryBreakdown, Phase, Role

ESTIMATE = estimate(TrainingRecipe(model="tiny", seq=64))

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from(["schema", "kind", "backend", "peak_bytes", "phases", "roles", "estimate", "simulated"])


def figures(peak_bytes: int) -> Figures:
    roles = MemoryBreakdown(roles={Role.PARAMETERS: peak_bytes})
    return Figures(source=f"{peak_bytes}.json", backend="estimated", peak_bytes=peak_bytes, phases={}, roles=roles)


def peak_report() -> PeakReport:
    return PeakReport(
        device=0,
        peak_bytes=512,
        reserved_bytes=2**21,
        complete=True,
        roles=MemoryBreakdown(roles={Role.LOGITS: 500, Role.ALLOCATOR_ROUNDING: 12}),
        blocks=(),
        phases={Phase.FORWARD: 512},
    )


def test_an_estimate_round_trips_through_json() -> None:
    (read,) = figures_from_json(ESTIMATE.to_json(), "e.json")
    assert (read.backend, read.peak_bytes, read.roles) == ("estimated", ESTIMATE.peak_bytes, ESTIMATE.roles)
    assert read.phases == ESTIMATE.phases


def test_a_peak_round_trips_through_json() -> None:
    report = peak_report()
    assert figures_from_json(report.to_json(), "p.json") == (figures_from_peak(report, "p.json"),)


def test_a_files_second_set_of_figures_comes_second() -> None:
    values = {**ESTIMATE.to_json(), "simulated": {"peak_bytes": 7, "phases": {}, "roles": {"other": 7}}}
    own, second = figures_from_json(values, "e.json")
    assert (own.backend, second.backend, second.peak_bytes) == ("estimated", "simulated", 7)


@given(values=st.dictionaries(keys, json_values | st.sampled_from([1, "step", "estimate", "peak", {}])))
def test_any_json_is_read_or_refused_in_one_line(values: dict[str, object]) -> None:
    refusal = "strange.json: refused in one line"
    try:
        read = figures_from_json(values, "strange.json")
    except ResultFormatError as error:
        read, refusal = (), str(error)
    assert read or refusal.startswith("strange.json")
    assert "\n" not in refusal


def test_differences_are_taken_against_the_reference() -> None:
    values = compare([figures(100), figures(150)], reference=1).to_json()
    assert [column["peak_difference_bytes"] for column in values["columns"]] == [-50, 0]
    assert [column["role_difference_bytes"]["parameters"] for column in values["columns"]] == [-50, 0]
    assert values["columns"][0]["error_ratio"] == pytest.approx(100 / 150 - 1)


def test_the_error_ratio_of_a_zero_reference_is_null() -> None:
    assert compare([figures(0), figures(5)]).to_json()["columns"][1]["error_ratio"] is None


@pytest.mark.parametrize("count", [0, 1])
def test_one_set_of_figures_is_not_compared(count: int) -> None:
    with pytest.raises(RecipeError, match="nothing to compare it with"):
        compare([figures(1)] * count)
