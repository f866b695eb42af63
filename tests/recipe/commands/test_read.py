"""Training commands, read as files are: program, launcher, files that they name, and what variables leave open."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from ligerprof.errors import LigerprofError, RecipeError, UnsupportedError
from ligerprof.recipe.commands.program import read_command
from ligerprof.recipe.commands.shell import negated, read_arguments
from ligerprof.recipe.configs.report import ConfigReport
from ligerprof.recipe.configs.resolve import load_options
from ligerprof.recipe.training import TrainingRecipe

SFT = "--model_name_or_path tiny --dataset_name d --max_length 128"
TRAINER = "--model_name_or_path tiny --output_dir o --bf16 --dtype float32 --max_seq_length 128"
ZERO = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto"}
LAUNCHER = {
    "distributed_type": "DEEPSPEED",
    "mixed_precision": "bf16",
    "num_processes": 8,
    "deepspeed_config": {"zero_stage": 3},
}
FILES: dict[str, Any] = {
    "ds.json": ZERO,
    "a.yaml": LAUNCHER,
    "multi.yaml": {"distributed_type": "MULTI_GPU", "num_processes": 4, "mixed_precision": "no"},
    "sft.yaml": {
        "model_name_or_path": "tiny",
        "per_device_train_batch_size": 2,
        "max_length": 128,
        "dataset_name": "d",
    },
    "lf.yaml": {
        "model_name_or_path": "tiny",
        "stage": "sft",
        "finetuning_type": "full",
        "cutoff_len": 128,
        "bf16": True,
    },
    "dpo.yaml": {"model_name_or_path": "tiny", "stage": "dpo", "finetuning_type": "full", "cutoff_len": 128},
    "ax.yaml": {"base_model": "tiny", "micro_batch_size": 1, "sequence_len": 128, "gradient_accumulation_steps": 1},
    "args.json": {"model_name_or_path": "tiny", "per_device_train_batch_size": 3, "output_dir": "o", "bf16": True},
    "titan.toml": '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 128\n',
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files, in the working folder, and an environment without launchers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("CUDA_VISIBLE_DEVICES", "NPROC_PER_NODE", "NNODES", "BS"):
        monkeypatch.delenv(name, raising=False)
    for name, content in FILES.items():
        Path(name).write_text(content if isinstance(content, str) else json.dumps(content))
    return tmp_path


def recipe_of(command: str | list[str], **given: Any) -> tuple[TrainingRecipe, ConfigReport]:
    """The recipe of a command that is typed word by word."""
    words = shlex.split(command) if isinstance(command, str) else command
    options, report = load_options((), given, command=read_command(words, given))
    return TrainingRecipe(**options), report


def in_shell(text: str, **given: Any) -> tuple[TrainingRecipe, ConfigReport]:
    """The recipe of a line of a shell."""
    return recipe_of([text], **given)


@pytest.mark.parametrize(
    ("command", "framework", "means"),
    [
        (f"trl sft {SFT} --per_device_train_batch_size 4", "trl-sft", {"batch": 4, "loss": "trl-tiled"}),
        ("trl sft --config sft.yaml --per-device-train-batch-size=5", "trl-sft", {"batch": 5, "seq": 128}),
        ("trl sft --config sft.yaml", "trl-sft", {"batch": 2, "gpus": 1}),
        (f"python -m trl.scripts.sft {SFT}", "trl-sft", {"batch": 8}),
        (f"python trl/scripts/sft.py {SFT}", "trl-sft", {"batch": 8}),
        (f"python sft.py {TRAINER}", "trl-sft", {"precision": "amp"}),
        ("accelerate launch src/open_r1/sft.py --config sft.yaml", "trl-sft", {"batch": 2}),
        (
            f"python train.py {TRAINER} --per_device_train_batch_size 4",
            "transformers",
            {"batch": 4, "precision": "amp"},
        ),
        (f"python3 -u -W ignore train.py {TRAINER}", "transformers", {"batch": 8}),
        (f"/opt/venv/bin/python3.11 run_clm.py {TRAINER} --block_size 64", "transformers", {"seq": 64}),
        ("python train.py args.json", "transformers", {"batch": 3, "precision": "bf16-amp"}),
        (
            f"python train.py --model_max_length 64 {TRAINER.replace('--max_seq_length 128', '')}",
            "transformers",
            {"seq": 64},
        ),
        ("llamafactory-cli train lf.yaml", "llama-factory", {"batch": 8, "seq": 128}),
        ("llamafactory-cli train lf.yaml cutoff_len=64 per_device_train_batch_size=1", "llama-factory", {"seq": 64}),
        (
            "python src/train.py --stage sft --finetuning_type full --model_name_or_path tiny --cutoff_len 64",
            "llama-factory",
            {"seq": 64},
        ),
        ("axolotl train ax.yaml --micro-batch-size 2", "axolotl", {"batch": 2}),
        ("accelerate launch -m axolotl.cli.train ax.yaml", "axolotl", {"batch": 1}),
        (
            "python -m open_instruct.finetune --model_name_or_path tiny --max_seq_length 64",
            "open-instruct",
            {"seq": 64},
        ),
        (
            "torchrun --nproc_per_node=8 -m torchtitan.train --job.config_file titan.toml --training.seq_len 256",
            "torchtitan",
            {"seq": 256},
        ),
    ],
)
def test_programs(command: str, framework: str, means: dict[str, Any]) -> None:
    recipe, report = recipe_of(command)
    assert report.files[-1][1] == framework
    assert {name: getattr(recipe, name) for name in means} == means


@pytest.mark.parametrize(
    ("launcher", "arguments", "means"),
    [
        ("torchrun --nproc_per_node 8", "", {"engine": "ddp", "gpus": 8}),
        ("torchrun --nproc-per-node=4 --nnodes 2 --rdzv_backend c10d", "", {"engine": "ddp", "gpus": 8}),
        ("torchrun --standalone --nnodes=1:1", "", {"engine": "torch", "gpus": 1}),
        ("python -m torch.distributed.launch --nproc_per_node 4 --use_env", "", {"engine": "ddp", "gpus": 4}),
        (
            "python -m torch.distributed.run --nproc_per_node 4",
            '--fsdp "full_shard auto_wrap"',
            {"engine": "fsdp2", "gpus": 4},
        ),
        ("deepspeed --num_gpus 8", "--deepspeed ds.json", {"engine": "deepspeed", "gpus": 8, "zero": 2}),
        ("deepspeed --num_gpus=4 --num_nodes 2", "--deepspeed --deepspeed_config ds.json", {"gpus": 8, "zero": 2}),
        ("deepspeed --include localhost:0,1,2 --master_port 1", "--deepspeed ds.json", {"gpus": 3}),
        ("deepspeed --include w-0:0,1@w-1:0,1", "--deepspeed ds.json", {"gpus": 4}),
        ("accelerate launch --num_processes 4", "", {"engine": "ddp", "gpus": 4}),
        ("accelerate launch --multi_gpu --num_processes=2 --mixed_precision bf16", "", {"engine": "ddp", "gpus": 2}),
        ("accelerate launch --config_file a.yaml", "", {"engine": "deepspeed", "gpus": 8, "zero": 3}),
        ("accelerate launch --config_file a.yaml --num_processes 2 --zero_stage 2", "", {"gpus": 2, "zero": 2}),
        ("accelerate launch --config_file multi.yaml --num_processes 2", "", {"engine": "ddp", "gpus": 2}),
        ("accelerate launch --use_deepspeed --num_processes 2", "", {"engine": "deepspeed", "zero": 2}),
        (
            "accelerate launch --use_deepspeed --zero_stage 3 --offload_optimizer_device cpu --num_processes 2",
            "",
            {"zero": 3, "offload": "optimizer"},
        ),
        (
            "accelerate launch --use_deepspeed --deepspeed_config_file ds.json --num_processes 2",
            "",
            {"zero": 2, "gpus": 2},
        ),
        (
            "accelerate launch --use_fsdp --fsdp_version 2 --fsdp_reshard_after_forward false --num_processes 2",
            "",
            {"engine": "fsdp2", "reshard": False},
        ),
        ("accelerate launch --gpu_ids 0,1", "", {"gpus": 2}),
        ("python", "", {"engine": "torch", "gpus": 1}),
        ("python", "--deepspeed ds.json", {"engine": "deepspeed", "gpus": 1}),
        ("nohup env A=1 uv run --with x accelerate launch --num_processes 3", "", {"gpus": 3}),
        ("srun --ntasks 8 -u torchrun --nproc_per_node 2", "", {"gpus": 2}),
    ],
)
def test_launchers(launcher: str, arguments: str, means: dict[str, Any]) -> None:
    recipe, _ = recipe_of(f"{launcher} train.py {TRAINER} {arguments}")
    assert {name: getattr(recipe, name) for name in means} == means


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("CUDA_VISIBLE_DEVICES=0,1 deepspeed train.py --deepspeed ds.json", 2),
        ("CUDA_VISIBLE_DEVICES=0,1,2 torchrun --nproc_per_node gpu train.py", 3),
        ("env CUDA_VISIBLE_DEVICES=0,1 accelerate launch train.py", 2),
        ("FORCE_TORCHRUN=1 NPROC_PER_NODE=4 NNODES=2 llamafactory-cli train lf.yaml", 8),
        ("CUDA_VISIBLE_DEVICES=0,1 trl sft --config sft.yaml", 2),
        ("trl sft --config sft.yaml --num_processes 4", 4),
        ("axolotl train ax.yaml --launcher torchrun -- --nproc_per_node=2", 2),
    ],
)
def test_processes_of_the_environment_and_of_frameworks_own_commands(text: str, gpus: int) -> None:
    assert in_shell(text + (f" {TRAINER}" if "train.py" in text else ""))[0].gpus == gpus


def test_a_script_with_one_training_command_is_read_with_its_variables(folder: Path) -> None:
    inner = folder / "scripts"
    inner.mkdir()
    (inner / "z.json").write_text(json.dumps(ZERO))
    (inner / "run.sh").write_text(
        """#!/bin/bash
