"""Memory that CUDA's implementations of operators allocate and that no dispatch mode sees.

Each entry of INTERNALS runs an operator with the temporaries of its CUDA kernel; their sizes come from torch_memory.
"""

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ligerprof.simulated_gpu.attention import problem_of
from ligerprof.simulated_gpu.device import Device
from ligerprof.simulated_gpu.plans import GPU
from ligerprof.simulated_gpu.values import tensors_in
from ligerprof.torch_memory import layer_norm, softmax
from ligerprof.torch_memory.attention import AttentionKernel, backward_scratch, flash_split_sizes, forward_scratch
from ligerprof.torch_memory.chunked_losses import LinearCrossEntropy
from ligerprof.torch_memory.dtypes import FP32_BYTES, Scratch, dtype_name, together
from ligerprof.torch_memory.libraries import LT_WORKSPACE_BYTES, svd_scratch
from ligerprof.torch_memory.reductions import VECTOR, axes_of, norm_partials_bytes, reduction_scratch, sum_vector
from ligerprof.torch_memory.sorting import (
    POW_BASE_SCRATCH,
    EmbeddingGradient,
    accumulation_scratch,
    cumsum_scratch,
    embedding_gradient,
    index_copies,
    masked_scatter_scratch,
    sort_scratch,
    sorted_gradient,
)

aten = torch.ops.aten


class Call:
    """An operator that is about to run; a model of CUDA's internals says when its results are allocated.

    Args:
        planned: makes the operator's results, on the GPU or, with `on_meta`, without blocks.
    """

    def __init__(self, device: Device, func: Any, args: Any, kwargs: Any, planned: Callable[..., Any]) -> None:
        self.device, self.func, self.args, self.kwargs = device, func, tuple(args), dict(kwargs)
        self._planned = planned
        # tensors without blocks, and those on the GPU in their places, by the id of the first
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def run(self) -> Any:
        """Run the operator and allocate blocks for its result."""
        return self._planned(on_meta=False)

    def run_untracked(self) -> Any:
        """Run the operator without allocating blocks for its result."""
        return self._planned(on_meta=True)

    def track(self, value: Any) -> None:
        """Allocate blocks for the storages of new tensors, in order."""
        for tensor in tensors_in(value):
            if tensor.is_meta and id(tensor) not in self._made:
                real = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=GPU)
                self._made[id(tensor)] = tensor, real

    def real(self, value: Any) -> Any:
        """A result with tensors on the GPU; what was not tracked is in main memory, such as the seed of dropout."""
        if isinstance(value, Tensor) and value.is_meta:
            found = self._made.get(id(value))
            return torch.empty_like(value, device="cpu") if found is None else found[1]
        return type(value)([self.real(item) for item in value]) if isinstance(value, (list, tuple)) else value

    def run_with_scratch(self, scratch: Callable[[Any], Scratch]) -> Any:
        """Run the operator, then allocate and free the scratch blocks that follow from its result."""
        result = self.run()
        self.device.run_scratch(scratch(result))
        return result

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """An argument of the schema, passed by position or by name."""
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)


Internal = Callable[[Call], Any]


# of nn.EmbeddingBag
_MAX_MODE = 2


def _embedding_dense_backward(call: Call) -> Any:
    """Allocate and free in the order of torch_memory/embedding.py."""
    gradient, indices, rows = call.args[:3]
    blocks = embedding_gradient(indices.numel(), rows, gradient.shape[-1], width=indices.element_size())
    return call.run() if blocks is None else _sum_sorted_rows(call, blocks)


def _embedding_bag_dense_backward(call: Call) -> Any:
    """embedding_bag_backward_cuda_sum_avg."""
    gradient, indices = call.args[:2]
    rows, mode = call.args[5], call.args[7]
    if not indices.numel() or mode == _MAX_MODE:
        return call.run()
    blocks = sorted_gradient(indices.numel(), rows, gradient.shape[-1], width=indices.element_size())
    return _sum_sorted_rows(call, blocks)


