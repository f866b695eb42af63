"""The operations that bench and checks call, and who provides each: tensors, the call, the exact formula in fp64."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ligerprof.errors import KernelUnavailableError, LigerprofError
from ligerprof.kernels.options import LossOptions
from ligerprof.kernels.registry import find_kernel, load_registry, require_available
from ligerprof.kernels.spec import load_entry
from ligerprof.runs.bench.records import BENCH_KERNELS, BenchShape, Direction, Subject
from ligerprof.units import parse_bytes

Kernel = Callable[..., Any]
Tensors = dict[str, Tensor]
Outputs = tuple[Tensor, ...]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_NORM_EPS = 1e-5
_ROPE_THETA = 500000.0


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
        wants: names of the inputs that need a gradient.
        output_sizes: sizes of the outputs; the gradients passed to backward are contiguous.
        arguments: the kernel's arguments in the order of its slot, from the inputs and a loss's options.
        exact: the formula without casts; takes the inputs by name.
        sizes: the sizes it depends on, such as `4096x2048x128256`.
        moved: tensors that any implementation must read or write per pass; small ones are left out, and passes
            without a fair count. Empty for the fused loss, which is bound by products.
        moved_elements: elements of one such tensor.
    """

    name: str
    outputs: tuple[str, ...]
    wants: tuple[str, ...]
    make: Callable[[BenchShape, Maker], Tensors]
    output_sizes: Callable[[BenchShape], tuple[tuple[int, ...], ...]]
    arguments: Callable[[Tensors, LossOptions], tuple[Any, ...]]
    exact: Callable[..., Tensor | Outputs]
    sizes: Callable[[BenchShape], str]
    moved: Mapping[Direction, int] = field(default_factory=dict)
    moved_elements: Callable[[BenchShape], int] = lambda shape: shape.tokens * shape.hidden

    @property
    def result_names(self) -> tuple[str, ...]:
        """Names of outputs and gradients, in the order in which they are compared."""
        return (*self.outputs, *(f"d_{name}" for name in self.wants))

    def subject(self, provider: str, shape: BenchShape, dtype: str) -> Subject:
        """The subject of a record: a provider's kernel at a shape."""
        sizes = self.sizes(shape)
        return Subject(kernel=self.name, provider=provider, shape=shape.name, sizes=sizes, dtype=dtype)

    def call(self, kernel: Kernel, inputs: Tensors, options: LossOptions) -> Outputs:
        """The outputs of a kernel."""
        return _as_tuple(kernel(*self.arguments(inputs, options)))

    def exact_outputs(self, inputs: Tensors) -> Outputs:
        """The outputs of the formula, in the inputs' dtype."""
        return _as_tuple(self.exact(**inputs))

    def fewest_bytes(self, shape: BenchShape, element_bytes: int, direction: Direction) -> int | None:
        """Bytes that any implementation must read and write; None without a fair count."""
        count = self.moved.get(direction)
        return None if count is None else count * self.moved_elements(shape) * element_bytes


def _as_tuple(outputs: Tensor | Outputs) -> Outputs:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _make_flce(shape: BenchShape, maker: Maker) -> Tensors:
    return {
        "hidden": maker.normal(shape.tokens, shape.hidden),
        # the standard deviation that heads are initialized with
        "weight": maker.normal(shape.vocab, shape.hidden, std=0.02),
        "labels": maker.labels(shape.tokens, shape.vocab),
    }


def _make_rms(shape: BenchShape, maker: Maker) -> Tensors:
    return {
        "hidden": maker.normal(shape.sequences, shape.seq_len, shape.hidden),
        "weight": 1 + maker.normal(shape.hidden, std=0.1),
    }


