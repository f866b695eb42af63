"""The head and the loss: the [T, V] logits tensors that are live together."""

from ligerprof.analyzers.estimate.chunked_loss import (
    capped_in_one_line,
    chunked_nll,
    log_softmax,
    nll,
    titan_chunked,
    torch_linear,
    upcast,
)
from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.hooks import Part
from ligerprof.analyzers.estimate.kernel_call import call_loss, kernel_memory
from ligerprof.analyzers.estimate.lora import add_adapter, head_factors, head_weight_name
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import linear, renamed, scale
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


def head_and_loss(context: Context, hidden: Value) -> Value | None:
    """The loss of the final hidden states where it computes the logits itself, else None."""
    weight = context.weights[head_weight_name(context.spec, context.weights)]
    context.hooks.enter(Part.HEAD)
    # what is saved in the head's call is not offloaded; liger-kernel's fused loss does not call it
    context.tape.on_gpu = "flce" not in context.kernels or context.recipe.provider != "liger"
    if context.is_fused("flce"):
        head = context.spec.architecture.head
        factors = head_factors(context, hidden, head) if f"{head}.lora_A" in context.weights else None
        memory = kernel_memory(context, "flce", hidden, weight, factors)
        loss = call_loss(context, memory, hidden, weight, "hidden", factors)
        if factors is not None:
            context.tape.release(*factors)
        return loss
    chunked = _CHUNKED.get(context.recipe.loss)
    return None if chunked is None else chunked(context, hidden, weight)


def project_to_logits(context: Context, hidden: Value) -> Value:
    """The head's output."""
    head = context.spec.architecture.head
    weight, bias = context.weights[head_weight_name(context.spec, context.weights)], context.weights.get(f"{head}.bias")
    logits = linear(context, hidden, weight, bias, role=Role.LOGITS, gradient_role=_LOSS)
    if f"{head}.lora_A" in context.weights:
        logits = add_adapter(context, hidden, logits, head, role=Role.LOGITS, gradient_role=_LOSS)
    # a fused loss runs in the head's call, whose output is the loss
    context.tape.on_gpu = "flce" in context.kernels
    if not context.tape.on_gpu:
        context.hooks.leave(Part.HEAD)
        context.tape.on_gradient(logits, lambda: context.hooks.gradient_arrives(Part.HEAD))
    return logits


def loss_takes_output(context: Context) -> bool:
    """Whether the loss receives the head's output and scales and caps it itself, as in place of the model's forward.

    liger-kernel replaces functions that the model calls.
    """
    return "flce" in context.kernels or context.recipe.providers.get("ce", "liger") != "liger"


def loss_of_logits(context: Context, logits: Value) -> Value | None:
    """The loss of logits where it is not that of the model's own code, else None."""
    if context.is_fused("ce"):
        return call_loss(context, kernel_memory(context, "ce", logits), logits, None, "logits")
    if loss_takes_output(context):
        return reference_loss(context, logits)
    return _shifted_copy_loss(context, logits) if context.recipe.loss is Loss.HF_4_45 else None


def reference_loss(context: Context, logits: Value) -> Value:
    """reference.py of the losses: scales and caps the upcast logits."""
    wide = upcast(context, logits)
    if context.spec.logit_factor != 1.0:
        wide = renamed(context, wide, scale(context, wide, role=Role.LOGITS))
    if context.spec.final_softcap is not None:
        wide = capped_in_one_line(context, wide)
    loss = _cross_entropy(context, wide, context.tokens)
    context.tape.release(wide)
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
    """`F.cross_entropy` of shifted labels."""
    tape = context.tape
    labels = tape.run(Operation(elements=rows, width=INDEX_BYTES, role=Role.INPUTS))
    log_probabilities = log_softmax(tape, logits)
    loss = nll(tape, log_probabilities, labels)
    tape.release(log_probabilities, labels)
    return loss
