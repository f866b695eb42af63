"""Scores of tokens that policies and preferences are trained on: log-probabilities, entropies, log-sum-exps, logits.

No function here holds logits of all tokens and words; each has a gradient.

Axes: N tokens, D hidden, V vocabulary.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligerprof.errors import KernelInputError
from ligerprof.kernels.cross_entropy.formulas import load_label, scaled_logits
from ligerprof.kernels.cross_entropy.loss import check_labels
from ligerprof.kernels.cross_entropy.triton import cross_entropy_outputs
from ligerprof.kernels.device import on_device
from ligerprof.kernels.linear_cross_entropy.triton import check_head, fused_linear_cross_entropy_outputs
from ligerprof.kernels.options import IGNORE_INDEX, PLAIN_LOSS, LossOptions, LossOutputs, VocabularyShard
from ligerprof.kernels.sizes import next_power_of_2
from ligerprof.kernels.tensors import as_rows, check_tensors, columns_of, first_order_only, row_stride

# mypy: allow-untyped-defs, allow-incomplete-defs


# launch config: one program per token
_MAX_BLOCK = 2048
_WARPS = 4


@triton.jit
def _tanh(u):
    """Compute tanh to 2e-7 of its value; the row kernels' formula takes less time, but loses digits near zero."""
    square = u * u
    # the odd polynomial of Cephes's tanhf, for values up to .625
    series = ((-5.70498872745e-3 * square + 2.06390887954e-2) * square - 5.37397155531e-2) * square
    series = ((series + 1.33314422036e-1) * square - 3.33332819422e-1) * square * u + u
    return tl.where(tl.abs(u) < 0.625, series, 1.0 - 2.0 / (1.0 + tl.exp(2.0 * u)))


