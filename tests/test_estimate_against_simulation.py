"""The estimate against the simulation, which runs the models' own code, over recipes drawn at random.

Both read ligerprof.torch_memory; what either knows beyond it has to come to the same bytes. Each drawn case has a
number, and `draw_recipe(Random(number))` is the same recipe every time.
"""

from random import Random
from typing import Any

import pytest
from hypothesis import Phase, given, reject, seed, settings
from hypothesis import strategies as st

from ligerprof import roles
from ligerprof.analyzers.estimate import MemoryEstimate, estimate
from ligerprof.errors import LigerprofError
from ligerprof.models import CONFIGS, ModelSpec, spec_from_config
from ligerprof.models.layer_tape import activation_functions
from ligerprof.recipe.categories import Optimizer
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.outcome import StepOutcome
from ligerprof.runs.simulated import simulate_step
from ligerprof.units import MIB
from tests.drawn_recipes import draw_rank_recipe, draw_recipe
from tests.sampling import sampled

# docs/estimator.md quotes these
TOLERANCE = 0.01
# without tensors that backward needs, what an operation holds for a moment counts more
EVALUATION_TOLERANCE = 0.05
SMALLEST_TOLERATED_BYTES = MIB

EXPANDABLE = "expandable_segments:True"
CASES_A_PART = 10
QUICK_PARTS, SLOW_PARTS = 4, 50
RANK_CASES = 6
_NUMBERS_A_PART = 1_000_000

pytestmark = pytest.mark.usefixtures("no_log_records")


def check(recipe: TrainingRecipe) -> None:
    """Compare the peaks of the steady step.

    Which large blocks keep an unsplit remainder depends on the order of all requests, which the estimate replays.
    """
    estimated, simulated = estimate(recipe), simulate_step(recipe, record=False)
    if simulated.oom:
        reject()
    check_evaluation(estimated, simulated)
    distance_bytes = abs(estimated.peak_bytes - simulated.peak_bytes)
    tolerated_bytes = max(TOLERANCE * simulated.peak_bytes, SMALLEST_TOLERATED_BYTES)
    # every block is split, and nothing depends on cuSOLVER's workspaces
    if recipe.alloc_conf == EXPANDABLE and recipe.optimizer is not Optimizer.GALORE:
        first_bytes, simulated_first_bytes = estimated.first_step_peak_bytes, simulated.first_step_peak_bytes
        assert first_bytes == pytest.approx(simulated_first_bytes, rel=TOLERANCE, abs=SMALLEST_TOLERATED_BYTES), recipe
    if recipe.activation_offload:
        assert simulated.host_bytes == pytest.approx(estimated.host_bytes, rel=TOLERANCE, abs=SMALLEST_TOLERATED_BYTES)
    phases = {phase.value: (size, simulated.phases[phase]) for phase, size in estimated.phases.items()}
    assert distance_bytes <= tolerated_bytes, (
        f"estimated {estimated.peak_bytes}, simulated {simulated.peak_bytes};"
        f" by phase {phases}; {recipe}; {recipe.spec.config_json}"
    )


def check_evaluation(estimated: MemoryEstimate, simulated: StepOutcome) -> None:
    """Compare the peaks of an evaluation after the step, if there is one."""
    evaluated = roles.Phase.EVALUATION in simulated.phases
    assert evaluated == (roles.Phase.EVALUATION in estimated.phases)
    if evaluated:
        size_bytes = simulated.phases[roles.Phase.EVALUATION]
        distance_bytes = abs(estimated.phases[roles.Phase.EVALUATION] - size_bytes)
        assert distance_bytes <= max(EVALUATION_TOLERANCE * size_bytes, SMALLEST_TOLERATED_BYTES)


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=[] if part < QUICK_PARTS else pytest.mark.slow)
        for part in range(QUICK_PARTS + SLOW_PARTS)
    ],
)
def test_an_estimate_is_what_the_simulation_takes(part: int) -> None:
    @seed(part)
    @settings(max_examples=CASES_A_PART, database=None, phases=[Phase.generate])
    @given(number=st.integers(part * _NUMBERS_A_PART, (part + 1) * _NUMBERS_A_PART - 1))
    def compare(number: int) -> None:
        try:
            check(draw_recipe(Random(number)))
        except LigerprofError:
            reject()

    compare()


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 12))])
def test_an_estimate_of_a_rank_is_what_its_simulation_takes(part: int) -> None:
    """FSDP2 and DDP on up to 64 GPUs: uneven shards, replicas, accumulation, offload, both ways to wrap modules."""

    @seed(part)
    @settings(max_examples=RANK_CASES, database=None, phases=[Phase.generate])
    @given(number=st.integers(part * _NUMBERS_A_PART, (part + 1) * _NUMBERS_A_PART - 1))
    def compare(number: int) -> None:
        try:
            check(draw_rank_recipe(Random(number)))
        except LigerprofError:
            reject()

    compare()


