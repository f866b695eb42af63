"""The formulas of the row kernels of both losses: functions of one row's logits and its label.

Exponentials are powers of 2, because exp2 is one instruction, of differences from the row's highest logit: an offset
that all logits share costs no accuracy. An option or tensor that is None compiles its part away. A row holds `width`
elements: `words` logits, then padding, which aligns rows for wide loads and may be
overwritten. Some arguments come as tuples:

    norm       highest, log2_total: the highest logit, and log2 of the sum of exponentials relative to it
    span       first_word, words, width: which words of the vocabulary the row holds
    formula    bias_ptr, class_weight_ptr, logit_scale, softcap, smoothing
    terms      weights in the token's loss: w_y of the label's class, own of the label's logit, all_words, each_word,
               of_square of the z-loss
    others     gradients of further results: lse_grad_ptr, entropy_grad_ptr; with them the token that they are of, the
               factor between stored logits and those of the loss, and the entropy
    parts      span, formula, terms, scale (a factor on the loss's gradient), norm, others
    tile       ENTROPY, PADDED, DEPTH, LANES: what is computed, and the shape of what a program reads at a time; written
               where it is passed on, because a variable holds no constants
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
# instead of -inf, so that a lane that has seen only -inf does not compute inf - inf
LOWEST = tl.constexpr(-1.0e38)
_NO_PLACE = tl.constexpr(2**31 - 1)


@triton.jit
def load_label(labels_ptr, token, seq_len, ignore_index, SHIFT: tl.constexpr):
    """The label that a token is scored against: that of the token SHIFT places later in the sequence."""
    if SHIFT:
        has_next = token % seq_len + SHIFT < seq_len
        return tl.load(labels_ptr + token + SHIFT, mask=has_next, other=ignore_index)
    return tl.load(labels_ptr + token)


@triton.jit
def in_formula(raw, words, mask, formula):
    """Stored logits as the loss sees them: with bias, scale and softcap, in fp32."""
    bias_ptr, _, logit_scale, softcap, _ = formula
    z = raw.to(tl.float32)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + words, mask=mask, other=0.0).to(tl.float32)
    # the casts are for Triton's interpreter, where the host's numbers are Python's
    if logit_scale is not None:
        z *= tl.cast(logit_scale, tl.float32)
    if softcap is not None:
        softcap = tl.cast(softcap, tl.float32)
        # tanh(u) = 1 - 2 / (1 + e^2u)
        z = softcap * (1.0 - 2.0 / (1.0 + tl.exp2((2.0 / softcap * _LOG2_E) * z)))
    return z


@triton.jit
def relative_exp(z, highest):
    """e^(z - highest)."""
    return tl.exp2((z - highest) * _LOG2_E)


@triton.jit
def exponent(z, norm, stored: tl.constexpr):
    """log2 of e^(z - highest) / total, for logits stored in this dtype.

    From 16 bits, it is one multiply-add. That rounds a product with the highest logit, at 2^-24 of it, where those bits
    round the logits themselves at 2^-9 or 2^-12.
    """
    highest, log2_total = norm
    if stored.primitive_bitwidth == 16:
        return z * _LOG2_E - (highest * _LOG2_E + log2_total)
    return (z - highest) * _LOG2_E - log2_total


@triton.jit
def term_weights(w_y, vocab, smoothing, z_weight, class_weight_ptr, class_weight_sums_ptr):
    """`terms` of the module docstring."""
    own, all_words, each_word, of_square = w_y, 0.0, 0.0, tl.cast(z_weight, tl.float32)
    if class_weight_sums_ptr is not None:
        of_square *= tl.load(class_weight_sums_ptr + 1)
    if smoothing is not None:
        all_words = tl.cast(smoothing, tl.float32)
        own *= 1.0 - all_words
        each_word = all_words / vocab
        if class_weight_ptr is not None:
            all_words = each_word * tl.load(class_weight_sums_ptr)
    return w_y, own, all_words, each_word, of_square


@triton.jit
def factors_of_token(scale_ptr, scale_stride, class_weight_ptr, logit_scale, token, label, in_vocab):
    """The factors of a token's gradients, of the loss's and of those of further results; the weight of its label."""
    chain = 1.0 if logit_scale is None else tl.cast(logit_scale, tl.float32)
    scale = chain
    if scale_ptr is not None:
        scale *= tl.load(scale_ptr + token.to(tl.int64) * scale_stride).to(tl.float32)
    w_y = 1.0
    if class_weight_ptr is not None:
        w_y = tl.load(class_weight_ptr + label, mask=in_vocab, other=0.0).to(tl.float32)
    return scale, chain, w_y


@triton.jit
def label_probability(norm, z_y):
    """The probability of the label."""
    highest, log2_total = norm
    return tl.exp2((z_y - highest) * _LOG2_E - log2_total)


@triton.jit
def entropy_of(norm, total, z_spread):
    """The entropy of a row's distribution."""
    _, log2_total = norm
    return log2_total * _LN_2 - z_spread / total


