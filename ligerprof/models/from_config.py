"""Turn a transformers config into a ModelSpec."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ligerprof.errors import UnknownModelError
from ligerprof.models.architecture import Architecture, Linear, NormWeight, RawWeight, Width
from ligerprof.models.architectures import TEXT_ALONE, find_architecture, has_row, text_config
from ligerprof.models.config_keys import Number
from ligerprof.models.mixers import (
    BALANCING_LOSS,
    COVERED,
    DeltaSizes,
    Experts,
    LatentSizes,
    StateSpaceSizes,
)
from ligerprof.models.spec import ModelSpec, ParameterShape, Task, canonical_json, layer_kinds, task_of
from ligerprof.text import short_repr

Config = Mapping[str, Any]

_LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers")
_HEAD_KEYS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
# several times the largest models'
_MOST_LAYERS = 2**12
_LARGEST_SIZE = 2**31
_LARGEST_FACTOR = 1000


def spec_from_config(config: Config, *, name: str, weights_path: str | None = None) -> ModelSpec:
    """Describe the model of a transformers config.

    Args:
        config: the content of a config.json.
        name: the user's name for the model, for messages and tables.
        weights_path: a folder with weights to load, or None.

    Raises:
        UnknownModelError: `model_type` or a size is missing, or a size is not a positive integer.
    """
    # also what a damaged recipe.json has instead of an object
    model_type = config.get("model_type") if isinstance(config, Mapping) else None
    if not isinstance(model_type, str):
        raise UnknownModelError(f"{name}: the config has no 'model_type'. Give a transformers config.json.")
    if text_config(config) is not None:
        return _text_model(config, name=name, weights_path=weights_path)
    row = find_architecture(model_type)
    config_json = canonical_json(config)
    config = _with_equal_entries({**row.defaults, **row.named(config)}, "intermediate_size")
    hidden = _size(config, name, "hidden_size", "n_embd", "d_model", "dim")
    # state spaces without a row have no heads
    heads = _size(config, name, *_HEAD_KEYS, default=None if has_row(model_type) else 1)
    if heads > hidden:
        raise UnknownModelError(f"{name}: {heads} attention heads are more than {hidden} hidden units. Fix the config.")
    experts, chosen_experts, expert_size, shared_size = _expert_sizes(row, config, name)
    latent = _latent_sizes(config, name) if row.attention.latent else None
    mixer = None if row.mixer is None else row.mixer.kind
    spec = ModelSpec(
        latent=latent,
        delta=_delta_sizes(config, name) if mixer == "delta" else None,
        state_space=_state_space_sizes(config, name, hidden) if mixer == "states" else None,
        experts=experts,
        chosen_experts=chosen_experts,
        expert_size=expert_size,
        shared_size=shared_size,
        name=name,
        model_type=model_type,
        config_json=config_json,
        weights_path=weights_path,
        hidden_size=hidden,
        intermediate_size=_intermediate_size(row, config, name, hidden),
        layers=_size(config, name, *_LAYER_KEYS),
        heads=heads,
        kv_heads=_size(config, name, "num_key_value_heads", default=heads) if row.attention.grouped else heads,
        head_dim=latent.plain_dim + latent.rotated_dim if latent else _head_dim(row, config, name, hidden // heads),
        vocab_size=_size(config, name, "vocab_size"),
        max_positions=_size(config, name, "max_position_embeddings", "n_positions", default=2048),
        tied_embeddings=bool(config.get("tie_word_embeddings")),
        final_softcap=_softcap(config, row.final_softcap),
        attention_softcap=_softcap(config, row.attention.softcap),
    )
    try:
        layer_kinds(row, config, spec.layers)
    except UnknownModelError as error:
        raise UnknownModelError(f"{name}: {error}") from None
    if (gap := _gap(row, spec, config)) is not None:
        return replace(spec, no_estimate_reason=f"no analytic estimate for {gap}")
    if row.streams is not None:
        return replace(spec, no_estimate_reason=f"model_type {model_type!r} has no forms, and is estimated from a tape")
    return replace(spec, parameters=tuple(_parameters(row, spec, config)))


def _gap(row: Architecture, spec: ModelSpec, config: Config) -> str | None:
    """What the forms do not cover in a config, if anything."""
    model_type = f"model_type {spec.model_type!r}"
    if spec.task is not Task.CAUSAL:
        return f"a class that ends in For{spec.task}"
    balances = row.mlp.experts is not None and not row.mlp.experts.multiplies_all
    for key in (*row.not_estimated, *([BALANCING_LOSS] if balances else ()), *row.only_one):
        if config.get(key) and not (key in row.only_one and config[key] == 1):
            return f"{model_type} with {key!r}"
    if row.mlp.experts is not None and not spec.experts and not spec.shared_size:
        return f"{model_type} without experts"
    if (implementation := _other_experts(row, config)) is not None:
        return implementation
    return None if has_row(spec.model_type) else f"{model_type} (docs/models.md lists those that have one)"


def _text_model(config: Config, *, name: str, weights_path: str | None) -> ModelSpec:
    """The text model of a config that joins it with others, where transformers builds that alone; raises otherwise."""
    model_type, nested = config["model_type"], text_config(config)
    assert nested is not None
    key, text = nested
    inner = text.get("model_type")
    if model_type in TEXT_ALONE and inner not in TEXT_ALONE:
        alone = {**text, "model_type": inner or f"{model_type}_text"}
        return replace(spec_from_config(alone, name=name, weights_path=weights_path), text_of=model_type)
    if task_of(config) is Task.IMAGES:
        # the text model's sizes for messages and tables; transformers builds the whole
        spec = spec_from_config({"architectures": config["architectures"], **text, "model_type": model_type}, name=name)
        return replace(
            spec,
            config_json=canonical_json(config),
            weights_path=weights_path,
            parameters=(),
            no_estimate_reason=f"model_type {model_type!r} has no forms, and is estimated from a tape",
        )
    hint = f" To train the text model alone, give its {key!r} as a config.json."
    raise UnknownModelError(
        f"{name}: {short_repr(model_type)} joins a text model of type {short_repr(inner)} with others, such as a"
        f" vision tower, which are not covered.{hint if isinstance(inner, str) and has_row(inner) else ''}"
    )


def _intermediate_size(row: Architecture, config: Config, name: str, hidden: int) -> int:
    size, adjusted = _size(config, name, row.mlp.width, "n_inner", "ffn_dim", default=4 * hidden), row.mlp.adjusted
    if adjusted is None or not config.get(adjusted.switch, True):
        return size
    size = int(2 * size / 3)
    factor, multiple = config.get(adjusted.factor, 1.0), _size(config, name, adjusted.multiple)
    if factor is None:
        return size
    if not isinstance(factor, (int, float)) or not 0 < factor <= _LARGEST_FACTOR:
        raise UnknownModelError(f"{name}: {adjusted.factor!r} is {short_repr(factor)}, not a factor. Fix the config.")
    return -(-int(factor * size) // multiple) * multiple


def _expert_sizes(row: Architecture, config: Config, name: str) -> tuple[int, int, int, int]:
    """Number of experts, number of experts per token, their and the shared one's intermediate size; zeros without."""
    experts = row.mlp.experts
    if experts is None:
        return 0, 0, 0, 0
    if experts.are_left_out(config):
        return 0, 0, 0, _shared_size(experts, config, name)
    count, chosen = (
        key if isinstance(key, int) else _size(_with_equal_entries(config, key), name, key)
        for key in (experts.count, experts.chosen)
    )
    if chosen > count:
        raise UnknownModelError(f"{name}: {chosen} experts per token are more than {count} experts. Fix the config.")
    return count, chosen, _size(config, name, experts.width), _shared_size(experts, config, name)


