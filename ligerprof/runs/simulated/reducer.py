"""DistributedDataParallel's reducer, which is C++ code that reads the memory of tensors: its buckets in Python.

torch/csrc/distributed/c10d/reducer.cpp, without unused parameters and communication hooks. A gradient is copied into
its bucket when autograd has accumulated it; the sums are copied back when the backward pass ends, unless gradients are
views of buckets. The buckets of the first step hold the parameters in the order of the model, and the next forward pass
makes them again in the order in which gradients arrived.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(slots=True)
class _Bucket:
    """A bucket, with the view of it for each parameter."""

    flat: Tensor
    parameters: list[int]
    views: list[Tensor]
    pending: int


class PythonReducer:
    """The methods of torch's Reducer that DistributedDataParallel calls."""

    def __init__(  # noqa: PLR0913, PLR0917 - torch's signature
        self,
        parameters: Sequence[nn.Parameter],
        bucket_indices: Sequence[Sequence[int]],
        per_bucket_size_limits: Sequence[int],
        process_group: Any,
        expect_sparse_gradients: Sequence[bool],
        bucket_bytes_cap: int,
        find_unused_parameters: bool,
        gradient_as_bucket_view: bool,
        param_to_name_mapping: Any,
        first_bucket_bytes_cap: int,
        *_others: Any,
    ) -> None:
        del per_bucket_size_limits, expect_sparse_gradients, find_unused_parameters, param_to_name_mapping
        self._parameters, self._group = list(parameters), process_group
        self._limits = [first_bucket_bytes_cap, bucket_bytes_cap]
        self._grads_are_views = gradient_as_bucket_view
        self._buckets = self._make_buckets(bucket_indices)
        self._arrived: list[int] = []
        self._rebuilt = self._expects_gradients = False
        # NCCL's communications keep their tensors until a later one starts
        self._in_flight: list[_Bucket] = []
        for index, parameter in enumerate(self._parameters):
            accumulated: Any = parameter
            accumulated.register_post_accumulate_grad_hook(self._hook(index))

    def set_logger(self, logger: Any) -> None:
        """Do nothing."""

    def prepare_for_forward(self) -> None:
        """Do nothing."""

    def prepare_for_backward(self, _outputs: Sequence[Tensor]) -> None:
        """Expect every gradient once."""
        self._expects_gradients = True
        for bucket in self._buckets:
            bucket.pending = len(bucket.parameters)

    def _rebuild_buckets(self) -> bool:
        """Make the buckets again after the first reduced step; True if this call did."""
        if self._rebuilt or not self._arrived:
            return False
        tensors = [self._parameters[index] for index in self._arrived]
        c10d: Any = dist
        indices, _ = c10d._compute_bucket_assignment_by_size(tensors, self._limits, [], self._arrived)
        self._in_flight, self._buckets, self._rebuilt = self._buckets, [], True
        self._buckets = self._make_buckets(indices)
        return True

    def _make_buckets(self, indices: Sequence[Sequence[int]]) -> list[_Bucket]:
        return [self._make_bucket(list(members)) for members in indices]

    def _make_bucket(self, members: list[int]) -> _Bucket:
        parameters = [self._parameters[index] for index in members]
        flat = torch.empty(
            sum(item.numel() for item in parameters), dtype=parameters[0].dtype, device=parameters[0].device
        )
        pieces = torch.split(flat, [item.numel() for item in parameters])
        views = [piece.view(item.shape) for piece, item in zip(pieces, parameters, strict=True)]
        return _Bucket(flat, members, views, len(members))

    def _hook(self, index: int) -> Any:
        def accumulated(parameter: Tensor) -> None:
            if self._expects_gradients:
                self._mark_ready(index, parameter)

        return accumulated

    def _mark_ready(self, index: int, parameter: Tensor) -> None:
        if not self._rebuilt:
            self._arrived.append(index)
        bucket = next(item for item in self._buckets if index in item.parameters)
        view, gradient = bucket.views[bucket.parameters.index(index)], parameter.grad
        assert gradient is not None
        with torch.no_grad():
            if gradient.untyped_storage()._cdata != view.untyped_storage()._cdata:
                view.copy_(gradient)
                if self._grads_are_views:
                    parameter.grad = view
        bucket.pending -= 1
        if bucket.pending == 0:
            self._in_flight = []
            if all(item.pending == 0 for item in self._buckets):
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._finalize)

    def _finalize(self) -> None:
        """Copy the sums back to the gradients."""
        self._expects_gradients = False
        if self._grads_are_views:
            return
        with torch.no_grad():
            for bucket in self._buckets:
                for index, view in zip(bucket.parameters, bucket.views, strict=True):
                    gradient = self._parameters[index].grad
                    assert gradient is not None
                    gradient.copy_(view)


class _Logger:
    """torch's logger of DDP: every method does nothing."""

    def __init__(self, _reducer: Any) -> None:
        pass

    def __getattr__(self, _name: str) -> Any:
        return lambda *_args, **_kwargs: None


@contextmanager
def ddp_in_python() -> Iterator[None]:
    """Give DistributedDataParallel a reducer that works on fake tensors."""
    from torch.nn.parallel import distributed

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(dist, "Reducer", PythonReducer))
        stack.enter_context(mock.patch.object(dist, "Logger", _Logger))
        stack.enter_context(mock.patch.object(distributed, "_verify_param_shape_across_processes"))
        yield
