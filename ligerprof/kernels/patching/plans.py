"""Where each architecture of transformers keeps what a kernel replaces: one row of data a model_type."""

from dataclasses import dataclass

from ligerprof.errors import KernelUnavailableError


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """A decoder layer: norm, attention, addition, norm, MLP, addition.

    Attributes:
        classes: of the layer; it has input_layernorm, self_attn and mlp.
        middle_norm: its norm between the first addition and the MLP.
        attention_norm: the norm of attention's output, before the first addition, or None.
        mlp_norm: the norm of the MLP's output, before the second addition, or None.
    """

    classes: tuple[str, ...]
    middle_norm: str = "post_attention_layernorm"
    attention_norm: str | None = None
    mlp_norm: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchPlan:
    """The operations of one architecture, by the names its modeling module gives them.

    Attributes:
        model_type: transformers' name of the architecture.
        rms: classes that normalize by the root mean square; their weight is `weight`.
        rms_eps: the attribute that holds their epsilon.
        rms_offset: what they add to the weight.
        layer: the decoder layer, whose first addition and middle norm may be one, or None.
        gated_mlp: classes with gate_proj, up_proj, down_proj and act_fn.
        attention: classes whose forward calls `apply_rotary_pos_emb` of the module.
        layer_norm: whether the norms are torch's own LayerNorm.
        softcap: the config's attribute that caps the logits, or None.
        output: the class of what the causal model returns, in transformers.modeling_outputs.
    """

    model_type: str
    rms: tuple[str, ...] = ()
    rms_eps: str = "variance_epsilon"
    rms_offset: float = 0.0
    layer: LayerPlan | None = None
    gated_mlp: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    layer_norm: bool = False
    softcap: str | None = None
    output: str = "CausalLMOutputWithPast"

    @property
    def module(self) -> str:
        """The modeling module's import path."""
        return f"transformers.models.{self.model_type}.modeling_{self.model_type}"


def _decoder(model_type: str, prefix: str) -> PatchPlan:
    return PatchPlan(
        model_type=model_type,
        rms=(f"{prefix}RMSNorm",),
        layer=LayerPlan(classes=(f"{prefix}DecoderLayer",)),
        gated_mlp=(f"{prefix}MLP",),
        attention=(f"{prefix}Attention",),
    )


PATCH_PLANS: dict[str, PatchPlan] = {
    plan.model_type: plan
    for plan in (
        _decoder("llama", "Llama"),
        _decoder("mistral", "Mistral"),
        _decoder("qwen2", "Qwen2"),
        _decoder("qwen3", "Qwen3"),
        PatchPlan(
            model_type="gemma",
            rms=("GemmaRMSNorm",),
            rms_eps="eps",
            rms_offset=1.0,
            layer=LayerPlan(classes=("GemmaDecoderLayer",)),
            gated_mlp=("GemmaMLP",),
            attention=("GemmaAttention",),
        ),
        PatchPlan(
            model_type="gemma2",
            rms=("Gemma2RMSNorm",),
            rms_eps="eps",
            rms_offset=1.0,
            layer=LayerPlan(
                classes=("Gemma2DecoderLayer",),
                middle_norm="pre_feedforward_layernorm",
                attention_norm="post_attention_layernorm",
                mlp_norm="post_feedforward_layernorm",
            ),
            gated_mlp=("Gemma2MLP",),
            attention=("Gemma2Attention",),
            softcap="final_logit_softcapping",
        ),
        PatchPlan(model_type="gpt2", layer_norm=True, output="CausalLMOutputWithCrossAttentions"),
    )
}


def find_plan(model_type: str) -> PatchPlan:
    """The row of an architecture.

    Raises:
        KernelUnavailableError: there is none.
    """
    if model_type not in PATCH_PLANS:
        raise KernelUnavailableError(
            f"no kernel can be put into a model of type {model_type!r}. Known: {', '.join(PATCH_PLANS)}."
        )
    return PATCH_PLANS[model_type]
