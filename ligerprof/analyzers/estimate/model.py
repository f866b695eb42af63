"""What surrounds the decoder layers: embedding, rotary tables and masks."""

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.lora import adapter_rank, add_adapter_to_embedding
from ligerprof.analyzers.estimate.meter import Allocation
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import add, dropout, renamed, scale
from ligerprof.analyzers.estimate.tensors import Value
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.torch_memory.dtypes import FP32_BYTES
from ligerprof.torch_memory.sorting import embedding_gradient


def embed(context: Context, role: Role) -> tuple[Value, Value, Allocation | None]:
    """The embedding's output and the residual stream that the first layer reads, each held once.

    The last result is what autograd starts at, if that is neither: it lives as long as the graph.
    """
    row = context.spec.architecture
    if row.positions is not None:
        return *_embed_with_positions(context, f"{row.positions}.weight", role), None
    embedded = look_up(context, f"{row.embedding}.weight", role)
    if f"{row.embedding}.lora_A" in context.weights:
        embedded = add_adapter_to_embedding(context, embedded, row.embedding, role)
    rate, leaf = context.spec.dropout_rate(row.embedding_dropout), None
    # enable_input_require_grads: without it a checkpointed layer would have nothing to differentiate
    if embedding_is_leaf(context.recipe) and (rate or row.scales_embedding == "decoder"):
        embedded.needs_gradient = True
        leaf = context.tape.hand_over(context.tape.name(embedded))
    embedded = renamed(context, embedded, dropout(context, embedded, rate))
    if row.scales_embedding is not None:
        embedded = renamed(context, embedded, scale(context, embedded, role=role))
    if embedding_is_leaf(context.recipe):
        embedded.needs_gradient = True
    return embedded, context.tape.name(embedded), leaf


def embedding_is_leaf(recipe: TrainingRecipe) -> bool:
    """Whether autograd starts at the output of a frozen embedding, so that checkpointed layers have a gradient."""
    is_frozen = not (recipe.trains_in_full(recipe.spec.architecture.embedding) or recipe.adapts_embedding)
    return adapter_rank(recipe) is not None and recipe.checkpointing and is_frozen


def _embed_with_positions(context: Context, positions_name: str, role: Role) -> tuple[Value, Value]:
    """GPT2Model.forward: tokens plus positions, then dropout."""
    tape, row = context.tape, context.spec.architecture
    embedded = look_up(context, f"{row.embedding}.weight", Role.ACTIVATIONS)
    positions = look_up(context, positions_name, Role.ACTIVATIONS, sequences=1)
    total = add(context, embedded, positions, role=role)
    dropped = dropout(context, total, context.spec.dropout_rate(row.embedding_dropout))
    tape.release(total, positions)
    return embedded, dropped


def look_up(context: Context, name: str, role: Role, *, sequences: int | None = None) -> Value:
    """The rows of an embedding."""
    weight = context.weights[name]
    tokens = context.tokens if sequences is None else sequences * context.recipe.row_tokens
    hidden = weight.shape[-1]
    sort = embedding_gradient(tokens, weight.elements // hidden, hidden)
    return context.tape.run(
        Operation(
            elements=tokens * hidden,
            width=weight.width,
            inputs=(weight,),
            role=role,
            scratch_role=Role.ACTIVATIONS,
            other_saves=1,
            backward_scratch_bytes=0 if sort is None else sort.sum_bytes,
        )
    )


def table_sizes(recipe: TrainingRecipe, stream: Value) -> tuple[int, ...]:
    """Bytes of the rotary tables cos and sin; none with learned positions."""
    rotary = recipe.spec.architecture.attention.rotary
    if rotary is None or (rotary.when is not None and not any(recipe.spec.layer_kinds.rotated)):
        return ()
    if rotary.complex_products:
        # half as many complex numbers
        return (recipe.row_tokens * recipe.spec.rotary_dim * FP32_BYTES,)
    width = FP32_BYTES if rotary.fp32_tables else stream.width
    size_bytes = recipe.row_tokens * recipe.spec.rotary_dim * width // (2 if rotary.halves else 1)
    kinds = len(set(recipe.spec.layer_kinds.windowed)) if rotary.tables_by_kind else 1
    rows = recipe.rows if rotary.tables_by_row else 1
    return (rows * size_bytes, rows * size_bytes) * kinds


def keeps_tables(recipe: TrainingRecipe) -> bool:
    """Whether the rotary tables live until backward ends: layers save them, or their checkpoints hold them."""
    rotary = recipe.spec.architecture.attention.rotary
    return recipe.checkpointing or rotary is None or not rotary.expands_tables


def has_fp32_tables(recipe: TrainingRecipe) -> bool:
    """Whether layers read rotary tables in fp32; FSDP2's mixed precision casts the inputs of every layer."""
    rotary = recipe.spec.architecture.attention.rotary
    return rotary is not None and rotary.fp32_tables and not recipe.casts_gathered
