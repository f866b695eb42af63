"""Distillation of a teacher's head into a student's, a few tokens at a time: whole distributions or the top words.

Axes: N tokens, D hidden, E the teacher's hidden, V vocabulary, K words of the teacher's top, C tokens of one chunk.
p is the student's distribution, q the teacher's, m = (1 - beta) p + beta q.

A kernel computes divergences of whole distributions, and their gradient over the student's logits: one program per row
replaces a dozen passes of plain torch over [C, V] fp32. It reads both rows twice (three times for a mixture).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from ligerprof.errors import KernelInputError
from ligerprof.kernels.cross_entropy.arguments import LossArguments
from ligerprof.kernels.cross_entropy.blocks import count_words, gradient_of_words
from ligerprof.kernels.cross_entropy.formulas import LOWEST, in_formula, relative_exp, store_zeros
from ligerprof.kernels.cross_entropy.loss import check_labels
from ligerprof.kernels.cross_entropy.reference import next_labels
from ligerprof.kernels.cross_entropy.spec import statistics_per_token
from ligerprof.kernels.device import on_device
from ligerprof.kernels.linear_cross_entropy.chunks import Operands
from ligerprof.kernels.linear_cross_entropy.plan import BALANCED_BYTES, aligned, plan_chunks
from ligerprof.kernels.linear_cross_entropy.scores import per_token
from ligerprof.kernels.linear_cross_entropy.triton import check_head
from ligerprof.kernels.objectives.loss import GROUP_BYTES, Chunk, ChunkedLoss, Differentiate
from ligerprof.kernels.options import PLAIN_LOSS, LossOptions, LossRequest
from ligerprof.kernels.sizes import next_power_of_2, slices_of
from ligerprof.kernels.tensors import product_dtype

# launch config: words side by side and one after another in a tile, of each of the two rows, and warps of a program
_LANES = 2048
_DEPTH = 2
_WARPS = 8
_LN_2 = tl.constexpr(0.6931471805599453)
# the logarithm of how far a probability is above one that is rounded to 0
_APART = tl.constexpr(87.0)


@triton.jit
def _load(logits_ptr, words, mask, formula):
    """Logits at temperature 1, fp32; -inf beyond the row."""
    _, _, _, softcap, _ = formula
    z = in_formula(tl.load(logits_ptr + words, mask=mask, other=float("-inf")), words, mask, formula)
    return z if softcap is None else tl.where(mask, z, float("-inf"))


@triton.jit
def _counted(highest, total, z):
    """Each lane's highest logit and sum of exponentials relative to it, with those of a tile, and the tile's."""
    higher = tl.maximum(highest, tl.max(z, 0))
    factor = relative_exp(highest, higher)
    powers = relative_exp(z, higher[None, :])
    return higher, total * factor + tl.sum(powers, 0), powers, factor


@triton.jit
def _log_sum(highest, total):
    """The logarithm of the sum of all lanes' exponentials, and each lane's share in a mean by probabilities."""
    top = tl.max(highest)
    factors = relative_exp(highest, top)
    whole = tl.sum(total * factors)
    return top + tl.log2(whole) * _LN_2, factors / whole


@triton.jit
def _of_mixture(s, t, beta, INSTRUCTION: tl.constexpr):
    """Of a word with the log-probabilities s and t: p, and the logarithms of m / p and of q / m."""
    p = relative_exp(s, 0.0)
    # where p is 0, m is beta q
    apart = tl.maximum(tl.where(p > 0.0, t - s, _APART), -_APART)
    is_above = apart > 0.0
    share = relative_exp(-tl.abs(apart), 0.0)
    # of the larger of p and q
    mixture = tl.where(is_above, beta + (1.0 - beta) * share, 1.0 - beta + beta * share)
    # one instruction instead of twenty; it is off by 2^-22 of the logarithm, or in all from 1/2 to 2
    log = (libdevice.fast_log2f(mixture) if INSTRUCTION else tl.log2(mixture)) * _LN_2
    return p, tl.where(is_above, apart + log, log), tl.where(is_above, -log, apart - log)


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
    INSTRUCTION: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """A row's divergence and cross-entropy; over the student's logits, the gradient of their weighted sum times scale.

    KIND is `forward` (q relative to p), `reverse` (p relative to q) or `mixed`.
    """
    row = tl.program_id(0)
    student_ptr += row.to(tl.int64) * student_stride
    teacher_ptr += row.to(tl.int64) * teacher_stride
    block = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    label = tl.load(labels_ptr + row)
    if label == ignore_index:
        store_zeros(student_ptr, vocab, DEPTH, LANES)
        tl.store(soft_ptr + row, 0.0)
        if HARD:
            tl.store(hard_ptr + row, 0.0)
        return

    of_student = (student_bias_ptr, None, student_scale, student_softcap, None)
    of_teacher = (teacher_bias_ptr, None, teacher_scale, teacher_softcap, None)
    per_temperature = tl.cast(per_temperature, tl.float32)
    beta = tl.cast(beta, tl.float32)
    s_highest = tl.full([LANES], LOWEST, tl.float32)
    t_highest, h_highest = s_highest, s_highest
    s_total = tl.zeros([LANES], tl.float32)
    t_total, h_total = s_total, s_total
    # of the expected distribution's exponentials times the difference of its logits from the other's
    gap = s_total
    for start in range(0, vocab, DEPTH * LANES):
        words = start + block
        mask = words < vocab
        z = _load(student_ptr, words, mask, of_student)
        if HARD:
            h_highest, h_total, _, _ = _counted(h_highest, h_total, z)
        s = z * per_temperature
        t = _load(teacher_ptr, words, mask, of_teacher) * per_temperature
        s_highest, s_total, s_powers, s_factor = _counted(s_highest, s_total, s)
        t_highest, t_total, t_powers, t_factor = _counted(t_highest, t_total, t)
        if KIND == "forward":
            gap = gap * t_factor + tl.sum(tl.where(t_powers > 0.0, t_powers * (t - s), 0.0), 0)
        if KIND == "reverse":
            gap = gap * s_factor + tl.sum(tl.where(s_powers > 0.0, s_powers * (s - t), 0.0), 0)
    s_lse, s_shares = _log_sum(s_highest, s_total)
    t_lse, t_shares = _log_sum(t_highest, t_total)
    if KIND == "forward":
        soft = tl.sum(gap * t_shares) - t_lse + s_lse
    if KIND == "reverse":
        soft = tl.sum(gap * s_shares) - s_lse + t_lse
    # from here on rows are read in turns from the end and from the beginning, for what the L2 cache still holds
    last = (vocab - 1) // (DEPTH * LANES) * (DEPTH * LANES)
    of_p = 0.0
    if KIND == "mixed":
        of_q = tl.zeros([LANES], tl.float32)
        of_p_lanes = of_q
        for before_last in range(0, vocab, DEPTH * LANES):
            words = last - before_last + block
            mask = words < vocab
            s = _load(student_ptr, words, mask, of_student) * per_temperature - s_lse
            t = _load(teacher_ptr, words, mask, of_teacher) * per_temperature - t_lse
            p, above_p, below_q = _of_mixture(s, t, beta, INSTRUCTION)
            of_p_lanes += tl.sum(p * above_p, 0)
            of_q += tl.sum(relative_exp(t, 0.0) * below_q, 0)
        of_p = tl.sum(of_p_lanes)
        soft = beta * tl.sum(of_q) - (1.0 - beta) * of_p
    tl.store(soft_ptr + row, soft)
    in_vocab = (label >= 0) & (label < vocab)
    h_lse = 0.0
    if HARD:
        h_lse, _shares = _log_sum(h_highest, h_total)
        z_y = in_formula(tl.load(student_ptr + label, mask=in_vocab, other=0.0), label, in_vocab, of_student)
        tl.store(hard_ptr + row, tl.where(in_vocab, h_lse - z_y, float("nan")))
        # all threads have read it before one overwrites it
        tl.debug_barrier()
    scale = tl.load(scale_ptr)
    soft_scale = scale * tl.cast(soft_weight, tl.float32) * per_temperature
    hard_scale = scale * tl.cast(hard_weight, tl.float32)
    if KIND == "mixed":
        soft_scale *= 1.0 - beta
    for before_last in range(0, vocab, DEPTH * LANES):
        start = before_last if KIND == "mixed" else last - before_last
        words = start + block
        mask = words < vocab
        z = _load(student_ptr, words, mask, of_student)
        s = z * per_temperature - s_lse
        t = _load(teacher_ptr, words, mask, of_teacher) * per_temperature - t_lse
        if KIND == "forward":
            grad = relative_exp(s, 0.0) - relative_exp(t, 0.0)
        if KIND == "reverse":
            p = relative_exp(s, 0.0)
            grad = tl.where(p > 0.0, p * (s - t - soft), 0.0)
        if KIND == "mixed":
            p, above_p, below_q = _of_mixture(s, t, beta, INSTRUCTION)
            grad = p * (of_p - above_p)
        grad *= soft_scale
        if HARD:
            of_label = relative_exp(z, h_lse) - tl.where(words == label, 1.0, 0.0)
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
            INSTRUCTION=student_NV.is_cuda,
            DEPTH=_DEPTH,
            LANES=min(_LANES, next_power_of_2(vocab)),
            num_warps=_WARPS,
        )


class DistillationOutputs(NamedTuple):
    """What a distillation returns; only the loss has a gradient.

    Attributes:
        loss: the weighted sum of the next two.
        soft_loss: the mean divergence.
        hard_loss: the mean cross-entropy of the labels, or None without a weight.
    """

    loss: Tensor
    soft_loss: Tensor
    hard_loss: Tensor | None


def distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    teacher_options: LossOptions | None = None,
    num_items: Tensor | float | None = None,
) -> DistillationOutputs:
    """The mean generalized Jensen-Shannon divergence of a student from a teacher, without the logits of all tokens.

    With p the student's distribution, q the teacher's and m = (1 - beta) p + beta q, the divergence of a token is
    beta KL(q, m) + (1 - beta) KL(p, m); beta 0 is the forward divergence KL(q, p), and 1 the reverse one, KL(p, q).
    Forward computes the student's gradients. The teacher is a constant.

    Args:
        hidden: [..., D].
        weight: [V, D].
        teacher_hidden: [..., E].
        teacher_weight: [V, E].
        labels: [...], int64; positions to leave out have `options.ignore_index`.
        options: shift, ignore_index, softcap, logit_scale, budget (of both heads' logits) and accumulate_fp32 apply.
        bias: [V], as `teacher_bias`.
        temperature: divides the logits of both for the divergence, after the softcap.
        hard_weight: of the mean cross-entropy of the labels at temperature 1, which is added.
        teacher_options: softcap and logit_scale of the teacher; None: those of the student.
        num_items: divisor of the means, instead of the number of labels.

    Raises:
        KernelInputError: shapes do not match, a number is out of range, or the products are in fp16, whose gradients
            need a loss scale that only backward knows.
    """
    check_head("distillation", hidden, weight, labels, bias)
    check_head("the teacher of a distillation", teacher_hidden, teacher_weight, labels, teacher_bias)
    if weight.shape[0] != teacher_weight.shape[0]:
        raise KernelInputError(
            f"distillation: the student has {weight.shape[0]} words and the teacher {teacher_weight.shape[0]}."
            " Give both heads the words that they share."
        )
    if not 0 <= beta <= 1 or not temperature > 0:
        raise KernelInputError(
            f"distillation: beta is {beta} and the temperature {temperature}. Beta must be in [0, 1], the temperature"
            " positive."
        )
    labels_N, scale = _targets(labels, options, hidden, num_items, weight.shape[0])
    dtype = _dtype(hidden)
    teacher = Operands(
        teacher_hidden.detach().reshape(-1, teacher_hidden.shape[-1]).to(dtype),
        teacher_weight.detach().to(dtype),
        None if teacher_bias is None else teacher_bias.detach().contiguous(),
    )
    soft_N = torch.zeros(labels_N.shape, device=hidden.device)
    hard_N = torch.zeros_like(soft_N) if hard_weight else None
    chunks = _chunks(labels_N, weight, dtype, options, heads=2)
    teacher_CV = torch.empty(
        max(chunk.stop - chunk.start for (chunk,) in chunks) if chunks else 0,
        aligned(weight.shape[0]),
        dtype=dtype,
        device=hidden.device,
    )

    def differentiate(logits_CV: Tensor, chunk: Chunk, bias_V: Tensor | None) -> None:
        (tokens,) = chunk
        teacher_logits_CV = teacher_CV[: logits_CV.shape[0], : logits_CV.shape[1]]
        teacher.write_logits(tokens, slice(0, logits_CV.shape[1]), teacher_logits_CV)
        divergence_and_gradient(
            logits_CV,
            teacher_logits_CV,
            labels_N[tokens],
            soft_N[tokens],
            None if hard_N is None else hard_N[tokens],
            scale,
            options=options,
            teacher_options=options if teacher_options is None else teacher_options,
            student_bias_V=bias_V,
            teacher_bias_V=None if teacher.bias_in_product else teacher.bias_V,
            temperature=temperature,
            beta=beta,
            soft_weight=soft_weight,
            hard_weight=hard_weight,
        )

    def finish() -> Tensor:
        total = soft_weight * soft_N.sum()
        return (total if hard_N is None else total + hard_weight * hard_N.sum()) * scale[0]

    loss = _apply((hidden, weight, bias), labels_N, options, chunks, differentiate, finish)
    hard = None if hard_N is None else hard_N.sum() * scale[0]
    return DistillationOutputs(loss, soft_N.sum() * scale[0], hard)


def topk_distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher_log_probs: Tensor,
    teacher_words: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    bias: Tensor | None = None,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    tail: bool = True,
    num_items: Tensor | float | None = None,
) -> Tensor:
    """`distillation_loss` against a teacher of which only the most likely words are known, each position's own.

    Args:
        teacher_log_probs: [..., K], at the temperature.
        teacher_words: [..., K], int64, different words.
        labels: [...]; they only say which positions count.
        tail: whether all other words count as one, with the rest of both distributions' probabilities. Otherwise both
            are normalized over the K words.

    Raises:
        KernelInputError: see `distillation_loss`.
    """
    check_head("distillation", hidden, weight, labels, bias)
    if teacher_words.shape != teacher_log_probs.shape or teacher_words.shape[:-1] != labels.shape:
        raise KernelInputError(
            f"distillation: the teacher's log-probabilities {tuple(teacher_log_probs.shape)} and words"
            f" {tuple(teacher_words.shape)} do not match labels {tuple(labels.shape)}. Give [..., K] of each."
        )
    labels_N, scale = _targets(labels, options, hidden, num_items, weight.shape[0])
    vocab, dtype = weight.shape[0], _dtype(hidden)
    words_NK = teacher_words.reshape(-1, teacher_words.shape[-1])
    teacher_NK = teacher_log_probs.detach().reshape(words_NK.shape).float()
    plain = dataclasses.replace(per_token(options, temperature), shift=False, check_labels=False)
    losses_N = torch.zeros(labels_N.shape, device=hidden.device)

    def differentiate(logits_CV: Tensor, chunk: Chunk, bias_V: Tensor | None) -> None:
        (tokens,) = chunk
        size, counts_C = logits_CV.shape[0], labels_N[tokens] != options.ignore_index
        arguments = LossArguments(
            # only their log-sum-exp is of interest
            labels_N=torch.where(counts_C, 0, labels_N[tokens]),
            loss_N=losses_N.new_empty(size),
            lse_N=losses_N.new_empty(size),
            seq_len=1,
            vocab=vocab,
            words=vocab,
            options=plain,
            bias_V=bias_V,
        )
        statistics_SC = losses_N.new_empty(statistics_per_token(entropy=False), size)
        count_words(arguments, logits_CV, statistics_SC, first_row=0, is_last=True, is_padded=True)
        assert arguments.lse_N is not None
        words_CK = words_NK[tokens]
        with torch.enable_grad():
            raw_CK = logits_CV.gather(1, words_CK).float().requires_grad_()
            lse_C = arguments.lse_N.requires_grad_()
            z_CK = raw_CK if bias_V is None else raw_CK + bias_V[words_CK].float()
            log_p_CK = _in_formula(z_CK, plain) - lse_C[:, None]
            found_C = divergence(*_completed(log_p_CK, teacher_NK[tokens], tail=tail), beta)
            found_C = torch.where(counts_C, found_C, 0.0)
            of_words_CK, of_lse_C = torch.autograd.grad((found_C * scale).sum(), (raw_CK, lse_C))
        losses_N[tokens] = found_C.detach()
        arguments = dataclasses.replace(arguments, scale=torch.zeros_like(of_lse_C), lse_grad_N=of_lse_C, lse_N=None)
        gradient_of_words(arguments, logits_CV, statistics_SC, first_row=0)
        of_words_CK = torch.where(counts_C[:, None], of_words_CK, 0.0)
        logits_CV.scatter_add_(1, words_CK, of_words_CK.to(logits_CV.dtype))

    chunks = _chunks(labels_N, weight, dtype, options, heads=1)
    inputs = (hidden, weight, bias)
    return _apply(inputs, labels_N, options, chunks, differentiate, lambda: losses_N.sum() * scale[0])


def _in_formula(z: Tensor, options: LossOptions) -> Tensor:
    z = z * options.logit_scale
    return z if options.softcap is None else options.softcap * torch.tanh(z / options.softcap)


def _completed(log_p: Tensor, log_q: Tensor, *, tail: bool) -> tuple[Tensor, Tensor]:
    """Both distributions over the K words, and one for all others if `tail`."""
    if not tail:
        return log_p.log_softmax(-1), log_q.log_softmax(-1)

    def rest(log_k: Tensor) -> Tensor:
        # rounding must not make the sum 1 or more
        return torch.log1p(-log_k.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))

    return torch.cat((log_p, rest(log_p)), -1), torch.cat((log_q, rest(log_q)), -1)


def divergence(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Plain torch on log-probabilities: the divergence of `distillation_loss` over the last axis."""
    if beta == 0:
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    if beta == 1:
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    log_m = torch.log((1 - beta) * log_p.exp() + beta * log_q.exp())
    return (beta * log_q.exp() * (log_q - log_m) + (1 - beta) * log_p.exp() * (log_p - log_m)).sum(-1)


def _dtype(hidden: Tensor) -> torch.dtype:
    dtype = product_dtype(hidden)
    if dtype == torch.float16:
        raise KernelInputError("distillation: fp16 products were asked for. Use bf16 or fp32.")
    return dtype


def _targets(
    labels: Tensor, options: LossOptions, hidden: Tensor, num_items: Tensor | float | None, vocab: int
) -> tuple[Tensor, Tensor]:
    """Labels [N] that positions are scored against, and one over their number, one element."""
    targets = next_labels(labels, options).to(hidden.device)
    check_labels(targets, dataclasses.replace(options, shift=False), vocab)
    labels_N = targets.reshape(-1).contiguous()
    items = (labels_N != options.ignore_index).sum() if num_items is None else num_items
    items = torch.as_tensor(items, device=hidden.device, dtype=torch.float32).reshape(1)
    return labels_N, torch.where(items == 0, 1.0, items).reciprocal()


def _chunks(labels_N: Tensor, weight: Tensor, dtype: torch.dtype, options: LossOptions, *, heads: int) -> list[Chunk]:
    tokens, budget = labels_N.numel(), options.budget
    if budget == "balanced":
        budget = BALANCED_BYTES if heads == 1 else GROUP_BYTES
    size = plan_chunks(
        tokens=tokens,
        hidden=weight.shape[1],
        vocab=weight.shape[0],
        element_bytes=dtype.itemsize,
        budget=budget if isinstance(budget, str) else budget // heads,
    ).chunk_tokens
    return [(tokens_C,) for tokens_C in slices_of(0, tokens, size)]


def _apply(
    inputs: tuple[Tensor, Tensor, Tensor | None],
    labels_N: Tensor,
    options: LossOptions,
    chunks: list[Chunk],
    differentiate: Differentiate,
    finish: Callable[[], Tensor],
) -> Tensor:
    hidden, weight, bias = inputs
    if not chunks:
        return hidden.float().sum() * 0.0 + weight.float().sum() * 0.0
    request = LossRequest(labels=labels_N, options=dataclasses.replace(options, reduction="none", shift=False))
    loss: Tensor = ChunkedLoss.apply(
        hidden, weight, bias, None, None, _dtype(hidden), request, chunks, differentiate, finish
    )
    return loss
