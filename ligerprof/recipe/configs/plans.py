"""Plans in the words of the files that a recipe comes from: what the files say once the plan is written into them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ligerprof.errors import RecipeError
from ligerprof.recipe.configs.edits import FileEdit, edit_files
from ligerprof.recipe.configs.load import load_options
from ligerprof.recipe.configs.spellings import SELF_CONTAINED
from ligerprof.recipe.training import TrainingRecipe

# variables of the environment, which no file sets
_OUTSIDE = frozenset({"alloc_conf"})
_KERNELS = frozenset({"liger", "provider"})
# options that frameworks derive from others: a plan has them from the files, and no change asks for them
_DERIVED = frozenset({"save_whole", "fp32_embedding_states"})


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenPlan:
    """A plan after it was written into files.

    Attributes:
        recipe: what the changed files say, together with the options for which they have no key.
        edits: the files with what changes; `missing` of each are the options for which no file has a key.
    """

    recipe: TrainingRecipe
    edits: tuple[FileEdit, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnFiles:
    """The files that a recipe comes from.

    Attributes:
        sources: as `load_recipe` takes them.
        given: options of the command line, which win over the files.
        files: each file and its framework.
        recipe: the recipe before any change.
        switches_kernels: whether the user switches fused kernels on in another place than the files.
    """

    sources: Sequence[str]
    given: Mapping[str, Any]
    files: Sequence[tuple[str, str]]
    recipe: TrainingRecipe
    switches_kernels: bool = False

    def write(self, plan: TrainingRecipe) -> WrittenPlan:
        """Write a plan into the files, and read them again: they may mean more than the plan asks for.

        Options of the command line that the plan changes are the files' from then on.

        Raises:
            LigerprofError: recipes cannot express what the files say then.
        """
        edits = edit_files(self.files, self.recipe, plan)
        if not edits:
            return WrittenPlan(recipe=plan, edits=())
        return self._completed(plan, edits, self._read_back(plan, edits))

    def settle(self, plan: TrainingRecipe) -> TrainingRecipe | str:
        """What the files say once a plan is written into them, or why they cannot say it.

        Files of a program that the user wrote leave to it what they have no key for, except fused kernels.

        Raises:
            LigerprofError: recipes cannot express what the files say then.
        """
        edits = edit_files(self.files, self.recipe, plan)
        if not edits:
            return plan
        spelled = edits[0].missing
        if "liger" in spelled and not self.switches_kernels and set(plan.kernels) - set(self.recipe.kernels):
            return self._without_keys([spelled["liger"]])
        whole = any(framework in SELF_CONTAINED for _, framework in self.files)
        outside = _OUTSIDE | _KERNELS if self.switches_kernels else _OUTSIDE
        said = self._read_back(plan, edits)
        missing = self._missing(plan, edits, said)
        refused = [typed for name, typed in missing.items() if name not in outside and (whole or name in _KERNELS)]
        if refused:
            return self._without_keys(refused)
        return self._completed(plan, edits, said).recipe

    def _completed(self, plan: TrainingRecipe, edits: Sequence[FileEdit], said: TrainingRecipe) -> WrittenPlan:
        """What the changed files say, with the options that a program sets."""
        missing = self._missing(plan, edits, said)
        try:
            recipe = replace(said, **{name: getattr(plan, name) for name in missing})
        except RecipeError:
            # options of a plan that is only half in the files do not go together
            recipe = plan
        return WrittenPlan(recipe=recipe, edits=tuple(replace(edit, missing=missing) for edit in edits))

    def _read_back(self, plan: TrainingRecipe, edits: Sequence[FileEdit]) -> TrainingRecipe:
        kept = {name: value for name, value in self.given.items() if self._is_same(plan, name)}
        options, _ = load_options(self.sources, kept, {edit.file: edit.values for edit in edits})
        said = TrainingRecipe(**options)
        return said if said.kernels else replace(said, provider=plan.provider)

    def _missing(self, plan: TrainingRecipe, edits: Sequence[FileEdit], said: TrainingRecipe) -> dict[str, str]:
        """The options for which no file has a key, as typed, and which the files do not imply."""
        found = ((name, typed) for name, typed in edits[0].missing.items() if name not in _DERIVED)
        return {name: typed for name, typed in found if getattr(said, name) != getattr(plan, name)}

    def _without_keys(self, options: Sequence[str]) -> str:
        # of a module:function, the function
        name = Path(self.files[0][0]).name.rpartition(":")[2]
        having = f"{name} has" if len(self.files) == 1 else "the files have"
        return f"{having} no key for {', '.join(options)}"

    def _is_same(self, plan: TrainingRecipe, name: str) -> bool:
        return bool(getattr(plan, name) == getattr(self.recipe, name))