def _sum_sorted_rows(call: Call, blocks: EmbeddingGradient) -> Any:
    held, touch = call.device.held, call.device.touch
    with held(blocks.index_bytes, blocks.index_bytes):
        touch(blocks.index_bytes, blocks.sort_bytes)
        result = call.run()
        with held(blocks.index_bytes, blocks.count_bytes):
            touch(blocks.index_bytes, blocks.rank_scan_bytes)
            with held(blocks.segment_bytes, blocks.segment_bytes):
                touch(blocks.segment_scan_bytes)
                touch(*blocks.part_sizes)
    return result


def _foreach_norm(call: Call) -> Any:
    with call.device.held(norm_partials_bytes(tensor.numel() for tensor in call.args[0])):
        return call.run()


def _index(call: Call) -> Any:
    indices = [index for index in call.args[1] if index is not None and index.dtype != torch.bool]
    if len(indices) < 2:
        return call.run()
    broadcast = torch.broadcast_tensors(*indices)  # type: ignore[no-untyped-call]
    described = [(item.stride(), item.numel() * item.element_size(), item.is_contiguous()) for item in broadcast]
    with call.device.held(*index_copies(described)):
        return call.run()


def _index_put(call: Call) -> Any:
    if not call.argument(3, "accumulate", default=False):
        return call.run()
    target = call.args[0]
    indexed = [(dim, index) for dim, index in enumerate(call.args[1]) if index is not None]
    if not indexed or any(index.dtype == torch.bool for _, index in indexed):
        return call.run()
    count = math.prod(torch.broadcast_shapes(*(index.shape for _, index in indexed)))  # type: ignore[no-untyped-call]
    rows = math.prod(target.shape[dim] for dim, _ in indexed)
    call.device.run_scratch(accumulation_scratch(count, len(indexed), rows))
    return call.run()


def _cumsum(call: Call) -> Any:
    source, dim = call.args[:2]

    def scratch(result: Any) -> tuple[int, ...]:
        cast_bytes = source.numel() * result.element_size() if source.dtype != result.dtype else 0
        return cumsum_scratch(source.numel(), source.shape[dim], cast_bytes=cast_bytes)

    return call.run_with_scratch(scratch)


def _masked_scatter(call: Call) -> Any:
    target, mask = call.args[:2]
    if target.numel():
        copies_mask = not mask.expand_as(target).is_contiguous()
        call.device.run_scratch(masked_scatter_scratch(target.numel(), copies_mask=copies_mask))
    return call.run()


def _native_layer_norm(call: Call) -> Any:
    """CUDA keeps the statistics in fp32 (torch_memory/layer_norm.py); a CPU keeps them in the input's dtype."""
    output, mean, deviation = call.run_untracked()
    if mean.element_size() == 2:
        mean = mean.new_empty(mean.shape, dtype=torch.float32)
        deviation = deviation.new_empty(deviation.shape, dtype=torch.float32)
    call.track((output, mean, deviation))
    return output, mean, deviation


def _native_layer_norm_backward(call: Call) -> Any:
    gamma = call.args[5]
    if gamma is None or gamma.numel() == 0:
        return call.run()
    columns, rows = gamma.numel(), call.args[1].numel() // gamma.numel()
    sizes = layer_norm.backward_scratch(rows, columns, gamma.element_size(), call.device.gpu)
    return call.run_with_scratch(lambda _: sizes)


def _native_group_norm(call: Call) -> Any:
    """aten/src/ATen/native/cuda/group_norm_kernel.cu: factors per channel, in fp32."""
    batch, channels = call.args[3], call.args[4]
    return call.run_with_scratch(lambda _: together(*2 * (batch * channels * FP32_BYTES,)))


def _native_group_norm_backward(call: Call) -> Any:
    batch, channels, groups = call.args[5], call.args[6], call.args[8]
    of_channels, of_groups = batch * channels * FP32_BYTES, batch * groups * FP32_BYTES
    return call.run_with_scratch(lambda _: together(of_channels, of_channels, of_groups, of_groups, of_channels))


def _sort(call: Call) -> Any:
    source = call.args[0]
    dim = call.argument(2 if call.func is aten.sort.stable else 1, "dim", -1)
    if source.dim() == 0 or source.numel() == 0:
        return call.run()
    inner = source.stride(dim) == 1 or source.shape[dim] == source.numel()
    return call.run_with_scratch(
        lambda _: sort_scratch(source.numel(), source.shape[dim], source.element_size(), inner=inner)
    )