@sampled("reshard", [True, False], ids=["reshard", "keep"], every=2)
@pytest.mark.parametrize("liger", ["none", "all"])
def test_a_rank_with_a_tied_head_in_a_group_of_its_own(liger: str, reshard: bool) -> None:
    """The groups of accelerate: the reduction of the last one holds the gradient of the tied weight."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 40_000}
    model = spec_from_config({**CONFIGS["llama3.2-1b"], **sizes}, name="tied")
    options: dict[str, Any] = {"engine": "fsdp2", "gpus": 2, "precision": "mixed", "wrap": "accelerate", "seq": 256}
    check(TrainingRecipe(model=model, batch=1, liger=liger, reshard=reshard, alloc_conf=EXPANDABLE, **options))


@sampled("tied", [True, False], ids=["tied", "untied"], every=2)
@sampled("loss", ["trl-tiled", "chunked-nll", "torch-linear"], every=3)
@pytest.mark.parametrize(
    "engine",
    [
        {"engine": "ddp", "precision": "bf16-amp", "grad_accum": 2},
        {"engine": "fsdp2", "precision": "mixed", "wrap": "accelerate"},
        {"engine": "fsdp2", "precision": "mixed", "wrap": "layers", "reshard": False},
    ],
    ids=["ddp", "fsdp2", "fsdp2-keep"],
)
def test_losses_in_chunks_on_several_gpus(engine: dict[str, Any], loss: str, tied: bool) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 20_000}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": tied}
    model = spec_from_config({**CONFIGS["llama3.2-1b"], **sizes, **heads}, name="small")
    check(TrainingRecipe(model=model, batch=2, seq=512, gpus=2, loss=loss, alloc_conf=EXPANDABLE, **engine))


def gpt2_xl_of_4_layers() -> ModelSpec:
    return spec_from_config({**CONFIGS["gpt2-xl"], "n_layer": 4}, name="gpt2-xl-4")


def llama_of_4_layers(heads: int, kv_heads: int, head_dim: int) -> ModelSpec:
    sizes = {
        "hidden_size": heads * head_dim,
        "intermediate_size": 2816,
        "num_hidden_layers": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    return spec_from_config({**CONFIGS["llama3.2-1b"], **sizes}, name="llama-4")


@sampled(
    ("model", "options"),
    [
        # no fused kernel of a T4 reads bf16
        (gpt2_xl_of_4_layers(), {"seq": 1024, "gpu": "t4"}),
        (gpt2_xl_of_4_layers(), {"seq": 1024, "gpu": "t4", "liger": "ce"}),
        # heads of 54: not a multiple of what tensor cores load at once
        (llama_of_4_layers(20, 20, 54), {"seq": 1024, "gpu": "a100-40g", "precision": "bf16", "padding": 0.2}),
        (llama_of_4_layers(24, 24, 54), {"seq": 2048, "gpu": "h200", "precision": "fp32", "liger": "ce"}),
    ],
    ids=["gpt2-t4", "gpt2-t4-ce", "llama-54-padded", "llama-54-fp32"],
    every=2,
)
def test_attention_without_a_fused_kernel(model: ModelSpec, options: dict[str, Any]) -> None:
    check(TrainingRecipe(model=model, batch=2, checkpointing=False, alloc_conf="expandable_segments:True", **options))


# a loss in tiles leaves the peak to the layers
DROPPING: tuple[dict[str, Any], ...] = (
    {"lora": 8, "checkpointing": False},
    {"lora": 8, "lora_targets": "q_proj+v_proj", "precision": "bf16", "checkpointing": False, "eval_batch": 8},
    {"lora": 8, "precision": "bf16-amp", "liger": "no-flce", "grad_accum": 2},
    {"lora": 8, "adapter_dtype": "bfloat16", "precision": "bf16", "reentrant": True},
    {"lora": 8, "lora_targets": "q_proj+embed_tokens", "checkpointing": False},
    {"lora": 8, "loss": "hf", "lora_targets": "q_proj+lm_head", "liger": "flce", "precision": "bf16"},
    {"lora": 8, "loss": "hf", "lora_targets": "lm_head", "checkpointing": False},
    {"lora": 8, "selective": "torchtitan", "packing": True},
    {"lora": 8, "loss": "hf", "activation_offload": True, "precision": "bf16"},
    {"qlora": 8, "precision": "bf16", "adapter_dtype": "bfloat16", "checkpointing": False},
    {"qlora": 8, "precision": "bf16-amp"},
    {"lora": 8, "quantization": "8bit", "precision": "bf16", "checkpointing": False},
    {"lora": 8, "dora": True, "checkpointing": False, "eval_batch": 8},
    {"lora": 8, "dora": True, "checkpointing": False, "precision": "bf16"},
    {"lora": 8, "dora": True, "checkpointing": False, "precision": "bf16-amp"},
    {"lora": 8, "engine": "ddp", "gpus": 2, "grad_accum": 2, "checkpointing": False},
    {"lora": 8, "engine": "fsdp2", "gpus": 2, "precision": "mixed", "wrap": "accelerate", "checkpointing": False},
)


@sampled(
    "options",
    [
        {"checkpoint_every": 2},
        {"checkpoint_every": 3, "reentrant": True, "lora": 8, "attention": "eager"},
        {"checkpoint_every": 9, "precision": "bf16", "padding": 0.2},
        {"selective": "matmuls", "liger": "rms+swiglu"},
        {"selective": "attention", "checkpoint_every": 2, "padding": 0.2},
        {"selective": "torchtitan", "qlora": 8, "precision": "bf16"},
        # the shape of o_proj and q_proj, and that of adapters
        {"selective": "torchtitan-512x512", "engine": "fsdp2", "gpus": 2, "precision": "mixed", "wrap": "accelerate"},
        {"selective": "aten.mm.default/2-512x8", "engine": "ddp", "gpus": 2, "lora": 8, "checkpoint_every": 2},
        {"selective": "1*nothing,1*attention,1*matmuls-512x512,1*everything", "precision": "bf16"},
        {"selective": "2*everything,2*matmuls+attention", "engine": "ddp", "gpus": 2, "lora": 8, "grad_accum": 2},
        {"selective": "1*matmuls,2*nothing,1*everything", "engine": "fsdp2", "gpus": 2, "precision": "mixed"},
        {"selective": "1*nothing,3*attention", "activation_offload": True, "precision": "bf16"},
        {"selective": "attention", "liger": "all", "precision": "bf16"},
        {"activation_offload": True, "lora": 8, "grad_accum": 2},
        {"lora": 8, "modules_to_save": "embed_tokens+lm_head", "liger": "rms+flce"},
        {"qlora": 8, "modules_to_save": "lm_head+input_layernorm", "precision": "bf16"},
        {"lora": 8, "modules_to_save": "embed_tokens+lm_head", "fp32_saved_modules": True, "precision": "bf16-amp"},
        {"lora": 8, "modules_to_save": "lm_head", "fp32_saved_modules": True, "precision": "fp16-amp", "liger": "ce"},
        {"qlora": 8, "modules_to_save": "embed_tokens+norm", "fp32_saved_modules": True, "precision": "bf16-amp"},
        {"lora": 8, "modules_to_save": "lm_head", "fp32_saved_modules": True, "precision": "bf16-amp", "liger": "flce"},
        {"lora": 8, "dora": True, "checkpointing": False, "liger": "all"},
        {"lora": 8, "dora": True, "lora_targets": "q_proj+down_proj", "precision": "bf16"},
        {"lora": 8, "lora_targets": "q_proj+lm_head", "liger": "all"},
        {"lora": 16, "lora_targets": "lm_head", "liger": "flce", "precision": "bf16", "checkpointing": False},
        {"lora": 8, "lora_targets": "lm_head+embed_tokens", "precision": "bf16", "grad_accum": 2},
        {"qlora": 8, "lora_targets": "v_proj+embed_tokens+lm_head", "liger": "flce", "precision": "bf16"},
        {"lora": 8, "lora_targets": "q_proj+lm_head", "liger": "ce", "eval_batch": 2, "clip": 1.0},
        {"activation_offload": True, "precision": "bf16-amp", "liger": "all"},
        {"selective": "matmuls", "attention": "eager", "grad_accum": 2, "gpu": "a100-40g"},
        {"lora": 8, "dora": True, "eval_batch": 2, "precision": "bf16"},
        {"lora": 8, "modules_to_save": "lm_head", "loss": "chunked-nll", "precision": "bf16", "checkpointing": False},
        {"lora": 8, "modules_to_save": "lm_head", "optimizer": "adamw-8bit", "fp32_embedding_states": True},
        {"loss": "trl-tiled", "padding": 0.3, "lora": 8},
        *({"loss": "trl-tiled", "lora_dropout": 0.05, **each} for each in DROPPING),
        {"loss": "trl-tiled", "seq": 2500, "eval_batch": 3},
        {"loss": "trl-tiled", "precision": "bf16", "packing": True, "checkpointing": False, "grad_accum": 2},
    ],
    ids=lambda options: "-".join(map(str, options)),
    every=5,
)
def test_what_backward_recomputes_and_adapters_train(options: dict[str, Any]) -> None:
    check(TrainingRecipe(model=llama_of_4_layers(8, 4, 64), batch=2, alloc_conf="expandable_segments:True", **options))


@pytest.mark.parametrize("liger", ["none", "flce"])
@sampled("targets", ["lm_head", "embed_tokens+q_proj", "lm_head+embed_tokens"], every=3)
def test_adapters_on_tied_embeddings(targets: str, liger: str) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 20_000}
    model = spec_from_config({**CONFIGS["llama3.2-1b"], **sizes, "tie_word_embeddings": True}, name="tied")
    check(TrainingRecipe(model=model, batch=2, lora=16, lora_targets=targets, liger=liger, alloc_conf=EXPANDABLE))


@sampled("precision", ["amp", "bf16"], every=2)
@sampled("selective", [None, "matmuls"], every=2)
def test_dora_over_layers_with_biases(selective: str | None, precision: str) -> None:
    """Peft subtracts the bias first, and measures the weight with two products, which the policy keeps."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3, "vocab_size": 1000}
    biases = {"attention_bias": True, "mlp_bias": True, "num_attention_heads": 8, "num_key_value_heads": 4}
    model = spec_from_config({**CONFIGS["llama3.2-1b"], **sizes, **biases}, name="llama-biases")
    options: dict[str, Any] = {"batch": 2, "seq": 1024, "lora": 8, "dora": True, "alloc_conf": EXPANDABLE}
    check(TrainingRecipe(model=model, precision=precision, selective=selective, **options))


