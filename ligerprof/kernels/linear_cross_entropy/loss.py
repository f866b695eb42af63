"""From a loss request, hidden states and a head to the loss and all gradients: the fused loss, compiled or not.

Axes: N tokens, D hidden, V vocabulary.
"""

import torch
from torch import Tensor

from ligerprof.kernels.cross_entropy.factors import sum_scale
from ligerprof.kernels.cross_entropy.loss import Launch, compute_loss, compute_waiting_gradients
from ligerprof.kernels.cross_entropy.parallel import sum_over_ranks
from ligerprof.kernels.linear_cross_entropy.chunks import Gradients, Operands, run_chunks
from ligerprof.kernels.options import IncomingGradients, LossOutputs, LossRequest

# hidden states [..., D], weight [V, D], bias [V]
Inputs = tuple[Tensor, Tensor, Tensor | None]


def loss_and_gradients(
    inputs: Inputs, dtype: torch.dtype, request: LossRequest, wanted: tuple[bool, ...]
) -> tuple[LossOutputs, Gradients, Tensor | None]:
    """The results, their gradients, and the factor that each of the three still lacks, or None.

    See `waits_for_loss_scale` for the factor. There are no gradients if they wait.

    Args:
        dtype: of the matrix products.
        wanted: which inputs want a gradient.
    """
    op, grads, launch = _prepared(inputs, dtype, request, tuple(want and not request.waits for want in wanted))
    outputs, late = compute_loss(request, inputs[1].shape[0], launch, op.hidden_ND)
    if late is not None:
        of_sums = late / grads.sum_scale
        late = torch.cat((late, of_sums, of_sums))
    return outputs, _finished(grads, inputs, request), late


def waiting_gradients(
    inputs: Inputs, dtype: torch.dtype, request: LossRequest, incoming: IncomingGradients, wanted: tuple[bool, ...]
) -> Gradients:
    """The gradients of a request whose gradients wait for those of its results."""
    op, grads, launch = _prepared(inputs, dtype, request, wanted)
    compute_waiting_gradients(request, incoming, inputs[1].shape[0], launch, op.hidden_ND)
    return _finished(grads, inputs, request)


def _prepared(
    inputs: Inputs, dtype: torch.dtype, request: LossRequest, wanted: tuple[bool, ...]
) -> tuple[Operands, Gradients, Launch]:
    hidden, weight_VD, bias_V = inputs
    op = Operands(
        hidden.reshape(-1, hidden.shape[-1]).to(dtype),
        weight_VD.to(dtype),
        None if bias_V is None else bias_V.contiguous(),
    )
    grads = _empty_gradients(op, inputs, request, wanted)
    return op, grads, lambda arguments: run_chunks(op, grads, arguments)


def _empty_gradients(op: Operands, inputs: Inputs, request: LossRequest, wanted: tuple[bool, ...]) -> Gradients:
    """Uninitialized buffers: the products of the first tokens overwrite them."""
    _, weight_VD, bias_V = inputs
    # products have no narrower results than their operands
    dtype = (
        torch.float32 if request.options.accumulate_fp32 else torch.promote_types(op.weight_VD.dtype, weight_VD.dtype)
    )
    return Gradients(
        hidden_ND=torch.empty_like(op.hidden_ND, memory_format=torch.contiguous_format) if wanted[0] else None,
        weight_VD=torch.empty(weight_VD.shape, dtype=dtype, device=weight_VD.device) if wanted[1] else None,
        bias_V=torch.empty_like(bias_V, dtype=dtype) if bias_V is not None and wanted[2] else None,
        # in backward the products' operands have their factors already
        sum_scale=1.0 if request.waits else sum_scale(op.hidden_ND.dtype, op.hidden_ND.shape[0]),
    )


def _finished(grads: Gradients, inputs: Inputs, request: LossRequest) -> Gradients:
    """Cast the head's gradients to its parameters' dtypes; that of the hidden states is cast in backward."""
    _, weight_VD, bias_V = inputs
    if request.shard is not None and request.shard.sum_hidden_gradient and grads.hidden_ND is not None:
        sum_over_ranks(grads.hidden_ND, request.shard)
    return Gradients(
        grads.hidden_ND,
        None if grads.weight_VD is None else grads.weight_VD.to(weight_VD.dtype),
        None if grads.bias_V is None or bias_V is None else grads.bias_V.to(bias_V.dtype),
        grads.sum_scale,
    )
