"""Keep the allocator's stamp up to date: the running phase, module and autograd node."""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ligerprof.roles import Phase
from ligerprof.runs.recording.module_calls import (
    Callback,
    Hook,
    OpenCall,
    release_calls,
    replace_calls,
    sequence_number,
)
from ligerprof.runs.recording.patches import Patches
from ligerprof.runs.recording.saved import SavedTensors
from ligerprof.snapshots.stamp import RECOMPUTE, Stamp

# modules whose functions run between compiled ones
HOOKS = (__name__, OpenCall.__module__, replace_calls.__module__, Patches.__module__, SavedTensors.__module__)
_LABEL = "ligerprof.module"
# hooks on all nodes cost a fifth of a short step, and later steps are like the second one
_DETAILED_STEPS = 2
_LOSS = "loss"
# what torch.compile, FSDP and checkpoint_wrapper put into the names of a model's modules
_COMPILED = "_orig_mod"
_WRAPPERS = re.compile(rf"(?:^|\.)(?:{_COMPILED}|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")


@dataclass(slots=True)
class _Name:
    """The dotted name of a module, which changes when a module that contains its model is attached.

    Attributes:
        fixed: whether the program itself attached the model.
        module: reference to the module; another one may get its id later.
        hook: of the nodes at which backward enters the module.
    """

    text: str
    fixed: bool
    module: ReferenceType[nn.Module]
    hook: Hook | None = None


class _Running(NamedTuple):
    """A running module, the stamp before its call, the module that called it, whether backward computes it again."""

    name: str
    text: str
    outer: str
    recomputes: bool


# the name of the calling module and its open call, of a module that runs in one of most steps
_Usual = tuple[str, OpenCall]


