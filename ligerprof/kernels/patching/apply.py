"""Patch a transformers model, or its class, with kernels."""

import functools
from typing import Any

from torch import nn

from ligerprof.errors import KernelInputError, KernelUnavailableError, RecipeError
from ligerprof.kernels.options import LossOptions
from ligerprof.kernels.patching.causal_lm import refuse_adapters
from ligerprof.kernels.patching.patcher import Patch, Patcher, PatchRequest
from ligerprof.kernels.providers.liger.functions import patch_with_liger
from ligerprof.kernels.providers.liger.spec import PROVIDER as LIGER
from ligerprof.kernels.registry import find_kernel_set, require_available
from ligerprof.kernels.selection import select_providers
from ligerprof.kernels.spec import load_entry
from ligerprof.models import spec_from_config
from ligerprof.models.architectures import can_patch, find_architecture, is_composite

__all__ = ["Patch", "apply", "require_available"]

# trainers of TRL by their objective
TRAINERS = {"dpo": "DPOTrainer", "kto": "KTOTrainer", "grpo": "GRPOTrainer", "rloo": "RLOOTrainer"}


def apply(
    model: Any,
    kernels: str = "all",
    *,
    provider: str = "ligerprof",
    flce_budget: str | int = "balanced",
    device_kind: str | None = None,
    mlp_tile_tokens: int | None = None,
) -> Patch:
    """Put kernels into a model, or into every future instance of a class.

    Args:
        model: a causal language model of transformers, with or without a vision tower, wrapped or not (peft, DDP), or
            its class; or a trainer of TRL.
        kernels: as `--liger` takes it: `all`, `no-flce`, or names joined by `+` or `,`, such as `rms:liger+flce`. Of a
            trainer, its objective: `dpo`, `kto`, `grpo` or `rloo`.
        provider: whose kernels, for the names without a provider of their own.
        flce_budget: workspace of the fused loss: `lean`, `balanced`, bytes, or `auto`: as much as fits below the
            peak of the process so far, from the third call on.
        device_kind: `cuda`, `cpu` or `simulated`; None is the model's device (`cuda` for a class).
        mlp_tile_tokens: with ligerprof's swiglu or geglu, tokens that an MLP computes at a time, for sequences whose
            gates do not fit; backward computes them again. None: all.

    Returns:
        A Patch, which lasts until its `undo()`; also a context manager.

    Raises:
        RecipeError: an unknown kernel, or one that does not apply to the architecture.
        KernelUnavailableError: a kernel that cannot run here, or an unknown architecture.
        KernelInputError: a layer that cannot be replaced, for example adapters on the head.
    """
    if kernels in TRAINERS:
        # loads Triton
        from ligerprof.kernels.objectives.trl import apply_to_trainer

        return apply_to_trainer(model, kernels, TRAINERS[kernels], flce_budget)
    if isinstance(model, type):
        return _apply_to_class(model, kernels, provider, flce_budget, device_kind or "cuda", mlp_tile_tokens)
    inner = _causal_model(model)
    if device_kind is None:
        device_kind = "cpu" if next(inner.parameters()).device.type == "cpu" else "cuda"
    request = _resolve(inner.config, kernels, provider, flce_budget, device_kind, mlp_tile_tokens)
    patch = Patch(request.providers)
    _apply_to_instance(inner, request, patch)
    return patch


def _apply_to_class(
    model_class: type[Any],
    kernels: str,
    provider: str,
    flce_budget: str | int,
    device_kind: str,
    mlp_tile_tokens: int | None,
) -> Patch:
    """Wrap the constructor, so that it patches every new instance."""
    request = _resolve(model_class.config_class(), kernels, provider, flce_budget, device_kind, mlp_tile_tokens)
    patch = Patch(request.providers)
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


def _resolve(
    config: Any, kernels: str, provider: str, flce_budget: str | int, device_kind: str, mlp_tile_tokens: int | None
) -> PatchRequest:
    text = config.get_text_config() if is_composite(config.model_type) else config
    if not can_patch(text.model_type):
        inner = "" if text is config else f" with a text model of type {text.model_type!r}"
        raise KernelUnavailableError(
            f"models of type {config.model_type!r}{inner} cannot be patched; docs/models.md lists those that can."
        )
    spec_of_text = spec_from_config(text.to_dict(), name=config.model_type)
    providers = select_providers(kernels, provider, spec_of_text)
    if text is not config and LIGER in providers.values():
        raise KernelUnavailableError(f"{LIGER} is not supported in models with a vision tower. Use another provider.")
    specs = find_kernel_set(providers, spec_of_text)
    for spec in specs.values():
        require_available(spec, device_kind)
    if mlp_tile_tokens is not None and "ligerprof" not in (providers.get("swiglu"), providers.get("geglu")):
        raise RecipeError("MLPs in tiles need ligerprof's swiglu or geglu. Add it, or leave mlp_tile_tokens out.")
    measured = flce_budget == "auto" and "flce" in specs
    if measured and (providers["flce"], device_kind) != ("ligerprof", "cuda"):
        raise RecipeError(
            f"flce budget auto measures ligerprof's fused loss on a CUDA device, not {providers['flce']}'s on"
            f" {device_kind}."
            " Give lean, balanced or bytes."
        )
    return PatchRequest(
        row=find_architecture(text.model_type),
        text_only=text is config,
        providers=providers,
        entries={name: load_entry(spec.entry) for name, spec in specs.items() if spec.provider != LIGER},
        options=LossOptions(budget="lean" if measured else flce_budget, in_place=True),
        measured=specs["flce"] if measured else None,
        mlp_tile_tokens=mlp_tile_tokens,
    )


def _causal_model(model: Any) -> Any:
    """The transformers model inside peft's, DDP's or DeepSpeed's wrapper."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not hasattr(model, "config") or not hasattr(model, "get_output_embeddings"):
        raise KernelInputError(
            f"{type(model).__name__} is not a causal language model of transformers. Pass the model that has the head."
        )
    return model


def _apply_to_instance(model: Any, request: PatchRequest, patch: Patch) -> None:
    try:
        of_liger = tuple(name for name, provider in request.providers.items() if provider == LIGER)
        if of_liger:
            if "flce" in of_liger:
                refuse_adapters(model.get_output_embeddings(), LIGER)
            # the first to change the model and the last to restore it: its undo restores whole modules
            patch.on_undo(patch_with_liger(model, request.row, of_liger))
        Patcher(model, request, patch).run()
    except BaseException:
        patch.undo()
        raise
