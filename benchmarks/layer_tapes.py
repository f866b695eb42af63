"""Record the decoder layers of every architecture from small models of transformers: ligerprof/models/layer_tapes.json.

Run from the repository root, with the transformers whose layers the estimate is to follow; it takes a minute:
python -m benchmarks.layer_tapes
"""

import argparse
import json
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from benchmarks.layer_models import (
    HEADS,
    KV_HEADS,
    MASKS,
    MODEL_ROWS,
    MODEL_TOKENS,
    ROWS,
    TOKENS,
    SmallModel,
    record_function,
    record_mask,
)
from benchmarks.layer_recorder import UnknownOperatorError
from ligerprof.kernels.norm.reference import rms_norm
from ligerprof.kernels.rope.reference import apply_rope
from ligerprof.models import ARCHITECTURES, ModelSpec, spec_from_config
from ligerprof.models.layer_tape import FILE, Batch, attention_kind, layer_kind, mask_kind, model_kind
from ligerprof.models.mixers import CHUNK_TOKENS

Tape = list[Any]

# No two sizes that views are told apart by are alike; a quarter of a head's elements rotate where a part does.
_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "pad_token_id": 0,
    "num_experts": 15,
    "num_local_experts": 15,
    "num_experts_per_tok": 4,
    "n_routed_experts": 15,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "sliding_window": 4,
    "n_group": 3,
    "topk_group": 2,
}
_LATENT = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "q_lora_rank": 56,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}
# the configured activation function is not the one of gated norms
_MIXED = {"hidden_act": "gelu_pytorch_tanh"}
_MAMBA = {
    **_MIXED,
    "hidden_size": 192,
    "head_dim": 48,
    "mamba_n_heads": 12,
    "mamba_d_head": 32,
    "mamba_d_state": 13,
    "mamba_d_ssm": 384,
    "mamba_n_groups": 3,
    "mamba_chunk_size": 9,
    "num_experts_per_tok": 10,
}
_DELTA = {
    **_MIXED,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "hidden_size": 288,
    "head_dim": 72,
    "num_experts": 19,
    "linear_num_key_heads": 5,
    "linear_num_value_heads": 30,
    "linear_key_head_dim": 13,
    "linear_value_head_dim": 17,
    "num_experts_per_tok": 11,
}
# chunks of tokens of a scan without a loop, and tokens that the last one lacks
_CHUNKS, _MISSING = 5, (1, 0)
# what the configs of some architectures need besides the sizes
_OWN: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 128, "n_layer": 6, "n_head": 4, "n_positions": 64},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"), _LATENT),
    "exaone_moe": {"sliding_window_pattern": 2},
    "bamba": {**_MAMBA, "attn_layer_indices": [2, 5], "partial_rotary_factor": 0.5},
    "falcon_h1": _MAMBA,
    "granitemoehybrid": {
        **_MAMBA,
        "shared_intermediate_size": 32,
        "layer_types": ["mamba", "mamba", "attention"] * 2,
    },
    "granitemoeshared": {"shared_intermediate_size": 32},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 3, "num_dense_layers": 2},
    **{
        name: {"layer_types": ["full_attention", "sliding_attention"] * 3, "use_sliding_window": True}
        for name in ("dots1", "qwen2", "qwen3")
    },
    "mellum": {"layer_types": ["full_attention", "sliding_attention"] * 3, "mlp_layer_types": ["dense", "sparse"] * 3},
    "llama4_text": {"intermediate_size_mlp": 96, "interleave_moe_layer_step": 2},
    "qwen3_moe": {"use_sliding_window": True},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _DELTA),
}
# other values of keys that change the layers
_VARIANTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "cohere": {"use_qk_norm": (False, True)},
    "gemma3_text": {"final_logit_softcapping": (30.0, None)},
    **{
        name: {"final_logit_softcapping": (30.0, None), "attn_logit_softcapping": (50.0, None)}
        for name in ("gemma2", "vaultgemma")
    },
    "gpt_neox": {"use_parallel_residual": (True, False)},
    "glm4_moe": {"use_qk_norm": (False, True)},
    "granitemoehybrid": {"position_embedding_type": ("rope", None), "num_local_experts": (15, 0)},
    "hyperclovax": {"use_post_norm": (True, False)},
    "llama4_text": {"use_qk_norm": (True, False), "attn_temperature_tuning": (True, False)},
    "stablelm": {"use_parallel_residual": (False, True)},
    "ernie4_5_moe": {"moe_num_shared_experts": (1, 0)},
    "dots1": {"first_k_dense_replace": (0, 1)},
    "deepseek_v2": {"q_lora_rank": (56, None), "topk_method": ("greedy", "group_limited_greedy")},
    **{
        name: {"q_lora_rank": (56, None), "rope_interleave": (True, False)}
        for name in ("deepseek_v3", "glm4_moe_lite", "youtu")
    },
    **{name: {"mlp_only_layers": ([], [0])} for name in ("qwen2_moe", "qwen3_moe")},
    **{
        name: {"linear_num_key_heads": (5, 1), "linear_num_value_heads": (30, 5, 1)}
        for name in ("qwen3_5_text", "qwen3_5_moe_text")
    },
    "qwen3_next": {
        "linear_num_key_heads": (5, 1),
        "linear_num_value_heads": (30, 5, 1),
        "mlp_only_layers": ([], [0]),
    },
}

