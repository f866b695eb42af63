"""Run liger-kernel's own tests of its chunked losses on this package's objectives.

    python benchmarks/liger_suite.py CHECKOUT [--theirs] [-- PYTEST ARGUMENTS…]

CHECKOUT has liger-kernel's `test/`, and its wheel must be installed. The tests call liger-kernel's modules and
functions as they are; only the four base classes that compute losses and gradients are replaced. Losses that this
package does not have (cosine, SAPO, VESPO, LUSPO) are skipped. `--theirs` replaces nothing. Without a GPU, set
TRITON_INTERPRET=1.
"""

import argparse
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerprof.kernels.linear_cross_entropy.scores import linear_log_probs
from ligerprof.kernels.linear_cross_entropy.triton import fused_linear_cross_entropy
from ligerprof.kernels.objectives import (
    KtoObjective,
    PolicyObjective,
    PreferenceObjective,
    distillation_loss,
    linear_objective,
)
from ligerprof.kernels.options import LossOptions

_MEANS = {"grpo": "sequences", "bnpo": "tokens", "dapo": "tokens", "cispo": "tokens", "dr_grpo": "length"}


def differentiated(ctx: Any, inputs: tuple[Tensor | None, ...], run: Callable[..., tuple[Tensor, Any]]) -> Any:
    """The loss and further results; liger-kernel's backward finds the gradients of hidden states, head and bias."""
    given = [None if each is None else each.detach().requires_grad_(each.requires_grad) for each in inputs]
    with torch.enable_grad():
        loss, rest = run(*given)
    wanted = [each for each in given if each is not None and each.requires_grad]
    grads = iter(torch.autograd.grad(loss, wanted) if wanted else ())
    ctx.save_for_backward(*(next(grads) if each is not None and each.requires_grad else None for each in given))
    return loss.detach(), rest


def scores_of(log_probs: Tensor, target: Tensor, ignore_index: int, *, average: bool) -> Tensor:
    mask = target != ignore_index
    total = torch.where(mask, log_probs, 0.0).sum(-1)
    return total / mask.sum(-1) if average else total


def head_of(*parts: Tensor | None) -> tuple[Tensor, ...]:
    """Hidden states, head and, if there is one, bias."""
    return tuple(each for each in parts if each is not None)


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """For metrics that this package has no use for."""
    with torch.no_grad():
        return torch.nn.functional.linear(hidden, weight, bias)


def preference(
    cls: Any,
    ctx: Any,
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    alpha: float = 1.0,
    beta: float = 0.1,
    compute_nll_loss: bool = True,
    nll_target: Tensor | None = None,
    use_ref_model: bool = False,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    average_log_prob: bool = True,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    gamma: float = 0.0,
    discopop_tau: float = 0.05,
    **_others: Any,
) -> Any:
    is_odds, is_dpo = "ORPO" in cls.__name__, "DPO" in cls.__name__
    has_own_nll = compute_nll_loss and nll_target is None
    of = PreferenceObjective(
        loss_type="odds" if is_odds else loss_type,
        beta=beta,
        gamma=gamma,
        # liger-kernel's sigmoid loss of DPO does not smooth
        label_smoothing=0.0 if is_dpo and loss_type == "sigmoid" else label_smoothing,
        discopop_tau=discopop_tau,
        average=average_log_prob,
        nll_weight=alpha if has_own_nll else 0.0,
    )
    options = LossOptions(ignore_index=ignore_index)
    pairs = len(target) // 2

    def run(hidden: Tensor, head: Tensor, offset: Tensor | None) -> tuple[Tensor, Any]:
        reference = head_of(ref_input, ref_weight, ref_bias) if use_ref_model else None
        out = linear_objective(of, hidden, head, target, options, offset, reference=reference)
        loss, nll = out.loss, torch.zeros((), device=target.device)
        if has_own_nll:
            chosen = target[:pairs] != ignore_index
            nll = -out.log_probs[:pairs][chosen].sum() / chosen.sum()
        elif compute_nll_loss:
            assert nll_target is not None
            nll = fused_linear_cross_entropy(hidden[:pairs], head, nll_target[:pairs], options, offset)
            loss = loss + alpha * nll
        scores = scores_of(out.log_probs, target, ignore_index, average=average_log_prob)
        logits = logits_of(hidden, head, offset)
        rest = [*scores.chunk(2), logits[:pairs].float().mean(), logits[pairs:].float().mean(), nll.detach()]
        rest += out.metrics["rewards"].chunk(2)
        if is_odds:
            chosen, rejected = scores.chunk(2)
            log_odds = chosen - rejected - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
            rest += [-out.metrics["pair_losses"].mean() / beta, log_odds.mean()]
        return loss, tuple(rest)

    return differentiated(ctx, (_input, weight, bias), run)


def unpaired(
    cls: Any,
    ctx: Any,
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    preference_labels: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    use_ref_model: bool = False,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    average_log_prob: bool = False,
    beta: float = 0.1,
    kl: Tensor | None = None,
    **_others: Any,
) -> Any:
    del cls
    of = KtoObjective(beta=beta, average=average_log_prob)
    data = {"desirable": preference_labels, **({} if kl is None else {"kl": kl})}

    def run(hidden: Tensor, head: Tensor, offset: Tensor | None) -> tuple[Tensor, Any]:
        reference = head_of(ref_input, ref_weight, ref_bias) if use_ref_model else None
        options = LossOptions(ignore_index=ignore_index)
        out = linear_objective(of, hidden, head, target, options, offset, reference=reference, **data)
        scores = scores_of(out.log_probs, target, ignore_index, average=average_log_prob)
        logits = logits_of(hidden, head, offset).float()
        rewards, desirable = out.metrics["rewards"], preference_labels
        sums = [
            each for value in (scores, logits, rewards) for each in (value[desirable].sum(), value[~desirable].sum())
        ]
        return out.loss, tuple(sums)

    return differentiated(ctx, (_input, weight, bias), run)


