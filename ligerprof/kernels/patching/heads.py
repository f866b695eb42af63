"""Compute the fused loss within the calls of a model's head, also through what peft puts around the head.

peft wraps a head in `ModulesToSaveWrapper`, which calls a trained copy, or in LoRA's `Linear`, which adds a product of
two thin matrices. peft may come before the kernels or after them.
"""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ligerprof.errors import KernelInputError
from ligerprof.kernels.options import LossRequest
from ligerprof.kernels.patching.measured_budget import MeasuredBudget
from ligerprof.kernels.patching.swap import Forward, Swapper

Kernel = Callable[..., Tensor]
_SLOT = "flce"


class FusedHead:
    """The head of a model, whose layers compute the loss if they receive a request."""

    def __init__(self, swapper: Swapper, kernel: Kernel, budget: MeasuredBudget | None) -> None:
        self._swapper, self._kernel, self._budget = swapper, kernel, budget

    def fuse(self, head: nn.Module) -> None:
        """Give each layer of a head a forward that computes the loss.

        Raises:
            KernelInputError: a layer's forward is not known.
        """
        for layer in _layers(head):
            if not _computes_loss(layer):
                self._swap(layer)

    def run(self, model: Any, hidden: Tensor, request: LossRequest) -> Tensor:
        """Compute the loss in the call of the model's head, after hooks that gather its weight.

        Raises:
            KernelInputError: the head was replaced after the kernels were put in.
        """
        head = model.get_output_embeddings()
        layers = _layers(head)
        if not all(map(_computes_loss, layers)):
            if not any(map(_computes_loss, layers)):
                raise KernelInputError(
                    f"flce: the model's head became a {_type_name(head)} after the kernels were put in."
                    " Resize or wrap it first, or use ce."
                )
            # peft has wrapped the head since
            self.fuse(head)
        loss: Tensor = head(hidden, loss=request)
        return loss

    def _swap(self, layer: nn.Module) -> None:
        if _is_plain(layer):
            self._swapper.swap(layer, _SLOT, lambda original: plain_forward(original, self._kernel, self._budget))
        elif _is_lora(layer):
            if "low_rank" not in inspect.signature(self._kernel).parameters:
                raise KernelInputError(
                    f"flce: the model's head has LoRA adapters, which {self._kernel.__module__} does not take. Choose"
                    " the provider ligerprof, or ce."
                )
            self._swapper.swap(layer, _SLOT, lora_forward)
        else:
            raise KernelInputError(
                f"flce: the model's head is a {_type_name(layer)}; the fused loss takes"
                " plain linear layers, LoRA on them, and modules_to_save. Use ce."
            )


def _type_name(layer: Any) -> str:
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


def refuse_adapters(head: Any, provider: str) -> None:
    """Raise if a head has adapters, for a provider that reads the base layer's weight.

    Raises:
        KernelInputError: the head has adapters.
    """
    if any("base_layer" in layer._modules for layer in _layers(head)):
        raise KernelInputError(
            f"flce: the model's head has adapters, which {provider}'s fused loss does not take. Choose the provider"
            " ligerprof, or ce."
        )


def _layers(head: Any) -> tuple[nn.Module, ...]:
    """The layers that compute a head's output: the base layer before its adapters."""
    return tuple(_walk(head))


def _walk(head: Any) -> Iterator[nn.Module]:
    copies = getattr(head, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):
        yield from _walk(head.original_module)
        for copy in copies.values():
            yield from _walk(copy)
        return
    if _is_lora(head) or _computes_loss(head):
        yield from _walk(head.base_layer) if "base_layer" in head._modules else ()
    yield head


def _computes_loss(layer: Any) -> bool:
    return bool(getattr(type(layer).forward, "computes_loss", False))


