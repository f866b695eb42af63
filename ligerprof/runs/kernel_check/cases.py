"""What a check calls a kernel with: operations, sizes, dtypes and layouts of the inputs."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ligerprof.gpus import find_gpu
from ligerprof.kernels.objectives.formulas import PRESETS, Objective, PolicyObjective, objective
from ligerprof.kernels.options import LossOptions
from ligerprof.kernels.registry import find_kernel
from ligerprof.kernels.spec import KernelSpec
from ligerprof.runs.bench.operations import DTYPES, OPERATIONS, Maker, Operation, Tensors
from ligerprof.runs.bench.records import BenchShape, shape_of_model

# distillations, by beta
DIVERGENCES: Mapping[str, float] = {"forward_kl": 0.0, "jsd": 0.5, "reverse_kl": 1.0}
_HERE = "ligerprof.runs.kernel_check.cases"
_REFERENCE = "_reference"
_TEACHER_SCALE = 0.5


def find_checked(name: str, provider: str) -> KernelSpec:
    """A kernel that `kernels check` knows: an objective of ligerprof, or a kernel of the registry.

    Raises:
        UnknownKernelError: there is no such kernel.
    """
    if name not in OBJECTIVES or provider != "ligerprof":
        return find_kernel(name, provider)
    title, names = (
        f"objective {name} of post-training",
        (f"{_HERE}:{name}", f"{_HERE}:{name}{_REFERENCE}"),
    )
    return replace(find_kernel("flce"), name=name, title=title, entry=names[0], reference=names[1], memory=None)


def _make(shape: BenchShape, maker: Maker) -> Tensors:
    """Hidden states of an even number of sequences, a head, and the labels of all tokens."""
    sequences = shape.sequences * (1 + shape.sequences % 2)
    return {
        "hidden": maker.normal(sequences, shape.seq_len, shape.hidden),
        "weight": maker.normal(shape.vocab, shape.hidden, std=0.02),
        "labels": maker.labels(sequences * shape.seq_len, shape.vocab),
    }


def _arguments(given: Tensors, options: LossOptions) -> tuple[Any, ...]:
    return given["hidden"], given["weight"], given["labels"].view(given["hidden"].shape[:2]), options


def _operation(name: str) -> Operation:
    return Operation(
        name=name,
        outputs=("loss",),
        wants=("hidden", "weight"),
        make=_make,
        output_sizes=lambda _: ((),),
        arguments=_arguments,
        exact=lambda **_: torch.zeros(()),
        sizes=lambda shape: f"{shape.tokens}x{shape.hidden}x{shape.vocab}",
    )


OBJECTIVES: Mapping[str, Operation] = {name: _operation(name) for name in (*PRESETS, *DIVERGENCES)}


def _settings(name: str) -> Objective:
    """An objective with every term."""
    extra = {"max_length": 8} if name == "dr_grpo" else {}
    if isinstance(PRESETS[name], PolicyObjective) or name == "dr_grpo":
        return objective(name, beta=0.1, entropy_weight=0.01, **extra)
    return objective(name)


def _data(name: str, of: Objective, labels: Tensor, vocab: int) -> dict[str, Any]:
    """Constants that differ from token to token, near the log-probabilities of a head without training."""
    waves = torch.sin(labels.double())
    near = (0.3 * waves - math.log(vocab)).float()
    if isinstance(of, PolicyObjective):
        advantages = torch.cos(torch.arange(len(labels), device=labels.device)).float()
        return {"advantages": advantages, "old_log_probs": near, "ref_log_probs": near.roll(1, 0)}
    if name == "kto":
        desirable = torch.arange(len(labels), device=labels.device) % 2 == 0
        return {"desirable": desirable, "ref_log_probs": near}
    return {"ref_log_probs": near} if name == "dpo" else {}


def _kernel(name: str) -> Callable[..., Tensor]:
    from ligerprof.kernels.objectives.distillation import distillation_loss
    from ligerprof.kernels.objectives.loss import linear_objective

    def run(hidden: Tensor, weight: Tensor, labels: Tensor, options: LossOptions) -> Tensor:
        if name in DIVERGENCES:
            teacher = (hidden.detach().roll(1, 0), _TEACHER_SCALE * weight.detach())
            return distillation_loss(hidden, weight, *teacher, labels, options, beta=DIVERGENCES[name]).loss
        of = _settings(name)
        data = _data(name, of, labels, weight.shape[0])
        return linear_objective(of, hidden, weight, labels, options, **data).loss

    return run


def _reference(name: str) -> Callable[..., Tensor]:
    from ligerprof.kernels.objectives.distillation import divergence

    def run(hidden: Tensor, weight: Tensor, labels: Tensor, options: LossOptions) -> Tensor:
        log_p, mask = (hidden @ weight.t()).log_softmax(-1), labels != options.ignore_index
        if name in DIVERGENCES:
            log_q = (hidden.detach().roll(1, 0) @ (_TEACHER_SCALE * weight.detach()).t()).log_softmax(-1)
            tokens = divergence(log_p, log_q, DIVERGENCES[name])
            return torch.where(mask, tokens, 0.0).sum() / mask.sum().clamp(min=1)
        of = _settings(name)
        own = log_p.gather(-1, labels.masked_fill(~mask, 0)[..., None])[..., 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        data = {
            key: value.to(own) if value.is_floating_point() else value
            for key, value in _data(name, of, labels, weight.shape[0]).items()
        }
        entropies = {"entropy": entropy} if of.needs_entropy else {}
        return of(own, mask, **of.prepare(mask, data), **entropies)[0]

    return run


def __getattr__(name: str) -> Callable[..., Tensor]:
    """The function of an objective, or of its reference, by name."""
    known = name.removesuffix(_REFERENCE)
    if known not in OBJECTIVES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _reference(known) if name.endswith(_REFERENCE) else _kernel(known)


Layout = Callable[[Tensor], Tensor]

EVEN = BenchShape(
    name="even", sequences=2, seq_len=4, hidden=64, intermediate=128, vocab=256, heads=4, kv_heads=2, head_dim=16
)
ODD = BenchShape(
    name="odd", sequences=3, seq_len=3, hidden=37, intermediate=71, vocab=101, heads=3, kv_heads=1, head_dim=12
)
# without data
LARGE = shape_of_model("llama3.2-1b", name="large", sequences=4, seq_len=1024)
SIMULATED_GPU = find_gpu("h200")
_LABELS = "labels"
# inputs that the model itself computes: no two elements share memory
OVERWRITTEN = frozenset({"queries", "keys", "logits"})
PARAMETERS = frozenset({"weight", "bias"})
_STATES = frozenset({"hidden", "residual", "gate", "up"}) | OVERWRITTEN
_NORMS = frozenset({"rms", "add_rms", "layernorm"})
LOSSES = frozenset({"ce", "flce"})
# the outputs of these, and of objectives
LOSS = ("loss",)
IN_PLACE = LossOptions(in_place=True)


def _with_linear(alone: Operation) -> Operation:
    """A gated activation with the linear layer after it."""

    def make(shape: BenchShape, maker: Maker) -> Tensors:
        weight = maker.normal(shape.hidden, shape.intermediate, std=shape.intermediate**-0.5)
        return {**alone.make(shape, maker), "weight": weight}

    return replace(
        alone,
        name=f"{alone.name}_linear",
        wants=("gate", "up", "weight"),
        make=make,
        output_sizes=lambda shape: ((shape.sequences, shape.seq_len, shape.hidden),),
        arguments=lambda given, _: (given["gate"], given["up"], given["weight"]),
        moved={},
    )


CHECKED: Mapping[str, Operation] = {
    **OPERATIONS,
    **OBJECTIVES,
    **{f"{name}_linear": _with_linear(OPERATIONS[name]) for name in ("swiglu", "geglu")},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One call.

    Attributes:
        layout: makes the tensor that the kernel gets from a leaf that holds its values.
        parameter_layout: the same of a weight or bias.
        parameter_dtype: of weights and biases; None: that of the other inputs.
        adapted: the operation of this case, with other arguments; None: the operation has no such case.
        options: those of a loss.
        expands: whether the leaf has one sequence or token, which the layout repeats without a copy.
        freezes: whether weights and biases want no gradient.
        freezes_states: whether all other inputs want no gradient.
        first_only: whether only the first output has a gradient.
        overwrites: whether the kernel is called with `overwrite=True`.
        retains: whether backward runs twice on one graph; the second run's gradients are compared.
        gradient_layout: makes the gradients that backward receives from ones with their values.
        repeats: whether the results of several calls are compared, instead of one call with the reference.
        dynamic: whether the kernel is compiled for sizes that change.
        guarded: whether the kernel's inputs lie between NaN, and its new memory is NaN.
    """

    check: str
    title: str
    shape: BenchShape
    dtype: str
    layout: Layout
    expands: bool = False
    parameter_layout: Layout = torch.clone
    parameter_dtype: str | None = None
    adapted: Callable[[Operation], Operation | None] = lambda operation: operation
    options: LossOptions = IN_PLACE
    freezes: bool = False
    freezes_states: bool = False
    first_only: bool = False
    overwrites: bool = False
    repeats: bool = False
    retains: bool = False
    gradient_layout: Layout = torch.clone
    dynamic: bool | None = None
    guarded: bool = False

    def is_of(self, operation: Operation) -> bool:
        """Whether the operation has such a call."""
        of_parameters = self.freezes or self.freezes_states or self.parameter_layout is not torch.clone
        if of_parameters and not (PARAMETERS & set(operation.wants)):
            return False
        if self.first_only and len(operation.outputs) == 1:
            return False
        return self.adapted(operation) is not None

    def skip_reason(self, operation: Operation) -> str | None:
        """Why the operation is not called so, or None."""
        if self.expands and not OVERWRITTEN.isdisjoint(operation.wants):
            return "the kernel may write over these inputs"
        if operation.name in DIVERGENCES and self.dtype == "fp16":
            return "fp16 is refused: its gradients need a loss scale"
        return None

    def wanted(self, operation: Operation) -> tuple[str, ...]:
        """Names of the inputs that need a gradient."""

        def is_wanted(name: str) -> bool:
            return not (self.freezes if name in PARAMETERS else self.freezes_states)

        return tuple(name for name in operation.wants if is_wanted(name))

    def make(self, operation: Operation, device: torch.device, seed: int = 0) -> tuple[Tensors, Tensors]:
        """Leaves by name, and the tensors that the kernel gets."""
        maker = Maker(dtype=DTYPES[self.dtype], generator=torch.Generator(device).manual_seed(seed))
        leaves = operation.make(self.shape, maker)
        if self.parameter_dtype is not None:
            leaves |= {name: leaves[name].to(DTYPES[self.parameter_dtype]) for name in PARAMETERS & set(leaves)}
        if _LABELS in leaves:
            leaves[_LABELS][::5] = self.options.ignore_index
        if self.expands:
            leaves = {name: value[:1] if name in _STATES else value for name, value in leaves.items()}
        leaves = {name: value.clone().requires_grad_(name in self.wanted(operation)) for name, value in leaves.items()}
        return leaves, self.arranged(leaves)

    def arranged(self, leaves: Tensors) -> Tensors:
        """The tensors that the kernel gets, made of leaves that keep their values."""

        def arrange(name: str, value: Tensor) -> Tensor:
            if name in PARAMETERS:
                return self.parameter_layout(value)
            if name not in _STATES:
                return value
            if self.expands:
                sizes = self.shape.sequences if value.dim() > 2 else self.shape.tokens
                return value.clone().expand(sizes, *value.shape[1:])
            return self.layout(value)

        return {name: arrange(name, value) for name, value in leaves.items()}