@triton.jit
def store_results(pointers, token, norm, z_y, z_sum, entropy, terms, TOKEN_SCALING: tl.constexpr):
    """Write a token's loss, and the other results that are wanted."""
    loss_ptr, lse_ptr, entropy_ptr, z_loss_ptr = pointers
    _, own, all_words, each_word, of_square = terms
    highest, log2_total = norm
    lse = highest + log2_total * _LN_2
    loss = own * (log2_total * _LN_2 - (z_y - highest)) + all_words * lse - each_word * z_sum
    z_loss = of_square * lse * lse
    loss += z_loss
    if TOKEN_SCALING:
        probability = label_probability(norm, z_y)
        loss *= probability
        z_loss *= probability
    tl.store(loss_ptr + token, loss)
    if lse_ptr is not None:
        tl.store(lse_ptr + token, lse)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + token, entropy)
    if z_loss_ptr is not None:
        tl.store(z_loss_ptr + token, z_loss)


@triton.jit
def store_ignored_results(pointers, prediction_ptr, token):
    """Write zeros, and -1 as prediction, for a token whose label is ignored."""
    loss_ptr, lse_ptr, entropy_ptr, z_loss_ptr = pointers
    tl.store(loss_ptr + token, 0.0)
    if lse_ptr is not None:
        tl.store(lse_ptr + token, 0.0)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + token, 0.0)
    if z_loss_ptr is not None:
        tl.store(z_loss_ptr + token, 0.0)
    if prediction_ptr is not None:
        tl.store(prediction_ptr + token, -1)


@triton.jit
def store_statistics(statistics_ptr, stride, values, ENTROPY: tl.constexpr):
    """Write a row's statistics: highest, total, z_y, z_sum, and with ENTROPY z_spread."""
    highest, total, z_y, z_sum, z_spread = values
    tl.store(statistics_ptr, highest)
    tl.store(statistics_ptr + stride, total)
    tl.store(statistics_ptr + 2 * stride, z_y)
    tl.store(statistics_ptr + 3 * stride, z_sum)
    if ENTROPY:
        tl.store(statistics_ptr + 4 * stride, z_spread)


@triton.jit
def moved_spread(total, z_spread, highest, new_highest):
    """`z_spread` relative to another highest logit, and not yet scaled to it."""
    return z_spread + total * (highest - new_highest)


@triton.jit
def merged_totals(highest, total, other_highest, other_total):
    """The highest logit of two sets of words, and the sum of exponentials relative to it."""
    new_highest = tl.maximum(highest, other_highest)
    total = total * relative_exp(highest, new_highest) + other_total * relative_exp(other_highest, new_highest)
    return new_highest, total


@triton.jit
def no_words(LANES: tl.constexpr):
    """What `add_words` starts from.

    Each lane has its own maximum and sums, so that threads do not wait for each other while they read.
    """
    lane_highest = tl.full([LANES], LOWEST, tl.float32)
    zeros = tl.zeros([LANES], tl.float32)
    return lane_highest, zeros, zeros, zeros, tl.full([LANES], _NO_PLACE, tl.int32)