def _make_gated(shape: BenchShape, maker: Maker) -> Tensors:
    return {name: maker.normal(shape.sequences, shape.seq_len, shape.intermediate) for name in ("gate", "up")}


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
    return projected.view(*projected.shape[:-1], projected.shape[-1] // head_dim, head_dim).transpose(1, 2)


def _rope_arguments(given: Tensors, _options: LossOptions) -> tuple[Tensor, ...]:
    cos, sin = given["cos"], given["sin"]
    return *(_heads_first(given[name], cos.shape[-1]) for name in ("queries", "keys")), cos, sin


def _exact_rms(hidden: Tensor, weight: Tensor) -> Tensor:
    return weight * hidden / (hidden.square().mean(-1, keepdim=True) + _NORM_EPS).sqrt()


def _exact_layernorm(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centered = hidden - hidden.mean(-1, keepdim=True)
    return weight * centered / (centered.square().mean(-1, keepdim=True) + _NORM_EPS).sqrt() + bias


def _exact_geglu(gate: Tensor, up: Tensor) -> Tensor:
    """The tanh approximation, which models use."""
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + torch.tanh(inner)) * up


def _exact_rope(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> Outputs:
    def rotate(projected: Tensor) -> Tensor:
        heads = _heads_first(projected, cos.shape[-1])
        first, second = heads.chunk(2, dim=-1)
        return heads * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)

    return rotate(queries), rotate(keys)


def _moved(forward: int, backward: int) -> Mapping[Direction, int]:
    return {Direction.FORWARD: forward, Direction.BACKWARD: backward, Direction.FULL: forward + backward}


_RMS = Operation(
    name="rms",
    outputs=("output",),
    wants=("hidden", "weight"),
    make=_make_rms,
    output_sizes=lambda shape: ((shape.sequences, shape.seq_len, shape.hidden),),
    arguments=lambda given, _: (given["hidden"], given["weight"], _NORM_EPS, 0.0),
    exact=_exact_rms,
    sizes=lambda shape: f"{shape.tokens}x{shape.hidden}",
    # x in, y out; dy and x in, dx out
    moved=_moved(2, 3),
)
_SWIGLU = Operation(
    name="swiglu",
    outputs=("output",),
    wants=("gate", "up"),
    make=_make_gated,
    output_sizes=lambda shape: ((shape.sequences, shape.seq_len, shape.intermediate),),
    arguments=lambda given, _: (given["gate"], given["up"]),
    exact=lambda gate, up: gate * torch.sigmoid(gate) * up,
    sizes=lambda shape: f"{shape.tokens}x{shape.intermediate}",
    # gate and up in, product out; its gradient, gate and up in, two gradients out
    moved=_moved(3, 5),
    moved_elements=lambda shape: shape.tokens * shape.intermediate,
)
_ROWS = (
    Operation(
        name="flce",
        outputs=("loss",),
        wants=("hidden", "weight"),
        make=_make_flce,
        output_sizes=lambda _: ((),),
        arguments=lambda given, options: (given["hidden"], given["weight"], given["labels"], options),
        exact=lambda hidden, weight, labels: functional.cross_entropy(hidden @ weight.t(), labels),
        sizes=lambda shape: f"{shape.tokens}x{shape.hidden}x{shape.vocab}",
    ),
    Operation(
        name="ce",
        outputs=("loss",),
        wants=("logits",),
        make=lambda shape, maker: {
            "logits": maker.normal(shape.tokens, shape.vocab),
            "labels": maker.labels(shape.tokens, shape.vocab),
        },
        output_sizes=lambda _: ((),),
        arguments=lambda given, options: (given["logits"], given["labels"], options),
        exact=lambda logits, labels: functional.cross_entropy(logits, target=labels),
        sizes=lambda shape: f"{shape.tokens}x{shape.vocab}",
        # logits in, their gradient out, in whichever pass
        moved={Direction.FULL: 2},
        moved_elements=lambda shape: shape.tokens * shape.vocab,
    ),
    _RMS,
    replace(
        _RMS,
        name="add_rms",
        outputs=("output", "sum"),
        wants=("hidden", "residual", "weight"),
        make=lambda shape, maker: {**_make_rms(shape, maker), "residual": maker.normal(*_RMS.output_sizes(shape)[0])},
        output_sizes=lambda shape: _RMS.output_sizes(shape) * 2,
        arguments=lambda given, _: (given["hidden"], given["residual"], given["weight"], _NORM_EPS, 0.0),
        exact=lambda hidden, weight, residual: (_exact_rms(hidden + residual, weight), hidden + residual),
        # x and residual in, sum and y out; dy, dsum and sum in, one gradient for both out
        moved=_moved(4, 4),
    ),
    replace(
        _RMS,
        name="layernorm",
        wants=("hidden", "weight", "bias"),
        make=lambda shape, maker: {**_make_rms(shape, maker), "bias": maker.normal(shape.hidden, std=0.1)},
        arguments=lambda given, _: (given["hidden"], given["weight"], given["bias"], _NORM_EPS),
        exact=_exact_layernorm,
    ),
    Operation(
        name="rope",
        outputs=("queries", "keys"),
        wants=("queries", "keys"),
        make=_make_rope,
        # heads before tokens, the layout of SDPA's gradients
        output_sizes=lambda shape: tuple(
            (shape.sequences, heads, shape.seq_len, shape.head_dim) for heads in (shape.heads, shape.kv_heads)
        ),
        arguments=_rope_arguments,
        exact=_exact_rope,
        sizes=lambda shape: f"{shape.sequences}x{shape.seq_len}x({shape.heads}+{shape.kv_heads})x{shape.head_dim}",
        # queries and keys in and out, in either pass
        moved=_moved(2, 2),
        moved_elements=lambda shape: shape.tokens * (shape.heads + shape.kv_heads) * shape.head_dim,
    ),
    _SWIGLU,
    replace(_SWIGLU, name="geglu", exact=_exact_geglu),
)

_BY_NAME = {operation.name: operation for operation in _ROWS}
OPERATIONS: Mapping[str, Operation] = {name: _BY_NAME[name] for name in BENCH_KERNELS}


_FUSED_LOSS_ONLY = ("torch-linear-ce", "cce")


@dataclass(frozen=True, kw_only=True, slots=True)
class Provided:
    """A provider's kernel, with a variant after a colon; its options' budget may decide the chunks of the loss."""

    name: str
    kernel: Kernel
    options: LossOptions
    budgeted: bool = False


def provider_names(kernel: str) -> tuple[str, ...]:
    """All providers that may have this kernel, installed or not: built-in ones first, then plug-ins."""
    known = ["ligerprof", "torch", "torch-compile", "torch-linear-ce", "liger", "cce"]
    plugins = [provider for provider in load_registry().providers if provider not in known]
    return tuple(name for name in (*known, *plugins) if kernel == "flce" or name not in _FUSED_LOSS_ONLY)


def find_provided(
    kernel: str, names: Sequence[str] | None, device_kind: str
) -> tuple[list[Provided], list[tuple[str, str]]]:
    """The kernel of each provider on `cuda` or `cpu` (Triton's interpreter), and (name, reason) of those missing."""
    # compile anew: torch silently falls back to eager once a function has seen many shapes
    torch._dynamo.reset()
    found: list[Provided] = []
    missing: list[tuple[str, str]] = []
    for name in provider_names(kernel) if names is None else names:
        try:
            found.append(_find_one(kernel, name, device_kind))
        except (LigerprofError, ImportError) as error:
            missing.append((name, " ".join(str(error).split())))
    if names is None:
        missing += [(broken.entry_point, broken.reason) for broken in load_registry().broken]
    return found, missing


def _find_one(kernel: str, name: str, device_kind: str) -> Provided:
    provider, _, variant = name.partition(":")
    if provider in _FUSED_LOSS_ONLY and kernel != "flce":
        raise KernelUnavailableError(f"{provider} has no {kernel}, only flce")
    if provider in _FACTORIES:
        function = _FACTORIES[provider](kernel, variant, device_kind)
        return Provided(name=name, kernel=function, options=LossOptions(in_place=True))
    ours = provider == "ligerprof"
    options = _own_options(kernel, variant) if ours else _no_variant(provider, variant)
    if provider == "torch-compile":
        function = _compiled(_registered(kernel, "torch", device_kind))
    else:
        function = _registered(kernel, provider, device_kind)
    return Provided(name=name, kernel=function, options=options, budgeted=ours and kernel == "flce")


def _registered(kernel: str, provider: str, device_kind: str) -> Kernel:
    if (kernel, provider) == ("add_rms", "torch"):
        norm = _registered("rms", provider, device_kind)

        def add_then_norm(hidden: Tensor, residual: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
            total = hidden + residual
            return norm(total, *arguments), total

        return add_then_norm
    spec = find_kernel(kernel, provider)
    require_available(spec, device_kind)
    return load_entry(spec.entry)


def _no_variant(provider: str, variant: str) -> LossOptions:
    if variant:
        raise KernelUnavailableError(f"{provider} has no variant {variant!r}. Leave ':{variant}' out.")
    return LossOptions(in_place=True)


def _own_options(kernel: str, variant: str) -> LossOptions:
    """Parse `lean`, `balanced` or a size, optionally with `+fp32`."""
    if kernel != "flce":
        return _no_variant(f"ligerprof's {kernel}", variant)
    options = LossOptions(in_place=True)
    for word in filter(None, variant.split("+")):
        if word == "fp32":
            options = dataclasses.replace(options, accumulate_fp32=True)
        else:
            budget = word if word in ("lean", "balanced") else parse_bytes(word)
            options = dataclasses.replace(options, budget=budget)
    return options


def _compiled(function: Kernel) -> Kernel:
    compiled = torch.compile(function, dynamic=False)

    def run(*arguments: Any) -> Any:
        # the reference's defaults replace the options, which plain torch does not use
        return compiled(*(value for value in arguments if not isinstance(value, LossOptions)))

    return run


def _torch_linear_ce(_kernel: str, variant: str, _device_kind: str) -> Kernel:
    _no_variant("torch-linear-ce", variant)
    fused = getattr(functional, "linear_cross_entropy", None)
    if fused is None:
        raise KernelUnavailableError(f"torch {torch.__version__} has no F.linear_cross_entropy (2.13 has)")
    return lambda hidden, weight, labels, _options: fused(hidden, weight, labels)


def _liger(kernel: str, variant: str, device_kind: str) -> Kernel:
    """The registered liger-kernel function, except where the registry lacks it or wraps it for transformers."""
    if (kernel, variant) == ("flce", "fp32"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)
        return lambda hidden, weight, labels, _options: loss(weight, hidden, labels)
    _no_variant(f"liger's {kernel}", variant)
    if kernel == "ce":
        from liger_kernel.transformers import LigerCrossEntropyLoss

        # the registered one casts logits up to fp32, as transformers does
        narrow = LigerCrossEntropyLoss()
        return lambda logits, labels, _options: narrow(logits, labels)
    if kernel == "add_rms":
        from liger_kernel.ops import LigerFusedAddRMSNormFunction

        fused: Kernel = LigerFusedAddRMSNormFunction.apply
        return fused
    return _registered(kernel, "liger", device_kind)


def _cce(_kernel: str, variant: str, _device_kind: str) -> Kernel:
    from cut_cross_entropy import linear_cross_entropy

    name = f"cce_{variant}" if variant else "cce"
    return lambda hidden, weight, labels, _options: linear_cross_entropy(hidden, weight, labels, impl=name)


_FACTORIES: dict[str, Callable[[str, str, str], Kernel]] = {
    "torch-linear-ce": _torch_linear_ce,
    "liger": _liger,
    "cce": _cce,
}
