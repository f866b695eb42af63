"""The attention masks of a decoder: which ones it makes, which layers receive one, and how long they live."""

from collections.abc import Sequence

from ligerprof.models.layer_tape import Step, mask_kind, mask_tape, masks_of
from ligerprof.recipe.categories import Attention
from ligerprof.recipe.routing import has_line_per_layer
from ligerprof.recipe.training import TrainingRecipe


def steps_of_mask(recipe: TrainingRecipe, function: str) -> Sequence[Step]:
    """What a function of transformers that makes masks allocates; flash attention needs no mask."""
    if recipe.attention is Attention.FLASH:
        return [["output", []]]
    packed = recipe.holds_several_documents and recipe.spec.architecture.masks_documents
    window = recipe.spec.layer_kinds.window_tokens
    kind = mask_kind(
        hides="padding" if recipe.padded_tokens else "documents" if packed else "",
        filled=window is not None and recipe.row_tokens >= window,
        eager=recipe.attention is Attention.EAGER,
    )
    return mask_tape(function, kind)


def masks_made(recipe: TrainingRecipe) -> tuple[bool, ...]:
    """The masks that the decoder makes: whether each is that of layers with a window."""
    functions = masks_of(recipe.spec)
    return tuple(windowed for windowed, name in functions.items() if steps_of_mask(recipe, name)[-1][1])


def has_mask(recipe: TrainingRecipe, index: int) -> bool:
    """Whether a decoder layer receives a mask."""
    kinds = recipe.spec.layer_kinds
    return not kinds.recurrent[index] and kinds.windowed[index] in masks_made(recipe)


def last_reader(recipe: TrainingRecipe, *, windowed: bool) -> int | None:
    """The checkpointed layer that is the last in backward to read a mask; None if no checkpointed layer does."""
    kinds = recipe.spec.layer_kinds
    attending = (index for index, recurrent in enumerate(kinds.recurrent) if not recurrent)
    readers = (index for index in attending if kinds.windowed[index] == windowed and recipe.checkpoints_layer(index))
    return next(readers, None)


def layer_memory_kinds(recipe: TrainingRecipe) -> list[tuple[object, ...]]:
    """What decides the memory of each decoder layer.

    A layer in the middle that is the last in backward to read a mask has a kind of its own, and so have layers that
    store keys and values, and the last ones that reuse them.
    """
    layers, kinds = recipe.spec.layers, recipe.spec.layer_kinds
    own = [
        (routing, recipe.checkpoints_layer(index), recipe.run_of_layer(index))
        for index, routing in enumerate(_routings(recipe))
    ]
    if len(kinds.examples) == 1:
        return list(own)
    made = masks_made(recipe)
    readers = {last_reader(recipe, windowed=windowed) for windowed in made} - {0, 1, layers - 1}
    each_layer = zip(range(layers), kinds.windowed, kinds.rotated, kinds.sparse, kinds.recurrent, own, strict=True)
    return [
        (windowed in made, rotated, sparse, recurrent, index if index in readers else -1, *of_recipe)
        for index, windowed, rotated, sparse, recurrent, of_recipe in each_layer
    ]


def _routings(recipe: TrainingRecipe) -> list[int]:
    """A number per layer: the same for layers whose experts receive the same numbers of tokens."""
    sparse = recipe.spec.layer_kinds.sparse
    if not recipe.runs_experts_in_turn or not has_line_per_layer(recipe.routing):
        return [0] * len(sparse)
    return [sum(sparse[: index + 1]) if is_sparse else 0 for index, is_sparse in enumerate(sparse)]