def _roll(call: Call) -> Any:
    """Axes are rolled one after the other."""
    source = call.args[0]
    size_bytes = source.numel() * source.element_size()
    with call.device.held(*(size_bytes,) * (max(len(call.args[1]), 1) - 1)):
        return call.run()


def _native_dropout(call: Call) -> Any:
    """CUDA allocates the mask before the result (aten/src/ATen/native/cuda/Dropout.cu, dropout_cuda)."""
    output, mask = call.run_untracked()
    call.track((mask, output))
    return output, mask


def _softmax_backward(call: Call) -> Any:
    gradient, output = call.args[:2]
    dtypes = (dtype_name(gradient.dtype), dtype_name(output.dtype))
    return call.run_with_scratch(lambda _: softmax.backward_scratch(output.numel(), *dtypes))


def _safe_softmax(call: Call) -> Any:
    source, dim = call.args[:2]
    columns = max(source.shape[dim], 1)
    return call.run_with_scratch(
        lambda result: softmax.safe_scratch(source.numel() // columns, columns, result.element_size())
    )


def _svd(call: Call) -> Any:
    rows, columns = call.args[0].shape[-2:]
    return call.run_with_scratch(lambda _: svd_scratch(rows, columns))


def _linear_cross_entropy(call: Call) -> Any:
    """Allocate as on CUDA, whatever chunks torch chose for the CPU."""
    source, weight = call.args[:2]
    blocks = LinearCrossEntropy(
        tokens=source.shape[0],
        hidden=source.shape[1],
        vocab=weight.shape[0],
        width=source.element_size(),
        is_bfloat16=source.dtype == torch.bfloat16,
        input_gradient=call.argument(12, "compute_input_grad"),
        weight_gradient=call.argument(13, "compute_linear_weight_grad"),
        capability=call.device.gpu.compute_capability,
    )
    with call.device.held(*blocks.buffer_sizes):
        result = call.run()
        call.device.touch(*blocks.chunk_sizes)
    return result


def _chunked_losses() -> dict[Any, Internal]:
    """The operator of F.linear_cross_entropy, which torch 2.13 and later define when they first call it."""
    if importlib.util.find_spec("torch.nn.modules.linear_cross_entropy") is None:
        return {}
    importlib.import_module("torch.nn.modules.linear_cross_entropy")
    return {torch.ops.torch_nn._linear_cross_entropy_batch_chunked.default: _linear_cross_entropy}


OPERATOR_INTERNALS: dict[Any, Internal] = {
    **_chunked_losses(),
    aten.embedding_dense_backward.default: _embedding_dense_backward,
    aten._embedding_bag_dense_backward.default: _embedding_bag_dense_backward,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.index.Tensor: _index,
    aten._index_put_impl_.default: _index_put,
    aten.pow.Scalar: lambda call: call.run_with_scratch(lambda _: POW_BASE_SCRATCH),
    aten.cumsum.default: _cumsum,
    aten.masked_scatter_.default: _masked_scatter,
    aten.native_layer_norm.default: _native_layer_norm,
    aten.native_layer_norm_backward.default: _native_layer_norm_backward,
    aten.native_dropout.default: _native_dropout,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._safe_softmax.default: _safe_softmax,
    aten._linalg_svd.default: _svd,
    aten.native_group_norm.default: _native_group_norm,
    aten.native_group_norm_backward.default: _native_group_norm_backward,
    aten.sort.default: _sort,
    aten.sort.stable: _sort,
    aten.roll.default: _roll,
}


# run_cudnn_SDP_fprop (aten/src/ATen/native/cudnn/MHA.cpp): seed and offset, then the output and the statistics
_CUDNN_FORWARD_ORDER = (6, 7, 0, 1)


def _cudnn_forward(call: Call) -> Any:
    result = call.run_untracked()
    # the statistics are for the backward pass alone
    for index in _CUDNN_FORWARD_ORDER if call.argument(4, "compute_log_sumexp") else _CUDNN_FORWARD_ORDER[:-1]:
        call.track(result[index])
    call.device.run_scratch(forward_scratch(AttentionKernel.CUDNN, problem_of(*call.args[:3]), call.device.gpu))
    return result


def _flash_forward(call: Call) -> Any:
    """mha_fwd: allocate seed and offset after the partial outputs; dropout copies them."""
    dropout = call.argument(3, "dropout_p", 0.0)
    problem = replace(problem_of(*call.args[:3]), dropout=dropout)
    result = call.run_untracked()
    output, statistics, random_state, unused = (result[index] for index in (0, 1, 6, 7))
    call.track((output, statistics))
    partial = [call.device.allocate(size) for size in flash_split_sizes(problem, call.device.gpu)]
    call.track((random_state, unused))
    if dropout > 0.0:
        call.device.touch(random_state.numel() * random_state.element_size())
    for block in partial:
        call.device.release(block)
    return result


def _efficient_forward(call: Call) -> Any:
    """Seed and offset stay in host memory."""
    result = call.run_untracked()
    call.track(result[:2] if call.argument(4, "compute_log_sumexp") else result[0])
    call.device.run_scratch(forward_scratch(AttentionKernel.EFFICIENT, problem_of(*call.args[:3]), call.device.gpu))
    return result


def _backward(kernel: AttentionKernel) -> Internal:
    def run(call: Call) -> Any:
        inputs: Sequence[Tensor] = call.args[1:4]
        gradient = call.args[0]
        copied = _is_copied(kernel, gradient, call.args[4])
        with call.device.held(gradient.numel() * gradient.element_size() if copied else 0):
            return call.run_with_scratch(lambda _: backward_scratch(kernel, problem_of(*inputs)))

    return run


def _is_copied(kernel: AttentionKernel, gradient: Tensor, output: Tensor) -> bool:
    """Whether the output's gradient does not have the layout that the kernel reads."""
    if kernel is AttentionKernel.CUDNN:
        return gradient.stride() != output.stride()
    return kernel is AttentionKernel.EFFICIENT and not gradient.transpose(1, 2).is_contiguous()


ATTENTION_INTERNALS: dict[Any, Internal] = {
    aten._scaled_dot_product_cudnn_attention.default: _cudnn_forward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _backward(AttentionKernel.CUDNN),
    aten._scaled_dot_product_flash_attention.default: _flash_forward,
    aten._scaled_dot_product_flash_attention_backward.default: _backward(AttentionKernel.FLASH),
    aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: _backward(AttentionKernel.EFFICIENT),
}


def _product(call: Call) -> Any:
    """Allocate the workspace after the result (aten/src/ATen/cuda/CublasHandlePool.cpp).

    On a GPU, backward runs in a thread of autograd's, which has its own handle and workspace. A vector bias goes
    through cuBLASLt, which has its own workspace (getCUDABlasLtWorkspace).
    """
    # with `out`, nothing is allocated, and the shape functions of torch 2.11 fail
    result = call.kwargs["out"] if "out" in call.kwargs else call.run()
    hold_workspaces(call.device, call.args[0] if call.func.overloadpacket is aten.addmm else None)
    return result


def _scaled_product(call: Call) -> Any:
    """Only cuBLASLt multiplies float8 (scaled_gemm in aten/src/ATen/cuda/CUDABlas.cpp)."""
    result = call.run()
    hold_workspaces(call.device)
    _hold(call.device, "cublaslt", LT_WORKSPACE_BYTES)
    return result


def _grouped_product(call: Call) -> Any:
    """One product per group of rows; dtypes other than bf16 call cuBLAS once per group (GroupedMMUtils.h).

    The shape is computed in bf16, the only dtype that torch's shape function accepts.
    """
    if call.args[0].dtype == torch.bfloat16:
        return call.run()
    left, right = (
        torch.empty_strided(matrix.shape, matrix.stride(), dtype=torch.bfloat16, device="meta")
        for matrix in call.args[:2]
    )
    rest = [value.to("meta") if isinstance(value, torch.Tensor) else value for value in call.args[2:]]
    named = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in call.kwargs.items()
    }
    shape = call.func(left, right, *rest, **named).shape
    result = torch.empty(shape, dtype=call.args[0].dtype, device=call.args[0].device)
    call.track(result)
    hold_workspaces(call.device)
    return result


