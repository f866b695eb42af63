"""Put kernels into a transformers model, and take them out again."""

import functools
import importlib
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ligerprof.errors import KernelInputError, KernelUnavailableError, RecipeError
from ligerprof.kernels.options import LossOptions
from ligerprof.kernels.patching import decoder
from ligerprof.kernels.patching.causal_lm import fused_head_forward, fused_loss_forward, loss_after_head, loss_in_head
from ligerprof.kernels.patching.measured_budget import MeasuredBudget
from ligerprof.kernels.providers.liger.patching import patch_with_liger
from ligerprof.kernels.providers.liger.spec import PROVIDER as LIGER
from ligerprof.kernels.registry import find_kernel_set
from ligerprof.kernels.selection import select_kernels
from ligerprof.kernels.spec import KernelSpec
from ligerprof.models import ARCHITECTURES, spec_from_config
from ligerprof.models.architecture import Architecture

Forward = Callable[..., Any]
_ROPE = "apply_rotary_pos_emb"
_ACTIVATIONS = {"swiglu": ("SiLU", "SiLUActivation"), "geglu": ("GELUTanh", "PytorchGELUTanh", "NewGELUActivation")}


class Patch:
    """Kernels that stand in a model. As a context manager it takes them out at the end.

    Attributes:
        kernels: names of the kernels that were put in.
        provider: whose they are.
    """

    def __init__(self, kernels: tuple[str, ...], provider: str) -> None:
        self.kernels = kernels
        self.provider = provider
        self._undo: list[Callable[[], None]] = []
        self._remarks: list[Callable[[], str | None]] = []

    def on_notes(self, remark: Callable[[], str | None]) -> None:
        """Ask `remark` for a line whenever notes are wanted."""
        self._remarks.append(remark)

    def notes(self) -> tuple[str, ...]:
        """What the kernels leave to the model's layers as they are now, adapters put around them later included."""
        return tuple(line for remark in self._remarks if (line := remark()) is not None)

    def on_undo(self, action: Callable[[], None]) -> None:
        """Do `action` when the kernels are taken out, before what was registered earlier."""
        self._undo.append(action)

    def undo(self) -> None:
        """Restore what was there before; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> "Patch":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """What was asked for, resolved.

    Attributes:
        entries: kernels' names to their functions; none for liger-kernel, which patches by itself.
        measured: the fused loss, where its workspace is told by what the process has held; else None.
    """

    row: Architecture
    kernels: tuple[str, ...]
    provider: str
    entries: dict[str, Callable[..., Any]]
    options: LossOptions
    measured: KernelSpec | None


def apply(
    model: Any,
    kernels: str = "all",
    *,
    provider: str = "ligerprof",
    flce_budget: str | int = "balanced",
    device_kind: str | None = None,
) -> Patch:
    """Put kernels into a model, or into every model that a class will make.

    Args:
        model: a causal language model of transformers, wrapped or not (peft, DDP), or its class.
        kernels: as `--liger` takes it: `all`, `no-flce`, or names joined by `+` or `,`.
        provider: whose kernels.
        flce_budget: workspace of the fused loss: `lean`, `balanced`, bytes, or `auto`: as much as the highest moment
            so far leaves room for, from the third call on.
        device_kind: `cuda`, `cpu` or `simulated`; None reads it off the model (`cuda` for a class).

    Returns:
        A Patch: permanent until its `undo()`, or a context manager.

    Raises:
        RecipeError: an unknown kernel, or one that the architecture has no place for.
        KernelUnavailableError: a kernel that cannot run here, or an architecture without a row.
        KernelInputError: a layer that must not be replaced, such as a head with adapters.
    """
    if isinstance(model, type):
        return _apply_to_class(model, kernels, provider, flce_budget, device_kind or "cuda")
    inner = _causal_model(model)
    request = _resolve(inner.config, kernels, provider, flce_budget, device_kind or _device_kind(inner))
    patch = Patch(request.kernels, provider)
    _apply_to_instance(inner, request, patch)
    return patch


def _apply_to_class(
    model_class: type[Any], kernels: str, provider: str, flce_budget: str | int, device_kind: str
) -> Patch:
    """Wrap the constructor, so that every new instance is patched as any instance is."""
    request = _resolve(model_class.config_class(), kernels, provider, flce_budget, device_kind)
    patch = Patch(request.kernels, provider)
    construct = model_class.__init__
    own = "__init__" in vars(model_class)

    @functools.wraps(construct)
    def construct_patched(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        _apply_to_instance(self, request, patch)

    def restore() -> None:
        if own:
            model_class.__init__ = construct
        else:
            del model_class.__init__

    model_class.__init__ = construct_patched
    patch.on_undo(restore)
    return patch


def _resolve(config: Any, kernels: str, provider: str, flce_budget: str | int, device_kind: str) -> _Request:
    row = _find_row(config.model_type)
    names = select_kernels(kernels, spec_from_config(config.to_dict(), name=config.model_type))
    specs = find_kernel_set(names, provider)
    for spec in specs.values():
        require_available(spec, device_kind)
    measured = flce_budget == "auto" and "flce" in specs
    if measured and (provider, device_kind) != ("ligerprof", "cuda"):
        raise RecipeError(
            f"flce budget auto measures ligerprof's fused loss on a CUDA device, not {provider}'s on {device_kind}."
            " Give lean, balanced or bytes."
        )
    return _Request(
        row=row,
        kernels=names,
        provider=provider,
        entries={} if provider == LIGER else {name: load_entry(spec.entry) for name, spec in specs.items()},
        options=LossOptions(budget="lean" if measured else flce_budget, in_place=True),
        measured=specs["flce"] if measured else None,
    )


def _find_row(model_type: str) -> Architecture:
    if model_type not in ARCHITECTURES:
        raise KernelUnavailableError(
            f"no kernel can be put into a model of type {model_type!r}. Known: {', '.join(ARCHITECTURES)}."
        )
    return ARCHITECTURES[model_type]


def require_available(spec: KernelSpec, device_kind: str) -> None:
    """Refuse a kernel that cannot run on this kind of device.

    Raises:
        KernelUnavailableError: with the reason.
    """
    if (reason := spec.unavailable_reason(device_kind)) is not None:
        raise KernelUnavailableError(
            f"kernel {spec.name} of {spec.provider}: {reason}. Run `ligerprof kernels` to see what can run here."
        )


def load_entry(entry: str) -> Callable[..., Any]:
    """Import the function that `module:function` names."""
    module, _, name = entry.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _causal_model(model: Any) -> Any:
    """The transformers model inside peft's, DDP's or DeepSpeed's wrapper."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not hasattr(model, "config") or not hasattr(model, "get_output_embeddings"):
        raise KernelInputError(
            f"{type(model).__name__} is no causal language model of transformers."
            " Hand over the model that has the head."
        )
    return model


