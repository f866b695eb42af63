"""The same meaning written in other ways: numbers as text, numbers with a point, several plug-ins."""

from pathlib import Path
from typing import Any

import pytest

from ligerprof.errors import RecipeError, UnsupportedError
from ligerprof.recipe.configs.resolve import load_recipe
from tests.recipe.configs.texts import read

AXOLOTL: dict[str, Any] = {
    "base_model": "tiny",
    "micro_batch_size": 2,
    "sequence_len": 128,
    "val_set_size": 0.0,
    "adapter": "qlora",
    "load_in_4bit": True,
    "lora_r": 16,
    "lora_target_linear": True,
}
TRL: dict[str, Any] = {
    "model_name_or_path": "tiny",
    "dataset_name": "x",
    "max_length": 128,
    "use_peft": True,
    "lora_r": 16,
}
OPEN_INSTRUCT: dict[str, Any] = {"model_name_or_path": "tiny", "with_tracking": False, "use_slow_tokenizer": False}
FACTORY: dict[str, Any] = {
    "model_name_or_path": "tiny",
    "stage": "sft",
    "finetuning_type": "lora",
    "cutoff_len": 128,
    "lora_rank": 16,
    "quantization_bit": 4,
}


@pytest.mark.parametrize(
    "values",
    [
        {**{key: value for key, value in AXOLOTL.items() if key != "load_in_4bit"}, "adapter": "lora"},
        TRL,
        {**FACTORY, "quantization_bit": 8},
    ],
    ids=["axolotl", "trl", "llama-factory"],
)
def test_adapters_over_8_bit_weights(values: dict[str, Any], tmp_path: Path) -> None:
    switch = {} if "quantization_bit" in values else {"load_in_8bit": True}
    recipe, report = read(tmp_path, {**values, **switch})
    assert (recipe.lora, recipe.qlora, recipe.quantization) == (16, None, "8bit")
    assert not report.unknown
    # 4 bits are another option, and DoRA's norms are not covered
    other, _ = load_recipe([report.files[0][0]], {"quantization": "4bit"})
    assert (other.lora, other.qlora, other.quantization) == (None, 16, None)


@pytest.mark.parametrize(
    ("keys", "accumulated"),
    [
        # axolotl divides the whole batch if the steps are not given
        ({"batch_size": 8}, 4),
        ({"batch_size": 8, "gradient_accumulation_steps": 3}, 3),
        ({}, 1),
    ],
    ids=str,
)
def test_accumulation_of_axolotl(keys: dict[str, Any], accumulated: int, tmp_path: Path) -> None:
    recipe, _ = read(tmp_path, {**AXOLOTL, **keys})
    assert (recipe.batch, recipe.grad_accum) == (2, accumulated)


@pytest.mark.parametrize(
    ("keys", "reentrant"),
    [
        ({"gradient_checkpointing": True}, True),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}, False),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {}}, False),
        ({"gradient_checkpointing": True, "selective_checkpointing": True}, False),
        ({"gradient_checkpointing": "offload"}, False),
        ({}, False),
    ],
    ids=str,
)
def test_axolotl_checkpoints_the_older_way_by_default(keys: dict[str, Any], reentrant: bool, tmp_path: Path) -> None:
    recipe, _ = read(tmp_path, {**AXOLOTL, "adapter": None, "load_in_4bit": False, **keys})
    assert recipe.checkpointing is bool(keys)
    assert recipe.reentrant is reentrant


def test_reentrant_checkpointing_under_fsdp2_is_said_to_be_read_as_the_other_kind(tmp_path: Path) -> None:
    keys = {"adapter": None, "load_in_4bit": False, "bf16": True, "gradient_checkpointing": True, "fsdp_version": 2}
    recipe, report = read(tmp_path, {**AXOLOTL, **keys, "fsdp_config": {"reshard_after_forward": True}})
    assert (recipe.engine, recipe.checkpointing, recipe.reentrant) == ("fsdp2", True, False)
    assert any("non-reentrant" in sentence for sentence in report.assumed)


@pytest.mark.parametrize("attention", [None, "sdpa", "flash_attention_2"])
def test_fp32_layers_of_axolotl_are_said_to_be_left_out(attention: str | None, tmp_path: Path) -> None:
    keys = {"adapter": None, "load_in_4bit": False, "bf16": True, "attn_implementation": attention}
    _, report = read(tmp_path, {**AXOLOTL, **keys})
    assert ("attn_implementation" in report.left_out) is (attention != "flash_attention_2")