def hold_workspaces(device: Device, vector_bias: torch.Tensor | None = None) -> None:
    """Keep the workspaces of a product from now on, in which a vector may have been added."""
    _hold(device, "cublas", device.gpu.cublas_workspace_bytes)
    if vector_bias is not None and vector_bias.dim() == 1:
        _hold(device, "cublaslt", LT_WORKSPACE_BYTES)


def _hold(device: Device, library: str, size_bytes: int) -> None:
    thread = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
    stream = f"stream {device.stream} " if device.stream else ""
    device.hold_workspace(f"{library} {stream}{thread}", size_bytes)


def _overloads(packet: Any) -> list[Any]:
    """The overloads that return a tensor or write to one, with or without a dtype."""
    return [getattr(packet, name) for name in packet.overloads() if name in ("default", "out", "dtype", "dtype_out")]


PRODUCT_INTERNALS: dict[Any, Internal] = {
    **{key: _product for packet in (aten.mm, aten.bmm, aten.baddbmm, aten.addmm) for key in _overloads(packet)},
    **dict.fromkeys(_overloads(aten._grouped_mm), _grouped_product),
    **dict.fromkeys(_overloads(aten._scaled_mm), _scaled_product),
}


def reduce_temporaries(
    call: Call, source: Tensor, dims: Sequence[int], *, vector: int = VECTOR, accumulator_bytes: int | None = None
) -> None:
    """Allocate and free the workspaces of one reduction."""
    if source.dim() == 0 or source.numel() == 0:
        return
    axes = axes_of(source.shape, source.stride(), source.element_size(), dims)
    scratch = reduction_scratch(axes, call.device.gpu, vector=vector, accumulator_bytes=accumulator_bytes)
    call.device.run_scratch(scratch)


