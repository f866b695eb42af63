"""LoRA's adapters on a model that is trained: peft's, in the dtype that the recipe says."""

import warnings
from typing import Any

import torch

from ligerprof.errors import MissingDependencyError
from ligerprof.recipe.training import TrainingRecipe

# in the names of adapters' parameters
_ADAPTERS = "lora_"


def with_adapters(model: Any, rank: int, recipe: TrainingRecipe) -> Any:
    """The model with LoRA's adapters, and with the modules that are trained in full.

    Raises:
        MissingDependencyError: peft is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise MissingDependencyError("--lora needs peft. Install it with: pip install 'ligerprof[peft]'.") from None
    config = LoraConfig(
        r=rank,
        lora_alpha=16,
        target_modules=list(recipe.adapted_layers),
        modules_to_save=list(recipe.saved_modules) or None,
        lora_dropout=recipe.lora_dropout,
        use_dora=recipe.dora,
    )
    with warnings.catch_warnings():
        # peft reads a property that transformers renamed
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if _ADAPTERS in name:
            parameter.data = parameter.data.to(getattr(torch, recipe.adapter_dtype))
        elif recipe.fp32_saved_modules and parameter.requires_grad:
            parameter.data = parameter.data.float()
    if recipe.checkpointing:
        adapted.enable_input_require_grads()
    return adapted