def test_a_mask_that_checkpointing_saves_is_offloaded() -> None:
    options: dict[str, Any] = {"batch": 2, "seq": 1024, "padding": 0.2, "gpu": "rtx3080", "activation_offload": True}
    check(TrainingRecipe(model=gpt2_xl_of_4_layers(), precision="fp16", liger="ce", **options))


@sampled("precision", ["amp", "bf16"], every=2)
@pytest.mark.parametrize("name", ["gemma2-2b", "olmo2-7b"])
def test_an_evaluation_with_the_reference_loss(name: str, precision: str) -> None:
    """Gemma 2's loss caps the logits in one expression; OLMo-2's first layer reads the embedding's output itself."""
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "vocab_size": 20_000,
        "head_dim": 64,
    }
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    model = spec_from_config({**CONFIGS[name], **sizes, **heads, "pad_token_id": None}, name=f"small-{name}")
    options: dict[str, Any] = {"batch": 2, "eval_batch": 2, "attention": "eager", "liger": "flce", "provider": "torch"}
    check(TrainingRecipe(model=model, precision=precision, alloc_conf="expandable_segments:True", **options))


HOW = (("amp", True), ("bf16", False), ("fp32", False))


@sampled(
    ("function", "precision", "checkpointing"),
    [
        # each function once in the quick run
        pytest.param(function, *how, marks=[] if (place + number) % len(HOW) == 0 else [pytest.mark.slow])
        for place, function in enumerate(sorted(activation_functions()))
        for number, how in enumerate(HOW)
    ],
    every=15,
)
def test_functions_between_the_layers_of_an_mlp(function: str, precision: str, checkpointing: bool) -> None:
    """GPT-2 has no gate: the MLP's peak is what its activation function keeps and computes on the way."""
    sizes = {"n_embd": 512, "n_head": 8, "n_layer": 2, "n_inner": 4096, "vocab_size": 1000}
    model = spec_from_config({**CONFIGS["gpt2-xl"], **sizes, "activation_function": function}, name=function)
    options: dict[str, Any] = {"batch": 2, "seq": 1024, "precision": precision, "checkpointing": checkpointing}
    check(TrainingRecipe(model=model, optimizer="sgd", alloc_conf=EXPANDABLE, **options))


@sampled("checkpointing", [True, False], ids=["checkpointed", "whole"], every=2)
@sampled("liger", ["none", "all"], every=2)
@pytest.mark.parametrize("name", ["phi3-mini", "olmo2-7b"])
def test_fused_projections_and_norms_after_the_sublayer(name: str, liger: str, checkpointing: bool) -> None:
    model = spec_from_config({**CONFIGS[name], "num_hidden_layers": 2}, name=f"{name}-2")
    options: dict[str, Any] = {"batch": 2, "seq": 512, "liger": liger, "checkpointing": checkpointing}
    check(TrainingRecipe(model=model, alloc_conf="expandable_segments:True", **options))
