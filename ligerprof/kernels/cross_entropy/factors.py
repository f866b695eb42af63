"""The factors of a loss that exist only on the device: one over the number of labels, and the gradient of the loss.

Axes: N tokens.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligerprof.kernels.cross_entropy.arguments import LossArguments
from ligerprof.kernels.device import on_device, sm_count
from ligerprof.kernels.sizes import ceil_div

# launch config: elements per program and step
_SUM_BLOCK = 1024
_SCALE_BLOCK = 4096
_SCALE_PROGRAMS_PER_SM = 8

_FP16_SUM_SCALE = 256


@triton.jit(do_not_specialize=["tokens", "seq_len", "vocab", "ignore_index"])
def _reciprocal_count_kernel(
    labels_ptr,
    class_weight_ptr,
    out_ptr,
    tokens,
    seq_len,
    vocab,
    ignore_index,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One over the number of labels that count, or over the sum of their weights; 1 if that is zero."""
    count = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, tokens, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        counts = offsets < tokens
        label = tl.load(labels_ptr + offsets, mask=counts, other=0)
        counts = counts & (label != ignore_index)
        if SHIFT:
            # the first labels of a sequence are not the target of any position
            counts = counts & (offsets % seq_len >= SHIFT)
        if class_weight_ptr is not None:
            in_vocab = (label >= 0) & (label < vocab)
            count += tl.load(class_weight_ptr + label, mask=counts & in_vocab, other=0.0).to(tl.float32)
        else:
            count += counts.to(tl.float32)
    total = tl.sum(count)
    tl.store(out_ptr, 1.0 / tl.where(total == 0.0, 1.0, total))


@triton.jit(do_not_specialize=["tokens"])
def _total_kernel(loss_ptr, factor_ptr, out_ptr, tokens, BLOCK: tl.constexpr):
    """Sum of the tokens' losses times a factor, in a fixed order."""
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, tokens, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        total += tl.load(loss_ptr + offsets, mask=offsets < tokens, other=0.0)
    tl.store(out_ptr, tl.sum(total) * tl.load(factor_ptr))


@triton.jit(do_not_specialize=["tokens", "seq_len", "ignore_index"])
def _accuracy_kernel(
    labels_ptr,
    prediction_ptr,
    out_ptr,
    tokens,
    seq_len,
    ignore_index,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The share of labels that were predicted, of those that count; 0 if none does."""
    right = tl.zeros([BLOCK], dtype=tl.int32)
    counted = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, tokens, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        counts = offsets < tokens
        if SHIFT:
            counts = counts & (offsets % seq_len + SHIFT < seq_len)
        label = tl.load(labels_ptr + offsets + SHIFT, mask=counts, other=0)
        counts = counts & (label != ignore_index)
        prediction = tl.load(prediction_ptr + offsets, mask=counts, other=-1)
        right += (counts & (prediction == label)).to(tl.int32)
        counted += counts.to(tl.int32)
    total = tl.sum(counted).to(tl.float32)
    tl.store(out_ptr, tl.sum(right).to(tl.float32) / tl.where(total == 0.0, 1.0, total))


@triton.jit
def _scale_kernel(
    in_ptr,
    out_ptr,
    factor_ptr,
    late_ptr,
    elements,
    columns,
    row_stride,
    IN_PLACE: tl.constexpr,
    GAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply by a factor in device memory. Returns at once if it is 1 and the result goes in place.

    With GAPS, the input has rows of `columns` elements that are `row_stride` apart, and a result elsewhere has none.
    """
    factor = tl.load(factor_ptr).to(tl.float32)
    if late_ptr is not None:
        factor *= tl.load(late_ptr)
    if IN_PLACE and factor == 1.0:
        return
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, elements, step):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < elements
        places = offsets
        if GAPS:
            row = offsets // columns
            places = row * row_stride + (offsets - row * columns)
        value = tl.load(in_ptr + places, mask=mask, other=0.0).to(tl.float32)
        if IN_PLACE:
            offsets = places
        tl.store(out_ptr + offsets, (value * factor).to(out_ptr.dtype.element_ty), mask=mask)


