import pytest

from ligerprof.analyzers.suggestions.program import Framework, Program
from ligerprof.analyzers.suggestions.table import ROWS

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


def program(*files: str) -> Program:
    return Program(files=frozenset(files), calls=frozenset(f"{file}:forward" for file in files))


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
    how = row.how  # type: ignore[attr-defined]
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
