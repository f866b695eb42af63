import lzma
import pickle
from collections import Counter

import pytest

from ligerprof.analyzers.attribution.extraction import FeatureExtractor
from ligerprof.analyzers.attribution.rules import RULES, BlockFeatures, Feature, Rule, role_of
from ligerprof.analyzers.explain.analysis import explain
from ligerprof.analyzers.explain.peak import PeakReport
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Phase, Role
from ligerprof.snapshots.reader import Snapshot, read_snapshot
from tests.analyzers.attribution.recording import Recording
from tests.paths import RECORDINGS
from tests.recorded import report
from tests.sampling import sampled

MIB = 2**20
WEIGHTS = 1_235_814_400 * 2
TOKENS = 4 * 1024
LOGITS = TOKENS * 128256 * 4
SHIFTED_LOGITS = (TOKENS - 4) * 128256 * 4
LAYER_WEIGHTS = 60_821_504 * 2
CHECKPOINTS = 16 * TOKENS * 2048 * 2


def about(size_bytes: int, expected: int, tolerance: int = 64 * 1024) -> bool:
    """Equal except for scalars, rotary frequencies and other small tensors."""
    return abs(size_bytes - expected) <= tolerance


SMALL_WEIGHTS = 28_971_520 * 2
SMALL = {
    Role.PARAMETERS: SMALL_WEIGHTS,
    Role.OPTIMIZER_STATES: 2 * SMALL_WEIGHTS,
    Role.CHECKPOINTS: 4 * 2048 * 512 * 2,
    Role.CE_TEMPORARIES: 3 * 2048 * 32000 * 4,
    Role.LIBRARY_WORKSPACE: 64 * MIB,
}
# bytes of a larger model's 16-bit weights, trained with DeepSpeed on two GPUs
ZERO_WEIGHTS = 44_569_088 * 2

