"""Rows that are read in pairs of words, against the losses' references in fp64; they are only a few tiles wide."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerprof.kernels.cross_entropy.reference import cross_entropy_outputs as ce_reference
from ligerprof.kernels.linear_cross_entropy.blocks import split_words
from ligerprof.kernels.linear_cross_entropy.plan import ChunkPlan, plan_chunks
from ligerprof.kernels.linear_cross_entropy.reference import fused_linear_cross_entropy as flce_reference
from ligerprof.kernels.options import LossOptions
from tests.kernels.oracle import LOSS_ROUNDINGS, assert_matches_fp64, leaves, run

DEPTH, THREADS = 2, 128
# two tiles and a part of a third one
VOCAB = 2 * (8 * DEPTH * THREADS) + 48
BF16 = LOSS_ROUNDINGS[torch.bfloat16]
OPTIONS = {
    "shift": LossOptions(shift=True, in_place=True),
    "none": LossOptions(reduction="none"),
    "ignore-7": LossOptions(ignore_index=7, in_place=True),
    "z-loss": LossOptions(z_loss=1e-2, reduction="none", in_place=True),
    "scale": LossOptions(logit_scale=0.25),
    "token-scaling": LossOptions(token_scaling=True),
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Read rows of any width in pairs, in small tiles; the rows of each launch that does."""
    from ligerprof.kernels.cross_entropy import rows, split_rows, tiles

    is_paired, launches = rows.is_paired, []

    def recorded(arguments: Any, memories: Sequence[Tensor], elements: Sequence[int]) -> bool:
        paired = is_paired(arguments, memories, elements)
        launches.extend([memories[0].shape[0]] * paired)
        return paired

    tiny = {"PAIRED_WORDS": 16, "PAIRS_DEPTH": DEPTH, "PAIRS_THREADS": THREADS, "OTHER_TIME": float("inf")}
    for name, value in tiny.items():
        monkeypatch.setattr(tiles, name, value)
    for module in (rows, split_rows):
        monkeypatch.setattr(module, "is_paired", recorded)
    split_words.cache_clear()
    yield launches
    split_words.cache_clear()


def plan_of(tokens: int, hidden: int, vocab: int, budget: int, gradient_bytes: int = 2) -> ChunkPlan:
    sizes = {"tokens": tokens, "hidden": hidden, "vocab": vocab, "budget": budget}
    return plan_chunks(**sizes, element_bytes=2, gradient_bytes=gradient_bytes)


def problem(device: torch.device, ignore_index: int = -100) -> list[Tensor]:
    labels = torch.randint(8, VOCAB, (3, 5), device=device)
    labels.view(-1)[[1, 3, 5, 7, 10, 11, 14]] = ignore_index
    return [*leaves((2 * torch.randn(3, 5, VOCAB, device=device)).bfloat16()), labels]


def kernel(logits: Tensor, *given: Any, **named: Any) -> Any:
    from ligerprof.kernels.cross_entropy.triton import cross_entropy_outputs

    # not a leaf, which the loss may overwrite
    return cross_entropy_outputs(logits.clone(), *given, **named)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_matches_fp64(name: str, launches: list[int], device: torch.device) -> None:
    options = OPTIONS[name]
    grads = [torch.rand(3, 5, device=device)] if options.reduction == "none" else None
    assert_matches_fp64(
        lambda *g: kernel(*g, options, returns=()).loss,
        lambda *g: ce_reference(*g, options).loss,
        problem(device, options.ignore_index),
        BF16,
        grads,
    )
    assert launches == [15]


def test_gradient_of_the_log_sum_exp(launches: list[int], device: torch.device) -> None:
    options = LossOptions(reduction="none", logit_scale=0.5, in_place=True)
    assert_matches_fp64(
        lambda *g: kernel(*g, options, returns=("lse",))[:2],
        lambda *g: ce_reference(*g, options)[:2],
        problem(device),
        BF16,
        list(torch.rand(2, 3, 5, device=device)),
    )
    # forward, which writes no gradient, does not read in pairs
    assert launches == [15]


def test_rows_differ_from_other_rows_by_the_order_of_sums(launches: list[int], device: torch.device) -> None:
    logits, labels = problem(device)
    labels[1, 3], labels[2, 1] = VOCAB, -1
    logits.data[0, 4, 100:2500] = float("-inf")
    options = LossOptions(reduction="none", check_labels=False)
    loss, grad = run(lambda *g: kernel(*g, options, returns=()).loss, [logits, labels])
    # rows with class weights are not read in pairs; these weights change nothing
    ones = torch.ones(VOCAB, device=device)
    other, other_grad = run(lambda *g: kernel(*g, options, class_weight=ones, returns=()).loss, [logits, labels])
    assert launches == [15]
    assert loss.isnan().sum() == 2
    torch.testing.assert_close(loss, other, rtol=1e-6, atol=0.0, equal_nan=True)
    torch.testing.assert_close(grad, other_grad, rtol=2**-7, atol=0.0, equal_nan=True)
    assert (grad == other_grad).double().mean() > 0.8


