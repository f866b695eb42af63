"""Describe an architecture: its parameters, the operations of a decoder layer, and module names.

The estimate, attribution and patching read only the row of an architecture (models/rows/), never the
model's code. Module names are those in transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ligerprof.models.config_keys import AdjustedWidth, LayerChoice, Number, SlidingWindow
from ligerprof.models.mixers import Experts, Mixer
from ligerprof.words import Word

# heads: their number; query: heads x head_dim; key: key-value heads x head_dim; experts: their number; expert: the
# intermediate size of one;
# shared: that of the expert that all tokens go through
# delta key, value, heads, head: key, value, value heads and one head's value of a gated delta net; kernel: tokens that
# its convolution reads
# ssm inner, heads, states: value, heads, and inputs of all states of a Mamba-2 mixer
# the others are sizes of latent attention
Width = Literal[
    "latent query",
    "direct query",
    "query rank",
    "key rank",
    "key rank rotated",
    "key and value",
    "attended",
    "hidden",
    "intermediate",
    "query",
    "key",
    "head",
    "heads",
    "experts",
    "expert",
    "shared",
    "one",
    "delta key",
    "delta value",
    "delta heads",
    "delta head",
    "kernel",
    "ssm inner",
    "ssm heads",
    "ssm states",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """A linear layer of a decoder layer; its dotted name is relative to the decoder layer.

    Attributes:
        outputs: the output's width; several widths are projections joined in one matrix.
        bias: whether it has a bias, or the config key that decides (absent means no bias).
        transposed: whether the weight is stored as (in, out), as in transformers' Conv1D.
        sparse: whether only layers with experts have it (True), or only layers without (False).
        fp32: whether it is in fp32, whatever the model's dtype.
        recurrent: whether only layers without attention have it (True), or only layers with attention (False).
    """

    name: str
    inputs: Width
    outputs: tuple[Width, ...]
    bias: bool | str = False
    transposed: bool = False
    sparse: bool | None = None
    fp32: bool = False
    recurrent: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RawWeight:
    """A parameter of a module that is neither a linear layer nor a norm.

    Attributes:
        name: the module, relative to the decoder layer.
        parameter: the parameter's name in the module.
        shape: the sizes of its dimensions, each a sum of widths.
        when: the config key that turns it on; None if it is always there.
        sparse: whether only layers with experts have it.
        fp32: whether it is in fp32, whatever the model's dtype.
        trained: whether it is trained.
        recurrent: as of a linear layer.
        activation: the activation function whose parameter it is, or None.
    """

    name: str
    parameter: str
    shape: tuple[tuple[Width, ...], ...]
    when: str | None = None
    sparse: bool | None = None
    fp32: bool = False
    trained: bool = True
    recurrent: bool | None = None
    activation: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NormWeight:
    """The weight of a norm in a decoder layer; LayerNorms have a bias as well.

    Attributes:
        when: the config key that turns the norm on; None if it is always there.
        unless: the config key that turns it off.
        by_head: whether the weight is a matrix with a row per head.
        recurrent: as of a linear layer.
    """

    name: str
    width: Width = "hidden"
    when: str | None = None
    unless: str | None = None
    by_head: bool = False
    recurrent: bool | None = None


class Feature(Word):
    """An operation that a kernel slot can replace."""

    ROTARY = "rotary"
    RMS_NORM = "rms norm"
    LAYER_NORM = "layer norm"
    SWIGLU = "swiglu"
    GEGLU = "geglu"
    LOSS = "loss"


class NormForm(Word):
    """The code of a norm's forward."""

    RMS = "rms"
    LAYER = "layer"
    # LayerNorm by a weight plus one, in autocast's dtype
    LAYER_PLUS_ONE = "layer plus one"
    # LayerNorm without weights, in fp32
    LAYER_BARE = "layer bare"
    # LayerNorm without a bias, written as tensor operations in fp32
    CENTERED = "centered"

    @property
    def feature(self) -> Feature | None:
        """The operation that a kernel can replace."""
        return {"rms": Feature.RMS_NORM, "layer": Feature.LAYER_NORM}.get(self)

    @property
    def has_weight(self) -> bool:
        """Whether it has a weight."""
        return self is not NormForm.LAYER_BARE

    @property
    def has_bias(self) -> bool:
        """Whether it has a bias."""
        return self in (NormForm.LAYER, NormForm.LAYER_PLUS_ONE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """How the norms compute.

    Attributes:
        offset: added to the weight.
    """

    form: NormForm = NormForm.RMS
    offset: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """How `apply_rotary_pos_emb` rotates query and key.

    Attributes:
        share: the config key of the rotated share of each head; rotated and unrotated elements are then concatenated.
        when: the config key that turns the rotation on, and the value that does; None: it is always on.
        layers: the layers that rotate; None: all of them.
        only_with_window: whether layers without a window do not rotate: never, or unless the window is off.
        other: whether it is not the halves of a head that rotate by tables as wide as a head, in one call for query and
            key, which a kernel can do.
    """

    share: str | None = None
    when: tuple[str, str] | None = None
    layers: LayerChoice | None = None
    only_with_window: Literal["never", "unless off"] | None = None
    other: bool = False


_ATTENTION_DROPOUT = Number(key="attention_dropout")


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """How a layer attends. Module names are relative to the attention module.

    Attributes:
        qkv: the projections of query, key and value, or one joint projection.
        qk_norms: norms of query and key; the widths of their weights decide whether they norm each head or all.
        norms_apart: whether these norms read heads that lie apart, [batch, heads, tokens, head_dim].
        grouped: whether key and value may have fewer heads than the query.
        splits_hidden: whether the heads divide the hidden size, whatever `head_dim` the config gives.
        rotary: how positions rotate query and key; None with learned positions.
        dropout: applied to the attention probabilities.
        softcap: applied to the scores.
        latent: whether query, key and value go through latents (`models/mixers.py`).
        sinks: whether each head has a learned score more, which only eager attention knows.
    """

    name: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    qk_norms: tuple[str, str] | None = None
    norms_apart: bool = False
    grouped: bool = True
    splits_hidden: bool = False
    rotary: Rotary | None = Rotary()
    window: SlidingWindow | None = None
    dropout: Number = _ATTENTION_DROPOUT
    softcap: Number | None = None
    latent: bool = False
    sinks: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlp:
    """How a layer's MLP computes. Module names are relative to the MLP module.

    Attributes:
        gate: how the activated gate multiplies the other projection; None for a plain MLP.
        inputs: the projections of gate and up, or one joint projection; without a gate, the only input projection.
        activation: the attribute that holds a gated MLP's activation function; None if its code calls the function.
        function: the config key of the activation function, and its name if the config lacks the key.
        legacy_function: a name in old configs that means that one.
        dropout: applied to the last projection's result, within the MLP module.
        experts: the mixture of experts that a layer has instead, or None.
        width: the config key of its intermediate size.
        adjusted: how the config changes this size, or None.
        dropout_attribute: the attribute of a gated MLP that holds the probability.
        sparsity_attribute: that of the share of gates that are set to zero first, which kernels cannot do.
        multipliers: the attributes of a gated MLP with the factors of its gate before the activation and of its output.
    """

    gate: Feature | None = Feature.SWIGLU
    name: str = "mlp"
    inputs: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    activation: str | None = "act_fn"
    function: tuple[str, str] = ("hidden_act", "silu")
    legacy_function: str | None = None
    dropout: Number | None = None
    experts: Experts | None = None
    width: str = "intermediate_size"
    adjusted: AdjustedWidth | None = None
    dropout_attribute: str | None = None
    sparsity_attribute: str | None = None
    multipliers: tuple[str, str] | None = None

    @property
    def linear_layers(self) -> tuple[str, ...]:
        """Names of its linear layers."""
        return (*self.inputs, self.down)

    @property
    def has_gates(self) -> bool:
        """Whether some layers may have the gated MLP, as such or as the expert that all tokens share."""
        return self.experts is None or self.experts.shared is not None or self.experts.layers is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNorms:
    """What a decoder layer applies to the inputs of its sublayers, and to their outputs before the additions.

    Attributes:
        after_attention, after_mlp: norms, and dropout modules.
        scales_sublayers: the attribute of a layer that multiplies each sublayer's output before the addition.
    """

    before_attention: str = "input_layernorm"
    after_attention: tuple[str, ...] = ()
    before_mlp: str = "post_attention_layernorm"
    after_mlp: tuple[str, ...] = ()
    scales_sublayers: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One architecture of transformers.

    Attributes:
        class_prefix: prefix of the classes in its modeling module, such as `Llama` in `LlamaRMSNorm`, where that does
            not follow from the model type.
        classes: the names of classes that do not begin with the prefix, by what follows it; versions of transformers
            differ.
        modeling: the folder of its modeling module in transformers; None: the one named as the model type.
        defaults: values that transformers assumes for keys that the config lacks, where they are not general.
        aliases: other names of config keys.
        tensors: the weights of one decoder layer, in the order of transformers' `named_parameters()`.
        not_estimated: config keys that turn on what the other fields cannot express.
        only_one: config keys that do so with any value but 1.
        mixer: what layers have instead of attention or in parallel with it, or None.
        streams: the config key of the number of residual streams, or None. The estimate needs a tape of a model with
            several; `tensors` has names alone.
        layer_inputs: the config keys of the vocabulary and the width of a layer's own embeddings, or None.
        switches: config keys, with their defaults, that turn parts of a layer on without changing its parameters.
        layer_norms: what a kernel of an addition and the RMS norm before the MLP needs; None where no norm follows the
            first addition, or the layer has further steps.
        auxiliary_loss: the config key that adds another loss to that of the logits.
        layers: the list of decoder layers.
        positions: the embedding of learned positions.
        scales_embedding: what multiplies the embedding's output by a number: its module, or the decoder.
        logit_scale: the config key of a factor on the logits.
        logit_divisor: the config key of a divisor of the logits.
        final_softcap: applied to the logits.
        mask_by_position: whether the decoder passes the mask to its layers by position, so that checkpointing
            saves it with the layer's input.
        head_bias: whether the head has a bias, or the config key that decides.
        masks_documents: whether the mask keeps documents of a packed row apart; the decoder may not give it positions.
        peft_targets: the layers that peft adapts if none are named; empty if peft knows none.
    """

    model_type: str
    class_prefix: str | None = None
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    modeling: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    tensors: tuple[Linear | NormWeight | RawWeight, ...]
    not_estimated: tuple[str, ...] = ()
    switches: Mapping[str, bool] = field(default_factory=dict)
    only_one: tuple[str, ...] = ()
    auxiliary_loss: str | None = None
    embedding: str = "model.embed_tokens"
    positions: str | None = None
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    head_bias: bool | str = False
    norm: Norm = Norm()
    attention: Attention = Attention()
    mixer: Mixer | None = None
    streams: str | None = None
    layer_inputs: tuple[str, str] | None = None
    mlp: Mlp = Mlp()
    layer_norms: LayerNorms | None = LayerNorms()
    scales_embedding: Literal["module", "decoder"] | None = None
    logit_scale: str | None = None
    logit_divisor: str | None = None
    final_softcap: Number | None = None
    mask_by_position: bool = False
    masks_documents: bool = True
    peft_targets: tuple[str, ...] = ()

    def named(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A config with the names that the row reads; of two names of one setting, transformers takes the alias."""
        return {**config, **{self.aliases[key]: value for key, value in config.items() if key in self.aliases}}

    def setting(self, config: Mapping[str, Any], key: str, default: Any = None) -> Any:
        """The value of a config key: the config's, or what transformers assumes."""
        return self.named(config).get(key, self.defaults.get(key, default))

    def logit_factor(self, config: Mapping[str, Any]) -> float:
        """The number that multiplies the logits."""
        factor = 1.0
        if self.logit_scale is not None:
            factor *= self.setting(config, self.logit_scale, 1.0)
        if self.logit_divisor is not None:
            factor /= self.setting(config, self.logit_divisor, 1.0)
        return factor

    @property
    def prefix(self) -> str:
        """Prefix of the classes in the modeling module."""
        return self.class_prefix or "".join(part.capitalize() for part in self.model_type.split("_"))

    @property
    def modeling_module(self) -> str:
        """Import path of the modeling module."""
        folder = self.modeling or self.model_type
        return f"transformers.models.{folder}.modeling_{folder}"

    @property
    def features(self) -> frozenset[Feature]:
        """Operations that kernels can replace."""
        found = {Feature.LOSS}
        if self.norm.form.feature is not None:
            found.add(self.norm.form.feature)
        if self.attention.rotary is not None:
            found.add(Feature.ROTARY)
        if self.mlp.gate is not None and self.mlp.has_gates:
            found.add(self.mlp.gate)
        return frozenset(found)

    @property
    def adaptable(self) -> tuple[str, ...]:
        """Module names that LoRA can adapt: `lora_targets`, the head, and an embedding that nothing is added to."""
        outer = (self.head,) if self.positions is not None or self.scales_embedding else (self.head, self.embedding)
        return (*self.lora_targets, *(name.rpartition(".")[2] for name in outer))

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Module names of the linear layers that LoRA adapts."""
        experts, left_out = self.mlp.experts, set[str]()
        if experts is not None and experts.adapted_by_name:
            left_out |= set(self.mlp.linear_layers)
        if self.mixer is not None and not self.mixer.adapts_out:
            left_out.add("out_proj")
        return tuple(name for name in self.linear_layers if name not in left_out)

    @property
    def router(self) -> str | None:
        """The module of a decoder layer that has the router's weight."""
        shape = (("experts",), ("hidden",))
        return next((item.name for item in self.tensors if isinstance(item, RawWeight) and item.shape == shape), None)

    @property
    def linear_layers(self) -> tuple[str, ...]:
        """Module names of the linear layers in decoder layers, without Conv1D layers."""
        linears = (item for item in self.tensors if isinstance(item, Linear) and not item.transposed)
        return tuple(dict.fromkeys(item.name.rpartition(".")[2] for item in linears))