def _sum(call: Call) -> Any:
    source, dims = call.args[0], call.argument(1, "dim") if call.func is aten.sum.dim_IntList else None
    result = call.run()
    if source.dtype != result.dtype and not (source.element_size() == 2 and result.dtype == torch.float32):
        # make_reduction_from_ty (ReduceOpsUtils.h) casts, except 16-bit inputs that are summed in fp32
        call.device.touch(source.numel() * result.element_size())
    reduce_temporaries(call, source, dims or (), vector=sum_vector(source.element_size()))
    return result


def _over_dims(position: int | None) -> Internal:
    """A reduction over the dims in the argument at `position`, or over all where that is None."""

    def run(call: Call) -> Any:
        result = call.run()
        reduce_temporaries(call, call.args[0], () if position is None else _dims(call.argument(position, "dim")))
        return result

    return run


def _extreme(call: Call) -> Any:
    """Accumulate in the input's dtype (ReduceLogicKernel.cu, ReduceMaxValuesKernel.cu)."""
    source = call.args[0]
    result = call.run()
    dims = _dims(call.argument(1, "dim")) if len(call.func._schema.arguments) > 1 else ()
    accumulator = 1 if call.func in _TRUTHS else source.element_size()
    reduce_temporaries(call, source, dims, accumulator_bytes=accumulator)
    return result


def _dims(value: Any) -> Sequence[int]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


_TRUTHS = frozenset({aten.all.default, aten.all.dim, aten.all.dims, aten.any.default, aten.any.dim, aten.any.dims})

REDUCTION_INTERNALS: dict[Any, Internal] = {
    aten.sum.dim_IntList: _sum,
    aten.sum.default: _sum,
    aten.mean.dim: _over_dims(1),
    aten.mean.default: _over_dims(None),
    # accumulates in fp32 (aten/src/ATen/native/cuda/ReduceNormKernel.cu)
    aten.linalg_vector_norm.default: _over_dims(2),
    aten.amax.default: _extreme,
    aten.amin.default: _extreme,
    aten.max.default: _extreme,
    aten.min.default: _extreme,
    **dict.fromkeys(_TRUTHS, _extreme),
}


INTERNALS = {**ATTENTION_INTERNALS, **OPERATOR_INTERNALS, **PRODUCT_INTERNALS, **REDUCTION_INTERNALS}
