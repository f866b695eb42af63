"""Parts that rows share: tensors of attention, MLP and norms, windows, norms."""

from ligerprof.models.architecture import Feature, Linear, Mlp, Norm, NormWeight
from ligerprof.models.config_keys import LayerChoice, SlidingWindow

Bias = bool | str


def attention_tensors(
    *, qkv_bias: Bias = False, out_bias: Bias = False, out: str = "o_proj", name: str = "self_attn"
) -> tuple[Linear, ...]:
    """Projections of query, key, value and output."""
    return (
        Linear(name=f"{name}.q_proj", inputs="hidden", outputs=("query",), bias=qkv_bias),
        Linear(name=f"{name}.k_proj", inputs="hidden", outputs=("key",), bias=qkv_bias),
        Linear(name=f"{name}.v_proj", inputs="hidden", outputs=("key",), bias=qkv_bias),
        Linear(name=f"{name}.{out}", inputs="query", outputs=("hidden",), bias=out_bias),
    )


def head_norms(query: str = "q_norm", key: str = "k_norm") -> tuple[NormWeight, ...]:
    """Norms of each head of query and key."""
    return (NormWeight(name=f"self_attn.{query}", width="head"), NormWeight(name=f"self_attn.{key}", width="head"))


def gated_tensors(*, bias: Bias = False, sparse: bool | None = None) -> tuple[Linear, ...]:
    """A gated MLP of three linear layers, in all layers or only in those with or without experts."""
    return (
        Linear(name="mlp.gate_proj", inputs="hidden", outputs=("intermediate",), bias=bias, sparse=sparse),
        Linear(name="mlp.up_proj", inputs="hidden", outputs=("intermediate",), bias=bias, sparse=sparse),
        Linear(name="mlp.down_proj", inputs="intermediate", outputs=("hidden",), bias=bias, sparse=sparse),
    )


def joint_gated_tensors() -> tuple[Linear, ...]:
    """A gated MLP whose gate and up are one projection."""
    return (
        Linear(name="mlp.gate_up_proj", inputs="hidden", outputs=("intermediate", "intermediate")),
        Linear(name="mlp.down_proj", inputs="intermediate", outputs=("hidden",)),
    )


def plain_tensors(up: str, down: str, *, bias: Bias) -> tuple[Linear, ...]:
    """An MLP of two linear layers."""
    return (
        Linear(name=f"mlp.{up}", inputs="hidden", outputs=("intermediate",), bias=bias),
        Linear(name=f"mlp.{down}", inputs="intermediate", outputs=("hidden",), bias=bias),
    )


def norm_tensors(*names: str) -> tuple[NormWeight, ...]:
    """Norms of the residual stream."""
    return tuple(NormWeight(name=name) for name in names)


CONFIGURED_ATTENTION = attention_tensors(qkv_bias="attention_bias", out_bias="attention_bias")
TWO_NORMS = norm_tensors("input_layernorm", "post_attention_layernorm")
# transformers builds most MLPs without biases, whatever the config says
PLAIN_GATED = gated_tensors()

JOINT_SWIGLU = Mlp(inputs=("gate_up_proj",), activation="activation_fn")
SQUARED_RELU = Mlp(gate=None, inputs=("up_proj",), function=("hidden_act", "relu2"))
GEGLU = Mlp(gate=Feature.GEGLU, function=("hidden_activation", "gelu_pytorch_tanh"))

GEMMA_NORM = Norm(offset=1.0)

QWEN_WINDOW = SlidingWindow(
    default=4096, switch="use_sliding_window", layers=LayerChoice(from_layer=("max_window_layers", 28))
)


def periodic_window(
    period: int, *, key: str | None = None, default: int = 4096, leaves_first: bool = False
) -> SlidingWindow:
    """A window in all layers but one of each period."""
    layers = LayerChoice(period=period, period_key=key, leaves_first=leaves_first)
    return SlidingWindow(default=default, layers=layers)
