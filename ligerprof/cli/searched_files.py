"""The --config files of a command that searches for changes: what they can say, and how their frameworks shard."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ligerprof.cli.options import was_given
from ligerprof.cli.output import config_report, config_sources
from ligerprof.recipe.categories import Engine, ReduceDtype, Wrap
from ligerprof.recipe.configs.edits import OwnFiles, switch_liger
from ligerprof.recipe.configs.sources import OWN
from ligerprof.recipe.configs.torchtitan import NAME as TORCHTITAN
from ligerprof.recipe.training import TrainingRecipe

if TYPE_CHECKING:
    from ligerprof.analyzers.search.changes import Change, Sharding


def recipe_and_files(recipe: TrainingRecipe) -> tuple[TrainingRecipe, OwnFiles]:
    """The running command's recipe and its --config files; the kernels are those that the files switch on."""
    report, (sources, given) = config_report(), config_sources()
    files, chosen = () if report is None else report.files, was_given("provider")
    if not recipe.kernels and not chosen and switch_liger(files):
        recipe = replace(recipe, provider="liger")
    return recipe, OwnFiles(sources=sources, given=given, files=files, recipe=recipe, switches_kernels=chosen)


def sharding_of(frameworks: Collection[str], engine: Engine | None) -> "Sharding":
    """How the frameworks of the files shard: torchtitan by FSDP2 alone; it and accelerate have groups of their own."""
    from ligerprof.analyzers.search.changes import Sharding

    if TORCHTITAN in frameworks:
        return Sharding(engine=engine or Engine.FSDP2, wrap=Wrap.ACCELERATE, reduce_dtype=ReduceDtype.FLOAT32)
    first = engine or Engine.DEEPSPEED
    if not frameworks or OWN in frameworks:
        return Sharding(engine=first)
    return Sharding(engine=first, wrap=Wrap.ACCELERATE, reduce_dtype=ReduceDtype.BFLOAT16)


def changes_of(own: OwnFiles) -> "Mapping[str, Sequence[Change]]":
    """The changes of `fit`, which keep the sequence, as the files can say them."""
    from ligerprof.analyzers.search.changes import NEAREST, make_ladder, same_data, settled

    ladder = same_data(make_ladder(sharding_of({framework for _, framework in own.files}, None)))
    changes = {"ladder": ladder, "nearest": NEAREST}
    return {name: settled(each, own.settle) for name, each in changes.items()} if own.files else changes
