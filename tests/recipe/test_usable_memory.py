import json

import pytest

from ligerprof.gpus import GPUS
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import ColocatedEngine, outside_bytes, usable_memory
from ligerprof.torch_memory.distributed import nccl_bytes
from ligerprof.units import GIB, MIB
from tests.paths import RESULTS

# docs/env.md quotes it; one process ran all configurations, so that kernels of all add up
UNEXPLAINED_MIB = 22
ROWS = [json.loads(line) for line in (RESULTS / "ranks-h200x2.jsonl").read_text().splitlines()]


def test_one_gpu_is_less_by_context_and_kernels() -> None:
    gpu = GPUS["rtx4090"]
    usable = usable_memory(TrainingRecipe(gpu="rtx4090"))
    assert usable.size_bytes == gpu.usable_bytes == gpu.memory_bytes - gpu.context_bytes - gpu.kernels_bytes
    assert usable.size_bytes + outside_bytes(TrainingRecipe(gpu="rtx4090")) == gpu.memory_bytes
    assert usable.source == "NVIDIA GeForce RTX 4090 less the CUDA context"


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_several_gpus_are_less_by_nccl(engine: str) -> None:
    one, two = (TrainingRecipe(engine=engine, gpus=gpus) for gpus in (1, 2))
    assert outside_bytes(two) - outside_bytes(one) == nccl_bytes(2)
    assert usable_memory(two).source.endswith("less the CUDA context and NCCL")


def test_replicas_and_their_shards_have_communicators() -> None:
    def more(gpus: int, replicate: int) -> int:
        recipe = TrainingRecipe(engine="fsdp2", gpus=gpus, replicate=replicate)
        return outside_bytes(recipe) - outside_bytes(TrainingRecipe(engine="fsdp2", gpus=gpus))

    # of the shards, each rank is alone
    assert 0 < more(2, 2) == more(8, 8) < more(8, 2) == 2 * more(2, 2)


def test_a_gpu_that_nccl_fills_leaves_nothing() -> None:
    recipe = TrainingRecipe(engine="fsdp2", gpus=8, replicate=2, gpu="1500MiB:sm89")
    assert usable_memory(recipe).size_bytes == 0


def test_measured_ranks_hold_what_the_figures_say() -> None:
    # a communicator stays for the rows after it
    kept_bytes = 0
    for row in ROWS:
        # without the ledger where other processes ran on the GPUs
        if row["kind"] != "row" or "outside" not in row["ranks"][0]:
            continue
        recipe = TrainingRecipe.from_json(row["recipe"])
        said_bytes = outside_bytes(recipe)
        if recipe.replicate > 1:
            kept_bytes = said_bytes - outside_bytes(TrainingRecipe(engine="fsdp2", gpus=2))
        else:
            said_bytes += kept_bytes
        for rank in row["ranks"]:
            assert 0 <= rank["outside"]["outside_bytes"] - said_bytes <= UNEXPLAINED_MIB * MIB


def test_an_engine_next_to_a_training_has_what_the_training_leaves() -> None:
    engine = ColocatedEngine(
        gpu_bytes=100 * GIB,
        usable_bytes=99 * GIB,
        training_bytes=60 * GIB,
        held_bytes=20 * GIB,
        weights_bytes=10 * GIB,
        token_bytes=GIB // 1024,
    )
    assert engine.utilization(sleeps=False) == 0.39
    assert engine.tokens(sleeps=False) == (39 - 10 - 2) * 1024
    assert engine.utilization(sleeps=True) == 0.79
    assert engine.tokens(sleeps=True) == (79 - 10 - 2) * 1024
    assert engine.sequences(2048, sleeps=False) == 13
    assert engine.longest(8, sleeps=False) == 27 * 128
    assert engine.to_json()["measured"] is False


def test_an_engine_without_room_has_none() -> None:
    sizes = {"gpu_bytes": 24 * GIB, "usable_bytes": 23 * GIB, "held_bytes": 4 * GIB, "weights_bytes": 3 * GIB}
    tight = ColocatedEngine(**sizes, training_bytes=22 * GIB, token_bytes=1024)
    assert (tight.utilization(sleeps=False), tight.tokens(sleeps=False)) == (0.04, 0)
    # asleep, its graphs do not fit next to the training
    assert (tight.utilization(sleeps=True), tight.tokens(sleeps=True)) == (0.0, 0)