def _transposed(value: Tensor) -> Tensor:
    return value.transpose(-1, -2).contiguous().transpose(-1, -2)


def _strided(value: Tensor) -> Tensor:
    return torch.stack((value, value), dim=-1)[..., 0]


def _with_gaps(value: Tensor) -> Tensor:
    """Rows with as many other elements after each, such as the first half of gates that one layer makes."""
    return torch.cat((value, value), dim=-1)[..., : value.shape[-1]] if value.dim() > 0 else value


def _repeated(value: Tensor) -> Tensor:
    """One number without a copy, as the gradient of a sum is."""
    return value.new_ones(()).expand(value.shape)


def _with_axis(value: Tensor) -> Tensor:
    return value.unsqueeze(0)


def _of_norms(operation: Operation) -> Operation | None:
    return operation if operation.name in _NORMS else None


def _of_rms(operation: Operation) -> Operation | None:
    return operation if operation.name in _NORMS - {"layernorm"} else None


def _without_labels(operation: Operation) -> Operation | None:
    """An operation whose inputs may have any number of axes."""
    return operation if operation.outputs != LOSS and operation.name != "rope" else None


def _other_numbers(operation: Operation) -> Operation | None:
    """A norm with another epsilon, and with an offset if it has one."""
    if operation.name not in _NORMS:
        return None
    numbers = (_LARGE_EPS,) if operation.name == "layernorm" else (_LARGE_EPS, 1.0)
    tensors = len(operation.wants)
    return replace(
        operation, arguments=lambda given, options: (*operation.arguments(given, options)[:tensors], *numbers)
    )