@pytest.mark.parametrize(
    "values",
    [
        {**AXOLOTL, "adapter": None, "load_in_4bit": False, "attn_implementation": "flash_attention_2"},
        {**TRL, "use_peft": False},
        {**FACTORY, "finetuning_type": "full", "quantization_bit": None},
        {**OPEN_INSTRUCT, "use_lora": False},
    ],
    ids=["axolotl", "trl", "llama-factory", "open-instruct"],
)
def test_dropout_of_adapters_counts_with_adapters_only(values: dict[str, Any], tmp_path: Path) -> None:
    recipe, report = read(tmp_path, {**values, "lora_dropout": 0.1})
    assert recipe.lora_dropout == 0
    assert "lora_dropout" in report.ignored
    assert "lora_dropout" not in report.read


@pytest.mark.parametrize(
    ("values", "default"),
    [
        # trl/trainer/model_config.py
        ({**TRL, "use_peft": True}, 0.05),
        # axolotl's utils/schemas/peft.py
        ({**AXOLOTL, "adapter": "lora", "load_in_4bit": False, "lora_dropout": None}, 0.0),
        # llamafactory/hparams/finetuning_args.py
        ({**FACTORY, "finetuning_type": "lora"}, 0.0),
        # open_instruct/finetune.py
        ({**OPEN_INSTRUCT, "use_lora": True}, 0.1),
    ],
    ids=["trl", "axolotl", "llama-factory", "open-instruct"],
)
def test_dropout_of_adapters_is_the_files_or_the_frameworks(
    values: dict[str, Any], default: float, tmp_path: Path
) -> None:
    assert read(tmp_path, values)[0].lora_dropout == default
    for written, rate in ((0.2, 0.2), ("0.2", 0.2), (0, 0.0), (False, 0.0)):
        recipe, report = read(tmp_path, {**values, "lora_dropout": written})
        assert (recipe.lora_dropout, "lora_dropout" in report.read) == (rate, True)
    assert read(tmp_path, values, lora_dropout=0.3)[0].lora_dropout == 0.3
    # its adapter replaces the file's
    assert read(tmp_path, values, lora=4)[0].lora_dropout == 0
    for wrong in (1, -0.1, "much"):
        with pytest.raises(RecipeError, match=r"lora_dropout is .*, not a"):
            read(tmp_path, {**values, "lora_dropout": wrong})


def test_the_workers_of_ray_train_together(tmp_path: Path) -> None:
    recipe, _ = read(tmp_path, {**FACTORY, "quantization_bit": None, "ray_num_workers": 4})
    assert (recipe.engine, recipe.gpus) == ("ddp", 4)


def _written(value: Any, how: type) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return how(value) if is_number else value


@pytest.mark.parametrize("how", [str, float])
@pytest.mark.parametrize("values", [AXOLOTL, TRL, FACTORY], ids=["axolotl", "trl", "llama-factory"])
def test_numbers_as_text_or_with_a_point_mean_the_same(values: dict[str, Any], how: type, tmp_path: Path) -> None:
    recipe, report = read(tmp_path, values)
    assert (recipe.lora or recipe.qlora) == 16
    other, _ = read(tmp_path, {key: _written(value, how) for key, value in values.items()})
    assert other == recipe
    assert not report.unknown


@pytest.mark.parametrize(
    ("values", "key"), [(AXOLOTL, "lora_r"), (TRL, "lora_r"), (FACTORY, "lora_rank"), (FACTORY, "quantization_bit")]
)
@pytest.mark.parametrize("value", ["many", 1.5, [8]], ids=str)
def test_other_ranks_name_the_key(values: dict[str, Any], key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=rf"config-0.json: {key} is .*not a (whole )?number"):
        read(tmp_path, {**values, key: value})


def test_fp16_with_adapters_over_fp16_weights(tmp_path: Path) -> None:
    assert read(tmp_path, {**AXOLOTL, "fp16": True, "bf16": False})[0].precision == "fp16-amp"
    assert read(tmp_path, {**FACTORY, "fp16": True})[0].precision == "fp16-amp"
    full = {"base_model": "tiny", "micro_batch_size": 1, "fp16": True, "bf16": False}
    with pytest.raises(RecipeError, match="GradScaler refuses gradients in fp16"):
        read(tmp_path, full)


