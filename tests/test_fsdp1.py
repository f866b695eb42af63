"""FSDP1 as an engine: losses of two ranks, sizes of torch's flat parameters, and estimates of simulated steps."""

import dataclasses
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, reject, seed, settings
from hypothesis import strategies as st
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.testing._internal.distributed.fake_pg import FakeStore

from ligerprof.analyzers.estimate import estimate
from ligerprof.errors import LigerprofError, RecipeError
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.simulated import simulate_step
from ligerprof.torch_memory.distributed import FlatSizes, ShardedParameter
from tests.drawn_recipes import draw_recipe
from tests.runs.parallel.test_training import (  # noqa: F401 - the folders are fixtures
    RANKS,
    ROUNDING,
    folder,
    losses_alone,
    losses_together,
    recipe,
    tied,
)
from tests.sampling import sampled
from tests.test_estimate_against_simulation import check

TOLERANCE, RESERVED_TOLERANCE = 0.0005, 0.001
EXPANDABLE = "expandable_segments:True"
CASES_A_PART = 6

pytestmark = pytest.mark.usefixtures("no_log_records")


def test_two_ranks_train_to_the_losses_of_one(folder: Path, tied: Path) -> None:  # noqa: F811
    engines: list[tuple[Path, dict[str, Any]]] = [
        (folder, {"grad_accum": 2, "clip": 0.1}),
        (folder, {"grad_accum": 2, "grad_sync": "every", "clip": 0.1, "reshard": False}),
        (tied, {"backward_prefetch": "post"}),
        (tied, {"backward_prefetch": "none", "checkpointing": False}),
    ]
    together = losses_together([recipe(path, engine="fsdp1", gpus=RANKS, **options) for path, options in engines])
    for (path, options), losses in zip(engines, together, strict=True):
        alone = {name: value for name, value in options.items() if name in ("clip", "grad_accum")}
        assert losses == pytest.approx(losses_alone(recipe(path, **alone)), rel=ROUNDING), options


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_flat_parameters_are_cut_as_torch_cuts_them(rank: int, dtype: torch.dtype) -> None:
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7, bias=False), nn.Linear(7, 1))
        shapes = [tuple(parameter.shape) for parameter in module.parameters()]
        flat = FullyShardedDataParallel(
            module,
            device_id=torch.device("cpu"),
            use_orig_params=True,
            mixed_precision=MixedPrecision(param_dtype=dtype),
        )
        width = dtype.itemsize
        parameters = [ShardedParameter(shape=each, shards=4, stored_bytes=4, gathered_bytes=width) for each in shapes]
        sizes = FlatSizes(parameters=parameters, reduce_bytes=4)
        found = [parameter.numel() for parameter in flat.parameters()]
        assert list(sizes.slices(rank)) == found
        assert sizes.part_elements == flat._handle.flat_param.numel()
    finally:
        distributed.destroy_process_group()


@sampled(
    "options",
    [
        {"precision": "mixed", "gpus": 8, "clip": 1.0},
        {"precision": "bf16", "reshard": False, "grad_accum": 3},
        {"precision": "mixed", "grad_accum": 3, "grad_sync": "every", "backward_prefetch": "post"},
        {"precision": "fp32", "optimizer": "adamw-foreach", "backward_prefetch": "none"},
        {"precision": "mixed", "reduce_dtype": "bfloat16", "checkpointing": False},
    ],
    every=3,
)
def test_llama_1b_takes_what_it_takes_simulated(options: dict[str, Any]) -> None:
    base = {"model": "llama3.2-1b", "engine": "fsdp1", "gpus": 2, "batch": 2, "seq": 512, "alloc_conf": EXPANDABLE}
    recipe = TrainingRecipe(**{**base, **options})
    estimated, simulated = estimate(recipe), simulate_step(recipe, record=False)
    assert estimated.peak_bytes == pytest.approx(simulated.peak_bytes, rel=TOLERANCE)
    assert estimated.first_step_peak_bytes == pytest.approx(simulated.first_step_peak_bytes, rel=TOLERANCE)
    assert estimated.reserved_bytes == pytest.approx(simulated.reserved_bytes, rel=RESERVED_TOLERANCE)


def draw(random: Random) -> TrainingRecipe:
    """A drawn recipe under FSDP1; raises RecipeError if the options do not go together."""
    drawn = draw_recipe(random)
    return dataclasses.replace(
        drawn,
        engine="fsdp1",
        loss="hf" if drawn.loss.is_chunked else drawn.loss,
        gpus=random.choice((2, 3, 4, 8, 64)),
        clip=random.choice((None, None, 1.0)),
        grad_sync=random.choice(("last", "last", "every")),
        precision=random.choice(("mixed", "mixed", "bf16", "fp32")),
        reentrant=False,
        optimizer=random.choice(("adamw-fused", "adamw-foreach", "sgd")),
        reshard=random.random() < 0.7,
        reduce_dtype=random.choice((None, None, "bfloat16", "float32")),
        backward_prefetch=random.choice(("pre", "pre", "post", "none")),
    )


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 12))])
def test_drawn_recipes(part: int) -> None:
    @seed(part)
    @settings(max_examples=CASES_A_PART, database=None, phases=[Phase.generate])
    @given(number=st.integers(part * 1_000_000, (part + 1) * 1_000_000 - 1))
    def compare(number: int) -> None:
        try:
            check(draw(Random(number)))
        except LigerprofError:
            reject()

    compare()


def test_an_estimate_says_which_flat_parameters_it_assumes() -> None:
    assumed = estimate(TrainingRecipe(engine="fsdp1", gpus=2, precision="mixed")).assumed
    assert any(each.startswith("use_orig_params=True") for each in assumed)
    assert not any("root is resharded" in each for each in assumed)


def test_gathering_in_advance_holds_one_more_layer() -> None:
    options = {"model": "qwen3-8b", "engine": "fsdp1", "gpus": 8, "precision": "mixed", "batch": 8, "seq": 256}
    before, after, alone = (
        estimate(TrainingRecipe(**options, checkpointing=False, backward_prefetch=when)).peak_bytes
        for when in ("pre", "post", "none")
    )
    assert before - alone == 2 * 192_946_432
    assert after == alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 1}, "shards nothing on one GPU"),
        ({"lora": 8}, "--lora is not supported with --engine fsdp1 yet"),
        ({"qlora": 8}, "--qlora is not supported with --engine fsdp1 yet"),
        ({"offload": "all"}, "--offload all needs --engine deepspeed"),
        ({"replicate": 2}, "--replicate 2 needs --engine fsdp2"),
        ({"precision": "amp"}, "engine fsdp1 trains in mixed, bf16 or fp32, not amp"),
        ({"optimizer": "adafactor"}, "adafactor is not supported on FSDP1's shards yet"),
    ],
)
def test_what_it_does_not_take_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as refused:
        TrainingRecipe(**{"engine": "fsdp1", "gpus": 2, "precision": "mixed", **options})
    assert message in str(refused.value)