# functions with weights, which the estimate has by itself
_LEARNED = ("prelu", "xielu")


def configs_of(model_type: str) -> Iterator[dict[str, Any]]:
    """Small configs whose layers are of every kind."""
    row = ARCHITECTURES[model_type]
    variants, rotary, experts = _VARIANTS.get(model_type, {}), row.attention.rotary, row.mlp.experts
    if experts is not None:
        switches = {key: (True, False) for key, value in experts.switches.items() if isinstance(value, bool)}
        variants = {**variants, **switches, **({} if experts.noise is None else {experts.noise: (0.0, 0.1)})}
    share = {} if rotary is None or rotary.share is None else {rotary.share: 0.25}
    for values in product(*variants.values()):
        chosen = dict(zip(variants, values, strict=True))
        if chosen.get("linear_num_value_heads", 1) % chosen.get("linear_num_key_heads", 1) == 0:
            config = {"model_type": model_type, **_SIZES, **share, **_OWN.get(model_type, {}), **chosen}
            yield config
            window = row.attention.window
            if window is not None:
                layers = {"layer_types": ["full_attention"] * config["num_hidden_layers"]}
                yield {**config, **({window.key: None} if window.layers is None else layers)}


def record(
    model_type: str,
) -> tuple[list[tuple[list[str], Tape]], list[tuple[list[str], Tape]], dict[str, Tape], dict[str, Tape | None]]:
    """The kinds of layers, models and eager attention of an architecture with their tapes; of its norms and experts."""
    found: dict[str, tuple[list[str], Tape]] = {}
    models: dict[str, tuple[list[str], Tape]] = {}
    attending: dict[str, Tape] = {}
    norms: dict[str, Tape | None] = {}
    experts: Tape | None = None
    for config in configs_of(model_type):
        spec = spec_from_config(config, name=model_type)
        model = SmallModel(spec)
        wide = None if spec.delta is None else SmallModel(spec, torch.float32)
        for index in range(spec.layers):
            for batch in _batches(spec):
                kind = layer_kind(spec, index, batch)
                if str(kind) not in found:
                    recorded = wide if wide is not None and "wide" in kind else model
                    found[str(kind)] = kind, _record_layer(recorded, spec, index, batch)
            if experts is None and spec.layer_kinds.sparse[index] and _may_run_in_turn(spec):
                experts = model.record_experts(index)
        if str(model_kind(spec)) not in models:
            models[str(model_kind(spec))] = model_kind(spec), model.record_model()
        if attention_kind(spec, ROWS, apart=False) not in attending:
            for heads, rows, apart, tape in attention(model, spec):
                attending[attention_kind(heads, rows, apart=apart)] = tape
        norms = norms or {"norms": model.record_norm(), "bare norms": model.record_bare_norm()}
    return list(found.values()), list(models.values()), attending, {**norms, "experts": experts}


def _may_run_in_turn(spec: ModelSpec) -> bool:
    experts = spec.architecture.mlp.experts
    return experts is not None and not experts.multiplies_all


def _batches(spec: ModelSpec) -> Iterator[Batch]:
    """Batches of all kinds that a mixer may have."""
    if spec.delta is None and spec.state_space is None:
        yield from (Batch(rows=rows, tokens=TOKENS) for rows in (ROWS, 1))
        return
    chunk = CHUNK_TOKENS if spec.state_space is None else spec.state_space.chunk
    for rows, chunks, missing, wide in product((ROWS, 1), (1, _CHUNKS), _MISSING, (False, True)):
        yield Batch(rows=rows, tokens=chunks * chunk - missing, wide=wide)


def _record_layer(model: SmallModel, spec: ModelSpec, index: int, batch: Batch) -> Tape:
    if spec.delta is not None and spec.layer_kinds.recurrent[index] and batch.tokens > CHUNK_TOKENS:
        return model.record_loop(index, batch.rows, CHUNK_TOKENS, -batch.tokens % CHUNK_TOKENS)
    return model.record(index, batch.rows, batch.tokens)


