"""The description of a model: its sizes and the name and shape of every parameter, without torch."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ligerprof.errors import UnknownModelError
from ligerprof.models.architecture import Architecture, Dropout, Feature
from ligerprof.models.architectures import find_architecture


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterShape:
    """One parameter tensor, by its name in transformers' `named_parameters()`."""

    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A causal language model.

    Attributes:
        name: the name that the user gave.
        model_type: transformers' name of the architecture.
        config_json: the whole transformers config as canonical JSON; the real model is built from it.
        weights_path: a folder that holds weights to load, or None for random ones.
        parameters: every parameter tensor in transformers' order; empty if `no_estimate_reason` is set.
        final_softcap: cap of the logits, or None.
        attention_softcap: cap of the attention scores, or None.
        no_estimate_reason: why the estimate does not cover this architecture, or None.
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
    final_softcap: float | None = None
    attention_softcap: float | None = None
    parameters: tuple[ParameterShape, ...] = field(default=(), repr=False)
    no_estimate_reason: str | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The transformers config, a fresh dict each time."""
        config: dict[str, Any] = json.loads(self.config_json)
        return config

    @property
    def architecture(self) -> Architecture:
        """The row of its `model_type`."""
        return find_architecture(self.model_type)

    @property
    def module_names(self) -> tuple[str, ...]:
        """Names of all modules with weights, without their paths, such as `q_proj` and `lm_head`."""
        paths = (*(item.name.rpartition(".")[0] for item in self.parameters), self.architecture.head)
        return tuple(dict.fromkeys(path.rpartition(".")[2] for path in paths))

    @property
    def features(self) -> frozenset[Feature]:
        """Operations that kernels can replace; a partial rotation is not one of them."""
        found = self.architecture.features
        return found if self.rotary_dim == self.head_dim else found - {Feature.ROTARY}

    @property
    def rotary(self) -> bool:
        """Whether positions rotate query and key; otherwise they have a learned embedding."""
        return self.architecture.attention.rotary is not None

    @property
    def rotary_dim(self) -> int:
        """Elements of each head that are rotated."""
        rotary, config = self.architecture.attention.rotary, _parsed(self.config_json)
        if rotary is None or rotary.share is None:
            return self.head_dim
        settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
        return int(self.head_dim * settings.get(rotary.share, config.get(rotary.share, 1.0)))

    @property
    def sliding_window(self) -> int | None:
        """Tokens of the attention window, None if no layer has one."""
        window = self.architecture.attention.window
        config = _parsed(self.config_json)
        if window is None or (window.switch is not None and not config.get(window.switch, False)):
            return None
        size: int | None = config.get(window.key, window.default)
        return size if self._first_windowed_layer < self.layers else None

    @property
    def mixes_windows(self) -> bool:
        """Whether some layers have a window and others do not."""
        window = self.architecture.attention.window
        if self.sliding_window is None or window is None or not window.mixes:
            return False
        return window.from_layer is None or self._first_windowed_layer > 0

    @property
    def has_idle_mask(self) -> bool:
        """Whether the decoder also makes the mask of layers without a window, which no layer uses."""
        window = self.architecture.attention.window
        return self.sliding_window is not None and window is not None and window.mixes and not self.mixes_windows

    @property
    def _first_windowed_layer(self) -> int:
        window = self.architecture.attention.window
        if window is None or window.from_layer is None:
            return 0
        key, default = window.from_layer
        first: int = _parsed(self.config_json).get(key, default)
        return first

    def dropout_rate(self, dropout: Dropout | None) -> float:
        """The dropout probability in the config; 0 for None."""
        return 0.0 if dropout is None else float(_parsed(self.config_json).get(dropout.key, dropout.default))

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters, tied ones once; raises UnknownModelError if the architecture has no row."""
        if self.no_estimate_reason is not None:
            raise UnknownModelError(f"{self.name}: {self.no_estimate_reason}")
        return sum(parameter.elements for parameter in self.parameters)


@lru_cache(maxsize=64)
def _parsed(config_json: str) -> Mapping[str, Any]:
    config: dict[str, Any] = json.loads(config_json)
    return config


def canonical_json(config: Mapping[str, Any]) -> str:
    """Equal configs as equal text, so that their specs are equal."""
    return json.dumps(config, sort_keys=True, separators=(",", ":"))
