import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ligerprof.analyzers.estimate import estimate
from ligerprof.errors import UnknownModelError
from ligerprof.models import ARCHITECTURES, ModelSpec, load_model, spec_from_config
from ligerprof.models.architectures import TEXT_ALONE
from ligerprof.models.spec import Task
from ligerprof.recipe.training import TrainingRecipe

SMALL_LLAMA = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "vocab_size": 101,
}

DESCRIBED = sorted(name for name, row in ARCHITECTURES.items() if row.streams is None)


def transformers_parameters(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes in the model that transformers builds from a config, without memory for it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    return [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]


def described_parameters(spec: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    return [(parameter.name, parameter.shape) for parameter in spec.parameters]


@st.composite
def small_configs(draw: st.DrawFn) -> dict[str, Any]:
    model_type = draw(st.sampled_from(DESCRIBED))
    heads = draw(st.integers(1, 6))
    layers, vocab = draw(st.integers(1, 3)), draw(st.integers(2, 300))
    # transformers' default marks a padding token: an id beyond a small vocabulary is refused
    common = {"model_type": model_type, "vocab_size": vocab, "pad_token_id": 0}
    tied = draw(st.sampled_from([{}, {"tie_word_embeddings": False}, {"tie_word_embeddings": True}]))
    if model_type == "gpt2":
        sizes = {"n_embd": heads * draw(st.integers(1, 9)), "n_head": heads, "n_layer": layers, "n_positions": 32}
        return {**common, **sizes, **tied, **draw(st.sampled_from([{}, {"n_inner": 56}]))}
    head_dim = 2 * draw(st.integers(1, 9))
    sizes = {
        "hidden_size": heads * head_dim,
        "intermediate_size": draw(st.integers(2, 90)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([count for count in range(1, heads + 1) if heads % count == 0])),
        "head_dim": draw(st.sampled_from([head_dim, 2 * head_dim])),
    }
    if model_type == "olmoe":
        # its norms are as wide as the hidden states: another width of a head cannot run
        sizes["head_dim"] = head_dim
    if ARCHITECTURES[model_type].attention.latent:
        # another name of qk_rope_head_dim
        sizes["head_dim"] = 4
    mixers = draw(st.lists(st.sampled_from(["conv", "full_attention"]), min_size=layers, max_size=layers))
    mixer = ARCHITECTURES[model_type].mixer
    if mixer is not None and mixer.kind == "convolution":
        sizes["layer_types"] = mixers
    # every family is asked for biases; not every one has them
    biases = {
        key: draw(st.booleans())
        for key in ("attention_bias", "mlp_bias", "use_bias", "use_qkv_bias", "attention_out_bias")
    }
    if model_type == "internlm3":
        # it refuses other biases
        biases["mlp_bias"] = biases["attention_bias"]
    experts = {
        "num_experts": 5,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "n_shared_experts": draw(st.integers(1, 2)),
        "first_k_dense_replace": draw(st.integers(0, 3)),
        "decoder_sparse_step": draw(st.integers(1, 2)),
        "mlp_only_layers": draw(st.sampled_from([[], [0], [1, 2]])),
        "use_qk_norm": draw(st.booleans()),
        "moe_num_shared_experts": draw(st.integers(0, 2)),
        "moe_layer_start_index": draw(st.integers(0, 2)),
        "moe_layer_end_index": draw(st.sampled_from([-1, 1])),
        "moe_layer_interval": draw(st.integers(1, 2)),
        "q_lora_rank": draw(st.sampled_from([None, 7])),
        "kv_lora_rank": draw(st.integers(1, 9)),
        "qk_nope_head_dim": draw(st.integers(1, 9)),
        "qk_rope_head_dim": 4,
        "v_head_dim": draw(st.integers(1, 9)),
        "shared_expert_intermediate_size": draw(st.integers(1, 9)),
        # granitemoehybrid makes empty weights of a width of 0
        "shared_intermediate_size": draw(st.integers(int(model_type == "granitemoehybrid"), 9)),
        "lm_head_bias": draw(st.booleans()),
        "num_dense_layers": draw(st.integers(0, 3)),
        "block_ffn_dim_multiplier": draw(st.sampled_from([1, 1.3])),
        "block_multiple_of": 8,
        "block_auto_adjust_ff_dim": draw(st.booleans()),
        "linear_num_key_heads": (key_heads := draw(st.integers(1, 3))),
        "linear_num_value_heads": key_heads * draw(st.integers(1, 3)),
        "linear_key_head_dim": draw(st.integers(1, 9)),
        "linear_value_head_dim": draw(st.integers(1, 9)),
        "mamba_d_ssm": None,
        "mamba_expand": 2,
        "mamba_n_heads": 2,
        "mamba_n_groups": draw(st.integers(1, 2)),
        "mamba_d_state": draw(st.integers(1, 9)),
        "mamba_conv_bias": draw(st.booleans()),
        "mamba_proj_bias": draw(st.booleans()),
        "projectors_bias": draw(st.booleans()),
        "attn_layer_indices": draw(st.sampled_from([None, [], [1, 2]])),
    }
    return {**common, **sizes, **tied, **biases, **experts}


@settings(max_examples=150)
@given(small_configs())
def test_every_parameter_of_any_config_is_as_in_transformers(config: dict[str, Any]) -> None:
    assert described_parameters(spec_from_config(config, name="small")) == transformers_parameters(config)


def test_a_config_that_says_little_means_what_transformers_assumes() -> None:
    spec = spec_from_config(SMALL_LLAMA, name="small")
    assert (spec.kv_heads, spec.head_dim, spec.tied_embeddings) == (6, 8, False)
    assert described_parameters(spec) == transformers_parameters(SMALL_LLAMA)


_COUNTS = [
    (row.model_type, alias, key)
    for row in ARCHITECTURES.values()
    for alias, key in row.aliases.items()
    if "experts" in alias
]


@pytest.mark.parametrize(("model_type", "alias", "key"), _COUNTS)
def test_of_two_names_of_a_count_the_one_that_transformers_takes_decides(model_type: str, alias: str, key: str) -> None:
    from transformers import AutoConfig

    for config in ({alias: 6}, {alias: 6, key: 4}, {key: 4, alias: 6}):
        taken = getattr(AutoConfig.for_model(model_type, **config), key)
        assert ARCHITECTURES[model_type].setting(config, key) == taken == config[alias]


def test_a_function_that_the_code_of_an_mlp_calls_is_not_that_of_the_config() -> None:
    config = {**SMALL_LLAMA, "hidden_act": "gelu"}
    specs = [spec_from_config({**config, "model_type": kind}, name=kind) for kind in ("llama", "lfm2", "lfm2_moe")]
    assert [spec.activation for spec in specs] == ["gelu", "silu", "silu"]


def test_equal_configs_are_equal_specs_and_the_config_comes_back() -> None:
    shuffled = dict(reversed(SMALL_LLAMA.items()))
    assert spec_from_config(SMALL_LLAMA, name="a") == spec_from_config(shuffled, name="a")
    assert spec_from_config(SMALL_LLAMA, name="a").config == SMALL_LLAMA


def test_a_folder_and_a_file_describe_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "small-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL_LLAMA))
    from_folder, from_file = load_model(str(folder)), load_model(str(folder / "config.json"))
    assert from_folder == from_file
    assert (from_folder.name, from_folder.weights_path) == ("small-llama", None)


@pytest.mark.parametrize("weights", ["model-00001-of-00002.safetensors", "pytorch_model.bin"])
def test_weights_are_loaded_where_the_folder_holds_some(tmp_path: Path, weights: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL_LLAMA))
    (tmp_path / weights).write_bytes(b"")
    assert load_model(str(tmp_path)).weights_path == str(tmp_path)


def test_an_architecture_without_a_row_still_has_sizes(tmp_path: Path) -> None:
    spec = spec_from_config({**SMALL_LLAMA, "model_type": "mamba9"}, name="small-mamba")
    assert (spec.layers, spec.hidden_size, spec.parameters) == (2, 48, ())
    with pytest.raises(UnknownModelError, match=r"small-mamba: no analytic estimate for model_type 'mamba9'"):
        _ = spec.parameter_count


def test_a_class_of_text_and_images_is_described_as_a_whole() -> None:
    text = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llava", "text_config": {**text, "vocab_size": 100}, "vision_config": {"depth": 2}}
    spec = spec_from_config({**config, "architectures": ["LlavaForConditionalGeneration"]}, name="both")
    assert (spec.task, spec.model_type, spec.hidden_size, spec.vocab_size) == (Task.IMAGES, "llava", 64, 100)
    assert spec.config["vision_config"] == {"depth": 2}
    assert spec.no_estimate_reason is not None
    with pytest.raises(UnknownModelError, match="vision tower"):
        spec_from_config(config, name="both")


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
@pytest.mark.parametrize(("inner", "is_hint"), [("llama4_text", True), ("mamba9", False), (None, False), (7, False)])
def test_a_model_that_joins_others_is_refused_by_the_name_of_its_text_model(
    key: str, inner: object, is_hint: bool
) -> None:
    config = {"model_type": "joined", "vision_config": {}, key: {"model_type": inner, "hidden_size": 64}}
    with pytest.raises(UnknownModelError, match=r"'joined' joins a text model of type .* not covered\.") as caught:
        spec_from_config(config, name="small")
    assert (f"give its {key!r} as a config.json" in str(caught.value)) == is_hint
    # a model of its own may mention another one
    assert spec_from_config({**SMALL_LLAMA, key: {"model_type": "vit"}}, name="small").layers == 2


@pytest.mark.parametrize("implementation", [None, "grouped_mm", "batched_mm", "eager"])
def test_another_implementation_of_experts_is_refused_by_name(implementation: str | None) -> None:
    config = {**SMALL_LLAMA, "model_type": "mixtral", "experts_implementation": implementation}
    reason = spec_from_config(config, name="small").no_estimate_reason
    assert (reason is None) == (implementation != "batched_mm")
    assert reason is None or repr(implementation) in reason


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model_type": None}, "no 'model_type'"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"vocab_size": 0}, "'vocab_size' is 0, not a positive integer"),
        ({"vocab_size": "many"}, "'vocab_size' is 'many'"),
        ({"num_hidden_layers": True}, "'num_hidden_layers' is True"),
        ({"num_attention_heads": 2.5}, "'num_attention_heads' is 2.5"),
        ({"num_hidden_layers": 10**5}, "'num_hidden_layers' is 100000, more than 4096"),
        ({"vocab_size": 10**4000}, "'vocab_size' is an integer of 13288 bits"),
        ({"num_attention_heads": 10**4, "head_dim": None}, "10000 attention heads are more than"),
    ],
)
def test_a_wrong_config_gets_one_line(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(UnknownModelError, match=says) as caught:
        spec_from_config({**SMALL_LLAMA, **changed}, name="wrong")
    assert str(caught.value).startswith("wrong: ")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "not readable as JSON"),
        (b"[1]", "not a JSON object"),
        (b"\xff\xfe", "not readable"),
        (b"[" * 10**5, "not"),
    ],
    ids=["cut-off", "a-list", "not-text", "nested"],
)
def test_a_file_that_is_no_config_gets_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(UnknownModelError, match=says) as caught:
        load_model(str(path))
    assert "\n" not in str(caught.value)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(UnknownModelError, match=r"larger than 4\.0 MiB"):
        load_model(str(path))


