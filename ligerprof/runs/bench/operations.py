"""The benchmarked operations: their tensors, how a kernel is called on them, and their formula in fp64.

B sequences, T tokens per sequence, N = B*T tokens, D hidden, I intermediate, V vocabulary, H heads, K head dimension.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ligerprof.kernels.options import LossOptions
from ligerprof.runs.bench.floors import Moved
from ligerprof.runs.bench.shapes import BENCH_KERNELS, BenchShape

Kernel = Callable[..., Any]
Tensors = dict[str, Tensor]
Outputs = tuple[Tensor, ...]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NORM_EPS = 1e-5
_ROPE_THETA = 500000.0
# as heads are initialized; hidden states are normalized
_WEIGHT_STD = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Maker:
    """Creates random tensors of one dtype on one device; the same seed gives the same tensors."""

    dtype: torch.dtype
    generator: torch.Generator

    @property
    def device(self) -> torch.device:
        """The tensors' device."""
        return self.generator.device

    def normal(self, *sizes: int, std: float = 1.0) -> Tensor:
        """Normally distributed numbers with mean zero."""
        drawn = torch.randn(sizes, dtype=torch.float32, device=self.device, generator=self.generator)
        return (drawn * std).to(self.dtype)

    def labels(self, tokens: int, vocab: int) -> Tensor:
        """Uniformly distributed labels."""
        return torch.randint(vocab, (tokens,), device=self.device, generator=self.generator)


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One operation.

    Attributes:
        outputs: names of the outputs.
        wants: names of the inputs that need a gradient.
        make: random inputs.
        output_sizes: sizes of the outputs; the gradients passed to backward are contiguous.
        call: calls a kernel, which has the signature of its slot, on the inputs.
        exact: the formula itself, without casts.
        sizes: the sizes it depends on, such as `4096x2048x128256`.
        moved: what any implementation must move; None for the fused loss, which is bound by products.
    """

    name: str
    outputs: tuple[str, ...]
    wants: tuple[str, ...]
    make: Callable[[BenchShape, Maker], Tensors]
    output_sizes: Callable[[BenchShape], tuple[tuple[int, ...], ...]]
    call: Callable[[Kernel, Tensors, LossOptions], Outputs]
    exact: Callable[[Tensors], Outputs]
    sizes: Callable[[BenchShape], str]
    moved: Moved | None

    @property
    def result_names(self) -> tuple[str, ...]:
        """Names of outputs and gradients, in the order in which they are compared."""
        return (*self.outputs, *(f"d_{name}" for name in self.wants))


def _make_flce(shape: BenchShape, maker: Maker) -> Tensors:
    return {
        "hidden": maker.normal(shape.tokens, shape.hidden),
        "weight": maker.normal(shape.vocab, shape.hidden, std=_WEIGHT_STD),
        "labels": maker.labels(shape.tokens, shape.vocab),
    }


def _make_ce(shape: BenchShape, maker: Maker) -> Tensors:
    return {"logits": maker.normal(shape.tokens, shape.vocab), "labels": maker.labels(shape.tokens, shape.vocab)}


def _make_rms(shape: BenchShape, maker: Maker) -> Tensors:
    return {
        "hidden": maker.normal(shape.sequences, shape.seq_len, shape.hidden),
        "weight": 1 + maker.normal(shape.hidden, std=0.1),
    }


def _make_add_rms(shape: BenchShape, maker: Maker) -> Tensors:
    return {**_make_rms(shape, maker), "residual": maker.normal(shape.sequences, shape.seq_len, shape.hidden)}


def _make_layernorm(shape: BenchShape, maker: Maker) -> Tensors:
    return {**_make_rms(shape, maker), "bias": maker.normal(shape.hidden, std=0.1)}


def _make_gated(shape: BenchShape, maker: Maker) -> Tensors:
    sizes = (shape.sequences, shape.seq_len, shape.intermediate)
    return {"gate": maker.normal(*sizes), "up": maker.normal(*sizes)}


def _make_rope(shape: BenchShape, maker: Maker) -> Tensors:
    """Queries and keys as the projections return them, [B, T, H*K], and the angles as transformers passes them."""
    head_dim = shape.head_dim
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=maker.device) / head_dim
    positions = torch.arange(shape.seq_len, dtype=torch.float32, device=maker.device)
    angles = torch.outer(positions, _ROPE_THETA**-exponents).repeat(1, 2).unsqueeze(0)
    return {
        "queries": maker.normal(shape.sequences, shape.seq_len, shape.heads * head_dim),
        "keys": maker.normal(shape.sequences, shape.seq_len, shape.kv_heads * head_dim),
        "cos": angles.cos().to(maker.dtype),
        "sin": angles.sin().to(maker.dtype),
    }


def _heads_first(projected: Tensor, head_dim: int) -> Tensor:
    """A view of [B, T, H*K] as [B, H, T, K], the layout that attention takes."""
    return projected.view(*projected.shape[:-1], -1, head_dim).transpose(1, 2)


def _call_flce(kernel: Kernel, given: Tensors, options: LossOptions) -> Outputs:
    return (kernel(given["hidden"], given["weight"], given["labels"], options),)


def _call_ce(kernel: Kernel, given: Tensors, options: LossOptions) -> Outputs:
    return (kernel(given["logits"], given["labels"], options),)


def _call_rms(kernel: Kernel, given: Tensors, _options: LossOptions) -> Outputs:
    return (kernel(given["hidden"], given["weight"], NORM_EPS, 0.0),)


def _call_add_rms(kernel: Kernel, given: Tensors, _options: LossOptions) -> Outputs:
    return tuple(kernel(given["hidden"], given["residual"], given["weight"], NORM_EPS, 0.0))


def _call_layernorm(kernel: Kernel, given: Tensors, _options: LossOptions) -> Outputs:
    return (kernel(given["hidden"], given["weight"], given["bias"], NORM_EPS),)


def _call_gated(kernel: Kernel, given: Tensors, _options: LossOptions) -> Outputs:
    return (kernel(given["gate"], given["up"]),)


def _call_rope(kernel: Kernel, given: Tensors, _options: LossOptions) -> Outputs:
    cos, sin = given["cos"], given["sin"]
    head_dim = cos.shape[-1]
    return tuple(kernel(_heads_first(given["queries"], head_dim), _heads_first(given["keys"], head_dim), cos, sin))


def _exact_flce(given: Tensors) -> Outputs:
    return (functional.cross_entropy(given["hidden"] @ given["weight"].t(), given["labels"]),)


def _exact_ce(given: Tensors) -> Outputs:
    return (functional.cross_entropy(given["logits"], given["labels"]),)


def _exact_rms(given: Tensors) -> Outputs:
    hidden = given["hidden"]
    return (given["weight"] * hidden / (hidden.square().mean(-1, keepdim=True) + NORM_EPS).sqrt(),)


def _exact_add_rms(given: Tensors) -> Outputs:
    total = given["hidden"] + given["residual"]
    return (*_exact_rms({"hidden": total, "weight": given["weight"]}), total)


def _exact_layernorm(given: Tensors) -> Outputs:
    centered = given["hidden"] - given["hidden"].mean(-1, keepdim=True)
    scale = (centered.square().mean(-1, keepdim=True) + NORM_EPS).sqrt()
    return (given["weight"] * centered / scale + given["bias"],)


def _exact_swiglu(given: Tensors) -> Outputs:
    return (given["gate"] * torch.sigmoid(given["gate"]) * given["up"],)


def _exact_geglu(given: Tensors) -> Outputs:
    """The tanh approximation, which models use."""
    gate = given["gate"]
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return (0.5 * gate * (1 + torch.tanh(inner)) * given["up"],)


def _exact_rope(given: Tensors) -> Outputs:
    cos, sin = given["cos"].unsqueeze(1), given["sin"].unsqueeze(1)

    def rotate(projected: Tensor) -> Tensor:
        heads = _heads_first(projected, cos.shape[-1])
        first, second = heads.chunk(2, dim=-1)
        return heads * cos + torch.cat((-second, first), dim=-1) * sin

    return rotate(given["queries"]), rotate(given["keys"])


def _scalar_sizes(_shape: BenchShape) -> tuple[tuple[int, ...], ...]:
    return ((),)


def _hidden_sizes(shape: BenchShape) -> tuple[tuple[int, ...], ...]:
    return ((shape.sequences, shape.seq_len, shape.hidden),)


def _gated_sizes(shape: BenchShape) -> tuple[tuple[int, ...], ...]:
    return ((shape.sequences, shape.seq_len, shape.intermediate),)


def _rope_sizes(shape: BenchShape) -> tuple[tuple[int, ...], ...]:
    """Heads before tokens, the layout of SDPA's gradients."""
    return tuple((shape.sequences, heads, shape.seq_len, shape.head_dim) for heads in (shape.heads, shape.kv_heads))


