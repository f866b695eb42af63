"""A changed copy of a configuration file: it reads back as the plan, and its other lines stay."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ligerprof.errors import OutputError, RecipeError
from ligerprof.recipe.configs.edits import can_edit, edit_file, edit_files, require_editable
from ligerprof.recipe.configs.resolve import load_recipe
from ligerprof.recipe.configs.sources import FRAMEWORKS
from ligerprof.recipe.deepspeed import zero_settings
from ligerprof.recipe.training import TrainingRecipe
from tests.recipe.configs.texts import write

FILES = {
    "transformers": """\
# a comment on top
model_name_or_path: tiny  # small
output_dir: out
dtype: float32
per_device_train_batch_size:
  16   # on its own line
max_seq_length: 128
gradient_checkpointing_kwargs:
  use_reentrant: false
optim: adamw_torch_fused
report_to:
- none

# the end
""",
    "trl-sft": """\
model_name_or_path: tiny
dataset_name: imdb
per_device_train_batch_size: 16 # much
loss_type: nll
max_length: 128
gradient_checkpointing: no
""",
    "axolotl": """\
base_model: tiny
micro_batch_size: 16
sequence_len: 128
fp16: false
bf16: false
plugins:
  # logs
  - axolotl.integrations.swanlab.SwanLabPlugin
optimizer: "adamw_torch_fused"
datasets:
  - path: a  # micro_batch_size: 3
    micro_batch_size: 7
""",
    "llama-factory": """\