@triton.jit(do_not_specialize=["seq_len", "ignore_index"])
def _label_logits_kernel(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    labels_ptr,
    out_ptr,
    hidden_stride,
    weight_stride,
    columns,
    vocab,
    seq_len,
    ignore_index,
    logit_scale,
    softcap,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The logit of one token's label: 0 if it is ignored, NaN if it is outside the vocabulary."""
    token = tl.program_id(0)
    label = load_label(labels_ptr, token, seq_len, ignore_index, SHIFT)
    in_vocab = (label >= 0) & (label < vocab)
    hidden_ptr += token.to(tl.int64) * hidden_stride
    weight_ptr += label.to(tl.int64) * weight_stride
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = (column < columns) & in_vocab
        x = tl.load(hidden_ptr + column, mask=mask, other=0.0).to(tl.float32)
        total += x * tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    z = scaled_logits(tl.sum(total), label, in_vocab, (bias_ptr, None, logit_scale, softcap, None))
    if softcap is not None:
        softcap = tl.cast(softcap, tl.float32)
        z = softcap * _tanh(z / softcap)
    z = tl.where(in_vocab, z, float("nan"))
    tl.store(out_ptr + token, tl.where(label == ignore_index, 0.0, z))


@triton.jit(do_not_specialize=["seq_len", "ignore_index"])
def _label_gradients_kernel(
    grad_ptr,
    z_ptr,
    hidden_ptr,
    weight_ptr,
    labels_ptr,
    hidden_grad_ptr,
    rows_ptr,
    sums_ptr,
    words_ptr,
    hidden_stride,
    weight_stride,
    columns,
    vocab,
    seq_len,
    ignore_index,
    logit_scale,
    softcap,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token's share of the gradients: of its hidden state, of the label's row and of the label's bias.

    `words` receives the label, or 0 with a share of zero if it is ignored.
    """
    token = tl.program_id(0)
    label = load_label(labels_ptr, token, seq_len, ignore_index, SHIFT)
    counts = label != ignore_index
    in_vocab = (label >= 0) & (label < vocab)
    grad = tl.load(grad_ptr + token).to(tl.float32)
    if logit_scale is not None:
        grad *= tl.cast(logit_scale, tl.float32)
    if softcap is not None:
        capped = tl.load(z_ptr + token) / tl.cast(softcap, tl.float32)
        grad *= 1.0 - capped * capped
    grad = tl.where(counts, tl.where(in_vocab, grad, float("nan")), 0.0)
    tl.store(words_ptr + token, tl.where(counts & in_vocab, label, 0))
    tl.store(sums_ptr + token, grad.to(sums_ptr.dtype.element_ty))
    out = token.to(tl.int64) * columns
    hidden_ptr += token.to(tl.int64) * hidden_stride
    weight_ptr += label.to(tl.int64) * weight_stride
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < columns
        if hidden_grad_ptr is not None:
            weight = tl.load(weight_ptr + column, mask=mask & in_vocab & counts, other=0.0).to(tl.float32)
            of_hidden = (grad * weight).to(hidden_grad_ptr.dtype.element_ty)
            tl.store(hidden_grad_ptr + out + column, of_hidden, mask=mask)
        if rows_ptr is not None:
            x = tl.load(hidden_ptr + column, mask=mask, other=0.0).to(tl.float32)
            tl.store(rows_ptr + out + column, (grad * x).to(rows_ptr.dtype.element_ty), mask=mask)


class LabelLogits(torch.autograd.Function):
    """The labels' logits, in fp32, of hidden states [..., D] and a head [V, D] of one dtype."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight_VD: Tensor, bias_V: Tensor | None, labels: Tensor, options: LossOptions
    ) -> Tensor:
        columns = columns_of(hidden)
        hidden_ND, weight_VD = as_rows(hidden), as_rows(weight_VD)
        labels_N = labels.to(hidden.device, torch.int64).reshape(-1).contiguous()
        z_N = torch.empty(labels_N.shape, dtype=torch.float32, device=hidden.device)
        ctx.options, ctx.shape, ctx.seq_len = options, hidden.shape, labels.shape[-1] if labels.ndim > 0 else 1
        ctx.bias_dtype = None if bias_V is None else bias_V.dtype
        with on_device(hidden):
            _label_logits_kernel[(labels_N.numel(),)](
                bias_ptr=None if bias_V is None else bias_V.contiguous(),
                out_ptr=z_N,
                **_shared(hidden_ND, weight_VD, labels_N, options, ctx.seq_len, columns),
            )
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N, z_N)
        return z_N.view(labels.shape)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, labels_N, z_N = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        hidden_grad = torch.empty(ctx.shape, dtype=hidden_ND.dtype, device=grad.device) if wants_hidden else None
        rows_ND = torch.empty(hidden_ND.shape, dtype=weight_VD.dtype, device=grad.device) if wants_weight else None
        sums_N1 = torch.empty(z_N.numel(), 1, dtype=ctx.bias_dtype or torch.float32, device=grad.device)
        words_N = torch.empty_like(labels_N)
        with on_device(grad):
            _label_gradients_kernel[(z_N.numel(),)](
                grad_ptr=grad.reshape(-1).contiguous(),
                z_ptr=z_N,
                hidden_grad_ptr=hidden_grad,
                rows_ptr=rows_ND,
                sums_ptr=sums_N1,
                words_ptr=words_N,
                **_shared(hidden_ND, weight_VD, labels_N, ctx.options, ctx.seq_len, columns_of(hidden_ND)),
            )
        weight_grad_VD = None if rows_ND is None else _sums_by_word(rows_ND, words_N, weight_VD.shape[0])
        bias_grad_V = _sums_by_word(sums_N1, words_N, weight_VD.shape[0]).view(-1) if wants_bias else None
        return hidden_grad, weight_grad_VD, bias_grad_V, None, None


def _sums_by_word(rows_ND: Tensor, words_N: Tensor, vocab: int) -> Tensor:
    """The sum of the rows of each word [V, D], in an order that does not change from call to call."""
    sums_VD: Tensor = torch.ops.aten.embedding_dense_backward(rows_ND, words_N, vocab, -1, False)  # noqa: FBT003
    return sums_VD


def _shared(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, options: LossOptions, seq_len: int, columns: int
) -> dict[str, Any]:
    return {
        "hidden_ptr": hidden_ND,
        "weight_ptr": weight_VD,
        "labels_ptr": labels_N,
        "hidden_stride": row_stride(hidden_ND, columns),
        "weight_stride": row_stride(weight_VD, columns),
        "columns": columns,
        "vocab": weight_VD.shape[0],
        "seq_len": seq_len,
        "ignore_index": options.ignore_index,
        "logit_scale": None if options.logit_scale == 1.0 else options.logit_scale,
        "softcap": options.softcap,
        "SHIFT": int(options.shift),
        "BLOCK": min(next_power_of_2(columns), _MAX_BLOCK),
        "num_warps": _WARPS,
    }


