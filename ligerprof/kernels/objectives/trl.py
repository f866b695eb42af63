"""The log-probabilities of TRL's trainers from the fused loss: what TRL's own function returns, in a bounded workspace.

TRL's models with a fused head call one function of `trl.trainer.utils`, on the positions that count. It is replaced
there for the whole process, so that reference models, adapters and accelerate's wrappers use it too.
"""

import dataclasses
import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ligerprof.errors import KernelInputError, KernelUnavailableError
from ligerprof.kernels.linear_cross_entropy.scores import linear_log_sum_exp
from ligerprof.kernels.linear_cross_entropy.triton import fused_linear_cross_entropy_outputs
from ligerprof.kernels.options import LossOptions
from ligerprof.kernels.patching.patcher import Patch

_MODULE, _NAME = "trl.trainer.utils", "_ChunkedLogProbFunction"
_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
# of logits whose mean is taken where a softcap makes it depend on each
_CAPPED_TOKENS = 256


def apply_to_trainer(trainer: Any, name: str, kind: str, budget: str | int) -> Patch:
    """Let the models of a TRL trainer compute log-probabilities with the fused loss, until `undo`.

    Args:
        name: the objective, for messages.
        kind: the name of the trainer's class, or of one that it inherits from.
        budget: workspace of the fused loss: `lean`, `balanced`, or bytes.

    Raises:
        KernelInputError: it is another object.
        KernelUnavailableError: this version of TRL has no fused head.
    """
    if kind not in (base.__name__ for base in type(trainer).__mro__):
        raise KernelInputError(
            f"{name}: a {type(trainer).__name__} was given. Give TRL's {kind}, or call"
            " ligerprof.kernels.objectives.linear_objective in your own loop."
        )
    utils = importlib.import_module(_MODULE)
    if not hasattr(utils, _NAME):
        raise KernelUnavailableError(f"{name}: this version of TRL has no {_MODULE}.{_NAME}. TRL 1.16 has it.")
    patch, before, own = Patch({name: "ligerprof"}), getattr(utils, _NAME), _LogProbs(LossOptions(budget=budget))
    setattr(utils, _NAME, own)

    def restore() -> None:
        if getattr(utils, _NAME) is not own:
            raise KernelInputError(f"{name}: TRL's log-probabilities were replaced again. Undo the later patch first.")
        setattr(utils, _NAME, before)

    patch.on_undo(restore)
    return patch


class _LogProbs:
    """Has TRL's signature; `chunk_size` is TRL's."""

    def __init__(self, options: LossOptions) -> None:
        self._options = options

    def apply(  # noqa: PLR0913, PLR0917 - TRL's signature
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = _OUTPUTS,
    ) -> tuple[Tensor | None, ...]:
        """Log-probabilities [N], then each of `_OUTPUTS` or None; only the first two have a gradient."""
        del chunk_size
        if hasattr(weight, "ds_id"):
            raise KernelInputError(
                "TRL's log-probabilities: ZeRO-3 gathers the head only in forward, and backward reads it again. Use"
                " ZeRO-2, or TRL's own function."
            )
        # the temperature divides what the softcap has bounded
        softcap = None if final_logit_softcapping is None else final_logit_softcapping / temperature
        scaled = dataclasses.replace(
            self._options, reduction="none", logit_scale=logit_scale / temperature, softcap=softcap
        )
        returns = {"entropy": "entropy", "is_top1": "token_accuracy"}
        found = fused_linear_cross_entropy_outputs(
            hidden, weight, targets, scaled, bias, returns=[returns[name] for name in outputs if name in returns]
        )
        with torch.no_grad():
            squares = _log_sum_squares(hidden, weight, scaled, bias) if "log_sum_sq_probs" in outputs else None
            mean = _mean_logits(hidden, weight, scaled, bias) if "mean_logits" in outputs else None
        is_top1 = None if found.token_accuracy is None else found.token_accuracy.bool()
        return -found.loss, found.entropy, squares, mean, is_top1


def _log_sum_squares(hidden: Tensor, weight: Tensor, options: LossOptions, bias: Tensor | None) -> Tensor:
    """The logarithm of the sum of squared probabilities: squares are exponentials of doubled logits."""
    options = dataclasses.replace(options, reduction="mean")
    softcap = None if options.softcap is None else 2 * options.softcap
    doubled = dataclasses.replace(options, logit_scale=2 * options.logit_scale, softcap=softcap)
    of_squares, of_logits = (linear_log_sum_exp(hidden, weight, one, bias) for one in (doubled, options))
    return of_squares - 2 * of_logits


def _mean_logits(hidden: Tensor, weight: Tensor, options: LossOptions, bias: Tensor | None) -> Tensor:
    if options.softcap is None:
        mean = torch.mean(weight, 0, dtype=torch.float32)
        mean = hidden.float() @ mean
        return options.logit_scale * (mean if bias is None else mean + bias.float().mean())
    cap = options.softcap
    weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    parts = [
        (cap * torch.tanh(linear(rows, weight, bias).float() * (options.logit_scale / cap))).mean(-1)
        for rows in torch.split(hidden, _CAPPED_TOKENS)
    ]
    return torch.cat(parts)
