"""Recordings of FSDP, DDP and ZeRO against closed forms of what torch's and DeepSpeed's sources allocate."""

import lzma
import pickle
import re
from collections import Counter

import numpy as np
import pytest

from ligerprof.analyzers.attribution.owners import Owner, Owners
from ligerprof.analyzers.attribution.stacks import CallSite
from ligerprof.analyzers.explain.analysis import SnapshotAnalysis, analyze
from ligerprof.roles import MemoryBreakdown, Phase, Role
from ligerprof.snapshots.reader import Snapshot
from tests.paths import RECORDINGS
from tests.sampling import sampled

RANKS = 2
# elements of the small Llama: query and output, key and value, three of the MLP, two norms; embedding and head
SMALL_LAYER = (1024 * 1024, 256 * 1024, 256 * 1024, 1024 * 1024, *(3 * [2816 * 1024]), 1024, 1024)
SMALL_HEAD = 32000 * 1024
SMALL_WEIGHTS = 6 * sum(SMALL_LAYER) + 2 * SMALL_HEAD + 1024
COMPILED_WEIGHTS = 3 * sum(SMALL_LAYER) + 2 * SMALL_HEAD + 1024
# the Llama of benchmarks/sharded_recordings.py
SIMULATED_LAYER = (128 * 128, 64 * 128, 64 * 128, 128 * 128, *(3 * [352 * 128]), 128, 128)
SIMULATED_WEIGHTS = (*(3 * SIMULATED_LAYER), 2000 * 128, 2000 * 128, 128)
# Llama-3.2-1B, whose head is the embedding
LAYER, EMBEDDING, LAYERS = 60_821_504, 128256 * 2048, 16
WEIGHTS = LAYERS * LAYER + EMBEDDING + 2048
BUCKETS = 4 * SMALL_WEIGHTS
BUCKET = re.compile(r"\A\S*nn/parallel/distributed\.py:(?:_ddp_init_helper|_pre_forward)$", re.MULTILINE)

# max_memory_allocated, and bytes by role there
PEAKS = {
    # the head's gradient, the embedding's and their sum; what is still gathered, and the last layer's reduction
    "fsdp20-rank0": (
        11_777_211_904,
        {
            Role.PARAMETERS: 4 * WEIGHTS // RANKS,
            Role.OPTIMIZER_STATES: 8 * WEIGHTS // RANKS,
            Role.GRADIENTS: 4 * LAYERS * LAYER // RANKS + 3 * 2 * EMBEDDING + 2 * 2048,
            Role.COMMUNICATION: 2 * (EMBEDDING + 2048) + 4 * LAYER,
        },
    ),
    # embedding, head and final norm are the root's, and the last layer is gathered
    "fsdp1": (
        1_773_793_280,
        {
            Role.PARAMETERS: 4 * SMALL_WEIGHTS // RANKS,
            Role.OPTIMIZER_STATES: 8 * SMALL_WEIGHTS // RANKS,
            Role.GRADIENTS: 0,
            Role.COMMUNICATION: 2 * (2 * SMALL_HEAD + 1024 + sum(SMALL_LAYER)),
        },
    ),
    # nothing is resharded after forward, and the first micro-batch has left its sharded gradients
    "fsdp2-noreshard-accum": (
        2_162_864_128,
        {
            Role.PARAMETERS: 4 * SMALL_WEIGHTS // RANKS,
            Role.OPTIMIZER_STATES: 8 * SMALL_WEIGHTS // RANKS,
            Role.GRADIENTS: 4 * SMALL_WEIGHTS // RANKS,
            Role.COMMUNICATION: 2 * SMALL_WEIGHTS,
        },
    ),
    # the head is wrapped alone, so that nothing is gathered while the loss is computed
    "fsdp2-norms": (
        1_624_393_728,
        {
            Role.PARAMETERS: 4 * SMALL_WEIGHTS // RANKS,
            Role.OPTIMIZER_STATES: 8 * SMALL_WEIGHTS // RANKS,
            Role.GRADIENTS: 0,
            Role.COMMUNICATION: 0,
        },
    ),
    "fsdp2-bf16-compiled": (
        1_088_815_104,
        {
            Role.PARAMETERS: 2 * COMPILED_WEIGHTS // RANKS,
            Role.OPTIMIZER_STATES: 4 * COMPILED_WEIGHTS // RANKS,
            Role.GRADIENTS: 0,
            Role.COMMUNICATION: 2 * (2 * SMALL_HEAD + 1024 + sum(SMALL_LAYER)),
        },
    ),
    # in the second step, the reducer has rebuilt its buckets next to the first ones
    "ddp-bucket-view": (
        4_050_192_384,
        {
            Role.PARAMETERS: BUCKETS,
            Role.OPTIMIZER_STATES: 2 * BUCKETS,
            Role.GRADIENTS: 2 * BUCKETS,
            Role.COMMUNICATION: 0,
        },
    ),
    # the hook's 16-bit copies are as large as half of the buckets, and torch keeps them for two steps
    "ddp-bf16-hook": (
        4_051_216_896,
        {
            Role.PARAMETERS: BUCKETS,
            Role.OPTIMIZER_STATES: 2 * BUCKETS,
            Role.GRADIENTS: 0,
            Role.COMMUNICATION: 2 * BUCKETS,
        },
    ),
}


