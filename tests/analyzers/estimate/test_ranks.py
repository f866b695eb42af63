"""Estimates for one rank under FSDP2 and DDP: against two H200s, and against what each option does in torch."""

import json
from itertools import pairwise
from statistics import median
from typing import Any

import pytest

from ligerprof.analyzers.estimate import MemoryEstimate, estimate
from ligerprof.errors import UnsupportedError
from ligerprof.models import CONFIGS, ModelSpec, spec_from_config
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Phase, Role
from ligerprof.units import MIB
from tests.paths import RESULTS
from tests.rank_truth import ROWS, name_of, recipe_of

# |estimate / measured - 1|: of the steady step and DDP's second one, of the first step; docs/estimate.md quotes them
TOLERANCE, FIRST_STEP_TOLERANCE, MEDIAN_TOLERANCE = 0.0005, 0.01, 0.0001
# replayed reserved bytes over those measured without a limit
RESERVED_LOW, RESERVED_HIGH = 0.93, 1.12


def errors_of(row: dict[str, Any]) -> list[float]:
    """Of the first, second and third step."""
    estimated = estimate(recipe_of(row))
    second = estimated.second_step_peak_bytes or estimated.peak_bytes
    steps = (estimated.first_step_peak_bytes, second, estimated.peak_bytes)
    return [ours / measured - 1 for ours, measured in zip(steps, row["peaks"], strict=True)]


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_measured_steps(row: dict[str, Any]) -> None:
    first, second, steady = errors_of(row)
    assert abs(first) <= FIRST_STEP_TOLERANCE
    assert max(abs(second), abs(steady)) <= TOLERANCE


