import dataclasses
import inspect
import json
import re

import accelerate
import peft
import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.optim
from torch.utils.checkpoint import checkpoint
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from ligerprof.analyzers.suggestions.case import Framework, RecordedProgram
from ligerprof.analyzers.suggestions.rows import ROWS
from ligerprof.recipe.training import TrainingRecipe
from tests.paths import DATA

MODEL = "transformers/models/llama/modeling_llama.py"
FILES = {
    Framework.TRL: ["trl/trainer/sft_trainer.py", "transformers/trainer.py", MODEL],
    Framework.TRAINER: ["transformers/trainer.py", "accelerate/utils/operations.py", MODEL],
    Framework.AXOLOTL: ["axolotl/train.py", "transformers/trainer.py", MODEL],
    Framework.LLAMA_FACTORY: ["/srv/LLaMA-Factory/src/llamafactory/train/sft/trainer.py", "transformers/trainer.py"],
    Framework.LIGHTNING: ["lightning/pytorch/trainer/trainer.py"],
    Framework.ACCELERATE: ["accelerate/accelerator.py", MODEL],
    Framework.DEEPSPEED: ["/opt/site/deepspeed/runtime/engine.py", MODEL],
    Framework.FSDP2: ["torch/distributed/fsdp/_fully_shard/_fsdp_state.py", MODEL],
    Framework.FSDP1: ["torch/distributed/fsdp/fully_sharded_data_parallel.py", MODEL],
    Framework.DDP: ["torch/nn/parallel/distributed.py", "train.py"],
    Framework.MODEL: [MODEL, "train.py"],
    Framework.TORCH: ["train.py", "torch/nn/modules/linear.py"],
    Framework.LIGERPROF: ["/home/me/ligerprof/runs/training.py", MODEL],
}


def program(*files: str) -> RecordedProgram:
    return RecordedProgram(files=frozenset(files), calls=frozenset(f"{file}:forward" for file in files))


@pytest.mark.parametrize("framework", FILES, ids=str)
def test_the_outermost_framework_is_found_by_its_files(framework: Framework) -> None:
    assert program(*FILES[framework]).frameworks[0] is framework


def test_a_folder_of_that_name_is_not_the_framework() -> None:
    found = program("/home/me/my_axolotl_runs/train.py", "/home/me/trl-notes/train.py", "/x/notdeepspeed/runtime/a.py")

    assert found.frameworks == (Framework.TORCH,)


