"""Decoders whose experts multiply all tokens, in batched products."""

from dataclasses import replace

from ligerprof.models.architecture import Architecture, Attention, LayerNorms, Mlp, Norm, Rotary
from ligerprof.models.config_keys import LayerChoice, SlidingWindow, SparseLayers
from ligerprof.models.layer_tensors import RawWeight
from ligerprof.models.mixtures import Experts, SharedExpert
from ligerprof.models.rows.experts import only_sparse, shared_expert
from ligerprof.models.rows.parts import CONFIGURED_ATTENTION, TWO_NORMS, gated_tensors

_GATES = RawWeight(
    name="feed_forward.experts", parameter="gate_up_proj", shape=(("experts",), ("hidden",), ("expert", "expert"))
)
_DOWN = RawWeight(name="feed_forward.experts", parameter="down_proj", shape=(("experts",), ("expert",), ("hidden",)))

ROWS = (
    Architecture(
        model_type="llama4_text",
        modeling="llama4",
        peft_targets=(),
        class_prefix="Llama4Text",
        defaults={
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "attention_chunk_size": 8192,
            "use_qk_norm": True,
            "attn_temperature_tuning": True,
        },
        tensors=(
            *CONFIGURED_ATTENTION,
            *only_sparse(
                _GATES,
                _DOWN,
                # a linear layer with two results, which peft cannot adapt
                RawWeight(name="feed_forward.router", parameter="weight", shape=(("experts",), ("hidden",))),
                *(
                    replace(item, name=f"feed_forward.{item.name.removeprefix('mlp.')}")
                    for item in shared_expert("shared_expert")
                ),
            ),
            *(
                replace(item, name=f"feed_forward.{item.name.removeprefix('mlp.')}")
                for item in gated_tensors(sparse=False)
            ),
            *TWO_NORMS,
        ),
        switches={"use_qk_norm": True, "attn_temperature_tuning": True},
        norm=Norm(eps="eps"),
        attention=Attention(
            rotary=Rotary(
                complex_products=True,
                layers=LayerChoice(key="no_rope_layers", chosen=1, period=4, period_key="no_rope_layer_interval"),
            ),
            fp32_softmax=False,
            window=SlidingWindow(
                key="attention_chunk_size",
                layers=LayerChoice(
                    chosen="chunked_attention",
                    instead=("no_rope_layers", 1),
                    period=4,
                    period_key="no_rope_layer_interval",
                ),
                makes_both=True,
            ),
        ),
        mlp=Mlp(
            name="feed_forward",
            activation="activation_fn",
            width="intermediate_size_mlp",
            experts=Experts(
                count="num_local_experts",
                router="router",
                multiplies_all=True,
                shared=SharedExpert(width="intermediate_size", gate=None),
                layers=SparseLayers(every=("interleave_moe_layer_step", 1), listed="moe_layers"),
            ),
        ),
        layer_norms=LayerNorms(own_forward=True),
    ),
)
