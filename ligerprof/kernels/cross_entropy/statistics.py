"""The statistics of rows whose words come in blocks; torch is not imported."""

from ligerprof.torch_memory.dtypes import FP32_BYTES

# the highest logit, the sum of exponentials relative to it, the label's logit, the (weighted) sum of logits
_PLAIN = 4


def statistics_per_token(*, entropy: bool) -> int:
    """Number of fp32 statistics; entropies need the sum of exponentials times their exponents, too."""
    return _PLAIN + int(entropy)


def statistics_bytes(*, entropy: bool = False) -> int:
    """Bytes of one token's statistics."""
    return statistics_per_token(entropy=entropy) * FP32_BYTES