def assert_fused_matches_fp64(
    tokens: int, hidden: int, vocab: int, options: LossOptions, ignored: slice, device: torch.device
) -> None:
    states, weight = torch.randn(tokens, hidden, device=device), 0.3 * torch.randn(vocab, hidden, device=device)
    labels = torch.randint(0, vocab, (tokens,), device=device)
    labels[ignored] = -100

    def fused(*given: Tensor) -> Tensor:
        from ligerprof.kernels.linear_cross_entropy.triton import fused_linear_cross_entropy

        return fused_linear_cross_entropy(*given, options)

    inputs = [*leaves(states.bfloat16(), weight.bfloat16()), labels]
    assert_matches_fp64(fused, lambda *g: flce_reference(*g, options), inputs, BF16)


def test_chunks_whose_logits_are_computed_twice(launches: list[int], device: torch.device) -> None:
    """They leave statistics, from which another kernel writes the gradient again."""
    tokens, hidden, vocab, budget = 66, 44, 512, 16 * 512 * 2
    plan = plan_of(tokens, hidden, vocab, budget)
    assert plan.recomputed
    assert_fused_matches_fp64(tokens, hidden, vocab, LossOptions(budget=budget), slice(1, -1, 4), device)
    assert sum(launches) == tokens - plan.scratch_tokens


@pytest.mark.parametrize(
    ("tokens", "blocks", "accumulate_fp32"),
    [(32, (2064, 2064), False), (64, (1040, 2048), True), (64, (1040, 1040, 1008), False)],
)
def test_rows_in_blocks(
    tokens: int, blocks: tuple[int, ...], accumulate_fp32: bool, launches: list[int], device: torch.device
) -> None:
    """Each tile lies in one block, whose last tile is partly empty."""
    hidden, vocab, budget = tokens, sum(blocks), blocks[0] * tokens * 2 + 4000
    assert plan_of(tokens, hidden, vocab, budget, 4 if accumulate_fp32 else 2).blocks == blocks
    options = LossOptions(budget=budget, accumulate_fp32=accumulate_fp32, z_loss=1e-3)
    assert_fused_matches_fp64(tokens, hidden, vocab, options, slice(5, None, 7), device)
    assert launches == [tokens]


@pytest.mark.parametrize(("stride", "start", "words"), [(72, 0, 64), (96, 4, 64), (96, 0, 40), (96, 16, 64)])
def test_only_aligned_rows_are_read_in_pairs(
    stride: int, start: int, words: int, launches: list[int], device: torch.device
) -> None:
    memory = torch.randn(3, stride, device=device).bfloat16()
    inputs = [*leaves(memory[:, start : start + words]), torch.randint(0, words, (3,), device=device)]

    def given_as_they_are(*given: Tensor) -> Tensor:
        from ligerprof.kernels.cross_entropy.triton import cross_entropy

        return cross_entropy(*given)

    assert_matches_fp64(given_as_they_are, lambda *g: ce_reference(*g).loss, inputs, BF16)
    assert launches == [3] * ((stride, start, words) == (96, 16, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [128256, 151936])
def test_full_width(vocab: int) -> None:
    """So many rows that some wait for their turn, and the tiles of production."""
    tokens = 3 * torch.cuda.get_device_properties(0).multi_processor_count + 7
    torch.manual_seed(0)
    logits = (2.5 * torch.randn(tokens, vocab, device="cuda")).bfloat16()
    labels = torch.randint(0, vocab, (tokens,), device="cuda")
    labels[5::7] = -100
    given = [*leaves(logits), labels]
    first, again = (run(lambda *g: kernel(*g, LossOptions(), returns=()).loss, given) for _ in range(2))
    assert all(torch.equal(value, same) for value, same in zip(first, again, strict=True))
    assert_matches_fp64(
        lambda *g: kernel(*g, LossOptions(), returns=()).loss, lambda *g: ce_reference(*g).loss, given, 3e-3
    )


@pytest.mark.gpu
def test_full_width_in_blocks() -> None:
    """Some rows wait for their turn, and the blocks are not multiples of a tile."""
    tokens = -(-(3 * torch.cuda.get_device_properties(0).multi_processor_count + 7) // 128) * 128
    vocab, budget = 128256, 44000 * tokens * 2
    assert len(plan_of(tokens, tokens, vocab, budget).blocks) > 2
    assert_fused_matches_fp64(
        tokens, tokens, vocab, LossOptions(budget=budget), slice(5, None, 7), torch.device("cuda")
    )