# at the peak of the second training step, with bf16 weights, gradients and moments
EXPECTED = {
    "hf-ckpt-4x1024": {
        Role.PARAMETERS: WEIGHTS,
        Role.OPTIMIZER_STATES: 2 * WEIGHTS,
        Role.CHECKPOINTS: CHECKPOINTS,
        # log-probabilities, and the gradients of nll_loss and log_softmax
        Role.CE_TEMPORARIES: 3 * LOGITS,
        Role.LIBRARY_WORKSPACE: 64 * MIB,
    },
    "hf-4.45-ckpt-4x1024": {
        Role.PARAMETERS: WEIGHTS,
        Role.OPTIMIZER_STATES: 2 * WEIGHTS,
        Role.CHECKPOINTS: CHECKPOINTS,
        Role.LOGITS: LOGITS,
        Role.SHIFT_LOGITS: SHIFTED_LOGITS,
        Role.CE_TEMPORARIES: SHIFTED_LOGITS,
        Role.LIBRARY_WORKSPACE: 64 * MIB,
    },
    "hf-nockpt-8x1024": {
        Role.PARAMETERS: WEIGHTS,
        Role.OPTIMIZER_STATES: 2 * WEIGHTS,
        Role.CHECKPOINTS: 0,
        Role.CE_TEMPORARIES: 6 * LOGITS,
        Role.LIBRARY_WORKSPACE: 64 * MIB,
    },
    "liger-flce-ckpt-4x1024": {
        Role.PARAMETERS: WEIGHTS,
        # all gradients, and two of the embedding (the fused loss's and the look-up's), before they are added
        Role.GRADIENTS: WEIGHTS + 128256 * 2048 * 2,
        Role.OPTIMIZER_STATES: 2 * WEIGHTS,
        Role.LOGITS: 0,
        Role.CE_TEMPORARIES: 0,
        Role.LIBRARY_WORKSPACE: 64 * MIB,
    },
    "zero3-offload-4x1024": {
        Role.PARAMETERS: 0,
        Role.GRADIENTS: 0,
        Role.OPTIMIZER_STATES: 0,
        Role.CHECKPOINTS: CHECKPOINTS,
        Role.CE_TEMPORARIES: 3 * LOGITS,
        Role.LIBRARY_WORKSPACE: 64 * MIB,
    },
    "stamped-amp-ckpt-4x1024": {
        Role.PARAMETERS: 2 * WEIGHTS,
        Role.OPTIMIZER_STATES: 4 * WEIGHTS,
        # all weights except the norms'
        Role.WEIGHT_CASTS: WEIGHTS - 33 * 2048 * 2,
        Role.CHECKPOINTS: 2 * CHECKPOINTS,
        Role.LOGITS: LOGITS + LOGITS // 2,
        Role.CE_TEMPORARIES: LOGITS,
        Role.LIBRARY_WORKSPACE: 64 * MIB,
    },
    "small-expandable": SMALL,
    "small-ring-3000-expandable": SMALL,
    "small-streams": SMALL,
    "small-python-alloc-nockpt": {**SMALL, Role.CHECKPOINTS: 0},
    "small-sgd-accum": {**SMALL, Role.OPTIMIZER_STATES: SMALL_WEIGHTS, Role.GRADIENTS: SMALL_WEIGHTS},
    "small-zero2": {
        Role.PARAMETERS: ZERO_WEIGHTS,
        # half of the fp32 copy and of both moments
        Role.OPTIMIZER_STATES: 3 * ZERO_WEIGHTS,
        Role.CE_TEMPORARIES: 0,
        # the bucket, and the copy of its contents that is sent
        Role.COMMUNICATION: 1_000_000_000 + ZERO_WEIGHTS,
        Role.LIBRARY_WORKSPACE: 64 * MIB,
    },
    "small-zero3": {
        Role.PARAMETERS: ZERO_WEIGHTS // 2,
        Role.OPTIMIZER_STATES: 3 * ZERO_WEIGHTS,
        Role.CHECKPOINTS: 4 * 1024 * 512 * 2,
        Role.CE_TEMPORARIES: 3 * 1024 * 32000 * 4,
        Role.GRADIENTS: ZERO_WEIGHTS // 2,
        # the bucket and all gathered weights
        Role.COMMUNICATION: 1_000_000_000 + ZERO_WEIGHTS,
        Role.LIBRARY_WORKSPACE: 64 * MIB,
    },
}


@sampled("name", sorted(EXPECTED), every=2)
def test_roles_of_recordings_have_the_sizes_of_the_model(name: str) -> None:
    roles = report(name).roles

    for role, expected in EXPECTED[name].items():
        assert about(roles[role], expected), role
    assert roles[Role.UNATTRIBUTED] == 0


def test_zero3_counts_gathered_weights_and_its_bucket_as_communication() -> None:
    found = report("zero3-offload-4x1024")

    groups = [block for block in found.blocks if block.role is Role.COMMUNICATION]
    bucket = next(block for block in groups if "_setup_for_real_optimizer" in block.frame)
    gathered = sum(block.size_bytes for block in groups if block.frame.startswith("partition_parameters.py"))
    assert bucket.size_bytes == 1_000_000_000
    assert gathered > 128256 * 2048 * 2


def by_layer(found: PeakReport, role: Role) -> dict[int, int]:
    sizes: Counter[int] = Counter()
    for block in found.blocks:
        if block.role is role and block.layer is not None:
            sizes[block.layer] += block.size_bytes
    return dict(sizes)


@pytest.mark.parametrize(
    "name", ["hf-ckpt-4x1024", "hf-4.45-ckpt-4x1024", "liger-flce-ckpt-4x1024", "hf-nockpt-8x1024"]
)
def test_layers_of_weights_and_states_are_found_without_stamps(name: str) -> None:
    found = report(name)

    assert by_layer(found, Role.PARAMETERS) == dict.fromkeys(range(16), LAYER_WEIGHTS)
    assert by_layer(found, Role.OPTIMIZER_STATES) == dict.fromkeys(range(16), 2 * LAYER_WEIGHTS)


