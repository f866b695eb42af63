"""Losses over a vocabulary that is split over ranks (gloo) against plain torch over the whole one."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from ligerprof.errors import KernelInputError
from ligerprof.kernels.cross_entropy.reference import cross_entropy_outputs as ce_reference
from ligerprof.kernels.linear_cross_entropy.reference import fused_linear_cross_entropy_outputs as flce_reference
from ligerprof.kernels.options import RETURNS, LossOptions, LossOutputs, VocabularyShard
from tests.kernels.conftest import INTERPRETED
from tests.kernels.oracle import LOSS_ROUNDINGS, relative_error
from tests.runs.parallel.ranks import forked

# not a multiple of the ranks
VOCAB, HIDDEN, SHAPE = 103, 12, (2, 5)
BOUND = 2 * LOSS_ROUNDINGS[torch.float32]
CASES: dict[str, tuple[LossOptions, tuple[str, ...]]] = {
    "mean": (LossOptions(z_loss=1e-2, budget="lean"), ("z_loss", "token_accuracy", "predicted_tokens")),
    "none": (LossOptions(reduction="none", label_smoothing=0.1, softcap=4.0), ()),
    "everything": (LossOptions(shift=True, logit_scale=1.2, token_scaling=True), RETURNS),
}
# results that have a gradient
_LEARNED = ("loss", "lse", "entropy")


def problem() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    labels = torch.randint(0, VOCAB, SHAPE, generator=generator)
    labels.view(-1)[::5] = -100
    weights = torch.rand(VOCAB, generator=generator)
    return normal(*SHAPE, HIDDEN), normal(VOCAB, HIDDEN), normal(VOCAB), labels, weights


def differentiated(outputs: LossOutputs, inputs: list[Tensor]) -> list[Tensor]:
    """Every result, then the gradients of a sum of those that have one."""
    made = {name: value for name, value in outputs._asdict().items() if value is not None}
    generator = torch.Generator().manual_seed(4)
    total: Any = 0.0
    for name in _LEARNED:
        if name in made:
            factors = torch.randn(made[name].shape, generator=generator)
            total = total + (made[name] * factors.to(made[name])).sum()
    return [*(value.detach() for value in made.values()), *torch.autograd.grad(total, inputs)]


def expected_results(case: str, slot: str) -> list[Tensor]:
    options, returns = CASES[case]
    states, weight, bias, labels, class_weight = problem()
    wide = [value.double().requires_grad_() for value in (states, weight, bias)]
    if slot == "ce":
        wide = [(wide[0] @ wide[1].t() + wide[2]).detach().requires_grad_()]
        outputs = ce_reference(wide[0], labels, options, class_weight=class_weight.double())
    else:
        outputs = flce_reference(wide[0], wide[1], labels, options, wide[2], class_weight=class_weight.double())
    wanted = {name: value for name, value in outputs._asdict().items() if name in ("loss", *returns)}
    return differentiated(LossOutputs(**wanted), wide)


def results_on_a_rank(chosen: Sequence[tuple[str, str]], rank: int) -> dict[tuple[str, str], list[Any]]:
    from ligerprof.kernels.cross_entropy.triton import cross_entropy_outputs
    from ligerprof.kernels.linear_cross_entropy.triton import fused_linear_cross_entropy_outputs

    distributed.init_process_group("gloo")
    shard = VocabularyShard.of_rank(VOCAB)
    if distributed.get_world_size() == 2:
        # each rank alone would choose other chunks
        words = (0, 20, VOCAB)
        shard = VocabularyShard(start=words[rank], stop=words[rank + 1], vocab=VOCAB)
    found = {}
    for slot, case in chosen:
        options, returns = CASES[case]
        states, weight, bias, labels, class_weight = problem()
        named: dict[str, Any] = {"class_weight": class_weight, "returns": returns, "shard": shard}
        if slot == "ce":
            own = [(states @ weight.t() + bias)[..., shard.start : shard.stop].clone().requires_grad_()]
            outputs = cross_entropy_outputs(own[0], labels, options, **named)
        else:
            own = [states, weight[shard.start : shard.stop].clone(), bias[shard.start : shard.stop].clone()]
            own = [value.requires_grad_() for value in own]
            outputs = fused_linear_cross_entropy_outputs(*own[:2], labels, options, own[2], **named)
        found[slot, case] = differentiated(outputs, own)
    distributed.destroy_process_group()
    # arrays, because a tensor would be shared with a process that has ended
    return {key: [value.numpy() for value in values] for key, values in found.items()}


@pytest.mark.skipif(not INTERPRETED, reason="ranks of this test run in Triton's interpreter")
@pytest.mark.parametrize(
    ("ranks", "chosen"),
    [(2, [(slot, case) for slot in ("flce", "ce") for case in CASES]), (4, [("flce", "everything")])],
    ids=["two", "four"],
)
def test_ranks_agree_with_the_whole_vocabulary(ranks: int, chosen: list[tuple[str, str]]) -> None:
    found = forked(partial(results_on_a_rank, chosen), ranks)
    for slot, case in chosen:
        truth = expected_results(case, slot)
        # results and the hidden states' gradient are equal on all ranks; other gradients are parts
        parts = 2 if slot == "flce" else 1
        for place, right in enumerate(truth):
            values = [torch.from_numpy(on_rank[slot, case][place]) for on_rank in found]
            if place < len(truth) - parts:
                assert all(torch.equal(values[0], value) for value in values[1:])
                whole = values[0]
            else:
                whole = torch.cat(values, dim=-1 if slot == "ce" else 0)
            assert relative_error(whole, right) < BOUND, (slot, case, place)


def test_words_outside_the_vocabulary_are_an_error(device: torch.device) -> None:
    from ligerprof.kernels.cross_entropy.triton import cross_entropy

    logits, labels = torch.randn(2, 8, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(KernelInputError, match="8 words are not the words 4 to 12 of a vocabulary of 10"):
        cross_entropy(logits, labels, shard=VocabularyShard(start=4, stop=12, vocab=10))