def recording(name: str) -> SnapshotAnalysis:
    return analyze(RECORDINGS / f"{name}.pickle.xz")


def without_frames_of_frees(name: str) -> SnapshotAnalysis:
    """The same recording as `context="alloc"` would have made it."""
    with lzma.open(RECORDINGS / f"{name}.pickle.xz") as file:
        snapshot = pickle.load(file)
    for event in snapshot["device_traces"][0]:
        if event["action"].startswith("free"):
            event["frames"] = []
    return analyze(Snapshot.from_dict(snapshot))


def after_allocations(found: SnapshotAnalysis, call: str, size_bytes: int) -> list[MemoryBreakdown]:
    """Roles right after each allocation of this size under this call."""
    replayed, attribution = found.replayed, found.attribution
    calls = [call in site.stack.text for site in attribution.call_sites.sites]
    chosen = np.array(calls)[attribution.call_sites.site_of] & (replayed.requested_bytes == size_bytes)
    moments = (replayed.allocated_by[chosen] + 1).tolist()
    return [attribution.breakdown(moment, attribution.owners_at(moment)) for moment in moments]


def computed_gradients(found: SnapshotAnalysis) -> Counter[int]:
    """How many gradients of each size autograd computed, as seen from the moments at which they were made."""
    replayed, attribution = found.replayed, found.attribution
    by_wrapper = ["distributed/fsdp" in site.stack.inner_text for site in sites(found)]
    blocks = np.flatnonzero(~np.array(by_wrapper)[attribution.call_sites.site_of])
    roles = attribution.roles_of(blocks, found.peak_moment)
    pairs = zip(replayed.requested_bytes[blocks].tolist(), roles, strict=True)
    return Counter(size_bytes for size_bytes, role in pairs if role is Role.GRADIENTS)


@pytest.mark.parametrize("name", sorted(PEAKS))
def test_roles_at_the_peak_have_the_sizes_of_shards_gathered_weights_and_buckets(name: str) -> None:
    peak_bytes, expected = PEAKS[name]

    found = recording(name).peak

    assert found.peak_bytes == peak_bytes == found.roles.total_bytes
    for role, role_bytes in expected.items():
        # scalars of the optimizer and rotary frequencies
        assert abs(found.roles[role] - role_bytes) <= 4096, role
    assert found.roles[Role.UNATTRIBUTED] <= 4


def test_fsdp2_holds_two_groups_and_one_reduction_in_the_backward_pass() -> None:
    found = recording("fsdp20-rank0")

    # the last step: from the last layer to the first, the next layer is gathered when one is reduced
    reductions = after_allocations(found, "foreach_reduce", 4 * LAYER)[-LAYERS:]

    root = 2 * (EMBEDDING + 2048)
    for done, roles in enumerate(reductions):
        gathered = 2 * LAYER if done < LAYERS - 1 else 0
        assert roles[Role.COMMUNICATION] == root + gathered + 4 * LAYER
        shards = 4 * LAYER // RANKS * done
        assert roles[Role.GRADIENTS] == shards + 2 * LAYER + root


@pytest.mark.parametrize(
    ("name", "layers", "passes", "bytes_each"),
    [("fsdp2-norms", 6, 3, 2), ("fsdp2-noreshard-accum", 6, 6, 2), ("fsdp2-bf16-compiled", 3, 3, 2)],
)
def test_each_gradient_that_fsdp2_reduces_is_found(name: str, layers: int, passes: int, bytes_each: int) -> None:
    weights = [*(layers * SMALL_LAYER), SMALL_HEAD, SMALL_HEAD, 1024]
    expected = Counter({bytes_each * size: passes * count for size, count in Counter(weights).items()})

    assert computed_gradients(recording(name)) == expected


def test_fsdp1_joins_gradients_into_flat_ones() -> None:
    weights = Counter([*(6 * SMALL_LAYER), SMALL_HEAD, SMALL_HEAD, 1024])
    flat = Counter([*(6 * [sum(SMALL_LAYER)]), 2 * SMALL_HEAD + 1024])

    assert computed_gradients(recording("fsdp1")) == Counter(
        {2 * size: 3 * count for size, count in (weights + flat).items()}
    )