def recomputed_rows() -> list[Any]:
    lines = (RESULTS / "ranks-recomputation-h200x2.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "row"]


@pytest.mark.parametrize("row", recomputed_rows(), ids=lambda row: TrainingRecipe.from_json(row["recipe"]).summary)
def test_measured_steps_with_selective_and_partial_checkpointing(row: dict[str, Any]) -> None:
    estimated = estimate(TrainingRecipe.from_json(row["recipe"]))
    first, _, steady = (max(steps) for steps in zip(*(rank["peaks"] for rank in row["ranks"]), strict=True))
    assert estimated.first_step_peak_bytes == pytest.approx(first, rel=FIRST_STEP_TOLERANCE)
    assert estimated.peak_bytes == pytest.approx(steady, rel=TOLERANCE)


def test_the_median_of_measured_steps() -> None:
    assert median(abs(errors_of(row)[-1]) for row in ROWS) <= MEDIAN_TOLERANCE


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_reserved_bytes(row: dict[str, Any]) -> None:
    assert RESERVED_LOW <= estimate(recipe_of(row)).reserved_bytes / max(row["reserved"]) <= RESERVED_HIGH


def fsdp2(gpus: int = 2, **options: Any) -> MemoryEstimate:
    return estimate(TrainingRecipe(**{"engine": "fsdp2", "precision": "mixed", "gpus": gpus, "batch": 2, **options}))


def ddp(**options: Any) -> MemoryEstimate:
    return estimate(TrainingRecipe(engine="ddp", gpus=2, batch=2, **options))


def whole_layers(name: str, layers: int, **changed: Any) -> ModelSpec:
    return spec_from_config({**CONFIGS[name], "num_hidden_layers": layers, **changed}, name=name)


def test_the_last_reduction_of_tied_weights_is_the_peak_of_llama_1b() -> None:
    """Three gradients of the shared weight, next to the gathered one and the last layer's reduction."""
    estimated = fsdp2()
    embedding, layers = 128256 * 2048, 16 * 60_821_504
    shards = 1_235_814_400 // 2
    assert estimated.peak_bytes == pytest.approx(11_231.6 * MIB, abs=MIB)
    assert estimated.roles[Role.PARAMETERS] == 4 * shards
    assert estimated.roles[Role.GRADIENTS] == 4 * layers // 2 + 3 * 2 * embedding + 2 * 2048
    assert estimated.roles[Role.COMMUNICATION] == 2 * (embedding + 2048) + 4 * layers // 16
    assert estimated.roles.total_bytes == estimated.peak_bytes


def test_shards_divide_what_is_static() -> None:
    sizes = [fsdp2(gpus).static_bytes for gpus in (1, 2, 4, 8, 64)]
    assert sizes == [16 * 1_235_814_400 // gpus for gpus in (1, 2, 4, 8, 64)]
    assert all(more > less for more, less in pairwise(fsdp2(gpus).peak_bytes for gpus in (2, 4, 8, 64)))


def test_uneven_shards_are_padded_on_every_rank() -> None:
    model = whole_layers("llama3.2-1b", 2, vocab_size=1001, tie_word_embeddings=False)
    estimated = fsdp2(64, model=model, seq=64)
    rows = {item.shape: -(-item.shape[0] // 64) for item in model.parameters}
    padded = sum(rows[item.shape] * (item.elements // item.shape[0]) for item in model.parameters)
    assert estimated.roles[Role.PARAMETERS] == 4 * padded
    assert padded > sum(item.elements for item in model.parameters) / 64


def test_replicas_do_not_shard_further() -> None:
    shared = fsdp2(8, replicate=4)
    assert shared.static_bytes == fsdp2(2).static_bytes
    # the all-reduce's buffers are kept where the reduction has another dtype than the shards
    assert shared.peak_bytes == fsdp2(2).peak_bytes
    narrow = {"reduce_dtype": "bfloat16", "seq": 64}
    assert fsdp2(8, replicate=4, **narrow).peak_bytes > fsdp2(2, **narrow).peak_bytes


def test_gathered_layers_that_stay_add_up_in_forward() -> None:
    resharded, kept = (fsdp2(8, reshard=reshard).phases[Phase.FORWARD] for reshard in (True, False))
    # all layers but the last, which is gathered in its own forward as well
    assert kept - resharded == pytest.approx(2 * 16 * 60_821_504, rel=0.1)


def test_accumulated_micro_batches_keep_whole_gradients_unless_each_is_reduced() -> None:
    one, last, every = (
        fsdp2(8, grad_accum=accum, grad_sync=sync) for accum, sync in ((1, "last"), (4, "last"), (4, "every"))
    )
    assert every.peak_bytes - one.peak_bytes == pytest.approx(4 * 1_235_814_400 // 8, rel=0.4)
    assert last.peak_bytes - one.peak_bytes > 4 * 1_235_814_400 // 2
    whole = [{term.name: term.size_bytes for term in each.terms}.get("whole gradients") for each in (last, every, one)]
    assert whole == [4 * 1_235_814_400, None, None]
    assert any("gradients stay whole" in sentence for sentence in last.assumed)


def test_offload_leaves_only_what_is_gathered() -> None:
    kept, moved = fsdp2(), fsdp2(offload="all")
    assert kept.host_bytes == 0
    assert moved.host_bytes >= 16 * 1_235_814_400 // 2
    assert moved.static_bytes == moved.roles[Role.PARAMETERS] == moved.roles[Role.OPTIMIZER_STATES] == 0
    assert moved.peak_bytes < kept.peak_bytes - 12 * 1_235_814_400 // 2


def test_accelerate_gathers_embedding_and_head_apart() -> None:
    model = whole_layers("llama3.1-8b", 4)
    layers, accelerate = (fsdp2(8, model=model, wrap=wrap, batch=1) for wrap in ("layers", "accelerate"))
    reductions = {term.name: term.size_bytes for term in accelerate.terms if term.name.endswith("reduction")}
    assert set(reductions) == {"embedding's reduction", "head's reduction"}
    assert accelerate.peak_bytes < layers.peak_bytes
    tied = fsdp2(8, wrap="accelerate")
    assert {term.name for term in tied.terms if term.name.endswith("reduction")} == {"head's reduction"}


def test_adapters_alone_are_reduced() -> None:
    estimated = fsdp2(4, lora=16)
    assert estimated.roles[Role.OPTIMIZER_STATES] < 0.05 * fsdp2(4).roles[Role.OPTIMIZER_STATES]
    assert estimated.roles.total_bytes == estimated.peak_bytes


def test_a_fused_loss_has_the_gathered_dtype_s_gradient_of_the_head() -> None:
    plain, fused = fsdp2(8), fsdp2(8, liger="flce")
    assert fused.logits_bytes == 0
    assert fused.peak_bytes < plain.peak_bytes


def test_autocast_keeps_casts_of_all_layers_and_mixed_none() -> None:
    amp, mixed = (fsdp2(64, precision=precision, model="llama3.1-8b") for precision in ("amp", "mixed"))
    assert mixed.roles[Role.WEIGHT_CASTS] == 0
    layers = 32 * 218_103_808
    assert amp.roles[Role.WEIGHT_CASTS] >= 2 * layers


def test_the_largest_models_answer_at_once() -> None:
    for name, gpus in (("llama3.1-70b", 64), ("llama3.1-405b", 512)):
        estimated = fsdp2(gpus, model=name)
        assert estimated.roles.total_bytes == estimated.peak_bytes
        assert all(part.roles[role] >= 0 for part in estimated.layers for role in Role)


def test_reentrant_checkpointing_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="--reentrant with --engine fsdp2"):
        fsdp2(reentrant=True)


def test_the_second_step_of_ddp_finds_the_first_bucket() -> None:
    estimated = ddp()
    gradients = 4 * 1_235_814_400
    # up to the first reduction, which is early in backward
    assert estimated.second_step_peak_bytes == pytest.approx(estimated.phases[Phase.FORWARD] + gradients, rel=1e-4)
    assert estimated.highest_peak_bytes == estimated.second_step_peak_bytes
    assert estimate(TrainingRecipe()).second_step_peak_bytes is None


def test_gradients_as_views_of_buckets_are_not_held_twice() -> None:
    copied, viewed = ddp(optimizer="adamw-foreach"), ddp(optimizer="adamw-foreach", bucket_view=True)
    assert copied.phases[Phase.OPTIMIZER] - viewed.phases[Phase.OPTIMIZER] == pytest.approx(
        4 * 1_235_814_400, rel=0.001
    )
    # micro-batches that are not reduced have gradients of their own
    accumulated = ddp(bucket_view=True, grad_accum=2)
    assert accumulated.phases[Phase.BACKWARD] > ddp(bucket_view=True).phases[Phase.BACKWARD]


@pytest.mark.parametrize("gpus", [8, 64])
def test_the_sum_by_hand_of_llama_8b(gpus: int) -> None:
    """docs/estimate.md: the loss's backward, with the root and the last layer gathered."""
    estimated = fsdp2(gpus, model="llama3.1-8b", batch=4)
    tokens, hidden, vocab = 4 * 1024, 4096, 128256
    shards = 12 * 8_030_261_248 // gpus
    loss, checkpoints = 3 * tokens * vocab * 4, 32 * tokens * hidden * 2
    gathered = 2 * (2 * vocab * hidden + 218_112_000)
    activations, cublas = 4 * tokens * hidden * 2, 64 * MIB
    by_hand = shards + loss + checkpoints + gathered + activations + cublas
    assert estimated.peak_bytes == pytest.approx(by_hand, rel=0.001)
