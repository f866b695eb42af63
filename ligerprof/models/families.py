"""Turn a transformers config into a ModelSpec: one row of data an architecture."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ligerprof.errors import UnknownModelError
from ligerprof.models.spec import MlpKind, ModelSpec, NormKind, ParameterShape, canonical_json

Config = Mapping[str, Any]
Tensors = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What a model_type implies beyond the sizes in its config.

    Attributes:
        tensors: yields (name, shape) of every parameter in transformers' order.
        tied_by_default: what transformers assumes where the config is silent.
    """

    norm: NormKind
    mlp: MlpKind
    tensors: Callable[["_Sizes", Config], Tensors]
    norms_per_layer: int = 2
    rotary: bool = True
    tied_by_default: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int
    tied: bool


def _linear(name: str, out_features: int, in_features: int, bias: bool) -> Tensors:
    yield f"{name}.weight", (out_features, in_features)
    if bias:
        yield f"{name}.bias", (out_features,)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Biases:
    """Which linear layers of a decoder layer have one."""

    qkv: bool = False
    out: bool = False
    mlp: bool = False


def _attention_biases(config: Config) -> _Biases:
    wanted = bool(config.get("attention_bias", False))
    return _Biases(qkv=wanted, out=wanted)


def _decoder_tensors(
    sizes: _Sizes,
    biases: _Biases,
    *,
    qk_norm: bool = False,
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"),
) -> Tensors:
    """Llama and the decoders that differ from it in biases and norms alone."""
    yield "model.embed_tokens.weight", (sizes.vocab, sizes.hidden)
    for index in range(sizes.layers):
        layer = f"model.layers.{index}"
        yield from _attention_tensors(f"{layer}.self_attn", sizes, biases, qk_norm=qk_norm)
        yield from _linear(f"{layer}.mlp.gate_proj", sizes.intermediate, sizes.hidden, biases.mlp)
        yield from _linear(f"{layer}.mlp.up_proj", sizes.intermediate, sizes.hidden, biases.mlp)
        yield from _linear(f"{layer}.mlp.down_proj", sizes.hidden, sizes.intermediate, biases.mlp)
        for norm in norms:
            yield f"{layer}.{norm}.weight", (sizes.hidden,)
    yield "model.norm.weight", (sizes.hidden,)
    if not sizes.tied:
        yield "lm_head.weight", (sizes.vocab, sizes.hidden)


def _attention_tensors(name: str, sizes: _Sizes, biases: _Biases, *, qk_norm: bool) -> Tensors:
    q_width, kv_width = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    yield from _linear(f"{name}.q_proj", q_width, sizes.hidden, biases.qkv)
    yield from _linear(f"{name}.k_proj", kv_width, sizes.hidden, biases.qkv)
    yield from _linear(f"{name}.v_proj", kv_width, sizes.hidden, biases.qkv)
    yield from _linear(f"{name}.o_proj", sizes.hidden, q_width, biases.out)
    if qk_norm:
        yield f"{name}.q_norm.weight", (sizes.head_dim,)
        yield f"{name}.k_norm.weight", (sizes.head_dim,)


def _llama_tensors(sizes: _Sizes, config: Config) -> Tensors:
    biases = replace(_attention_biases(config), mlp=bool(config.get("mlp_bias", False)))
    return _decoder_tensors(sizes, biases)


def _mistral_tensors(sizes: _Sizes, _config: Config) -> Tensors:
    # transformers builds no biases, whatever the config says
    return _decoder_tensors(sizes, _Biases())


def _qwen2_tensors(sizes: _Sizes, _config: Config) -> Tensors:
    return _decoder_tensors(sizes, _Biases(qkv=True))


def _qwen3_tensors(sizes: _Sizes, config: Config) -> Tensors:
    return _decoder_tensors(sizes, _attention_biases(config), qk_norm=True)


def _gemma_tensors(sizes: _Sizes, config: Config) -> Tensors:
    return _decoder_tensors(sizes, _attention_biases(config))


def _gemma2_tensors(sizes: _Sizes, config: Config) -> Tensors:
    norms = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    return _decoder_tensors(sizes, _attention_biases(config), norms=norms)


