"""What main memory holds under offload, against steps measured on H200s and DeepSpeed's own buffers."""

import json
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ligerprof.analyzers.estimate import estimate
from ligerprof.analyzers.estimate.host import host_bytes
from ligerprof.analyzers.estimate.static import make_weights
from ligerprof.recipe.training import TrainingRecipe
from tests.paths import RESULTS

TOLERANCE = 0.025
# Python, libraries and the CUDA context, which are in what was measured and not in the estimate
PROCESS_BYTES = range(10**9, 2 * 10**9)
LLAMA_1B = 1_235_814_400
EMBEDDING = 128_256 * 2_048


def estimated_bytes(recipe: TrainingRecipe) -> int:
    return host_bytes(recipe, make_weights(recipe).values())


def measured() -> Iterator[tuple[TrainingRecipe, int]]:
    """Every rank that was measured with offload."""
    for name in ("study-h200", "zero-h200"):
        for row in map(json.loads, (RESULTS / f"{name}.jsonl").read_text().splitlines()):
            recipe = TrainingRecipe.from_json(row["recipe"])
            for rank in row["ranks"] or [row]:
                if rank["host_bytes"] is not None:
                    yield recipe, rank["host_bytes"]


def test_measured_processes_differ_by_what_training_takes() -> None:
    rows = list(measured())
    rests = [measured_bytes - estimated_bytes(recipe) for recipe, measured_bytes in rows]
    process_bytes = median(rests)
    assert int(process_bytes) in PROCESS_BYTES
    assert len({(recipe.zero, recipe.gpus) for recipe, _ in rows}) == 5
    for (recipe, measured_bytes), rest_bytes in zip(rows, rests, strict=True):
        assert rest_bytes - process_bytes == pytest.approx(0, abs=TOLERANCE * measured_bytes), recipe


def test_loading_and_saving_take_what_processes_took() -> None:
    """Anonymous memory and mapped files; what is imported meanwhile is in what was measured."""
    files = [(RESULTS / f"main-memory-{device}.jsonl").read_text() for device in ("cpu", "h200")]
    rows = [json.loads(line) for text in files for line in text.splitlines()]
    assert {row["case"] for row in rows} >= {"load bf16", "load amp", "save bf16", "save amp"}
    for row in rows:
        kind, precision = row["case"].split()
        memory = estimate(TrainingRecipe(model="llama3.2-1b", precision=precision)).main_memory
        loads, on_gpu = kind == "load", row["device"] != "cpu"
        # torch.save copies one tensor at a time; from main memory, nothing is copied to save it
        saving = {"save": memory.saving_bytes, "torch.save": 2 * EMBEDDING}.get(kind, 0) if on_gpu else 0
        expected = memory.loading_bytes if loads else saving
        assert row["anonymous_bytes"] - expected == pytest.approx(0, abs=150e6)
        assert row["mapped_bytes"] - (memory.file_bytes if loads else 0) == pytest.approx(0, abs=150e6)


@pytest.mark.parametrize(
    ("options", "loading", "ranks", "saving"),
    [
        ({"precision": "bf16"}, 0, 1, 2 * LLAMA_1B),
        ({"precision": "amp"}, 4 * LLAMA_1B, 1, 4 * LLAMA_1B),
        ({"precision": "amp", "engine": "ddp", "gpus": 4}, 4 * LLAMA_1B, 4, 4 * LLAMA_1B),
        ({"precision": "mixed", "engine": "fsdp2", "gpus": 4}, 4 * LLAMA_1B, 1, 4 * LLAMA_1B),
        ({"precision": "mixed", "engine": "fsdp2", "gpus": 4, "save_whole": False}, 4 * LLAMA_1B, 1, 0),
        ({"precision": "mixed", "engine": "deepspeed", "zero": 3, "gpus": 4}, 0, 4, 2 * LLAMA_1B),
    ],
)
def test_ranks_load_and_save(options: dict[str, Any], loading: int, ranks: int, saving: int) -> None:
    memory = estimate(TrainingRecipe(model="llama3.2-1b", seq=128, **options)).main_memory
    # FSDP pads some parameters to the number of ranks
    assert memory.loading_bytes == pytest.approx(loading, rel=1e-4)
    assert memory.saving_bytes == pytest.approx(saving, rel=1e-4)
    assert memory.loading_ranks == ranks
    moment, whole_bytes = memory.of_machine(options.get("gpus", 1))
    assert moment == ("loading a checkpoint" if ranks * loading >= saving and loading else "saving the model")
    assert whole_bytes >= max(ranks * loading, saving)


