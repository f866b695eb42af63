"""What the sizes of a step's allocations depend on: functions of a micro-batch's shape."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache

from ligerprof.analyzers.estimate import kernel_calls
from ligerprof.kernels.spec import KernelMemory, KernelShape, KernelSpec
from ligerprof.models import ModelSpec
from ligerprof.recipe.lengths import BatchShape, recipe_of
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.torch_memory.dtypes import FP32_BYTES, HALF_BYTES
from ligerprof.torch_memory.reductions import column_sum_scratch
from ligerprof.torch_memory.sorting import ROWS_PER_PART, EmbeddingGradient, embedding_gradient

Count = Callable[[BatchShape], int]

# what kernels round tokens up to: vectors, warps, tiles
_MULTIPLES = tuple(2**power for power in range(1, 11))


def total_tokens(shape: BatchShape) -> int:
    """Tokens of all rows."""
    return shape.rows * shape.tokens


def _rounded(multiple: int) -> Count:
    return lambda shape: -(-total_tokens(shape) // multiple)


def _parts(shape: BatchShape) -> int:
    return total_tokens(shape) // ROWS_PER_PART


def _rows_rounded(multiple: int) -> Count:
    return lambda shape: -(-shape.tokens // multiple)


def _scores_rounded(multiple: int) -> Count:
    """Scores of one row whose keys are rounded."""
    return lambda shape: shape.tokens * -(-shape.tokens // multiple)


_ROUNDED: tuple[Count, ...] = (
    _parts,
    *map(_rows_rounded, _MULTIPLES),
    *map(_scores_rounded, _MULTIPLES),
    *map(_rounded, _MULTIPLES),
)


def known_counts(recipe: TrainingRecipe, shape: BatchShape) -> tuple[Count, ...]:
    """What sizes may depend on besides the tokens: rounded tokens, and the bytes of operators whose rule is known.

    Args:
        shape: any micro-batch of the run.
    """
    return (*_stated_by_kernels(recipe, shape), *_of_embeddings(recipe.spec), *_of_sums(recipe), *_ROUNDED)


def _of_embeddings(spec: ModelSpec) -> Iterator[Count]:
    yield from _of_embedding(spec.vocab_size, spec.hidden_size)
    if spec.streams is not None:
        yield from _of_embedding(spec.streams.vocabulary, spec.layers * spec.streams.width)


def _of_embedding(rows: int, width: int) -> Iterator[Count]:
    """The storage that sorts the tokens and sums the rows of equal ones."""

    @cache
    def gradient(tokens: int) -> EmbeddingGradient | None:
        return embedding_gradient(tokens, rows, width)

    def field(name: str) -> Count:
        # 0 for tokens that are not sorted
        return lambda shape: getattr(gradient(total_tokens(shape)), name, 0)

    yield from map(field, ("sort_bytes", "rank_scan_bytes", "segment_bytes", "segment_scan_bytes"))


def _of_sums(recipe: TrainingRecipe) -> Iterator[Count]:
    """Partial results of sums over tokens, as the gradients of norms' weights and of biases are."""

    def partial(columns: int, element_bytes: int) -> Count:
        return lambda shape: max(column_sum_scratch(total_tokens(shape), columns, element_bytes, gpu), default=0)

    gpu, spec = recipe.gpu_spec, recipe.spec
    columns = {spec.hidden_size, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.intermediate_size}
    for width in sorted(columns):
        yield from (partial(width, element_bytes) for element_bytes in (HALF_BYTES, FP32_BYTES))


def _stated_by_kernels(recipe: TrainingRecipe, shape: BatchShape) -> Iterator[Count]:
    """Nothing if the estimate does not cover the model."""
    if recipe.spec.no_estimate_reason is not None:
        return
    for kernel, call in kernel_calls(recipe_of(recipe, shape)):
        # a norm of queries or keys has several vectors per token
        vectors, rest = divmod(call.tokens, total_tokens(shape))
        if rest == 0:
            yield from _stated(kernel, call, vectors)


def _stated(kernel: KernelSpec, call: KernelShape, vectors: int) -> Iterator[Count]:
    @cache
    def memory(shape: BatchShape) -> KernelMemory:
        assert kernel.memory is not None, "kernel_calls returns kernels with a stated memory"
        return kernel.memory(replace(call, tokens=vectors * total_tokens(shape), sequences=shape.rows))

    def stated(name: str) -> Count:
        return lambda shape: getattr(memory(shape), name)

    yield from (stated(field.name) for field in fields(KernelMemory) if field.name.endswith("_bytes"))
