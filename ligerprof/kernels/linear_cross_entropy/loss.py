"""From a loss request, hidden states and a head to the loss and all gradients: the fused loss, compiled or not.

Axes: N tokens, D hidden, V vocabulary.
"""

import dataclasses

import torch
from torch import Tensor

from ligerprof.kernels.cross_entropy.factors import sum_scale
from ligerprof.kernels.cross_entropy.loss import compute_loss
from ligerprof.kernels.linear_cross_entropy.chunks import Gradients, Operands, run_chunks
from ligerprof.kernels.options import LossOptions, LossRequest

# hidden states [..., D], weight [V, D], bias [V]
Inputs = tuple[Tensor, Tensor, Tensor | None]


def loss_and_gradients(
    inputs: Inputs, dtype: torch.dtype, request: LossRequest, wanted: tuple[bool, ...]
) -> tuple[Tensor, Gradients, Tensor | None]:
    """The loss, its gradients, and the factor that each of the three still lacks, or None: see `waits_for_loss_scale`.

    Args:
        dtype: of the matrix products.
        wanted: which inputs want a gradient.
    """
    hidden, weight_VD, bias_V = inputs
    op = Operands(hidden.reshape(-1, hidden.shape[-1]).to(dtype), weight_VD.to(dtype))
    dense_bias_V = None if bias_V is None else bias_V.contiguous()
    grads = _empty_gradients(op, inputs, request.options, wanted)
    loss, late = compute_loss(
        request,
        weight_VD.shape[0],
        lambda arguments: run_chunks(op, grads, dataclasses.replace(arguments, bias_V=dense_bias_V)),
        op.hidden_ND,
    )
    if late is not None:
        of_sums = late / grads.sum_scale
        late = torch.cat((late, of_sums, of_sums))
    return loss, _in_parameter_dtypes(grads, inputs), late


def _empty_gradients(op: Operands, inputs: Inputs, options: LossOptions, wanted: tuple[bool, ...]) -> Gradients:
    """Uninitialized buffers: the products of the first tokens overwrite them."""
    _, weight_VD, bias_V = inputs
    # products have no narrower results than their operands
    dtype = torch.float32 if options.accumulate_fp32 else torch.promote_types(op.weight_VD.dtype, weight_VD.dtype)
    return Gradients(
        hidden_ND=torch.empty_like(op.hidden_ND, memory_format=torch.contiguous_format) if wanted[0] else None,
        weight_VD=torch.empty(weight_VD.shape, dtype=dtype, device=weight_VD.device) if wanted[1] else None,
        bias_V=torch.empty_like(bias_V, dtype=dtype) if bias_V is not None and wanted[2] else None,
        # without reduction the products' operands have their factors already
        sum_scale=1.0 if options.reduction == "none" else sum_scale(op.hidden_ND.dtype, op.hidden_ND.shape[0]),
    )


def _in_parameter_dtypes(grads: Gradients, inputs: Inputs) -> Gradients:
    """Cast the head's gradients to its parameters' dtypes; that of the hidden states is cast in backward."""
    _, weight_VD, bias_V = inputs
    return Gradients(
        grads.hidden_ND,
        None if grads.weight_VD is None else grads.weight_VD.to(weight_VD.dtype),
        None if grads.bias_V is None or bias_V is None else grads.bias_V.to(bias_V.dtype),
        grads.sum_scale,
    )