def test_adapters_are_saved_alone_and_offload_stays_while_saving() -> None:
    adapted = estimate(TrainingRecipe(model="llama3.2-1b", lora=16, precision="bf16")).main_memory
    assert 0 < adapted.saving_bytes < 0.1 * adapted.file_bytes
    offloaded = TrainingRecipe(model="llama3.2-1b", engine="deepspeed", precision="mixed", zero=3, offload="all")
    memory = estimate(offloaded).main_memory
    assert memory.training_bytes == estimate(offloaded).host_bytes > 0
    assert memory.saving_bytes == memory.training_bytes + 2 * LLAMA_1B


def power_of_two(size_bytes: int) -> int:
    """The smallest that holds so many bytes, by doubling."""
    block_bytes = 1
    while block_bytes < size_bytes:
        block_bytes *= 2
    return block_bytes


def offloaded(zero: int, *, locked: bool, offload: str = "optimizer", grad_accum: int = 1) -> TrainingRecipe:
    place = {"pin_memory": locked}
    zero_optimization = {"offload_optimizer": place, **({"offload_param": place} if offload == "all" else {})}
    return TrainingRecipe(
        engine="deepspeed",
        precision="mixed",
        zero=zero,
        offload=offload,
        grad_accum=grad_accum,
        deepspeed_config={"zero_optimization": zero_optimization},
    )


# the sizes are those of DeepSpeed's own attributes, read after two steps of a small model on a CPU
@pytest.mark.parametrize("locked", [False, True])
def test_stage_2_holds_a_16_bit_copy_and_a_buffer_for_the_largest_gradient_besides(locked: bool) -> None:
    held = power_of_two if locked else int
    copies = 2 * held(4 * LLAMA_1B) + held(2 * LLAMA_1B) + held(2 * EMBEDDING)
    assert estimated_bytes(offloaded(2, locked=locked)) == copies + 8 * LLAMA_1B


def test_stage_2_accumulates_gradients_in_a_buffer_each() -> None:
    once, twice = (estimated_bytes(offloaded(2, locked=False, grad_accum=count)) for count in (1, 2))
    assert twice - once == 2 * LLAMA_1B


@pytest.mark.parametrize("locked", [False, True])
def test_stage_3_locks_16_bit_weights_at_any_rate(locked: bool) -> None:
    recipe = offloaded(3, locked=locked, offload="all")
    held = power_of_two if locked else int
    sizes = [parameter.elements for parameter in recipe.spec.parameters]
    # 1e9 elements are a group, which ends with the parameter that reaches it
    first = next(total for count in range(len(sizes)) if (total := sum(sizes[:count])) >= 10**9)
    gradients = held(4 * first) + held(4 * (LLAMA_1B - first)) + held(2 * LLAMA_1B)
    left_behind = sum(power_of_two(2 * size) for size in sizes) if locked else 0
    weights = power_of_two(2 * LLAMA_1B) + left_behind
    assert estimated_bytes(recipe) == 4 * LLAMA_1B + 8 * LLAMA_1B + gradients + weights


@given(zero=st.integers(1, 3), gpus=st.integers(1, 64), offload=st.sampled_from(["none", "optimizer", "all", "nvme"]))
def test_more_ranks_hold_less_each(zero: int, gpus: int, offload: str) -> None:
    stage = 3 if offload in ("all", "nvme") else zero
    changes = {"nvme_path": str(RESULTS)} if offload == "nvme" else {}
    fewer, more = (
        estimated_bytes(
            TrainingRecipe(engine="deepspeed", precision="mixed", zero=stage, offload=offload, gpus=count, **changes)
        )
        for count in (gpus, 2 * gpus)
    )
    assert 0 <= more <= fewer
    assert bool(more) == (offload != "none")


def test_what_was_never_measured_is_said() -> None:
    def assumed(**options: Any) -> str:
        recipe = TrainingRecipe(engine="deepspeed", precision="mixed", zero=3, **options)
        return " ".join(estimate(recipe).assumed)

    assert "never measured" in assumed(offload="nvme", nvme_path=str(RESULTS))
    assert "never measured" not in assumed(offload="all")