@triton.jit
def add_words(lanes, logits_ptr, prediction_ptr, span, formula, tile):
    """Read words of a row: the lanes' highest logit, sums as `finish_words` returns them, and place of the highest."""
    lane_highest, lane_total, lane_sum, lane_spread, lane_place = lanes
    ENTROPY: tl.constexpr = tile[0]
    PADDED: tl.constexpr = tile[1]
    DEPTH: tl.constexpr = tile[2]
    LANES: tl.constexpr = tile[3]
    first_word, words, width = span
    _, class_weight_ptr, _, softcap, smoothing = formula
    lane = tl.arange(0, LANES)
    block = tl.arange(0, DEPTH)[:, None] * LANES + lane[None, :]
    for start in range(0, width, DEPTH * LANES):
        offsets = start + block
        mask = offsets < words
        # evict_last: keep the row in the L2 cache for the second reading, whose own traffic is evict_first
        raw = tl.load(logits_ptr + offsets, mask=offsets < width, other=float("-inf"), eviction_policy="evict_last")
        z = in_formula(raw, first_word + offsets, mask, formula)
        if PADDED or softcap is not None:
            z = tl.where(mask, z, float("-inf"))
        if smoothing is not None:
            summed = tl.where(mask, z, 0.0)
            if class_weight_ptr is not None:
                summed *= tl.load(class_weight_ptr + first_word + offsets, mask=mask, other=0.0).to(tl.float32)
            lane_sum += tl.sum(summed, 0)
        if prediction_ptr is not None:
            top, depth = tl.max(z, 0, return_indices=True)
            lane_place = tl.where(top > lane_highest, first_word + start + depth * LANES + lane, lane_place)
        new_highest = tl.maximum(lane_highest, tl.max(z, 0))
        if ENTROPY:
            power = z - new_highest[None, :]
            lane_spread = moved_spread(lane_total, lane_spread, lane_highest, new_highest)
            lane_spread *= relative_exp(lane_highest, new_highest)
            # a logit of -inf adds nothing
            lane_spread += tl.sum(tl.where(z == float("-inf"), 0.0, relative_exp(power, 0.0) * power), 0)
        lane_total = lane_total * relative_exp(lane_highest, new_highest)
        lane_total += tl.sum(tl.exp2(exponent(z, (new_highest[None, :], 0.0), raw.dtype)), 0)
        lane_highest = new_highest
    return lane_highest, lane_total, lane_sum, lane_spread, lane_place


@triton.jit
def finish_words(lanes, prediction_ptr, first_word, ENTROPY: tl.constexpr):
    """Reduce the lanes.

    Returns: highest logit, sum of exponentials relative to it, (weighted) sum of logits, with ENTROPY the sum of
    exponentials times their exponents, and the word with the highest logit.
    """
    lane_highest, lane_total, lane_sum, lane_spread, lane_place = lanes
    highest = tl.max(lane_highest)
    z_spread = 0.0
    if ENTROPY:
        lane_spread = moved_spread(lane_total, lane_spread, lane_highest, highest)
        z_spread = tl.sum(lane_spread * relative_exp(lane_highest, highest))
    total = tl.sum(lane_total * relative_exp(lane_highest, highest))
    place = first_word
    if prediction_ptr is not None:
        place = tl.min(tl.where(lane_highest == highest, lane_place, _NO_PLACE))
        # of a row of NaN no logit is the highest
        place = tl.where(place < _NO_PLACE, place, first_word)
    return highest, total, tl.sum(lane_sum), z_spread, place


@triton.jit
def reduce_words(logits_ptr, prediction_ptr, span, formula, tile):
    """Reduce a row's words; returns what `finish_words` does."""
    first_word, _, _ = span
    lanes = add_words(no_words(tile[3]), logits_ptr, prediction_ptr, span, formula, tile)
    return finish_words(lanes, prediction_ptr, first_word, tile[0])


@triton.jit
def label_logit(logits_ptr, label, place, in_block, formula):
    """The label's logit; called after the row was read, when the cache holds it."""
    raw = tl.load(logits_ptr + place, mask=in_block, other=0.0)
    return in_formula(raw, label, in_block, formula)


@triton.jit
def gradient(z, norm, of_softmax, of_target, of_entropy, entropy, softcap, stored: tl.constexpr):
    """Gradient of logits stored in this dtype: of_softmax * softmax(z) - of_target, plus that of the entropy."""
    highest, log2_total = norm
    grad = tl.exp2(exponent(z, norm, stored)) * of_softmax
    if of_entropy is not None:
        log2_probability = (z - highest) * _LOG2_E - log2_total
        of_word = tl.exp2(log2_probability) * (log2_probability * _LN_2 + entropy)
        grad -= of_entropy * tl.where(z == float("-inf"), 0.0, of_word)
    if of_target is not None:
        grad -= of_target
    if softcap is not None:
        capped = z / tl.cast(softcap, tl.float32)
        grad *= 1.0 - capped * capped
    return grad


