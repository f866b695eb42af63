"""TrainingArguments, and the DeepSpeed, FSDP and accelerate settings that complete them."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ligerprof.analyzers.estimate import estimate
from ligerprof.errors import RecipeError, UnsupportedError
from ligerprof.recipe.configs.accelerate import ACCELERATE, values_of_environment
from ligerprof.recipe.configs.documents import read_document
from ligerprof.recipe.configs.resolve import load_options
from ligerprof.recipe.configs.settings import SIMULATED_RANKS
from ligerprof.recipe.configs.trainer import TRANSFORMERS
from ligerprof.recipe.deepspeed import zero_settings
from tests.paths import DATA
from tests.recipe.configs.texts import read, write

BASE = {
    "model_name_or_path": "tiny",
    "per_device_train_batch_size": 2,
    "max_seq_length": 128,
    "output_dir": "out",
    "dtype": "float32",
}
AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}


def test_every_field_of_the_installed_versions_has_a_row() -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from transformers import TrainingArguments

    # arguments for torch_xla alone
    ours = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert ours - TRANSFORMERS.rows.keys() == set()
    assert {field.name for field in dataclasses.fields(ClusterConfig)} - ACCELERATE.rows.keys() == set()


def test_defaults_are_those_of_the_installed_transformers(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    defaults = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    recipe, report = read(tmp_path, {"model_name_or_path": "tiny", "output_dir": "out"})
    assert recipe.batch == defaults["per_device_train_batch_size"]
    assert recipe.grad_accum == defaults["gradient_accumulation_steps"]
    assert recipe.clip == defaults["max_grad_norm"]
    # version 5 loads the checkpoint's dtype, and the Trainer adds no autocast
    assert recipe.precision == "bf16"
    assert "checkpoint's dtype" in report.assumed[-1]
    assert not recipe.checkpointing
    assert (recipe.optimizer, defaults["optim"]) == ("adamw-fused", "adamw_torch_fused")


@pytest.mark.parametrize(
    ("keys", "means"),
    [
        ({}, {"batch": 2, "seq": 128, "precision": "fp32", "clip": 1.0, "engine": "torch", "liger": "none"}),
        ({"bf16": True}, {"precision": "amp"}),
        ({"bf16": "true", "gradient_accumulation_steps": "4"}, {"precision": "amp", "grad_accum": 4}),
        ({"fp16": True, "max_grad_norm": 0.3}, {"precision": "amp-fp16", "clip": 0.3}),
        ({"dtype": "bfloat16"}, {"precision": "bf16"}),
        ({"torch_dtype": "auto"}, {"precision": "bf16"}),
        ({"dtype": "auto", "bf16": True}, {"precision": "bf16-amp"}),
        ({"dtype": "bfloat16", "bf16": True}, {"precision": "bf16-amp"}),
        ({"optim": "paged_adamw_8bit"}, {"optimizer": "paged-adamw-8bit"}),
        ({"gradient_checkpointing": True}, {"checkpointing": True, "reentrant": False}),
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            {"checkpointing": True, "reentrant": True},
        ),
        (
            {"activation_checkpointing": True, "gradient_checkpointing_kwargs": '{"use_reentrant": true}'},
            {"checkpointing": True, "reentrant": True},
        ),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, {"checkpointing": False, "reentrant": False}),
        ({"optim": "adamw_torch"}, {"optimizer": "adamw-foreach"}),
        ({"optim": "adamw_bnb_8bit"}, {"optimizer": "adamw-8bit"}),
        ({"optim": "sgd"}, {"optimizer": "sgd"}),
        ({"optim": "galore_adamw", "optim_args": "rank=64, scale=2"}, {"optimizer": "galore", "galore_rank": 64}),
        ({"attn_implementation": "eager"}, {"attention": "eager"}),
        ({"use_liger_kernel": True}, {"kernels": ("rope", "rms", "swiglu", "flce"), "provider": "liger"}),
        (
            {"use_liger_kernel": True, "liger_kernel_config": {"rope": False, "fused_linear_cross_entropy": False}},
            {"kernels": ("rms", "swiglu"), "provider": "liger"},
        ),
        (
            {"use_liger_kernel": True, "liger_kernel_config": {"cross_entropy": True, "fused_linear_cross_entropy": 0}},
            {"kernels": ("rope", "rms", "swiglu", "ce")},
        ),
        ({"bf16": True, "deepspeed": AUTO}, {"precision": "mixed", "engine": "deepspeed", "zero": 3, "clip": 1.0}),
        ({"deepspeed": AUTO}, {"precision": "fp32", "engine": "deepspeed", "zero": 3}),
    ],
    ids=str,
)
def test_keys_become_options(keys: dict[str, Any], means: dict[str, Any], tmp_path: Path) -> None:
    recipe, report = read(tmp_path, {**BASE, **keys})
    found = {name: getattr(recipe, name) for name in means}
    if "kernels" in means:
        found["kernels"], means["kernels"] = set(found["kernels"]), set(means["kernels"])
    assert found == means
    assert report.unknown == ()


@pytest.mark.parametrize(("strategy", "reshards"), [("FULL_SHARD", True), ("SHARD_GRAD_OP", False), (2, False)])
def test_version_1_of_fsdp_is_counted_as_version_2_on_request(strategy: Any, reshards: bool, tmp_path: Path) -> None:
    accelerate = {"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": {"fsdp_sharding_strategy": strategy}}
    recipe, _ = read(tmp_path, {**BASE, "bf16": True}, accelerate, engine="fsdp2")
    assert (recipe.engine, recipe.gpus, recipe.reshard, recipe.wrap) == ("fsdp2", 4, reshards, "accelerate")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"optim": "lomo"},
            "optim: 'lomo': optimizer lomo is not supported yet. Choose another with --opt",
        ),
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha: 5: NEFTune"),
        ({"label_smoothing_factor": 0.1}, "label smoothing is not supported yet. Take the key out"),
        ({"auto_find_batch_size": True}, "search for the batch size"),
        ({"attn_implementation": "flex_attention"}, "attention flex_attention"),
        ({"tp_size": 4}, f"tensor parallelism is not supported yet. {SIMULATED_RANKS}"),
        ({"parallelism_config": {"cp_size": 2}}, f"parallelism is not supported yet. {SIMULATED_RANKS}"),
        ({"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 1}}, "FSDP version 1 on one GPU"),
        (
            {"fsdp": "hybrid_shard auto_wrap", "fsdp_config": {"version": 1}},
            f"{SIMULATED_RANKS} Or set fsdp_version: 2",
        ),
        (
            {"bf16": True, "deepspeed": {**AUTO, "progressive_layer_drop": {"enabled": True}}},
            "progressive layer dropping",
        ),
        ({"deepspeed": AUTO, "dtype": "bfloat16"}, "weights in bfloat16 under DeepSpeed without bf16 or fp16"),
    ],
    ids=str,
)
def test_what_recipes_cannot_express_is_named(keys: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        read(tmp_path, {**BASE, **keys})
    message = str(caught.value)
    assert says in message
    assert message.startswith(str(tmp_path))
    assert "\n" not in message


@pytest.mark.parametrize(
    "keys",
    [
        {"per_device_train_batch_size": 0},
        {"per_device_train_batch_size": "many"},
        {"per_device_train_batch_size": [4]},
        {"gradient_accumulation_steps": 1.5},
        {"bf16": "perhaps"},
        {"bf16": {"enabled": True}},
        {"max_grad_norm": float("nan")},
        {"max_grad_norm": 10**400},
        {"gradient_checkpointing_kwargs": "no JSON"},
        {"model_name_or_path": 7},
        {"model_name_or_path": "\x1b[31m"},
        {"deepspeed": "missing.json"},
        {"optim": ["adamw"]},
    ],
    ids=str,
)
def test_wrong_values_are_one_line_that_names_file_and_key(keys: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, {**BASE, **keys})
    message = str(caught.value)
    assert str(tmp_path) in message
    assert next(iter(keys)) in message
    assert message.isprintable()


def test_every_key_is_read_ignored_left_out_or_unknown(tmp_path: Path) -> None:
    keys = {"learning_rate": 2e-5, "ddp_bucket_cap_mb": 50, "frobnicate": 1, "bf16": True, "label_names": None}
    _, report = read(tmp_path, {**BASE, **keys})
    assert report.read["bf16"] == "autocast bf16"
    assert set(report.ignored) == {"learning_rate", "label_names", "output_dir"}
    assert report.left_out == {"ddp_bucket_cap_mb": "buckets and options of DDP"}
    assert report.unknown == ("frobnicate",)
    assert report.omissions == ("buckets and options of DDP (ddp_bucket_cap_mb)",)


def test_an_option_of_the_command_line_wins_over_what_recipes_cannot_express(tmp_path: Path) -> None:
    recipe, _ = read(tmp_path, {**BASE, "optim": "lomo"}, optimizer="sgd", batch=7)
    assert (recipe.optimizer, recipe.batch) == ("sgd", 7)
    files = [write(tmp_path, "a.json", {**BASE, "bf16": True})]
    assert load_options(files, {"precision": "fp32"})[0]["precision"] == "fp32"


def test_auto_is_filled_as_transformers_fills_it(tmp_path: Path) -> None:
    from accelerate.utils.deepspeed import HfDeepSpeedConfig
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    class Theirs(HfTrainerDeepSpeedConfig, HfDeepSpeedConfig):
        """Transformers' class with accelerate's base, which it has only where deepspeed is installed."""

        def __init__(self, config: dict[str, Any]) -> None:
            HfDeepSpeedConfig.__init__(self, config)
            self._dtype, self.mismatches = None, []

    recipe, _ = read(tmp_path, {**BASE, "bf16": True, "gradient_accumulation_steps": 3, "deepspeed": AUTO})
    theirs = Theirs({**AUTO, "zero_optimization": dict(AUTO["zero_optimization"])})
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=3, bf16=True, use_cpu=True
    )
    theirs.trainer_config_process(arguments)
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=recipe.spec.hidden_size))
    theirs.trainer_config_finalize(arguments, model, 10)
    sizes = {name: value for name, value in theirs.config["zero_optimization"].items() if name != "stage"}
    assert len(sizes) == 3
    assert {name: zero_settings(recipe)[name] for name in sizes} == sizes
    assert recipe.grad_accum == theirs.config["gradient_accumulation_steps"]
    assert recipe.clip == theirs.config["gradient_clipping"]
    assert zero_settings(recipe)["overlap_comm"] is True


def test_a_named_deepspeed_file_is_found_from_the_file_and_folders_above(tmp_path: Path) -> None:
    write(tmp_path, "zero3.json", AUTO)
    (tmp_path / "sft").mkdir()
    name = write(tmp_path / "sft", "args.json", {**BASE, "bf16": True, "deepspeed": "zero3.json"})
    options, report = load_options([name], {})
    assert (options["engine"], options["zero"]) == ("deepspeed", 3)
    assert [framework for _, framework in report.files] == ["transformers", "deepspeed"]


def test_files_add_up_in_order(tmp_path: Path) -> None:
    accelerate = {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "num_processes": 4}
    section = {"zero_stage": 2, "offload_optimizer_device": "cpu", "gradient_accumulation_steps": 8}
    recipe, _ = read(tmp_path, BASE, {**accelerate, "deepspeed_config": section})
    assert (recipe.engine, recipe.gpus, recipe.zero, recipe.offload) == ("deepspeed", 4, 2, "optimizer")
    assert (recipe.precision, recipe.optimizer, recipe.grad_accum) == ("mixed", "deepspeed-cpu-adam", 8)
    assert zero_settings(recipe)["overlap_comm"] is False
    later, _ = read(tmp_path, BASE, {"per_device_train_batch_size": 5, "output_dir": "x"})
    assert later.batch == 5


def test_the_batch_follows_from_the_batch_of_all_gpus(tmp_path: Path) -> None:
    values = {"train_batch_size": 96, "gradient_accumulation_steps": 2, "fp16": {"enabled": True}}
    whole = {**values, "zero_optimization": {"stage": 1}}
    assert read(tmp_path, whole, model="tiny", gpus=8)[0].batch == 6
    recipe, _ = read(tmp_path, {**whole, "train_micro_batch_size_per_gpu": 3}, model="tiny", gpus=8)
    assert (recipe.batch, recipe.grad_accum) == (3, 4)
    with pytest.raises(UnsupportedError, match="not a multiple of 14"):
        read(tmp_path, whole, model="tiny", gpus=7)


@pytest.mark.parametrize(
    ("optimizer", "param", "means"),
    [("none", "none", "none"), ("cpu", "none", "optimizer"), ("cpu", "cpu", "all"), ("nvme", "nvme", "nvme")],
)
def test_offload(optimizer: str, param: str, means: str, tmp_path: Path) -> None:
    places = {
        f"offload_{part}": {"device": place, **({"nvme_path": str(tmp_path)} if place == "nvme" else {})}
        for part, place in (("optimizer", optimizer), ("param", param))
    }
    values = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    recipe, _ = read(tmp_path, {**values, "zero_optimization": {"stage": 3, **places}}, model="tiny")
    assert recipe.offload == means


def test_an_offload_of_parameters_alone_is_named(tmp_path: Path) -> None:
    values = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    with pytest.raises(UnsupportedError, match="optimizer to none and of parameters to cpu"):
        read(tmp_path, {**values, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, model="tiny")


@pytest.mark.parametrize("name", ["fsdp1", "fsdp2", "zero2", "zero3", "multi_gpu"])
def test_accelerates_own_environment_says_what_its_file_says(name: str) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    file = DATA / "configs" / "files" / "huggingface+trl" / "trl" / "accelerate_configs" / f"{name}.yaml"
    arguments = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    # set by the launcher after validation
    arguments.deepspeed_fields_from_accelerate_config = ""
    prepare = prepare_deepspeed_cmd_env if arguments.use_deepspeed else prepare_multi_gpu_env
    environment = prepare(arguments)[1] if arguments.use_deepspeed else prepare(arguments)
    launched = ACCELERATE.read(values_of_environment({**environment, "WORLD_SIZE": "8"}), "env")
    written = ACCELERATE.read(read_document(file), str(file))
    assert launched.unknown == []
    assert [found.value.what for found in launched.lacking] == [found.value.what for found in written.lacking] == []
    assert {setting: found.value for setting, found in launched.settings.items()} == {
        setting: found.value for setting, found in written.settings.items()
    }


def test_the_environment_of_a_launched_process_says_what_the_yaml_says() -> None:
    environment = {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "WORLD_SIZE": "8",
        "HOME": "/root",
    }
    values = values_of_environment(environment)
    reading = ACCELERATE.read(values, "env")
    assert reading.unknown == []
    found = {setting: found.value for setting, found in reading.settings.items()}
    sharding = {"engine": "fsdp2", "gpus": 8, "reshard": True, "wrap": "accelerate", "reduce_dtype": "bfloat16"}
    assert found == {"autocast": "bf16", **sharding}
    assert values_of_environment({"HOME": "/root"}) == {}


@pytest.mark.parametrize(
    ("values", "means"),
    [
        # weights that are trained become fp32, and both the gathered weights and the reduction are bf16
        ({"bf16": True}, ("fsdp2", "mixed", "accelerate", "bfloat16")),
        ({"bf16": False}, ("fsdp2", "bf16", "accelerate", None)),
    ],
)
def test_fsdp_of_the_trainer_is_that_of_accelerate(
    values: dict[str, Any], means: tuple[str | None, ...], tmp_path: Path
) -> None:
    fsdp = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2, "reshard_after_forward": False}}
    recipe, _ = read(tmp_path, {"per_device_train_batch_size": 1, **fsdp, **values}, model="llama3.1-8b", gpus=8)
    assert (recipe.engine, recipe.precision, recipe.wrap, recipe.reduce_dtype) == means
    assert not recipe.reshard


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"fp16": True}, "fp16 under FSDP version 2 is not supported yet"),
        ({"bf16": True, "optim": "adamw_bnb_8bit"}, "optimizer adamw-8bit under FSDP version 2 is not supported yet"),
    ],
)
def test_what_fsdp_lacks_is_named(values: dict[str, Any], says: str, tmp_path: Path) -> None:
    fsdp = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}}
    with pytest.raises(UnsupportedError, match=says):
        read(tmp_path, {"per_device_train_batch_size": 1, **fsdp, **values}, model="llama3.1-8b", gpus=8)


@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "paged_adamw_8bit"])
def test_the_trainer_keeps_the_moments_of_embeddings_in_fp32(tmp_path: Path, optim: str) -> None:
    recipe, _ = read(tmp_path, {**BASE, "optim": optim})
    plain = dataclasses.replace(recipe, fp32_embedding_states=False)

    assert recipe.fp32_embedding_states
    # two bytes become eight; the embedding of the tiny model is too small to be paged
    assert estimate(recipe).peak_bytes > estimate(plain).peak_bytes
    replaced, _ = read(tmp_path, {**BASE, "optim": optim}, optimizer="adamw-fused")
    assert not replaced.fp32_embedding_states


def test_a_compiled_training_is_a_compiled_recipe_on_one_gpu_and_refused_under_other_engines(tmp_path: Path) -> None:
    recipe, _ = read(tmp_path, {**BASE, "torch_compile": True})
    assert recipe.compile
    assert not read(tmp_path, {**BASE, "torch_compile": True}, compile=False)[0].compile
    with pytest.raises(UnsupportedError, match=r"torch_compile: torch\.compile under deepspeed is not supported"):
        read(tmp_path, {**BASE, "torch_compile": True, "bf16": True, "deepspeed": AUTO})


@pytest.mark.parametrize(("backend", "compiles"), [("NO", False), ("EAGER", False), ("INDUCTOR", True)])
def test_dynamo_backends_that_leave_operators_as_they_are_do_not_compile(
    backend: str, compiles: bool, tmp_path: Path
) -> None:
    accelerate = {"compute_environment": "LOCAL_MACHINE", "dynamo_config": {"dynamo_backend": backend}}
    assert read(tmp_path, BASE, accelerate)[0].compile is compiles


ONE = {"distributed_type": "FSDP", "num_processes": 4, "mixed_precision": "bf16"}
WRAPS = {"fsdp_version": 1, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}


@pytest.mark.parametrize(
    ("keys", "means"),
    [
        ({}, {"reshard": True, "backward_prefetch": "none", "save_whole": True}),
        ({"fsdp_backward_prefetch": "BACKWARD_PRE"}, {"backward_prefetch": "pre"}),
        ({"fsdp_backward_prefetch": 2, "fsdp_sharding_strategy": 1}, {"backward_prefetch": "post", "reshard": True}),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, {"reshard": False}),
        (
            {"fsdp_reshard_after_forward": "SHARD_GRAD_OP", "fsdp_state_dict_type": "SHARDED_STATE_DICT"},
            {"reshard": False, "save_whole": False},
        ),
    ],
)
def test_version_1_of_fsdp(keys: dict[str, Any], means: dict[str, Any], tmp_path: Path) -> None:
    recipe, report = read(tmp_path, BASE, {**ONE, "fsdp_config": {**WRAPS, **keys}})
    found = (recipe.engine.value, recipe.gpus, recipe.precision.value, recipe.reduce_dtype)
    assert found == ("fsdp1", 4, "mixed", "bfloat16")
    assert {name: getattr(recipe, name) for name in means} == means
    assert report.unknown == ()


def test_words_of_the_trainer_name_the_strategy_of_version_1(tmp_path: Path) -> None:
    keys = {"fsdp": ["shard_grad_op", "auto_wrap"], "fsdp_config": {"version": 1}, "bf16": True}
    recipe, _ = read(tmp_path, {**BASE, **keys}, gpus=2)
    assert (recipe.engine.value, recipe.reshard) == ("fsdp1", False)


@pytest.mark.parametrize(
    ("keys", "base", "says"),
    [
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, {}, "FSDP version 1 with HYBRID_SHARD"),
        ({"fsdp_sharding_strategy": 3}, {}, "FSDP version 1 with NO_SHARD"),
        ({"fsdp_offload_params": True}, {}, "offload to main memory under FSDP version 1"),
        ({"fsdp_auto_wrap_policy": "NO_WRAP"}, {}, "gathers the whole model at once"),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}, {}, "wrapping of modules by size"),
        ({}, {"optim": "adafactor"}, "optimizer adafactor-hf under FSDP version 1"),
        ({}, {"fp16": True}, "fp16 under FSDP version 1"),
    ],
)
def test_what_version_1_of_fsdp_does_not_cover(
    keys: dict[str, Any], base: dict[str, Any], says: str, tmp_path: Path
) -> None:
    launched = {**ONE, "mixed_precision": "fp16"} if "fp16" in base else ONE
    with pytest.raises(UnsupportedError) as refused:
        read(tmp_path, {**BASE, **base}, {**launched, "fsdp_config": {**WRAPS, **keys}})
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_version_2_may_be_counted_in_its_place(tmp_path: Path) -> None:
    config = {**ONE, "fsdp_config": {**WRAPS, "fsdp_sharding_strategy": "HYBRID_SHARD"}}
    recipe, _ = read(tmp_path, BASE, config, engine="fsdp2")
    assert recipe.engine.value == "fsdp2"
