"""Keep the allocator's stamp up to date: the running phase, module and autograd node."""

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from ligerprof.roles import Phase
from ligerprof.runs.recording.saved import SavedTensors
from ligerprof.snapshots.stamp import Stamp

_LABEL = "ligerprof.module"
# noting costs a tenth of a short step; in later steps, the node that frees a block shows what kept it
_NOTED_STEPS = 2
# what torch.compile, FSDP and checkpoint_wrapper put into the names of a model's modules
_COMPILED = "_orig_mod"
_WRAPPERS = re.compile(rf"(?:^|\.)(?:{_COMPILED}|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")


@dataclass(slots=True)
class _Name:
    """The dotted name of a module, which changes when a module that contains its model is attached.

    Attributes:
        fixed: whether the program itself attached the model.
    """

    text: str
    fixed: bool


class Stamper:
    """Stamps the modules of models as they run.

    Forward hooks stamp a module while it runs, and label each autograd node that it created outside its submodules
    with its name. A hook on the node sets the stamp when backward reaches it, so that backward allocations, which
    do not have Python frames, are attributed to a module.

    Compiled modules are left alone: hooks would become part of their graph, and removing them would compile it again.

    Args:
        emit: callback that receives the stamp's text, on the thread that allocates next.
        saved: notes the tensors that the nodes of the first two stamped steps have saved; None: they are not noted.
    """

    def __init__(self, emit: Callable[[str], None], saved: SavedTensors | None = None) -> None:
        self._emit, self._saved = emit, saved
        self._step, self._noted_until = 0, _NOTED_STEPS
        self._phase = Phase.BUILD
        self._is_blind = False
        self._handles: list[RemovableHandle] = []
        self._names: WeakKeyDictionary[nn.Module, _Name] = WeakKeyDictionary()
        self.enter(step=0, phase=Phase.BUILD)

    def enter(self, *, step: int, phase: Phase) -> None:
        """Stamp the following events with a phase and no module."""
        self._step, self._phase = step, phase
        self._stamp("")

    def attach(self, model: nn.Module, *, fixed: bool = True) -> None:
        """Hook each module of `model`; stamps contain its dotted name.

        Args:
            fixed: keep these names, even if a module that contains the model runs later.
        """
        for name, module in _eager_modules(model):
            known = self._names.get(module)
            if known is None:
                self._hook(module, _Name(name, fixed))
            elif fixed or (not known.fixed and len(name) > len(known.text)):
                known.text, known.fixed = name, fixed

    def is_attached(self, module: nn.Module) -> bool:
        """Whether a module has hooks."""
        return module in self._names

    def note_saved_until(self, step: int) -> None:
        """Note saved tensors up to the end of a step."""
        self._noted_until = step

    def close(self) -> None:
        """Remove the hooks from the models, and stamp nothing from now on."""
        self._emit = _ignore
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._names.clear()

    def _hook(self, module: nn.Module, name: _Name) -> None:
        try:
            before = module.register_forward_pre_hook(self._before(name), with_kwargs=True)
            self._handles += [before, module.register_forward_hook(self._after(name))]
        except RuntimeError:
            # a scripted module
            return
        self._names[module] = name

    def _stamp(self, module: str, node: str = "", *, recompute: bool = False) -> None:
        stamp = Stamp(step=self._step, phase=self._phase, module=module, node=node, recompute=recompute)
        self._emit(stamp.to_text())

    def _before(self, name: _Name) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: Any, named_inputs: Any) -> None:
            # a compiled function that calls the module inlines this hook: it must not break the graph
            if torch.compiler.is_compiling():
                return
            recompute = self._phase is Phase.BACKWARD
            # the enclosing module created the nodes without a label
            self._label_tensors((inputs, named_inputs), name.text.rpartition(".")[0], runs=not recompute)
            self._stamp(name.text, recompute=recompute)

        return hook

    def _after(self, name: _Name) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            recompute = self._phase is Phase.BACKWARD
            self._label_tensors(output, name.text, runs=not recompute)
            self._stamp(name.text.rpartition(".")[0], recompute=recompute)

        return hook

    def label_outputs(self, outputs: Any) -> None:
        """Label the nodes of a model that its hooks did not label, such as those of a compiled model."""
        self._label_tensors(outputs, "")

    def label_loss(self, loss: Any) -> None:
        """Label the nodes of the loss function: those between the model's modules and the loss."""
        self._label_tensors(loss, "loss")

    def _label_tensors(self, values: Any, name: str, *, runs: bool = True) -> None:
        """Label the nodes of all tensors in nested containers; training goes on if that fails."""
        if self._is_blind:
            return
        try:
            for tensor in _tensors(values):
                self._label(tensor.grad_fn, name, runs=runs)
        except Exception as error:
            # containers and nodes of other packages may raise anything
            self._is_blind = True
            warnings.warn(f"backward is recorded without modules: {type(error).__name__}: {error}", stacklevel=2)

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
            if self._saved is not None and self._step <= self._noted_until:
                self._saved.note(node, name)
            pending.extend(following for following, _ in node.next_functions)

    def _on_node(self, module: str, node: str) -> Callable[..., None]:
        def hook(_gradients: Any) -> None:
            self._stamp(module, node)

        return hook


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


def _ignore(_text: str) -> None:
    """Receive a stamp of a closed recorder, from hooks on nodes that still run."""


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, tuple, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
