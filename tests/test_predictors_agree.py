"""Estimate and simulation of recipes on which they once disagreed, and errors of one line where neither can answer."""

import dataclasses
from collections.abc import Iterator
from itertools import count as count_from
from random import Random
from typing import Any

import pytest
import torch

from ligerprof.analyzers.estimate import Answer, estimate
from ligerprof.errors import KernelUnavailableError, RecipeError, UnknownModelError, UnsupportedError
from ligerprof.models import ModelSpec, spec_from_config
from ligerprof.recipe.configs.resolve import load_options
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import find_limit
from ligerprof.runs.simulated import simulate_step
from ligerprof.simulated_gpu.host_memory import HostMemory
from ligerprof.torch_memory.dtypes import HALF_BYTES
from tests.drawn_recipes import draw_deepspeed_recipe, draw_rank_recipe
from tests.sampling import sampled

TOLERANCE, SMALLEST_BYTES = 0.01, 2**20
EXPANDABLE = "expandable_segments:True"
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000}
TOKENS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))


def spec_of(family: str = "llama", **config: Any) -> ModelSpec:
    sizes = {"model_type": family, "hidden_size": 128, "intermediate_size": 256, **SIZES, **TOKENS}
    return spec_from_config({**sizes, **config}, name=family)


def close(first: int, second: int, tolerance: float = TOLERANCE) -> bool:
    return abs(first - second) <= max(tolerance * second, SMALLEST_BYTES)


# as DeepSpeed 0.19.8 on fake tensors has them
@sampled(
    ("options", "peak_bytes"),
    [
        ({"zero": 1, "grad_accum": 4, "gpus": 8, "batch": 4, "seq": 1024}, 14_503_994_880),
        ({"zero": 1, "grad_accum": 4, "gpus": 2, "batch": 1, "seq": 256, "lora": 16}, 4_064_411_136),
        ({"zero": 2, "grad_accum": 4, "gpus": 2, "batch": 1, "seq": 256, "lora": 16}, 3_692_250_624),
        ({"zero": 2, "grad_accum": 1, "gpus": 2, "batch": 1, "seq": 256, "lora": 16}, 3_680_978_432),
        ({"zero": 2, "grad_accum": 1, "gpus": 2, "batch": 4, "seq": 1024}, 16_593_530_880),
    ],
    every=3,
)
def test_zero_buckets_are_estimated_as_deepspeed_holds_them(options: dict[str, Any], peak_bytes: int) -> None:
    recipe = TrainingRecipe(
        model="llama3.2-1b", engine="deepspeed", precision="mixed", alloc_conf=EXPANDABLE, **options
    )
    assert estimate(recipe).peak_bytes == pytest.approx(peak_bytes, rel=0.0001)


def test_main_memory_of_accumulated_gradients() -> None:
    """Stage 1 reduces once per step; in stage 2 each weight with a part on the rank has a whole buffer."""
    options = {"engine": "deepspeed", "precision": "mixed", "offload": "optimizer", "batch": 1, "seq": 64}
    held = {
        (zero, accumulated): estimate(
            TrainingRecipe(model=spec_of(), zero=zero, gpus=1, grad_accum=accumulated, **options)
        ).host_bytes
        for zero in (1, 2)
        for accumulated in (1, 3)
    }
    assert held[1, 3] == held[1, 1]
    weights_bytes = sum(2 * item.elements for item in spec_of().parameters)
    assert held[2, 3] - held[2, 1] == weights_bytes


def drawn_estimable(first: int, count: int) -> Iterator[TrainingRecipe]:
    """So many drawn recipes that the estimate covers."""
    for number in count_from(first):
        try:
            recipe = draw_deepspeed_recipe(Random(f"deepspeed {number}"))
            estimate(recipe)
        except (KernelUnavailableError, RecipeError, UnsupportedError):
            continue
        yield recipe
        count -= 1
        if not count:
            return


