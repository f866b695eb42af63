"""Detect the phases of a user's training: around models, backward, optimizer steps, and functions that save."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ligerprof.analyzers.explain.ranks import module_kind
from ligerprof.roles import INFERENCE_PHASES, Phase
from ligerprof.runs.recording.module_calls import (
    calls,
    direct_call,
    observed_call,
    release_calls,
    replace_calls,
    sequence_number,
)
from ligerprof.runs.recording.patches import (
    GENERATE,
    PHASES,
    REENTRANT,
    Patches,
    is_outermost_gradient,
    is_traced,
    skip_when_compiling,
)
from ligerprof.runs.recording.saved import SavedTensors
from ligerprof.runs.recording.stamping import HOOKS, Stamper
from ligerprof.snapshots.stamp import Stamp


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


@dataclass(kw_only=True, slots=True)
class LoopModel:
    """A model of a loop.

    Attributes:
        dtypes: bytes of this rank's part of the weights, by dtype.
        has_head: whether its outputs are logits over a vocabulary; None for a module that does not say so.
        token_bytes: of the keys and values of one token in 16 bits; None if its configuration does not give them.
    """

    name: str
    elements: int
    dtypes: Mapping[str, int]
    trainable_bytes: int
    has_head: bool | None
    token_bytes: int | None
    phases: set[Phase]


class LoopModels:
    """The outermost models that ran, once for each set of weights: adapters and wrappers share those of their model."""

    def __init__(self) -> None:
        self._of_module: WeakKeyDictionary[nn.Module, LoopModel] = WeakKeyDictionary()
        self._of_weight: list[tuple[ReferenceType[Tensor], LoopModel]] = []

    def note(self, module: nn.Module, phase: Phase) -> None:
        model = self._of_module.get(module)
        if model is None:
            weights = list(module.parameters())
            # lazy weights get their shapes in the first call
            if not weights or any(map(is_lazy, weights)):
                return
            known = (each for weight, each in self._of_weight if weight() is weights[0])
            model = next(known, None) or _loop_model(module, weights)
            self._of_module[module] = model
            self._of_weight.append((ref(weights[0]), model))
        model.phases.add(phase)

    def described(self) -> list[dict[str, Any]]:
        """The models, as recording.json has them; a role is None if it is not certain."""
        found = list({id(model): model for _, model in self._of_weight}.values())
        policy = next((each for each in found if each.trainable_bytes and each.has_head), None)
        return [
            {
                "name": model.name,
                "role": _role(model, policy),
                "parameters_bytes": sum(model.dtypes.values()),
                "trainable_bytes": model.trainable_bytes,
                "dtypes": dict(model.dtypes),
                "elements": model.elements,
                "kv_token_bytes": model.token_bytes,
                "phases": [phase.value for phase in Phase if phase in model.phases],
            }
            for model in found
        ]


def _loop_model(module: nn.Module, weights: Sequence[Tensor]) -> LoopModel:
    inner = module
    while isinstance(wrapped := getattr(inner, "module", getattr(inner, "_orig_mod", None)), nn.Module):
        inner = wrapped
    dtypes: dict[str, int] = {}
    for weight in weights:
        name = str(weight.dtype).removeprefix("torch.")
        dtypes[name] = dtypes.get(name, 0) + _held_bytes(weight)
    has_head: bool | None = None
    token_bytes: int | None = None
    # methods and settings of the program's own classes, which may raise anything
    with suppress(Exception):
        has_head = inner.get_output_embeddings() is not None  # type: ignore[operator]
        token_bytes = _token_bytes(getattr(inner, "config", None))
    return LoopModel(
        name=type(inner).__name__,
        elements=sum(getattr(weight, "ds_numel", weight.numel()) for weight in weights),
        dtypes=dtypes,
        trainable_bytes=sum(_held_bytes(weight) for weight in weights if weight.requires_grad),
        has_head=has_head,
        token_bytes=token_bytes,
        phases=set(),
    )


def _token_bytes(config: Any) -> int | None:
    """Keys and values of one token in 16 bits, of a model whose layers all attend to everything."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    if kinds != {"full_attention"} or getattr(config, "kv_lora_rank", None) is not None:
        return None
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    layers, heads, hidden = (getattr(config, name, None) for name in names)
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(hidden, int)):
        return None
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    return 2 * layers * (getattr(config, "num_key_value_heads", None) or heads) * int(head_dim) * 2