GPUS=4; MODEL=tiny
OPTIONS=(
  --model_name_or_path $MODEL   # the base
  --output_dir "out/$(date +%F)"
)
pip install -r requirements.txt
python prepare.py --out data
for lr in 1e-5 2e-5; do
torchrun --nproc_per_node $GPUS train.py "${OPTIONS[@]}" --learning_rate $lr \\
    --per_device_train_batch_size ${BS:-2} --bf16 True --deepspeed "$ROOT/z.json" $EXTRA 2>&1 | tee log
done
"""
    )
    for typed in (["bash", "scripts/run.sh"], ["scripts/run.sh"], ["sbatch --x 1; bash scripts/run.sh"]):
        recipe, report = recipe_of(typed)
        assert (recipe.spec.name, recipe.gpus, recipe.batch, recipe.zero) == ("tiny", 4, 2, 2)
        assert any("$ROOT/z.json is not here: " in sentence for sentence in report.assumed)
        assert "$EXTRA is not set, and counts as nothing" in report.assumed


def test_what_variables_decide_is_named_unless_an_option_decides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    command = f"python train.py {TRAINER} --per_device_train_batch_size $BS --learning_rate $LR --run_name x-$(date)"
    with pytest.raises(RecipeError, match=r"train\.py: --per_device_train_batch_size is \$BS, .* or give --batch\."):
        in_shell(command)
    assert in_shell(command, batch=3)[0].batch == 3
    monkeypatch.setenv("BS", "5")
    assert in_shell(command)[0].batch == 5
    assert recipe_of(shlex.split(command.replace("$(date)", "y")))[0].batch == 5
    with pytest.raises(RecipeError, match=r"--nproc_per_node is \$N, and nothing here sets \$N.* give --gpus"):
        in_shell(f"torchrun --nproc_per_node $N train.py {TRAINER}")
    assert in_shell(f"torchrun --nproc_per_node $N train.py {TRAINER}", gpus=2)[0].gpus == 2
    with pytest.raises(RecipeError, match=r"--nnodes is \$N, and nothing"):
        in_shell(f"torchrun --nproc_per_node 8 --nnodes $N train.py {TRAINER}")
    unknown = f"python train.py {TRAINER.replace('tiny', '$MODEL/x')}"
    with pytest.raises(RecipeError, match=r"--model_name_or_path is \$MODEL/x, and nothing here sets \$MODEL"):
        in_shell(unknown)
    assert in_shell(unknown, model="tiny")[0].spec.name == "tiny"
    assert in_shell(unknown, like="tiny")[0].like == "tiny"
    with pytest.raises(RecipeError, match=r"--config_file is \$CFG, and nothing here sets \$CFG"):
        in_shell(f"accelerate launch --config_file $CFG train.py {TRAINER}")


@pytest.mark.parametrize(
    "command",
    [
        *("trl dpo --config sft.yaml", "trl grpo", "trl kto", "trl reward", "trl rloo"),
        *(
            f"python {name}.py {TRAINER}"
            for name in ("train_dpo", "run_grpo", "examples/scripts/ppo", "reward_modeling")
        ),
        *(f"python -m {name} {TRAINER}" for name in ("trl.scripts.grpo", "open_instruct.dpo_tune_cache")),
        f"accelerate launch --config_file a.yaml scripts/run_orpo.py {TRAINER}",
        f"python examples/pytorch/language-modeling/run_mlm.py {TRAINER}",
        "llamafactory-cli train dpo.yaml",
        f"python train.py {TRAINER} --num_generations 8 --reward_funcs x",
    ],
)
def test_other_methods_are_refused_by_name(command: str) -> None:
    with pytest.raises(UnsupportedError, match="not supported yet"):
        recipe_of(command)


@pytest.mark.parametrize(
    ("command", "framework"),
    [
        ("swift sft --model m --train_type lora", "ms-swift"),
        ("tune run --nproc_per_node 2 full_finetune_distributed --config llama3/8B", "torchtune"),
        ("litgpt finetune_lora m", "LitGPT"),
        ("python -m verl.trainer.main_ppo data.train_files=x", "verl"),
        ("torchrun --nproc_per_node 8 -m verl.trainer.fsdp_sft_trainer data.train_files=x", "verl"),
        ("deepspeed --module openrlhf.cli.train_sft --pretrain m --micro_train_batch_size 2", "OpenRLHF"),
        ("python ./deepy.py train.py -d configs 125M.yml", "GPT-NeoX"),
        ("torchrun pretrain_gpt.py --tensor-model-parallel-size 2 --num-layers 12", "Megatron-LM"),
        ("torchrun train_lm.py --tensor-model-parallel-size 2 --num-layers 12", "Megatron-LM"),
        ("composer train/train.py yamls/mpt.yaml", "LLM Foundry"),
    ],
)
def test_frameworks_that_are_not_read_are_refused_by_name(command: str, framework: str) -> None:
    with pytest.raises(RecipeError, match=rf"a command of {framework}, whose settings"):
        recipe_of(command)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("echo hi", "echo hi: no training command"),
        ("python -c pass", "no training command"),
        ("sft.yaml", r"sft\.yaml: a file, not a command\. Give it as --config sft\.yaml"),
        ("trl chat --model x", "trl chat: not a command that trains"),
        ("llamafactory-cli export lf.yaml", "llamafactory-cli export: not a command that trains"),
        (
            "python train.py --foo 1",
            r"train\.py: not a training command that ligerprof knows \(its first arguments: --foo\)",
        ),
        ("python train.py", r"train\.py: has no arguments"),
        ("llamafactory-cli train '$CONFIG'", r"its argument is \$CONFIG, and nothing here sets \$CONFIG"),
        ("trl sft --config '$CONFIG'", r"--config is \$CONFIG, and nothing here sets \$CONFIG"),
        ("trl sft --config absent.yaml", r"--config names absent\.yaml, which is not in this folder"),
        (f"python train.py {TRAINER} --per_device_train_batch_size x", "not a number. Fix the command"),
        (f"python train.py {TRAINER} --deepspeed no.json", r"deepspeed names no\.json"),
        ("trl sft --config ax.yaml", r"ax\.yaml: most of its keys are not those of TRL's SFTConfig"),
        ("bash absent.sh", r"absent\.sh: no such file"),
    ],
)
def test_errors_are_one_line(command: str, says: str) -> None:
    with pytest.raises(LigerprofError, match=says) as caught:
        recipe_of(command)
    assert "\n" not in str(caught.value)


def test_two_training_commands_are_not_guessed_between() -> None:
    with pytest.raises(RecipeError, match=r"2 training commands \(trl sft, trl dpo\)\. Give one of them"):
        in_shell("trl sft --config sft.yaml\ntrl dpo --config sft.yaml")
    assert in_shell("python prepare.py --x 1 && trl sft --config sft.yaml; python evaluate.py --y 2")[0].batch == 2
    assert in_shell("bash -c 'trl sft --config sft.yaml'")[0].batch == 2
    assert in_shell('CMD="trl sft --config sft.yaml"; eval $CMD')[0].batch == 2


def test_a_script_that_submits_a_command_is_a_wrapper() -> None:
    text = f"python submit.py --gpus 8 -- accelerate launch --num_processes 4 train.py {TRAINER}"
    assert recipe_of(text)[0].gpus == 4
    nodes = 'RUN="accelerate launch --num_processes $((N * 8))"; srun --x 1 bash -c "$RUN train.py ' + TRAINER + '"'
    assert in_shell(f"N=2; {nodes}")[0].gpus == 16
    with pytest.raises(RecipeError, match=r"train\.py: --num_processes is \$\(\(N \* 8\)\), which a .* or give --gpus"):
        in_shell(nodes)


def test_scripts_of_alpacas_kind_keep_their_length_beside_keys_of_adapters() -> None:
    recipe, report = recipe_of(
        f"python train.py {TRAINER} --model_max_length 64 --lora_r 8 --lora_alpha 16 --q_lora True"
    )
    assert (recipe.seq, report.files[0][1]) == (64, "transformers")
    with pytest.raises(RecipeError, match="a command of LLaVA"):
        recipe_of(f"deepspeed llava/train/train_mem.py {TRAINER} --vision_tower clip")


def test_places_of_errors_are_the_file_or_the_command() -> None:
    with pytest.raises(UnsupportedError, match=r"^trl sft: optim: 'lomo'"):
        recipe_of("trl sft --config sft.yaml --optim lomo")
    Path("sft.yaml").write_text(json.dumps({**FILES["sft.yaml"], "optim": "lomo"}))
    with pytest.raises(UnsupportedError, match=r"^sft\.yaml: optim: 'lomo'"):
        recipe_of("trl sft --config sft.yaml --per_device_train_batch_size 1")
    assert recipe_of("trl sft --config sft.yaml --optim adamw_torch")[0].optimizer == "adamw-foreach"


def test_the_default_file_of_accelerate_counts_where_no_other_is_named(folder: Path) -> None:
    (folder / "hf" / "accelerate").mkdir(parents=True)
    (folder / "hf" / "accelerate" / "default_config.yaml").write_text(json.dumps(LAUNCHER))
    recipe, report = recipe_of(f"accelerate launch train.py {TRAINER}")
    assert (recipe.gpus, recipe.zero) == (8, 3)
    assert report.files[0][0].endswith("default_config.yaml")
    assert recipe_of(f"accelerate launch --config_file multi.yaml train.py {TRAINER}")[0].gpus == 4


def test_arguments_are_those_of_huggingfaces_parser() -> None:
    words = shlex.split("pos --a 1 --b-c=x --d --e -1 --f p q --g 2e-5 --h True --h false --no_i --no_j x.yaml")
    found = read_arguments(words)
    assert found.positional == ("pos",)
    assert found.values == {
        "a": 1,
        "b_c": "x",
        "d": True,
        "e": -1,
        "f": ["p", "q"],
        "g": 2e-5,
        "h": False,
        "no_i": True,
        "no_j": "x.yaml",
    }
    assert negated({"no_i": True, "no_k": True, "no_l": True}, {"i", "no_k", "k"}) == {
        "i": False,
        "no_k": True,
        "no_l": True,
    }