@pytest.mark.parametrize(
    ("name", "passes"),
    # two micro-batches per step, the first without synchronization
    [("simulated-fsdp2-nosync", 6), ("simulated-hsdp2", 3)],
)
def test_each_gradient_of_a_rank_of_four_is_found(name: str, passes: int) -> None:
    expected = {2 * size: passes * count for size, count in Counter(SIMULATED_WEIGHTS).items()}

    assert computed_gradients(recording(name)) == expected


def test_each_gradient_of_a_flat_parameter_is_found() -> None:
    flat = (*(3 * [sum(SIMULATED_LAYER)]), 2 * 2000 * 128 + 128)
    expected = {2 * size: 3 * count for size, count in Counter([*SIMULATED_WEIGHTS, *flat]).items()}

    assert computed_gradients(recording("simulated-fsdp1-flat")) == expected


@pytest.mark.parametrize(
    ("name", "shards", "accumulated_bytes"),
    # gradients that wait for their synchronization are unsharded and in the dtype of the reduction
    [
        ("simulated-fsdp2-nosync", 4, 4 * sum(SIMULATED_WEIGHTS)),
        ("simulated-hsdp2", 2, 0),
        ("simulated-fsdp1-flat", 4, 0),
    ],
)
def test_a_rank_holds_its_shards_and_what_it_has_gathered(name: str, shards: int, accumulated_bytes: int) -> None:
    roles = recording(name).peak.roles

    # the loss is computed while the root's weights and the last layer's are gathered
    gathered = 2 * (2 * 2000 * 128 + 128 + sum(SIMULATED_LAYER))
    # rotary frequencies are parameters or other
    assert abs(roles[Role.PARAMETERS] - 4 * sum(SIMULATED_WEIGHTS) // shards) <= 128
    assert roles[Role.GRADIENTS] == accumulated_bytes
    assert roles[Role.COMMUNICATION] == gathered


@sampled("name", sorted(name for name in PEAKS if name.startswith("fsdp")), every=3)
def test_gradients_are_found_without_the_frames_of_frees(name: str) -> None:
    full, bare = recording(name), without_frames_of_frees(name)

    assert computed_gradients(full) == computed_gradients(bare)
    assert full.peak.roles == bare.peak.roles


@pytest.mark.parametrize(("name", "role"), [("ddp-bucket-view", Role.GRADIENTS), ("ddp-bf16-hook", Role.COMMUNICATION)])
def test_buckets_are_gradients_only_where_gradients_have_no_memory_of_their_own(name: str, role: Role) -> None:
    found = recording(name)

    buckets = [owner for owner in at_end(found) if BUCKET.search(stack(found, owner))]

    assert {owner.role for owner in buckets} == {role}
    assert sum(owner.requested_bytes for owner in buckets) == BUCKETS


@pytest.mark.parametrize(("name", "role"), [("ddp-bucket-view", Role.GRADIENTS), ("ddp-bf16-hook", Role.COMMUNICATION)])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_buckets_show_what_they_hold_within_the_first_backward_pass(name: str, role: Role, share: float) -> None:
    found = recording(name)
    phases = found.attribution.phases
    first = np.flatnonzero(phases.spans == phases.spans[phases.are_in(Phase.BACKWARD)][0])
    moment = int(first[int(share * len(first))])

    owners = found.attribution.until(moment).owners_at(moment)

    buckets = [owner for owner in owners if BUCKET.search(stack(found, owner))]
    assert {owner.role for owner in buckets} == {role}


def test_a_copy_of_the_output_that_ddp_makes_is_not_communication() -> None:
    # with a static graph, the first step's outputs pass through DDP's autograd function, which clones them
    found = recording("ddp-bf16-hook")

    sink = [
        "distributed.py:forward\ntorch/autograd/function.py:apply" in site.stack.inner_text for site in sites(found)
    ]
    blocks = np.flatnonzero(np.array(sink)[found.attribution.call_sites.site_of])

    roles = dict(
        zip(found.replayed.requested_bytes[blocks].tolist(), found.attribution.roles_of(blocks, 0), strict=True)
    )
    assert roles[2 * 512 * 32000 * 4] is Role.LOGITS
    assert Role.COMMUNICATION not in roles.values()


def test_zero3_gradient_partition_is_gradients_and_its_bucket_communication() -> None:
    found = recording("small-zero3")

    made = [owner for owner in at_end(found) if ":_setup_for_real_optimizer" in stack(found, owner).split("\n")[0]]

    assert {owner.role: owner.requested_bytes for owner in made} == {
        Role.COMMUNICATION: 1_000_000_000,
        Role.GRADIENTS: 44_569_088,
    }


def at_end(found: SnapshotAnalysis) -> Owners:
    return found.attribution.owners_at(found.replayed.last_moment)


def sites(found: SnapshotAnalysis) -> list[CallSite]:
    return found.attribution.call_sites.sites


def stack(found: SnapshotAnalysis, owner: Owner) -> str:
    return found.attribution.call_sites.of(owner.block).stack.text
