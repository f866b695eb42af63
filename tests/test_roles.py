import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ligerprof.roles import STEP_PHASES, MemoryBreakdown, Phase, Role

breakdowns = st.dictionaries(st.sampled_from(Role), st.integers(0, 2**45))


@given(breakdowns)
def test_a_breakdown_has_every_role_and_adds_up(roles: dict[Role, int]) -> None:
    breakdown = MemoryBreakdown(roles=roles)
    assert list(breakdown.roles) == list(Role)
    assert breakdown.total_bytes == sum(roles.values())
    assert all(breakdown[role] == roles.get(role, 0) for role in Role)


@given(breakdowns)
def test_a_breakdown_round_trips_through_json(roles: dict[Role, int]) -> None:
    breakdown = MemoryBreakdown(roles=roles)
    assert MemoryBreakdown.from_json(json.loads(json.dumps(breakdown.to_json()))) == breakdown


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ValueError, match="caches"):
        MemoryBreakdown.from_json({"caches": 1})


def test_every_role_has_a_description() -> None:
    assert all(role.meaning for role in Role)


def test_the_phases_of_a_step_are_those_of_the_json() -> None:
    assert [phase.value for phase in STEP_PHASES] == ["forward", "backward", "optimizer"]
    assert set(STEP_PHASES) < set(Phase)
