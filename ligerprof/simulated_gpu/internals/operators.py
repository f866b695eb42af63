"""Operators whose CUDA implementation allocates temporaries, or returns tensors of other dtypes or in another order."""

import importlib.util
import math
from typing import Any

import torch

from ligerprof.simulated_gpu.internals.call import Call, Internal, dtype_name
from ligerprof.torch_memory import layer_norm, softmax
from ligerprof.torch_memory.chunked_losses import LinearCrossEntropy
from ligerprof.torch_memory.dtypes import FP32_BYTES, together
from ligerprof.torch_memory.libraries import svd_scratch
from ligerprof.torch_memory.reductions import norm_partials_bytes
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


def _pow_of_scalar(call: Call) -> Any:
    return call.run_with_scratch(lambda _: POW_BASE_SCRATCH)


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
    aten.pow.Scalar: _pow_of_scalar,
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