DRAWN_CASES = 20


def differences(recipe: TrainingRecipe) -> dict[str, tuple[int, int]]:
    """The estimated and simulated bytes that are not close."""
    simulated, estimated = simulate_step(recipe, record=False), estimate(recipe)
    if simulated.oom is not None:
        # what was held before memory ran out is not the peak of a step
        limited = dataclasses.replace(recipe, memory_limit_bytes=find_limit(recipe).size_bytes)
        fits = estimate(limited).verdict is Answer.FITS
        return {"verdict": (estimated.peak_bytes, simulated.peak_bytes)} if fits else {}
    found = {}
    if not close(estimated.peak_bytes, simulated.peak_bytes):
        found["peak"] = (estimated.peak_bytes, simulated.peak_bytes)
    if not close(estimated.host_bytes, simulated.host_bytes or 0):
        found["host"] = (estimated.host_bytes, simulated.host_bytes or 0)
    if recipe.alloc_conf is not None:
        ranks = (simulated.ranks or {0: simulated}).values()
        first_bytes = max(rank.first_step_peak_bytes for rank in ranks)
        if not close(estimated.first_step_peak_bytes, first_bytes):
            found["first"] = (estimated.first_step_peak_bytes, first_bytes)
    return found


# 60 recipes, and 940 slow ones
@pytest.mark.parametrize("part", [*range(3), *(pytest.param(part, marks=pytest.mark.slow) for part in range(3, 50))])
def test_drawn_recipes_under_deepspeed(part: int) -> None:
    pytest.importorskip("deepspeed")
    compared = ((recipe, differences(recipe)) for recipe in drawn_estimable(1000 * part, DRAWN_CASES))
    differing = [(recipe, found) for recipe, found in compared if found]
    assert not differing


def test_checks_of_large_tensors_in_main_memory_find_nothing() -> None:
    """Their values are those that were there before."""
    with HostMemory():
        gradients = torch.full((2_500_000,), torch.nan, dtype=torch.float16)
        assert not torch.isnan(gradients).any()
        assert not torch.isinf(gradients).sum()
        assert torch.isfinite(gradients).all()


@pytest.mark.parametrize("checkpointing", [True, False])
def test_small_limits_of_stage_3(checkpointing: bool) -> None:
    pytest.importorskip("deepspeed")
    sizes = {"reduce_bucket_size": 1_000_000, "stage3_prefetch_bucket_size": 100_000}
    limits = {"stage3_max_live_parameters": 1_000_000, "stage3_max_reuse_distance": 1_000_000}
    sizes_of_model = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 8000}
    spec = spec_of(**sizes_of_model, tie_word_embeddings=False)
    recipe = TrainingRecipe(
        model=spec,
        engine="deepspeed",
        zero=3,
        gpus=4,
        precision="mixed",
        batch=2,
        seq=128,
        checkpointing=checkpointing,
        alloc_conf=EXPANDABLE,
        deepspeed_config={"zero_optimization": {**sizes, **limits, "stage3_param_persistence_threshold": 1000}},
    )
    assert not differences(recipe)


def test_a_rank_of_trl_under_zero_3_is_estimated_as_it_was_measured() -> None:
    """benchmarks/results/parallel-programs-h200x2.jsonl, trl-sft-zero3: the peaks of the first and of later steps."""
    recipe = TrainingRecipe(
        model="qwen3-0.6b",
        engine="deepspeed",
        zero=3,
        gpus=2,
        precision="mixed",
        batch=2,
        seq=1024,
        loss="trl-tiled",
        gpu="h200",
        deepspeed_config={"zero_optimization": {"overlap_comm": True}},
    )
    estimated = estimate(recipe)
    assert estimated.peak_bytes == pytest.approx(8_322_851_840, rel=0.0005)
    assert estimated.first_step_peak_bytes == pytest.approx(7_027_270_144, rel=0.0005)


