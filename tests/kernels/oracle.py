"""Compare kernels with the plain-torch reference in fp64, within tolerances per dtype."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# largest relative error (Frobenius) of one rounding to the dtype. Triton's interpreter truncates to bf16 where a GPU
# rounds to nearest: 3.3e-3 on average there against 1.7e-3
ROUNDING = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 5e-3}
# of a loss whose logits, their gradients and the results are each rounded
LOSS_ROUNDINGS = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.4e-2}
DTYPES = tuple(ROUNDING)


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the difference over the truth's; the norm itself if the truth is zero."""
    value, truth = value.detach().cpu().double(), truth.detach().cpu().double()
    size = truth.norm().item()
    return (value - truth).norm().item() / (size if size > 0 else 1.0)


def leaves(*values: Tensor) -> list[Tensor]:
    """New leaves with the same strides that require a gradient."""
    return [value.detach().requires_grad_(value.is_floating_point()) for value in values]


def run(function: Callable[..., Any], inputs: Sequence[Tensor], grads: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Outputs of `function`, then the gradients of the inputs that require one."""
    outputs = function(*inputs)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    if grads is None:
        grads = [torch.ones_like(output) for output in outputs]
    wanted = [value for value in inputs if value.requires_grad]
    return outputs + list(torch.autograd.grad(outputs, wanted, [g.to(o) for g, o in zip(grads, outputs, strict=True)]))


def in_fp64(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The same values as fp64 on the CPU; they require gradients if the inputs do."""
    return [
        value.detach().cpu().double().requires_grad_(value.requires_grad) if value.is_floating_point() else value.cpu()
        for value in inputs
    ]


def assert_matches_fp64(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Sequence[Tensor],
    tolerance: float,
    grads: Sequence[Tensor] | None = None,
) -> None:
    """Outputs and gradients of the kernel against the reference's in fp64."""
    got = run(kernel, inputs, grads)
    wide_grads = None if grads is None else [grad.detach().cpu().double() for grad in grads]
    truth = run(reference, in_fp64(inputs), wide_grads)
    errors = [relative_error(value, right) for value, right in zip(got, truth, strict=True)]
    assert all(torch.isfinite(value).all() for value in got)
    assert max(errors) <= tolerance, errors