def _device_kind(model: nn.Module) -> str:
    device = next(model.parameters()).device
    return "cpu" if device.type == "cpu" else "cuda"


def _apply_to_instance(model: Any, request: _Request, patch: Patch) -> None:
    try:
        if request.provider == LIGER:
            patch.on_undo(patch_with_liger(model, request.row, request.kernels))
        else:
            _Patcher(model, request, patch).run()
    except BaseException:
        patch.undo()
        raise


class _Patcher:
    """Gives modules of one model a subclass of their own class whose forward calls the kernels.

    A subclass, and not a function on the instance: a bound method in a module's own dict is a reference cycle, and
    the model's memory would wait for the garbage collector.
    """

    def __init__(self, model: Any, request: _Request, patch: Patch) -> None:
        self._model, self._request, self._patch = model, request, patch
        self._row = request.row
        self._modeling = importlib.import_module(request.row.modeling_module)
        self._subclasses: dict[tuple[type[nn.Module], str], type[nn.Module]] = {}

    def run(self) -> None:
        fill: dict[str, Callable[[Forward], None]] = {
            "rope": self._fill_rope,
            "rms": self._fill_rms,
            "swiglu": functools.partial(self._fill_gated, "swiglu"),
            "geglu": functools.partial(self._fill_gated, "geglu"),
            "layernorm": self._fill_layernorm,
            "ce": self._fill_ce,
            "flce": self._fill_flce,
        }
        for slot in self._request.kernels:
            fill[slot](self._request.entries[slot])

    def _fill_rope(self, kernel: Forward) -> None:
        for module in self._modules("Attention"):
            self._swap(module, "rope", lambda original: _with_global(original, _ROPE, kernel))

    def _fill_rms(self, kernel: Forward) -> None:
        add_kernel = self._request.entries.get("add_rms")
        forward = decoder.rms_forward(self._row, kernel, add_kernel)
        for module in self._modules("RMSNorm"):
            self._swap(module, "rms", lambda _original: forward)
        if add_kernel is not None and self._row.layer_norms.adds_before_norm:
            for module in self._modules("DecoderLayer"):
                self._swap(module, "rms", lambda original: decoder.layer_forward(original, self._row))

    def _fill_gated(self, slot: str, kernel: Forward) -> None:
        row, linear_kernel = self._row.mlp, self._request.entries.get(f"{slot}_linear")
        forward, mlps = decoder.gated_forward(row, kernel), self._modules("MLP")
        for module in mlps:
            activation = type(getattr(module, row.activation)).__name__
            if activation not in _ACTIVATIONS[slot]:
                raise KernelUnavailableError(f"{slot}: the model's MLP uses {activation}. Leave {slot} out.")
            self._swap(module, slot, lambda _original: forward)
            if linear_kernel is not None:
                self._fill_last_linear(slot, module, linear_kernel)
        if linear_kernel is not None:
            references = [weakref.ref(module) for module in mlps]
            self._patch.on_notes(functools.partial(_kept_products, slot, row.down, references))

    def _fill_last_linear(self, slot: str, mlp: Any, kernel: Forward) -> None:
        """Let the MLP's last layer multiply the gates, if it is torch's own and so are those that make them."""
        row = self._row.mlp
        if all(_is_plain_linear(getattr(mlp, name)) for name in (*row.inputs, row.down)):
            down = getattr(mlp, row.down)
            self._swap(down, slot, lambda original: decoder.gated_linear_forward(original, kernel))

    def _fill_layernorm(self, kernel: Forward) -> None:
        def forward(self: Any, x: torch.Tensor) -> Any:
            return kernel(x, self.weight, self.bias, self.eps)

        for module in self._model.modules():
            if isinstance(module, nn.LayerNorm):
                self._swap(module, "layernorm", lambda _original: forward)

    def _fill_ce(self, kernel: Forward) -> None:
        self._fuse_loss("ce", loss_after_head(kernel))

    def _fill_flce(self, kernel: Forward) -> None:
        head = self._model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or hasattr(head, "base_layer") or not head.weight.is_floating_point():
            raise KernelInputError(
                f"flce: the model's head is a {type(head).__name__}; the fused loss reads a plain linear layer's weight"
                " and would leave adapters out. Use ce, or take the head out of the adapter's targets."
            )
        measured = self._request.measured
        budget = None if measured is None else MeasuredBudget(measured)
        self._swap(head, "flce", lambda original: fused_head_forward(original, kernel, budget))
        self._fuse_loss("flce", loss_in_head)

    def _fuse_loss(self, slot: str, run_loss: Any) -> None:
        request = self._request
        self._swap(
            self._model, slot, lambda original: fused_loss_forward(original, self._row, run_loss, request.options)
        )

    def _modules(self, kind: str) -> list[Any]:
        """The model's modules of one of its architecture's classes, such as `RMSNorm` for `LlamaRMSNorm`."""
        wanted = getattr(self._modeling, f"{self._row.class_prefix}{kind}")
        return [module for module in self._model.modules() if isinstance(module, wanted)]

    def _swap(self, module: nn.Module, slot: str, make_forward: Callable[[Forward], Forward]) -> None:
        """Give `module` a subclass of its class with another forward."""
        if "forward" in vars(module):
            raise KernelInputError(
                f"{slot}: a {type(module).__name__} has a forward of its own, from a hook or another patch."
                " Put the kernels in before it."
            )
        before = type(module)
        key = (before, slot)
        if key not in self._subclasses:
            # named as its parent, since checkpoints and wrapping policies go by class names
            body = {"forward": make_forward(before.forward), "__module__": before.__module__}
            self._subclasses[key] = type(before.__name__, (before,), {**body, "__qualname__": before.__qualname__})
        module.__class__ = self._subclasses[key]
        self._patch.on_undo(functools.partial(_restore_class, weakref.ref(module), self._subclasses[key], before))