@pytest.mark.parametrize("name", ["hf-ckpt-4x1024", "hf-4.45-ckpt-4x1024", "zero3-offload-4x1024"])
def test_each_layer_except_the_last_allocates_the_next_ones_checkpoint(name: str) -> None:
    assert by_layer(report(name), Role.CHECKPOINTS) == dict.fromkeys(range(15), TOKENS * 2048 * 2)


def test_layers_of_saved_activations_are_found_without_stamps() -> None:
    activations = by_layer(report("hf-nockpt-8x1024"), Role.ACTIVATIONS)

    assert sorted(activations) == list(range(16))
    assert len(set(activations.values())) == 1


def test_gradients_of_a_checkpointed_run_are_found_layer_by_layer() -> None:
    gradients = by_layer(report("liger-flce-ckpt-4x1024"), Role.GRADIENTS)

    assert sorted(gradients) == list(range(16))
    # a norm's gradient of 4 KiB may be counted in the previous layer
    assert all(about(size_bytes, LAYER_WEIGHTS, 8 * 1024) for size_bytes in gradients.values())


def test_python_stacks_alone_give_the_same_roles() -> None:
    """A recording with stacks="python" has no C++ frames, and none at all in autograd's threads."""
    for name in ("hf-ckpt-4x1024", "hf-4.45-ckpt-4x1024", "hf-nockpt-8x1024"):
        values = pickle.loads(lzma.decompress((RECORDINGS / f"{name}.pickle.xz").read_bytes()))
        for event in values["device_traces"][0]:
            event["frames"] = [frame for frame in event["frames"] if frame["filename"].endswith(".py")]

        roles = explain(Snapshot.from_dict(values)).roles

        for role, expected in EXPECTED[name].items():
            assert about(roles[role], expected), (name, role)


def test_blocks_older_than_the_recording_are_unattributed() -> None:
    found = report("small-late")

    assert not found.complete
    assert about(found.roles[Role.UNATTRIBUTED], 3 * SMALL_WEIGHTS + 64 * MIB)
    assert about(found.roles[Role.CHECKPOINTS], SMALL[Role.CHECKPOINTS])