def loss_factor(arguments: LossArguments, num_items: Tensor | float | None) -> Tensor:
    """The factor in every token's loss: one fp32 element on the labels' device, which the host never reads."""
    labels_N, options = arguments.labels_N, arguments.options
    if options.reduction == "mean" and num_items is None:
        factor = torch.empty(1, dtype=torch.float32, device=labels_N.device)
        with on_device(labels_N):
            _reciprocal_count_kernel[(1,)](
                labels_ptr=labels_N,
                class_weight_ptr=arguments.class_weight_V,
                out_ptr=factor,
                tokens=labels_N.numel(),
                seq_len=arguments.seq_len,
                vocab=arguments.vocab,
                ignore_index=options.ignore_index,
                SHIFT=int(options.shift),
                BLOCK=_SUM_BLOCK,
            )
        return factor
    if isinstance(num_items, Tensor) and options.reduction == "mean":
        items = num_items.to(device=labels_N.device, dtype=torch.float32).reshape(1)
        # without items all labels are ignored, and the sum of losses is zero
        return items.masked_fill(items == 0.0, 1.0).reciprocal()
    divisor = 1.0 if options.reduction == "sum" or not num_items else float(num_items)
    return torch.full((1,), 1.0 / divisor, dtype=torch.float32, device=labels_N.device)


def reduce_losses(loss_N: Tensor, factor: Tensor, out: Tensor) -> None:
    """Write the sum of the tokens' losses, times the factor, to `out`."""
    with on_device(loss_N):
        _total_kernel[(1,)](loss_ptr=loss_N, factor_ptr=factor, out_ptr=out, tokens=loss_N.numel(), BLOCK=_SUM_BLOCK)


def token_accuracy(arguments: LossArguments, prediction_N: Tensor, out: Tensor) -> None:
    """Write the share of labels that were predicted to `out`."""
    with on_device(prediction_N):
        _accuracy_kernel[(1,)](
            labels_ptr=arguments.labels_N,
            prediction_ptr=prediction_N,
            out_ptr=out,
            tokens=prediction_N.numel(),
            seq_len=arguments.seq_len,
            ignore_index=arguments.options.ignore_index,
            SHIFT=int(arguments.options.shift),
            BLOCK=_SUM_BLOCK,
        )


def waits_for_loss_scale(dtype: torch.dtype) -> bool:
    """Whether gradients get the factor only in backward: in fp16, a probability over the token count underflows."""
    return dtype == torch.float16


def sum_scale(dtype: torch.dtype, tokens: int) -> float:
    """The factor on sums over the tokens' gradients (of head and bias) while those wait for the loss's factor.

    A sum of as many fp16 values as there are tokens would overflow. A power of two, so that it rounds nothing, which
    leaves a mean over the tokens of up to 255 in range, and as small a mean as eager fp16 training keeps at a loss
    scale of 256.
    """
    if not waits_for_loss_scale(dtype):
        return 1.0
    return _FP16_SUM_SCALE / (1 << max(tokens - 1, 0).bit_length())


def scale_by_device_factor(value: Tensor, factor: Tensor, late: Tensor | None, *, in_place: bool) -> Tensor:
    """Compute `value * factor * late` in fp32, without a transfer of the factors to the host.

    Args:
        value: without gaps in memory, or a matrix of dense rows.
    """
    out = value if in_place else torch.empty_like(value)
    columns, row_stride = (value.shape[1], value.stride(0)) if value.ndim == 2 else (1, 1)
    programs = min(ceil_div(value.numel(), _SCALE_BLOCK), _SCALE_PROGRAMS_PER_SM * sm_count(value.device))
    with on_device(value):
        _scale_kernel[(max(programs, 1),)](
            in_ptr=value,
            out_ptr=out,
            factor_ptr=factor,
            late_ptr=late,
            elements=value.numel(),
            columns=columns,
            row_stride=row_stride,
            IN_PLACE=in_place,
            GAPS=value.ndim == 2 and value.shape[0] > 1 and row_stride > columns,
            BLOCK=_SCALE_BLOCK,
        )
    return out
