"""The splits of a number of GPUs that a command's keys allow, and how the command is typed with them."""

from itertools import product
from pathlib import Path

import pytest

from ligerprof.errors import RecipeError
from ligerprof.recipe.commands.changes import TrainingCommand
from ligerprof.recipe.commands.splits import Split, find_splits

ACCELERATE = """distributed_type: FSDP
parallelism_config:
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: 8
  parallelism_config_tp_size: 1  # within a node
"""
TITAN = """[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
"""


def typed(command: TrainingCommand, split: Split) -> tuple[str, list[str]]:
    """The command after a split's change, and the texts of its changed files."""
    changed = command.changed(split.change, {file: Path(f"fits{file.suffix}") for file in command.files})
    return changed.text, list(changed.files.values())


@pytest.mark.parametrize("world", [6, 8, 64])
def test_all_products_that_divide_the_world_are_tried_the_own_first(world: int) -> None:
    words = "torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --epochs 3"
    words += " --pipeline-model-parallel-size=1 --sequence-parallel --expert-model-parallel-size 1"
    splits = find_splits(TrainingCommand.read(words.split()), world, [])
    found = {tuple(split.sizes[part] for part in ("tensor", "pipeline", "expert")) for split in splits}
    divisors = [size for size in range(1, 9) if world % size == 0]
    assert found == {
        (tensor, pipeline, expert)
        for tensor, pipeline, expert in product(divisors, repeat=3)
        if world % (tensor * pipeline) == 0 and world // pipeline % expert == 0
    }
    assert len(found) == len(splits)
    assert (splits[0].name, splits[0].change.keys) == (f"tensor 2, data {world // 2}", {})
    counts = [split.model_ranks for split in splits[1:]]
    assert counts == sorted(counts)
    assert all(split.data * split.model_ranks == world for split in splits)


def test_shards_of_accelerates_file_and_options_are_what_is_left(tmp_path: Path) -> None:
    file = tmp_path / "fsdp.yaml"
    file.write_text(ACCELERATE)
    command = TrainingCommand.read(["accelerate", "launch", "--config_file", str(file), "-m", "trl.scripts.sft"])
    by_name = {split.name: split for split in find_splits(command, 16, [])}
    assert set(by_name) == {
        *(f"tensor {tensor}, data {16 // tensor}" for tensor in (2, 4, 8)),
        *(f"tensor {tensor}, data 2 x {8 // tensor}" for tensor in (2, 4, 8)),
        *("data 16", "data 2 x 8"),
    }
    text, (changed,) = typed(command, by_name["tensor 2, data 2 x 4"])
    assert text == "accelerate launch --config_file fits.yaml -m trl.scripts.sft"
    sizes = {"dp_replicate_size: 1": "dp_replicate_size: 2", "dp_shard_size: 8": "dp_shard_size: 4"}
    for before, after in (sizes | {"tp_size: 1": "tp_size: 2"}).items():
        assert f"parallelism_config_{before}" in ACCELERATE
        assert f"parallelism_config_{after}" in changed
    words = "accelerate launch --parallelism-config-tp-size 2 --parallelism_config_dp_shard_size=4 train.py --lr 1"
    command = TrainingCommand.read(words.split())
    texts = [typed(command, split)[0] for split in find_splits(command, 8, [])]
    assert texts[0] == words
    assert words.replace("size 2", "size 8").replace("size=4", "size=1") in texts


def test_torchtitans_arguments_win_over_its_file(tmp_path: Path) -> None:
    file = tmp_path / "llama.toml"
    file.write_text(TITAN)
    words = ["torchrun", "-m", "torchtitan.train", "--job.config_file", str(file)]
    command = TrainingCommand.read(words)
    key = "parallelism.pipeline_parallel_degree"
    splits = find_splits(command, 64, [(key, (1, 4))])
    assert [split.name for split in splits] == ["data 64", "pipeline 4, data 16"]
    text, files = typed(command, splits[1])
    # the shards, -1, are left to the program
    assert (text, files) == (f"{' '.join(words)} --{key} 4", [])


@pytest.mark.parametrize(
    ("words", "varied", "message"),
    [
        ("python train.py --batch 4", [], "no argument or key has a parallel degree"),
        ("python train.py --tp 4", [("tp", (3, 5))], "--world 8: no values of tp multiply to it"),
        ("python train.py --tp 4", [("tp", ("two",))], "--vary tp: a number of ranks is a whole number"),
    ],
)
def test_what_cannot_be_split_is_refused(words: str, varied: list[tuple[str, tuple[int, ...]]], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        find_splits(TrainingCommand.read(words.split()), 8, varied)
