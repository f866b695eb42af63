"""The head and the loss: the [T, V] logits tensors that are live together."""

from ligerprof.analyzers.estimate.chunked_loss import (
    capped_in_one_line,
    chunked_nll,
    titan_chunked,
    torch_linear,
    upcast,
)
from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.hooks import Part
from ligerprof.analyzers.estimate.kernel_call import call_loss, kernel_memory
from ligerprof.analyzers.estimate.lora import add_adapter, head_factors, head_weight_name
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import linear, renamed, scale, unary
from ligerprof.analyzers.estimate.tensors import Value
from ligerprof.analyzers.estimate.tiled_loss import trl_tiled
from ligerprof.recipe.categories import Loss
from ligerprof.roles import Role
from ligerprof.torch_memory.dtypes import FP32_BYTES, INDEX_BYTES

_LOSS = Role.CE_TEMPORARIES
_CHUNKED = {
    Loss.CHUNKED_NLL: chunked_nll,
    Loss.TORCH_LINEAR: torch_linear,
    Loss.TITAN_CHUNKED: titan_chunked,
    Loss.TRL_TILED: trl_tiled,
}


def head_and_loss(context: Context, hidden: Value) -> Value:
    """The loss of the final hidden states; the model's forward holds logits and hidden states until it returns."""
    weight = context.weights[head_weight_name(context.spec, context.weights)]
    context.hooks.enter(Part.HEAD)
    # what is saved in the head's call is not offloaded; liger-kernel's fused loss does not call it
    context.tape.on_gpu = "flce" not in context.kernels or context.recipe.provider != "liger"
    head = context.spec.architecture.head
    is_adapted = f"{head}.lora_A" in context.weights
    if context.is_fused("flce"):
        factors = head_factors(context, hidden, head) if is_adapted else None
        memory = kernel_memory(context, "flce", hidden, weight, factors)
        loss = call_loss(context, memory, hidden, weight, "hidden", factors)
        if factors is not None:
            context.tape.release(*factors)
        return loss
    chunked = _CHUNKED.get(context.recipe.loss)
    if chunked is not None:
        return chunked(context, hidden, weight)
    # these receive the head's output and cap it themselves; liger-kernel replaces functions that the model calls
    caps = "flce" in context.kernels or context.recipe.providers.get("ce", "liger") != "liger"
    bias = context.weights.get(f"{head}.bias")
    logits = linear(context, hidden, weight, bias, role=Role.LOGITS, gradient_role=_LOSS)
    if is_adapted:
        logits = add_adapter(context, hidden, logits, head, role=Role.LOGITS, gradient_role=_LOSS)
    # a fused loss runs in the head's call, whose output is the loss
    context.tape.on_gpu = "flce" in context.kernels
    if not context.tape.on_gpu:
        context.hooks.leave(Part.HEAD)
        context.tape.on_gradient(logits, lambda: context.hooks.gradient_arrives(Part.HEAD))
    if not caps:
        logits = _capped(context, _scaled(context, logits))
    if context.is_fused("ce"):
        loss = call_loss(context, kernel_memory(context, "ce", logits), logits, None, "logits")
        context.tape.release(logits)
        return loss
    if context.recipe.loss is Loss.HF_4_45 and not caps:
        return _shifted_copy_loss(context, logits)
    return hf_loss(context, logits, caps=caps)


def _scaled(context: Context, logits: Value) -> Value:
    """`logits * number` assigned to the same variable, if the model scales logits."""
    if not context.spec.scales_logits:
        return logits
    return renamed(context, logits, scale(context, logits, role=Role.LOGITS))


def _capped(context: Context, logits: Value) -> Value:
    """Division, tanh and product in a statement each, as models cap their logits."""
    if context.spec.final_softcap is None:
        return logits
    tape = context.tape
    divided = scale(context, logits, role=Role.LOGITS)
    tape.release(logits)
    bent = unary(context, divided, saves_output=True, role=Role.LOGITS)
    tape.release(divided)
    capped = scale(context, bent, role=Role.LOGITS)
    tape.release(bent)
    return capped


def hf_loss(context: Context, logits: Value, *, caps: bool) -> Value:
    """ForCausalLMLoss of transformers 4.49 and later, and the losses' reference.py: labels are shifted, logits are not.

    Args:
        caps: whether the loss caps the upcast logits.
    """
    wide = upcast(context, logits)
    if caps and context.spec.logit_factor != 1.0:
        wide = _scaled(context, wide)
    if caps and context.spec.final_softcap is not None:
        wide = capped_in_one_line(context, wide)
    loss = _cross_entropy(context, wide, context.tokens)
    context.tape.release(wide, logits)
    return loss


def _shifted_copy_loss(context: Context, logits: Value) -> Value:
    """LlamaForCausalLM.forward of transformers 4.45: logits upcast under their own name, then a shifted copy.

    Of one sequence, the shifted logits are contiguous without a copy.
    """
    tape = context.tape
    wide = upcast(context, logits)
    tape.release(logits)
    rows = context.tokens - context.recipe.rows
    shifted = tape.run(
        Operation(
            elements=rows * context.spec.vocab_size,
            width=FP32_BYTES,
            inputs=(wide,),
            view_of=wide if context.recipe.rows == 1 else None,
            role=Role.SHIFT_LOGITS,
            gradient_role=_LOSS,
        )
    )
    loss = _cross_entropy(context, shifted, rows)
    tape.release(shifted, wide)
    return loss


def _cross_entropy(context: Context, logits: Value, rows: int) -> Value:
    """`F.cross_entropy`: log_softmax keeps its output, nll_loss reads it and the shifted labels."""
    tape = context.tape
    labels = tape.run(Operation(elements=rows, width=INDEX_BYTES, role=Role.INPUTS))
    log_probabilities = tape.run(
        Operation(
            elements=logits.elements,
            width=FP32_BYTES,
            inputs=(logits,),
            saves_output=True,
            role=_LOSS,
            gradient_role=_LOSS,
        )
    )
    loss = tape.run(
        Operation(
            elements=1,
            width=FP32_BYTES,
            inputs=(log_probabilities,),
            saves=(log_probabilities, labels),
            extra_saved_bytes=FP32_BYTES,
            role=_LOSS,
        )
    )
    tape.release(log_probabilities, labels)
    return loss
