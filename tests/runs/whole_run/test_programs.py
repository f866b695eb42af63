"""Programs of all lengths against a tracer whose sizes follow the rules of CUDA's operators and of our kernels."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ligerprof.errors import UnsupportedError
from ligerprof.kernels.linear_cross_entropy.plan import plan_chunks
from ligerprof.recipe.lengths import BatchShape
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.whole_run.programs import Programs, Trace, known_counts
from ligerprof.torch_memory.attention import mask_padding
from ligerprof.torch_memory.reductions import column_sum_scratch
from ligerprof.torch_memory.sorting import embedding_gradient


def step_of(recipe: TrainingRecipe, shape: BatchShape) -> tuple[Trace, ...]:
    """A step of one part, whose sizes follow rules of many kinds."""
    spec, tokens = recipe.spec, shape.rows * shape.tokens
    plan = plan_chunks(
        tokens=tokens,
        hidden=spec.hidden_size,
        vocab=spec.vocab_size,
        element_bytes=2,
        budget="balanced",
        gradient_bytes=4,
    )
    sizes = [8 * tokens, tokens * spec.hidden_size * 2, spec.vocab_size * spec.hidden_size * 4, plan.workspace_bytes]
    sizes += [shape.rows * spec.heads * -(-shape.tokens // 32) * 128, shape.rows * shape.tokens * shape.tokens]
    if shape.masked and mask_padding(shape.tokens):
        sizes.append(shape.rows * shape.tokens * (shape.tokens + mask_padding(shape.tokens)) * 2)
    if gradient := embedding_gradient(tokens, spec.vocab_size, spec.hidden_size):
        sizes += [gradient.index_bytes, gradient.sort_bytes, gradient.rank_scan_bytes, gradient.segment_scan_bytes]
        sizes += gradient.part_sizes
    sizes += [size for size in column_sum_scratch(tokens, spec.hidden_size, 4, recipe.gpu_spec) if size > 0]
    count = len(sizes)
    return (Trace(operations=(0,) * count + tuple(range(1, count + 1)), sizes=tuple(sizes)),)


def known_step(programs: Programs, shape: BatchShape) -> tuple[Trace, ...]:
    """The only part of a step, as the programs know it."""
    program, column = programs.program(shape, 0)
    sizes = program.sizes[program.rows, column]
    return (Trace(operations=tuple(program.operations.tolist()), sizes=tuple(sizes.tolist())),)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 20), masked=st.booleans(), gpu=st.sampled_from(["h200", "4090"]))
def test_every_length_has_the_sizes_of_its_trace(seed: int, rows: int, masked: bool, gpu: str) -> None:
    random = Random(seed)
    recipe = TrainingRecipe(model="llama3.2-1b", batch=rows, seq=2048, liger="all", gpu=gpu)
    lengths = {min(2048, max(16, int(random.lognormvariate(5.5, 0.8)))) for _ in range(400)}
    shapes = [BatchShape(rows=rows, tokens=tokens, masked=masked) for tokens in sorted(lengths)]
    programs = Programs(lambda shape: step_of(recipe, shape), shapes, known_counts(recipe, shapes[-1]))
    wrong = [shape for shape in shapes if known_step(programs, shape) != step_of(recipe, shape)]
    assert wrong == []
    assert programs.bounded_bytes == 0
    assert len(programs.traced) < len(shapes) / 4


@pytest.mark.parametrize("size_bytes", [600_000, 6_000_000])
def test_a_size_that_follows_no_rule_is_bounded_if_small_and_refused_otherwise(size_bytes: int) -> None:
    random = Random(1)
    recipe = TrainingRecipe(model="tiny")
    noise = {tokens: random.randrange(size_bytes // 2, size_bytes) for tokens in range(1, 500)}
    shapes = [BatchShape(rows=1, tokens=tokens) for tokens in noise]

    def tracer(shape: BatchShape) -> tuple[Trace, ...]:
        return (Trace(operations=(0, 1), sizes=(noise[shape.tokens],)),)

    if size_bytes > 2**20:
        with pytest.raises(UnsupportedError, match="follows no simple function of the length near"):
            Programs(tracer, shapes, known_counts(recipe, shapes[-1]))
    else:
        programs = Programs(tracer, shapes, known_counts(recipe, shapes[-1]))
        assert size_bytes // 2 < programs.bounded_bytes < size_bytes
