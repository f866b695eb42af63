"""4-bit weights, 8-bit moments and GaLore in a training step: the real packages on a GPU, stand-ins when simulated."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ligerprof.analyzers.estimate.lora import is_adapted
from ligerprof.errors import MissingDependencyError
from ligerprof.models.module_names import is_in_layer
from ligerprof.recipe.categories import Optimizer
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.torch_memory.low_bit import galore_projects

# the paper's settings; neither changes the bytes held
_GALORE_GAP, _GALORE_SCALE = 200, 0.25
_STD = 0.02


@contextmanager
def linears_unmade(recipe: TrainingRecipe) -> Iterator[None]:
    """Create linear layers inside on the meta device if they will be quantized one by one."""
    if recipe.qlora is None:
        yield
        return
    make = nn.Linear.__init__

    def make_on_meta(self: nn.Linear, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **{**kwargs, "device": "meta"})

    with mock.patch.object(nn.Linear, "__init__", make_on_meta):
        yield


def quantize_linears(model: nn.Module, recipe: TrainingRecipe, device: torch.device) -> None:
    """Replace the layers that QLoRA adapts by 4-bit ones, and materialize what else `linears_unmade` left on meta.

    Raises:
        MissingDependencyError: on a GPU, bitsandbytes is not installed.
    """
    if recipe.qlora is None:
        return
    dtype = getattr(torch, recipe.compute_dtype)
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        if is_adapted(recipe.spec, f"{name}.weight"):
            parent, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(parent), own_name, _four_bit(module, dtype, device))
            continue
        unmade = [(own, parameter) for own, parameter in module.named_parameters() if parameter.device.type == "meta"]
        for own, parameter in unmade:
            setattr(module, own, nn.Parameter(_made(parameter, parameter.dtype, device)))
    # peft looks at this before it uses its layer for 4-bit weights
    model.is_loaded_in_4bit = True  # type: ignore[assignment]


def _four_bit(linear: nn.Linear, dtype: torch.dtype, device: torch.device) -> nn.Module:
    weight = _made(linear.weight, dtype, device)
    bias = None if linear.bias is None else _made(linear.bias, dtype, device)
    if device.type != "cuda":
        from ligerprof.runs.simulated.low_bit import FourBitLinear

        return FourBitLinear(weight, bias)
    made = _require("bitsandbytes", "--qlora").nn.Linear4bit(
        linear.in_features, linear.out_features, bias is not None, compute_dtype=dtype, quant_type="nf4", device="meta"
    )
    parameters = type(made.weight)(weight, requires_grad=False, quant_type="nf4", module=made)
    made.weight = parameters.to(device)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    layer: nn.Module = made
    return layer


def _made(parameter: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A parameter's values, or random ones if it is on meta."""
    if parameter.device.type != "meta":
        return parameter.detach().to(dtype)
    return torch.empty(parameter.shape, dtype=dtype, device=device).normal_(std=_STD)


def adapt_quantized(model: nn.Module) -> None:
    """Make adapters over stand-ins work as peft's layer over bitsandbytes does; on a GPU they are that layer."""
    from ligerprof.runs.simulated.low_bit import adapt_as_over_bitsandbytes

    adapt_as_over_bitsandbytes(model)


def low_bit_optimizer(recipe: TrainingRecipe, model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """`adamw-8bit` or `galore` over the trainable parameters.

    Raises:
        MissingDependencyError: on a GPU, the package is not installed.
    """
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    parameters = [parameter for _, parameter in trainable]
    simulated = parameters[0].device.type != "cuda"
    if recipe.optimizer is Optimizer.ADAMW_8BIT:
        if simulated:
            from ligerprof.runs.simulated.low_bit import EightBitAdamW

            return EightBitAdamW(parameters)
        adam: torch.optim.Optimizer = _require("bitsandbytes", "--optimizer adamw-8bit").optim.AdamW8bit(
            parameters, lr=learning_rate
        )
        return adam
    groups = _galore_groups(recipe, trainable)
    if simulated:
        from ligerprof.runs.simulated.low_bit import ProjectedAdamW

        return ProjectedAdamW(groups)
    projected: torch.optim.Optimizer = _require("galore_torch", "--optimizer galore").GaLoreAdamW(
        groups, lr=learning_rate, no_deprecation_warning=True
    )
    return projected


def _galore_groups(recipe: TrainingRecipe, trainable: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """What is not projected, then the matrices of decoder layers."""
    matrices = [
        parameter
        for name, parameter in trainable
        if galore_projects(in_layer=is_in_layer(name), dimensions=parameter.dim())
    ]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for _, parameter in trainable if id(parameter) not in chosen]
    settings = {
        "rank": recipe.galore_rank,
        "update_proj_gap": _GALORE_GAP,
        "scale": _GALORE_SCALE,
        "proj_type": "std",
    }
    return [{"params": others}, {"params": matrices, **settings}]


def _require(package: str, option: str) -> ModuleType:
    try:
        return __import__(package)
    except ImportError:
        wheel = package.replace("_", "-")
        raise MissingDependencyError(
            f"{option} needs {wheel} on a GPU. Install it with: pip install {wheel}."
        ) from None