def _is_plain(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and "base_layer" not in layer._modules and layer.weight.is_floating_point()


def _is_lora(layer: Any) -> bool:
    """Whether its forward is that of peft's LoRA on a linear layer."""
    peft = sys.modules.get("peft.tuners.lora.layer")
    return peft is not None and type(layer).forward is peft.Linear.forward


def plain_forward(original: Forward, kernel: Kernel, budget: MeasuredBudget | None = None) -> Forward:
    """A linear layer's forward that computes the loss if it receives a request.

    Args:
        budget: chooses the workspace of each call; None: the options do.
    """

    @functools.wraps(original)
    def forward(
        self: Any, hidden: Tensor, loss: LossRequest | None = None, low_rank: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        if loss is None:
            logits: Tensor = original(self, hidden)
            return logits
        _refuse_parts(self)
        options = loss.options
        if budget is not None:
            rank = 0 if low_rank is None else low_rank[1].shape[-1]
            options = dataclasses.replace(options, budget=budget.next(hidden, self.weight, rank))
        factors = {} if low_rank is None else {"low_rank": low_rank}
        return kernel(hidden, self.weight, loss.labels, options, self.bias, loss.num_items, **factors)

    forward.computes_loss = True  # type: ignore[attr-defined]
    return forward


def _refuse_parts(head: Any) -> None:
    """Raise if a head's weight is only a part of it in this call: under tensor parallelism, or before FSDP gathers it.

    Raises:
        KernelInputError: the weight is a DTensor, or transformers has split it.
    """
    placements = getattr(head.weight, "placements", None)
    plan = getattr(head, "_hf_tp_plan", None)
    if placements is None and plan is None:
        return
    how = f"transformers' plan {plan!r}" if placements is None else f"a DTensor placed as {placements}"
    raise KernelInputError(
        f"flce: the head's weight is split over ranks ({how}), and the fused loss reads a whole one. Leave the head out"
        " of tensor parallelism, call the model under FSDP's own hooks, or use ce."
    )


def lora_forward(original: Forward) -> Forward:
    """The forward of peft's LoRA layer that computes the loss if it receives a request.

    The products of the thin matrices are added to the logits of a few tokens at a time.
    """

    @functools.wraps(original)
    def forward(self: Any, x: Tensor, *args: Any, loss: LossRequest | None = None, **kwargs: Any) -> Any:
        if loss is None:
            return original(self, x, *args, **kwargs)
        if self.disable_adapters and self.merged:
            self.unmerge()
        names = [] if self.disable_adapters or self.merged else [n for n in self.active_adapters if n in self.lora_A]
        if not names:
            return self.base_layer(x, loss=loss)
        parts = [_factors(self, x, name) for name in names]
        thin, wide = parts[0] if len(parts) == 1 else (torch.cat(part, dim=-1) for part in zip(*parts, strict=True))
        return self.base_layer(x, loss=loss, low_rank=(thin, wide))

    forward.computes_loss = True  # type: ignore[attr-defined]
    return forward


def _factors(layer: Any, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The two factors of an adapter's logits, [..., R] with its scaling and [V, R].

    Raises:
        KernelInputError: the adapter is not LoRA as it was published.
    """
    thin_layer, wide_layer = layer.lora_A[name], layer.lora_B[name]
    variant = layer.lora_variant.get(name) if hasattr(layer, "lora_variant") else None
    if variant is not None or wide_layer.bias is not None:
        kind = "a bias" if variant is None else f"a {type(variant).__name__}"
        raise KernelInputError(
            f"flce: the adapter {name!r} of the model's head has {kind}. Use plain LoRA there, or ce."
        )
    rows = layer._cast_input_dtype(x, thin_layer.weight.dtype)
    thin = thin_layer(layer.lora_dropout[name](rows)) * layer.scaling[name]
    # through the layer's own call, after hooks that gather its weight
    identity = torch.eye(wide_layer.in_features, dtype=wide_layer.weight.dtype, device=x.device)
    return thin, wide_layer(identity).t()