@pytest.mark.parametrize(("value", "nested"), [(None, True), (True, True), (False, False)])
def test_axolotls_configuration_of_bitsandbytes(value: bool | None, nested: bool, tmp_path: Path) -> None:
    keys = {} if value is None else {"bnb_config_kwargs": {"bnb_4bit_use_double_quant": value}}
    recipe, report = read(tmp_path, {**AXOLOTL, **keys})
    assert (recipe.nested_quant, report.unknown) == (nested, ())


@pytest.mark.parametrize(("value", "dtype"), [(None, "float32"), (True, "float32"), (False, "bfloat16")])
def test_axolotls_adapters_in_the_dtype_of_the_model(value: bool | None, dtype: str, tmp_path: Path) -> None:
    keys = {"load_in_4bit": False, "adapter": "lora", "bf16": True, "peft_autocast_adapter_dtype": value}
    assert read(tmp_path, {**AXOLOTL, **keys})[0].adapter_dtype == dtype


def test_axolotls_two_plugins_share_the_kernels(tmp_path: Path) -> None:
    plugins = [
        "axolotl.integrations.liger.LigerPlugin",
        "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin",
    ]
    switches = {"liger_rms_norm": True, "liger_glu_activation": True, "cut_cross_entropy": True}
    recipe, _ = read(tmp_path, {"base_model": "tiny", "micro_batch_size": 1, "plugins": plugins, **switches})
    assert set(recipe.kernels) == {"rms", "swiglu", "flce"}
    assert (recipe.provider, recipe.liger) == ("liger", "flce:cce+rms+swiglu")
    # without its plug-in, a switch of liger-kernel does nothing
    recipe, _ = read(tmp_path, {"base_model": "tiny", "micro_batch_size": 1, "plugins": plugins[1:], **switches})
    assert (recipe.provider, recipe.liger) == ("cce", "flce")


def test_axolotls_implementations_of_experts(tmp_path: Path) -> None:
    moe = {"base_model": "tiny", "micro_batch_size": 1}
    assert read(tmp_path, {**moe, "experts_implementation": "grouped_mm"})[0] == read(tmp_path, moe)[0]
    with pytest.raises(UnsupportedError, match="another implementation of experts"):
        read(tmp_path, {**moe, "experts_implementation": "batched_mm"})
    moe["base_model"] = "qwen3-30b-a3b"
    assert read(tmp_path, {**moe, "experts_implementation": "eager"})[0].experts == "eager"


def test_the_loss_of_llama_factory_1_is_refused_by_name(tmp_path: Path) -> None:
    values = {"model": "tiny", "model_class": "llm", "train_dataset": "x", "kernel_config": {"name": "auto"}}
    with pytest.raises(UnsupportedError, match="the second loss of LLaMA-Factory 1"):
        read(tmp_path, values)
    recipe, _ = read(tmp_path, values, loss="hf-4.45")
    assert (recipe.batch, recipe.seq, recipe.checkpointing, recipe.optimizer) == (1, 2048, True, "adamw-foreach")
    with pytest.raises(UnsupportedError, match="kernels of version 1"):
        read(tmp_path, {**values, "kernel_config": {"name": "liger_kernel"}}, loss="hf-4.45")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "a.toml",
            "[training]\nlocal_batch_size = 1\n[parallelism]\ndata_parallel_shard_degree = nan\n",
            "not a number",
        ),
        (
            "a.toml",
            "[training]\nlocal_batch_size = 1\n[parallelism]\ndata_parallel_shard_degree = 'x'\n",
            "not a number",
        ),
        ("a.toml", "[training]\nglobal_batch_size = 1e300\n[parallelism]\n", "not a number below"),
        ("a.yaml", "per_device_train_batch_size: 2\noutput_dir: o\ngradient_checkpointing: 0x" + "f" * 4000, "bits"),
    ],
)
def test_numbers_of_any_kind_end_in_one_line(name: str, content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(RecipeError, match=says) as caught:
        load_recipe([str(path)], {"model": "tiny"})
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < len(str(path)) + 200


@pytest.mark.parametrize(("values", "key"), [(AXOLOTL, "tensor_parallel_size"), (TRL, "tp_size")])
def test_a_degree_of_parallelism_of_one_is_off_as_a_text_too(values: dict[str, Any], key: str, tmp_path: Path) -> None:
    plain, _ = read(tmp_path, values)
    for one in (1, "1"):
        assert read(tmp_path, {**values, key: one})[0] == plain
    with pytest.raises(UnsupportedError, match="tensor parallelism"):
        read(tmp_path, {**values, key: "2"})