@triton.jit
def softmax_factor(terms, scale, norm, others):
    """The factor of a row's softmax in its gradient."""
    _, own, all_words, _, of_square = terms
    highest, log2_total = norm
    lse_grad_ptr, _, token, chain, _ = others
    lse = highest + log2_total * _LN_2
    factor = scale * (own + all_words + 2.0 * of_square * lse)
    if lse_grad_ptr is not None:
        factor += tl.load(lse_grad_ptr + token).to(tl.float32) * chain
    return factor


@triton.jit
def store_words_gradient(logits_ptr, grad_ptr, parts, tile):
    """Write the gradient of a row's words, as if none of them was the label.

    The words that were read last come first, which the L2 cache still holds of rows that it cannot hold whole.
    """
    span, formula, terms, scale, norm, others = parts
    first_word, words, width = span
    _, class_weight_ptr, _, softcap, smoothing = formula
    PADDED: tl.constexpr = tile[1]
    DEPTH: tl.constexpr = tile[2]
    LANES: tl.constexpr = tile[3]
    block = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    of_softmax = softmax_factor(terms, scale, norm, others)
    _, entropy_grad_ptr, token, chain, entropy = others
    of_entropy = None
    if entropy_grad_ptr is not None:
        of_entropy = tl.load(entropy_grad_ptr + token).to(tl.float32) * chain
    _, _, _, each_word, _ = terms
    each_word *= scale
    last = (width - 1) // (DEPTH * LANES) * (DEPTH * LANES)
    for before_last in range(0, width, DEPTH * LANES):
        start = last - before_last
        offsets = start + block
        mask = offsets < words
        inside = offsets < width
        raw = tl.load(logits_ptr + offsets, mask=inside, other=float("-inf"), eviction_policy="evict_first")
        z = in_formula(raw, first_word + offsets, mask, formula)
        if PADDED:
            z = tl.where(mask, z, float("-inf"))
        of_target = None
        if smoothing is not None:
            of_target = each_word
            if class_weight_ptr is not None:
                of_target *= tl.load(class_weight_ptr + first_word + offsets, mask=mask, other=0.0).to(tl.float32)
        grad = gradient(z, norm, of_softmax, of_target, of_entropy, entropy, softcap, raw.dtype)
        tl.store(grad_ptr + offsets, grad.to(grad_ptr.dtype.element_ty), mask=inside, eviction_policy="evict_first")


@triton.jit
def store_label_gradient(grad_ptr, parts, z_y, in_block):
    """Write the gradient of the label's logit; called after `store_words_gradient`.

    To write one word twice is cheaper than to compare every word with the label.
    """
    _, formula, terms, scale, norm, others = parts
    _, _, _, softcap, smoothing = formula
    tl.debug_barrier()
    w_y, own, _, each_word, _ = terms
    of_softmax = softmax_factor(terms, scale, norm, others)
    _, entropy_grad_ptr, token, chain, entropy = others
    of_entropy = None
    if entropy_grad_ptr is not None:
        of_entropy = tl.load(entropy_grad_ptr + token).to(tl.float32) * chain
    of_label = own * scale
    if smoothing is not None:
        of_label += each_word * scale * w_y
    grad_y = gradient(z_y, norm, of_softmax, of_label, of_entropy, entropy, softcap, grad_ptr.dtype.element_ty)
    tl.store(grad_ptr, grad_y.to(grad_ptr.dtype.element_ty), mask=in_block)


@triton.jit
def store_gradient(logits_ptr, grad_ptr, parts, z_y, place, in_block, tile):
    """Write the gradient of a row's words. The label is the word at `place`, if it is `in_block`."""
    store_words_gradient(logits_ptr, grad_ptr, parts, tile)
    store_label_gradient(grad_ptr + place, parts, z_y, in_block)


@triton.jit
def store_zeros(grad_ptr, width, DEPTH: tl.constexpr, LANES: tl.constexpr):
    """Write a zero gradient, for a row whose label is ignored."""
    block = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    for start in range(0, width, DEPTH * LANES):
        zeros = tl.zeros([DEPTH, LANES], dtype=tl.float32).to(grad_ptr.dtype.element_ty)
        tl.store(grad_ptr + start + block, zeros, mask=start + block < width)
