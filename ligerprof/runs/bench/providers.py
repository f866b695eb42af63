"""The providers of benchmarked kernels: ligerprof, torch, other packages in their own calling convention, plug-ins."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ligerprof.errors import KernelUnavailableError, LigerprofError
from ligerprof.kernels.options import LossOptions
from ligerprof.kernels.registry import find_kernel, load_registry, require_available
from ligerprof.kernels.spec import load_entry
from ligerprof.runs.bench.operations import Kernel
from ligerprof.units import parse_bytes

_FUSED_LOSS_ONLY = ("torch-linear-ce", "cce")


@dataclass(frozen=True, kw_only=True, slots=True)
class Provided:
    """A provider's kernel.

    Attributes:
        name: the provider, with a variant after a colon.
        kernel: a function with the signature of the kernel's slot.
        options: passed to a loss.
        budgeted: whether the options' budget determines the chunks of the fused loss.
    """

    name: str
    kernel: Kernel
    options: LossOptions
    budgeted: bool = False


def provider_names(kernel: str) -> tuple[str, ...]:
    """All providers that may have this kernel, installed or not: built-in ones first, then plug-ins."""
    known = ["ligerprof", "torch", "torch-compile", "torch-linear-ce", "liger", "cce"]
    plugins = [provider for provider in load_registry().providers if provider not in known]
    return tuple(name for name in (*known, *plugins) if kernel == "flce" or name not in _FUSED_LOSS_ONLY)


def find_provided(
    kernel: str, names: Sequence[str] | None, device_kind: str
) -> tuple[list[Provided], list[tuple[str, str]]]:
    """Look up the kernel of each provider, all by default; returns them, and (name, reason) of the missing ones.

    Args:
        names: `PROVIDER` or `PROVIDER:VARIANT` each.
        device_kind: `cuda`, or `cpu` (Triton's interpreter).
    """
    # compile anew: torch silently falls back to eager once a function has seen many shapes
    torch._dynamo.reset()
    found: list[Provided] = []
    missing: list[tuple[str, str]] = []
    for name in provider_names(kernel) if names is None else names:
        try:
            found.append(_find_one(kernel, name, device_kind))
        except (LigerprofError, ImportError) as error:
            missing.append((name, " ".join(str(error).split())))
    if names is None:
        missing += [(broken.entry_point, broken.reason) for broken in load_registry().broken]
    return found, missing


def _find_one(kernel: str, name: str, device_kind: str) -> Provided:
    provider, _, variant = name.partition(":")
    if provider in _FUSED_LOSS_ONLY and kernel != "flce":
        raise KernelUnavailableError(f"{provider} has no {kernel}, only flce")
    if provider in _FACTORIES:
        function = _FACTORIES[provider](kernel, variant, device_kind)
        return Provided(name=name, kernel=function, options=LossOptions(in_place=True))
    ours = provider == "ligerprof"
    options = _own_options(kernel, variant) if ours else _no_variant(provider, variant)
    if provider == "torch-compile":
        function = _compiled(_registered(kernel, "torch", device_kind))
    else:
        function = _registered(kernel, provider, device_kind)
    return Provided(name=name, kernel=function, options=options, budgeted=ours and kernel == "flce")


def _registered(kernel: str, provider: str, device_kind: str) -> Kernel:
    if (kernel, provider) == ("add_rms", "torch"):
        norm = _registered("rms", provider, device_kind)

        def add_then_norm(hidden: Tensor, residual: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
            total = hidden + residual
            return norm(total, *arguments), total

        return add_then_norm
    spec = find_kernel(kernel, provider)
    require_available(spec, device_kind)
    return load_entry(spec.entry)


def _no_variant(provider: str, variant: str) -> LossOptions:
    if variant:
        raise KernelUnavailableError(f"{provider} has no variant {variant!r}. Leave ':{variant}' out.")
    return LossOptions(in_place=True)


def _own_options(kernel: str, variant: str) -> LossOptions:
    """Parse `lean`, `balanced` or a size, optionally with `+fp32`."""
    if kernel != "flce":
        return _no_variant(f"ligerprof's {kernel}", variant)
    options = LossOptions(in_place=True)
    for word in filter(None, variant.split("+")):
        if word == "fp32":
            options = dataclasses.replace(options, accumulate_fp32=True)
        else:
            budget = word if word in ("lean", "balanced") else parse_bytes(word)
            options = dataclasses.replace(options, budget=budget)
    return options


def _compiled(function: Kernel) -> Kernel:
    compiled = torch.compile(function, dynamic=False)

    def run(*arguments: Any) -> Any:
        # the reference's defaults replace the options, which plain torch does not use
        return compiled(*(value for value in arguments if not isinstance(value, LossOptions)))

    return run


def _torch_linear_ce(_kernel: str, variant: str, _device_kind: str) -> Kernel:
    _no_variant("torch-linear-ce", variant)
    fused = getattr(functional, "linear_cross_entropy", None)
    if fused is None:
        raise KernelUnavailableError(f"torch {torch.__version__} has no F.linear_cross_entropy (2.13 has)")
    return lambda hidden, weight, labels, _options: fused(hidden, weight, labels)


def _liger(kernel: str, variant: str, device_kind: str) -> Kernel:
    """The registered liger-kernel function, except where the registry lacks it or wraps it for transformers."""
    if (kernel, variant) == ("flce", "fp32"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)
        return lambda hidden, weight, labels, _options: loss(weight, hidden, labels)
    _no_variant(f"liger's {kernel}", variant)
    if kernel == "ce":
        from liger_kernel.transformers import LigerCrossEntropyLoss

        # the registered one casts logits up to fp32, as transformers does
        narrow = LigerCrossEntropyLoss()
        return lambda logits, labels, _options: narrow(logits, labels)
    if kernel == "add_rms":
        from liger_kernel.ops import LigerFusedAddRMSNormFunction

        fused: Kernel = LigerFusedAddRMSNormFunction.apply
        return fused
    return _registered(kernel, "liger", device_kind)


def _cce(_kernel: str, variant: str, _device_kind: str) -> Kernel:
    from cut_cross_entropy import linear_cross_entropy

    name = f"cce_{variant}" if variant else "cce"
    return lambda hidden, weight, labels, _options: linear_cross_entropy(hidden, weight, labels, impl=name)


_FACTORIES: dict[str, Callable[[str, str, str], Kernel]] = {
    "torch-linear-ce": _torch_linear_ce,
    "liger": _liger,
    "cce": _cce,
}
