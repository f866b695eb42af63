import json
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from ligerprof.analyzers.estimate import estimate
from ligerprof.analyzers.estimate.compared import COMPARISONS, compared_with
from ligerprof.recipe.categories import Engine, Offload
from ligerprof.recipe.training import TrainingRecipe
from tests.analyzers.estimate.test_truth import drawn_recipe_of
from tests.paths import RESULTS


def measured(source: str) -> Iterator[tuple[TrainingRecipe, int]]:
    """Recipes and steady peaks of the steps in a file of results."""
    for line in (RESULTS / source).read_text(encoding="utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        if row.get("kind", "row") != "row" or row.get("oom") is not None:
            continue
        if "options" in row:
            # fused kernels have changed since
            if row["options"].get("liger", "none") == "none":
                yield drawn_recipe_of(row), row["peak_bytes"]
            continue
        recipe = TrainingRecipe.from_json(row["recipe"])
        steady = recipe.warmup
        yield recipe, row.get("peak_bytes") or max(rank["peaks"][steady] for rank in row["ranks"])


@pytest.mark.slow
def test_stated_errors_are_those_of_the_committed_steps() -> None:
    errors: dict[Any, list[float]] = defaultdict(list)
    for source in {comparison.source for comparison in COMPARISONS.values()}:
        for recipe, peak_bytes in measured(source):
            found = compared_with(recipe)
            assert found is not None, recipe.summary
            assert found.source == source
            errors[found].append(abs(estimate(recipe).peak_bytes / peak_bytes - 1))
    for comparison in COMPARISONS.values():
        worst = math.ceil(1e4 * max(errors[comparison])) / 1e4
        assert (comparison.steps, comparison.worst_error_ratio) == (len(errors[comparison]), pytest.approx(worst))


def test_an_engine_without_measured_steps_has_no_bound() -> None:
    recipe = TrainingRecipe(engine="deepspeed", precision="mixed", zero=3, offload="nvme", nvme_path="/tmp")
    assert (recipe.engine, recipe.offload) == (Engine.DEEPSPEED, Offload.NVME)
    assert compared_with(recipe) is None
    assert estimate(recipe).to_json()["compared"] is None
    assert "NVMe offload follows DeepSpeed's source; it was never measured" in estimate(recipe).assumed
