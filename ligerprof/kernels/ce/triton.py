"""Cross-entropy over given logits in Triton: one pass that makes loss and gradient, nothing read back by the host.

N tokens (rows), V vocabulary. The same row kernel serves the fused linear loss.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ligerprof.errors import KernelInputError
from ligerprof.kernels.device import on_device, sm_count
from ligerprof.kernels.options import PLAIN_LOSS, LossOptions

# launch: one program a row, which reads it twice. Programs that fill a multiprocessor keep the rows under way few
# enough for the L2 cache, so that the second reading comes from there
_MAX_BLOCK = 16384
_ELEMENTS_PER_WARP = 512
_SUM_BLOCK = 1024
_SCALE_BLOCK = 4096
_SCALE_PROGRAMS_PER_SM = 8


@triton.jit
def _logits(raw, offsets, mask, bias_ptr, logit_scale, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Stored logits as the loss sees them, in fp32; -inf outside the vocabulary."""
    z = raw.to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    z *= logit_scale
    if HAS_SOFTCAP:
        # tanh(u) = 2 sigmoid(2u) - 1
        z = softcap * (2.0 * tl.sigmoid(2.0 * z / softcap) - 1.0)
    return tl.where(mask, z, float("-inf"))


@triton.jit(do_not_specialize=["first_row", "seq_len", "ignore_index"])
def cross_entropy_kernel(
    logits_ptr,
    grad_ptr,
    labels_ptr,
    loss_ptr,
    scale_ptr,
    bias_ptr,
    logits_stride,
    grad_stride,
    scale_stride,
    first_row,
    seq_len,
    vocab,
    width,
    ignore_index,
    logit_scale,
    softcap,
    smoothing,
    z_weight,
    SHIFT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    WRITE_LOSS: tl.constexpr,
    WRITE_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Loss of one row, and the gradient of its logits times scale[token * scale_stride].

    `labels`, `loss` and `scale` are indexed by the token's own number, `logits` and `grad` by the row of the chunk.
    `grad` may be `logits`. A pointer that its flag switches off is never read. Rows hold `width` elements, of which the
    last width - vocab mean nothing and may be written: an aligned width keeps loads wide where the vocabulary is odd.
    """
    logit_scale = tl.cast(logit_scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    smoothing = tl.cast(smoothing, tl.float32)
    z_weight = tl.cast(z_weight, tl.float32)
    row = tl.program_id(0)
    token = first_row + row
    logits_ptr += row.to(tl.int64) * logits_stride
    grad_ptr += row.to(tl.int64) * grad_stride
    if SHIFT:
        has_next = token % seq_len + 1 < seq_len
        label = tl.load(labels_ptr + token + 1, mask=has_next, other=ignore_index)
    else:
        label = tl.load(labels_ptr + token)

    if label == ignore_index:
        if WRITE_LOSS:
            tl.store(loss_ptr + token, 0.0)
        if WRITE_GRAD:
            for start in range(0, width, BLOCK):
                offsets = start + tl.arange(0, BLOCK)
                zeros = tl.zeros([BLOCK], dtype=tl.float32).to(grad_ptr.dtype.element_ty)
                tl.store(grad_ptr + offsets, zeros, mask=offsets < width)
        return

    # a label outside the vocabulary makes its own row NaN and touches no other memory
    in_vocab = (label >= 0) & (label < vocab)
    raw_y = tl.load(logits_ptr + label, mask=in_vocab, other=0.0)
    z_y = _logits(raw_y, label, in_vocab, bias_ptr, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP)
    z_y = tl.where(in_vocab, z_y, float("nan"))

    # not -inf: a block of nothing but -inf must not make inf - inf
    highest = -3.0e38
    total = 0.0
    z_sum = 0.0
    for start in range(0, width, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < vocab
        # kept in the L2 cache for the second reading, whose own loads and stores make way for others
        raw = tl.load(logits_ptr + offsets, mask=offsets < width, other=0.0, eviction_policy="evict_last")
        z = _logits(raw, offsets, mask, bias_ptr, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP)
        if HAS_SMOOTHING:
            z_sum += tl.sum(tl.where(mask, z, 0.0))
        new_highest = tl.maximum(highest, tl.max(z))
        total = total * tl.exp(highest - new_highest) + tl.sum(tl.exp(z - new_highest))
        highest = new_highest
    lse = highest + tl.log(total)

    if WRITE_LOSS:
        loss = lse - z_y
        if HAS_SMOOTHING:
            loss += smoothing * (z_y - z_sum / vocab)
        tl.store(loss_ptr + token, loss + z_weight * lse * lse)

    if WRITE_GRAD:
        # no thread may overwrite the label's logit while another still reads it
        tl.debug_barrier()
        scale = tl.where(in_vocab, logit_scale, float("nan"))
        if HAS_SCALE:
            scale *= tl.load(scale_ptr + token.to(tl.int64) * scale_stride).to(tl.float32)
        softmax_factor = 1.0 + 2.0 * z_weight * lse
        for start in range(0, width, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            mask = offsets < vocab
            raw = tl.load(logits_ptr + offsets, mask=offsets < width, other=0.0, eviction_policy="evict_first")
            z = _logits(raw, offsets, mask, bias_ptr, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP)
            grad = tl.exp(z - lse) * softmax_factor
            grad = tl.where(offsets == label, grad - (1.0 - smoothing), grad)
            if HAS_SMOOTHING:
                grad -= smoothing / vocab
            if HAS_SOFTCAP:
                capped = tl.where(mask, z, 0.0) / softcap
                grad *= 1.0 - capped * capped
            grad = (grad * scale).to(grad_ptr.dtype.element_ty)
            tl.store(grad_ptr + offsets, grad, mask=offsets < width, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["tokens", "seq_len", "ignore_index"])
def _reciprocal_count_kernel(
    labels_ptr, out_ptr, tokens, seq_len, ignore_index, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """One over the number of labels that count; one where none does."""
    count = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, tokens, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        counts = offsets < tokens
        label = tl.load(labels_ptr + offsets, mask=counts, other=0)
        counts = counts & (label != ignore_index)
        if SHIFT:
            # the first label of a sequence is no position's target
            counts = counts & (offsets % seq_len != 0)
        count += counts.to(tl.int32)
    total = tl.maximum(tl.sum(count), 1)
    tl.store(out_ptr, 1.0 / total.to(tl.float32))


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


def launch_cross_entropy(
    logits_NV: Tensor,
    grad_NV: Tensor | None,
    labels_N: Tensor,
    loss_N: Tensor | None,
    scale: Tensor | None,
    options: LossOptions,
    *,
    first_row: int = 0,
    seq_len: int = 1,
    width: int | None = None,
    bias_V: Tensor | None = None,
) -> None:
    """Run the row kernel on a chunk of logits.

    Args:
        grad_NV: takes the gradient of the logits, may be `logits_NV`; None where none is wanted.
        labels_N: labels of all tokens, contiguous.
        loss_N: takes the losses of all tokens in fp32, or None.
        scale: factor on the gradient, one element, or one a token; None is one.
        first_row: number of the chunk's first token.
        seq_len: tokens a sequence, where the options shift.
        width: elements of a row that may be read and written, where there are more than logits.
    """
    rows, vocab = logits_NV.shape
    block = min(_MAX_BLOCK, triton.next_power_of_2(vocab))
    grad = logits_NV if grad_NV is None else grad_NV
    with on_device(logits_NV):
        cross_entropy_kernel[(rows,)](
            logits_NV,
            grad,
            labels_N,
            labels_N if loss_N is None else loss_N,
            labels_N if scale is None else scale,
            labels_N if bias_V is None else bias_V,
            logits_NV.stride(0),
            grad.stride(0),
            0 if scale is None or scale.numel() == 1 else 1,
            first_row,
            seq_len,
            vocab,
            vocab if width is None else width,
            options.ignore_index,
            options.logit_scale,
            1.0 if options.softcap is None else options.softcap,
            options.label_smoothing,
            options.z_loss,
            SHIFT=options.shift,
            HAS_SCALE=scale is not None,
            HAS_BIAS=bias_V is not None,
            HAS_SOFTCAP=options.softcap is not None,
            HAS_SMOOTHING=options.label_smoothing > 0,
            WRITE_LOSS=loss_N is not None,
            WRITE_GRAD=grad_NV is not None,
            BLOCK=block,
            num_warps=max(block // _ELEMENTS_PER_WARP, 4),
        )


def loss_divisor(labels_N: Tensor, seq_len: int, num_items: Tensor | float | None, options: LossOptions) -> Tensor:
    """What every token's loss is multiplied by: one fp32 element on the labels' device, known to the device alone."""
    if options.reduction == "mean" and num_items is None:
        factor = torch.empty(1, dtype=torch.float32, device=labels_N.device)
        with on_device(labels_N):
            _reciprocal_count_kernel[(1,)](
                labels_N, factor, labels_N.numel(), seq_len, options.ignore_index, SHIFT=options.shift, BLOCK=_SUM_BLOCK
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


def graph_is_kept() -> bool:
    """Whether the backward that runs now may run again (`retain_graph=True`)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def flat_labels(labels: Tensor, device: torch.device) -> tuple[Tensor, int]:
    """Labels in one row on the device, and the tokens a sequence."""
    return labels.to(device).reshape(-1).contiguous(), labels.shape[-1]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, num_items: Tensor | float | None, options: LossOptions, track: bool
    ) -> Tensor:
        # detached: autograd must not look for the history of a view whose bytes change
        logits_NV = logits.detach().reshape(-1, logits.shape[-1])
        if logits_NV.stride(-1) != 1:
            logits_NV = logits_NV.contiguous()
        labels_N, seq_len = flat_labels(labels, logits.device)
        ctx.options, ctx.seq_len, ctx.shape = options, seq_len, logits.shape
        loss_N = torch.empty(labels_N.numel(), dtype=torch.float32, device=logits.device)
        if options.reduction == "none":
            launch_cross_entropy(logits_NV, None, labels_N, loss_N, None, options, seq_len=seq_len)
            ctx.save_for_backward(logits_NV, labels_N)
            return loss_N.view(labels.shape)
        factor = loss_divisor(labels_N, seq_len, num_items, options)
        grad_NV = None
        if track:
            grad_NV = logits_NV if options.in_place else torch.empty_like(logits_NV)
        scale = None if waits_for_loss_scale(logits.dtype) else factor
        launch_cross_entropy(logits_NV, grad_NV, labels_N, loss_N, scale, options, seq_len=seq_len)
        if grad_NV is logits_NV:
            # whoever saved the logits for backward learns that they are gone
            torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(grad_NV, factor)
        total = torch.empty((), dtype=torch.float32, device=logits.device)
        reduce_losses(loss_N, factor, total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        in_place = not graph_is_kept()
        if ctx.options.reduction == "none":
            logits_NV, labels_N = ctx.saved_tensors
            grad = logits_NV if in_place and ctx.options.in_place else torch.empty_like(logits_NV)
            scale = grad_loss.reshape(-1).contiguous()
            launch_cross_entropy(logits_NV, grad, labels_N, None, scale, ctx.options, seq_len=ctx.seq_len)
        else:
            made_NV, factor = ctx.saved_tensors
            late = factor if waits_for_loss_scale(made_NV.dtype) else None
            grad = scale_by_device_factor(made_NV, grad_loss, late, in_place=in_place)
        return grad.view(ctx.shape), None, None, None, None


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    num_items: Tensor | float | None = None,
) -> Tensor:
    """Cross-entropy of logits [..., V] against labels [...], in fp32.

    Where no label counts, the loss and its gradients are zero (torch's mean is NaN there).

    Args:
        num_items: what the summed loss is divided by instead of the count, where the reduction is `mean`;
            a tensor stays on its device.

    Raises:
        KernelInputError: shapes that do not go together.
    """
    if labels.shape != logits.shape[:-1]:
        raise KernelInputError(
            f"ce: labels {tuple(labels.shape)} do not go with logits {tuple(logits.shape)}. One label a row is needed."
        )
    track = torch.is_grad_enabled() and logits.requires_grad
    return _CrossEntropy.apply(logits, labels, num_items, options, track)  # type: ignore[no-any-return]