def _role(model: LoopModel, policy: LoopModel | None) -> str | None:
    """What a model is in a loop with this policy."""
    if model is policy:
        return "policy"
    if model.has_head is False:
        return "value" if model.trainable_bytes and policy is not None else "reward"
    is_copy = policy is not None and (model.name, model.elements) == (policy.name, policy.elements)
    return "reference" if is_copy and not model.trainable_bytes else None


class OutermostCalls:
    """The models that were trained so far, and what the last call of an outermost module was."""

    def __init__(self) -> None:
        # a reentrant checkpoint runs, which switches gradients off until backward; the last model was evaluated
        self.is_checkpointed = self.evaluates = False
        self._generates = self._has_generated = False
        self._trained: WeakSet[nn.Module] = WeakSet()

    def phase_of(self, module: nn.Module, running: Phase, named: Mapping[str, Any]) -> Phase | None:
        """The phase that the call of an outermost module begins or continues; None: the running one goes on.

        Without gradients, a model generates inside `generate`, or where it is given its cache. What runs after that, up
        to the next forward pass, scores what was generated, and so does a reference between forward and backward. Any
        other model is evaluated. Frozen models, such as a teacher or an image encoder, belong to the forward pass that
        they precede. A model that has been trained is evaluated in evaluation mode even with gradients.
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


# the number of the backward pass inside which this thread runs, -1 outside of any
_backward_number: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def _place() -> int:
    """A number of this thread that changes with the next node, or the number of the running backward pass."""
    backward = _backward_number()
    return backward if backward >= 0 else -1 - sequence_number()


# what backward and grad call, for programs that import them by name
_ENGINE = "_engine_run_backward"


class LoopPhases:
    """Stamps allocations with the phase of a training loop.

    Forward begins with the call of a model (the outermost module that runs) and lasts until backward, so that it
    includes the loss; backward is torch.autograd.backward, which Tensor.backward calls, and torch.autograd.grad; the
    optimizer phase is the `step` of any torch optimizer. The first forward after an optimizer step begins the next
    step. A model that runs without gradients is evaluated, generates or scores; functions that gather or write weights
    save.

    Args:
        emit: callback that receives the text of each stamp.
        saved: notes the tensors that autograd saves; None: they are not noted.
        on_step: callback that receives the number of each step when it begins.
        on_phase: callback that receives each phase when it begins.
    """

    def __init__(
        self,
        emit: Callable[[str], None],
        saved: SavedTensors | None = None,
        on_step: Callable[[int], None] | None = None,
        on_phase: Callable[[Phase], None] | None = None,
        *,
        names_all_nodes: bool = True,
    ) -> None:
        self._stamper = Stamper(emit, saved, names_all_nodes=names_all_nodes)
        self._on_step, self._on_phase = on_step, on_phase
        # the number of the last step that began, 0 before the first
        self.step, self._phase = 0, Phase.BUILD
        self._phase_before_step, self._text_before_step = Phase.OUTSIDE, ""
        self._ended = True
        self._in_backward = False
        self._had_backward = False
        self._has_optimizer: bool | None = None
        # whether an outermost module runs
        self._is_inside = False
        self._in_optimizer = False
        self._names_modules = False
        # whether the history is on
        self._stamps = True
        # those that have stepped
        self.optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
        # of the last update
        self._update_place: int | None = None
        self._outermost = OutermostCalls()
        # of the modules that trained on this rank
        self.weights: dict[str, list[int]] = {}
        self._weighed: WeakSet[nn.Module] = WeakSet()
        self.models = LoopModels()
        self._patches = Patches()
        self._hooks: tuple[RemovableHandle, ...] = ()

    @property
    def text(self) -> str:
        """The running stamp."""
        if self._stamps:
            return self._stamper.text
        return f"{Stamp.prefix(step=self.step, phase=self._phase)};"

    def open(self, *, modules: bool = True) -> None:
        """Install the hooks.

        Args:
            modules: also stamp each module and autograd node; it can begin later, with `name_modules`.
        """
        self._names_modules = modules
        skip_when_compiling(__name__, *HOOKS)
        self._hooks = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )
        replace_calls(self._patches, self._run_outermost)
        for name in ("backward", "grad", _ENGINE):
            if hasattr(torch.autograd, name):
                self._patches.wrap(torch.autograd, name, self._around_backward)
        self._patches.wrap(nn.Module, "_apply", self._around_move)
        for name in REENTRANT:
            self._patches.wrap_imported(
                name, "CheckpointFunction.apply", self._outermost.around_checkpoint(self._patches)
            )
        self._patches.around(*GENERATE, self._outermost.generation)
        for module, path, phase in PHASES:
            self._patches.around(module, path, partial(self._during, phase))

    def close(self) -> None:
        release_calls()
        self._patches.undo()
        for hook in self._hooks:
            hook.remove()
        self._names_modules = False
        self._stamper.close()

    def name_modules(self) -> None:
        """From now on, stamp modules and autograd nodes."""
        self._names_modules = True
        self.stamp(enabled=True)
        self._stamper.detail_until(self.step + 1)
        self._choose_run()

    def stamp(self, *, enabled: bool) -> None:
        """Stamp events from the next phase on; or none, while phases are only followed."""
        self._stamps = enabled

    def attach(self, model: nn.Module) -> None:
        """Stamp the modules of `model`; the build phase lasts until its weights are on a device."""
        self._stamper.attach(model)
        if self._phase is Phase.BUILD and all(weight.device.type != "cpu" for weight in model.parameters()):
            self._enter(Phase.OUTSIDE)

    def end_step(self) -> None:
        """End the step; the next forward begins another."""
        self._ended = True

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Stamp the events inside a context with a phase."""
        before = self._phase
        if phase is Phase.FORWARD:
            self._begin_step()
        self._enter(phase)
        try:
            yield
        finally:
            if phase is Phase.OPTIMIZER:
                self._ended = True
            # forward ends when backward begins, and the build when any other phase does
            self._enter(Phase.OUTSIDE if before in (Phase.BUILD, Phase.FORWARD) else before)

    def _during(self, phase: Phase) -> AbstractContextManager[None] | None:
        """A function of `PHASES`: it does not end steps, and inside another of its phase, it changes nothing."""
        if self._phase is phase:
            return None
        if phase is Phase.BACKWARD:
            self._begin_step()
        return self._within(phase, then=self._phase if phase is Phase.SAVING else Phase.OUTSIDE)

    @contextmanager
    def _within(self, phase: Phase, then: Phase) -> Iterator[None]:
        """A phase, and the one that follows it."""
        self._enter(phase)
        try:
            yield
        finally:
            self._enter(then)

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        if self._stamps:
            self._stamper.enter(step=self.step, phase=phase)
        if self._on_phase is not None:
            self._on_phase(phase)

    def _begin_step(self) -> None:
        if self._ended or (self._had_backward and self._updates_itself()):
            self.step, self._ended, self._had_backward = self.step + 1, False, False
            if self._on_step is not None:
                self._on_step(self.step)

    def _updates_itself(self) -> bool:
        """Whether the program has no torch optimizer, so that each backward pass ends a step."""
        if self._has_optimizer is None:
            kinds = {type(each) for each in gc.get_objects()}
            self._has_optimizer = any(issubclass(kind, torch.optim.Optimizer) for kind in kinds)
        return not self._has_optimizer

    def _choose_run(self) -> None:
        """Inside an outermost module and in backward, modules are stamped and change no phase."""
        if self._is_inside or self._in_backward:
            calls.run, calls.observer = None, self._stamper if self._names_modules else None
        else:
            calls.run, calls.observer = self._run_outermost, None

    def _run_outermost(self, module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        if self.passes_on():
            return direct_call(module)(*arguments, **named)
        phase = self._outermost.phase_of(module, self._phase, named)
        if phase is None:
            return self._stamped(module, arguments, named)
        if phase is Phase.FORWARD and (self._ended or self._had_backward):
            self._begin_step()
        after_inference = Phase.OUTSIDE if self._phase is Phase.BUILD else self._phase
        self._enter(phase)
        self.models.note(module, phase)
        if self._names_modules and not self._stamper.is_attached(module) and has_weights(module):
            self._stamper.attach(module, fixed=False)
        if phase is Phase.FORWARD and module not in self._weighed:
            self._weighed.add(module)
            add_weights(module, self.weights)
        self._is_inside = True
        self._choose_run()
        failed = True
        try:
            outputs = self._stamped(module, arguments, named)
            failed = False
        finally:
            self._is_inside = False
            self._choose_run()
            if failed and phase is Phase.FORWARD:
                # memory ran out, for example; the program may begin again
                self._enter(Phase.OUTSIDE)
            elif phase in INFERENCE_PHASES:
                self._enter(after_inference)
        if phase is Phase.FORWARD and self._names_modules and has_weights(module):
            self._stamper.label_outputs(outputs)
        return outputs

    def _stamped(self, module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        if not self._names_modules:
            return direct_call(module)(*arguments, **named)
        return observed_call(self._stamper, module, arguments, named)

    def _before_step(self, _optimizer: Any, _arguments: Any, _named: Any) -> None:
        self._has_optimizer = True
        # neither a module nor autograd ran; later, a step may call several optimizers
        if not self.step:
            self._begin_step()
        self._phase_before_step, self._text_before_step = self._phase, self._stamper.text
        self._in_optimizer = True
        self._enter(Phase.OPTIMIZER)

    def _after_step(self, optimizer: Any, _arguments: Any, _named: Any) -> None:
        self.optimizers.add(optimizer)
        self._update_place = _place()
        self._ended = True
        self._in_optimizer = False
        # some loops step inside backward, others inside recorder.phase("optimizer")
        before = self._phase_before_step
        self._enter(before if before in (Phase.BACKWARD, Phase.OPTIMIZER) else Phase.OUTSIDE)
        if before is Phase.BACKWARD and self._stamps:
            self._stamper.stamp(self._text_before_step)

    def _around_backward(self, original: Any) -> Any:
        def backward(outputs: Any, *arguments: Any, **named: Any) -> Any:
            # a model may differentiate inside its forward pass
            if self._is_inside or self._in_backward or is_compiling() or self.passes_on():
                return original(outputs, *arguments, **named)
            before = self._begin_backward(outputs)
            try:
                return original(outputs, *arguments, **named)
            finally:
                # a gradient that is part of a loss
                goes_on = bool(named.get("create_graph")) and not is_outermost_gradient()
                self._end_backward(before, goes_on=goes_on)

        return backward

    def _around_move(self, original: Any) -> Any:
        """Around what moves and casts weights: a model that is made after the first step is built, too."""

        def apply(module: nn.Module, *arguments: Any, **named: Any) -> Any:
            if self._is_inside or self._phase is Phase.BUILD or self.passes_on():
                return original(module, *arguments, **named)
            with self._within(Phase.BUILD, then=self._phase):
                return original(module, *arguments, **named)

        return apply

    def passes_on(self) -> bool:
        """Whether a call does not concern phases: recomputation in backward, or a trace of torch.compile."""
        return self._in_backward or not self._patches.active or is_traced()

    def _begin_backward(self, outputs: Any) -> Phase:
        """Stamp a backward pass; returns the phase before it."""
        if not self._ended or self._update_place != _place():
            # not the backward pass of another optimizer's loss in the step of one that has stepped
            self._begin_step()
        before = self._phase
        if self._names_modules:
            self._stamper.label_loss(outputs)
        self._in_backward = True
        self._choose_run()
        self._enter(Phase.BACKWARD)
        return before

    def _end_backward(self, before: Phase, *, goes_on: bool) -> None:
        """End a backward pass.

        Args:
            goes_on: whether the phase before it goes on, as with a gradient that is part of a loss.
        """
        self._in_backward = False
        self._choose_run()
        self._had_backward = self._had_backward or not goes_on
        if self._in_optimizer and before is not Phase.BACKWARD:
            # the optimizer computes the loss again
            self._enter(Phase.OPTIMIZER)
        elif goes_on or before not in (Phase.BUILD, Phase.FORWARD):
            self._enter(before)
        else:
            self._enter(Phase.OUTSIDE)
