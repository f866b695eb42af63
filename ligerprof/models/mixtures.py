"""Describe a mixture of experts: router, experts, the expert that all tokens share, and the layers that have them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ligerprof.models.config_keys import SparseLayers
from ligerprof.words import Word

# transformers' implementations of experts that the estimate follows; None: the default, grouped_mm
COVERED = (None, "grouped_mm", "eager")


class Scoring(Word):
    """How a router turns logits into the scores of each token's experts."""

    # softmax over all experts; the highest scores
    SOFTMAX = "softmax"
    # the highest logits; softmax over them
    SOFTMAX_OF_CHOSEN = "softmax of chosen"
    # sigmoid of logits in fp32; a bias and the scores of groups of experts decide which are chosen
    SIGMOID = "sigmoid"
    # sigmoid of logits that are cast to fp32; a bias decides which are chosen
    WIDE_SIGMOID = "wide sigmoid"
    # softmax of logits in fp32; the scores of groups of experts may limit which are chosen; their scores are scaled
    GROUPED_SOFTMAX = "grouped softmax"
    # softmax over all experts, outside of autocast; a bias decides which are chosen
    BIASED_SOFTMAX = "biased softmax"
    # one expert after another, drawn by a softmax of the logits that are near the highest (`sparsemixer`)
    DRAWN = "drawn"


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedExpert:
    """A gated MLP next to the experts, which every token goes through.

    Attributes:
        width: the config key of its intermediate size (0: the layers have no such expert).
        times: the config key of a number that multiplies this size (0: the layers have no such expert), or None.
        name: the MLP.
        gate: the linear layer whose sigmoid multiplies its output, or None.
        runs_last: whether it runs after the experts, rather than before them.
        in_layer: whether it is a module of the decoder layer, rather than of the mixture.
    """

    width: str = "shared_expert_intermediate_size"
    times: str | None = None
    name: str = "shared_expert"
    gate: str | None = "shared_expert_gate"
    runs_last: bool = False
    in_layer: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A mixture of experts in place of an MLP, with the weights of all experts in one parameter each.

    Attributes:
        count: the config key of the number of experts.
        chosen: the config key of the number of experts per token, or the number that the code draws whatever the key.
        width: the config key of an expert's intermediate size.
        router: the module that has the router's weight.
        widens_router: whether the router casts its input to fp32.
        widens_chosen: whether the logits of the chosen experts are softened in fp32.
        casts_logits: whether the router casts its logits to fp32 before the softmax.
        normalizes: whether the scores of a token's experts are divided by their sum, or the config key that decides.
        noise: the config key of the amplitude of random factors that training multiplies the input by, in place.
        noise_in_router: whether the router multiplies its view of the input once more.
        narrows_scores: whether the scores are cast to the dtype of the logits.
        multiplies_all: whether every expert multiplies all tokens, which the sigmoid of the highest logits scales, so
            that the weights are factors of a batched product, stored as (in, out).
        clamped: whether gate and up lie interleaved in the experts' weights and are clamped, and the weights are stored
            as (in, out) with biases.
        shared: an expert that every token goes through, or None.
        adapted_by_name: whether peft adapts the experts' parameters where an MLP's layers are named, and leaves the
            linear layers of these names alone.
        optional: whether a config may have 0 experts.
        layers: the layers that have experts, while others have an MLP; None: all of them.
    """

    count: str = "num_experts"
    chosen: str | int = "num_experts_per_tok"
    width: str = "intermediate_size"
    name: str = "experts"
    router: str = "gate"
    scoring: Scoring = Scoring.SOFTMAX
    widens_router: bool = False
    widens_chosen: bool = True
    casts_logits: bool = False
    normalizes: bool | str = "norm_topk_prob"
    noise: str | None = None
    noise_in_router: bool = False
    narrows_scores: bool = True
    multiplies_all: bool = False
    clamped: bool = False
    shared: SharedExpert | None = None
    adapted_by_name: bool = False
    optional: bool = False
    layers: SparseLayers | None = None

    def are_left_out(self, config: Mapping[str, Any]) -> bool:
        """Whether the layers have the expert that all tokens share alone, as their MLP."""
        return self.optional and config.get(self.count) == 0