class TokenScores(NamedTuple):
    """Scores of each position, fp32, shaped like the labels; 0 if the label is ignored.

    Attributes:
        log_probs: log-probability of the label.
        entropy: of the position's distribution; None if it was not asked for.
    """

    log_probs: Tensor
    entropy: Tensor | None = None


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    shard: VocabularyShard | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
) -> TokenScores:
    """Log-probabilities of the labels under `softmax((hidden @ weight.T + bias) / temperature)`, and entropies.

    Both have a gradient, which backward computes from the logits of a few tokens at a time.

    Args:
        hidden: [..., D].
        weight: [V, D].
        labels: [...], int64.
        options: shift, ignore_index, softcap, logit_scale, budget and accumulate_fp32 apply.
        temperature: divides the logits, before the softcap.
        entropy: whether to compute entropies, too.
        shard: the words that weight and bias are, if the vocabulary is split over ranks.
        low_rank: factors [..., R] and [V, R] whose product is added to the logits, such as those of LoRA.

    Raises:
        KernelInputError: shapes do not match, or an option has no meaning for a log-probability.
    """
    plain, returns = per_token(options, temperature), ("entropy",) if entropy else ()
    outputs = fused_linear_cross_entropy_outputs(
        hidden, weight, labels, plain, bias, returns=returns, shard=shard, low_rank=low_rank
    )
    return _scores(outputs)


def log_probs(
    logits: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    shard: VocabularyShard | None = None,
) -> TokenScores:
    """`linear_log_probs` of given logits [..., V]; with the option `in_place`, the gradient overwrites them.

    Raises:
        KernelInputError: see `linear_log_probs`.
    """
    plain, returns = per_token(options, temperature), ("entropy",) if entropy else ()
    return _scores(cross_entropy_outputs(logits, labels, plain, returns=returns, shard=shard))


def linear_log_sum_exp(
    hidden: Tensor,
    weight: Tensor,
    options: LossOptions = PLAIN_LOSS,
    bias: Tensor | None = None,
    *,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """Log-sum-exp over the words of `hidden @ weight.T + bias` [..., V], for each position, from fp32 logits.

    Args:
        options: softcap, logit_scale, budget and accumulate_fp32 apply.
        shard: the words that weight and bias are, if the vocabulary is split over ranks.

    Raises:
        KernelInputError: shapes do not match, or an option has no meaning for a log-sum-exp.
    """
    no_labels = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    plain = dataclasses.replace(per_token(options, 1.0), shift=False, ignore_index=IGNORE_INDEX, fp32_logits=True)
    outputs = fused_linear_cross_entropy_outputs(hidden, weight, no_labels, plain, bias, returns=("lse",), shard=shard)
    assert outputs.lse is not None
    return outputs.lse


def linear_label_logits(
    hidden: Tensor, weight: Tensor, labels: Tensor, options: LossOptions = PLAIN_LOSS, bias: Tensor | None = None
) -> Tensor:
    """The logit of each label, fp32: `hidden @ weight[label] + bias[label]`; 0 if the label is ignored.

    Args:
        hidden: [..., D]; under autocast, it and the weight are cast.
        weight: [V, D].
        labels: [...], int64.
        options: shift, ignore_index, softcap, logit_scale and check_labels apply.

    Raises:
        KernelInputError: shapes do not match, or a label that is checked is outside the vocabulary.
    """
    check_tensors("label logits", hidden, weight, bias, elsewhere=(labels,))
    check_head("label logits", hidden, weight, labels, bias)
    check_labels(labels, options, weight.shape[0])
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    return LabelLogits.apply(hidden.to(dtype), weight.to(dtype), bias, labels, options)  # type: ignore[no-any-return]


def per_token(options: LossOptions, temperature: float) -> LossOptions:
    """Options of a loss that is the negative log-probability of each token.

    Raises:
        KernelInputError: an option changes the loss to something else, or the temperature is not positive.
    """
    for name in ("label_smoothing", "z_loss", "token_scaling"):
        if getattr(options, name):
            raise KernelInputError(f"the option {name} belongs to a loss, and not to a score of a token. Leave it out.")
    if not 0 < temperature < math.inf:
        raise KernelInputError(f"the temperature is {temperature}. It must be positive and finite.")
    return dataclasses.replace(options, reduction="none", logit_scale=options.logit_scale / temperature)


def _scores(outputs: LossOutputs) -> TokenScores:
    return TokenScores(-outputs.loss, outputs.entropy)
