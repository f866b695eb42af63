import dataclasses
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from ligerprof.analyzers.estimate import estimate
from ligerprof.analyzers.search.budget import Judge, Reserved
from ligerprof.analyzers.search.changes import LADDER, SAME_DATA, Advice, advise, expandable_segments
from ligerprof.cli.options import recipe_options
from ligerprof.errors import UnsupportedError
from ligerprof.recipe.flags import recipe_flags
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import Limit, find_limit
from ligerprof.units import GIB
from tests.estimated import needed_bytes

NAMES = [*(change.name for change in LADDER), expandable_segments.name]


def estimating(limit_bytes: int) -> Judge:
    return Judge(Limit(size_bytes=limit_bytes, source="a test"), None)


def states(advice: Advice) -> dict[str, str]:
    return {step.change.name: step.state for step in advice.steps}


def assert_adds_up(advice: Advice) -> None:
    """Check that savings sum to the byte and that every figure is the estimate of that recipe."""
    assert sorted(step.change.name for step in advice.steps) == sorted(NAMES)
    left_bytes = advice.needed_bytes
    for step in advice.applied:
        assert step.saved_bytes is not None
        left_bytes -= step.saved_bytes
        assert step.needed_bytes == left_bytes
    assert left_bytes == advice.plan_needed_bytes == needed_bytes(advice.plan)
    assert advice.needed_bytes == needed_bytes(advice.recipe)
    for step in advice.steps:
        assert (step.saved_bytes is None) == (step.needed_bytes is None)
        assert (step.reason is None) == (step.state in ("applied", "spare"))
        if step.state == "spare":
            assert step.saved_bytes is not None
            assert step.needed_bytes == advice.plan_needed_bytes - step.saved_bytes


def assert_every_change_is_needed(advice: Advice, judge: Judge) -> None:
    """Check that the plan without any one of its changes, the free ones included, does not fit."""
    for left_out in advice.applied:
        fewer = advice.recipe
        for step in advice.applied:
            outcome = step.change.outcome(fewer)
            if step is not left_out and not isinstance(outcome, str):
                sizes = (advice.plan.batch, advice.plan.seq)
                fewer = next((each for each in outcome if (each.batch, each.seq) == sizes), outcome[0])
        assert not judge.verdict(fewer).fits, left_out.change.name


recipes = st.builds(
    TrainingRecipe,
    model=st.sampled_from(["tiny", "llama3.2-1b"]),
    batch=st.integers(1, 24),
    seq=st.sampled_from([64, 500, 1024]),
    liger=st.sampled_from(["none", "all", "flce"]),
    checkpointing=st.booleans(),
    precision=st.sampled_from(["amp", "bf16", "fp32"]),
    optimizer=st.sampled_from(["adamw-fused", "adamw-foreach", "sgd"]),
    gpu=st.sampled_from(["h200", "t4"]),
)


@settings(max_examples=3)
@given(recipes, st.floats(0.02, 1.2))
def test_a_plan_that_fits_fits_and_the_ladder_adds_up(recipe: TrainingRecipe, share: float) -> None:
    judge = estimating(max(1, int(share * needed_bytes(recipe))))

    tried: list[tuple[int, int]] = []

    advice = advise(recipe, judge, lambda number, most: tried.append((number, most)))

    assert_adds_up(advice)
    assert {most for _, most in tried} <= {len(LADDER)}
    assert {number for number, _ in tried} <= set(range(1, len(LADDER) + 1))
    assert advice.plan_verdict == judge.verdict(advice.plan)
    sequences = advice.plan.batch * advice.plan.grad_accum
    assert sequences == recipe.batch * recipe.grad_accum
    assert (advice.plan.seq < recipe.seq) == ("sequence" in {step.change.name for step in advice.applied})
    if judge.verdict(recipe).fits:
        assert advice.plan == recipe
    if advice.plan_verdict.fits:
        assert_every_change_is_needed(advice, judge)
    else:
        assert "spare" not in states(advice).values(), "every rung that saves was tried"
        assert len({number for number, _ in tried}) == len(LADDER)


