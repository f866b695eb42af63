"""What describes an architecture: its parameters, what a decoder layer computes, and the names kernels go by.

One `Architecture` per `model_type` (models/architectures.py) is all that the estimate, attribution and patching know
of a model's code. Names are those of transformers' modeling modules.
"""

from dataclasses import dataclass
from typing import Literal

NormKind = Literal["rms", "layer"]
MlpKind = Literal["swiglu", "geglu", "gelu"]
# query: heads x head_dim; key: key-value heads x head_dim
Width = Literal["hidden", "intermediate", "query", "key", "head"]
# what a kernel slot can replace
Feature = Literal["rotary", "rms norm", "layer norm", "swiglu", "geglu", "loss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """A linear layer of a decoder layer.

    Attributes:
        name: dotted name within the decoder layer.
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
    """The weight of a norm in a decoder layer; the architecture's norm decides whether it has a bias.

    Attributes:
        name: dotted name within the decoder layer.
    """

    name: str
    width: Width = "hidden"


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropout:
    """Where a dropout probability is found.

    Attributes:
        key: the config key.
        default: the probability if the config does not have the key.
    """

    key: str
    default: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Softcap:
    """Where the number that caps scores or logits is found.

    Attributes:
        key: the config key; null leaves them uncapped.
        default: the number if the config does not have the key.
    """

    key: str
    default: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SlidingWindow:
    """Which layers attend to a window of tokens only.

    Attributes:
        key: the config key of the window's size in tokens; null turns the window off.
        default: the size if the config does not have the key.
        switch: the config key that turns the window on; None if it always is.
        from_layer: the config key of the first layer with a window, and its default; None if every second layer
            has one or, unless `mixes` is set, every layer.
        mixes: whether some layers may attend to all tokens, so that two masks are made.
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
        offset: what is added to the weight.
        casts_last: whether the weight multiplies in fp32, before the cast to the input's dtype.
    """

    kind: NormKind = "rms"
    eps: str = "variance_epsilon"
    offset: float = 0.0
    casts_last: bool = False

    @property
    def feature(self) -> Feature:
        """What a kernel for these norms replaces."""
        return "rms norm" if self.kind == "rms" else "layer norm"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """How `apply_rotary_pos_emb` rotates query and key.

    Attributes:
        fp32_tables: whether cos and sin stay in fp32; the results are cast to the dtype of query and key.
        share: the config key of the part of each head that is rotated; the code then joins both parts again.
    """

    fp32_tables: bool = False
    share: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidualDropout:
    """Dropout modules of a decoder layer, before its additions.

    Attributes:
        after_attention: name of the module that takes attention's output.
        after_mlp: name of the module that takes the MLP's output.
    """

    after_attention: str
    after_mlp: str
    dropout: Dropout


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """How a layer attends. Module names are within the attention module.

    Attributes:
        qkv: the projections of query, key and value, or the one that makes all three.
        slices: whether the result of one projection is cut by indexing and not by `split`.
        qk_norms: norms of query and key, per head or of the whole projection as their weights' widths have it.
        rotary: how positions rotate query and key, None with learned positions.
        fp32_softmax: whether eager attention asks for the softmax in fp32.
        dropout: of the attention probabilities.
        output_dropout: of the output projection's result, within the attention module.
        softcap: of the scores.
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
    """How a layer's MLP computes. Module names are within the MLP module.

    Attributes:
        inputs: the projections of gate and up, or the one that makes both; without a gate, the one projection.
        activation: the attribute that holds a gated MLP's activation function.
        dropout: of the last projection's result, within the MLP module.
    """

    kind: MlpKind = "swiglu"
    name: str = "mlp"
    inputs: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    activation: str = "act_fn"
    dropout: Dropout | None = None

    @property
    def is_gated(self) -> bool:
        """Whether an activated gate multiplies another projection."""
        return self.kind != "gelu"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNorms:
    """The norms of a decoder layer: of each sublayer's input, of its output before the addition, or both.

    Attributes:
        held_in_mlp: whether the layer's code keeps the normed input of the MLP until the last addition.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    held_in_mlp: bool = False

    @property
    def adds_before_norm(self) -> bool:
        """Whether the first addition's sum is normed next, so that one kernel can do both."""
        return self.before_attention is not None and self.before_mlp is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One architecture of transformers.

    Attributes:
        class_prefix: of the classes in its modeling module, such as `Llama` in `LlamaRMSNorm`.
        tensors: the weights of one decoder layer, in the order of transformers' `named_parameters()`.
        layers: the list of decoder layers.
        positions: the embedding of learned positions.
        embedding_dropout: of the sum of both embeddings.
        residual_dropout: of what each sublayer adds.
        scales_embedding: whether the embedding's output is multiplied by a number.
        final_softcap: of the logits.
        tied_by_default: whether head and embedding share their weight if the config does not say.
        output_class: of the causal model's result, in transformers.modeling_outputs.
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
    output_class: str = "CausalLMOutputWithPast"

    @property
    def modeling_module(self) -> str:
        """Import path of the modeling module."""
        return f"transformers.models.{self.model_type}.modeling_{self.model_type}"

    @property
    def features(self) -> frozenset[Feature]:
        """What kernels could replace."""
        found: set[Feature] = {"loss", self.norm.feature}
        if self.attention.rotary is not None:
            found.add("rotary")
        if self.mlp.kind != "gelu":
            found.add(self.mlp.kind)
        return frozenset(found)

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Module names of the linear layers that LoRA adapts; Conv1D layers are not among them."""
        linears = (item for item in self.tensors if isinstance(item, Linear) and not item.transposed)
        return tuple(item.name.rpartition(".")[2] for item in linears)
