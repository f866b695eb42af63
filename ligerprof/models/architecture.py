"""Describe an architecture: its parameters, the operations of a decoder layer, and module names.

The estimate, attribution and patching read only the row of an architecture (models/architectures.py), never the
model's code. Module names are those in transformers.
"""

from dataclasses import dataclass
from typing import Literal

from ligerprof.words import Word

# query: heads x head_dim; key: key-value heads x head_dim
Width = Literal["hidden", "intermediate", "query", "key", "head"]


class Feature(Word):
    """An operation that a kernel slot can replace."""

    ROTARY = "rotary"
    RMS_NORM = "rms norm"
    LAYER_NORM = "layer norm"
    SWIGLU = "swiglu"
    GEGLU = "geglu"
    LOSS = "loss"


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """A linear layer of a decoder layer; its dotted name is relative to the decoder layer.

    Attributes:
        outputs: the output's width; several widths are projections joined in one matrix.
        bias: whether it has a bias, or the config key that decides (absent means no bias).
        transposed: whether the weight is stored as (in, out), as in transformers' Conv1D.
    """

    name: str
    inputs: Width
    outputs: tuple[Width, ...]
    bias: bool | str = False
    transposed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class NormWeight:
    """The weight of a norm in a decoder layer; LayerNorms have a bias as well."""

    name: str
    width: Width = "hidden"


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropout:
    """The config key of a dropout probability, and the probability if the config lacks the key."""

    key: str
    default: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Softcap:
    """The config key of the cap of scores or logits (null: uncapped), and the cap if the config lacks the key."""

    key: str
    default: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SlidingWindow:
    """Which layers attend to a window of tokens only.

    Attributes:
        key: the config key of the window's size in tokens; null turns the window off.
        default: the size if the config lacks the key.
        switch: the config key that turns the window on; None if it is always on.
        from_layer: the config key of the first layer with a window, and its default. None: every layer has one,
            or with `mixes` every second layer.
        mixes: whether some layers may attend to all tokens, so that transformers builds two masks.
    """

    key: str = "sliding_window"
    default: int | None = None
    switch: str | None = None
    from_layer: tuple[str, int] | None = None
    mixes: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """How the norms compute.

    Attributes:
        eps: the attribute of an RMS norm that holds epsilon.
        offset: added to the weight.
        casts_last: whether the weight multiplies in fp32, before the cast to the input's dtype.
    """

    feature: Feature = Feature.RMS_NORM
    eps: str = "variance_epsilon"
    offset: float = 0.0
    casts_last: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """How `apply_rotary_pos_emb` rotates query and key.

    Attributes:
        fp32_tables: whether cos and sin stay in fp32; the results are cast to the dtype of query and key.
        share: the config key of the rotated share of each head; rotated and unrotated elements are then concatenated.
    """

    fp32_tables: bool = False
    share: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidualDropout:
    """The dropout modules applied to the outputs of attention and MLP, before the residual additions."""

    after_attention: str
    after_mlp: str
    dropout: Dropout


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """How a layer attends. Module names are relative to the attention module.

    Attributes:
        qkv: the projections of query, key and value, or one joint projection.
        slices: whether the joint projection's result is indexed rather than `split`.
        qk_norms: norms of query and key; the widths of their weights decide whether they norm each head or all.
        rotary: how positions rotate query and key; None with learned positions.
        fp32_softmax: whether eager attention computes the softmax in fp32.
        dropout: applied to the attention probabilities.
        output_dropout: applied to the output projection's result, within the attention module.
        softcap: applied to the scores.
    """

    name: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    slices: bool = False
    out: str = "o_proj"
    qk_norms: tuple[str, str] | None = None
    rotary: Rotary | None = Rotary()
    fp32_softmax: bool = True
    window: SlidingWindow | None = None
    dropout: Dropout = Dropout(key="attention_dropout")
    output_dropout: Dropout | None = None
    softcap: Softcap | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlp:
    """How a layer's MLP computes. Module names are relative to the MLP module.

    Attributes:
        gate: how the activated gate multiplies the other projection; None for a plain MLP with GELU.
        inputs: the projections of gate and up, or one joint projection; without a gate, the only input projection.
        activation: the attribute that holds a gated MLP's activation function.
        dropout: applied to the last projection's result, within the MLP module.
    """

    gate: Feature | None = Feature.SWIGLU
    name: str = "mlp"
    inputs: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    activation: str = "act_fn"
    dropout: Dropout | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNorms:
    """The norms of a decoder layer, applied to a sublayer's input, to its output before the addition, or to both.

    Attributes:
        held_in_mlp: whether the layer's code holds the normed input of the MLP until the last addition.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    held_in_mlp: bool = False

    @property
    def adds_before_norm(self) -> bool:
        """Whether a norm follows the first addition, so that one kernel can do both."""
        return self.before_attention is not None and self.before_mlp is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One architecture of transformers.

    Attributes:
        class_prefix: prefix of the classes in its modeling module, such as `Llama` in `LlamaRMSNorm`.
        tensors: the weights of one decoder layer, in the order of transformers' `named_parameters()`.
        layers: the list of decoder layers.
        positions: the embedding of learned positions.
        embedding_dropout: applied to the sum of both embeddings.
        scales_embedding: whether the embedding's output is multiplied by a number.
        final_softcap: applied to the logits.
        tied_by_default: whether head and embedding share their weight if the config lacks the key.
        mask_by_position: whether the decoder passes the mask to its layers by position, so that checkpointing
            saves it with the layer's input.
        output_class: class of the causal model's result, in transformers.modeling_outputs.
        peft_targets: the layers that peft adapts if none are named; empty if peft knows none.
    """

    model_type: str
    class_prefix: str
    tensors: tuple[Linear | NormWeight, ...]
    embedding: str = "model.embed_tokens"
    positions: str | None = None
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    norm: Norm = Norm()
    attention: Attention = Attention()
    mlp: Mlp = Mlp()
    layer_norms: LayerNorms = LayerNorms()
    embedding_dropout: Dropout | None = None
    residual_dropout: ResidualDropout | None = None
    scales_embedding: bool = False
    final_softcap: Softcap | None = None
    tied_by_default: bool = False
    mask_by_position: bool = False
    output_class: str = "CausalLMOutputWithPast"
    peft_targets: tuple[str, ...] = ("q_proj", "v_proj")

    @property
    def modeling_module(self) -> str:
        """Import path of the modeling module."""
        return f"transformers.models.{self.model_type}.modeling_{self.model_type}"

    @property
    def features(self) -> frozenset[Feature]:
        """Operations that kernels can replace."""
        found = {Feature.LOSS, self.norm.feature}
        if self.attention.rotary is not None:
            found.add(Feature.ROTARY)
        if self.mlp.gate is not None:
            found.add(self.mlp.gate)
        return frozenset(found)

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Module names of the linear layers that LoRA adapts: all but Conv1D layers."""
        linears = (item for item in self.tensors if isinstance(item, Linear) and not item.transposed)
        return tuple(item.name.rpartition(".")[2] for item in linears)