@pytest.mark.slow
@settings(max_examples=3)
@given(recipes, st.lists(st.floats(0.02, 1.2), min_size=2, max_size=2).map(sorted))
def test_what_fits_a_limit_fits_a_higher_one(recipe: TrainingRecipe, shares: list[float]) -> None:
    less, more = (advise(recipe, estimating(max(1, int(share * needed_bytes(recipe))))) for share in shares)

    assert bool(less.plan_verdict.fits) <= bool(more.plan_verdict.fits)


@pytest.mark.slow
def test_zero_stages_come_before_offloading_on_several_gpus() -> None:
    recipe = TrainingRecipe(model="llama3.1-8b", engine="deepspeed", precision="mixed", zero=1, gpus=8)

    found = {gib: advise(recipe, estimating(gib * GIB)) for gib in (64, 40, 24, 12)}

    assert {gib: advice.plan.zero for gib, advice in found.items()} == {64: 1, 40: 2, 24: 3, 12: 3}
    assert [advice.plan.offload for advice in found.values()] == ["none", "none", "none", "optimizer"]


@pytest.mark.slow
def test_fsdp2_and_ddp_take_changes_of_their_own() -> None:
    sharded = TrainingRecipe(model="llama3.1-8b", engine="fsdp2", gpus=2, gpu="rtx4090")
    advice = advise(sharded, estimating(20 * GIB))
    steps = {step.change.name: step for step in advice.steps}
    assert (advice.plan.engine, advice.plan.offload) == ("fsdp2", "all")
    assert steps["zero-3"].reason == "FSDP2 shards the weights"
    # its estimate was never compared with a measurement
    assert "offload-nvme" not in steps
    assert advice.host_bytes > 0
    # autocast keeps copies of all layers, the mixed-precision policy none
    mixed = {step.change.name: step for step in advise(sharded, estimating(70 * GIB)).steps}["mixed-precision"]
    assert (mixed.saved_bytes or 0) > GIB

    replicated = TrainingRecipe(engine="ddp", gpus=2, bucket_view=True, grad_accum=2, grad_sync="every")
    plan = advise(replicated, estimating(8 * GIB)).plan
    assert (plan.engine, plan.grad_sync, plan.bucket_view) == ("deepspeed", "last", False)


