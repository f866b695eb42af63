import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ligerprof.analyzers.estimate import MemoryEstimate, estimate, judged
from ligerprof.errors import RecipeError, UnknownModelError, UnsupportedError
from ligerprof.kernels.selection import select_kernels
from ligerprof.models import CONFIGS, ModelSpec, spec_from_config
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import STEP_PHASES, Phase, Role
from ligerprof.torch_memory.dtypes import DTYPE_BYTES
from tests.estimated import fresh

PRECISIONS = ("amp", "amp-fp16", "bf16-amp", "bf16", "fp16", "fp32")
LAYER_KERNELS = ("rope", "rms", "swiglu", "geglu", "layernorm")
# 126 decoder layers under ZeRO-3 make 300,000, and layers with loops over chunks up to a million; work that grows
# faster than the layers would make several
MOST_CALLS = 1_800_000
# these segments split every block, so that no peak depends on which one served it before
EXPANDABLE = "expandable_segments:True"


@contextmanager
def few_calls(most: int = MOST_CALLS) -> Iterator[None]:
    """Count Python calls: how long an estimate takes, whatever else the machine does."""
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
    assert calls < most, calls


@st.composite
def specs(draw: st.DrawFn, *, layers: st.SearchStrategy[int] | None = None) -> ModelSpec:
    family = draw(st.sampled_from(["llama", "qwen3", "qwen2", "gemma", "gemma2", "gpt2"]))
    kv_heads, repeat = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads if family == "gpt2" else kv_heads * repeat
    head_dim = draw(st.sampled_from([8, 64, 80]))
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": heads * head_dim,
        "intermediate_size": draw(st.integers(1, 300)) * 8,
        "num_hidden_layers": draw(st.integers(1, 5) if layers is None else layers),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": draw(st.integers(2, 40_000)),
        "max_position_embeddings": 4096,
        "tie_word_embeddings": draw(st.booleans()),
    }
    return spec_from_config(config, name=f"made-{family}")


@st.composite
def recipes(draw: st.DrawFn, spec: st.SearchStrategy[ModelSpec] | None = None) -> TrainingRecipe:
    model = draw(specs() if spec is None else spec)
    checkpointing = draw(st.booleans())
    return TrainingRecipe(
        model=model,
        batch=draw(st.integers(1, 6)),
        # one token alone takes FlashAttention, which rounds its rows up to 128; more take cuDNN's kernel
        seq=draw(st.integers(2, 700)),
        grad_accum=draw(st.integers(1, 3)),
        padding=draw(st.sampled_from([0.0, 0.25])),
        liger=draw(st.sampled_from(["none", "all", "no-flce", "ce"])),
        precision=draw(st.sampled_from(PRECISIONS)),
        checkpointing=checkpointing,
        reentrant=checkpointing and draw(st.booleans()),
        optimizer=draw(st.sampled_from(["adamw-fused", "adamw-foreach", "sgd", "none"])),
        attention=draw(st.sampled_from(["sdpa", "eager"])),
        lora=draw(st.sampled_from([None, 4])) if model.model_type != "gpt2" else None,
    )


def peak(recipe: TrainingRecipe, **changes: Any) -> int:
    return estimate(dataclasses.replace(recipe, **changes)).peak_bytes


@given(recipe=recipes())
@settings(max_examples=6, deadline=None)
def test_roles_add_up_and_the_peak_is_the_highest_phase(recipe: TrainingRecipe) -> None:
    estimated = estimate(recipe)
    assert estimated.roles.total_bytes == estimated.peak_bytes
    assert all(size_bytes >= 0 for size_bytes in estimated.roles.roles.values())
    assert estimated.peak_bytes == max(estimated.phases.values()) == estimated.phases[estimated.peak_phase]
    steps = STEP_PHASES if recipe.optimizer != "none" else (Phase.FORWARD, Phase.BACKWARD)
    assert tuple(estimated.phases) == steps


@given(recipe=recipes())
@settings(max_examples=5, deadline=None)
def test_a_larger_batch_or_a_longer_sequence_never_takes_less(recipe: TrainingRecipe) -> None:
    recipe = dataclasses.replace(recipe, alloc_conf=EXPANDABLE)
    if "flce" in recipe.kernels:
        # its workspace shrinks where one chunk more is made
        recipe = dataclasses.replace(recipe, liger="no-flce")
    assert peak(recipe, batch=recipe.batch + 1) >= peak(recipe)
    assert peak(recipe, seq=2 * recipe.seq) >= peak(recipe)


