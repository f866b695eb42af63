"""The description of a model: its sizes and the name and shape of every parameter, without torch."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ligerprof.errors import UnknownModelError
from ligerprof.models.architecture import Architecture, Feature
from ligerprof.models.architectures import find_architecture, has_row
from ligerprof.models.config_keys import LayerChoice, Number, SparseLayers
from ligerprof.models.mixers import DeltaSizes, LatentSizes, StateSpaceSizes
from ligerprof.models.tape import Tape
from ligerprof.text import short_repr
from ligerprof.words import Word

# _LEGACY_LAYER_TYPE_REMAP in transformers' configuration_utils.py
_RENAMED = {"mamba": "linear_attention", "attention": "full_attention"}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKinds:
    """How the decoder layers of a model differ, with an entry per layer.

    Attributes:
        window_tokens: size of the attention window, or None.
        windowed: whether a layer attends to a window of tokens only.
        rotated: whether a layer rotates query and key.
        sparse: whether a layer has a mixture of experts.
        recurrent: whether a layer has a gated delta net, a short convolution or a Mamba-2 mixer instead of attention.
    """

    window_tokens: int | None
    windowed: tuple[bool, ...]
    rotated: tuple[bool, ...]
    sparse: tuple[bool, ...]
    recurrent: tuple[bool, ...]

    @property
    def examples(self) -> tuple[int, ...]:
        """The first layer of each kind."""
        first: dict[tuple[object, ...], int] = {}
        kinds = (self.windowed, self.rotated, self.sparse, self.recurrent)
        for index, kind in enumerate(zip(*kinds, strict=True)):
            first.setdefault(kind, index)
        return tuple(first.values())


def layer_kinds(row: Architecture, config: Mapping[str, Any], layers: int) -> LayerKinds:
    """The kinds of all layers.

    Raises:
        UnknownModelError: a list of layers or a period that the config gives is not one.
    """
    tokens = _window_tokens(row, config)
    window, rotary = row.attention.window, row.attention.rotary
    windowed = (False,) * layers
    if window is not None and tokens is not None:
        windowed = _chosen(row, window.layers, config, layers)
    rotated = (False,) * layers
    if rotary is not None and (rotary.when is None or row.setting(config, rotary.when[0]) == rotary.when[1]):
        rotates_all = rotary.only_with_window is None or (rotary.only_with_window == "unless off" and tokens is None)
        rotated = windowed if not rotates_all else _chosen(row, rotary.layers, config, layers)
    sparse = _with_experts(row, config, layers)
    instead = None if row.mixer is None else row.mixer.layers
    recurrent = (False,) * layers if instead is None else _chosen(row, instead, config, layers)
    return LayerKinds(
        window_tokens=tokens,
        windowed=windowed,
        rotated=rotated,
        sparse=sparse,
        recurrent=recurrent,
    )


def _with_experts(row: Architecture, config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    experts = row.mlp.experts
    if experts is None or experts.are_left_out(config):
        return (False,) * layers
    kinds = None if experts.layers is None else experts.layers.kinds
    if kinds is not None and row.setting(config, kinds) is not None:
        return _chosen(row, LayerChoice(key=kinds, chosen="sparse"), config, layers)
    return tuple(_sparse(row, config, layers))


def _sparse(row: Architecture, config: Mapping[str, Any], layers: int) -> Iterator[bool]:
    """Whether each layer has a mixture of experts, in an architecture that has them."""
    choice = SparseLayers() if row.mlp.experts is None else row.mlp.experts.layers or SparseLayers()

    def number(key: tuple[str | None, int] | None, default: int, smallest: int = 0) -> int:
        name, assumed = key or (None, default)
        return assumed if name is None else _number(name, row.setting(config, name, assumed), smallest=smallest)

    first, last = number(choice.first, 0), number(choice.last, -1, smallest=-1)
    every = number(choice.every, 1, smallest=1)
    if choice.listed is not None and (found := row.setting(config, choice.listed)) is not None:
        if not isinstance(found, list):
            raise UnknownModelError(f"{choice.listed!r} is {short_repr(found)}, not a list of layers. Fix the config.")
        yield from (index in found for index in range(layers))
        return
    dense = (row.setting(config, choice.dense) if choice.dense is not None else None) or ()
    if not isinstance(dense, (list, tuple)):
        raise UnknownModelError(f"{choice.dense!r} is {short_repr(dense)}, not a list of layers. Fix the config.")
    for index in range(layers):
        yield (
            first <= index <= (last % layers if last < 0 else last) and (index + 1) % every == 0 and index not in dense
        )


def _window_tokens(row: Architecture, config: Mapping[str, Any]) -> int | None:
    window = row.attention.window
    if window is None or (window.switch is not None and not row.setting(config, window.switch)):
        return None
    tokens = row.setting(config, window.key, window.default)
    return tokens if isinstance(tokens, int) else None


def _chosen(row: Architecture, choice: LayerChoice | None, config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    if choice is None:
        return (True,) * layers
    for key, chosen in ((choice.key, choice.chosen), *(() if choice.instead is None else (choice.instead,))):
        # an empty list is what a config without the key means
        if (listed := row.setting(config, key)) not in (None, []):
            if not isinstance(listed, list) or len(listed) < layers:
                raise UnknownModelError(f"{key!r} is not a list of {layers} entries. Fix the config.")
            return tuple(_renamed(entry) == chosen for entry in listed[:layers])
    if choice.others is not None:
        return _all_but(row, choice.others, config, layers, without=choice.without_others)
    if choice.from_layer is not None:
        first = row.setting(config, *choice.from_layer)
        return tuple(index >= _number(choice.from_layer[0], first) for index in range(layers))
    if choice.period is None:
        return (True,) * layers
    period = choice.period
    if choice.period_key is not None:
        period = _number(choice.period_key, row.setting(config, choice.period_key, period), smallest=1)
    left_out = 0 if choice.leaves_first else period - 1
    return tuple(index % period != left_out for index in range(layers))


def _renamed(entry: object) -> object:
    return _RENAMED.get(entry, entry) if isinstance(entry, str) else entry


def _all_but(row: Architecture, key: str, config: Mapping[str, Any], layers: int, *, without: bool) -> tuple[bool, ...]:
    listed = row.setting(config, key)
    if listed is None:
        return (without,) * layers
    if not isinstance(listed, list):
        raise UnknownModelError(f"{key!r} is {short_repr(listed)}, not a list of layers. Fix the config.")
    named = {entry for entry in listed if isinstance(entry, int)}
    return tuple(index not in named for index in range(layers))


def _number(key: str, value: object, *, smallest: int = 0) -> int:
    if not isinstance(value, int) or value < smallest:
        raise UnknownModelError(f"{key!r} is {short_repr(value)}, not an integer from {smallest}. Fix the config.")
    return value


# transformers' names of the functions that kernels of gated MLPs compute (activations.py, ACT2FN)
_GATE_ACTIVATIONS = {
    Feature.SWIGLU: ("silu", "swish"),
    Feature.GEGLU: ("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterShape:
    """One parameter tensor, by its name in transformers' `named_parameters()`.

    Attributes:
        fp32: whether it is in fp32, whatever the model's dtype.
        trained: whether it is trained.
    """

    name: str
    shape: tuple[int, ...]
    fp32: bool = False
    trained: bool = True

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Task(Word):
    """What a model is trained for, as transformers ends the names of its classes."""

    CAUSAL = "CausalLM"
    MASKED = "MaskedLM"
    SEQUENCES = "SequenceClassification"
    TOKENS = "TokenClassification"
    # of text and images; its steps have text alone
    IMAGES = "ConditionalGeneration"

    @property
    def predicts_tokens(self) -> bool:
        """Whether the labels are the tokens themselves."""
        return self in (Task.CAUSAL, Task.IMAGES)


def task_of(config: Mapping[str, Any]) -> Task:
    """What the class that a config names first is trained for."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    tasks = (task for task in Task if isinstance(name, str) and name.endswith(f"For{task}"))
    return next(tasks, Task.CAUSAL)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A causal language model.

    Attributes:
        name: the name that the user gave.
        model_type: transformers' name of the architecture.
        config_json: the whole transformers config as canonical JSON; the real model is built from it.
        weights_path: a folder that holds weights to load, or None for random ones.
        latent: sizes of latent attention, or None.
        delta: sizes of a gated delta net, or None.
        state_space: sizes of a Mamba-2 mixer, or None.
        text_of: the model type of the config that it is the text model of, where transformers builds that alone.
        experts: number of experts of a layer, 0 without any.
        chosen_experts: number of experts that a token goes through.
        expert_size: an expert's intermediate size.
        shared_size: that of the expert that every token goes through, 0 without one.
        parameters: every parameter tensor in transformers' order; empty if `no_estimate_reason` is set.
        final_softcap: cap of the logits, or None.
        attention_softcap: cap of the attention scores, or None.
        like: the known model whose sizes these are, for a name that nothing knows; None for a model of its own.
        no_estimate_reason: why the estimate does not cover this architecture, or None.
        tape: what its passes allocate, for an architecture without a row, or None.
        evaluation_tape: what an evaluation allocates.
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
    latent: LatentSizes | None = None
    delta: DeltaSizes | None = None
    state_space: StateSpaceSizes | None = None
    text_of: str | None = None
    experts: int = 0
    chosen_experts: int = 0
    expert_size: int = 0
    shared_size: int = 0
    parameters: tuple[ParameterShape, ...] = field(default=(), repr=False)
    like: str | None = None
    no_estimate_reason: str | None = None
    tape: Tape | None = field(default=None, repr=False, compare=False)
    evaluation_tape: Tape | None = field(default=None, repr=False, compare=False)

    @property
    def needs_eager(self) -> bool:
        """Whether transformers 5.23 computes its attention with eager alone: capped scores, or attention sinks."""
        return self.attention_softcap is not None or self.architecture.attention.sinks

    @property
    def config(self) -> dict[str, Any]:
        """The transformers config, a fresh dict each time."""
        config: dict[str, Any] = json.loads(self.config_json)
        return config

    @property
    def task(self) -> Task:
        """What the class that the config names is trained for."""
        return task_of(_parsed(self.config_json))

    @property
    def labels(self) -> int:
        """Classes that a classifier tells apart; 1 for a regression."""
        config = _parsed(self.config_json)
        number = config.get("num_labels", len(config.get("id2label") or (0, 1)))
        return number if isinstance(number, int) and number > 0 else 2

    @property
    def architecture(self) -> Architecture:
        """The row of its `model_type`."""
        return find_architecture(self.model_type)

    @property
    def module_names(self) -> tuple[str, ...]:
        """Names of all modules with weights, without their paths, such as `q_proj` and `lm_head`."""
        row = self.architecture
        outer = (row.embedding, row.head) if has_row(self.model_type) else (row.head,)
        paths = (*(item.name.rpartition(".")[0] for item in self.parameters), *outer)
        return tuple(dict.fromkeys(path.rpartition(".")[2] for path in paths))

    @property
    def features(self) -> frozenset[Feature]:
        """Operations that kernels can replace: a rotation of halves is one of them, a partial one is not.

        Nor is a gated MLP whose activation the config replaces with another.
        """
        found, rotary = self.architecture.features, self.architecture.attention.rotary
        found -= {gate for gate, names in _GATE_ACTIVATIONS.items() if self.activation not in names}
        if self.experts and all(self.layer_kinds.sparse) and not self.shared_size:
            found -= {Feature.SWIGLU, Feature.GEGLU}
        rotates = rotary is not None and (rotary.when is None or any(self.layer_kinds.rotated))
        rotates_halves = rotary is not None and rotates and not rotary.other and self.rotary_dim == self.head_dim
        return found if rotates_halves else found - {Feature.ROTARY}

    @property
    def rotary(self) -> bool:
        """Whether positions rotate query and key; otherwise they have a learned embedding."""
        return self.architecture.attention.rotary is not None

    def setting(self, key: str, default: Any = None) -> Any:
        """The value of a config key: the config's, or what transformers assumes."""
        return self.architecture.setting(_parsed(self.config_json), key, default)

    @property
    def rotary_dim(self) -> int:
        """Elements of each head that are rotated."""
        if self.latent is not None:
            return self.latent.rotated_dim
        rotary = self.architecture.attention.rotary
        if rotary is None or rotary.share is None:
            return self.head_dim
        settings = self.setting("rope_parameters") or self.setting("rope_scaling") or {}
        inner = settings.get(rotary.share) if isinstance(settings, Mapping) else settings
        share = self.setting(rotary.share, 1.0) if inner is None else inner
        return int(self.head_dim * self._share(rotary.share, share))

    @property
    def value_dim(self) -> int:
        """Elements of each head of the value."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def sliding_window(self) -> int | None:
        """Tokens of the attention window, None if no layer has one."""
        return self.layer_kinds.window_tokens if any(self.layer_kinds.windowed) else None

    @property
    def layer_kinds(self) -> LayerKinds:
        """How the decoder layers differ."""
        return _layer_kinds(self.config_json, self.model_type, self.layers)

    @property
    def scales_logits(self) -> bool:
        """Whether a number multiplies the logits."""
        return self.architecture.logit_scale is not None or self.architecture.logit_divisor is not None

    @property
    def has_head_bias(self) -> bool:
        """Whether the head has a bias."""
        bias = self.architecture.head_bias
        return bool(self.setting(bias)) if isinstance(bias, str) else bias

    @property
    def experts_implementation(self) -> str | None:
        """The implementation of experts that the config names, or None."""
        config = _parsed(self.config_json)
        given: str | None = config.get("experts_implementation", config.get("_experts_implementation"))
        return given

    @property
    def logit_factor(self) -> float:
        """The number that multiplies the logits."""
        return self.architecture.logit_factor(_parsed(self.config_json))

    @property
    def activation(self) -> str:
        """The name of the MLP's activation function: the config's, unless the MLP's code calls one by itself."""
        mlp = self.architecture.mlp
        key, default = mlp.function
        named = default if mlp.activation is None else str(self.setting(key) or default)
        return default if named == mlp.legacy_function else named

    def dropout_rate(self, dropout: Number | None) -> float:
        """The dropout probability in the config; 0 for None."""
        rate = None if dropout is None else self.setting(dropout.key, dropout.default)
        return 0.0 if dropout is None or rate is None else self._share(dropout.key, rate)

    def _share(self, key: str, value: Any) -> float:
        """A share of one under a config key; raises UnknownModelError for anything else."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise UnknownModelError(f"{self.name}: {key!r} is {short_repr(value)}, not a share of 1. Fix the config.")
        return float(value)

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


@lru_cache(maxsize=64)
def _layer_kinds(config_json: str, model_type: str, layers: int) -> LayerKinds:
    return layer_kinds(find_architecture(model_type), _parsed(config_json), layers)


def canonical_json(config: Mapping[str, Any]) -> str:
    """Equal configs as equal text, so that their specs are equal."""
    return json.dumps(config, sort_keys=True, separators=(",", ":"))