def test_fsdp2_shards_the_gradients_of_every_micro_batch_before_it_offloads() -> None:
    recipe = TrainingRecipe(engine="fsdp2", gpus=2, grad_accum=4, precision="mixed", liger="all")
    every = dataclasses.replace(recipe, grad_sync="every")

    advice = advise(recipe, estimating(needed_bytes(every) * 6 // 5))

    assert [step.change.name for step in advice.applied] == ["grad-sync"]
    assert advice.plan == every
    assert_adds_up(advice)
    assert states(advise(every, estimating(GIB)))["grad-sync"] == "inapplicable"


def test_rungs_that_a_later_one_makes_unnecessary_are_dropped() -> None:
    recipe = TrainingRecipe(checkpointing=False)

    advice = advise(recipe, estimating(14 * GIB))

    # checkpointing saves memory when tried; once the optimizer is offloaded it is not needed
    assert states(advice)["offload-optimizer"] == "applied"
    assert states(advice)["checkpointing"] == "spare"
    assert not advice.plan.checkpointing
    assert_adds_up(advice)


def test_a_useless_rung_is_retried_before_a_more_expensive_one() -> None:
    recipe = TrainingRecipe(model="llama3.1-8b", checkpointing=False, batch=2)

    advice = advise(recipe, estimating(32 * GIB))

    # the peak is in the optimizer step until the optimizer is offloaded; only then do kernels help
    # checkpointing is tried between them, and not needed with them
    assert [step.change.name for step in advice.applied] == ["kernels", "offload-optimizer"]
    assert states(advice)["checkpointing"] == "spare"
    assert_adds_up(advice)


def test_fragmentation_counts_in_an_estimated_plan() -> None:
    recipe = TrainingRecipe(batch=8)
    kernels = needed_bytes(dataclasses.replace(recipe, liger="all"))

    tight = advise(recipe, estimating(kernels + 1000))
    roomy = advise(recipe, estimating(int(kernels * 1.05)))

    # the kernels alone would fit, with no room to spare
    assert [step.change.name for step in tight.applied] != ["kernels"]
    assert tight.plan_verdict.fits
    assert [step.change.name for step in roomy.applied] == ["kernels"]
    assert_adds_up(tight)


@pytest.mark.slow
def test_frozen_weights_are_narrowed_before_anything_is_offloaded() -> None:
    recipe = TrainingRecipe(model="llama3.1-8b", lora=16, liger="all", checkpointing=True)

    advice = advise(recipe, estimating(24 * GIB))

    assert [step.change.name for step in advice.applied] == ["bf16-weights"]
    assert (advice.plan.precision, advice.plan.lora) == ("bf16-amp", 16)
    assert_adds_up(advice)
    # autocast before Ampere is fp16
    old = advise(dataclasses.replace(recipe, precision="amp-fp16", gpu="t4"), estimating(24 * GIB))
    assert old.plan.precision == "fp16-amp"


def test_weights_are_narrowed_once_a_later_rung_freezes_them() -> None:
    recipe = TrainingRecipe(optimizer="sgd", batch=1, seq=64, checkpointing=True, liger="all")
    frozen = needed_bytes(dataclasses.replace(recipe, lora=16))

    advice = advise(recipe, estimating(int(0.9 * frozen)))

    assert [step.change.name for step in advice.applied] == ["lora", "bf16-weights"]
    assert advise(recipe, estimating(2 * needed_bytes(recipe))).plan.precision == recipe.precision
    assert_adds_up(advice)


def test_adapters_are_the_last_resort() -> None:
    recipe = TrainingRecipe(optimizer="sgd", batch=1, seq=64, checkpointing=True, liger="all")

    advice = advise(recipe, estimating(int(0.75 * needed_bytes(recipe))))

    assert [step.change.name for step in advice.applied] == ["lora"]
    assert advice.plan.lora == 16
    assert advise(recipe, estimating(int(0.18 * needed_bytes(recipe)))).plan.qlora == 16
    assert_adds_up(advice)


def test_shorter_sequences_come_last_and_no_shorter_than_needed() -> None:
    recipe = TrainingRecipe(
        batch=1, seq=8192, optimizer="sgd", checkpointing=True, liger="all", qlora=8, precision="bf16-amp"
    )
    needed = [needed_bytes(dataclasses.replace(recipe, seq=size)) for size in (4096, 2048)]

    advice = advise(recipe, estimating(sum(needed) // 2))

    # in the simulation, too, 2,048 tokens run out of memory without expandable segments
    assert [step.change.name for step in advice.applied] == ["sequence", "expandable-segments"]
    assert advice.plan.seq == 2048
    assert_adds_up(advice)
    # whoever asks what fits at a length does not want another
    assert {change.name for change in LADDER} - {change.name for change in SAME_DATA} == {"sequence"}


@pytest.mark.parametrize("zero", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_recipe_of_ddp_shards_with_deepspeed(zero: int) -> None:
    recipe = TrainingRecipe(model="llama3.1-8b", engine="ddp", gpus=8, checkpointing=True, liger="all")
    sharded = dataclasses.replace(recipe, engine="deepspeed", precision="mixed", zero=zero)

    advice = advise(recipe, estimating(estimate(sharded).reserved_bytes))

    assert [step.change.name for step in advice.applied][-1] == f"zero-{zero}"
    assert advice.plan == sharded
    assert_adds_up(advice)


@pytest.mark.slow
def test_offload_stays_within_main_memory() -> None:
    recipe = TrainingRecipe(model="llama3.1-8b", precision="mixed", engine="deepspeed", zero=2, liger="all")
    judge = estimating(40 * GIB)
    free = advise(recipe, judge)
    host_bytes = free.host_bytes
    assert free.plan.offload != "none"
    assert free.fits

    # steps on the way keep more
    kept = advise(recipe, judge, host_limit_bytes=host_bytes)
    tight = advise(recipe, judge, host_limit_bytes=GIB // 4)

    assert kept.plan == free.plan
    assert (tight.plan.offload, tight.fits) == ("none", True)
    reasons = {step.change.name: step.reason or "" for step in tight.steps}
    assert reasons["offload-optimizer"].endswith("of main memory; the limit is 256.0 MiB")
    over = advise(free.plan, judge, host_limit_bytes=GIB)
    assert (over.plan_verdict.fits, over.fits_host, over.fits) == (True, False, False)


@pytest.mark.parametrize(
    ("options", "gib", "plan"),
    [
        # ZeRO-2 and kernels come first, and ZeRO-3 does without both
        ({"model": "llama3.1-8b", "engine": "ddp", "gpus": 8, "checkpointing": True}, 28, ["zero-3"]),
        ({"model": "llama3.2-1b", "precision": "fp32", "batch": 2, "seq": 2048}, 24, ["expandable-segments"]),
    ],
)
def test_a_plan_keeps_no_free_change_that_it_does_not_need(options: dict[str, Any], gib: int, plan: list[str]) -> None:
    judge = estimating(gib * GIB)
    advice = advise(TrainingRecipe(**options), judge)
    assert [step.change.name for step in advice.applied] == plan
    assert_every_change_is_needed(advice, judge)
    assert_adds_up(advice)


def test_unpriced_rungs_are_listed_with_the_reason() -> None:
    # the estimate does not cover 4-bit weights under DeepSpeed
    recipe = TrainingRecipe(qlora=8)

    steps = {step.change.name: step for step in advise(recipe, estimating(GIB)).steps}

    assert steps["offload-optimizer"].state == "unpriced"
    assert "--lora" in (steps["offload-optimizer"].reason or "")
    assert steps["zero-2"].reason == "needs several GPUs"


def test_expandable_segments_solve_fragmentation_before_more_expensive_rungs() -> None:
    recipe = TrainingRecipe()
    limit_bytes = needed_bytes(recipe) + 1000

    def check(recipe: TrainingRecipe) -> Reserved:
        stranded_bytes = 0 if recipe.alloc_conf else 1001
        reserved_bytes = needed_bytes(recipe) + stranded_bytes
        return Reserved(first_bytes=reserved_bytes, steady_bytes=0, fits=reserved_bytes <= limit_bytes)

    advice = advise(recipe, Judge(Limit(size_bytes=limit_bytes, source="a test"), check))

    assert [step.change.name for step in advice.applied] == ["expandable-segments"]
    assert advice.plan == dataclasses.replace(recipe, alloc_conf="expandable_segments:True")
    assert advice.plan_verdict.checked == "simulated"
    assert_adds_up(advice)


def test_other_allocator_settings_are_kept() -> None:
    recipe = TrainingRecipe(alloc_conf="garbage_collection_threshold:0.8")
    (changed,) = expandable_segments.outcome(recipe)
    assert isinstance(changed, TrainingRecipe)
    assert changed.alloc_conf == "garbage_collection_threshold:0.8,expandable_segments:True"
    assert isinstance(expandable_segments.outcome(changed), str)


def test_a_plan_is_simulated_if_the_simulator_supports_it() -> None:
    recipe = TrainingRecipe(batch=8, gpu="rtx4090")

    def check(recipe: TrainingRecipe) -> Reserved:
        if recipe.engine == "deepspeed":
            raise UnsupportedError("simulate: --engine deepspeed is not built yet.")
        return Reserved(first_bytes=0, steady_bytes=recipe.tokens, fits=bool(recipe.kernels))

    advice = advise(recipe, Judge(find_limit(recipe), check))
    assert (advice.verdict.fits, advice.verdict.checked) == (False, "simulated")
    assert (advice.plan_verdict.fits, advice.plan_verdict.checked) == (True, "simulated")
    assert [step.change.name for step in advice.applied] == ["kernels"]

    offloaded = advise(TrainingRecipe(model="llama3.1-8b", gpu="rtx4090"), Judge(find_limit(recipe), check_refused))
    # DeepSpeed clones the flat weights on the GPU before it offloads the optimizer
    assert offloaded.plan.offload == "all"
    assert (offloaded.plan_verdict.checked, offloaded.plan_verdict.reason) == ("closed form", "not today")


def check_refused(_recipe: TrainingRecipe) -> Reserved:
    raise UnsupportedError("not today")


@pytest.mark.parametrize(
    "recipe",
    [
        TrainingRecipe(),
        TrainingRecipe(batch=3, seq=77, grad_accum=2, padding=0.25, liger="rms+flce", provider="liger"),
        TrainingRecipe(flce_budget=2**20, precision="bf16", checkpointing=False, optimizer="sgd", clip=0.5),
        TrainingRecipe(reentrant=True, attention="eager", loss="hf-4.45", lora=4, gpu="t4", warmup=2, repeats=3),
        TrainingRecipe(
            memory_limit_bytes=12345678, alloc_conf="expandable_segments:True", clip=0.0, device="simulated"
        ),
        TrainingRecipe(engine="deepspeed", precision="mixed", zero=3, offload="all", gpus=2),
        TrainingRecipe(engine="fsdp2", precision="mixed", gpus=4, replicate=2, reduce_dtype="bfloat16", reshard=False),
        TrainingRecipe(engine="ddp", gpus=2, bucket_view=True, grad_sync="every", warmup=3),
        TrainingRecipe(engine="deepspeed", precision="mixed-fp16", zero=2, clip=2.0, optimizer="adamw-foreach"),
        TrainingRecipe(engine="deepspeed", precision="mixed", zero=3, offload="nvme", nvme_path="."),
    ],
    ids=lambda recipe: " ".join(recipe_flags(recipe)[2:]) or "default",
)
def test_flags_reproduce_the_recipe(recipe: TrainingRecipe) -> None:
    seen: list[TrainingRecipe] = []

    @click.command()
    @recipe_options
    def command(recipe: TrainingRecipe) -> None:
        """Record the recipe of the options."""
        seen.append(recipe)

    result = CliRunner().invoke(command, list(recipe_flags(recipe)))

    assert result.exit_code == 0, result.output
    assert seen == [recipe]


@pytest.mark.slow
def test_kernels_that_save_nothing_are_not_applied() -> None:
    # the peak is weights, gradients and moments in the optimizer's step, where no kernel runs
    recipe = TrainingRecipe(model="llama3.1-8b", gpu="rtx4090")
    advice = advise(recipe, estimating(24 * GIB))
    kernels = next(step for step in advice.steps if step.change.name == "kernels")
    assert all(step.saved_bytes for step in advice.applied)
    assert kernels.state != "applied" or (kernels.saved_bytes or 0) > 0
    assert advice.plan_verdict.fits


def test_dropout_of_adapters_is_taken_out_before_anything_that_costs_time() -> None:
    options = {"precision": "bf16-amp", "liger": "all", "checkpointing": False}
    dropping = TrainingRecipe(model="llama3.2-1b", lora=16, lora_dropout=0.05, **options)
    plain = dataclasses.replace(dropping, lora_dropout=0.0)
    advice = advise(dropping, estimating(needed_bytes(dropping) - 1))
    assert advice.plan == plain
    (step,) = advice.applied
    assert (step.change.name, step.saved_bytes) == ("lora-dropout", needed_bytes(dropping) - needed_bytes(plain))
    assert step.change.outcome(plain) == "no adapter has dropout"