def _other_experts(row: Architecture, config: Config) -> str | None:
    """The implementation of experts that a config asks for, if the estimate does not cover it."""
    given = config.get("experts_implementation", config.get("_experts_implementation"))
    experts = row.mlp.experts
    return (
        None
        if experts is None or experts.multiplies_all or given in COVERED
        else f"experts_implementation {short_repr(given)}"
    )


def _with_equal_entries(config: Config, key: str) -> Config:
    """The config with one number in place of a list with an entry per layer, if all are equal."""
    listed = config.get(key)
    return (
        {**config, key: listed[0]}
        if isinstance(listed, list) and listed and listed == listed[:1] * len(listed)
        else config
    )


def _latent_sizes(config: Config, name: str) -> LatentSizes:
    return LatentSizes(
        query_rank=_size(config, name, "q_lora_rank") if config.get("q_lora_rank") else 0,
        key_rank=_size(config, name, "kv_lora_rank"),
        plain_dim=_size(config, name, "qk_nope_head_dim"),
        rotated_dim=_size(config, name, "qk_rope_head_dim"),
        value_dim=_size(config, name, "v_head_dim"),
    )


def _latent_widths(heads: int, sizes: LatentSizes) -> dict[Width, int]:
    query = heads * (sizes.plain_dim + sizes.rotated_dim)
    return {
        "latent query": query if sizes.query_rank else 0,
        "direct query": 0 if sizes.query_rank else query,
        "query rank": sizes.query_rank,
        "key rank": sizes.key_rank,
        "key rank rotated": sizes.key_rank + sizes.rotated_dim,
        "key and value": heads * (sizes.plain_dim + sizes.value_dim),
        "attended": heads * sizes.value_dim,
    }