def test_weights_of_a_model_that_ran_before_the_recording_are_not_parameters() -> None:
    roles = report("oom-optimizer").roles

    assert roles[Role.PARAMETERS] == pytest.approx(960_565_248, rel=0.005)
    assert roles[Role.OPTIMIZER_STATES] == pytest.approx(262_144_004, rel=0.005)
    # the model of the run before, in bf16
    assert about(roles[Role.OTHER], 960_565_248 // 2)


def test_recording_without_python_stacks_has_no_role_outside_of_backward() -> None:
    values = pickle.loads(lzma.decompress((RECORDINGS / "small-lora.pickle.xz").read_bytes()))
    for event in values["device_traces"][0]:
        event["frames"] = [frame for frame in event["frames"] if not frame["filename"].endswith(".py")]

    blocks = explain(Snapshot.from_dict(values)).blocks

    assert {block.role for block in blocks if block.phase is not Phase.BACKWARD} <= {
        Role.UNATTRIBUTED,
        Role.LIBRARY_WORKSPACE,
    }


def test_recording_without_stacks_is_unattributed_and_adds_up() -> None:
    snapshot = read_snapshot(RECORDINGS / "hf-ckpt-4x1024.pickle.xz")
    bare = [{**event, "frames": []} for event in snapshot.trace_of(0)]

    found = explain(Snapshot.from_dict({"segments": list(snapshot.segments), "device_traces": [bare]}))

    assert found.roles[Role.UNATTRIBUTED] + found.roles[Role.ALLOCATOR_ROUNDING] == found.peak_bytes == 14124071936


RECIPES = {
    "checkpointed": TrainingRecipe(model="tiny", batch=2, seq=64),
    "not checkpointed, eager, fp32": TrainingRecipe(
        model="tiny", batch=2, seq=64, checkpointing=False, attention="eager", precision="fp32"
    ),
    "old loss": TrainingRecipe(model="tiny", batch=2, seq=64, loss="hf-4.45", precision="bf16"),
    "fused loss": TrainingRecipe(model="tiny", batch=2, seq=64, liger="flce"),
    "adapters": TrainingRecipe(model="tiny", batch=2, seq=64, lora=4),
}


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_stamped_step_is_attributed_completely(name: str) -> None:
    from ligerprof.runs.simulated import simulate_step

    recipe = RECIPES[name]
    outcome = simulate_step(recipe)

    found = explain(Snapshot.from_dict(outcome.snapshot), step=outcome.profiled_step)

    assert found.peak_bytes == found.roles.total_bytes == outcome.peak_bytes
    assert found.roles[Role.UNATTRIBUTED] == 0
    assert {phase: found.phases[phase] for phase in (Phase.FORWARD, Phase.BACKWARD)} == {
        phase: outcome.phases[phase] for phase in (Phase.FORWARD, Phase.BACKWARD)
    }
    width = 2 if recipe.weight_dtype == "bfloat16" else 4
    if recipe.lora is None:
        assert about(found.roles[Role.PARAMETERS], recipe.spec.parameter_count * width, 2048)
        assert about(found.roles[Role.OPTIMIZER_STATES], 2 * recipe.spec.parameter_count * width, 2048)


def test_step_that_ran_out_of_memory_is_attributed_completely() -> None:
    from ligerprof.runs.simulated import simulate_step

    recipe = TrainingRecipe(model="tiny", batch=8, seq=512, memory_limit_bytes=70 * MIB)
    outcome = simulate_step(recipe)
    assert outcome.oom is not None

    found = explain(Snapshot.from_dict(outcome.snapshot), step=outcome.profiled_step)

    spec = recipe.spec
    assert found.peak_bytes == found.roles.total_bytes
    assert found.roles[Role.UNATTRIBUTED] == 0
    assert found.roles[Role.CHECKPOINTS] == recipe.tokens * spec.hidden_size * 4 * spec.layers
    assert found.roles[Role.WEIGHT_CASTS] > 0
    assert found.out_of_memory is not None
    assert found.out_of_memory.roles.total_bytes == found.out_of_memory.allocated_bytes == outcome.oom.allocated_bytes


def features(
    phase: Phase | None = None, *, stack: str = "", node: str = "", given: tuple[Feature, ...] = ()
) -> BlockFeatures:
    return BlockFeatures(phase=phase, stack=stack, inner_stack=stack, native="", node=node, features=frozenset(given))


def test_first_rule_that_matches_gives_the_role() -> None:
    rules = (
        Rule(role=Role.INPUTS, stack=r"loader\.py:"),
        Rule(role=Role.LOGITS, phases=(Phase.FORWARD,), has=(Feature.IN_HEAD,), lacks=(Feature.SMALL,)),
        Rule(role=Role.OTHER, phases=(Phase.FORWARD,)),
    )

    assert role_of(features(stack="a/loader.py:next"), rules) is Role.INPUTS
    assert role_of(features(Phase.FORWARD, given=(Feature.IN_HEAD,)), rules) is Role.LOGITS
    assert role_of(features(Phase.FORWARD, given=(Feature.IN_HEAD, Feature.SMALL)), rules) is Role.OTHER
    assert role_of(features(Phase.BACKWARD), rules) is Role.UNATTRIBUTED


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        (Role.PARAMETERS, features(Phase.BUILD)),
        (Role.OPTIMIZER_STATES, features(Phase.OPTIMIZER, given=(Feature.OUTLIVES_PHASE,))),
        (Role.OPTIMIZER_TEMPORARIES, features(Phase.OPTIMIZER, given=(Feature.DIES_IN_PHASE,))),
        (Role.GRADIENTS, features(Phase.BACKWARD, node="MmBackward0", given=(Feature.OUTLIVES_PHASE,))),
        (Role.GRADIENTS, features(Phase.BACKWARD, node="EmbeddingBackward0", given=(Feature.WEIGHT_SIZED,))),
        (
            Role.CE_TEMPORARIES,
            features(Phase.BACKWARD, node="LogSoftmaxBackward0", given=(Feature.VOCABULARY_LOSS,)),
        ),
        (Role.ACTIVATIONS, features(Phase.BACKWARD, node="LogSoftmaxBackward0")),
        (Role.ACTIVATIONS, features(Phase.FORWARD, stack="torch/nn/functional.py:cross_entropy")),
        (Role.KV_CACHE, features(Phase.FORWARD, stack="cache.py:update", given=(Feature.IN_CACHE,))),
        (Role.ACTIVATIONS, features(Phase.OUTSIDE, stack="train.py:main", given=(Feature.FOLLOWS_PASS,))),
        (
            Role.ATTENTION_TEMPORARIES,
            features(Phase.BACKWARD, node="ScaledDotProductFlashAttentionBackward0", given=(Feature.DIES_IN_CALL,)),
        ),
        (Role.COMMUNICATION, features(Phase.BACKWARD, stack="deepspeed/runtime/zero/stage3.py:reduce")),
        (Role.INPUTS, features(Phase.OUTSIDE, stack="train.py:<module>")),
        (Role.ACTIVATIONS, features(Phase.FORWARD, stack="modeling.py:forward")),
        (Role.UNATTRIBUTED, features(None, stack="somewhere.py:something")),
    ],
    ids=lambda value: value.value if isinstance(value, Role) else "",
)
def test_rules_give_the_expected_role(expected: Role, given: BlockFeatures) -> None:
    assert role_of(given) is expected


