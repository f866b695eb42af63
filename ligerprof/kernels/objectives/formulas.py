"""Objectives of post-training as plain torch on log-probabilities: preferences (DPO and others), KTO, policies (GRPO).

Axes: B sequences, T positions. An objective is a function of [B, T] tensors, for any part of a batch: what depends on
the whole batch, such as the number of pairs, is in the weights that `prepare` adds to the data.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ligerprof.errors import KernelInputError, RecipeError
from ligerprof.text import short_repr
from ligerprof.words import did_you_mean

Data = dict[str, Tensor]
# loss and metrics
Evaluated = tuple[Tensor, Data]


class Objective(Protocol):
    """A loss of log-probabilities.

    Attributes:
        group: sequences that the loss needs at once: 2 for a pair, whose halves are B / 2 sequences apart; 0 if each
            token has a loss of its own.
        needs_entropy: whether entropies have a gradient.
    """

    @property
    def group(self) -> int: ...

    @property
    def needs_entropy(self) -> bool: ...

    def prepare(self, mask: Tensor, data: Data) -> Data:
        """The data, and weights that depend on the whole batch; each value is [B], or [B, T].

        Raises:
            KernelInputError: data that the objective needs is missing, or has another shape.
        """

    def __call__(self, log_probs: Tensor, mask: Tensor, **data: Tensor) -> Evaluated:
        """The share of these sequences in the batch's loss, and metrics of them.

        Args:
            data: from `prepare`; `entropy` if the objective needs it.
        """


def _relative(score: Tensor, objective: "PreferenceObjective") -> Tensor:
    return objective.beta * score - objective.gamma


def _sigmoid(chosen: Tensor, rejected: Tensor, objective: "PreferenceObjective") -> Tensor:
    margin, flipped = _relative(chosen - rejected, objective), objective.label_smoothing
    return -(1 - flipped) * logsigmoid(margin) - flipped * logsigmoid(-margin)


def _robust(chosen: Tensor, rejected: Tensor, objective: "PreferenceObjective") -> Tensor:
    margin, flipped = _relative(chosen - rejected, objective), objective.label_smoothing
    return (flipped * logsigmoid(-margin) - (1 - flipped) * logsigmoid(margin)) / (1 - 2 * flipped)


def _exo_pair(chosen: Tensor, rejected: Tensor, objective: "PreferenceObjective") -> Tensor:
    margin, flipped = _relative(chosen - rejected, objective), objective.label_smoothing
    kept = margin.sigmoid() * (logsigmoid(margin) - math.log1p(-flipped))
    return kept + (-margin).sigmoid() * (logsigmoid(-margin) - math.log(flipped))


def _nca_pair(chosen: Tensor, rejected: Tensor, objective: "PreferenceObjective") -> Tensor:
    chosen, rejected = objective.beta * chosen, objective.beta * rejected
    return -logsigmoid(chosen) - 0.5 * (logsigmoid(-chosen) + logsigmoid(-rejected))


def _discopop(chosen: Tensor, rejected: Tensor, objective: "PreferenceObjective") -> Tensor:
    margin = _relative(chosen - rejected, objective)
    share = torch.sigmoid(margin / objective.discopop_tau)
    return share * torch.exp(-margin) - (1 - share) * logsigmoid(margin)


def _odds(chosen: Tensor, rejected: Tensor, objective: "PreferenceObjective") -> Tensor:
    """ORPO's, of average log-probabilities."""
    log_odds = chosen - rejected - (_log1m_exp(chosen) - _log1m_exp(rejected))
    return -objective.beta * logsigmoid(log_odds)


def _log1m_exp(log_p: Tensor) -> Tensor:
    """log(1 - p)."""
    return torch.log(-torch.expm1(log_p))


