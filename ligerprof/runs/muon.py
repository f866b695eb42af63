"""Muon for the matrices of decoder layers, with AdamW for all other parameters."""

from typing import Any

import torch
from torch import nn

from ligerprof.models.module_names import is_in_layer
from ligerprof.torch_memory.low_bit import is_hidden_matrix


class MuonWithAdamW(torch.optim.Optimizer):
    """torch.optim.Muon and fused AdamW as one optimizer.

    Args:
        model: its trainable parameters are optimized.
    """

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hidden = is_hidden_matrix(in_layer=is_in_layer(name), dimensions=parameter.dim())
                (matrices if hidden else others).append(parameter)
        super().__init__([*others, *matrices], {})
        self._parts: list[torch.optim.Optimizer] = []
        # either may be without parameters: with LoRA, all are matrices
        if others:
            self._parts.append(torch.optim.AdamW(others, lr=learning_rate, fused=True))
        if matrices:
            self._parts.append(torch.optim.Muon(matrices, lr=learning_rate))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step both."""
        del closure
        for part in self._parts:
            part.step()