class Stamper:
    """Stamps the modules of models as they run, and as backward runs their autograd nodes.

    Backward allocations do not have Python frames, so hooks on autograd nodes attribute them to modules. In the first
    two steps, each node has a hook that stamps its name and the module that created it. In later steps, only the nodes
    have one at which backward enters the code of another module; C++ frames then show which node runs.

    Compiled modules are left alone: what runs inside them would become part of their graph.

    Args:
        emit: callback that receives the stamp's text, on the thread that allocates next.
        saved: notes the tensors that the nodes of the first two steps have saved; None: they are not noted.
        names_all_nodes: whether each node has a hook in later steps, too.
    """

    def __init__(
        self, emit: Callable[[str], None], saved: SavedTensors | None = None, *, names_all_nodes: bool = True
    ) -> None:
        self._emit, self._saved, self._names_all_nodes = emit, saved, names_all_nodes
        self._detailed_until = _DETAILED_STEPS
        self._is_blind = self._is_open = False
        self._names: dict[int, _Name] = {}
        self._hooks: dict[str, Hook] = {}
        self._patches = Patches()
        self.text = ""
        self.enter(step=0, phase=Phase.BUILD)

    def enter(self, *, step: int, phase: Phase) -> None:
        """Stamp the following events with a phase and no module."""
        self._step, self._phase, self._prefix = step, phase, Stamp.prefix(step=step, phase=phase)
        self._is_detailed = self._names_all_nodes or step <= self._detailed_until
        # the innermost module that runs
        self._module = ""
        if phase not in (Phase.FORWARD, Phase.BACKWARD):
            # what a forward pass computes outside of its models
            self._call = OpenCall(self._hook_of(""))
        self.stamp(f"{self._prefix};")

    def open(self) -> None:
        """Stamp the attached modules whenever they run, until `close`; for loops whose phases the caller knows."""
        self._is_open = True
        replace_calls(self._patches, observer=self)

    def attach(self, model: nn.Module, *, fixed: bool = True) -> None:
        """Stamp the modules of `model` by their dotted names.

        Args:
            fixed: keep these names, even if a module that contains the model runs later.
        """
        for text, module in _eager_modules(model):
            known = self._names.get(id(module))
            if known is None or known.module() is not module:
                # called with the reference, which is what `pop` returns for a name that is gone
                forget = partial(self._names.pop, id(module))
                self._names[id(module)] = _Name(text, fixed, ref(module, forget))
            elif fixed or (not known.fixed and len(text) > len(known.text)):
                known.text, known.fixed, known.hook = text, fixed, None

    def is_attached(self, module: nn.Module) -> bool:
        known = self._names.get(id(module))
        return known is not None and known.module() is module

    def detail_until(self, step: int) -> None:
        """Hook all nodes, and note saved tensors, up to the end of a step."""
        self._detailed_until = step
        self._is_detailed = True

    def close(self) -> None:
        # hooks on nodes may still run
        self._emit = lambda _text: None
        if self._is_open:
            release_calls()
            self._patches.undo()
        self._names.clear()

    def stamp(self, text: str) -> None:
        self.text = text
        self._emit(text)

    def begin(
        self, module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> "_Usual | _Running | None":
        """Stamp a module that is called, if it is attached. A step of a large model calls this thousands of times."""
        # a module that is gone has no name
        name = self._names.get(id(module))
        if name is None:
            return None
        # where checkpointing runs a layer again, the node that needs it continues afterwards
        recomputes = self._phase is Phase.BACKWARD
        running: _Usual | _Running
        has_gradients = torch.is_grad_enabled()
        if self._is_detailed or recomputes or self._is_blind or not has_gradients:
            running = _Running(name.text, self.text, self._module, recomputes)
            if self._is_detailed and has_gradients:
                self._label_tensors((arguments, named), self._module, runs=not recomputes)
        else:
            outer = self._call
            running = self._module, outer
            hook = name.hook
            if hook is None:
                hook = name.hook = self._hook_of(name.text)
            try:
                self._call = outer.call((*arguments, named) if named else arguments, hook)
            except Exception as error:
                self._go_blind(error)
                self._call = OpenCall(hook)
        self._module = name.text
        self.text = text = f"{self._prefix}{name.text};{RECOMPUTE if recomputes else ''}"
        self._emit(text)
        return running

    def end(self, running: "_Usual | _Running", output: Any, *, failed: bool = False) -> None:
        """Look at what a module returns, and stamp what its caller does next."""
        if isinstance(running, _Running):
            if self._is_detailed and not failed and torch.is_grad_enabled():
                self._label_tensors(output, running.name, runs=not running.recomputes)
            outer, text = running.outer, running.text
            if not running.recomputes:
                # a backward pass inside the forward pass has left the stamp of its last node
                text = f"{self._prefix}{outer};"
        else:
            outer, outer_call = running
            now = sequence_number()
            if not failed:
                try:
                    self._call.finish(output, now)
                except Exception as error:
                    self._go_blind(error)
            self._call = outer_call
            outer_call.leave_inner(now)
            text = f"{self._prefix}{outer};"
        self._module = outer
        self.text = text
        self._emit(text)

    def _go_blind(self, error: Exception) -> None:
        """Training goes on where containers and nodes of other packages raise anything."""
        self._is_blind = True
        warnings.warn(f"backward is recorded without modules: {type(error).__name__}: {error}", stacklevel=3)

    def label_outputs(self, outputs: Any) -> None:
        """Label the nodes of a model that ran without stamps, such as those of a compiled model."""
        if self._is_detailed:
            self._label_tensors(outputs, "")

    def label_loss(self, loss: Any) -> None:
        """Label the nodes of the loss function: those between the model's modules and the loss."""
        if self._is_detailed:
            self._label_tensors(loss, _LOSS)
            return
        try:
            self._call.finish(loss, sequence_number(), self._hook_of(_LOSS))
        except Exception as error:
            self._go_blind(error)

    def _label_tensors(self, values: Any, name: str, *, runs: bool = True) -> None:
        """Label the nodes of all tensors in nested containers."""
        if self._is_blind:
            return
        try:
            for tensor in _tensors(values):
                self._label(tensor.grad_fn, name, runs=runs)
        except Exception as error:
            self._go_blind(error)

    def _label(self, root: Node | None, name: str, *, runs: bool = True) -> None:
        """Label the nodes that have no label yet; those of a recomputation do not run.

        Backward walks the graph of the first forward pass.
        """
        pending = [root]
        while pending:
            node: Any = pending.pop()
            # metadata belongs to the C++ node: it marks the node as labelled without keeping it alive
            if node is None or _LABEL in node.metadata:
                continue
            node.metadata[_LABEL] = name
            if runs:
                node.register_prehook(self._on_node(name, node.name()))
            if self._saved is not None and self._step <= self._detailed_until:
                self._saved.note(node, name)
            pending.extend(following for following, _ in node.next_functions)

    def _on_node(self, module: str, node: str) -> Callback:
        def hook(_gradients: Any) -> None:
            self.text = text = f"{self._prefix}{module};{node}"
            self._emit(text)

        return hook

    def _hook_of(self, module: str) -> Hook:
        """The hook for all nodes at which backward enters a module."""
        if module not in self._hooks:
            self._hooks[module] = Hook(self._on_node(module, ""))
        return self._hooks[module]


def _eager_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of a model, except those that run inside a compiled graph."""
    seen: set[nn.Module] = set()
    pending = [("", model)]
    while pending:
        name, module = pending.pop()
        # module.compile() compiles the module's hooks as well; those of what torch.compile(module) returns stay outside
        if module in seen or module._compiled_call_impl is not None:
            continue
        seen.add(module)
        yield _WRAPPERS.sub("", name).removeprefix("."), module
        if _COMPILED not in module._modules:
            children = [(f"{name}.{own}" if name else own, child) for own, child in module.named_children()]
            pending.extend(reversed(children))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, tuple, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
