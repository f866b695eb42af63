"""What the functions that put kernels into a model work with."""

import functools
import importlib
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ligerprof.errors import KernelInputError
from ligerprof.kernels.options import LossOptions
from ligerprof.kernels.selection import SLOTS
from ligerprof.kernels.spec import KernelSpec, load_entry
from ligerprof.models.architecture import Architecture

Forward = Callable[..., Any]


class Patch:
    """The kernels in a model. As a context manager it removes them at the end.

    Attributes:
        providers: the provider of each kernel.
    """

    def __init__(self, providers: Mapping[str, str]) -> None:
        self.providers = providers
        self._undo: list[Callable[[], None]] = []
        self._remarks: list[Callable[[], str | None]] = []

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the slots."""
        return tuple(self.providers)

    @property
    def provider(self) -> str:
        """The provider of all kernels, or the providers joined by `+`."""
        return "+".join(dict.fromkeys(self.providers.values()))

    def __repr__(self) -> str:
        of_each = ", ".join(f"{slot} of {provider}" for slot, provider in self.providers.items())
        return f"<Patch: {of_each or 'no kernels'}>"

    def on_notes(self, remark: Callable[[], str | None]) -> None:
        """Register a callback that returns a line for `notes`, or None."""
        self._remarks.append(remark)

    def notes(self) -> tuple[str, ...]:
        """Operations that the model's current layers, adapters included, run without the kernels."""
        return tuple(line for remark in self._remarks if (line := remark()) is not None)

    def on_undo(self, action: Callable[[], None]) -> None:
        """Run `action` on undo, before actions that were registered earlier."""
        self._undo.append(action)

    def undo(self) -> None:
        """Restore the model; a second call does nothing.

        Raises:
            KernelInputError: a module was changed since. Once that change is undone, a further call continues.
        """
        while self._undo:
            self._undo[-1]()
            self._undo.pop()

    def __enter__(self) -> "Patch":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


class Swapper:
    """Changes the class of modules to a subclass with another forward, until a patch is undone.

    A bound method in a module's own dict would be a reference cycle, which delays freeing the model until a garbage
    collection.
    """

    def __init__(self, patch: Patch) -> None:
        self._patch = patch
        self._subclasses: dict[tuple[type[nn.Module], str], type[nn.Module]] = {}

    def swap(self, module: nn.Module, slot: str, make_forward: Callable[[Forward], Forward]) -> None:
        """Give `module` a subclass of its class with another forward."""
        if "forward" in vars(module):
            raise KernelInputError(
                f"{slot}: a {type(module).__name__} has a forward of its own, from a hook or another patch."
                " Put the kernels in before it."
            )
        before = type(module)
        key = (before, slot)
        if key not in self._subclasses:
            # the same name, because checkpoints and wrapping policies select by class name
            body = {"forward": make_forward(before.forward), "has_kernels": True}
            names = {"__module__": before.__module__, "__qualname__": before.__qualname__}
            self._subclasses[key] = type(before.__name__, (before,), {**body, **names})
        module.__class__ = self._subclasses[key]
        self._patch.on_undo(functools.partial(_restore_class, weakref.ref(module), self._subclasses[key], before))


def _restore_class(reference: "weakref.ref[nn.Module]", ours: type[nn.Module], before: type[nn.Module]) -> None:
    module = reference()
    if module is None:
        return
    module.__class__ = _without(type(module), ours, before)


def _without(current: type[nn.Module], ours: type[nn.Module], before: type[nn.Module]) -> type[nn.Module]:
    """A module's class with `before` in place of ours; the class that fully_shard mixed in stays."""
    if current is ours:
        return before
    sharded = any(base.__module__.startswith("torch.distributed.fsdp") for base in current.__bases__)
    if ours in current.__mro__ and "has_kernels" in vars(current):
        raise KernelInputError(f"a {before.__name__} has the kernels of a later patch. Undo the later patch first.")
    if not sharded or ours not in current.__bases__:
        raise KernelInputError(
            f"a {before.__name__} was changed to {current.__name__} after the kernels were put in."
            " Undo that change first."
        )
    bases = tuple(before if base is ours else base for base in current.__bases__)
    own = {name: value for name, value in vars(current).items() if name not in ("__dict__", "__weakref__")}
    return type(current.__name__, bases, own)


_FILL = "ligerprof.kernels.patching.fill"


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchRequest:
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

    def __init__(self, model: Any, request: PatchRequest, patch: Patch) -> None:
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
        names = self.row.classes.get(kind, (f"{self.row.prefix}{kind}",))
        wanted = tuple(getattr(self._modeling, name) for name in names if hasattr(self._modeling, name))
        return [module for module in self.model.modules() if isinstance(module, wanted)]
