"""What is trained: the shape of a decoder, every parameter tensor named, nothing of torch."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ligerprof.errors import UnknownModelError

NormKind = Literal["rms", "layer"]
MlpKind = Literal["swiglu", "geglu", "gelu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterShape:
    """One parameter tensor.

    Attributes:
        name: as in transformers' `named_parameters()`.
        shape: elements along each axis.
    """

    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A causal language model as memory sees it.

    Attributes:
        name: what the user called it.
        model_type: transformers' name of the architecture.
        config_json: the whole transformers config as canonical JSON, to build the real model from.
        weights_path: a folder that holds weights to load, or None for random ones.
        parameters: every parameter tensor in transformers' order; empty where `closed_form_gap` is set.
        norms_per_layer: norms on the residual stream in one decoder layer (Gemma 2 has four).
        rotary: whether positions enter by rotation; else they are learned and added.
        closed_form_gap: why there is no closed form for this architecture, or None.
    """

    name: str
    model_type: str
    config_json: str
    weights_path: str | None = None
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    tied_embeddings: bool
    norm: NormKind
    mlp: MlpKind
    norms_per_layer: int = 2
    rotary: bool = True
    final_softcap: float | None = None
    attention_softcap: float | None = None
    parameters: tuple[ParameterShape, ...] = field(default=(), repr=False)
    closed_form_gap: str | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The transformers config, a fresh dict each time."""
        config: dict[str, Any] = json.loads(self.config_json)
        return config

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters, tied ones once.

        Raises:
            UnknownModelError: the architecture's tensors are not described here.
        """
        if self.closed_form_gap is not None:
            raise UnknownModelError(f"{self.name}: {self.closed_form_gap}")
        return sum(parameter.elements for parameter in self.parameters)


def canonical_json(config: Mapping[str, Any]) -> str:
    """One text for one config, so that specs of equal configs are equal."""
    return json.dumps(config, sort_keys=True, separators=(",", ":"))