# fp16 gradients that are reduced in bf16, and a fused loss in the call of a head that accelerate wraps
@sampled("number", [5154, 5028], every=2)
def test_drawn_recipes_under_fsdp2(number: int) -> None:
    recipe = draw_rank_recipe(Random(number))
    simulated, estimated = simulate_step(recipe, record=False), estimate(recipe)
    assert estimated.peak_bytes == pytest.approx(simulated.peak_bytes, rel=0.0001)
    assert estimated.first_step_peak_bytes == pytest.approx(simulated.first_step_peak_bytes, rel=0.0001)


# norms in fp64, where a rank's part of a large embedding takes more than all gradients in fp32; stage 3 with fp16,
# which checks gradients in main memory, adds biases itself, and gathers the last norm before it casts; stage 2, which
# casts its own part of each gradient for the norm; a last norm that holds what its backward recomputed
@sampled("number", [881, 7002, 3001, 32035, 25014], every=5)
def test_recipes_under_deepspeed_that_once_differed(number: int) -> None:
    pytest.importorskip("deepspeed")
    assert not differences(draw_deepspeed_recipe(Random(f"deepspeed {number}")))


@pytest.mark.parametrize(("family", "liger"), [("llama4_text", "flce"), ("granite", "swiglu")])
def test_a_simulation_with_liger_kernel_changes_no_later_one(family: str, liger: str) -> None:
    pytest.importorskip("liger_kernel")
    spec = spec_of(family, num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=256, head_dim=32)
    plain = TrainingRecipe(model=spec, batch=1, seq=64, precision="bf16")
    before = simulate_step(plain, record=False).peak_bytes
    simulate_step(TrainingRecipe(model=spec, batch=1, seq=64, liger=liger, provider="liger"), record=False)
    assert simulate_step(plain, record=False).peak_bytes == before


def test_a_patcher_of_liger_kernel_that_fails_midway_is_undone() -> None:
    pytest.importorskip("liger_kernel")
    import transformers
    from transformers.models.granite import modeling_granite

    from ligerprof.kernels.providers.liger.functions import patch_with_liger

    spec = spec_of("granite")
    model = transformers.GraniteForCausalLM(transformers.GraniteConfig(**spec.config))
    mlp = modeling_granite.GraniteMLP
    with pytest.raises(NotImplementedError):
        patch_with_liger(model, spec.architecture, ("swiglu", "flce"))
    assert modeling_granite.GraniteMLP is mlp


@pytest.mark.parametrize("loss", ["chunked-nll", "trl-tiled", "torch-linear"])
def test_losses_that_read_a_sharded_head_are_refused(loss: str) -> None:
    recipe = TrainingRecipe(
        model=spec_of(tie_word_embeddings=False),
        engine="fsdp2",
        gpus=2,
        precision="mixed",
        wrap="accelerate",
        loss=loss,
        lora=8,
    )
    for predict in (estimate, simulate_step):
        with pytest.raises(UnsupportedError, match="leaves sharded beside adapters"):
            predict(recipe)  # type: ignore[operator]


def test_the_cross_entropy_of_liger_kernel_is_simulated() -> None:
    pytest.importorskip("liger_kernel")
    recipe = TrainingRecipe(model=spec_of(vocab_size=20_000), batch=2, seq=256, liger="ce", provider="liger")
    assert close(estimate(recipe).peak_bytes, simulate_step(recipe, record=False).peak_bytes)