def _delta_sizes(config: Config, name: str) -> DeltaSizes:
    sizes = DeltaSizes(
        key_heads=_size(config, name, "linear_num_key_heads"),
        value_heads=_size(config, name, "linear_num_value_heads"),
        key_dim=_size(config, name, "linear_key_head_dim"),
        value_dim=_size(config, name, "linear_value_head_dim"),
        kernel=_size(config, name, "linear_conv_kernel_dim"),
    )
    if sizes.value_heads % sizes.key_heads:
        raise UnknownModelError(
            f"{name}: {sizes.key_heads} 'linear_num_key_heads' do not divide {sizes.value_heads}"
            " 'linear_num_value_heads'. Fix the config."
        )
    return sizes


def _delta_widths(sizes: DeltaSizes) -> dict[Width, int]:
    return {
        "delta key": sizes.keys,
        "delta value": sizes.values,
        "delta heads": sizes.value_heads,
        "delta head": sizes.value_dim,
        "kernel": sizes.kernel,
    }


def _state_space_sizes(config: Config, name: str, hidden: int) -> StateSpaceSizes:
    heads = _size(config, name, "mamba_n_heads")
    inner = _size(config, name, "mamba_d_ssm", default=_size(config, name, "mamba_expand") * hidden)
    given = config.get("mamba_d_head")
    sizes = StateSpaceSizes(
        heads=heads,
        head_dim=inner // heads if given in (None, "auto") else _size(config, name, "mamba_d_head"),
        state=_size(config, name, "mamba_d_state"),
        groups=_size(config, name, "mamba_n_groups"),
        kernel=_size(config, name, "mamba_d_conv"),
        chunk=_size(config, name, "mamba_chunk_size"),
    )
    if sizes.inner != inner or heads % sizes.groups:
        raise UnknownModelError(
            f"{name}: {heads} 'mamba_n_heads' of {sizes.head_dim} elements in {sizes.groups} 'mamba_n_groups' do not"
            f" make a mixer of {inner} elements. Fix the config."
        )
    return sizes


def _state_space_widths(sizes: StateSpaceSizes) -> dict[Width, int]:
    return {"ssm inner": sizes.inner, "ssm heads": sizes.heads, "ssm states": sizes.states, "kernel": sizes.kernel}


def _shared_size(experts: Experts, config: Config, name: str) -> int:
    width, times = experts.shared, experts.shared_times
    if width is None or config.get(width) == 0 or (times is not None and not config.get(times)):
        return 0
    return (1 if times is None else _size(config, name, times)) * _size(config, name, width)


def _head_dim(row: Architecture, config: Config, name: str, split: int) -> int:
    return split if row.attention.splits_hidden else _size(config, name, "head_dim", default=split)


def _softcap(config: Config, cap: Number | None) -> float | None:
    value: float | None = None if cap is None else config.get(cap.key, cap.default)
    return value


def _size(config: Config, name: str, *keys: str, default: int | None = None) -> int:
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise UnknownModelError(f"{name}: {key!r} is {short_repr(value)}, not a positive integer. Fix the config.")
        if value > (most := _MOST_LAYERS if key in _LAYER_KEYS else _LARGEST_SIZE):
            raise UnknownModelError(f"{name}: {key!r} is {short_repr(value)}, more than {most}. Fix the config.")
        return value
    if default is None:
        raise UnknownModelError(f"{name}: the config has no {keys[0]!r}. Give a transformers config.json.")
    return default


