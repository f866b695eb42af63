"""What layers keep for backward after a change to the weights, for models that the estimate covers."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ligerprof.analyzers.attribution import frames
from ligerprof.analyzers.attribution.phases import phase_code
from ligerprof.analyzers.suggestions.case import Case
from ligerprof.analyzers.suggestions.checkpointing import input_of, interrupted_passes
from ligerprof.analyzers.suggestions.known_model import find_recipe
from ligerprof.analyzers.suggestions.replayed_change import Edit
from ligerprof.roles import Phase, Role
from ligerprof.snapshots.trace import Int64s

if TYPE_CHECKING:
    from ligerprof.analyzers.estimate.kept import KeptBytes
    from ligerprof.recipe.training import TrainingRecipe

_CHECKPOINTING = frames.CHECKPOINT + r":\w+$"


def known_recipe(case: Case) -> "TrainingRecipe | None":
    """The recorded training, if it is one of a model that the estimate covers; see `find_recipe`."""
    return case.once(find_recipe)


def keep_as(case: Case, edit: Edit, changed: "TrainingRecipe", *, without: tuple[Role, ...] = ()) -> None:
    """Hold for backward what a changed recipe keeps, in place of what the recorded one does.

    Args:
        without: roles that the edit has changed already.
    """
    passes, end = case.passes, case.replayed.last_moment + 1
    fewer = case.once(_fewer_bytes, changed, without)
    place = np.arange(len(passes)) - np.searchsorted(passes.span, passes.span)
    layer = np.minimum(place, len(fewer.layers) - 1)
    starts, stops = _backwards(case)
    ran = stops >= 0
    chosen = ran | interrupted_passes(case)
    stops = np.where(ran, stops + 1, end)
    edit.release(fewer.layers[layer[chosen]], passes.end[chosen] + 1, stops[chosen])
    span_ends = np.searchsorted(case.attribution.phases.spans, passes.span, "right")
    edit.release(fewer.casts[layer[chosen]], passes.end[chosen] + 1, span_ends[chosen] + 1)
    edit.release(fewer.recomputed[layer[ran]], starts[ran] + 1, stops[ran])
    first = chosen & (place == 0)
    edit.release(fewer.others, passes.first[first] + 1, stops[first])
    last = chosen & (place == len(fewer.layers) - 1)
    edit.release(fewer.head, passes.end[last] + 1, np.where(ran, starts + 1, end)[last])


def _backwards(case: Case) -> tuple[Int64s, Int64s]:
    """When each layer's backward, its recomputation included, starts and ends; -1 if it did not run.

    With checkpointing, a layer's input lives until then.
    """
    passes = case.passes
    if not case.program.checkpoints:
        return passes.recompute, passes.backward_last
    freed = np.where(passes.output >= 0, case.replayed.freed_by[passes.output], -1)
    same = np.append(False, passes.span[1:] == passes.span[:-1])
    inputs = np.array([input_of(case, place) for place in np.flatnonzero(~same).tolist()], dtype=np.int64)
    stops = np.append(-1, freed[:-1])
    stops[~same] = np.where(inputs >= 0, case.replayed.freed_by[inputs], -1)
    events = case.replayed.allocated_by[case.blocks_from(_CHECKPOINTING)]
    again = events[case.attribution.phases.codes_of(events) == phase_code(Phase.BACKWARD)]
    # the next layer runs backward first
    after = np.where(np.append(same[1:], False), freed, passes.end)
    starts = np.append(again, case.replayed.last_moment)[np.searchsorted(again, after)]
    return np.minimum(starts, stops), np.where(passes.output >= 0, stops, -1)


class _FewerBytes(NamedTuple):
    """Bytes that a changed recipe saves; negative where it keeps more.

    Attributes:
        layers: per layer, from its forward pass to the end of its backward pass.
        casts: autocast's copies of weights that no layer saves, per layer, to the end of the forward phase.
        recomputed: per layer, while it runs backward after it has been recomputed.
        head: what follows the layers.
        others: the embedding, and what layers share.
    """

    layers: Int64s
    casts: Int64s
    recomputed: Int64s
    head: int
    others: int


def _fewer_bytes(case: Case, changed: "TrainingRecipe", without: tuple[Role, ...]) -> _FewerBytes:
    from ligerprof.analyzers.estimate.kept import kept_bytes

    recipe = known_recipe(case)
    assert recipe is not None

    def total(held: Mapping[Role, int]) -> int:
        return sum(size_bytes for role, size_bytes in held.items() if role not in without)

    def totals(kept: "KeptBytes") -> Int64s:
        return np.array([total(held) for held in kept.layers], dtype=np.int64)

    old, new = kept_bytes(recipe), kept_bytes(changed)
    layers = totals(old) - totals(new)
    casts = recomputed = np.zeros_like(layers)
    if Role.WEIGHT_CASTS not in without:
        casts = np.array(old.casts, dtype=np.int64) - np.array(new.casts, dtype=np.int64)
    if recipe.checkpointing:
        again = [kept_bytes(dataclasses.replace(each, checkpointing=False)) for each in (recipe, changed)]
        recomputed = totals(again[0]) - totals(again[1]) - layers
    return _FewerBytes(
        layers=layers,
        casts=casts,
        recomputed=recomputed,
        head=total(old.head) - total(new.head),
        others=total(old.others) - total(new.others),
    )