LIGER = {"provider": "liger", "checkpointing": False, "batch": 4, "seq": 1024}
# what each depends on, in a small model
CORNERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "a frozen head that flce casts": (
        "llama",
        {"vocab_size": 20_000},
        {"liger": "flce", "provider": "liger", "lora": 8, "seq": 64},
    ),
    "norms of heads that liger-kernel leaves": ("olmo2", {}, {"liger": "rms", **LIGER}),
    "norms of heads that lie apart, and that it leaves": (
        "hunyuan_v1_dense",
        {"head_dim": 32},
        {"liger": "rms", **LIGER},
    ),
    "shifted logits of one sequence": ("llama", {"vocab_size": 16_000}, {"loss": "hf-4.45", "seq": 512}),
    "experts that liger-kernel fuses": (
        "qwen3_next",
        {
            "head_dim": 32,
            "layer_types": ["full_attention"] * 2,
            "moe_intermediate_size": 128,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 96,
        },
        {"liger": "swiglu", "precision": "bf16", **LIGER},
    ),
    "experts that it fuses beside an MLP that it leaves": (
        "hunyuan_v1_moe",
        {"head_dim": 32, "moe_topk": 2, "num_experts": 8},
        {"liger": "swiglu", "precision": "bf16", **LIGER},
    ),
    "heads between the tokens of several sequences": (
        "qwen3_5_text",
        {
            "head_dim": 32,
            "layer_types": ["linear_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
        {"precision": "fp32", "batch": 4, "seq": 64, "checkpointing": False},
    ),
    "what replicas reduce of layers that repeat": (
        "llama",
        {"num_hidden_layers": 6, "hidden_size": 512},
        {"engine": "fsdp2", "gpus": 4, "replicate": 2, "grad_accum": 2, "grad_sync": "every", "offload": "all"},
    ),
    "einsums that autocast runs in 16 bits": (
        "bamba",
        {"hidden_size": 256, "head_dim": 128},
        {"batch": 4, "seq": 256, "checkpointing": False},
    ),
    "a frozen embedding whose 16-bit copy autocast keeps": (
        "exaone4",
        {"hidden_size": 300, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 96},
        {
            "lora": 4,
            "liger": "rms+swiglu",
            "provider": "liger",
            "loss": "chunked-nll",
            "checkpoint_every": 2,
            "reentrant": True,
            "batch": 4,
            "seq": 1024,
        },
    ),
    "tiles of no labelled token": (
        "llama",
        {"vocab_size": 20_000},
        {"loss": "trl-tiled", "qlora": 8, "batch": 8, "seq": 1},
    ),
    "a cap of scores that the model's code ignores": (
        "gemma3_text",
        {"attn_logit_softcapping": 50.0, "head_dim": 32},
        {"attention": "eager", "seq": 512},
    ),
}


@sampled("case", CORNERS, every=4)
def test_corners_are_estimated_as_they_are_simulated(case: str) -> None:
    family, config, options = CORNERS[case]
    if "provider" in options:
        pytest.importorskip("liger_kernel")
    given = {"batch": 1, "optimizer": "sgd", "alloc_conf": EXPANDABLE, **options}
    recipe = TrainingRecipe(model=spec_of(family, **config), **given)
    simulated_bytes = simulate_step(recipe, record=False).peak_bytes
    assert estimate(recipe).peak_bytes == pytest.approx(simulated_bytes, rel=0.002)


# norms of heads before the rotation, norms of all heads, a joint projection, other rotations, and one of a part
@sampled("family", ["exaone4", "olmo2", "phi3", "ernie4_5", "nemotron"], every=5)
def test_large_allocations_are_those_of_the_simulation(family: str) -> None:
    """In their order: the copies of gradients that come with the heads apart are among them."""
    spec = spec_of(family, head_dim=128, num_key_value_heads=2)
    options = {"precision": "bf16", "optimizer": "sgd", "alloc_conf": EXPANDABLE}
    recipe = TrainingRecipe(model=spec, batch=4, seq=1024, **options)
    smallest_bytes = recipe.tokens * spec.kv_heads * spec.head_dim * HALF_BYTES
    runs = [recording.unfolded() for recording in estimate(recipe).run.recordings]
    estimated = [run.sizes[event] for run in runs for event in run.events if event >= 0]
    events = simulate_step(recipe).snapshot["device_traces"][0]
    simulated = [event["size"] for event in events if event["action"] == "alloc"]
    large = [[size for size in sizes if size >= smallest_bytes] for sizes in (estimated, simulated)]
    assert large[0] == large[1]


@sampled("optimizer", ["adamw", "adamw-foreach", "adamw-fused", "sgd"], every=4)
def test_main_memory_under_fsdp2(optimizer: str) -> None:
    recipe = TrainingRecipe(
        model=spec_of(hidden_size=704, intermediate_size=2816, vocab_size=16_001),
        batch=1,
        seq=64,
        engine="fsdp2",
        offload="all",
        precision="mixed",
        optimizer=optimizer,
    )
    assert estimate(recipe).host_bytes == pytest.approx(simulate_step(recipe, record=False).host_bytes, rel=0.0001)


@pytest.mark.parametrize(
    ("family", "liger"), [("gpt_neox", "ce"), ("granite", "flce"), ("mistral", "ce"), ("starcoder2", "rope")]
)
def test_kernels_that_liger_kernel_lacks_are_not_estimated(family: str, liger: str) -> None:
    with pytest.raises(KernelUnavailableError, match=r"liger-kernel (cannot patch|has no)"):
        estimate(TrainingRecipe(model=spec_of(family), liger=liger, provider="liger"))


def test_positions_that_a_config_leaves_out_are_those_of_transformers() -> None:
    spec = spec_from_config(
        {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 9}, name="gpt2"
    )
    assert spec.max_positions == 1024


def test_a_share_of_heads_that_apertus_cannot_rotate_is_not_estimated() -> None:
    """Its code fails where it is given: tables of a part are multiplied by whole heads."""
    with pytest.raises(UnknownModelError, match="'apertus' with 'partial_rotary_factor'"):
        estimate(TrainingRecipe(model=spec_of("apertus", partial_rotary_factor=0.75)))


def test_another_activation_than_the_kernel_computes() -> None:
    spec = spec_of(hidden_act="gelu")
    assert "swiglu" not in TrainingRecipe(model=spec, liger="all").kernels
    with pytest.raises(RecipeError, match="no operation that swiglu replaces"):
        TrainingRecipe(model=spec, liger="swiglu")


@pytest.mark.parametrize(
    ("family", "config", "activation"),
    [
        ("gemma", {"hidden_act": "quick_gelu"}, "quick_gelu"),
        ("gemma", {"hidden_act": "gelu", "hidden_activation": None}, "gelu_pytorch_tanh"),
        ("gemma2", {"hidden_act": "quick_gelu"}, "gelu_pytorch_tanh"),
    ],
)
def test_activations_of_gemma(family: str, config: dict[str, Any], activation: str) -> None:
    """As transformers' code reads them: old configs of the first one name another function than they mean."""
    assert spec_of(family, **config).activation == activation


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("phi3", {"rope_parameters": True}),
        ("phi3", {"partial_rotary_factor": [1]}),
        ("llama", {"attention_dropout": [1]}),
        ("llama", {"attention_dropout": []}),
        ("seed_oss", {"residual_dropout": [1]}),
    ],
)
def test_configs_of_other_kinds_are_errors_of_one_line(family: str, config: dict[str, Any]) -> None:
    with pytest.raises(UnknownModelError) as raised:
        estimate(TrainingRecipe(model=spec_of(family, **config), liger="none"))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("titan.toml", '[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\ndata_parallel_shard_degree = nan\n'),
        ("titan.toml", '[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\ndata_parallel_shard_degree = "x"\n'),
        (
            "trainer.yaml",
            f"per_device_train_batch_size: 2\noutput_dir: o\ngradient_checkpointing: 0x{'f' * 4000}\n",
        ),
    ],
)
def test_values_of_other_kinds_are_errors_of_one_line(tmp_path: Any, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RecipeError, match=r"Fix the file|more than 4096 bits"):
        load_options([str(tmp_path / name)], {})
