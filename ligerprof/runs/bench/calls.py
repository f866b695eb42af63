"""Call one provider's kernel on one set of tensors: forward, backward or both, any number of times."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ligerprof.runs.bench.operations import Maker, Operation, Outputs, Tensors
from ligerprof.runs.bench.providers import Provided
from ligerprof.runs.bench.records import Direction
from ligerprof.runs.bench.shapes import BenchShape
from ligerprof.runs.bench.timing import Candidate
from ligerprof.text import error_line


@dataclass(frozen=True, kw_only=True, slots=True)
class CallTensors:
    """Inputs and the outputs' gradients, with copies, since some kernels overwrite both."""

    inputs: Tensors
    gradients: Outputs
    pristine_inputs: Tensors
    pristine_gradients: Outputs

    def restore(self) -> None:
        """Restore the original values."""
        with torch.no_grad():
            for name, value in self.pristine_inputs.items():
                self.inputs[name].copy_(value)
            for gradient, value in zip(self.gradients, self.pristine_gradients, strict=True):
                gradient.copy_(value)


def make_tensors(operation: Operation, shape: BenchShape, maker: Maker) -> CallTensors:
    """Random inputs, and random gradients of the outputs (one for a loss)."""
    inputs = operation.make(shape, maker)
    gradients = tuple(
        maker.normal(*sizes) if sizes else torch.ones((), device=maker.device)
        for sizes in operation.output_sizes(shape)
    )
    return wrap_tensors(operation, inputs, gradients)


def wrap_tensors(operation: Operation, inputs: Tensors, gradients: Outputs) -> CallTensors:
    """Copy the tensors. The inputs that need a gradient are copies of leaves: kernels write over no leaf."""
    pristine = {name: inputs[name].requires_grad_(True) for name in operation.wants}  # noqa: FBT003 - torch's signature
    return CallTensors(
        inputs={**inputs, **{name: value.clone() for name, value in pristine.items()}},
        gradients=gradients,
        pristine_inputs=pristine,
        pristine_gradients=tuple(gradient.clone() for gradient in gradients),
    )


class BoundCall:
    """A provider's kernel and the tensors to call it on."""

    def __init__(self, operation: Operation, provided: Provided, tensors: CallTensors) -> None:
        self.name = provided.name
        self._operation, self._provided, self._tensors = operation, provided, tensors
        self._pending: Outputs = ()

    def forward(self) -> Outputs:
        """The outputs, with the graph that backward needs."""
        provided = self._provided
        return self._operation.call(provided.kernel, self._tensors.inputs, provided.options)

    def backward(self, outputs: Outputs) -> Outputs:
        """Gradients of the inputs that need one, without accumulation into `.grad`."""
        wanted = [self._tensors.inputs[name] for name in self._operation.wants]
        given = zip(self._tensors.gradients, outputs, strict=True)
        gradients = [gradient.to(output.dtype) for gradient, output in given]
        return torch.autograd.grad(outputs, wanted, gradients)

    def full(self) -> Outputs:
        """Forward and backward: the gradients."""
        return self.backward(self.forward())

    def results(self) -> tuple[Tensor, ...]:
        """Outputs and gradients from restored tensors, in the order of `result_names`."""
        self._tensors.restore()
        outputs = self.forward()
        # some kernels overwrite their outputs in backward
        kept = tuple(output.detach().clone() for output in outputs)
        return (*kept, *self.backward(outputs))

    def candidate(self, direction: Direction) -> Candidate:
        """The candidate to time for one direction."""
        if direction is Direction.BACKWARD:
            return Candidate(name=self.name, prepare=self._prepare_backward, run=self._run_backward)
        run = self.forward if direction is Direction.FORWARD else self.full
        return Candidate(name=self.name, prepare=self._tensors.restore, run=run)

    def _prepare_backward(self) -> None:
        self._tensors.restore()
        self._pending = self.forward()

    def _run_backward(self) -> None:
        outputs, self._pending = self._pending, ()
        self.backward(outputs)


def describe_failure(error: Exception) -> str:
    """An exception in one line of at most 300 characters."""
    return error_line(error, 300)
