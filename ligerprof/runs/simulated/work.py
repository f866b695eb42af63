"""Count the work of a step that runs on the simulated GPU: every operator, with its shapes and dtypes."""

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ligerprof.analyzers.step_time.work import Host, Kind, Ledger, Part, Work, product
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Phase
from ligerprof.runs.outcome import Progress
from ligerprof.runs.simulated.rank import GPU, machine_for, simulated_trainer
from ligerprof.runs.training import make_batch, train_step
from ligerprof.simulated_gpu import patches
from ligerprof.simulated_gpu.values import tensors_in

aten = torch.ops.aten
_NAMES = {torch.bfloat16: "bf16", torch.float16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
# the operands of products among the arguments, by operator
_PRODUCTS = {
    aten.mm: (0, 1),
    aten.bmm: (0, 1),
    aten.addmm: (1, 2),
    aten.baddbmm: (1, 2),
    aten._addmm_activation: (1, 2),
}
_ATTENTION = {"flash": "flash", "cudnn": "cudnn", "efficient": "efficient"}
_OVERWRITES = ("copy_", "fill_", "zero_", "_copy_from")
_NO_KERNEL = ("record_stream", "set_", "detach", "alias", "_local_scalar_dense", "_unsafe_view")
_GATHERS = ("embedding", "index", "gather", "scatter")
_REDUCES = ("sum", "mean", "norm", "max", "min", "amax", "argmax", "cumsum", "logsumexp")
_SOFTENS = ("softmax", "nll", "layer_norm", "cross_entropy")


def count_here(recipe: TrainingRecipe, progress: Progress) -> Ledger:
    """The work of a steady step, in a process that has not simulated before and ends afterwards.

    Raises:
        LigerprofError: as `simulate_step` does.
    """
    # from the second micro-batch on, gradients are added to those before
    micro_batches = min(recipe.grad_accum, 2)
    machine = machine_for(recipe, endless=True)
    progress(f"counting the work of {recipe.spec.name} on a simulated {recipe.gpu_spec.title}")
    with simulated_trainer(dataclasses.replace(recipe, grad_accum=micro_batches)) as trainer:
        batch = make_batch(recipe, GPU)
        counter = WorkCounter(trainer.model)
        train_step(trainer, batch, counter)
        counter.ledgers.clear()
        machine.operators.ran = counter.ran
        patches.launch_observers.append(counter.launched)
        train_step(trainer, batch, counter)
    whole = Ledger()
    for ledger, times in zip(counter.ledgers, (1, recipe.grad_accum - 1), strict=False):
        whole.add_all(ledger, times)
    for ledger in counter.ledgers[micro_batches:]:
        whole.add_all(ledger)
    return whole


class WorkCounter:
    """Observes training steps: a ledger per micro-batch, and one for the optimizer.

    Args:
        model: has a list of layers; what runs after the last one and before its gradient is there is the loss.
    """

    def __init__(self, model: nn.Module) -> None:
        self.ledgers: list[Ledger] = []
        self._phase: Phase | None = None
        self._in_loss = False
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
        if lists:
            max(lists, key=len)[-1].register_forward_hook(self._last_layer)

    def _last_layer(self, _layer: nn.Module, _arguments: Any, output: Any) -> None:
        hidden = next(iter(tensors_in(output)))
        if self._phase is Phase.FORWARD:
            self._in_loss = True
            if hidden.requires_grad:
                hidden.register_hook(self._gradient_arrives)

    def _gradient_arrives(self, _gradient: Tensor) -> None:
        self._in_loss = False

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """A phase of the step."""
        if phase in (Phase.FORWARD, Phase.OPTIMIZER):
            self.ledgers.append(Ledger())
            self._in_loss = False
        self._phase = phase
        yield
        self._phase = None

    def loss_made(self, loss: Tensor) -> None:
        """Do nothing: the loss is known by its sizes."""

    def ran(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Count an operator."""
        if self._phase is None or func._schema.name.removeprefix("aten::") in _NO_KERNEL:
            return
        is_product = func.overloadpacket in _PRODUCTS
        if self._phase is Phase.BACKWARD and not torch.is_grad_enabled():
            host = Host.BACKWARD
        else:
            host = Host.OPTIMIZER if self._phase is Phase.OPTIMIZER else Host.OPERATOR
        work = _product(func, args, result) if is_product else _other(func, args, kwargs, result)
        self.ledgers[-1].add(self._part(), work, host)

    def launched(self, arguments: Any) -> None:
        """Count a launch of a kernel of Triton's, which reads or writes each of its tensors."""
        if self._phase is None:
            return
        tensors = list(tensors_in(arguments))
        moved_bytes = sum(map(_bytes_of, _distinct(tensors)))
        self.ledgers[-1].add(self._part(), Work(Kind.MEMORY, "triton", moved_bytes), Host.TRITON)

    def _part(self) -> Part:
        if self._phase is Phase.OPTIMIZER:
            return Part.OPTIMIZER
        if self._in_loss:
            return Part.LOSS
        if self._phase is Phase.FORWARD:
            return Part.FORWARD
        return Part.RECOMPUTE if torch.is_grad_enabled() or _is_recomputing() else Part.BACKWARD


def _is_recomputing() -> bool:
    """Whether a function that autograd does not record runs in a layer that checkpointing runs again."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_name != "recompute_fn":
        frame = frame.f_back
    return frame.f_back is not None


def _product(func: Any, args: Sequence[Any], result: Tensor) -> Work:
    first, second = _PRODUCTS[func.overloadpacket]
    left, right = args[first], args[second]
    *batch, m, k = left.shape
    return product(_dtype(left), prod(batch), m, right.shape[-1], k, left.element_size())


def _dtype(tensor: Tensor) -> str:
    name = _NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    return "tf32" if name == "fp32" and torch.backends.cuda.matmul.allow_tf32 else name


def _other(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Work | None:
    name = func._schema.name.removeprefix("aten::")
    if name.startswith("_scaled_dot_product") and (kernel := next((k for k in _ATTENTION if k in name), None)):
        return _attention(name, kernel, args)
    if name == "_grouped_mm":
        left, right = args[0], args[1]
        groups = right.shape[0] if right.dim() == 3 else result.shape[0]
        m, n = (left.shape[0] // groups, right.shape[-1]) if right.dim() == 3 else (left.shape[-2], right.shape[-1])
        k = left.shape[-1] if right.dim() == 3 else left.shape[-1] // groups
        return product(_dtype(left), groups, m, n, k, left.element_size())
    given = list(tensors_in((args, tuple(kwargs.values()))))
    on_host = [tensor for tensor in given if not tensor.is_cuda and tensor.dim()]
    if on_host and name in _OVERWRITES:
        return Work(Kind.TRANSFER, "to-gpu" if args[0].is_cuda else "to-host", _bytes_of(args[0]))
    read = given[1:] if name in _OVERWRITES else given
    written = [
        tensor
        for argument, value in zip(func._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(value)
    ] or list(tensors_in(result))
    if name == "embedding":
        # the rows of the result, of a table
        read = written
    moved_bytes = sum(map(_bytes_of, _distinct(read))) + sum(map(_bytes_of, written))
    return Work(Kind.MEMORY, _way(name, given), moved_bytes)


def _attention(name: str, kernel: str, args: Sequence[Any]) -> Work:
    is_backward = "backward" in name
    query, key = args[1:3] if is_backward else args[:2]
    batch, heads, queries, width = query.shape
    # in forward after the mask, the statistics and the dropout; in backward the last flag
    causal = [value for value in args if isinstance(value, bool)][-1:]
    shape = (batch, heads, queries, key.shape[-2], width)
    return Work(Kind.ATTENTION, kernel, 0, shape, bool(causal and causal[0]), is_backward)


def _way(name: str, given: Sequence[Tensor]) -> str:
    """How a kernel moves bytes, by which its rate is known."""
    if any(word in name for word in _GATHERS):
        return "gather"
    if any(word in name for word in _SOFTENS):
        return "softmax"
    if name in _OVERWRITES and len(given) > 1 and given[0].stride() != given[1].stride():
        return "transpose"
    if any(name.removeprefix("_foreach_").startswith(word) for word in _REDUCES):
        return "reduce"
    return "foreach" if name.startswith(("_foreach", "_fused")) else "pointwise"


def _bytes_of(tensor: Tensor) -> int:
    """Bytes of memory that a tensor shows: an expanded axis is read once."""
    return tensor.element_size() * prod(
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 0
    )


def _distinct(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    seen = set()
    for tensor in tensors:
        key = (tensor.data_ptr() if tensor.is_cuda else id(tensor), tensor.shape)
        if key not in seen:
            seen.add(key)
            yield tensor