def test_a_folder_without_a_config_gets_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match="no such file"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("model_type", sorted(TEXT_ALONE))
def test_a_config_with_a_tower_is_the_text_model_where_transformers_builds_that_alone(model_type: str) -> None:
    text = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "intermediate_size_mlp": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 101,
        "linear_num_value_heads": 16,
        "num_experts": 3,
        "num_local_experts": 3,
        "num_experts_per_tok": 1,
    }
    config = {"model_type": model_type, "text_config": text}
    spec = spec_from_config(config, name="small")
    assert described_parameters(spec) == transformers_parameters(config)
    assert (spec.model_type, spec.text_of) == (f"{model_type}_text", model_type)


@pytest.mark.parametrize("attending", [None, [], [1], [0, 2]])
def test_layers_that_attend_may_be_listed(attending: list[int] | None) -> None:
    config = {**SMALL_LLAMA, "model_type": "lfm2", "num_key_value_heads": 2, "full_attn_idxs": attending}
    assert described_parameters(spec_from_config(config, name="small")) == transformers_parameters(config)


def test_entries_that_are_not_layers_name_none() -> None:
    config = {**SMALL_LLAMA, "model_type": "lfm2", "num_key_value_heads": 2}
    odd, plain = ({**config, "full_attn_idxs": listed} for listed in ([[1], "0", {}, 2], [2]))
    assert described_parameters(spec_from_config(odd, name="small")) == described_parameters(
        spec_from_config(plain, name="small")
    )


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("phi3", "rope_parameters", True),
        ("phi3", "partial_rotary_factor", [1]),
        ("llama", "attention_dropout", [1]),
        ("llama", "attention_dropout", "x"),
        ("seed_oss", "residual_dropout", {}),
        ("phi3", "rope_parameters", {"partial_rotary_factor": "half"}),
    ],
)
def test_a_share_that_is_not_one_is_named(model_type: str, key: str, value: Any) -> None:
    with pytest.raises(UnknownModelError, match=r"not a share of 1\. Fix the config\."):
        estimate(
            TrainingRecipe(model=spec_from_config({**SMALL_LLAMA, "model_type": model_type, key: value}, name="m"))
        )
