"""Heads over a vocabulary that no linear layer's frame shows, and layers that only look like one."""

import pytest

from ligerprof.roles import Role
from tests.analyzers.attribution.recording import Call, Recording

VOCABULARY_ROLES = {Role.LOGITS, Role.SHIFT_LOGITS, Role.CE_TEMPORARIES}
LAYERS, WIDTH, TOKENS, WORDS = 6, 64, 512, 4001
MAIN: list[Call] = [("train.py", 90, "main"), ("train.py", 99, "<module>")]
MODULE: list[Call] = [("torch/nn/modules/module.py", 1790, "_call_impl")]
MODEL: list[Call] = [("model.py", 70, "forward"), *MODULE, *MAIN]
LINEAR: list[Call] = [("torch/nn/modules/linear.py", 134, "forward"), *MODULE]
LAYER: list[Call] = [("model.py", 30, "forward"), *MODULE, *MODEL]
EMBEDDING: list[Call] = [("torch/nn/functional.py", 2500, "embedding"), ("torch/nn/modules/sparse.py", 190, "forward")]
BUILD: list[Call] = [("torch/nn/modules/module.py", 934, "_apply"), *MAIN]
ENGINE: list[Call] = [("??", 0, "torch::autograd::Engine::evaluate_function(x)")]
TABLE_NODE: Call = ("??", 0, "torch::autograd::generated::EmbeddingBackward0::apply(x)")
MATMUL: list[Call] = [("??", 0, "at::_ops::matmul::call(at::Tensor const&, at::Tensor const&)")]
LOSS: list[Call] = [("torch/nn/functional.py", 3400, "cross_entropy"), *MODEL]


def build(recording: Recording, *, wide: int, words: int = WORDS) -> None:
    for size in [words * WIDTH, *[WIDTH, WIDTH * wide, WIDTH * wide] * LAYERS]:
        recording.alloc(4 * size, BUILD)


def train(
    head: list[Call], *, loss: list[Call], steps: int = 2, wide: int = 4 * WIDTH, evaluates: bool = False
) -> list[Role]:
    """The roles of each step's head output, last layer's output and loss."""
    recording = Recording()
    build(recording, wide=wide)
    chosen: list[int] = []
    for _ in range(2):
        recording.alloc(8 * TOKENS, MAIN)
        saved = [recording.alloc(4 * TOKENS * WIDTH, [*EMBEDDING, *MODULE, *MODEL])]
        for _ in range(LAYERS):
            saved.append(recording.alloc(4 * TOKENS * wide, [*LINEAR, *LAYER]))
            saved.append(recording.alloc(4 * TOKENS * WIDTH, [*LINEAR, *LAYER]))
        widest = recording.count - 2
        logits = recording.alloc(4 * TOKENS * WORDS, head)
        chosen += [recording.count - 1, widest]
        if evaluates:
            for block in saved:
                recording.free(block)
            continue
        saved += [logits, recording.alloc(4 * TOKENS * WORDS, loss)]
        chosen.append(recording.count - 1)
        recording.free(recording.alloc(4 * TOKENS * WORDS, ENGINE))
        saved.append(recording.alloc(4 * WORDS * WIDTH, [TABLE_NODE, *ENGINE]))
        for block in saved:
            recording.free(block)
    roles = recording.roles()
    return [roles[place] for place in chosen]


@pytest.mark.parametrize("native", [False, True])
def test_product_with_a_table_is_the_head(native: bool) -> None:
    head = [*(MATMUL if native else ()), ("model.py", 60, "forward"), *MODULE, *MAIN]

    roles = train(head, loss=[*(MATMUL if native else ()), *LOSS])

    assert roles == [Role.LOGITS, Role.ACTIVATIONS, Role.CE_TEMPORARIES] * 2


def test_head_is_called_from_further_outside_than_layers_of_its_size() -> None:
    roles = train([*LINEAR, *MODEL], loss=LOSS, wide=WORDS)

    assert roles == [Role.LOGITS, Role.ACTIVATIONS, Role.CE_TEMPORARIES] * 2


def test_evaluation_without_a_loss_collects_logits() -> None:
    assert train([*LINEAR, *MODEL], loss=[], evaluates=True) == [Role.LOGITS, Role.ACTIVATIONS] * 2