def test_model_types_are_read_off_the_modeling_files() -> None:
    assert program(MODEL, "transformers/models/qwen3_moe/modeling_qwen3_moe.py").model_types == {"llama", "qwen3_moe"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_lines_are_what_the_framework_reads(row: object) -> None:
    how = {framework: row.lines(framework) for framework in Framework}  # type: ignore[attr-defined]
    # indented by four, in a terminal of 80 columns
    assert [line for lines in how.values() for line in lines if len(line) > 76] == []
    # the arguments of a trainer end in a comma, so that they can be pasted into the call
    for framework in (Framework.TRL, Framework.TRAINER):
        for line in how.get(framework, ()):
            assert line.startswith("#") or line.endswith(","), line
    for line in how.get(Framework.DEEPSPEED, ()):
        assert line.startswith('"'), line
    for framework in (Framework.AXOLOTL, Framework.LLAMA_FACTORY):
        for line in how.get(framework, ()):
            assert ": " in line, line


NAMES = json.loads((DATA / "framework-arguments.json").read_text(encoding="utf-8"))


def keys_in(framework: Framework) -> set[str]:
    """The keys or arguments that the table's lines set for a framework, and lines that are code left out."""
    lines = [line for row in ROWS for line in row.lines(framework)]
    pattern = r"^(\w+):" if framework in (Framework.AXOLOTL, Framework.LLAMA_FACTORY) else r"(?:^|, )(\w+)="
    return {key for line in lines for key in re.findall(pattern, line) if not line.startswith(("#", " "))}


@pytest.mark.parametrize("framework", [Framework.AXOLOTL, Framework.LLAMA_FACTORY, Framework.TRL, Framework.TRAINER])
def test_keys_are_those_of_the_framework(framework: Framework) -> None:
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    if framework is Framework.AXOLOTL:
        known = set()
    if framework is not Framework.TRAINER:
        known |= set(NAMES[framework.value]["names"])

    keys = keys_in(framework)

    assert len(keys) > 5
    # arguments of LoraConfig and of the kernels, which stand inside those of the trainer
    assert keys - known - {"target_modules"} == set()


def test_keys_of_deepspeed_are_those_of_its_configuration() -> None:
    lines = [line.partition("#")[0] for row in ROWS for line in row.lines(Framework.DEEPSPEED)]

    keys = {key for line in lines for key in re.findall(r'"(\w+)":', line)}

    assert len(keys) > 5
    assert keys <= set(NAMES["deepspeed"]["names"])


@pytest.mark.parametrize("framework", [Framework.AXOLOTL, Framework.LLAMA_FACTORY])
def test_values_of_yaml_keys_are_known(framework: Framework) -> None:
    for line in (line for row in ROWS for line in row.lines(framework)):
        key, _, value = line.partition("  #")[0].partition(": ")
        known = NAMES[framework.value].get("values", {}).get(key)
        assert known is None or value.strip('["]') in known, line


@pytest.mark.parametrize("framework", [Framework.TRL, Framework.TRAINER, Framework.AXOLOTL, Framework.LLAMA_FACTORY])
def test_optimizers_are_those_of_transformers(framework: Framework) -> None:
    lines = [line for row in ROWS for line in row.lines(framework) if line.startswith(("optim", "optimizer"))]

    names = {re.split(r"[=:]", line)[1].strip(' ",') for line in lines}

    assert names == {"adamw_torch_fused", "paged_adamw_32bit", "adamw_bnb_8bit"}
    assert names <= {name.value for name in OptimizerNames}


def test_python_lines_use_names_that_exist() -> None:
    text = "\n".join(line for row in ROWS for framework in Framework for line in row.lines(framework))

    assert set(re.findall(r"bitsandbytes\.optim\.(\w+)", text)) <= set(NAMES["bitsandbytes"]["names"])
    lightning = "\n".join(line for row in ROWS for line in row.lines(Framework.LIGHTNING))
    assert set(re.findall(r"(\w+)=", lightning)) - {"batch_size"} <= set(NAMES["lightning"]["names"])
    for function, argument in (
        (checkpoint, "use_reentrant"),
        (torch.autograd.graph.save_on_cpu.__init__, "pin_memory"),
        (torch.optim.AdamW.__init__, "fused"),
        (torch.nn.parallel.DistributedDataParallel.__init__, "gradient_as_bucket_view"),
        (torch.distributed.optim.ZeroRedundancyOptimizer.__init__, "optimizer_class"),
        (torch.distributed.fsdp.fully_shard, "reshard_after_forward"),
        (torch.distributed.fsdp.fully_shard, "offload_policy"),
        (peft.LoraConfig.__init__, "target_modules"),
        (accelerate.DistributedDataParallelKwargs.__init__, "gradient_as_bucket_view"),
        (accelerate.Accelerator.__init__, "kwargs_handlers"),
    ):
        assert argument in text
        assert argument in inspect.signature(function).parameters, argument


@pytest.mark.parametrize("framework", [Framework.AXOLOTL, Framework.LLAMA_FACTORY, Framework.LIGERPROF])
def test_users_of_settings_get_no_code(framework: Framework) -> None:
    assert program(*FILES[framework], "train.py").frameworks == (framework,)


def test_attention_is_suggested_for_models_that_have_another() -> None:
    row = next(row for row in ROWS if row.name == "sdpa")
    changed = row.recipe(TrainingRecipe(model="tiny", attention="eager"))
    assert changed is not None
    assert changed.attention == "sdpa"
    # transformers computes it with eager attention alone
    assert row.recipe(TrainingRecipe(model="gemma2-2b")) is None
