"""Recipes drawn over everything that decides which kernels run, each small enough to simulate in about a second."""

import dataclasses
from collections.abc import Iterator
from random import Random
from typing import Any

from ligerprof.gpus import GPUS, Vendor
from ligerprof.kernels.selection import KERNEL_NAMES, inapplicable_reason
from ligerprof.models import ModelSpec, spec_from_config
from ligerprof.models.architectures import find_architecture, has_row
from ligerprof.recipe.categories import Loss, Precision
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.torch_memory.chunked_losses import TITAN_CHUNKS

PRECISIONS = ("amp", "amp-fp16", "bf16-amp", "bf16", "fp16", "fp32")
OPTIMIZERS = (
    "adamw-fused",
    "adamw-foreach",
    "adamw",
    "sgd",
    "none",
    "adafactor",
    "adafactor-hf",
    "sgd-momentum",
    "lion",
    "muon",
    "adamw-8bit",
    "paged-adamw",
    "paged-adamw-8bit",
    "galore",
)
# of the recipes on several GPUs
DDP_SHARE = 0.25
# of the recipes without padding
PACKED_SHARE = 0.3
EVALUATED_SHARE = 0.4
# the simulator covers NVIDIA GPUs only
SIMULATED_GPUS = tuple(gpu.name for gpu in GPUS.values() if gpu.vendor is Vendor.NVIDIA)