def test_generation_without_a_loss_has_no_logits() -> None:
    head = [*LINEAR, *MODEL[:-2], ("transformers/generation/utils.py", 2000, "generate"), *MAIN]

    assert train(head, loss=[], evaluates=True) == [Role.ACTIVATIONS, Role.ACTIVATIONS] * 2


def generated(line: int, *source: Call, backward: bool = False) -> list[Call]:
    inductor: list[Call] = [
        ("torch/_inductor/utils.py", 3400, "run"),
        ("torch/_inductor/output_code.py", 656, "__call__"),
    ]
    forward: list[Call] = [("torch/_functorch/aot_autograd.py", 1200, "forward"), *MODEL]
    return [
        *(ENGINE if backward else ()),
        ("/tmp/cache/ab/cabc.py", line, "call"),
        *source,
        *inductor,
        *([("torch/_functorch/_aot_autograd/runtime_wrappers.py", 2700, "backward")] if backward else forward),
    ]


def compiled(
    output: int, hidden: int, gradients: list[int], *, weights: list[int], inputs: int, source: Call = MODEL[0]
) -> set[Role]:
    """Roles at any time of a compiled model: layers of [T, D], one output, its gradient and those of weights."""
    recording = Recording()
    for size in weights:
        recording.alloc(size, BUILD)
    for _ in range(2):
        saved = [recording.alloc(inputs, MAIN)]
        saved += [recording.alloc(hidden, generated(line, ("model.py", line, "forward"))) for line in range(LAYERS)]
        saved.append(recording.alloc(output, generated(50, ("model.py", 60, "forward"))))
        saved.append(recording.alloc(4 * TOKENS, generated(51, source)))
        recording.free(recording.alloc(output, generated(80, source, backward=True)))
        kept = [recording.alloc(size, generated(90 + line, backward=True)) for line, size in enumerate(gradients)]
        for block in saved:
            recording.free(block)
        step: list[Call] = [("torch/optim/sgd.py", 80, "step"), ("torch/optim/optimizer.py", 500, "wrapper"), *MAIN]
        recording.free(recording.alloc(8, step))
        for block in kept:
            recording.free(block)
    return set(recording.roles())


TABLE = 4 * WORDS * WIDTH
SQUARE = 4 * WIDTH * WIDTH
PADDED_WORDS = -(-WORDS // 8) * 8


@pytest.mark.parametrize("words", [WORDS, PADDED_WORDS])
def test_head_of_generated_code_fits_its_table_tokens_and_gradients(words: int) -> None:
    roles = compiled(
        2 * TOKENS * words,
        2 * TOKENS * WIDTH,
        [TABLE, SQUARE, TABLE],
        weights=[TABLE, SQUARE, 4 * WIDTH],
        inputs=8 * TOKENS,
    )
    assert {Role.LOGITS, Role.CE_TEMPORARIES, Role.GRADIENTS} <= roles


def test_head_of_generated_code_has_the_lines_of_a_library_loss() -> None:
    source = ("transformers/loss/loss_utils.py", 59, "ForCausalLMLoss")
    roles = compiled(2 * TOKENS * WORDS, 2 * TOKENS * WIDTH, [TABLE], weights=[], inputs=8 * TOKENS, source=source)
    assert {Role.LOGITS, Role.CE_TEMPORARIES} <= roles


@pytest.mark.parametrize(
    ("output", "gradients", "weights", "inputs"),
    [
        # an autoencoder: the weights of its ends are alike, and its inputs are images
        (WORDS, [TABLE, SQUARE, TABLE], [TABLE, SQUARE, TABLE, 4 * WIDTH], 4 * TOKENS * WORDS),
        # a classifier: one label per image, but one gradient per weight
        (WORDS, [TABLE, SQUARE, SQUARE], [TABLE, SQUARE, SQUARE, 4 * WIDTH], 8 * TOKENS),
        # equal layers
        (WIDTH, [SQUARE, SQUARE, SQUARE], [SQUARE, SQUARE, SQUARE, 4 * WIDTH], 8 * TOKENS),
    ],
    ids=["autoencoder", "classifier", "equal layers"],
)
def test_generated_code_without_a_vocabulary_has_no_logits(
    output: int, gradients: list[int], weights: list[int], inputs: int
) -> None:
    roles = compiled(2 * TOKENS * output, 2 * TOKENS * WIDTH, gradients, weights=weights, inputs=inputs)
    assert not VOCABULARY_ROLES & roles
