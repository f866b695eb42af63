"""The divergence of a student's distribution from a teacher's, and its gradient, for rows of logits in Triton.

One launch, of one program per row, replaces a dozen passes of plain torch over [C, V] fp32: it reads both rows twice
(three times for a mixture), and writes the gradient over the student's.

Axes: N tokens (rows), V vocabulary. p is the student's distribution, q the teacher's, m = (1 - beta) p + beta q.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl
from torch import Tensor

from ligerprof.kernels.cross_entropy.formulas import LOWEST, in_formula
from ligerprof.kernels.device import on_device
from ligerprof.kernels.options import LossOptions
from ligerprof.kernels.sizes import next_power_of_2

# launch config: words of one tile, and warps of a program
_BLOCK = 4096
_WARPS = 8


@triton.jit
def _load(logits_ptr, words, mask, formula):
    """Logits at temperature 1, fp32; the lowest number beyond the row."""
    z = in_formula(tl.load(logits_ptr + words, mask=mask, other=0.0), words, mask, formula)
    return tl.where(mask, z, LOWEST)


@triton.jit
def _moved(highest, z):
    """The highest logit with those of a tile, and the factor on sums of exponentials relative to the old one."""
    higher = tl.maximum(highest, tl.max(z, axis=0))
    return higher, tl.exp(highest - higher)


@triton.jit
def _divergence_kernel(
    student_ptr,
    teacher_ptr,
    labels_ptr,
    soft_ptr,
    hard_ptr,
    scale_ptr,
    student_bias_ptr,
    teacher_bias_ptr,
    student_stride,
    teacher_stride,
    vocab,
    ignore_index,
    student_scale,
    teacher_scale,
    student_softcap,
    teacher_softcap,
    per_temperature,
    beta,
    soft_weight,
    hard_weight,
    KIND: tl.constexpr,
    HARD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row's divergence and cross-entropy; over the student's logits, the gradient of their weighted sum times scale.

    KIND is `forward` (q relative to p), `reverse` (p relative to q) or `mixed`.
    """
    row = tl.program_id(0)
    student_ptr += row.to(tl.int64) * student_stride
    teacher_ptr += row.to(tl.int64) * teacher_stride
    label = tl.load(labels_ptr + row)
    if label == ignore_index:
        for start in range(0, vocab, BLOCK):
            words = start + tl.arange(0, BLOCK)
            tl.store(student_ptr + words, tl.zeros([BLOCK], student_ptr.dtype.element_ty), mask=words < vocab)
        tl.store(soft_ptr + row, 0.0)
        if HARD:
            tl.store(hard_ptr + row, 0.0)
        return

    of_student = (student_bias_ptr, None, student_scale, student_softcap, None)
    of_teacher = (teacher_bias_ptr, None, teacher_scale, teacher_softcap, None)
    per_temperature = tl.cast(per_temperature, tl.float32)
    beta = tl.cast(beta, tl.float32)
    s_highest = tl.full([], LOWEST, tl.float32)
    t_highest, h_highest = s_highest, s_highest
    s_total = tl.zeros([BLOCK], tl.float32)
    t_total = tl.zeros([BLOCK], tl.float32)
    h_total = tl.zeros([BLOCK], tl.float32)
    # of the expected distribution's exponentials times the difference of its logits from the other's
    gap = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        words = start + tl.arange(0, BLOCK)
        mask = words < vocab
        z = _load(student_ptr, words, mask, of_student)
        if HARD:
            h_highest, factor = _moved(h_highest, z)
            h_total = h_total * factor + tl.where(mask, tl.exp(z - h_highest), 0.0)
        s = z * per_temperature
        t = _load(teacher_ptr, words, mask, of_teacher) * per_temperature
        s_highest, s_factor = _moved(s_highest, s)
        t_highest, t_factor = _moved(t_highest, t)
        s_exp = tl.where(mask, tl.exp(s - s_highest), 0.0)
        t_exp = tl.where(mask, tl.exp(t - t_highest), 0.0)
        s_total = s_total * s_factor + s_exp
        t_total = t_total * t_factor + t_exp
        if KIND == "forward":
            gap = gap * t_factor + tl.where(t_exp > 0.0, t_exp * (t - s), 0.0)
        if KIND == "reverse":
            gap = gap * s_factor + tl.where(s_exp > 0.0, s_exp * (s - t), 0.0)
    s_sum = tl.sum(s_total)
    t_sum = tl.sum(t_total)
    s_lse = s_highest + tl.log(s_sum)
    t_lse = t_highest + tl.log(t_sum)
    if KIND == "forward":
        soft = tl.sum(gap) / t_sum - t_lse + s_lse
    if KIND == "reverse":
        soft = tl.sum(gap) / s_sum - s_lse + t_lse
    of_p = 0.0
    if KIND == "mixed":
        p_gap = tl.zeros([BLOCK], tl.float32)
        q_gap = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            words = start + tl.arange(0, BLOCK)
            mask = words < vocab
            s = _load(student_ptr, words, mask, of_student) * per_temperature - s_lse
            t = _load(teacher_ptr, words, mask, of_teacher) * per_temperature - t_lse
            p = tl.where(mask, tl.exp(s), 0.0)
            q = tl.where(mask, tl.exp(t), 0.0)
            m = (1.0 - beta) * p + beta * q
            log_m = tl.log(tl.where(m > 0.0, m, 1.0))
            p_gap += tl.where(p > 0.0, p * (s - log_m), 0.0)
            q_gap += tl.where(q > 0.0, q * (t - log_m), 0.0)
        of_p = tl.sum(p_gap)
        soft = beta * tl.sum(q_gap) + (1.0 - beta) * of_p
    tl.store(soft_ptr + row, soft)
    in_vocab = (label >= 0) & (label < vocab)
    h_lse = 0.0
    if HARD:
        h_lse = h_highest + tl.log(tl.sum(h_total))
        z_y = in_formula(tl.load(student_ptr + label, mask=in_vocab, other=0.0), label, in_vocab, of_student)
        tl.store(hard_ptr + row, tl.where(in_vocab, h_lse - z_y, float("nan")))
        # all threads have read it before one overwrites it
        tl.debug_barrier()
    scale = tl.load(scale_ptr)
    soft_scale = scale * tl.cast(soft_weight, tl.float32) * per_temperature
    hard_scale = scale * tl.cast(hard_weight, tl.float32)
    for start in range(0, vocab, BLOCK):
        words = start + tl.arange(0, BLOCK)
        mask = words < vocab
        z = _load(student_ptr, words, mask, of_student)
        s = z * per_temperature - s_lse
        t = _load(teacher_ptr, words, mask, of_teacher) * per_temperature - t_lse
        p = tl.exp(s)
        if KIND == "forward":
            grad = p - tl.exp(t)
        if KIND == "reverse":
            grad = tl.where(p > 0.0, p * (s - t - soft), 0.0)
        if KIND == "mixed":
            m = (1.0 - beta) * p + beta * tl.exp(t)
            grad = tl.where(p > 0.0, (1.0 - beta) * p * (s - tl.log(tl.where(m > 0.0, m, 1.0)) - of_p), 0.0)
        grad *= soft_scale
        if HARD:
            of_label = tl.exp(z - h_lse) - tl.where(words == label, 1.0, 0.0)
            grad += tl.where(in_vocab, hard_scale, float("nan")) * of_label
        if student_scale is not None:
            grad *= tl.cast(student_scale, tl.float32)
        if student_softcap is not None:
            capped = z / tl.cast(student_softcap, tl.float32)
            grad *= 1.0 - capped * capped
        tl.store(student_ptr + words, grad.to(student_ptr.dtype.element_ty), mask=mask)