def _gpt2_tensors(sizes: _Sizes, _config: Config) -> Tensors:
    hidden = sizes.hidden
    yield "transformer.wte.weight", (sizes.vocab, hidden)
    yield "transformer.wpe.weight", (sizes.positions, hidden)
    for index in range(sizes.layers):
        layer = f"transformer.h.{index}"
        for name, shape in (
            ("ln_1", (hidden,)),
            # Conv1D keeps its weight as (in, out)
            ("attn.c_attn", (hidden, 3 * hidden)),
            ("attn.c_proj", (hidden, hidden)),
            ("ln_2", (hidden,)),
            ("mlp.c_fc", (hidden, sizes.intermediate)),
            ("mlp.c_proj", (sizes.intermediate, hidden)),
        ):
            yield f"{layer}.{name}.weight", shape
            yield f"{layer}.{name}.bias", shape[-1:]
    yield "transformer.ln_f.weight", (hidden,)
    yield "transformer.ln_f.bias", (hidden,)
    if not sizes.tied:
        yield "lm_head.weight", (sizes.vocab, hidden)


FAMILIES: dict[str, Family] = {
    "llama": Family(norm="rms", mlp="swiglu", tensors=_llama_tensors),
    "mistral": Family(norm="rms", mlp="swiglu", tensors=_mistral_tensors),
    "qwen2": Family(norm="rms", mlp="swiglu", tensors=_qwen2_tensors),
    "qwen3": Family(norm="rms", mlp="swiglu", tensors=_qwen3_tensors),
    "gemma": Family(norm="rms", mlp="geglu", tensors=_gemma_tensors, tied_by_default=True),
    "gemma2": Family(norm="rms", mlp="geglu", tensors=_gemma2_tensors, norms_per_layer=4, tied_by_default=True),
    "gpt2": Family(norm="layer", mlp="gelu", tensors=_gpt2_tensors, rotary=False, tied_by_default=True),
}


def spec_from_config(config: Config, *, name: str, weights_path: str | None = None) -> ModelSpec:
    """Describe the model of a transformers config.

    Args:
        config: the content of a config.json.
        name: what the user called it, for messages and tables.
        weights_path: a folder with weights to load, or None.

    Raises:
        UnknownModelError: no `model_type`, or a size missing, or not a positive integer.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UnknownModelError(f"{name}: the config has no 'model_type'. Give a transformers config.json.")
    family = FAMILIES.get(model_type)
    sizes = _read_sizes(config, name, family is not None and family.tied_by_default)
    tensors = family.tensors(sizes, config) if family is not None else iter(())
    gap = None
    if family is None:
        gap = f"no closed form for model_type {model_type!r} (there is one for {', '.join(FAMILIES)})"
    return ModelSpec(
        name=name,
        model_type=model_type,
        config_json=canonical_json(config),
        weights_path=weights_path,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        layers=sizes.layers,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab,
        max_positions=sizes.positions,
        tied_embeddings=sizes.tied,
        norm=family.norm if family else "rms",
        mlp=family.mlp if family else "swiglu",
        norms_per_layer=family.norms_per_layer if family else 2,
        rotary=family.rotary if family else True,
        final_softcap=config.get("final_logit_softcapping"),
        attention_softcap=config.get("attn_logit_softcapping"),
        parameters=tuple(ParameterShape(name=tensor, shape=shape) for tensor, shape in tensors),
        closed_form_gap=gap,
    )


def _read_sizes(config: Config, name: str, tied_by_default: bool) -> _Sizes:
    hidden = _size(config, name, "hidden_size", "n_embd", "d_model")
    heads = _size(config, name, "num_attention_heads", "n_head")
    return _Sizes(
        hidden=hidden,
        intermediate=_size(config, name, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
        layers=_size(config, name, "num_hidden_layers", "n_layer"),
        heads=heads,
        kv_heads=_size(config, name, "num_key_value_heads", default=heads),
        head_dim=_size(config, name, "head_dim", default=hidden // heads),
        vocab=_size(config, name, "vocab_size"),
        positions=_size(config, name, "max_position_embeddings", "n_positions", default=2048),
        tied=bool(config.get("tie_word_embeddings", tied_by_default)),
    )


def _size(config: Config, name: str, *keys: str, default: int | None = None) -> int:
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise UnknownModelError(f"{name}: {key!r} is {value!r}, not a positive integer. Mend the config.")
        return value
    if default is None:
        raise UnknownModelError(f"{name}: the config has no {keys[0]!r}. Give a transformers config.json.")
    return default
