"""The arithmetic of docs/estimator-sharding.md: every line, and their sum, are the estimate's."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from ligerprof.cli.main import main
from ligerprof.models.architectures import layer_index
from ligerprof.recipe.training import TrainingRecipe
from tests.paths import REPOSITORY

COLUMNS = (("llama3.1-8b", 8), ("llama3.1-8b", 64), ("llama3.1-70b", 64))


def lines() -> Iterator[list[str]]:
    """Term, formula and figures of each line of the table."""
    text = (REPOSITORY / "docs" / "estimator-sharding.md").read_text(encoding="utf-8")
    _, table = text.split("| term | formula |", 1)
    for line in table.split("\n\n", 1)[0].splitlines()[2:]:
        term, formula, *figures = (cell.strip() for cell in line.strip("|").split("|"))
        yield [term, formula.strip("`"), *(figure.replace(",", "").strip("*") for figure in figures)]


def symbols(recipe: TrainingRecipe, roles: dict[str, int]) -> dict[str, Any]:
    spec = recipe.spec
    sizes = {"B": recipe.batch, "T": recipe.seq, "N": recipe.gpus, "L": spec.layers, "D": spec.head_dim}
    sizes |= {"H": spec.hidden_size, "V": spec.vocab_size, "F": spec.intermediate_size}
    sizes["P"] = sum(parameter.elements for parameter in spec.parameters)
    sizes["U"] = sum(parameter.elements for parameter in spec.parameters if layer_index(parameter.name) == 0)
    return {**sizes, "W": len(spec.parameters), "roles": type("Roles", (), roles)}


@pytest.mark.parametrize(("column", "of"), list(enumerate(COLUMNS)), ids=str)
def test_every_line_is_its_formula_and_they_add_up_to_the_estimate(column: int, of: tuple[str, int]) -> None:
    model, gpus = of
    recipe = TrainingRecipe(engine="fsdp2", precision="mixed", model=model, gpus=gpus)
    options = ["--engine", "fsdp2", "--precision", "mixed", "--model", model, "--gpus", str(gpus), "--json"]
    estimated = json.loads(CliRunner().invoke(main, ["estimate", *options]).stdout)
    known = symbols(recipe, estimated["roles"])
    total = 0
    for term, formula, *figures in lines():
        if not figures[column]:
            continue
        if term == "**peak**":
            assert int(figures[column]) == total == estimated["peak_bytes"]
            continue
        assert re.fullmatch(r"[A-Z0-9+*/() .a-z_-]+", formula), term
        assert eval(formula, {"__builtins__": {}}, known) == int(figures[column]), term
        total += int(figures[column])
    assert total == estimated["peak_bytes"]
