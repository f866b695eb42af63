"""What an architecture is, only its row says."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from ligerprof.kernels.norm.triton import CASTINGS
from ligerprof.models import ARCHITECTURES
from tests.sampling import sampled

PACKAGE = Path(__file__).parents[2] / "ligerprof"
# words that happen to be model types too
OTHER_MEANINGS = {
    ("kernels/providers/liger/functions.py", "gemma"): "Liger's casting mode",
    ("kernels/providers/liger/functions.py", "llama"): "Liger's casting mode",
    ("analyzers/step_time/account.py", "experts"): "an option",
    ("recipe/conflicts.py", "experts"): "an option",
    ("recipe/configs/settings.py", "experts"): "an option",
    ("recipe/configs/settings.py", "router"): "an option",
    ("runs/bench/records.py", "llama"): "a set of shapes",
}

# lists that another package has: what liger-kernel supports, the layers that open-instruct adapts, torchtitan's layers
LISTS = {
    "kernels/providers/liger/model_types.py",
    "recipe/configs/open_instruct.py",
    "recipe/configs/torchtitan.py",
}


def modules_outside_models() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith("models/") and name not in LISTS:
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def names_in_rows() -> set[str]:
    """Model types, and names of modules that mean nothing else."""
    dotted = {
        name
        for row in ARCHITECTURES.values()
        for name in (row.embedding, row.positions, row.final_norm, row.head, *(item.name for item in row.tensors))
        if name is not None
    }
    leaves = {name.rpartition(".")[2] for name in dotted} - {"norm", "gate"}
    return dotted | leaves | set(ARCHITECTURES)


def test_no_model_type_is_compared_outside_models() -> None:
    compared = [
        f"{name}:{node.lineno}"
        for name, tree in modules_outside_models()
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and any(isinstance(side, ast.Attribute) and side.attr == "model_type" for side in ast.walk(node))
    ]
    assert compared == []


def test_no_name_of_a_row_is_written_outside_models() -> None:
    names = names_in_rows()
    written = {
        (name, node.value)
        for name, tree in modules_outside_models()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
        # the norms' casting modes have the names that liger-kernel gave them
        if not (name.startswith("kernels/norm/") and node.value in CASTINGS)
    }
    assert written == set(OTHER_MEANINGS)


@sampled("model_type", sorted(ARCHITECTURES), every=6)
def test_peft_chooses_the_layers_of_the_row(model_type: str) -> None:
    constants = pytest.importorskip("peft.utils.constants")
    chosen = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model_type, ())
    row = ARCHITECTURES[model_type]
    assert row.peft_targets == tuple(name for name in chosen if name in row.lora_targets)
