"""The objectives of post-training as kernels that can be checked: one operation, whose data follow from the labels."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ligerprof.kernels.objectives.formulas import PRESETS, Objective, PolicyObjective, objective
from ligerprof.kernels.options import LossOptions
from ligerprof.kernels.registry import find_kernel
from ligerprof.kernels.spec import KernelSpec
from ligerprof.runs.bench.operations import Maker, Operation, Tensors
from ligerprof.runs.bench.shapes import BenchShape

# distillations, by beta
DIVERGENCES: Mapping[str, float] = {"forward_kl": 0.0, "jsd": 0.5, "reverse_kl": 1.0}
_HERE = "ligerprof.runs.kernel_check.objectives"
_PLAIN = "_reference"
_TEACHER_SCALE = 0.5


def find_checked(name: str, provider: str) -> KernelSpec:
    """A kernel that `kernels check` knows: an objective of ligerprof, or a kernel of the registry.

    Raises:
        UnknownKernelError: there is no such kernel.
    """
    if name not in OBJECTIVES or provider != "ligerprof":
        return find_kernel(name, provider)
    title, names = f"objective {name} of post-training", (f"{_HERE}:{name}", f"{_HERE}:{name}{_PLAIN}")
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
    known = name.removesuffix(_PLAIN)
    if known not in OBJECTIVES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _reference(known) if name.endswith(_PLAIN) else _kernel(known)
