"""What the functions that put kernels into a model work with."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ligerprof.kernels.options import LossOptions
from ligerprof.kernels.patching.swap import Forward, Patch, Swapper
from ligerprof.kernels.slots import SLOTS
from ligerprof.kernels.spec import KernelSpec, load_entry
from ligerprof.models.architecture import Architecture

_FILL = "ligerprof.kernels.patching.fill"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The resolved arguments of `apply`.

    Attributes:
        providers: the provider of each slot.
        entries: functions by kernel name, without those of liger-kernel, which patches models itself.
        text_only: whether the model has no vision tower.
        measured: the fused loss if its budget is `auto`, else None.
        mlp_tile_tokens: tokens that a gated MLP computes at a time; None: all.
    """

    row: Architecture
    providers: Mapping[str, str]
    entries: dict[str, Callable[..., Any]]
    options: LossOptions
    text_only: bool
    measured: KernelSpec | None
    mlp_tile_tokens: int | None = None


class Patcher:
    """Puts the kernels of a request into the modules of a model."""

    def __init__(self, model: Any, request: Request, patch: Patch) -> None:
        self.model, self.request, self.patch = model, request, patch
        self.row = request.row
        self._modeling = importlib.import_module(request.row.modeling_module)
        self.swapper = Swapper(patch)
        self.swap = self.swapper.swap

    def run(self) -> None:
        """Fill every slot of the request that has a function."""
        for name in self.request.providers:
            if name in self.request.entries:
                load_entry(f"{_FILL}:{SLOTS[name].filler}")(self, SLOTS[name], self.request.entries[name])

    def variant(self, name: str | None) -> Forward | None:
        """The function of a fused variant, or None if the provider has none."""
        return None if name is None else self.request.entries.get(name)

    def modules(self, kind: str) -> list[Any]:
        """The model's modules of one of its architecture's classes: `RMSNorm` is `LlamaRMSNorm`, for example."""
        names = self.row.classes.get(kind, (f"{self.row.class_prefix}{kind}",))
        wanted = tuple(getattr(self._modeling, name) for name in names if hasattr(self._modeling, name))
        return [module for module in self.model.modules() if isinstance(module, wanted)]
