"""The operators that a simulated step runs, against the account of the estimate's operations."""

from typing import Any

import pytest

from ligerprof.analyzers.step_time.account import account
from ligerprof.analyzers.step_time.rates import Kind, Ledger, Part, step_time
from ligerprof.models import load_model, spec_from_config
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.simulated.worker import worker

# bytes of kernels other than products, whose temporaries the account derives from what they allocate
BYTES_TOLERANCE = 0.1


def counted(recipe: TrainingRecipe) -> Ledger:
    found = worker().run("tests.runs.simulated.step_work:count_here", recipe, lambda _text: None)
    assert isinstance(found, Ledger)
    return found


def flops(ledger: Ledger) -> dict[tuple[Part, Kind, str], float]:
    found: dict[tuple[Part, Kind, str], float] = {}
    for (part, work), times in ledger.work.items():
        if work.flops:
            key = part, work.kind, work.name
            found[key] = found.get(key, 0.0) + work.flops * times
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "amp", "liger": "all", "clip": 1.0, "grad_accum": 3},
        {"lora": 8, "checkpoint_every": 2, "optimizer": "adamw-foreach"},
    ],
    ids=str,
)
def test_counted_operators_are_those_of_the_account(options: dict[str, Any]) -> None:
    spec = spec_from_config({**load_model("smollm2-135m").config, "num_hidden_layers": 4}, name="four layers")
    recipe = TrainingRecipe(**{"model": spec, "batch": 4, "seq": 512, "precision": "bf16", **options})
    by_account, by_operators = account(recipe), counted(recipe)
    assert flops(by_account) == pytest.approx(flops(by_operators), rel=1e-9)
    moved = [ledger.moved_bytes(Kind.MEMORY) for ledger in (by_account, by_operators)]
    assert moved[0] == pytest.approx(moved[1], rel=BYTES_TOLERANCE)
    times = [step_time(ledger, "h200", recipe.tokens) for ledger in (by_account, by_operators)]
    seconds = [time.gpu_seconds for time in times if time is not None]
    assert seconds[0] == pytest.approx(seconds[1], rel=BYTES_TOLERANCE)
