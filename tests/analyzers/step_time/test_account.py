"""The work of a step against torch's own counter of operations, on real models on the CPU, and against formulas."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ligerprof.analyzers.step_time.account import account, predicted_time
from ligerprof.analyzers.step_time.rates import Kind, Ledger, Part
from ligerprof.errors import UnsupportedError
from ligerprof.models import load_model, spec_from_config
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.training import built_model, make_batch

aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)


def tiny(**options: Any) -> TrainingRecipe:
    return TrainingRecipe(**{"model": "tiny", "batch": 2, "seq": 64, "precision": "bf16", **options})


def multiplied(ledger: Ledger, *parts: Part) -> float:
    """Operations of products."""
    return sum(
        work.flops * times
        for (part, work), times in ledger.work.items()
        if work.kind is Kind.PRODUCTS and part in (parts or Part)
    )


@pytest.mark.parametrize(
    "options",
    [
        {"checkpointing": False},
        {"checkpointing": True},
        {"checkpointing": True, "checkpoint_every": 2},
        {"checkpointing": False, "attention": "eager", "precision": "fp32"},
        {"checkpointing": True, "lora": 4},
    ],
    ids=str,
)
def test_products_are_those_that_torch_counts(options: dict[str, Any]) -> None:
    recipe = tiny(**options)
    with built_model(recipe, torch.device("cpu")) as model, FlopCounterMode(display=False) as counter:
        model(**make_batch(recipe, torch.device("cpu")), use_cache=False).loss.backward()
    counted = counter.get_flop_counts()["Global"]
    assert multiplied(account(recipe)) == sum(counted.get(operator, 0) for operator in PRODUCTS)


def test_parts_add_up_to_three_passes_and_a_recomputation() -> None:
    recipe = tiny(checkpointing=True)
    ledger = account(recipe)
    forward = multiplied(ledger, Part.FORWARD)
    # recomputation ends before the layer's last product, whose output nothing saves
    assert 0.5 * forward < multiplied(ledger, Part.RECOMPUTE) < forward
    assert multiplied(ledger, Part.BACKWARD) == 2 * forward
    head = 2 * recipe.tokens * recipe.spec.hidden_size * recipe.spec.vocab_size
    assert multiplied(ledger, Part.LOSS) == 3 * head
    assert multiplied(ledger, Part.OPTIMIZER) == 0


@pytest.mark.parametrize("kernels", ["all", "no-flce", "flce"])
def test_kernels_multiply_as_much_and_move_less(kernels: str) -> None:
    plain, fused = (account(tiny(checkpointing=False, liger=liger)) for liger in ("none", kernels))
    assert multiplied(fused) == multiplied(plain)
    assert fused.moved_bytes(Kind.MEMORY) < plain.moved_bytes(Kind.MEMORY)


def test_every_micro_batch_is_counted_and_the_update_once() -> None:
    one, three = (account(tiny(grad_accum=times)) for times in (1, 3))
    assert multiplied(three) == 3 * multiplied(one)
    updates = [[key for key in ledger.work if key[0] is Part.OPTIMIZER] for ledger in (one, three)]
    assert updates[0] == updates[1]
    added = three.moved_bytes(Kind.MEMORY) - 3 * one.moved_bytes(Kind.MEMORY)
    update = sum(work.moved_bytes for _, work in updates[0])
    weights = 2 * sum(parameter.elements for parameter in one_of_each(tiny()))
    # gradients of the second and the third micro-batch are added to those before
    assert added + 2 * update == pytest.approx(2 * 3 * weights, rel=0.01)


def one_of_each(recipe: TrainingRecipe) -> Any:
    from ligerprof.analyzers.estimate.static import make_weights

    return make_weights(recipe).values()


def test_layers_that_repeat_are_counted_one_by_one() -> None:
    config = load_model("tiny").config
    ledgers = [
        account(tiny(model=spec_from_config({**config, "num_hidden_layers": layers}, name=f"{layers}")))
        for layers in (2, 12)
    ]
    assert multiplied(ledgers[1], Part.FORWARD) == 6 * multiplied(ledgers[0], Part.FORWARD)


def test_more_tokens_take_longer_and_a_larger_batch_trains_more_per_second() -> None:
    small, large = (predicted_time(tiny(batch=batch, precision="bf16")) for batch in (1, 64))
    assert small.seconds < large.seconds
    assert small.tokens_per_second < large.tokens_per_second
    low, high = small.interval
    assert low < small.seconds < high


def test_a_data_sheet_has_a_wider_interval() -> None:
    recipe = TrainingRecipe(model="llama3.1-8b", batch=8, precision="bf16")
    widths = []
    for gpu in ("h200", "h100"):
        time = predicted_time(dataclasses.replace(recipe, gpu=gpu))
        widths.append((time.interval[1] - time.interval[0]) / time.seconds)
    assert widths[0] < widths[1]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"loss": "chunked-nll"}, "--loss chunked-nll"),
        ({"gpu": "mi300x"}, "rates"),
        ({"qlora": 8}, "quantized"),
        ({"optimizer": "adafactor"}, "--optimizer adafactor"),
    ],
    ids=str,
)
def test_what_is_not_known_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        predicted_time(tiny(**options))
