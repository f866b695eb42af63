"""Objectives of post-training on the fused linear loss. Each name is loaded on first use."""

from typing import TYPE_CHECKING

from ligerprof.lazy_names import lazy_names

if TYPE_CHECKING:
    from ligerprof.kernels.objectives.distillation import distillation_loss, topk_distillation_loss
    from ligerprof.kernels.objectives.formulas import (
        PRESETS,
        KtoObjective,
        PolicyObjective,
        PreferenceObjective,
        objective,
    )
    from ligerprof.kernels.objectives.loss import ObjectiveOutputs, linear_objective

_HOMES = {
    "KtoObjective": "formulas",
    "ObjectiveOutputs": "loss",
    "PRESETS": "formulas",
    "PolicyObjective": "formulas",
    "PreferenceObjective": "formulas",
    "distillation_loss": "distillation",
    "linear_objective": "loss",
    "objective": "formulas",
    "topk_distillation_loss": "distillation",
}
__all__ = [
    "PRESETS",
    "KtoObjective",
    "ObjectiveOutputs",
    "PolicyObjective",
    "PreferenceObjective",
    "distillation_loss",
    "linear_objective",
    "objective",
    "topk_distillation_loss",
]

__getattr__ = lazy_names(__name__, _HOMES)