def _with_large_values(operation: Operation) -> Operation | None:
    """A norm whose squares, or a loss whose exponentials, are beyond the largest number."""
    factor = 300.0 if operation.name in _NORMS else 30.0
    if operation.name not in _NORMS | {"ce"}:
        return None

    def make(shape: BenchShape, maker: Maker) -> Tensors:
        given = operation.make(shape, maker)
        return given | {name: given[name] * factor for name in _STATES & set(given)}

    return replace(operation, make=make)


def _tokens_first(operation: Operation) -> Operation | None:
    """Queries and keys as [B, T, heads, D], with angles for each sequence."""
    if operation.name != "rope":
        return None

    def make(shape: BenchShape, maker: Maker) -> Tensors:
        given = operation.make(shape, maker)
        angles = {name: torch.cat([given[name].roll(i, 1) for i in range(shape.sequences)]) for name in ("cos", "sin")}
        return given | angles

    def arguments(given: Tensors, options: LossOptions) -> tuple[Any, ...]:
        queries, keys, *angles = operation.arguments(given, options)
        return queries.transpose(1, 2), keys.transpose(1, 2), *angles, 2

    return replace(operation, make=make, arguments=arguments)


def _overwriting(operation: Operation) -> Operation | None:
    """A gated activation with a linear layer that has a bias; gradients may overwrite gate and up."""
    if not operation.name.endswith("_linear"):
        return None
    return replace(
        operation,
        wants=(*operation.wants, "bias"),
        make=lambda shape, maker: {**operation.make(shape, maker), "bias": maker.normal(shape.hidden)},
        arguments=lambda given, options: (*operation.arguments(given, options), given["bias"]),
    )


