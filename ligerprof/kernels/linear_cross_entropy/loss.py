"""From a loss request, hidden states and a head to the loss and all gradients: the fused loss, compiled or not.

Axes: N tokens, D hidden, V vocabulary, R rank of adapters.
"""

import torch
from torch import Tensor

from ligerprof.kernels.cross_entropy.factors import sum_scale
from ligerprof.kernels.cross_entropy.loss import Launch, compute_loss, compute_waiting_gradients
from ligerprof.kernels.cross_entropy.parallel import sum_over_ranks
from ligerprof.kernels.linear_cross_entropy.chunks import Gradients, Operands, run_chunks
from ligerprof.kernels.options import IncomingGradients, LossOutputs, LossRequest

# hidden states [..., D], weight [V, D], bias [V], and of adapters: thin [..., R], wide [V, R]
Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def loss_and_gradients(
    inputs: Inputs, dtype: torch.dtype, request: LossRequest, wanted: tuple[bool, ...]
) -> tuple[LossOutputs, Gradients, Tensor | None]:
    """The results, their gradients, and the factor that each gradient still lacks, or None.

    See `waits_for_loss_scale` for the factor. There are no gradients if they wait.

    Args:
        dtype: of the matrix products.
        wanted: which inputs want a gradient.
    """
    op, grads, launch = prepared(inputs, dtype, request, tuple(want and not request.waits for want in wanted))
    outputs, late = compute_loss(request, inputs[1].shape[0], launch, op.hidden_ND)
    if late is not None:
        of_sums = late / grads.sum_scale
        late = torch.cat((late, of_sums, of_sums, late, of_sums))
    return outputs, finished(grads, inputs, request), late


def waiting_gradients(
    inputs: Inputs, dtype: torch.dtype, request: LossRequest, incoming: IncomingGradients, wanted: tuple[bool, ...]
) -> Gradients:
    """The gradients of a request whose gradients wait for those of its results."""
    op, grads, launch = prepared(inputs, dtype, request, wanted)
    compute_waiting_gradients(request, incoming, inputs[1].shape[0], launch, op.hidden_ND)
    return finished(grads, inputs, request)


def prepared(
    inputs: Inputs, dtype: torch.dtype, request: LossRequest, wanted: tuple[bool, ...]
) -> tuple[Operands, Gradients, Launch]:
    """The operands of the products, uninitialized gradients, and what launches the rows."""
    hidden, weight_VD, bias_V, thin, wide_VR = inputs
    # the logits' gradient, which overwrites them, is an operand of the products
    fp32_logits = request.options.fp32_logits and not any(wanted)
    op = Operands(
        hidden.reshape(-1, hidden.shape[-1]).to(dtype),
        weight_VD.to(dtype),
        None if bias_V is None else bias_V.contiguous(),
        None if thin is None else thin.reshape(-1, thin.shape[-1]).to(dtype),
        None if wide_VR is None else wide_VR.to(dtype),
        fp32_logits,
    )
    grads = _empty_gradients(op, inputs, request, wanted)
    return op, grads, lambda arguments: run_chunks(op, grads, arguments)


def _empty_gradients(op: Operands, inputs: Inputs, request: LossRequest, wanted: tuple[bool, ...]) -> Gradients:
    """Uninitialized buffers: the products of the first tokens overwrite them."""
    _, weight_VD, bias_V, _, wide_VR = inputs

    def sum_for(like: Tensor, parameter: Tensor) -> Tensor:
        # products have no narrower results than their operands
        wider = torch.promote_types(op.weight_VD.dtype, parameter.dtype)
        dtype = torch.float32 if request.options.accumulate_fp32 else wider
        return torch.empty(like.shape, dtype=dtype, device=like.device)

    return Gradients(
        hidden_ND=torch.empty_like(op.hidden_ND, memory_format=torch.contiguous_format) if wanted[0] else None,
        weight_VD=sum_for(weight_VD, weight_VD) if wanted[1] else None,
        bias_V=sum_for(bias_V, weight_VD) if bias_V is not None and wanted[2] else None,
        thin_NR=torch.empty_like(op.thin_NR) if op.thin_NR is not None and wanted[3] else None,
        wide_VR=sum_for(wide_VR, wide_VR) if wide_VR is not None and wanted[4] else None,
        # in backward the products' operands have their factors already
        sum_scale=1.0 if request.waits else sum_scale(op.hidden_ND.dtype, op.hidden_ND.shape[0]),
    )


def finished(grads: Gradients, inputs: Inputs, request: LossRequest) -> Gradients:
    """Cast the sums to their parameters' dtypes; gradients per token are cast in backward."""
    _, weight_VD, bias_V, _, wide_VR = inputs
    if request.shard is not None and request.shard.sum_hidden_gradient:
        for grad in (grads.hidden_ND, grads.thin_NR):
            if grad is not None:
                sum_over_ranks(grad, request.shard)
    return Gradients(
        grads.hidden_ND,
        _cast(grads.weight_VD, weight_VD),
        _cast(grads.bias_V, bias_V),
        grads.thin_NR,
        _cast(grads.wide_VR, wide_VR),
        grads.sum_scale,
    )


def _cast(grad: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    return None if grad is None or parameter is None else grad.to(parameter.dtype)