def _widths(row: Architecture, spec: ModelSpec, config: Config) -> dict[Width, int]:
    convolves = row.mixer is not None and row.mixer.kind == "convolution"
    return {
        "hidden": spec.hidden_size,
        "intermediate": spec.intermediate_size,
        "query": spec.heads * spec.head_dim,
        "key": spec.kv_heads * spec.head_dim,
        "head": spec.head_dim,
        "heads": spec.heads,
        "experts": spec.experts,
        "expert": spec.expert_size,
        "shared": spec.shared_size,
        "one": 1,
        **({} if spec.latent is None else _latent_widths(spec.heads, spec.latent)),
        **({} if spec.delta is None else _delta_widths(spec.delta)),
        **({} if spec.state_space is None else _state_space_widths(spec.state_space)),
        **({"kernel": _size(config, spec.name, "conv_L_cache")} if convolves else {}),
    }


def _parameters(row: Architecture, spec: ModelSpec, config: Config) -> Iterator[ParameterShape]:
    """Every parameter in transformers' order."""
    widths = _widths(row, spec, config)
    yield ParameterShape(name=f"{row.embedding}.weight", shape=(spec.vocab_size, spec.hidden_size))
    if row.positions is not None:
        yield ParameterShape(name=f"{row.positions}.weight", shape=(spec.max_positions, spec.hidden_size))
    for index in range(spec.layers):
        yield from _layer_parameters(row, spec, config, widths, index)
    yield from _norm_parameters(row, row.final_norm, (spec.hidden_size,))
    if not spec.tied_embeddings:
        yield ParameterShape(name=f"{row.head}.weight", shape=(spec.vocab_size, spec.hidden_size))
    if spec.has_head_bias:
        yield ParameterShape(name=f"{row.head}.bias", shape=(spec.vocab_size,))


def _layer_parameters(
    row: Architecture, spec: ModelSpec, config: Config, widths: Mapping[Width, int], index: int
) -> Iterator[ParameterShape]:
    for item in row.tensors:
        name = f"{row.layers}.{index}.{item.name}"
        if not _is_in_layer(item, spec, config, index):
            continue
        if isinstance(item, Linear):
            yield from _linear_parameters(item, name, widths, config)
        elif isinstance(item, RawWeight):
            shape = tuple(sum(widths[width] for width in size) for size in item.shape)
            yield ParameterShape(name=f"{name}.{item.parameter}", shape=shape, fp32=item.fp32, trained=item.trained)
        elif _has_norm(item, config):
            yield from _norm_parameters(row, name, _norm_shape(item, spec, widths))


def _is_in_layer(item: Linear | NormWeight | RawWeight, spec: ModelSpec, config: Config, index: int) -> bool:
    """Whether a layer has the weight: with or without experts and attention."""
    kinds = spec.layer_kinds
    if item.recurrent not in (None, kinds.recurrent[index]):
        return False
    if isinstance(item, RawWeight) and item.activation not in (None, spec.activation):
        return False
    if isinstance(item, RawWeight) and item.when is not None and not config.get(item.when):
        return False
    return isinstance(item, NormWeight) or item.sparse in (None, kinds.sparse[index])


def _linear_parameters(
    item: Linear, name: str, widths: Mapping[Width, int], config: Config
) -> Iterator[ParameterShape]:
    out_features, in_features = sum(widths[width] for width in item.outputs), widths[item.inputs]
    if not in_features * out_features:
        return
    shape = (in_features, out_features) if item.transposed else (out_features, in_features)
    yield ParameterShape(name=f"{name}.weight", shape=shape, fp32=item.fp32)
    if item.bias if isinstance(item.bias, bool) else config.get(item.bias, False):
        yield ParameterShape(name=f"{name}.bias", shape=(out_features,))


def _has_norm(item: NormWeight, config: Config) -> bool:
    if item.unless is not None and config.get(item.unless, False):
        return False
    return item.when is None or bool(config.get(item.when, False))


def _norm_shape(item: NormWeight, spec: ModelSpec, widths: Mapping[Width, int]) -> tuple[int, ...]:
    width = widths[item.width]
    return (width // spec.head_dim, spec.head_dim) if item.by_head else (width,)


def _norm_parameters(row: Architecture, name: str, shape: tuple[int, ...]) -> Iterator[ParameterShape]:
    if row.norm.form.has_weight and shape != (0,):
        yield ParameterShape(name=f"{name}.weight", shape=shape)
    if row.norm.form.has_bias:
        yield ParameterShape(name=f"{name}.bias", shape=shape)