@given(recipe=recipes())
@settings(max_examples=5, deadline=None)
def test_accumulating_never_takes_less_and_a_third_micro_batch_changes_nothing(recipe: TrainingRecipe) -> None:
    recipe = dataclasses.replace(recipe, alloc_conf=EXPANDABLE)
    assert peak(recipe, grad_accum=2) >= peak(recipe, grad_accum=1)
    assert peak(recipe, grad_accum=3) == peak(recipe, grad_accum=2)


@given(recipe=recipes())
@settings(max_examples=6, deadline=None)
def test_a_kernel_inside_a_layer_never_raises_the_peak(recipe: TrainingRecipe) -> None:
    applying = set(select_kernels("all", recipe.spec)) & set(LAYER_KERNELS)
    # a fused norm adds rows of partial sums, a program's for each multiprocessor
    added_bytes = 2 * recipe.gpu_spec.sm_count * recipe.spec.hidden_size * 4 * 4 + 64 * 512
    if recipe.reentrant:
        # and the gradient of the sum: reentrant checkpointing holds the one that it would be added to
        added_bytes += recipe.tokens * recipe.spec.hidden_size * DTYPE_BYTES[recipe.weight_dtype]
    plain = peak(recipe, liger="none")
    for kernel in applying:
        assert peak(recipe, liger=kernel) <= plain + added_bytes, kernel


def llama(layers: int) -> ModelSpec:
    config = {
        **CONFIGS["llama3.2-1b"],
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_hidden_layers": layers,
    }
    return spec_from_config(config, name="llama")


@pytest.mark.parametrize(
    ("precision", "checkpointing", "saved_bytes"),
    [
        # the formulas of docs/estimator.md, for one token and layer; H = 1024, nh d = H, nkv d = H / 4, F = 2816
        ("bf16", False, 16 * 1024 + 4 * 1024 + 4 * 256 + 4 * 16 + 8 * 2816 + 8),
        ("amp", False, 26 * 1024 + 4 * 1024 + 4 * 256 + 4 * 16 + 8 * 2816 + 8),
        ("bf16", True, 2 * 1024),
        ("amp", True, 4 * 1024),
    ],
)
def test_a_layer_keeps_what_the_formula_says(precision: str, checkpointing: bool, saved_bytes: int) -> None:
    def activations(layers: int) -> int:
        recipe = TrainingRecipe(
            model=llama(layers), batch=4, seq=1024, precision=precision, checkpointing=checkpointing, optimizer="sgd"
        )
        roles = estimate(recipe).roles
        return roles[Role.ACTIVATIONS] + roles[Role.CHECKPOINTS]

    tokens = 4 * 1024
    # seed and offset of attention's dropout are 16 bytes a layer, whatever the tokens
    assert activations(7) - activations(6) == tokens * saved_bytes + (0 if checkpointing else 16)


def test_the_written_formula_of_the_loss_is_the_count() -> None:
    estimated = estimate(TrainingRecipe(precision="bf16", checkpointing=False, optimizer="adamw-foreach"))
    parameters, tokens, vocab, hidden, layers = 1_235_814_400, 4 * 1024, 128256, 2048, 16
    layer_bytes = 16 * hidden + 4 * 2048 + 4 * 512 + 4 * 32 + 8 * 8192 + 8
    written = 6 * parameters + tokens * (layers * layer_bytes + 8 * hidden + 12 * vocab) + 2 * 32 * 2**20
    assert estimated.peak_phase is Phase.BACKWARD
    assert written == pytest.approx(estimated.peak_bytes, rel=0.001)


@pytest.mark.parametrize(("precision", "bytes_a_parameter"), [("amp", 16), ("fp32", 16), ("bf16", 8), ("fp16", 8)])
def test_static_bytes_are_so_many_for_each_parameter(precision: str, bytes_a_parameter: int) -> None:
    estimated = estimate(TrainingRecipe(precision=precision))
    assert estimated.static_bytes == bytes_a_parameter * 1_235_814_400
    assert estimated.terms[0].formula == f"{bytes_a_parameter} P, P = 1,235,814,400"


def test_checkpoints_are_the_input_of_every_layer() -> None:
    assert estimate(TrainingRecipe(precision="amp")).checkpoint_bytes == 4 * 1024 * 2048 * 16 * 4
    assert estimate(TrainingRecipe(precision="bf16")).roles[Role.CHECKPOINTS] == 4 * 1024 * 2048 * 16 * 2
    assert estimate(TrainingRecipe(checkpointing=False)).checkpoint_bytes == 0


