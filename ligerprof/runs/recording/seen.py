"""Models and optimizers that have run: what an outermost call does, and what modules weigh on this rank."""

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from ligerprof.analyzers.explain.ranks import module_kind
from ligerprof.roles import Phase
from ligerprof.runs.recording.patches import Patches

T = TypeVar("T")


class Seen(Generic[T]):
    """A set of objects, compared by identity, that keeps nothing alive."""

    def __init__(self) -> None:
        # by id, which another object may have later
        self._all: dict[int, ReferenceType[T]] = {}

    def add(self, item: T) -> None:
        """Note an object."""
        known = self._all.get(id(item))
        if known is None or known() is not item:
            self._all[id(item)] = ref(item)

    def __contains__(self, item: T) -> bool:
        known = self._all.get(id(item))
        return known is not None and known() is item

    def __iter__(self) -> Iterator[T]:
        return iter([item for known in list(self._all.values()) if (item := known()) is not None])


def exists(kind: type) -> bool:
    """Whether the program has an object of a class, or of one that inherits from it."""
    kinds = {type(each) for each in gc.get_objects()}
    return any(issubclass(each, kind) for each in kinds)


def has_weights(module: nn.Module, *, trainable: bool = False) -> bool:
    """Whether a module or one inside it has weights; the first is found much faster than with `parameters()`."""
    for weight in module._parameters.values():
        if weight is not None and (weight.requires_grad or not trainable):
            return True
    # `any` with a generator takes longer
    for child in module._modules.values():  # noqa: SIM110
        if child is not None and has_weights(child, trainable=trainable):
            return True
    return False


def tensors_of(optimizers: Iterable[Any]) -> Iterator[tuple[torch.Tensor, Phase]]:
    """Gradients and states of optimizers, with the phase that allocates such tensors."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    yield weight.grad, Phase.BACKWARD
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    yield value, Phase.OPTIMIZER


# what wrappers add to the names of modules
_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def add_weights(module: nn.Module, weights: dict[str, list[int]]) -> None:
    """Add the number of modules of each name, with `*` for each index, and the bytes of their own weights.

    Args:
        module: before it runs, while its weights are split.
        weights: receives `[modules, bytes]` by name.
    """
    for name, part in module.named_modules():
        sizes = [_held_bytes(weight) for weight in part.parameters(recurse=False)]
        if sizes:
            words = (word for word in name.split(".") if word not in _WRAPPERS)
            found = weights.setdefault(module_kind(".".join(words)) or type(part).__name__, [0, 0])
            found[0] += 1
            found[1] += sum(sizes)


def _held_bytes(weight: Any) -> int:
    """The bytes of this rank's part of a DTensor, or of a weight under ZeRO-3."""
    part = getattr(weight, "_local_tensor", getattr(weight, "ds_tensor", weight))
    return int(part.nbytes) if isinstance(part, Tensor) else 0


class OutermostCalls:
    """The models that were trained so far, and what the last call of an outermost module was.

    Attributes:
        is_checkpointed: whether a reentrant checkpoint runs, which switches gradients off until backward.
        evaluates: whether the last model was evaluated.
    """

    def __init__(self) -> None:
        self.is_checkpointed = self.evaluates = False
        self._generates = self._has_generated = False
        self._trained: Seen[nn.Module] = Seen()

    def phase_of(self, module: nn.Module, running: Phase, named: Mapping[str, Any]) -> Phase | None:
        """The phase that the call of an outermost module begins or continues; None: the running one goes on.

        Without gradients, a model generates inside `generate`, or where it is given its cache. What runs after that, up
        to the next forward pass, scores what was generated, and so does a reference between forward and backward. Any
        other model is evaluated. Frozen models, such as a teacher or an image encoder, belong to the forward pass that
        they precede. A model that has been trained is evaluated in evaluation mode even with gradients.

        Args:
            module: the outermost module.
            running: the phase before it.
            named: the keyword arguments of the call.
        """
        with_gradients = torch.is_grad_enabled() or self.is_checkpointed
        if running is Phase.SAVING:
            return None
        if with_gradients and module.training and module in self._trained:
            self.evaluates = self._has_generated = False
            return Phase.FORWARD
        if not has_weights(module):
            # a loss or a metric
            return Phase.EVALUATION if self.evaluates and not with_gradients else None
        if not with_gradients and (
            self._generates or named.get("use_cache") or named.get("past_key_values") is not None
        ):
            self._has_generated = True
            return Phase.GENERATION
        if not with_gradients and (running is Phase.FORWARD or self._has_generated):
            return Phase.SCORING
        if with_gradients and module.training:
            self._trained.add(module)
            self._has_generated = False
        if with_gradients:
            evaluates = not module.training and module in self._trained
        else:
            evaluates = self.evaluates or has_weights(module, trainable=True)
        self.evaluates = evaluates
        return Phase.EVALUATION if evaluates else Phase.FORWARD

    @contextmanager
    def generation(self) -> Iterator[None]:
        """The calls inside generate."""
        before, self._generates = self._generates, True
        try:
            yield
        finally:
            self._generates = before

    def around_checkpoint(self, patches: Patches) -> Any:
        """What makes a wrapper around the function that runs a reentrant checkpoint."""

        def make(original: Any) -> Any:
            def apply(*arguments: Any) -> Any:
                if not patches.active:
                    return original(*arguments)
                before, self.is_checkpointed = self.is_checkpointed, torch.is_grad_enabled()
                try:
                    return original(*arguments)
                finally:
                    self.is_checkpointed = before

            return apply

        return make