def _of_losses(operation: Operation) -> Operation | None:
    return operation if operation.name in LOSSES else None


def _divided_by(items: float) -> Callable[[Operation], Operation | None]:
    def adapted(operation: Operation) -> Operation | None:
        if operation.name not in LOSSES:
            return None
        # the fused loss takes a bias before the number of items
        between = (None,) if operation.name == "flce" else ()
        return replace(
            operation, arguments=lambda given, options: (*operation.arguments(given, options), *between, items)
        )

    return adapted


_LARGE_EPS = 0.25
_PLAIN = Case(check="values", title="fp32", shape=EVEN, dtype="fp32", layout=torch.clone)


def _with_options(title: str, **options: Any) -> Case:
    options_of_case = replace(IN_PLACE, **options)
    return replace(_PLAIN, check="arguments", title=title, options=options_of_case, adapted=_of_losses)


# more rows than a GPU kernel's programs take at once, and more columns than one block of usual size
_TALL = replace(EVEN, sequences=3, seq_len=30, hidden=24, intermediate=40, vocab=48)
_WIDE = replace(EVEN, sequences=1, seq_len=3, hidden=2600, intermediate=4300, vocab=9001, head_dim=160)
CASES = (
    # first, because a write outside of a tensor ends the process sooner or later
    replace(_PLAIN, check="memory", title="between NaN", shape=ODD, guarded=True),
    replace(_PLAIN, check="memory", title="between NaN, wide rows", shape=_WIDE, guarded=True),
    *(replace(_PLAIN, title=dtype, dtype=dtype) for dtype in DTYPES),
    replace(_PLAIN, title="fp32, odd sizes", shape=ODD),
    replace(_PLAIN, title="fp32, many rows", shape=_TALL),
    replace(_PLAIN, title="fp32, wide rows", shape=_WIDE),
    replace(_PLAIN, title="fp16, large values", dtype="fp16", adapted=_with_large_values),
    replace(_PLAIN, title="bf16, fp32 weights", dtype="bf16", parameter_dtype="fp32", adapted=_of_rms),
    replace(_PLAIN, title="fp32, one more axis", layout=_with_axis, adapted=_without_labels),
    replace(_PLAIN, check="arguments", title="epsilon and offset", adapted=_other_numbers),
    replace(_PLAIN, check="arguments", title="tokens before heads", adapted=_tokens_first),
    replace(_PLAIN, check="arguments", title="bias, overwriting", adapted=_overwriting, overwrites=True),
    _with_options("ignored label", ignore_index=7),
    _with_options("shifted labels", shift=True),
    _with_options("softcap", softcap=0.5),
    _with_options("logit scale", logit_scale=3.0),
    replace(_PLAIN, check="arguments", title="number of items", adapted=_divided_by(3.0)),
    replace(_PLAIN, check="gradients", title="frozen weights", freezes=True),
    replace(_PLAIN, check="gradients", title="only weights", freezes_states=True),
    replace(_PLAIN, check="gradients", title="one output of two", first_only=True),
    replace(_PLAIN, check="gradients", title="two backward passes", retains=True),
    replace(_PLAIN, check="gradients", title="every second element", gradient_layout=_strided),
    replace(_PLAIN, check="gradients", title="rows with gaps", gradient_layout=_with_gaps),
    replace(_PLAIN, check="gradients", title="one number, expanded", gradient_layout=_repeated),
    replace(_PLAIN, check="strides", title="transposed", layout=_transposed),
    replace(_PLAIN, check="strides", title="every second element", layout=_strided),
    replace(_PLAIN, check="strides", title="rows with gaps", layout=_with_gaps),
    replace(_PLAIN, check="strides", title="weights with gaps", parameter_layout=_strided),
    replace(_PLAIN, check="strides", title="expanded", expands=True),
    replace(_PLAIN, check="strides", title="no tokens", shape=replace(EVEN, seq_len=0)),
    replace(_PLAIN, check="repeat", title="three calls", shape=_TALL, repeats=True),
)
COMPILED = (
    replace(_PLAIN, check="compile", title="fullgraph"),
    replace(_PLAIN, check="compile", title="fullgraph, dynamic", dynamic=True),
)