def test_losses_differ_in_their_planes() -> None:
    tensor_bytes, shifted_bytes = 4 * 1024 * 128256 * 4, 4 * 1023 * 128256 * 4
    of_4_45 = estimate(TrainingRecipe(precision="bf16", loss="hf-4.45"))
    assert of_4_45.roles[Role.LOGITS] == tensor_bytes
    assert of_4_45.roles[Role.SHIFT_LOGITS] == shifted_bytes
    # besides the log-probabilities: the loss and the number of labels
    assert of_4_45.roles[Role.CE_TEMPORARIES] == shifted_bytes + 8
    assert of_4_45.logits_bytes == pytest.approx(3 * tensor_bytes, rel=1e-3)
    assert estimate(TrainingRecipe(liger="flce")).logits_bytes < tensor_bytes // 1000


def test_a_larger_workspace_of_the_fused_loss_shows() -> None:
    lean = estimate(TrainingRecipe(liger="flce", flce_budget="lean", precision="bf16", checkpointing=False))
    generous = estimate(TrainingRecipe(liger="flce", flce_budget=2**30, precision="bf16", checkpointing=False))
    assert generous.phases[Phase.FORWARD] > lean.phases[Phase.FORWARD]


# one model of each architecture; estimates count far more slowly than they run
ONE_OF_EACH = sorted({config["model_type"]: name for name, config in CONFIGS.items()}.values())


@pytest.mark.parametrize(
    "model",
    ["qwen3.5-35b-a3b", *(pytest.param(name, marks=pytest.mark.slow) for name in (*ONE_OF_EACH, "llama3.1-405b"))],
)
def test_every_named_model_answers_at_once(model: str) -> None:
    attention = "eager" if model.startswith("gpt-oss") else "sdpa"
    recipe = TrainingRecipe(model=model, batch=1, seq=512, attention=attention)
    with few_calls():
        estimated = fresh(recipe)
    assert estimated.peak_bytes > estimated.static_bytes