def attention(model: SmallModel, spec: ModelSpec) -> Iterator[tuple[ModelSpec, int, bool, Tape]]:
    """Numbers of heads, rows, and whether heads lie apart, with the tape of eager attention."""
    counts = ((HEADS, HEADS), (HEADS, KV_HEADS), (HEADS, 1), (1, 1))
    for rows, (heads, kv_heads), apart in product((ROWS, 1), counts, (False, True)):
        # of one row or head, both are the same
        differs = not apart or (rows > 1 and heads > 1)
        if differs and (tape := model.record_attention(rows, heads, kv_heads, apart=apart)) is not None:
            yield replace(spec, heads=heads, kv_heads=kv_heads), rows, apart, tape


def plain() -> ModelSpec:
    """A model for functions that no architecture has of its own."""
    return spec_from_config({"model_type": "llama", **_SIZES}, name="functions")


def masks(spec: ModelSpec) -> Iterator[tuple[str, dict[str, Tape]]]:
    """The tapes of the functions that make masks, by what decides what they make."""
    one, cut = torch.arange(MODEL_TOKENS).unsqueeze(0), MODEL_TOKENS // 2
    padding = torch.ones(MODEL_ROWS, MODEL_TOKENS, dtype=torch.long)
    padding[:, cut:] = 0
    hidden = {"": (one, None), "padding": (one, padding), "documents": (one % cut, None)}
    for name in MASKS:
        tapes = {}
        for hides, filled, eager in product(hidden, (False, True), (False, True)):
            kind = mask_kind(hides=hides, filled=filled, eager=eager)
            window = MODEL_TOKENS if filled else MODEL_TOKENS + 1
            tapes[kind] = record_mask(spec, name, *hidden[hides], window=window, eager=eager)
        yield name, tapes


def functions() -> Iterator[tuple[str, Tape]]:
    """The activation functions whose operators tapes have, and the references of kernels."""
    spec = plain()
    width = (spec.intermediate_size,)
    for name in sorted(ACT2FN):
        module = ACT2FN[name] if name not in _LEARNED else None
        with suppress(UnknownOperatorError):
            if isinstance(module, nn.Module) and (tape := record_function(spec, module, module, width))[:-1]:
                yield name, tape
    weight = nn.LayerNorm(width, dtype=torch.bfloat16)
    yield "rms_norm", record_function(spec, weight, lambda value: rms_norm(value, weight.weight, 1e-6), width)
    heads = [(count, spec.head_dim) for count in (spec.heads, spec.kv_heads)]
    for name, dtype in (("rope", torch.bfloat16), ("rope fp32", torch.float32)):
        table = torch.ones(1, TOKENS, spec.head_dim, dtype=dtype)
        rotate = partial(apply_rope, cos=table, sin=table, unsqueeze_dim=2)
        yield name, record_function(spec, weight, rotate, *heads, casts=("narrow", "narrow"))


def main() -> None:
    """Write the tapes."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    tapes: dict[str, int] = {}

    def number(tape: Tape) -> int:
        return tapes.setdefault(json.dumps(tape, separators=(",", ":")), len(tapes))

    content: dict[str, dict[str, Any]] = {
        "architectures": {},
        "models": {},
        "attention": {},
        "masks": {},
        "norms": {},
        "bare norms": {},
        "experts": {},
        "functions": {},
    }
    # an architecture with several residual streams is traced as a whole
    for model_type in sorted(name for name, row in ARCHITECTURES.items() if not row.streams):
        layers, models, attending, others = record(model_type)
        for group, kinds in (("architectures", layers), ("models", models)):
            content[group][model_type] = [(kind, number(tape)) for kind, tape in kinds]
        content["attention"][model_type] = {kind: number(tape) for kind, tape in attending.items()}
        for group, tape in others.items():
            content[group].update({} if tape is None else {model_type: number(tape)})
        print(model_type, len(layers), flush=True)
    for name, made in masks(plain()):
        content["masks"][name] = {kind: number(tape) for kind, tape in made.items()}
    content["functions"] = {name: number(tape) for name, tape in functions()}
    groups = [f'"{group}":{{\n{_lines(rows)}\n}}' for group, rows in content.items()]
    FILE.write_text("{" + ",\n".join([f'"tapes":[\n{_joined(tapes)}\n]', *groups]) + "}\n")


def _lines(rows: dict[str, Any]) -> str:
    return _joined(f"{json.dumps(name)}:{json.dumps(value)}" for name, value in rows.items())


def _joined(lines: Iterable[str]) -> str:
    return ",\n".join(lines)


if __name__ == "__main__":
    main()