# each pair's loss from the scores of its halves: log-probabilities, minus those of the reference if there is one
PAIR_LOSSES: Mapping[str, Callable[[Tensor, Tensor, "PreferenceObjective"], Tensor]] = {
    "sigmoid": _sigmoid,
    "hinge": lambda chosen, rejected, of: torch.relu(1 - _relative(chosen - rejected, of)),
    "ipo": lambda chosen, rejected, of: (chosen - rejected - 1 / (2 * of.beta)) ** 2,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": lambda chosen, rejected, of: -logsigmoid(of.beta * chosen) - logsigmoid(-of.beta * rejected),
    "sppo_hard": lambda chosen, rejected, of: (chosen - 0.5 / of.beta) ** 2 + (rejected + 0.5 / of.beta) ** 2,
    "apo_zero": lambda chosen, rejected, of: torch.sigmoid(-of.beta * chosen) + torch.sigmoid(of.beta * rejected),
    "apo_down": lambda chosen, rejected, of: (
        torch.sigmoid(of.beta * chosen) + torch.sigmoid(of.beta * (rejected - chosen))
    ),
    "discopop": _discopop,
    "odds": _odds,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceObjective:
    """A loss of pairs: DPO and its variants, CPO, SimPO and ORPO. The first half of the batch was chosen.

    Data: `ref_log_probs`, of the reference, [B, T] or [B]; without them the scores are the log-probabilities.

    Attributes:
        loss_type: a name in `PAIR_LOSSES`; `odds` is ORPO's, `sigmoid` with a gamma SimPO's.
        gamma: margin that the scaled difference of the scores must have.
        label_smoothing: share of pairs that are assumed to be flipped.
        average: whether a sequence's score is the mean over its tokens instead of the sum; always for `ipo`.
        nll_weight: of the mean negative log-probability of the chosen tokens, which is added.

    Raises:
        RecipeError: an unknown type, or a number that the type does not allow.
    """

    loss_type: str = "sigmoid"
    beta: float = 0.1
    gamma: float = 0.0
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05
    average: bool = False
    nll_weight: float = 0.0
    group: ClassVar[int] = 2
    needs_entropy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.loss_type not in PAIR_LOSSES:
            raise RecipeError(
                f"unknown preference loss {short_repr(self.loss_type)}.{did_you_mean(self.loss_type, PAIR_LOSSES)}"
                f" Known: {', '.join(PAIR_LOSSES)}."
            )
        lowest = math.ulp(0.0) if self.loss_type == "exo_pair" else 0.0
        if not lowest <= self.label_smoothing < 0.5:
            raise RecipeError(
                f"label smoothing of {self.loss_type} is {self.label_smoothing}. It must be in"
                f" {'(' if lowest else '['}0, 0.5)."
            )

    def prepare(self, mask: Tensor, data: Data) -> Data:
        if len(mask) % 2:
            raise KernelInputError(f"a preference loss got {len(mask)} sequences. Give the chosen, then the rejected.")
        ones = torch.ones(len(mask), device=mask.device)
        chosen = mask[: len(mask) // 2].sum().clamp(min=1)
        return {**data, "weight": ones * (2 / max(len(mask), 1)), "nll_weight": ones * (self.nll_weight / chosen)}

    def __call__(
        self,
        log_probs: Tensor,
        mask: Tensor,
        *,
        weight: Tensor,
        nll_weight: Tensor,
        ref_log_probs: Tensor | None = None,
    ) -> Evaluated:
        averages = self.average or self.loss_type == "ipo"
        score = _score(log_probs, mask, averages=averages)
        if ref_log_probs is not None:
            score = score - (
                _score(ref_log_probs, mask, averages=averages) if ref_log_probs.ndim > 1 else ref_log_probs
            )
        chosen, rejected = score.chunk(2)
        pairs = PAIR_LOSSES[self.loss_type](chosen, rejected, self)
        loss = (pairs * weight[: len(pairs)]).sum()
        if self.nll_weight:
            loss = loss - (_score(log_probs, mask).chunk(2)[0] * nll_weight[: len(pairs)]).sum()
        rewards = (self.beta * score).detach()
        return loss, {"rewards": rewards, "pair_losses": pairs.detach()}


@dataclass(frozen=True, kw_only=True, slots=True)
class KtoObjective:
    """Kahneman-Tversky optimization: a loss of sequences that are desirable or not.

    Data: `desirable` [B], bool; `ref_log_probs` [B, T] or [B]; `kl`, one number or [B], is the reference point, 0 if it
    is left out.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    average: bool = False
    group: ClassVar[int] = 1
    needs_entropy: ClassVar[bool] = False

    def prepare(self, mask: Tensor, data: Data) -> Data:
        _require(data, "KTO", "desirable")
        weight = torch.where(data["desirable"].bool(), self.desirable_weight, self.undesirable_weight)
        return {**data, "weight": weight / max(len(mask), 1)}

    def __call__(
        self,
        log_probs: Tensor,
        mask: Tensor,
        *,
        weight: Tensor,
        desirable: Tensor,
        ref_log_probs: Tensor | None = None,
        kl: Tensor | None = None,
    ) -> Evaluated:
        score = _score(log_probs, mask, averages=self.average)
        if ref_log_probs is not None:
            score = score - _of_sequences(ref_log_probs, mask, averages=self.average)
        gain = score if kl is None else score - kl
        sign = torch.where(desirable.bool(), self.beta, -self.beta)
        return (torch.sigmoid(-sign * gain) * weight).sum(), {"rewards": (self.beta * score).detach()}


_KL_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    # of the reference's log-probability minus the policy's
    "k1": torch.neg,
    "k2": lambda difference: 0.5 * difference.square(),
    "k3": lambda difference: torch.expm1(difference) - difference,
}
_MEANS = ("sequences", "tokens", "length")
_LEVELS = ("token", "sequence")
_CLIPPINGS = ("ppo", "cispo")


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyObjective:
    """A clipped policy gradient, as in GRPO and its relatives.

    Data: `advantages` [B] or [B, T]; `old_log_probs` [B, T], those of the policy itself without them; `ref_log_probs`
    [B, T], if beta is not 0; `sampling_ratio` [B] or [B, T], a factor on the loss of the ratio alone, such as the
    correction for an engine that samples; `num_items`, one number, divides the mean over tokens instead of their count.

    Attributes:
        mean: of the tokens' losses: over each sequence and then over `sequences` (GRPO), over all `tokens` (DAPO,
            BNPO), or their sum over B times `max_length` (Dr. GRPO), which is then needed.
        level: whether each `token` has a ratio, or each `sequence` the geometric mean of its tokens' (GSPO).
        clipping: `ppo`: the smaller of the ratio and the clipped ratio, times the advantage; `cispo`: the clipped ratio
            is a constant weight of the log-probability.
        epsilon_low, epsilon_high: ratios are clipped to [1 - low, 1 + high]; for `cispo` to at most `high`.
        delta: the highest ratio where it is not clipped (a negative advantage), or None.
        beta: weight of the divergence from the reference.
        kl: its estimator, k1, k2 or k3.
        corrects_kl: whether the ratio weights the divergence, too.
        entropy_weight: of the mean entropy of tokens, which is subtracted.

    Raises:
        RecipeError: an unknown word, or a number that is missing.
    """

    mean: str = "sequences"
    level: str = "token"
    clipping: str = "ppo"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    kl: str = "k3"
    corrects_kl: bool = False
    entropy_weight: float = 0.0
    max_length: int | None = None

    def __post_init__(self) -> None:
        words = {"mean": _MEANS, "level": _LEVELS, "clipping": _CLIPPINGS, "kl": tuple(_KL_ESTIMATORS)}
        for name, known in words.items():
            if getattr(self, name) not in known:
                given = short_repr(getattr(self, name))
                raise RecipeError(f"a policy objective has no {name} {given}. Known: {', '.join(known)}.")
        if self.mean == "length" and self.max_length is None:
            raise RecipeError("the mean over lengths needs max_length. Give the longest completion in tokens.")
        if self.clipping == "cispo" and self.level == "sequence":
            raise RecipeError("cispo weights tokens, not sequences. Use level='token'.")

    @property
    def group(self) -> int:
        return 0 if self.level == "token" else 1

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_weight != 0

    def prepare(self, mask: Tensor, data: Data) -> Data:
        _require(data, "a policy objective", "advantages", *(("ref_log_probs",) if self.beta else ()))
        prepared = {name: value for name, value in data.items() if name != "num_items"}
        counts = mask.float()
        count = counts.sum().clamp(min=1)
        if self.mean == "sequences":
            weight = counts / counts.sum(-1, keepdim=True).clamp(min=1) / max(len(mask), 1)
        elif self.mean == "tokens":
            items = data.get("num_items")
            weight = counts / (count if items is None else items.to(mask.device).float().clamp(min=1))
        else:
            assert self.max_length is not None
            weight = counts / max(len(mask) * self.max_length, 1)
        for name in ("advantages", "sampling_ratio"):
            if name in prepared:
                value = prepared[name]
                prepared[name] = (value[:, None] if value.ndim == 1 else value).expand(mask.shape)
        if self.needs_entropy:
            prepared["entropy_share"] = counts * (self.entropy_weight / count)
        return {**prepared, "weight": weight}

    def __call__(
        self,
        log_probs: Tensor,
        mask: Tensor,
        *,
        weight: Tensor,
        advantages: Tensor,
        old_log_probs: Tensor | None = None,
        ref_log_probs: Tensor | None = None,
        sampling_ratio: Tensor | None = None,
        entropy: Tensor | None = None,
        entropy_share: Tensor | None = None,
    ) -> Evaluated:
        log_ratio = log_probs - (log_probs.detach() if old_log_probs is None else old_log_probs)
        if self.level == "sequence":
            # a padded token may have any old log-probability
            log_ratio = _score(log_ratio, mask, averages=True)[:, None].expand(log_probs.shape)
        ratio = log_ratio.exp()
        is_weight = self.clipping == "cispo"
        low, high = (None, self.epsilon_high) if is_weight else (1 - self.epsilon_low, 1 + self.epsilon_high)
        clipped = ratio.clamp(low, high)
        if is_weight:
            losses = -clipped.detach() * advantages * log_probs
        else:
            free = ratio if self.delta is None else ratio.clamp(max=self.delta)
            losses = -torch.minimum(free * advantages, clipped * advantages)
        if sampling_ratio is not None:
            losses = losses * sampling_ratio
        counts = mask.sum().clamp(min=1)
        is_clipped = (ratio > high) & (advantages > 0)
        if low is not None:
            is_clipped = is_clipped | ((ratio < low) & (advantages < 0))
        metrics = {"clipped_share": (is_clipped & mask).sum() / counts}
        if self.beta:
            assert ref_log_probs is not None
            divergence = _KL_ESTIMATORS[self.kl](ref_log_probs - log_probs)
            if self.corrects_kl:
                divergence = divergence * ratio
            losses = losses + self.beta * divergence
            metrics["kl"] = torch.where(mask, divergence.detach(), 0.0).sum() / counts
        # not a product: ignored positions may hold any number
        loss = torch.where(mask, losses * weight, 0.0).sum()
        if entropy is not None and entropy_share is not None:
            loss = loss - (entropy * entropy_share).sum()
        return loss, metrics


def _score(log_probs: Tensor, mask: Tensor, *, averages: bool = False) -> Tensor:
    """The sum or mean of each sequence's log-probabilities, [B]."""
    total = torch.where(mask, log_probs, 0.0).sum(-1)
    return total / mask.sum(-1).clamp(min=1) if averages else total


def _of_sequences(ref_log_probs: Tensor, mask: Tensor, *, averages: bool) -> Tensor:
    """The scores of a reference whose log-probabilities are given for each position, or are scores already."""
    return _score(ref_log_probs, mask, averages=averages) if ref_log_probs.ndim > 1 else ref_log_probs


def _require(data: Data, what: str, *names: str) -> None:
    for name in names:
        if name not in data:
            raise KernelInputError(f"{what} needs {name}. Pass it by name, one value for each sequence or position.")


_TOKENS = PolicyObjective(mean="tokens")
PRESETS: Mapping[str, Any] = {
    "dpo": PreferenceObjective(),
    "cpo": PreferenceObjective(nll_weight=1.0),
    "simpo": PreferenceObjective(average=True, gamma=0.5),
    "orpo": PreferenceObjective(loss_type="odds", average=True, nll_weight=1.0),
    "kto": KtoObjective(),
    "grpo": PolicyObjective(),
    # its max_length must be given
    "dr_grpo": lambda **settings: PolicyObjective(mean="length", **settings),
    "bnpo": _TOKENS,
    "dapo": replace(_TOKENS, epsilon_high=0.28),
    "gspo": PolicyObjective(level="sequence", epsilon_low=3e-4, epsilon_high=4e-4),
    "cispo": replace(_TOKENS, clipping="cispo", epsilon_high=5.0),
}


def objective(name: str, **settings: Any) -> Objective:
    """An objective by its name in `PRESETS`, with other settings.

    Raises:
        RecipeError: there is no such objective or setting, or a setting is out of range.
    """
    if name not in PRESETS:
        raise RecipeError(
            f"unknown objective {short_repr(name)}.{did_you_mean(name, PRESETS)} Known: {', '.join(PRESETS)}."
        )
    preset = PRESETS[name]
    try:
        made: Objective = preset(**settings) if name == "dr_grpo" else replace(preset, **settings)
    except TypeError as error:
        raise RecipeError(f"objective {name}: {error}.") from None
    return made