def divergence_and_gradient(
    student_NV: Tensor,
    teacher_NV: Tensor,
    labels_N: Tensor,
    soft_N: Tensor,
    hard_N: Tensor | None,
    scale: Tensor,
    *,
    options: LossOptions,
    teacher_options: LossOptions,
    student_bias_V: Tensor | None,
    teacher_bias_V: Tensor | None,
    temperature: float,
    beta: float,
    soft_weight: float,
    hard_weight: float,
) -> None:
    """Write divergences, cross-entropies unless `hard_N` is None, and the gradient over the student's logits.

    Args:
        scale: one element, a factor on the gradient.
    """
    rows, vocab = student_NV.shape
    with on_device(student_NV):
        _divergence_kernel[(rows,)](
            student_ptr=student_NV,
            teacher_ptr=teacher_NV,
            labels_ptr=labels_N,
            soft_ptr=soft_N,
            hard_ptr=hard_N,
            scale_ptr=scale,
            student_bias_ptr=student_bias_V,
            teacher_bias_ptr=teacher_bias_V,
            student_stride=student_NV.stride(0),
            teacher_stride=teacher_NV.stride(0),
            vocab=vocab,
            ignore_index=options.ignore_index,
            student_scale=None if options.logit_scale == 1.0 else options.logit_scale,
            teacher_scale=None if teacher_options.logit_scale == 1.0 else teacher_options.logit_scale,
            student_softcap=options.softcap,
            teacher_softcap=teacher_options.softcap,
            per_temperature=1 / temperature,
            beta=beta,
            soft_weight=soft_weight,
            hard_weight=hard_weight,
            KIND="forward" if beta == 0 else "reverse" if beta == 1 else "mixed",
            HARD=hard_N is not None,
            BLOCK=min(_BLOCK, next_power_of_2(vocab)),
            num_warps=_WARPS,
        )
