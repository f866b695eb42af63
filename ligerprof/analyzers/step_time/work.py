"""The work of a training step: what the GPU computes and moves, and what the host launches."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

from ligerprof.words import Word


class Part(Word):
    """A part of the step, in the order in which they first run."""

    FORWARD = "forward"
    LOSS = "loss"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Kind(Word):
    """What bounds the time of an operator on the GPU.

    `products` of matrices; `attention`, fused; `memory`: kernels that move bytes; `transfer` between the GPU and main
    memory.
    """

    PRODUCTS = "products"
    ATTENTION = "attention"
    MEMORY = "memory"
    TRANSFER = "transfer"


class Host(Word):
    """What a call costs the host: an operator from Python, from autograd's engine, or a kernel of Triton's."""

    OPERATOR = "operator"
    BACKWARD = "backward"
    TRITON = "triton"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class Work:
    """One call's work on the GPU.

    Attributes:
        name: of products, their dtype (bf16, fp32); of attention, the kernel; of memory, how it moves bytes.
        shape: of products, (batch, m, n, k); of attention, (batch, heads, queries, keys, head_dim).
        moved_bytes: bytes read and written.
        halves: whether attention is causal.
        is_backward: of attention, whether it computes gradients.
    """

    kind: Kind
    name: str
    moved_bytes: int = 0
    shape: tuple[int, ...] = ()
    halves: bool = False
    is_backward: bool = False

    @property
    def flops(self) -> float:
        """Floating-point operations of products and attention; those of other kernels do not bound them."""
        if self.kind is Kind.PRODUCTS:
            return 2.0 * prod(self.shape)
        if self.kind is Kind.ATTENTION:
            batch, heads, queries, keys, width = self.shape
            # two products in forward, five in backward
            products = 2.5 if self.is_backward else 1.0
            return 4.0 * batch * heads * queries * keys * width * products / (2 if self.halves else 1)
        return 0.0


def product(dtype: str, batch: int, m: int, n: int, k: int, width: int) -> Work:
    """`batch` products of [m, k] and [k, n], with `width` bytes per element."""
    moved_bytes = batch * (m * k + k * n + m * n) * width
    return Work(Kind.PRODUCTS, dtype, moved_bytes, (batch, m, n, k))


@dataclass(slots=True)
class Ledger:
    """The work of a step.

    Attributes:
        work: how often each call happens, by part.
        calls: how often the host calls, by part and kind.
    """

    work: Counter[tuple[Part, Work]] = field(default_factory=Counter)
    calls: Counter[tuple[Part, Host]] = field(default_factory=Counter)

    def add(self, part: Part, work: Work | None, host: Host | None, times: int = 1) -> None:
        """Count a call; None: it does no work, or the host does not notice it."""
        if work is not None:
            self.work[part, work] += times
        if host is not None:
            self.calls[part, host] += times

    def add_all(self, other: "Ledger", times: int = 1) -> None:
        """Count another ledger's calls, `times` times."""
        for key, count in other.work.items():
            self.work[key] += count * times
        for call, count in other.calls.items():
            self.calls[call] += count * times

    def flops(self, parts: Iterable[Part] = tuple(Part)) -> float:
        """Floating-point operations of products and attention in these parts."""
        wanted = set(parts)
        return sum(work.flops * times for (part, work), times in self.work.items() if part in wanted)

    def moved_bytes(self, kind: Kind) -> int:
        """Bytes that all calls of a kind move."""
        return sum(work.moved_bytes * times for (_, work), times in self.work.items() if work.kind is kind)
