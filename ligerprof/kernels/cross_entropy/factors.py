"""The factors of a loss that only the device knows: one over the labels' number, the loss's own gradient."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligerprof.kernels.cross_entropy.rows import LossCall
from ligerprof.kernels.device import on_device, sm_count

# elements a program takes at a time
_SUM_BLOCK = 1024
_SCALE_BLOCK = 4096
_SCALE_PROGRAMS_PER_SM = 8


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
    HAS_CLASS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One over the number of labels that count, or over the sum of their weights; one where that is zero."""
    count = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, tokens, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        counts = offsets < tokens
        label = tl.load(labels_ptr + offsets, mask=counts, other=0)
        counts = counts & (label != ignore_index)
        if SHIFT:
            # the first label of a sequence is no position's target
            counts = counts & (offsets % seq_len != 0)
        if HAS_CLASS_WEIGHT:
            in_vocab = (label >= 0) & (label < vocab)
            count += tl.load(class_weight_ptr + label, mask=counts & in_vocab, other=0.0).to(tl.float32)
        else:
            count += counts.to(tl.float32)
    total = tl.sum(count)
    tl.store(out_ptr, 1.0 / tl.where(total == 0.0, 1.0, total))


@triton.jit(do_not_specialize=["tokens"])
def _total_kernel(loss_ptr, factor_ptr, out_ptr, tokens, BLOCK: tl.constexpr):
    """Sum of the tokens' losses times a factor, always in the same order."""
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, tokens, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        total += tl.load(loss_ptr + offsets, mask=offsets < tokens, other=0.0)
    tl.store(out_ptr, tl.sum(total) * tl.load(factor_ptr))


@triton.jit
def _scale_kernel(
    in_ptr, out_ptr, factor_ptr, late_ptr, elements, HAS_LATE: tl.constexpr, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr
):
    """Multiply by a factor that only the device knows; where it is one and in place, nothing is touched."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if HAS_LATE:
        factor *= tl.load(late_ptr)
    if IN_PLACE and factor == 1.0:
        return
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, elements, step):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < elements
        value = tl.load(in_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + offsets, (value * factor).to(out_ptr.dtype.element_ty), mask=mask)


def loss_divisor(call: LossCall, num_items: Tensor | float | None) -> Tensor:
    """What every token's loss is multiplied by: one fp32 element on the labels' device, known to the device alone."""
    labels_N, weight, options = call.labels_N, call.class_weight_V, call.options
    if options.reduction == "mean" and num_items is None:
        factor = torch.empty(1, dtype=torch.float32, device=labels_N.device)
        with on_device(labels_N):
            _reciprocal_count_kernel[(1,)](
                labels_N,
                labels_N if weight is None else weight,
                factor,
                labels_N.numel(),
                call.seq_len,
                call.vocab,
                options.ignore_index,
                SHIFT=options.shift,
                HAS_CLASS_WEIGHT=weight is not None,
                BLOCK=_SUM_BLOCK,
            )
        return factor
    if isinstance(num_items, Tensor) and options.reduction == "mean":
        return num_items.to(device=labels_N.device, dtype=torch.float32).reshape(1).reciprocal()
    divisor = 1.0 if options.reduction == "sum" or num_items is None else float(num_items)
    return torch.full((1,), 1.0 / divisor, dtype=torch.float32, device=labels_N.device)


def reduce_losses(loss_N: Tensor, factor: Tensor, out: Tensor) -> None:
    """Write the sum of the tokens' losses times the factor."""
    with on_device(loss_N):
        _total_kernel[(1,)](loss_N, factor, out, loss_N.numel(), BLOCK=_SUM_BLOCK)


def waits_for_loss_scale(dtype: torch.dtype) -> bool:
    """Whether the gradient takes its factor in backward: in fp16 a probability over the token count flushes to zero."""
    return dtype == torch.float16


def scale_by_device_factor(value: Tensor, factor: Tensor, late: Tensor | None, *, in_place: bool) -> Tensor:
    """`value * factor * late` without asking the host what they are."""
    out = value if in_place else torch.empty_like(value)
    programs = min(triton.cdiv(value.numel(), _SCALE_BLOCK), _SCALE_PROGRAMS_PER_SM * sm_count(value.device))
    with on_device(value):
        _scale_kernel[(max(programs, 1),)](
            value,
            out,
            factor,
            factor if late is None else late,
            value.numel(),
            HAS_LATE=late is not None,
            IN_PLACE=in_place,
            BLOCK=_SCALE_BLOCK,
        )
    return out
