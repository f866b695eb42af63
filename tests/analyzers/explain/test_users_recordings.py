"""Roles of typical users' recordings, without stamps, against the sizes implied by the model's shape."""

import json
from typing import Any

import pytest

from ligerprof.roles import Phase, Role
from tests.paths import RECORDINGS
from tests.recorded import report

RUNS: dict[str, dict[str, Any]] = json.loads((RECORDINGS / "users.json").read_text(encoding="utf-8"))
MIB = 2**20
# scalars, masks, rotary frequencies
SMALL_CHANGE = 128 * 1024

PARAMETERS = 28_971_520
ADAPTERS = 4 * 8 * (2 * (512 + 512) + 2 * (512 + 256) + 3 * (512 + 1536))
TOKENS = 4 * 512
CHECKPOINTS = 4 * TOKENS * 512
LOGITS = TOKENS * 32000
HEAD = 32000 * 512

PLAIN = {
    Role.PARAMETERS: 2 * PARAMETERS,
    Role.OPTIMIZER_STATES: 4 * PARAMETERS,
    Role.CHECKPOINTS: 2 * CHECKPOINTS,
    # log-probabilities, and the gradients of nll_loss and log_softmax
    Role.CE_TEMPORARIES: 3 * LOGITS * 4,
    Role.LOGITS: 0,
    Role.KERNEL_WORKSPACE: 0,
    Role.LIBRARY_WORKSPACE: 64 * MIB,
}
LORA = {
    **PLAIN,
    # peft keeps the adapters of a 16-bit model in fp32
    Role.PARAMETERS: 2 * PARAMETERS + 4 * ADAPTERS,
    Role.OPTIMIZER_STATES: 8 * ADAPTERS,
}
AUTOCAST = {
    **PLAIN,
    Role.PARAMETERS: 4 * PARAMETERS,
    Role.OPTIMIZER_STATES: 8 * PARAMETERS,
    # the head's copy is still alive when the loss's backward begins
    Role.WEIGHT_CASTS: 2 * HEAD,
    Role.CHECKPOINTS: 4 * CHECKPOINTS,
}
OWN = {
    **PLAIN,
    # the fused loss computes the head's gradient in forward
    Role.GRADIENTS: 2 * HEAD,
    Role.CE_TEMPORARIES: 0,
    # the chunk buffer is large enough for all of these logits in 16 bit
    Role.KERNEL_WORKSPACE: 2 * LOGITS,
}
LIGER = {role: PLAIN[role] for role in (Role.PARAMETERS, Role.OPTIMIZER_STATES, Role.LOGITS, Role.LIBRARY_WORKSPACE)}
EXPECTED: dict[str, dict[Role, int]] = {
    "small-lora": LORA,
    "small-lora-python": LORA,
    "small-liger-all": {**LIGER, Role.CE_TEMPORARIES: 0},
    "small-liger-all-python": {**LIGER, Role.CE_TEMPORARIES: 0},
    "small-own-all": OWN,
    "small-own-all-python": OWN,
    "small-autocast": AUTOCAST,
    "small-autocast-python": AUTOCAST,
    "small-graphs": {
        **PLAIN,
        # zeroed, not freed, since the graph writes to fixed addresses
        Role.GRADIENTS: 2 * PARAMETERS,
        Role.CHECKPOINTS: 0,
        # for three streams
        Role.LIBRARY_WORKSPACE: 96 * MIB,
    },
    # the first step's peak: no moments yet, and the second cuBLAS handle is unused
    "small-oom": {**PLAIN, Role.OPTIMIZER_STATES: 0, Role.LIBRARY_WORKSPACE: 32 * MIB},
    "small-ring-3000": PLAIN,
}


def test_every_recording_has_an_expectation() -> None:
    assert EXPECTED.keys() == RUNS.keys()


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_peak_and_roles_equal_those_of_the_run(name: str) -> None:
    found = report(name)

    assert (found.peak_bytes, found.reserved_bytes) == (RUNS[name]["peak_bytes"], RUNS[name]["reserved_bytes"])
    assert found.roles.total_bytes == found.peak_bytes
    assert found.roles[Role.UNATTRIBUTED] == 0
    assert found.roles[Role.OTHER] == 0
    for role, expected in EXPECTED[name].items():
        assert found.roles[role] == pytest.approx(expected, abs=SMALL_CHANGE), role


@pytest.mark.parametrize("name", sorted(name for name in EXPECTED if name.endswith("-python")))
def test_python_stacks_alone_give_the_same_roles(name: str) -> None:
    assert report(name).roles.to_json() == report(name.removesuffix("-python")).roles.to_json()


def test_liger_kernels_gradients_grow_during_backward() -> None:
    gradients = report("small-liger-all").roles[Role.GRADIENTS]
    assert 2 * HEAD < gradients < 2 * PARAMETERS


def test_a_lost_beginning_is_reported() -> None:
    found = report("small-ring-3000")
    assert not found.complete
    assert "199.5 MiB were allocated before its first event" in found.notes[0]


def test_the_failed_request_is_reported() -> None:
    found = report("small-oom")
    assert found.peak_phase is Phase.BACKWARD
    oom = found.out_of_memory
    assert oom is not None
    assert (oom.phase, oom.step) == (Phase.FORWARD, 2)
    assert (oom.requested_bytes, oom.allocated_bytes, oom.reserved_bytes) == (262144000, 657174016, 920649728)
    assert oom.roles.total_bytes == oom.allocated_bytes
