"""Multi-head latent attention on the tape: query, key and value through narrow latents, as in DeepSeek V3."""

from collections.abc import Callable

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.norms import norm
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import renamed
from ligerprof.analyzers.estimate.rotary import rotate_latents
from ligerprof.analyzers.estimate.tensors import Value
from ligerprof.models.latent import LatentSizes

Project = Callable[[Context, Value, str], Value]


def latent_query_key_value(
    context: Context, value: Value, name: str, sizes: LatentSizes, project: Project
) -> tuple[Value, ...]:
    """DeepseekV3Attention.forward up to attention: query, key, value, and the other variables that it holds."""
    tape, heads = context.tape, context.tokens * context.spec.heads
    projected = _query(context, value, name, sizes, project)
    plain, rotated = tape.split(projected, (heads * sizes.plain_dim, heads * sizes.rotated_dim))
    compressed = project(context, value, f"{name}.kv_a_proj_with_mqa")
    latent, key_rotated = tape.split(compressed, (context.tokens * sizes.key_rank, context.tokens * sizes.rotated_dim))
    latent = renamed(context, latent, norm(context, latent, f"{name}.kv_a_layernorm"))
    turned, key_turned = rotate_latents(context, rotated, key_rotated)
    tape.release(rotated, key_rotated)
    query = _join(context, plain, turned)
    key, values, joint = _expand(context, latent, key_turned, name, sizes, project)
    return query, key, values, projected, plain, turned, compressed, latent, key_turned, joint


def _query(context: Context, value: Value, name: str, sizes: LatentSizes, project: Project) -> Value:
    if not sizes.query_rank:
        return project(context, value, f"{name}.q_proj")
    narrow = project(context, value, f"{name}.q_a_proj")
    normed = renamed(context, narrow, norm(context, narrow, f"{name}.q_a_layernorm"))
    return renamed(context, normed, project(context, normed, f"{name}.q_b_proj"))


def _join(context: Context, plain: Value, turned: Value) -> Value:
    """`torch.cat`: in the wider dtype; gradients of that dtype are views."""
    width = max(plain.width, turned.width)
    parts = (plain, turned)
    return context.tape.run(
        Operation(
            elements=plain.elements + turned.elements,
            width=width,
            inputs=tuple(part for part in parts if part.width != width),
            passes=tuple(part for part in parts if part.width == width),
        )
    )


def _expand(
    context: Context, latent: Value, rotated: Value, name: str, sizes: LatentSizes, project: Project
) -> tuple[Value, Value, Value]:
    """`expand_kv`: key and value of each head; both parts of the key are copied into one new tensor."""
    tape, heads = context.tape, context.tokens * context.spec.heads
    joint = project(context, latent, f"{name}.kv_b_proj")
    plain, values = tape.split(joint, (heads * sizes.plain_dim, heads * sizes.value_dim))
    elements = heads * (sizes.plain_dim + sizes.rotated_dim)
    first = tape.run(
        Operation(elements=elements, width=joint.width, inputs=(plain,), backward_scratch_bytes=elements * joint.width)
    )
    # the gradient of the rotated part is there once per head before it is summed
    expanded_bytes = heads * sizes.rotated_dim * joint.width
    key = tape.run(
        Operation(
            elements=elements,
            width=joint.width,
            inputs=(first, rotated),
            view_of=first,
            backward_scratch_bytes=expanded_bytes,
            reduction_scratch_bytes=expanded_bytes,
        )
    )
    tape.release(first, plain)
    return key, values, joint