def policy(
    cls: Any,
    ctx: Any,
    _input: Tensor,
    weight: Tensor,
    selected_token_ids: Tensor,
    attention_mask: Tensor,
    advantages: Tensor,
    bias: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    old_per_token_logps: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    beta: float = 0.04,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    importance_sampling_level: str = "token",
    temperature: float = 1.0,
    use_ref_model: bool = False,
    vllm_is_ratio: Tensor | None = None,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    num_items_in_batch: Tensor | float | None = None,
    **_others: Any,
) -> Any:
    del cls
    if loss_type not in _MEANS:
        pytest.skip(f"no loss {loss_type}")
    mask = attention_mask.bool()
    labels = torch.where(mask, selected_token_ids, -100)
    of = PolicyObjective(
        mean=_MEANS[loss_type],
        level=importance_sampling_level,
        clipping="cispo" if loss_type == "cispo" else "ppo",
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        delta=delta,
        beta=beta,
        corrects_kl=use_bias_correction_kl,
        max_length=max_completion_length,
    )
    data: dict[str, Any] = {"advantages": advantages}
    if old_per_token_logps is not None:
        data["old_log_probs"] = old_per_token_logps
    if vllm_is_ratio is not None:
        data["sampling_ratio"] = vllm_is_ratio.squeeze(-1) if vllm_is_ratio.shape[-1] == 1 else vllm_is_ratio
    if num_items_in_batch is not None and loss_type in ("dapo", "cispo"):
        data["num_items"] = num_items_in_batch

    def run(hidden: Tensor, head: Tensor, offset: Tensor | None) -> tuple[Tensor, Any]:
        reference = None
        if use_ref_model and ref_per_token_logps is not None:
            data["ref_log_probs"] = ref_per_token_logps
        elif use_ref_model:
            reference = head_of(ref_input, ref_weight, ref_bias)
        elif beta:
            with torch.no_grad():
                own = linear_log_probs(hidden, head, labels, LossOptions(), offset, temperature=temperature)
            data["ref_log_probs"] = own.log_probs
        out = linear_objective(
            of, hidden, head, labels, LossOptions(), offset, temperature=temperature, reference=reference, **data
        )
        names = ("kl", "clipped_share") if beta else ("clipped_share",)
        return out.loss, tuple(out.metrics[name] for name in names)

    return differentiated(ctx, (_input, weight, bias), run)


def distillation(
    cls: Any,
    ctx: Any,
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    target: Tensor,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    ignore_index: int = -100,
    weight_hard_loss: float = 0.5,
    weight_soft_loss: float = 0.5,
    beta: float = 0.5,
    temperature: float = 1.0,
    return_soft_hard_loss: bool = False,
    **_others: Any,
) -> Any:
    if "JSD" not in cls.__name__:
        pytest.skip(f"no loss of {cls.__name__}")

    def run(hidden: Tensor, head: Tensor, offset: Tensor | None) -> tuple[Tensor, Any]:
        out = distillation_loss(
            hidden,
            head,
            teacher_input,
            teacher_weight,
            target,
            LossOptions(ignore_index=ignore_index),
            offset,
            teacher_bias,
            beta=beta,
            temperature=temperature,
            soft_weight=weight_soft_loss,
            hard_weight=weight_hard_loss,
        )
        return out.loss, (out.soft_loss, out.hard_loss)

    loss, both = differentiated(ctx, (student_input, student_weight, student_bias), run)
    return (loss, *both) if return_soft_hard_loss else loss


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Compute the losses of liger-kernel's base classes with this package."""
    from liger_kernel.chunked_loss import (
        fused_linear_distillation,
        fused_linear_ppo,
        fused_linear_preference,
        fused_linear_unpaired_preference,
    )

    with pytest.MonkeyPatch.context() as patch:
        for owner, function in (
            (fused_linear_preference.LigerFusedLinearPreferenceBase, preference),
            (fused_linear_unpaired_preference.LigerFusedLinearUnpairedPreferenceBase, unpaired),
            (fused_linear_ppo.LigerFusedLinearPPOBase, policy),
            (fused_linear_distillation.LigerFusedLinearDistillationBase, distillation),
        ):
            patch.setattr(owner, "forward", staticmethod(function))
        yield


class Tally:
    """Counts outcomes by file, as a pytest plugin."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.skipped:
            found = self.outcomes.setdefault(Path(report.nodeid.split("::")[0]).name, Counter())
            found[report.outcome] += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--theirs", action="store_true", help="leave liger-kernel's losses as they are")
    parser.add_argument("arguments", nargs="*", help="for pytest, after --")
    args = parser.parse_args()
    sys.path.insert(0, str(args.checkout))
    tally = Tally()
    paths = [] if any("test_" in each for each in args.arguments) else [str(args.checkout / "test" / "chunked_loss")]
    options = ["-q", "--tb=line", "-p", "no:cacheprovider", f"--rootdir={args.checkout}", *paths, *args.arguments]
    with contextlib.nullcontext() if args.theirs else ours():
        code = pytest.main(options, plugins=[tally])
    print(json.dumps({name: dict(found) for name, found in sorted(tally.outcomes.items())}))
    return int(code)


if __name__ == "__main__":
    raise SystemExit(main())