def test_every_role_except_the_remainders_has_a_rule() -> None:
    assert {rule.role for rule in RULES} == set(Role) - {Role.ALLOCATOR_ROUNDING}


@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("smallest_bytes", [512, 64 * MIB])
def test_blocks_that_differ_only_in_size_or_place_in_a_long_call_are_judged_once(
    monkeypatch: pytest.MonkeyPatch, alternate: bool, smallest_bytes: int
) -> None:
    judged: list[int] = []
    of_block = FeatureExtractor.features

    def count(extractor: FeatureExtractor, block: int) -> BlockFeatures:
        judged.append(block)
        return of_block(extractor, block)

    monkeypatch.setattr(FeatureExtractor, "features", count)
    made, main = Recording(), ("train.py", 9, "<module>")
    for number in range(600):
        line = number % 2 if alternate else 0
        made.alloc(smallest_bytes + number * 4, [("model.py", 5 + line, "forward"), main])

    assert set(made.roles()) == {Role.ACTIVATIONS}
    assert 1 <= len(judged) <= 12


def test_outputs_of_the_size_of_a_workspace_that_every_step_keeps_are_activations() -> None:
    made, main = Recording(), ("train.py", 9, "<module>")
    linear = [("torch/nn/modules/linear.py", 125, "forward"), ("model.py", 5, "forward"), main]
    gelu = [("torch/nn/modules/activation.py", 7, "forward"), ("model.py", 6, "forward"), main]
    optimizer = [("torch/optim/adamw.py", 1, "step"), ("train.py", 12, "<module>")]
    expected = []
    for step in range(4):
        # the first product allocates its output, and then cuBLAS's workspace
        products = 2 if step == 0 else 1
        for _ in range(products):
            made.alloc(32 * MIB, linear)
        made.alloc(32 * MIB, gelu)
        made.free(made.alloc(MIB, optimizer))
        expected += [Role.ACTIVATIONS, *[Role.LIBRARY_WORKSPACE] * (products - 1), Role.ACTIVATIONS]
        expected.append(Role.OPTIMIZER_TEMPORARIES)

    assert made.roles() == expected
