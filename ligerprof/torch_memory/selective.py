"""Selective activation checkpointing: the operators whose outputs a policy keeps instead of computing them again.

torch/utils/checkpoint.py, create_selective_checkpoint_contexts: the first pass of a checkpointed region puts these
outputs into a cache. The recomputation takes each out of it in order; what it does not reach stays until the region's
backward has released everything it saved.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

# products of matrices, and scaled_dot_product_attention's fused kernels
MM, ADDMM, BMM = "aten.mm.default", "aten.addmm.default", "aten.bmm.default"
MATMULS = (MM, ADDMM, BMM, "aten.baddbmm.default")
FUSED_ATTENTION = (
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
)
# torchtitan/distributed/activation_checkpoint.py, SelectiveAC: all expensive operators, but only every other `mm`
_TORCHTITAN = {**dict.fromkeys((*MATMULS, *FUSED_ATTENTION), 1), MM: 2}
_NAMED: Mapping[str, Mapping[str, int]] = {
    "matmuls": dict.fromkeys(MATMULS, 1),
    "attention": dict.fromkeys(FUSED_ATTENTION, 1),
    "torchtitan": _TORCHTITAN,
}
NAMES = tuple(_NAMED)
_ENTRY = re.compile(r"([a-z]\w*\.\w+\.\w+)(?:/([1-9]\d{0,3}))?", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavePolicy:
    """Which outputs are kept.

    Attributes:
        every: by operator, such as `aten.mm.default`: N to keep the first of each N calls in a region.
    """

    every: Mapping[str, int]


def find_policy(text: str) -> SavePolicy:
    """The policy of a name, or of operators joined by `+`, each as `aten.mm.default` or `aten.mm.default/2`.

    Raises:
        ValueError: neither; the message names the part that cannot be read.
    """
    return SavePolicy(every=_NAMED[text] if text in _NAMED else dict(map(_entry, text.split("+"))))


def _entry(text: str) -> tuple[str, int]:
    found = _ENTRY.fullmatch(text.strip())
    if found is None:
        raise ValueError(text.strip())
    return found[1], int(found[2] or 1)


@dataclass(slots=True)
class Selection:
    """One pass over a region: asked for each call in order, because a policy may keep only some of them."""

    policy: SavePolicy
    calls: Counter[str] = field(default_factory=Counter)

    def keeps(self, operator: str) -> bool:
        """Whether the output of this call is kept."""
        every = self.policy.every.get(operator)
        if every is None:
            return False
        self.calls[operator] += 1
        return (self.calls[operator] - 1) % every == 0