model_name_or_path: tiny
stage: sft
finetuning_type: full
disable_gradient_checkpointing: true
cutoff_len: 128
bf16: true
per_device_train_batch_size: 16
""",
}
PLANS: list[dict[str, Any]] = [
    {"batch": 4, "grad_accum": 4},
    {"checkpointing": True, "reentrant": False},
    {"optimizer": "adamw-8bit"},
    {"liger": "all"},
    {"batch": 2, "checkpointing": True, "optimizer": "adamw-8bit", "liger": "all"},
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("framework", sorted(FILES))
def test_the_copy_reads_back_as_the_plan(framework: str, plan: dict[str, Any], tmp_path: Path) -> None:
    file = write(tmp_path, "sft.yaml", FILES[framework])
    before, report = load_recipe([file], {})
    assert report.files == ((file, framework),)
    if framework == "trl-sft" and "liger" in plan:
        # TRL's own loss stays
        plan = {**plan, "liger": "no-flce"}
    after = dataclasses.replace(before, **plan)
    edit = edit_file(file, framework, before, after)
    assert edit.not_in_file == ()
    again, _ = load_recipe([write(tmp_path, "fixed.yaml", edit.content)], {})
    # kernels are those of liger-kernel, as the framework has them
    assert set(again.kernels) == set(after.kernels)
    for name in ("batch", "grad_accum", "checkpointing", "optimizer", "precision", "seq", "clip"):
        assert getattr(again, name) == getattr(after, name), name


SHARDED: list[dict[str, Any]] = [
    {"zero": 2, "offload": "optimizer", "optimizer": "default"},
    {"zero": 3, "offload": "all", "optimizer": "default", "precision": "mixed-fp16"},
    {"zero": 3, "gpus": 2, "optimizer": "adamw-fused"},
]


@pytest.mark.parametrize("plan", SHARDED, ids=str)
@pytest.mark.parametrize("framework", sorted(FILES))
def test_sharding_and_offload_read_back(framework: str, plan: dict[str, Any], tmp_path: Path) -> None:
    file = write(tmp_path, "sft.yaml", FILES[framework])
    before, _ = load_recipe([file], {})
    after = dataclasses.replace(before, **{"engine": "deepspeed", "precision": "mixed", **plan})
    edit = edit_file(file, framework, before, after)
    assert edit.not_in_file == (("--gpus 2",) if "gpus" in plan else ())
    again, _ = load_recipe([write(tmp_path, "fixed.yaml", edit.content)], {"gpus": after.gpus})
    for name in ("engine", "zero", "offload", "precision", "optimizer", "batch", "clip"):
        assert getattr(again, name) == getattr(after, name), name
    assert zero_settings(again) == zero_settings(after)


def test_the_json_that_a_file_names_moves_into_it_with_its_other_settings(tmp_path: Path) -> None:
    settings = {
        "bf16": {"enabled": "auto"},
        "wall_clock_breakdown": True,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000, "overlap_comm": True},
    }
    write(tmp_path, "ds.json", settings)
    file = write(tmp_path, "sft.yaml", FILES["llama-factory"] + "deepspeed: ds.json  # by the team\n")
    before, _ = load_recipe([file], {})
    after = dataclasses.replace(before, zero=3, offload="all", optimizer="default")
    edit = edit_file(file, "llama-factory", before, after)
    (change,) = edit.changes
    assert change.old == "ds.json"
    assert change.new["wall_clock_breakdown"] is True
    again, _ = load_recipe([write(tmp_path, "fixed.yaml", edit.content)], {})
    assert (again.zero, again.offload, zero_settings(again)) == (3, "all", zero_settings(after))
    assert "# by the team" in edit.content
    # accelerate's file decides instead
    assert edit_file(file, "llama-factory", before, after, shards=False).changes == ()

    own = str(tmp_path / "ds.json")
    alone, _ = load_recipe([own], {"model": "tiny"})
    after = dataclasses.replace(alone, zero=3, offload="all", optimizer="default")
    edit = edit_file(own, "deepspeed", alone, after)
    again, _ = load_recipe([write(tmp_path, "fixed.json", edit.content)], {"model": "tiny"})
    assert (again.zero, again.offload, edit.not_in_file) == (3, "all", ())


@pytest.mark.parametrize("framework", ["trl-sft", "axolotl", "llama-factory"])
def test_a_shorter_sequence_reads_back(framework: str, tmp_path: Path) -> None:
    file = write(tmp_path, "sft.yaml", FILES[framework])
    before, _ = load_recipe([file], {})
    edit = edit_file(file, framework, before, dataclasses.replace(before, seq=64))
    again, _ = load_recipe([write(tmp_path, "fixed.yaml", edit.content)], {})
    assert (again.seq, len(edit.changes)) == (64, 1)


@pytest.mark.parametrize("plan", [{"lora": 4}, {"qlora": 4}, {"lora": 4, "quantization": "8bit"}], ids=str)
@pytest.mark.parametrize("framework", ["trl-sft", "axolotl"])
def test_adapters_read_back(framework: str, plan: dict[str, Any], tmp_path: Path) -> None:
    file = write(tmp_path, "sft.yaml", FILES[framework])
    before, _ = load_recipe([file], {})
    edit = edit_file(file, framework, before, dataclasses.replace(before, **plan))
    again, _ = load_recipe([write(tmp_path, "fixed.yaml", edit.content)], {})
    assert (again.lora, again.qlora) == (plan.get("lora"), plan.get("qlora"))
    assert again.quantization == plan.get("quantization")
    # TRL's default is another
    assert again.lora_dropout == 0


@pytest.mark.parametrize("framework", ["trl-sft", "axolotl", "llama-factory"])
def test_dropout_of_adapters_leaves_the_file(framework: str, tmp_path: Path) -> None:
    adapter = {
        "axolotl": "adapter: lora\nlora_dropout: 0.1  # as ever\n",
        "trl-sft": "use_peft: true\n",
        "llama-factory": "lora_dropout: 0.1\n",
    }[framework]
    content = FILES[framework].replace("finetuning_type: full", "finetuning_type: lora") + adapter
    before, _ = load_recipe([write(tmp_path, "sft.yaml", content)], {})
    assert before.lora_dropout > 0
    edit = edit_file(str(tmp_path / "sft.yaml"), framework, before, dataclasses.replace(before, lora_dropout=0))
    again, _ = load_recipe([write(tmp_path, "fixed.yaml", edit.content)], {})
    assert again == dataclasses.replace(before, lora_dropout=0)
    assert (len(edit.changes), edit.not_in_file) == (1, ())


@pytest.mark.parametrize("framework", ["trl-sft", "axolotl"])
def test_weights_of_8_bits_leave_the_file_for_4_bits(framework: str, tmp_path: Path) -> None:
    adapter = {"axolotl": "adapter: lora\nlora_r: 8\n", "trl-sft": "use_peft: true\nlora_r: 8\n"}[framework]
    file = write(tmp_path, "sft.yaml", FILES[framework] + adapter + "load_in_8bit: true\n")
    before, _ = load_recipe([file], {})
    assert (before.lora, before.quantization) == (8, "8bit")
    edit = edit_file(file, framework, before, dataclasses.replace(before, lora=None, quantization=None, qlora=8))
    again, _ = load_recipe([write(tmp_path, "fixed.yaml", edit.content)], {})
    assert (again.lora, again.qlora, again.quantization) == (None, 8, None)
    assert edit.not_in_file == ()


@pytest.mark.parametrize("framework", sorted(FILES))
def test_other_lines_stay(framework: str, tmp_path: Path) -> None:
    file = write(tmp_path, "sft.yaml", FILES[framework])
    before, _ = load_recipe([file], {})
    edit = edit_file(file, framework, before, dataclasses.replace(before, batch=8, grad_accum=2))
    kept = [line for line in FILES[framework].splitlines() if "batch_size" not in line and "own line" not in line]
    assert [line for line in edit.content.splitlines() if line in kept] == kept
    assert len(edit.content.splitlines()) <= len(FILES[framework].splitlines()) + 1


def test_a_comment_on_the_line_of_a_changed_key_stays(tmp_path: Path) -> None:
    file = write(tmp_path, "sft.yaml", FILES["trl-sft"])
    before, _ = load_recipe([file], {})
    edit = edit_file(file, "trl-sft", before, dataclasses.replace(before, batch=8))
    assert "per_device_train_batch_size: 8 # much" in edit.content.splitlines()


def test_a_list_keeps_its_items(tmp_path: Path) -> None:
    file = write(tmp_path, "sft.yaml", FILES["axolotl"])
    before, _ = load_recipe([file], {})
    edit = edit_file(file, "axolotl", before, dataclasses.replace(before, liger="all"))
    plugins = next(change for change in edit.changes if change.key == "plugins")
    assert plugins.new == [*plugins.old, "axolotl.integrations.liger.LigerPlugin"]


def test_json_is_written_anew(tmp_path: Path) -> None:
    values = {
        "model_name_or_path": "tiny",
        "per_device_train_batch_size": 4,
        "output_dir": "größe",
        "learning_rate": 1e-5,
    }
    file = write(tmp_path, "args.json", values)
    before, _ = load_recipe([file], {})
    edit = edit_file(file, "transformers", before, dataclasses.replace(before, batch=1, checkpointing=True))
    assert load_recipe([write(tmp_path, "fixed.json", edit.content)], {})[0].batch == 1
    assert "größe" in edit.content


def test_what_the_file_has_no_key_for_is_named(tmp_path: Path) -> None:
    file = write(tmp_path, "sft.yaml", FILES["transformers"])
    before, _ = load_recipe([file], {})
    plan = {"seq": 64, "alloc_conf": "expandable_segments:True"}
    edit = edit_file(file, "transformers", before, dataclasses.replace(before, **plan))
    assert edit.not_in_file == ("--seq 64", "--alloc-conf expandable_segments:True")


def test_lines_that_cannot_be_replaced_are_an_error(tmp_path: Path) -> None:
    twice = FILES["trl-sft"] + "per_device_train_batch_size: 16\n"
    file = write(tmp_path, "sft.yaml", twice)
    before, _ = load_recipe([file], {})
    with pytest.raises(RecipeError, match=r"yaml: per_device_train_batch_size cannot be replaced line by line"):
        _ = edit_file(file, "trl-sft", before, dataclasses.replace(before, batch=8, checkpointing=True)).content


def test_only_files_of_known_frameworks_are_edited(tmp_path: Path) -> None:
    file = write(tmp_path, "sft.yaml", FILES["trl-sft"])
    written = {framework.name for framework in FRAMEWORKS if framework.writes is not None} - {"torchtitan"}
    assert len(written) == 6
    assert all(can_edit(file, framework) for framework in written)
    assert not can_edit(file, "trl-dpo")
    assert not can_edit("env", "accelerate")
    toml = write(tmp_path, "a.toml", "a = 1")
    assert can_edit(toml, "torchtitan")
    assert can_edit("titan.configs:llama3_8b", "torchtitan")
    assert not can_edit(toml, "transformers")
    assert not can_edit(file, "torchtitan")


ACCELERATE = """\
# written by accelerate config
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU  # one node
mixed_precision: 'no'
num_processes: 4
"""
ACCELERATE_FSDP = """\
distributed_type: FSDP
mixed_precision: bf16
fsdp_config:
    # shards
    fsdp_version: 2
    fsdp_offload_params: false  # fast

    fsdp_reshard_after_forward: true
