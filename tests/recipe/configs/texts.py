"""Write configuration files and read them, for the tests of this folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ligerprof.recipe.configs.report import ConfigReport
from ligerprof.recipe.configs.resolve import load_recipe
from ligerprof.recipe.training import TrainingRecipe


def write(folder: Path, name: str, values: Mapping[str, Any] | str) -> str:
    path = folder / name
    path.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    return str(path)


def read(folder: Path, *documents: Mapping[str, Any], **given: Any) -> tuple[TrainingRecipe, ConfigReport]:
    names = [write(folder, f"config-{index}.json", values) for index, values in enumerate(documents)]
    return load_recipe(names, given)
