"""Which saved tensors stay on the GPU: selective checkpointing, and offloading to page-locked main memory."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache


def pinned_bytes(size_bytes: int) -> int:
    """What torch takes for a request: a power of two (ATen/core/CachingHostAllocator.h, allocate)."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0


# smaller tensors stay on the GPU
SMALLEST_BYTES = 1024
# the original of tensor n is released when tensor n + 5 is copied
STASH_LENGTH = 5


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
# of a run of layers: recomputed whole, and not checkpointed
NOTHING, EVERYTHING = "nothing", "everything"
_RUN = re.compile(r"([1-9]\d{0,4})\*(\S+)", re.ASCII)
_ENTRY = re.compile(
    rf"({'|'.join(NAMES)}|[a-z]\w*\.\w+\.\w+)(?:/([1-9]\d{{0,3}}))?((?:-[1-9]\d{{0,7}}x[1-9]\d{{0,7}})*)", re.ASCII
)
# inputs and outputs of a product's weight
FactorShape = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavePolicy:
    """Which outputs are kept.

    Attributes:
        every: by operator, such as `aten.mm.default`: N to keep the first of each N calls in a region.
        recomputed: shapes of second factors of `aten.mm`, whose products are computed again and not counted.
    """

    every: Mapping[str, int]
    recomputed: frozenset[FactorShape] = frozenset()


def find_policy(text: str) -> SavePolicy:
    """The policy of names and operators joined by `+`, such as `matmuls+attention`, `aten.mm.default/2`, or `nothing`.

    `matmuls-2048x128` and `aten.mm.default/2-2048x128` compute products with such a second factor again.

    Raises:
        ValueError: neither; the message names the part that cannot be read.
    """
    if text == NOTHING:
        return SavePolicy(every={})
    entries = [_entry(part.strip()) for part in text.split("+")]
    every = {name: number for named, _ in entries for name, number in named.items()}
    return SavePolicy(every=every, recomputed=frozenset(shape for _, shapes in entries for shape in shapes))


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Successive layers that are checkpointed alike.

    Attributes:
        layers: how many; 0 for all.
        name: the policy as it was written, or `everything`.
        policy: what they keep; None if they are not checkpointed.
    """

    layers: int
    name: str
    policy: SavePolicy | None


@lru_cache(maxsize=256)
def layer_runs(text: str) -> tuple[LayerRun, ...]:
    """The runs of a selection, in the order of the layers: `12*nothing,4*matmuls,4*everything`, or one policy for all.

    Raises:
        ValueError: the message names the part that cannot be read.
    """
    if "*" not in text:
        return (LayerRun(0, text, find_policy(text)),)
    runs = []
    for part in text.split(","):
        found = _RUN.fullmatch(part.strip())
        if found is None:
            raise ValueError(part)
        name = found[2]
        runs.append(LayerRun(int(found[1]), name, None if name == EVERYTHING else find_policy(name)))
    return tuple(runs)


def policy_text(policy: SavePolicy) -> str:
    """The operators of a policy, as `find_policy` reads them."""
    return "+".join(
        name + (f"/{every}" if every > 1 else "") + (shapes_text(policy.recomputed) if name == MM else "")
        for name, every in sorted(policy.every.items())
    )


def shapes_text(shapes: frozenset[FactorShape]) -> str:
    """Shapes whose products are computed again, as they follow a policy's name or `aten.mm.default`."""
    return "".join(f"-{inputs}x{outputs}" for inputs, outputs in sorted(shapes))


def _entry(text: str) -> tuple[Mapping[str, int], tuple[FactorShape, ...]]:
    """The operators of a part of a policy, and the shapes that follow it."""
    found = _ENTRY.fullmatch(text)
    if found is None:
        raise ValueError(text)
    name, every, shapes = found.groups()
    operators = {name: int(every or 1)} if name not in _NAMED else _NAMED[name]
    if (name in _NAMED and every) or (shapes and MM not in operators):
        raise ValueError(text)
    return operators, tuple(_shapes(shapes))


def _shapes(text: str) -> Iterator[FactorShape]:
    for part in text.split("-")[1:]:
        inputs, outputs = part.split("x")
        yield int(inputs), int(outputs)


@dataclass(slots=True)
class Selection:
    """One pass over a region: asked for each call in order, because a policy may keep only some of them."""

    policy: SavePolicy
    calls: Counter[str] = field(default_factory=Counter)

    def keeps(self, operator: str, factor: FactorShape | None = None) -> bool:
        """Whether the output of this call is kept; `factor`: the shape of a product's second factor."""
        every = self.policy.every.get(operator)
        if every is None or (operator == MM and factor in self.policy.recomputed):
            return False
        self.calls[operator] += 1
        return (self.calls[operator] - 1) % every == 0
