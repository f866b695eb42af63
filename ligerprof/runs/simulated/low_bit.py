"""Stand-ins for bitsandbytes and galore_torch where they are not installed: their storages, without values.

Written from bitsandbytes 0.50.2 and galore_torch 1.0.
"""

from collections.abc import Iterable
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as AdaptedLinear
from torch import Tensor, nn

from ligerprof.torch_memory.low_bit import int8_sizes, nf4_sizes
from ligerprof.torch_memory.optimizers import OPTIMIZERS, OptimizedTensor


class FourBitLinear(nn.Linear):
    """bitsandbytes.nn.Linear4bit with NF4.

    Args:
        weight: the weight to quantize; products are computed in its dtype.
        nested: whether the scales are quantized, too (double quantization).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, nested: bool = True) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self._dtype, self._device = weight.dtype, weight.device
        packed, scales, *tables = nf4_sizes(weight.numel(), nested=nested)
        self.weight = nn.Parameter(self._bytes(packed), requires_grad=False)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        self._scales, self._nested = self._bytes(scales), nested
        self._tables = [self._bytes(size) for size in tables]

    def _bytes(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def forward(self, value: Tensor) -> Tensor:
        """Linear4bit.forward: compute in the original weight's dtype, return the input's."""
        product: Tensor = _FourBitProduct.apply(value.to(self._dtype), self)  # type: ignore[no-untyped-call]
        return product.to(value.dtype)

    def unpack(self, *, in_place: bool) -> Tensor:
        """The whole weight; `in_place`: whether the offset of nested scales is added to them in place."""
        centred = torch.empty_like(self._scales, dtype=torch.float32) if self._nested else self._scales
        scales = centred if in_place or not self._nested else torch.empty_like(centred)
        weight = torch.empty(self.out_features, self.in_features, dtype=self._dtype, device=self._device)
        del centred, scales
        return weight


class _FourBitProduct(torch.autograd.Function):
    """MatMul4Bit, with `_dequant_linear_fallback` in forward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, layer: FourBitLinear) -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(value, layer.unpack(in_place=False), layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        layer: FourBitLinear = ctx.layer
        return torch.matmul(gradients[0], layer.unpack(in_place=True)), None


class EightBitLinear(nn.Linear):
    """bitsandbytes.nn.Linear8bitLt with LLM.int8 weights made of `weight`, and inputs without outliers."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        rows, scales = int8_sizes(self.out_features, self.in_features)
        self.weight = nn.Parameter(
            torch.empty(rows, dtype=torch.int8, device=weight.device).view(weight.shape), requires_grad=False
        )
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        self._scales = torch.empty(scales, dtype=torch.uint8, device=weight.device)

    def forward(self, value: Tensor) -> Tensor:
        """Linear8bitLt.forward: compute in any dtype of the input, and return it."""
        if self.bias is not None and self.bias.dtype != value.dtype:
            self.bias.data = self.bias.data.to(value.dtype)
        return self.multiply_int8(value)

    def multiply_int8(self, value: Tensor) -> Tensor:
        """bitsandbytes.matmul; attribution looks for this name."""
        product: Tensor = _EightBitProduct.apply(value, self)  # type: ignore[no-untyped-call]
        return product


class _EightBitProduct(torch.autograd.Function):
    """MatMul8bitLt: keeps its input as an attribute, which neither hooks nor the end of backward free."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, layer: EightBitLinear) -> Tensor:
        rows = value.reshape(-1, layer.in_features)
        quantized, scales = _EightBitProduct._quantize(rows.to(torch.float16))
        sums = torch.empty(len(rows), layer.out_features, dtype=torch.int32, device=value.device)
        product = torch.empty_like(sums, dtype=torch.float16).to(value.dtype)
        del sums, quantized, scales
        ctx.layer, ctx.value, ctx.shape = layer, rows if ctx.needs_input_grad[0] else None, value.shape
        return product.reshape(*value.shape[:-1], layer.out_features)

    @staticmethod
    def _quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
        """int8_vectorwise_quant: a row in int8 and its scale, and a mask of the outliers until it returns."""
        scales = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        quantized = torch.empty_like(rows, dtype=torch.int8)
        outliers = rows.abs() >= 0
        del outliers
        return quantized, scales

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        layer: EightBitLinear = ctx.layer
        gradient = gradients[0].reshape(-1, layer.out_features).contiguous()
        weight = layer.weight.to(ctx.value.dtype, copy=True)
        weight.mul_(torch.empty(layer.out_features, 1, dtype=torch.float32, device=weight.device))
        return torch.matmul(gradient, weight).view(ctx.shape), None


class _AdaptedLowBitLinear(AdaptedLinear):
    """peft's Linear8bitLt and Linear4bit (lora/bnb.py), which do not exist without bitsandbytes."""

    def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        result: Tensor = self.base_layer(x)
        if isinstance(self.base_layer, FourBitLinear):
            result = result.clone()
        name = self.active_adapters[0]
        converts = not torch.is_autocast_enabled()
        if converts:
            narrow: Tensor = self.lora_A[name].weight  # type: ignore[assignment]
            x = self._cast_input_dtype(x, narrow.dtype)
        output: Tensor = self.lora_B[name](self.lora_A[name](self.lora_dropout[name](x))) * self.scaling[name]
        if converts:
            output = output.to(result.dtype)
        return result + output


def adapt_as_over_bitsandbytes(model: nn.Module) -> None:
    """Make adapters on stand-ins run like peft's layer for bitsandbytes."""
    for module in model.modules():
        if isinstance(module, AdaptedLinear) and isinstance(module.base_layer, (FourBitLinear, EightBitLinear)):
            module.__class__ = _AdaptedLowBitLinear


class StoredStates(torch.optim.Optimizer):
    """An optimizer of bitsandbytes: states are created in the first step and updated in place by one kernel.

    Args:
        optimizer: the name of its row; states that it keeps outside torch's allocator are left out.
        fp32: parameters whose moments are in fp32.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], optimizer: str, *, fp32: Iterable[nn.Parameter] = ()
    ) -> None:
        super().__init__(parameters, {})
        self._fp32 = {id(parameter) for parameter in fp32}
        self._row = OPTIMIZERS[optimizer]
        self._shared: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self._make_states(parameter)

    def _make_states(self, parameter: Tensor) -> None:
        if not self._shared:
            self._shared = [_bytes(size, parameter) for size in self._row.shared]
        tensor = OptimizedTensor(
            shape=tuple(parameter.shape),
            elements=parameter.numel(),
            width=parameter.element_size(),
            in_layer=False,
            galore_rank=1,
            fp32_moments=id(parameter) in self._fp32,
        )
        self.state[parameter]["states"] = [_bytes(size, parameter) for size in self._row.states(tensor)]


def _bytes(size_bytes: int, like: Tensor) -> Tensor:
    return torch.zeros(size_bytes, dtype=torch.uint8, device=like.device)


class ProjectedAdamW(torch.optim.Optimizer):
    """galore_torch.GaLoreAdamW, which projects the groups that have a `rank`."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update; local variables keep a parameter's tensors until the next parameter replaces them."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = self.state[parameter], parameter.grad
                if "rank" in group:
                    gradient = _project(state, gradient, group["rank"])
                if "first" not in state:
                    state["first"], state["second"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
                denominator = state["second"].sqrt().add_(1e-6)
                update = state["first"] / denominator
                if "rank" in group:
                    update = _project_back(state, update)
                parameter.add_(update)


def _project(state: dict[str, Any], gradient: Tensor, rank: int) -> Tensor:
    """GaLoreProjector.project of type `std`; the decomposition is repeated only every 200 steps."""
    tall = gradient.shape[0] >= gradient.shape[1]
    if "vectors" not in state:
        state["vectors"] = _vectors(gradient, rank, tall=tall)
    vectors: Tensor = state["vectors"]
    return torch.matmul(gradient, vectors.t()) if tall else torch.matmul(vectors.t(), gradient)


def _vectors(gradient: Tensor, rank: int, *, tall: bool) -> Tensor:
    """The first singular vectors of the shorter side: a view of all of them for an fp32 gradient, else a copy."""
    left, values, right = torch.linalg.svd(gradient.float(), full_matrices=False)
    scaled = left[:, :rank] @ torch.diag(values[:rank]) if tall else torch.diag(values[:rank]) @ right[:rank, :]
    del scaled
    vectors: Tensor = right[:rank, :] if tall else left[:, :rank]
    return vectors.type(gradient.dtype)


def _project_back(state: dict[str, Any], update: Tensor) -> Tensor:
    vectors: Tensor = state["vectors"]
    tall = update.shape[0] >= update.shape[1]
    full = torch.matmul(update, vectors) if tall else torch.matmul(vectors, update)
    return full * 1.0
