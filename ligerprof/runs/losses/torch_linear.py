"""torch's F.linear_cross_entropy with its default chunks, for `--loss torch-linear`: labels are shifted."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ligerprof.errors import MissingDependencyError


def make_forward() -> Callable[..., Any]:
    """A model's forward with this loss; raises MissingDependencyError before torch 2.13."""
    fused = getattr(functional, "linear_cross_entropy", None)
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if fused is None or options is None:
        raise MissingDependencyError(
            f"--loss torch-linear: torch {torch.__version__} has no chunked F.linear_cross_entropy. Install torch 2.13"
            " or later, or choose another --loss."
        )

    def forward(self: Any, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        hidden = self.base_model(input_ids=input_ids, **kwargs)[0]
        weight = self.get_output_embeddings().weight
        rows = hidden.view(-1, hidden.size(-1)).to(weight.dtype)
        shifted = functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
        return CausalLMOutputWithPast(loss=fused(rows, weight, shifted, options=options()))

    return forward