def _kept_products(slot: str, down: str, references: "list[weakref.ref[Any]]") -> str | None:
    layers = [getattr(mlp, down) for reference in references if (mlp := reference()) is not None]
    others = [layer for layer in layers if not decoder.takes_gates(layer)]
    if not others:
        return None
    names = ", ".join(sorted({f"{type(layer).__module__}.{type(layer).__qualname__}" for layer in others}))
    return f"{slot}: {len(others)} of {len(layers)} MLPs keep their product for backward, since it goes into {names}"


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether its forward is torch's and nothing else keeps or quantizes what goes through it."""
    return type(module).forward is nn.Linear.forward and "forward" not in vars(module)


def _restore_class(reference: "weakref.ref[nn.Module]", ours: type[nn.Module], before: type[nn.Module]) -> None:
    module = reference()
    if module is None:
        return
    if type(module) is not ours:
        raise KernelInputError(
            f"a {before.__name__} was changed to {type(module).__name__} after the kernels were put in."
            " Undo that change first."
        )
    module.__class__ = before


def _with_global(function: Forward, name: str, value: Any) -> Forward:
    """A copy of `function` in which the global `name` is `value`; its module stays as it is.

    Raises:
        KernelUnavailableError: the function does not use that name.
    """
    plain = function if isinstance(function, types.FunctionType) else None
    if plain is None or name not in plain.__code__.co_names:
        raise KernelUnavailableError(f"rope: {function.__qualname__} does not call {name}. Leave rope out.")
    # without the module's name, as torch.compile would look the global up in the module itself
    scope = {**plain.__globals__, name: value}
    scope.pop("__name__", None)
    copy = types.FunctionType(plain.__code__, scope, plain.__name__, plain.__defaults__, plain.__closure__)
    copy.__kwdefaults__ = plain.__kwdefaults__
    return functools.wraps(plain)(copy)
