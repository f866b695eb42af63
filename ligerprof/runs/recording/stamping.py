"""Keep the allocator's stamp up to date: the running phase, module and autograd node."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from ligerprof.roles import Phase
from ligerprof.runs.recording.saved import SavedTensors
from ligerprof.snapshots.stamp import Stamp

_LABEL = "ligerprof.module"
# noting costs a tenth of a short step; in later steps, the node that frees a block shows what kept it
_NOTED_STEPS = 2


class Stamper:
    """Stamps the modules of a model as they run.

    Forward hooks stamp a module while it runs, and label each autograd node that it created outside its submodules
    with its name. A hook on the node sets the stamp when backward reaches it, so that backward allocations, which
    do not have Python frames, are attributed to a module.

    Args:
        emit: callback that receives the stamp's text, on the thread that allocates next.
        saved: notes the tensors that the nodes of the first two steps have saved; None: they are not noted.
    """

    def __init__(self, emit: Callable[[str], None], saved: SavedTensors | None = None) -> None:
        self._emit, self._saved = emit, saved
        self._step = 0
        self._phase = Phase.BUILD
        self._handles: list[RemovableHandle] = []
        self.enter(step=0, phase=Phase.BUILD)

    def enter(self, *, step: int, phase: Phase) -> None:
        """Stamp the following events with a phase and no module."""
        self._step, self._phase = step, phase
        self._stamp("")

    def attach(self, model: nn.Module) -> None:
        """Hook each module of `model`; stamps contain its dotted name."""
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after(name)))

    def detach(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _stamp(self, module: str, node: str = "", *, recompute: bool = False) -> None:
        stamp = Stamp(step=self._step, phase=self._phase, module=module, node=node, recompute=recompute)
        self._emit(stamp.to_text())

    def _before(self, name: str) -> Callable[..., None]:
        parent = name.rpartition(".")[0]

        def hook(_module: nn.Module, inputs: Any, named_inputs: Any) -> None:
            recompute = self._phase is Phase.BACKWARD
            # the enclosing module created the nodes without a label
            for tensor in _tensors((inputs, named_inputs)):
                self._label(tensor.grad_fn, parent, runs=not recompute)
            self._stamp(name, recompute=recompute)

        return hook

    def _after(self, name: str) -> Callable[..., None]:
        parent = name.rpartition(".")[0]

        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            recompute = self._phase is Phase.BACKWARD
            for tensor in _tensors(output):
                self._label(tensor.grad_fn, name, runs=not recompute)
            self._stamp(parent, recompute=recompute)

        return hook

    def label_loss(self, loss: Tensor) -> None:
        """Label the nodes of the loss function: those between the model's modules and the loss."""
        self._label(loss.grad_fn, "loss")

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
            if self._saved is not None and self._step <= _NOTED_STEPS:
                self._saved.note(node, name)
            pending.extend(following for following, _ in node.next_functions)

    def _on_node(self, module: str, node: str) -> Callable[..., None]:
        def hook(_gradients: Any) -> None:
            self._stamp(module, node)

        return hook


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, tuple, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
