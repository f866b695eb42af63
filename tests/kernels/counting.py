"""Count a plain-torch kernel's bytes on the estimate's tape."""

from types import SimpleNamespace
from typing import Any, cast

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.layers import gated_product, rotate_both
from ligerprof.analyzers.estimate.loss import head_and_loss, project_to_logits, reference_loss
from ligerprof.analyzers.estimate.meter import Allocation, Meter
from ligerprof.analyzers.estimate.norms import norm
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.tape import Tape
from ligerprof.analyzers.estimate.tensors import Value, Weight
from ligerprof.kernels import KernelShape, find_kernel
from ligerprof.models import spec_from_config
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.torch_memory.allocator.settings import SizeRules

# a meter that counts requested bytes
UNROUNDED = cast(SizeRules, SimpleNamespace(round_request=lambda size_bytes: size_bytes))


def count_plain_torch(slot: str, shape: KernelShape) -> tuple[int, int, int, int]:
    """Bytes of outputs, kept, temporary in forward, and made in backward."""
    context = make_context(slot, shape)
    meter, tape = context.tape.meter, context.tape
    outputs, source = run(context, slot, shape)
    output_bytes = sum(output.size_bytes for output in outputs)
    kept_bytes, forward_peak_bytes = meter.total_bytes, meter.peak_bytes
    # the gradients of all outputs come from outside
    joined = tape.run(Operation(elements=0, width=1, passes=outputs, view_of=outputs[0]))
    meter.start()
    tape.backward(joined, Allocation(size_bytes=0, role=Role.OTHER, place=meter.place, number=0, holders=2), source)
    return (
        output_bytes,
        kept_bytes - output_bytes,
        forward_peak_bytes - kept_bytes,
        meter.peak_bytes - kept_bytes,
    )


def make_context(slot: str, shape: KernelShape) -> Context:
    recipe = TrainingRecipe(
        model=spec_from_config(config(slot, shape), name="one call"),
        batch=shape.sequences,
        seq=shape.tokens // shape.sequences,
        precision={(4, 4): "fp32", (2, 2): "bf16"}.get((shape.product_bytes, shape.parameter_bytes), "amp"),
    )
    parameters = {
        "norm.weight": (shape.hidden,),
        "norm.bias": (shape.hidden,),
        "lm_head.weight": (shape.vocab, shape.hidden),
    }
    weights = {
        name: Weight(
            size[0] * (size[1] if size[1:] else 1), shape.parameter_bytes, trainable=shape.weight_requires_grad
        )
        for name, size in parameters.items()
    }
    meter = Meter(UNROUNDED)
    return Context(
        recipe=recipe,
        tape=Tape(meter),
        weights=weights,
        kernels={slot: find_kernel(slot, "torch")},
    )


def config(slot: str, shape: KernelShape) -> dict[str, Any]:
    if slot == "layernorm":
        sizes = {"n_embd": shape.hidden, "n_head": 1, "n_layer": 1, "n_positions": shape.tokens}
        return {"model_type": "gpt2", "vocab_size": shape.vocab, **sizes}
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": False,
    }


def run(context: Context, slot: str, shape: KernelShape) -> tuple[tuple[Value, ...], Value]:
    def given(columns: int, width: int = shape.activation_bytes) -> Value:
        return Value(shape.tokens * columns, width, needs_gradient=True, block=None)

    if slot in ("rms", "layernorm"):
        value = given(shape.hidden)
        return (norm(context, value, "norm"),), value
    if slot in ("swiglu", "geglu"):
        gate = given(shape.intermediate)
        return (gated_product(context, gate, given(shape.intermediate), slot),), gate
    if slot == "rope":
        query, key = (given(heads * shape.head_dim) for heads in (shape.heads, shape.kv_heads))
        return rotate_both(context, query, key, wide_tables=False), query
    if slot == "ce":
        logits = given(shape.vocab, shape.product_bytes)
        return (_loss_of(context, logits),), logits
    hidden = given(shape.hidden)
    loss = head_and_loss(context, hidden) or _loss_of(context, project_to_logits(context, hidden))
    return (loss,), hidden


def _loss_of(context: Context, logits: Value) -> Value:
    loss = reference_loss(context, logits)
    context.tape.release(logits)
    return loss
