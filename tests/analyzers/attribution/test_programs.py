"""Roles in recordings of programs that do not use ligerprof, against what each program knew about its tensors."""

import json
import lzma
from functools import cache
from typing import Any

import numpy as np
import pytest

from ligerprof.analyzers.explain.analysis import SnapshotAnalysis, analyze
from ligerprof.roles import Role
from tests.paths import PROGRAMS

TRUTH: dict[str, dict[str, Any]] = json.loads(lzma.decompress((PROGRAMS / "truth.json.xz").read_bytes()))
# slices and upcasts of logits, in the words of the recorded program
ALLOWED = {
    "logits": {Role.LOGITS, Role.SHIFT_LOGITS},
    "ce_or_logits": {Role.LOGITS, Role.SHIFT_LOGITS, Role.CE_TEMPORARIES},
}

VOCABULARY_ROLES = {Role.LOGITS, Role.SHIFT_LOGITS, Role.CE_TEMPORARIES}
# classifiers of images, regression, a contrastive text encoder, generation: a cross-entropy or a head at most
WITHOUT_VOCABULARY_LOSS = {
    "double-head",
    "fast-decode",
    "gan",
    "gradient-penalty",
    "graphed-decode",
    "graphed-mlp",
    "oom-generate",
    "own-cache",
    "static-cache",
    "unet",
    "vit",
}
TRAINING_ROLES = {Role.GRADIENTS, Role.OPTIMIZER_STATES, Role.OPTIMIZER_TEMPORARIES, Role.CHECKPOINTS}
GENERATIONS = {"fast-decode", "graphed-decode", "oom-generate", "own-cache", "static-cache"}

# bytes at the peak, of the shapes in the recorded programs
AT_PEAK = {
    # the input of each of 8 layers, not the results that the policy keeps
    "selective": {Role.CHECKPOINTS: 8 * 8 * 512 * 768 * 4},
    # of the second and third matrix; the gradient of the activations is as large as half of the second in 16 bit
    "graphed-mlp": {Role.GRADIENTS: 4 * (8192 * 8192 + 8192 * 2048)},
    "own-cache": {Role.KV_CACHE: 6 * 8 * 512 * 3 * 1024 * 2, Role.PARAMETERS: 6 * 4 * 1024 * 1024 * 2},
    "static-cache": {Role.KV_CACHE: 8 * 2 * 8 * 4 * 279 * 64 * 2},
    "vit": {Role.WEIGHT_CASTS: 8 * 12 * 768 * 768 * 2 + 768 * 3 * 16 * 16 * 2},
}
# programs without autocast, whose layers' outputs can be half as large as a weight
for name in ("distillation", "gan", "gradient-penalty", "optimizer-in-backward", "recurrent"):
    AT_PEAK[name] = {Role.WEIGHT_CASTS: 0}
# biases, norms, indices
SMALL_CHANGE = 512 * 1024


@cache
def analysis(name: str) -> SnapshotAnalysis:
    return analyze(PROGRAMS / f"{name}.pickle.xz")


def role_names(expected: str) -> set[Role]:
    return ALLOWED.get(expected) or {Role(expected)}


def roles_of(found: SnapshotAnalysis, blocks: list[int]) -> list[Role]:
    return found.attribution.roles_of(np.array(blocks, dtype=np.int64), found.peak_moment)


def addresses(found: SnapshotAnalysis) -> list[int]:
    replayed = found.replayed
    older = len(replayed.older_blocks)
    recorded = replayed.trace.numbers("addr")[replayed.allocated_by[older:]].tolist()
    return [block.address for block in replayed.older_blocks] + recorded


def test_every_recording_has_its_truth() -> None:
    assert {path.name.removesuffix(".pickle.xz") for path in PROGRAMS.glob("*.pickle.xz")} == TRUTH.keys()


@pytest.mark.parametrize("name", sorted(TRUTH))
def test_peak_is_that_of_the_run_and_nothing_is_unattributed(name: str) -> None:
    report = analysis(name).peak

    assert (report.peak_bytes, report.reserved_bytes) == (TRUTH[name]["peak_bytes"], TRUTH[name]["reserved_bytes"])
    assert report.roles.total_bytes == report.peak_bytes
    assert report.roles[Role.UNATTRIBUTED] == 0


@pytest.mark.parametrize("name", sorted(TRUTH))
def test_tensors_that_live_at_the_end_have_their_roles(name: str) -> None:
    found = analysis(name)
    address_of = addresses(found)
    live = {address_of[block]: block for block in found.replayed.live_at(found.replayed.last_moment).tolist()}

    truth = TRUTH[name]["live_at_end"]
    roles = roles_of(found, [live[address] for address, _, _ in truth])

    wrong = [(entry, role) for entry, role in zip(truth, roles, strict=True) if role not in role_names(entry[2])]
    assert wrong == []


@pytest.mark.parametrize("name", sorted(name for name in TRUTH if TRUTH[name]["after_allocation"]))
def test_tensors_that_the_program_named_have_their_roles(name: str) -> None:
    found = analysis(name)
    replayed, address_of = found.replayed, addresses(found)
    events = replayed.allocated_by[replayed.allocated_by >= 0]
    for count, address, _, expected in TRUTH[name]["after_allocation"]:
        moment = int(events[count - 1]) + 1
        block = next(block for block in replayed.live_at(moment).tolist() if address_of[block] == address)
        assert roles_of(found, [block])[0] in role_names(expected), (count, address, expected)


def roles_at_any_time(name: str) -> set[Role]:
    found = analysis(name)
    return set(roles_of(found, list(range(len(found.replayed.requested_bytes)))))


@pytest.mark.parametrize("name", sorted(TRUTH))
def test_only_a_loss_over_a_vocabulary_has_logits(name: str) -> None:
    vocabulary_roles = VOCABULARY_ROLES & roles_at_any_time(name)
    # compiled code allocates the logits in a generated function, which does not tell what they are
    assert bool(vocabulary_roles) == (name not in WITHOUT_VOCABULARY_LOSS)


@pytest.mark.parametrize("name", sorted(TRUTH))
def test_only_a_generation_has_a_cache_and_it_has_no_roles_of_training(name: str) -> None:
    roles = roles_at_any_time(name)
    assert (Role.KV_CACHE in roles) == (name in GENERATIONS)
    if name in GENERATIONS:
        assert not TRAINING_ROLES & roles


@pytest.mark.parametrize("name", sorted(AT_PEAK))
def test_roles_at_the_peak_have_the_sizes_of_the_programs_tensors(name: str) -> None:
    roles = analysis(name).peak.roles
    for role, expected in AT_PEAK[name].items():
        assert roles[role] == pytest.approx(expected, abs=SMALL_CHANGE), role