def _norm_text(shape: BenchShape) -> str:
    return f"{shape.tokens}x{shape.hidden}"


def _hidden_elements(shape: BenchShape) -> int:
    return shape.tokens * shape.hidden


def _rotated_elements(shape: BenchShape) -> int:
    return shape.tokens * (shape.heads + shape.kv_heads) * shape.head_dim


# x in, y out; dy and x in, dx out
_NORM_MOVED = Moved(elements=_hidden_elements, forward=2, backward=3, full=5)


def _gated(name: str, exact: Callable[[Tensors], Outputs]) -> Operation:
    return Operation(
        name=name,
        outputs=("output",),
        wants=("gate", "up"),
        make=_make_gated,
        output_sizes=_gated_sizes,
        call=_call_gated,
        exact=exact,
        sizes=lambda shape: f"{shape.tokens}x{shape.intermediate}",
        # gate and up in, product out; its gradient, gate and up in, two gradients out
        moved=Moved(elements=lambda shape: shape.tokens * shape.intermediate, forward=3, backward=5, full=8),
    )


_OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            name="flce",
            outputs=("loss",),
            wants=("hidden", "weight"),
            make=_make_flce,
            output_sizes=_scalar_sizes,
            call=_call_flce,
            exact=_exact_flce,
            sizes=lambda shape: f"{shape.tokens}x{shape.hidden}x{shape.vocab}",
            moved=None,
        ),
        Operation(
            name="ce",
            outputs=("loss",),
            wants=("logits",),
            make=_make_ce,
            output_sizes=_scalar_sizes,
            call=_call_ce,
            exact=_exact_ce,
            sizes=lambda shape: f"{shape.tokens}x{shape.vocab}",
            # logits in, their gradient out, in whichever pass
            moved=Moved(elements=lambda shape: shape.tokens * shape.vocab, forward=None, backward=None, full=2),
        ),
        Operation(
            name="rms",
            outputs=("output",),
            wants=("hidden", "weight"),
            make=_make_rms,
            output_sizes=_hidden_sizes,
            call=_call_rms,
            exact=_exact_rms,
            sizes=_norm_text,
            moved=_NORM_MOVED,
        ),
        Operation(
            name="add_rms",
            outputs=("output", "sum"),
            wants=("hidden", "residual", "weight"),
            make=_make_add_rms,
            output_sizes=lambda shape: _hidden_sizes(shape) * 2,
            call=_call_add_rms,
            exact=_exact_add_rms,
            sizes=_norm_text,
            # x and residual in, sum and y out; dy, dsum and sum in, one gradient for both out
            moved=Moved(elements=_hidden_elements, forward=4, backward=4, full=8),
        ),
        Operation(
            name="layernorm",
            outputs=("output",),
            wants=("hidden", "weight", "bias"),
            make=_make_layernorm,
            output_sizes=_hidden_sizes,
            call=_call_layernorm,
            exact=_exact_layernorm,
            sizes=_norm_text,
            moved=_NORM_MOVED,
        ),
        Operation(
            name="rope",
            outputs=("queries", "keys"),
            wants=("queries", "keys"),
            make=_make_rope,
            output_sizes=_rope_sizes,
            call=_call_rope,
            exact=_exact_rope,
            sizes=lambda shape: f"{shape.sequences}x{shape.seq_len}x({shape.heads}+{shape.kv_heads})x{shape.head_dim}",
            # queries and keys in and out, either way
            moved=Moved(elements=_rotated_elements, forward=2, backward=2, full=4),
        ),
        _gated("swiglu", _exact_swiglu),
        _gated("geglu", _exact_geglu),
    )
}

OPERATIONS: Mapping[str, Operation] = {name: _OPERATIONS[name] for name in BENCH_KERNELS}