# the other architectures have draws of their own
DRAWN_FAMILIES = ("gemma", "gemma2", "gpt2", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3")
_HEAD_DIMS = (40, 54, 60, 64, 64, 72, 80, 96, 100, 112, 128, 128, 160, 192, 208, 256)
_SEQUENCES = (64, 128, 200, 256, 333, 512, 777, 1024, 1500, 2048)
_VOCABULARIES = (1000, 4096, 8191, 20_000, 32_000, 50_257)


def draw_spec(random: Random, family: str | None = None) -> ModelSpec:
    """A decoder: 2 or 3 layers, heads grouped or not, with or without a sliding window.

    Args:
        family: the architecture; None: one of `DRAWN_FAMILIES`.
    """
    family = family or random.choice(DRAWN_FAMILIES)
    kv_heads, head_dim = random.choice((1, 2, 4, 6, 8)), random.choice(_HEAD_DIMS)
    if has_row(family) and find_architecture(family).mlp.experts is not None:
        # grouped products need rows of whole 16 bytes
        head_dim = -(-head_dim // 8) * 8
    heads, layers = kv_heads * random.choice((1, 2, 3)), random.choice((2, 2, 2, 3))
    # transformers wants a multiple of the number of heads
    hidden = 8 * heads * random.randint(-(-48 // heads), -(-192 // heads))
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": random.choice(_VOCABULARIES),
        "tie_word_embeddings": random.random() < 0.5,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family == "gpt2":
        sizes = {"n_embd": heads * head_dim, "n_layer": layers, "n_head": heads, "n_positions": 2048}
        dropout = {f"{part}_pdrop": random.choice((0.0, 0.1)) for part in ("attn", "resid", "embd")}
        return spec_from_config({**config, **sizes, **dropout}, name="drawn-gpt2")
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 8 * random.randint(hidden // 8, hidden // 2),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
    }
    more = _draw_window(random, family) if family in DRAWN_FAMILIES else _draw_more(random, family, sizes)
    return spec_from_config({**config, **sizes, **more}, name=f"drawn-{family}")


def _draw_more(random: Random, family: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Options of some of the other architectures: windows, biases, norms, and as many layers as their patterns need."""
    window = random.choice((100, 512, 4096))
    names = ("attention_bias", "mlp_bias", "use_bias", "use_qkv_bias", "use_qk_norm", "use_post_norm")
    together = random.random() < 0.5
    latent = has_row(family) and find_architecture(family).attention.latent
    more = {
        **dict.fromkeys(names, together),
        "use_parallel_residual": random.random() < 0.5,
        "num_hidden_layers": random.choice((2, 4, 5)),
        "num_dense_layers": 1,
        "sliding_window": window,
        "bos_token_id": 1,
        "num_experts": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "n_shared_experts": random.choice((1, 2)),
        "first_k_dense_replace": random.choice((0, 1, 2)),
        "moe_num_shared_experts": random.choice((0, 1, 2)),
        "moe_layer_interval": random.choice((1, 2)),
        **(_draw_latents(random, sizes) if latent else {}),
        "decoder_sparse_step": random.choice((1, 1, 2)),
        "shared_intermediate_size": 96,
        "lm_head_bias": together,
        **(_draw_delta(random) if _has_delta(family) else {}),
        "hidden_size": sizes["num_attention_heads"] * sizes["head_dim"],
        "residual_dropout": random.choice((0.0, 0.1)),
        "embedding_dropout": random.choice((0.0, 0.1)),
        "resid_pdrop": random.choice((0.0, 0.1)),
        "hidden_dropout": random.choice((0.0, 0.1)),
    }
    mixer = find_architecture(family).mixer if has_row(family) else None
    if mixer is not None and mixer.kind == "states":
        more.update(_draw_state_space(random, sizes))
    if mixer is not None and mixer.kind == "states" and mixer.layers is not None and mixer.layers.others is None:
        more["layer_types"] = ["mamba", "attention", "mamba", "mamba", "attention"][: more["num_hidden_layers"]]
    if has_row(family) and find_architecture(family).streams:
        more |= _draw_streams(random, more["num_hidden_layers"])
    if mixer is not None and mixer.kind == "convolution":
        kinds = ("full_attention", "conv", "conv")
        more["layer_types"] = [kinds[index % 3] for index in range(more["num_hidden_layers"])]
    return more


def _has_delta(family: str) -> bool:
    mixer = find_architecture(family).mixer if has_row(family) else None
    return mixer is not None and mixer.kind == "delta"


def _draw_delta(random: Random) -> dict[str, Any]:
    heads = random.choice((1, 2, 4))
    return {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads * random.choice((1, 2)),
        "linear_key_head_dim": random.choice((32, 64, 128)),
        "linear_value_head_dim": random.choice((32, 64)),
        "shared_expert_intermediate_size": 96,
    }


def _draw_state_space(random: Random, sizes: dict[str, Any]) -> dict[str, Any]:
    heads, hidden = random.choice((2, 4, 8)), sizes["num_attention_heads"] * sizes["head_dim"]
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": 2 * hidden // heads,
        "mamba_d_ssm": 2 * hidden,
        "mamba_n_groups": random.choice((1, 2)),
        "mamba_d_state": random.choice((16, 64, 128)),
        "mamba_chunk_size": random.choice((64, 128, 256)),
        "mamba_conv_bias": random.random() < 0.7,
        "mamba_proj_bias": random.random() < 0.3,
        "projectors_bias": random.random() < 0.3,
        "attn_layer_indices": [1],
        "position_embedding_type": random.choice((None, "rope")),
    }


def _draw_streams(random: Random, layers: int) -> dict[str, Any]:
    kinds = [("sliding_attention", "full_attention")[index % 2] for index in range(layers)]
    return {
        "layer_types": kinds,
        "num_kv_shared_layers": random.choice((0, layers // 2)) if layers > 2 else 0,
        "hidden_size_per_layer_input": random.choice((16, 64)),
        "vocab_size_per_layer_input": 1000,
        "laurel_rank": 16,
        "altup_num_inputs": random.choice((2, 4)),
        "activation_sparsity_pattern": random.choice((None, [0.95] + [0.0] * (layers - 1))),
    }


def _draw_latents(random: Random, sizes: dict[str, Any]) -> dict[str, Any]:
    rotated = random.choice((16, 32, 64))
    return {
        "num_key_value_heads": sizes["num_attention_heads"],
        "head_dim": rotated,
        "q_lora_rank": random.choice((None, 96, 256)),
        "kv_lora_rank": random.choice((64, 128)),
        "qk_nope_head_dim": random.choice((32, 64, 128)),
        "qk_rope_head_dim": rotated,
        "v_head_dim": random.choice((32, 64, 128)),
        "n_group": 2,
        "topk_group": 1,
        "rope_interleave": random.random() < 0.7,
    }


def _draw_window(random: Random, family: str) -> dict[str, Any]:
    """A sliding window, on all layers where the config chooses them: the estimate says if it takes layers for alike."""
    window = random.choice((None, 100, 512, 4096))
    if family == "mistral":
        return {"sliding_window": window}
    if family == "gemma2":
        return {"sliding_window": window or 4096}
    if family in ("qwen2", "qwen3") and window is not None:
        return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    return {}


def _draw_adapter(random: Random, spec: ModelSpec, precision: str) -> dict[str, Any]:
    rank = random.choice((None, None, None, 8)) if spec.rotary else None
    if rank is None:
        return {}
    layers = random.choice(
        (("all-linear",), spec.architecture.lora_targets, random.sample(spec.architecture.lora_targets, 2))
    )
    saved = random.choice((None, None, "lm_head", "embed_tokens+norm"))
    named = spec.architecture.final_norm.endswith(".norm") and spec.architecture.norm.form.has_weight
    names = {"modules_to_save": saved} if named else {}
    dora = random.random() < 0.3
    plain = dora or precision.endswith("fp16")
    dtype = "float32" if plain else random.choice(("float32", "float32", "bfloat16"))
    return {"lora": rank, "lora_targets": "+".join(layers), "dora": dora, "adapter_dtype": dtype, **names}


def _draw_checkpointing(random: Random) -> dict[str, Any]:
    every = random.choice((1, 1, 2))
    match random.choice(("plain", "plain", "reentrant", "selective")):
        case "reentrant":
            return {"checkpoint_every": every, "reentrant": True}
        case "selective":
            policy = random.choice(("matmuls", "attention", "torchtitan", "aten.mm.default/3+aten.bmm.default"))
            return {"checkpoint_every": every, "selective": policy}
    return {"checkpoint_every": every, "activation_offload": random.random() < 0.2}


def draw_recipe(random: Random, family: str | None = None) -> TrainingRecipe:
    """A training step with plain torch on an NVIDIA GPU of the table.

    Args:
        family: the model's architecture; None: one of `DRAWN_FAMILIES`.
    """
    recipe = _draw_with_hf_loss(random, family)
    recipe = dataclasses.replace(recipe, loss=random.choice((Loss.HF, Loss.HF, *_chunked_losses(recipe))))
    # drawn last, so that the other options of a number are those of adapters without dropout
    return recipe if recipe.lora is None else dataclasses.replace(recipe, lora_dropout=random.choice((0.0, 0.05)))


def _chunked_losses(recipe: TrainingRecipe) -> Iterator[Loss]:
    """The chunked losses that go with a recipe."""
    if "flce" in recipe.kernels or "ce" in recipe.kernels:
        return
    if recipe.spec.scales_logits or recipe.spec.has_head_bias:
        return
    yield from (Loss.CHUNKED_NLL, Loss.TRL_TILED)
    if recipe.spec.final_softcap is None:
        yield Loss.TORCH_LINEAR
        if recipe.tokens % TITAN_CHUNKS == 0 and recipe.precision is not Precision.AMP_FP16:
            yield Loss.TITAN_CHUNKED


def _draw_with_hf_loss(random: Random, family: str | None) -> TrainingRecipe:
    spec = draw_spec(random, family)
    checkpointing = random.random() < 0.5
    applying = [name for name in KERNEL_NAMES if inapplicable_reason(name, spec) is None]
    precision = random.choice(PRECISIONS)
    recipe = TrainingRecipe(
        model=spec,
        batch=random.randint(1, 4),
        seq=random.choice(_SEQUENCES),
        grad_accum=random.choice((1, 1, 1, 1, 2, 3)),
        padding=random.choice((0.0, 0.0, 0.2)),
        liger=random.choice(("none", "none", "all", "no-flce", *applying)),
        provider=random.choice(("ligerprof", "ligerprof", "torch")),
        precision=precision,
        checkpointing=checkpointing,
        **(_draw_checkpointing(random) if checkpointing else {}),
        optimizer=random.choice(OPTIMIZERS),
        fp32_embedding_states=random.random() < 0.5,
        # transformers refuses sdpa for capped scores
        attention="eager"
        if spec.attention_softcap is not None or spec.architecture.attention.sinks
        else random.choice(("sdpa", "sdpa", "eager")),
        **_draw_adapter(random, spec, precision),
        gpu=random.choice(SIMULATED_GPUS),
        # these segments split every block, so that no peak depends on which one served it before
        alloc_conf=random.choice((None, *("expandable_segments:True",) * 3)),
    )
    packs = recipe.padding == 0 and random.random() < PACKED_SHARE
    # with other segments, an evaluation's unsplit remainders are not known; learned positions: see _left_out
    known = recipe.alloc_conf is not None and recipe.spec.rotary
    evaluates = known and random.random() < EVALUATED_SHARE
    return dataclasses.replace(recipe, packing=packs, eval_batch=random.randint(1, 6) if evaluates else None)


def draw_rank_recipe(random: Random) -> TrainingRecipe:
    """The same on several GPUs, under FSDP2 or DDP.

    Raises:
        RecipeError: the drawn options do not go together.
    """
    drawn = draw_recipe(random)
    recipe = dataclasses.replace(drawn, loss="hf" if drawn.loss.is_chunked else drawn.loss)
    options: dict[str, Any] = {"gpus": random.choice((1, 2, 3, 4, 8, 64)), "clip": random.choice((None, None, 1.0))}
    options["grad_sync"] = random.choice(("last", "last", "every"))
    if random.random() < DDP_SHARE:
        return dataclasses.replace(recipe, **options, engine="ddp", bucket_view=random.random() < 0.5)
    precision = random.choice(("mixed", "mixed", recipe.precision))
    return dataclasses.replace(
        recipe,
        **options,
        engine="fsdp2",
        precision="amp" if recipe.precision == "amp-fp16" and precision != "mixed" else precision,
        reentrant=False,
        optimizer=random.choice(("adamw-fused", "adamw-foreach", "sgd")),
        replicate=random.choice((1, 1, 1, options["gpus"], 2 if options["gpus"] % 2 == 0 else 1)),
        reshard=random.random() < 0.7,
        wrap=random.choice(("layers", "accelerate")),
        reduce_dtype=random.choice((None, None, "bfloat16", "float32")),
        offload=random.choice(("none", "none", "none", "all")),
    )


def draw_deepspeed_recipe(random: Random) -> TrainingRecipe:
    """The same under DeepSpeed: without ZeRO or in one of its stages, with and without offload.

    Raises:
        RecipeError: the drawn options do not go together.
    """
    drawn = draw_recipe(random)
    zero = random.choice((0, 1, 2, 3))
    offload = random.choice(("none", "none", *(("optimizer",) if zero else ()), *(("all",) if zero == 3 else ())))
    # some of the sizes are below those of DeepSpeed, so that buckets fill
    sizes: dict[str, Any] = {"reduce_bucket_size": random.choice((500_000_000, 1_000_000, 100_000))}
    return dataclasses.replace(
        drawn,
        engine="deepspeed",
        zero=zero,
        offload=offload,
        gpus=random.choice((1, 2, 3, 4, 8, 64)),
        clip=random.choice((None, 1.0)),
        precision=random.choice(("mixed", "mixed", "mixed-fp16", "fp32")),
        adapter_dtype="float32",
        reentrant=False,
        activation_offload=False,
        optimizer="deepspeed-cpu-adam"
        if offload != "none"
        else random.choice(("adamw-fused", "adamw-foreach", "adamw", "sgd")),
        loss="hf",
        deepspeed_config={"zero_optimization": {"overlap_comm": random.random() < 0.2, **sizes}},
    )
