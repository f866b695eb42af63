"""The attention masks of a decoder: which ones it makes, which layers receive one, and how long they live."""

from ligerprof.recipe.categories import Attention
from ligerprof.recipe.routing import has_line_per_layer
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.torch_memory.dtypes import Scratch


def mask_elements(recipe: TrainingRecipe, *, windowed: bool) -> int:
    """Elements of the mask of layers with or without a window: SDPA has none if its causal flag is enough."""
    if recipe.attention is Attention.FLASH:
        return 0
    square = recipe.row_tokens**2
    if recipe.attention is Attention.EAGER or keeps_tokens_apart(recipe):
        return recipe.rows * square
    # a window alone is the same for every sequence: `sdpa_mask` expands one
    return square if windowed and fills_window(recipe) else 0


def mask_scratch(recipe: TrainingRecipe, *, windowed: bool) -> Scratch:
    """The booleans of one sequence that a mask is made of, if it hides neither padding nor documents (`sdpa_mask`).

    The causal ones are joined with those of the window; eager attention makes numbers of the result.
    """
    square = recipe.row_tokens**2
    if keeps_tokens_apart(recipe):
        return ()
    window = (square, square, -square, square) if windowed else ()
    return (
        *window,
        *(((square, -square, -square) if windowed else (square,)) if recipe.attention is Attention.EAGER else ()),
    )


def keeps_tokens_apart(recipe: TrainingRecipe) -> bool:
    """Whether a mask hides padding or other documents (`find_packed_sequence_indices` in masking_utils.py)."""
    return recipe.padding > 0 or (recipe.holds_several_documents and recipe.spec.architecture.masks_documents)


def masks_made(recipe: TrainingRecipe) -> tuple[bool, ...]:
    """The masks that the decoder makes, in order: whether each is that of layers with a window."""
    spec = recipe.spec
    made = (False, True) if spec.makes_both_masks else (any(spec.layer_kinds.windowed),)
    return tuple(windowed for windowed in made if mask_elements(recipe, windowed=windowed))


def has_mask(recipe: TrainingRecipe, index: int) -> bool:
    """Whether a decoder layer receives a mask."""
    kinds = recipe.spec.layer_kinds
    return not kinds.recurrent[index] and mask_elements(recipe, windowed=kinds.windowed[index]) > 0


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
    masked = {windowed: mask_elements(recipe, windowed=windowed) > 0 for windowed in set(kinds.windowed)}
    readers = {last_reader(recipe, windowed=windowed) for windowed in masks_made(recipe)} - {0, 1, layers - 1}
    each_layer = zip(range(layers), kinds.windowed, kinds.rotated, kinds.sparse, kinds.recurrent, own, strict=True)
    return [
        (masked[windowed], rotated, sparse, recurrent, index if index in readers else -1, *of_recipe)
        for index, windowed, rotated, sparse, recurrent, of_recipe in each_layer
    ]


def _routings(recipe: TrainingRecipe) -> list[int]:
    """A number per layer: the same for layers whose experts receive the same numbers of tokens."""
    sparse = recipe.spec.layer_kinds.sparse
    if not recipe.runs_experts_in_turn or not has_line_per_layer(recipe.routing):
        return [0] * len(sparse)
    return [sum(sparse[: index + 1]) if is_sparse else 0 for index, is_sparse in enumerate(sparse)]


def fills_window(recipe: TrainingRecipe) -> bool:
    """Whether a sequence fills the window (`_ignore_causal_mask_sdpa` in masking_utils.py)."""
    window = recipe.spec.sliding_window
    return window is not None and recipe.row_tokens >= window
