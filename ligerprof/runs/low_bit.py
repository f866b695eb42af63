"""Adapters, low-bit weights, 8-bit moments and GaLore in a training step.

The packages are the real ones; a simulated step without them takes stand-ins.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ligerprof.analyzers.estimate.lora import is_quantized
from ligerprof.errors import MissingDependencyError
from ligerprof.kernels.device import is_simulated
from ligerprof.models.architectures import is_embedding_weight, is_in_layer
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.torch_memory.low_bit import is_hidden_matrix

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
        raise MissingDependencyError("--lora needs peft. Install it with: pip install peft.") from None
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


# transformers' default (BitsAndBytesConfig.llm_int8_threshold): columns of an input beyond it are multiplied in 16 bits
_OUTLIER_THRESHOLD = 6.0
# small enough that no product of gates is beyond the threshold, as few are in trained models
_DEVIATION = 0.01
_PACKAGE = "bitsandbytes"


def stands_in(package: str) -> bool:
    """Whether a step runs with stand-ins for a package: a GPU is simulated, and the package is not installed."""
    return is_simulated() and find_spec(package) is None


@contextmanager
def linears_on_meta() -> Iterator[None]:
    """Create linear layers on the meta device, so that each can be quantized before the next is allocated."""
    make = nn.Linear.__init__

    def make_on_meta(self: nn.Linear, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **{**kwargs, "device": "meta"})

    with mock.patch.object(nn.Linear, "__init__", make_on_meta):
        yield


def quantize_linears(model: nn.Module, recipe: TrainingRecipe, device: torch.device) -> None:
    """Replace the layers that the recipe quantizes, and materialize the others that are still on meta.

    Raises:
        MissingDependencyError: on a GPU, bitsandbytes is not installed.
    """
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        if is_quantized(recipe.spec, f"{name}.weight"):
            parent, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(parent), own_name, _quantized(module, recipe, device))
            continue
        for own_name, parameter in list(module.named_parameters()):
            if parameter.device.type == "meta":
                setattr(module, own_name, nn.Parameter(_materialized(parameter, parameter.dtype, device)))
    # peft uses its layers for bitsandbytes only if this is set
    setattr(model, f"is_loaded_in_{recipe.packed_bits}bit", True)


def _quantized(linear: nn.Linear, recipe: TrainingRecipe, device: torch.device) -> nn.Module:
    """A layer with the weights of a linear one in 8 bits (LLM.int8) or 4 bits (NF4)."""
    is_8bit, nested = recipe.packed_bits == 8, recipe.nested_quant
    dtype = getattr(torch, recipe.weight_dtype if is_8bit else recipe.compute_dtype)
    weight = _materialized(linear.weight, torch.float16 if is_8bit else dtype, device)
    bias = None if linear.bias is None else _materialized(linear.bias, dtype, device)
    if stands_in(_PACKAGE):
        from ligerprof.runs.simulated.low_bit import EightBitLinear, FourBitLinear

        return EightBitLinear(weight, bias) if is_8bit else FourBitLinear(weight, bias, nested=nested)
    package = _require(_PACKAGE, "--quantization 8bit" if is_8bit else "--qlora")
    shape = (linear.in_features, linear.out_features, bias is not None)
    layer: nn.Module
    settings: dict[str, Any]
    if is_8bit:
        # it warns of each cast of an input to fp16
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        settings = {"has_fp16_weights": False, "threshold": _OUTLIER_THRESHOLD}
        layer = package.nn.Linear8bitLt(*shape, **settings, device="meta")
        rows, scales, _ = package.functional.int8_vectorwise_quant(weight)
        layer.weight = package.nn.Int8Params(rows, requires_grad=False, has_fp16_weights=False, CB=rows, SCB=scales)
    else:
        settings = {"quant_type": "nf4", "compress_statistics": nested}
        layer = package.nn.Linear4bit(*shape, compute_dtype=dtype, **settings, device="meta")
        four_bit: Any = type(layer.weight)
        layer.weight = four_bit(weight, module=layer, requires_grad=False, **settings).to(device)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def _materialized(parameter: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values of a parameter, or random ones if it is on meta."""
    if parameter.device.type != "meta":
        return parameter.detach().to(dtype)
    return torch.empty(parameter.shape, dtype=dtype, device=device).normal_(std=_DEVIATION)


def low_bit_optimizer(recipe: TrainingRecipe, model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """An optimizer of bitsandbytes or galore_torch over the trainable parameters.

    Raises:
        MissingDependencyError: on a GPU, the package is not installed.
    """
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    parameters = [parameter for _, parameter in trainable]
    kept = recipe.fp32_embedding_states
    fp32 = [parameter for name, parameter in trainable if kept and is_embedding_weight(name)]
    if (row := recipe.optimizer.row).package == _PACKAGE and row.made is not None:
        if stands_in(_PACKAGE):
            from ligerprof.runs.simulated.low_bit import StoredStates

            return StoredStates(parameters, recipe.optimizer, fp32=fp32)
        optimizers = _require(_PACKAGE, f"--optimizer {recipe.optimizer}").optim
        for parameter in fp32:
            optimizers.GlobalOptimManager.get_instance().override_config(parameter, "optim_bits", 32)
        name, settings = row.made
        made: torch.optim.Optimizer = getattr(optimizers, name)(parameters, lr=learning_rate, **settings)
        return made
    groups = _galore_groups(recipe, trainable)
    if stands_in("galore_torch"):
        from ligerprof.runs.simulated.low_bit import ProjectedAdamW

        return ProjectedAdamW(groups)
    projected: torch.optim.Optimizer = _require("galore_torch", "--optimizer galore").GaLoreAdamW(
        groups, lr=learning_rate, no_deprecation_warning=True
    )
    return projected


def _galore_groups(recipe: TrainingRecipe, trainable: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """The parameters that are not projected, then the matrices of decoder layers."""
    others: list[nn.Parameter] = []
    matrices: list[nn.Parameter] = []
    for name, parameter in trainable:
        projected = is_hidden_matrix(in_layer=is_in_layer(name), dimensions=parameter.dim())
        (matrices if projected else others).append(parameter)
    # the paper's settings; neither the gap nor the scale changes the bytes held
    settings = {"rank": recipe.galore_rank, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
    return [{"params": others}, {"params": matrices, **settings}]


def _require(package: str, option: str) -> ModuleType:
    try:
        return __import__(package)
    except ImportError:
        wheel = package.replace("_", "-")
        raise MissingDependencyError(
            f"{option} needs {wheel} on a GPU. Install it with: pip install {wheel}."
        ) from None
