"""Recordings that begin after the model was built: weights are known by the gradients that backward leaves."""

import pytest

from ligerprof.analyzers.attribution.blocks import Attribution
from ligerprof.analyzers.explain.analysis import analyze
from ligerprof.roles import Phase, Role
from tests import recorded
from tests.paths import RECORDINGS

# rotary frequencies, and a copy of them
BUFFERS = 2


def roles_by_address(attribution: Attribution) -> dict[int, Role]:
    """The roles of the blocks that are alive at the end of a recording."""
    replayed, last = attribution.replayed, attribution.replayed.last_moment
    live = replayed.live_at(last)
    older = {number: block.address for number, block in enumerate(replayed.older_blocks)}
    events = replayed.allocated_by[live].tolist()
    addresses = [
        older[block] if event < 0 else replayed.trace[event]["addr"]
        for block, event in zip(live.tolist(), events, strict=True)
    ]
    return dict(zip(addresses, attribution.roles_of(live, last), strict=True))


def begun_at(name: str, phase: Phase, number: int) -> Attribution:
    return analyze(recorded.begun_at(RECORDINGS / f"{name}.pickle.xz", phase, number)).attribution


@pytest.mark.parametrize("name", ["small-python-alloc-nockpt", "hf-nockpt-8x1024", "small-sgd-accum"])
def test_weights_are_known_if_the_recording_begins_with_the_first_forward_pass(name: str) -> None:
    whole = roles_by_address(recorded.analysis(name).attribution)
    late = roles_by_address(begun_at(name, Phase.FORWARD, 0))
    weights = {address for address, role in whole.items() if role is Role.PARAMETERS}

    found = {address for address, role in late.items() if role is Role.PARAMETERS}

    assert found <= weights
    # the model's buffers have no gradients
    assert len(weights - found) <= BUFFERS


def test_among_the_moments_of_adam_no_block_is_called_a_weight() -> None:
    late = roles_by_address(begun_at("small-python-alloc-nockpt", Phase.FORWARD, 1))

    assert Role.PARAMETERS not in late.values()