def test_an_unknown_architecture_is_one_clear_line() -> None:
    config = {**CONFIGS["tiny"], "model_type": "mamba9"}
    with pytest.raises(
        UnknownModelError, match=r"no analytic estimate for model_type 'mamba9'.*--device simulated"
    ) as error:
        estimate(TrainingRecipe(model=spec_from_config(config, name="strange")))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        (
            {"engine": "deepspeed", "precision": "mixed", "zero": 2, "optimizer": "adamw-8bit"},
            UnsupportedError,
            "--optimizer adamw-8bit with --engine deepspeed is not supported",
        ),
        ({"model": "gpt2-xl", "lora": 8}, RecipeError, "gpt2-xl has none"),
    ],
)
def test_what_is_not_covered_is_said_in_a_line(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        estimate(TrainingRecipe(**changes))


def zero(stage: int, gpus: int, **changes: Any) -> MemoryEstimate:
    recipe = TrainingRecipe(engine="deepspeed", precision="mixed", zero=stage, gpus=gpus, batch=1, **changes)
    return estimate(recipe)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_more_gpus_never_take_more_of_each(stage: int) -> None:
    peaks = [zero(stage, gpus).peak_bytes for gpus in (1, 2, 8, 64)]
    assert peaks == sorted(peaks, reverse=True)


def test_higher_stages_hold_less_of_what_stays() -> None:
    # bytes a parameter on each of four GPUs: 2 + 12 / 4 + 2, 2 + 12 / 4 + 2 / 4, 16 / 4
    assert [zero(stage, 4).static_bytes / 1_235_814_400 for stage in (1, 2, 3)] == [7.0, 5.5, 4.0]


@given(
    stage=st.integers(0, 3),
    gpus=st.integers(1, 16),
    optimizer=st.sampled_from(["adamw-fused", "adamw-foreach", "sgd"]),
    group=st.integers(10**6, 2 * 10**9),
)
@settings(max_examples=10, deadline=None)
def test_a_first_step_under_zero_needs_no_more_than_a_later_one(
    stage: int, gpus: int, optimizer: str, group: int
) -> None:
    config = {"zero_optimization": {"sub_group_size": group}}
    estimated = zero(stage, gpus, optimizer=optimizer, deepspeed_config=config)
    # but for what the allocator does not split
    assert estimated.first_step_peak_bytes <= 1.001 * estimated.peak_bytes


def test_offload_moves_states_to_main_memory() -> None:
    kept, moved, all_moved = zero(3, 2), zero(3, 2, offload="optimizer"), zero(3, 2, offload="all")
    assert kept.host_bytes == 0
    assert moved.host_bytes < all_moved.host_bytes
    assert kept.peak_bytes > moved.peak_bytes > all_moved.peak_bytes
    assert moved.roles[Role.OPTIMIZER_STATES] == 0
    assert all_moved.roles[Role.PARAMETERS] == 0


def test_the_largest_model_on_many_gpus_answers_at_once() -> None:
    recipe = TrainingRecipe(engine="deepspeed", precision="mixed", zero=3, gpus=4096, batch=1, model="llama3.1-405b")
    # every layer runs: what ZeRO-3 gathers ahead depends on all of them
    with few_calls(8_000_000):
        estimated = fresh(recipe)
    assert estimated.roles.total_bytes == estimated.peak_bytes


def test_json_has_the_contract_s_keys() -> None:
    values = estimate(TrainingRecipe(model="tiny", seq=64)).to_json()
    assert (values["schema"], values["kind"]) == (1, "estimate")
    contract = {"peak_bytes", "peak_phase", "phases", "static_bytes", "logits_bytes", "roles", "assumed", "left_out"}
    assert contract <= set(values)
    assert set(values["phases"]) == {"forward", "backward", "optimizer"}
    assert set(values["roles"]) == {role.value for role in Role}
    assert sum(values["roles"].values()) == values["peak_bytes"]


@given(recipe=recipes())
@settings(max_examples=5, deadline=None)
def test_parts_of_the_model_add_up_to_the_peak_role_by_role(recipe: TrainingRecipe) -> None:
    estimated = estimate(recipe)
    assert sum(part.count for part in estimated.layers) == recipe.spec.layers + 3
    for role in Role:
        assert sum(part.roles[role] for part in estimated.layers) == estimated.roles[role]
        assert all(part.roles[role] >= 0 for part in estimated.layers)


def test_layers_that_are_alike_hold_alike() -> None:
    parts = {part.name: part for part in estimate(TrainingRecipe(checkpointing=False)).layers}
    assert list(parts) == ["embedding", "layer 0", "layers 1 to 14", "layer 15", "head and loss", "whole model"]
    # at the loss no layer has begun its backward
    first, middle, last = (parts[name] for name in ("layer 0", "layers 1 to 14", "layer 15"))
    # the optimizer's counters, four bytes a tensor, are spread as its moments are
    assert first.roles.total_bytes == pytest.approx(last.roles.total_bytes, abs=100)
    assert middle.roles.total_bytes == pytest.approx(14 * first.roles.total_bytes, abs=100)
    spec = TrainingRecipe().spec
    layer = sum(item.elements for item in spec.parameters if ".layers.3." in item.name)
    assert first.roles[Role.PARAMETERS] == 4 * layer
    assert parts["embedding"].roles[Role.PARAMETERS] == 4 * spec.vocab_size * spec.hidden_size


def test_assumptions_name_what_the_figures_stand_on() -> None:
    def assumed(**options: Any) -> str:
        return "\n".join(estimate(TrainingRecipe(seq=256, **options)).assumed)

    assert "which attention kernel ROCm runs is not known" in assumed(gpu="mi325x")
    assert "uses FlashAttention's kernel on NVIDIA GeForce RTX 5090" in assumed(gpu="rtx5090")
    assert "autocast keeps its 16-bit weights" in assumed(precision="amp")
    assert "autocast keeps its 16-bit weights" not in assumed(precision="bf16-amp")
    paged = estimate(TrainingRecipe(optimizer="paged-adamw-8bit"))
    assert any("GiB of paged optimizer states" in sentence or "MiB of paged" in sentence for sentence in paged.left_out)


def test_the_memory_limit_of_the_recipe_is_judged_and_its_gpu_only_if_asked() -> None:
    fitting, over = (estimate(TrainingRecipe(memory_limit_bytes=size * 2**30)).gpu for size in (40, 20))
    assert fitting is not None
    assert over is not None
    assert (fitting.answer, over.answer, over.allocated_fits) == ("fits", "does not fit", False)
    recipe = TrainingRecipe(gpu="rtx3060")
    plain = estimate(recipe)
    assert plain.verdict is None
    by_gpu = judged(plain, by_gpu=True).gpu
    assert by_gpu is not None
    assert by_gpu.limit_bytes == recipe.gpu_spec.usable_bytes