num_processes: 2
"""
ACCELERATE_INLINE = "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config: {zero_stage: 1}\n"
TITAN = """\
[model]
name = "llama3"
flavor = "8B"

[training]
local_batch_size = 8  # per GPU
seq_len = 2048

[activation_checkpoint]
mode = "none"
"""
FURTHER: list[tuple[str, str, dict[str, Any]]] = [
    ("accelerate.yaml", ACCELERATE, {"engine": "deepspeed", "precision": "mixed", "zero": 2}),
    (
        "accelerate.yaml",
        ACCELERATE,
        {"engine": "deepspeed", "precision": "mixed", "zero": 3, "offload": "all", "optimizer": "default"},
    ),
    ("accelerate.yaml", ACCELERATE, {"engine": "fsdp2", "precision": "mixed"}),
    ("accelerate.yaml", ACCELERATE_INLINE, {"grad_accum": 4}),
    ("accelerate.yaml", ACCELERATE, {"precision": "amp"}),
    ("accelerate.yaml", ACCELERATE_FSDP, {"offload": "all"}),
    ("accelerate.yaml", ACCELERATE_INLINE, {"zero": 3}),
    ("titan.toml", TITAN, {"batch": 2, "grad_accum": 4, "seq": 1024}),
    ("titan.toml", TITAN, {"checkpointing": True}),
    ("titan.toml", TITAN, {"optimizer": "adamw-foreach"}),
    ("titan.toml", TITAN, {"engine": "fsdp2", "precision": "mixed", "offload": "all"}),
    ("titan.toml", TITAN + "\n[parallelism]\ntensor_parallel_degree = 1\n", {"engine": "fsdp2", "precision": "mixed"}),
]


@pytest.mark.parametrize(("name", "text", "plan"), FURTHER, ids=[f"{name}-{plan}" for name, _, plan in FURTHER])
def test_files_of_launchers_and_of_torchtitan_read_back(
    name: str, text: str, plan: dict[str, Any], tmp_path: Path
) -> None:
    file = write(tmp_path, name, text)
    given = {} if "num_processes" in text else {"gpus": 4}
    model = {} if "flavor" in text else {"model": "tiny"}
    before, report = load_recipe([file], {**given, **model})
    after = dataclasses.replace(before, **plan)
    (edit,) = edit_files(report.files, before, after)
    assert edit.not_in_file == ()
    again, _ = load_recipe([write(tmp_path, f"fixed-{name}", edit.content or "")], {**given, **model})
    options = ("batch", "grad_accum", "seq", "checkpointing", "optimizer", "precision", "engine", "zero", "offload")
    for option in options:
        assert getattr(again, option) == getattr(after, option), option
    # all lines but those of changed keys are the same
    keys = [change.key.rpartition(".")[2] for change in edit.changes]
    kept = [line for line in text.splitlines() if not any(key in line for key in keys)]
    there = edit.content.splitlines() if edit.content else []
    assert [line for line in there if line and line in kept] == [line for line in kept if line] or "{" in text


def test_a_launchers_file_decides_the_sharding_and_the_trainers_the_rest(tmp_path: Path) -> None:
    files = [write(tmp_path, "sft.yaml", FILES["trl-sft"]), write(tmp_path, "accelerate.yaml", ACCELERATE)]
    before, report = load_recipe(files, {})
    after = dataclasses.replace(
        before, engine="deepspeed", precision="mixed", zero=3, batch=4, grad_accum=4, alloc_conf="a:1"
    )
    edits = edit_files(report.files, before, after)
    assert [edit.file for edit in edits] == files
    keys = [[change.key for change in edit.changes] for edit in edits]
    assert keys[0] == ["per_device_train_batch_size", "gradient_accumulation_steps"]
    accumulation = "deepspeed_config.gradient_accumulation_steps"
    assert {"distributed_type", "deepspeed_config.zero_stage", accumulation} <= set(keys[1])
    assert all(edit.not_in_file == ("--alloc-conf a:1",) for edit in edits)
    again, _ = load_recipe(
        [write(tmp_path, f"fixed-{number}.yaml", edit.content or "") for number, edit in enumerate(edits)], {}
    )
    assert (again.engine, again.zero, again.batch, again.grad_accum) == ("deepspeed", 3, 4, 4)


def test_accelerate_takes_the_written_files(tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    files = [write(tmp_path, "sft.yaml", FILES["trl-sft"]), write(tmp_path, "accelerate.yaml", ACCELERATE)]
    before, report = load_recipe(files, {})
    sharded = {"engine": "deepspeed", "precision": "mixed", "zero": 2}
    for plan in ({}, sharded, {"engine": "fsdp2", "precision": "mixed"}):
        trainer, launcher = edit_files(report.files, before, dataclasses.replace(before, batch=4, grad_accum=4, **plan))
        assert trainer.values["gradient_accumulation_steps"] == 4
        # it refuses keys that it does not know
        config_args.load_config_from_file(write(tmp_path, "fixed.yaml", launcher.content or ""))
    # neither does it take settings next to those of a file
    named = "deepspeed_config: {deepspeed_config_file: ds.json}\ndistributed_type: DEEPSPEED\nnum_processes: 2\n"
    write(tmp_path, "ds.json", {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}})
    before, report = load_recipe([write(tmp_path, "named.yaml", named)], {"model": "tiny"})
    edits = edit_files(report.files, before, dataclasses.replace(before, grad_accum=4))
    assert [(edit.changes, edit.not_in_file) for edit in edits] == [((), ("--grad-accum 4",))] * 2


@pytest.mark.parametrize("framework", sorted(FILES))
def test_fsdp2_reads_back(framework: str, tmp_path: Path) -> None:
    file = write(tmp_path, "sft.yaml", FILES[framework])
    before, _ = load_recipe([file], {"gpus": 2, "precision": "amp"})
    changes = {"precision": "mixed", "offload": "all", "reshard": False, "grad_accum": 4, "grad_sync": "every"}
    after = dataclasses.replace(before, engine="fsdp2", **changes)
    edit = edit_file(file, framework, before, after)
    assert edit.not_in_file == ()
    again, _ = load_recipe([write(tmp_path, "fixed.yaml", edit.content or "")], {"gpus": 2})
    for option in ("engine", *changes):
        assert getattr(again, option) == getattr(after, option), option


def test_other_settings_of_accumulation_stay(tmp_path: Path) -> None:
    kept = "accelerator_config:\n  split_batches: false\n  gradient_accumulation_kwargs: {adjust_scheduler: false}\n"
    file = write(tmp_path, "sft.yaml", FILES["axolotl"] + kept)
    before, report = load_recipe([file], {"gpus": 2})
    assert (before.grad_sync, report.unknown) == ("last", ())
    edit = edit_file(file, "axolotl", before, dataclasses.replace(before, grad_accum=2, grad_sync="every"))
    settings = edit.values["accelerator_config"]
    assert settings == {
        "split_batches": False,
        "gradient_accumulation_kwargs": {"adjust_scheduler": False, "sync_each_batch": True},
    }
    assert load_recipe([write(tmp_path, "fixed.yaml", edit.content or "")], {"gpus": 2})[0].grad_sync == "every"
    # DeepSpeed has no such option
    assert load_recipe([file], {"gpus": 2, "engine": "deepspeed", "precision": "mixed"})[0].grad_sync == "last"


def test_a_function_is_not_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"training": {"max_context_length": 2048, "num_tokens_per_microbatch_per_dp_rank": 8192}}
    monkeypatch.setattr("ligerprof.recipe.configs.edits.values_of_function", lambda _source: values)
    before = TrainingRecipe(model="tiny", batch=4, seq=2048)
    source = "titan.configs:llama3_8b"
    (edit,) = edit_files([(source, "torchtitan")], before, dataclasses.replace(before, batch=2, seq=1024))
    assert edit.content is None
    assert list(edit.lines) == [
        "- training.num_tokens_per_microbatch_per_dp_rank = 8192",
        "+ training.num_tokens_per_microbatch_per_dp_rank = 2048",
        "- training.max_context_length = 2048",
        "+ training.max_context_length = 1024",
        f"{source} is a Python function: set these values in it; ligerprof does not rewrite code.",
    ]
    with pytest.raises(OutputError, match="does not rewrite code"):
        require_editable([(source, "torchtitan")])
    with pytest.raises(OutputError, match="Give one"):
        require_editable([("env", "accelerate")])


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("output_dir: o\r\nper_device_train_batch_size: 8 # x\r\n", "per_device_train_batch_size: 2 # x\r\n"),
        ('output_dir: o\n"per_device_train_batch_size": 8\n', "per_device_train_batch_size: 2\n"),
        ("---\noutput_dir: o\nper_device_train_batch_size: 8\n...\n", "per_device_train_batch_size: 2\n"),
        ("x: &size 8\noutput_dir: o\nper_device_train_batch_size: *size", "per_device_train_batch_size: 2\n"),
        ("{output_dir: o, per_device_train_batch_size: 8}\n", '"per_device_train_batch_size": 2'),
        (f"output_dir: o\nper_device_train_batch_size:{' ' * 2**17}8\n", "per_device_train_batch_size: 2\n"),
        ('output_dir: "a # b"\nper_device_train_batch_size: "8" # "c"\n', 'per_device_train_batch_size: 2 # "c"\n'),
    ],
    ids=["crlf", "quoted", "document", "alias", "flow", "spaces", "comments"],
)
def test_yaml_however_it_is_written(text: str, changed: str, tmp_path: Path) -> None:
    file = tmp_path / "args.yaml"
    file.write_bytes(text.encode())
    before, report = load_recipe([str(file)], {"model": "tiny"})
    (edit,) = edit_files(report.files, before, dataclasses.replace(before, batch=2, grad_accum=4))
    assert edit.content is not None
    assert changed in edit.content
    file.write_bytes(edit.content.encode())
    again, _ = load_recipe([str(file)], {"model": "tiny"})
    assert (again.batch, again.grad_accum) == (2, 4)


def test_a_document_that_cannot_be_edited_by_lines_is_named(tmp_path: Path) -> None:
    file = write(tmp_path, "args.yaml", "  output_dir: o\n  per_device_train_batch_size: 8\n")
    before, report = load_recipe([file], {"model": "tiny"})
    (edit,) = edit_files(report.files, before, dataclasses.replace(before, batch=2, grad_accum=4))
    with pytest.raises(RecipeError, match="gradient_accumulation_steps cannot be replaced line by line"):
        _ = edit.content
