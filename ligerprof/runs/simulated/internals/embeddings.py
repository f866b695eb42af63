"""Sort buffers of the embedding's gradient on CUDA, in the order of torch_memory/embedding.py."""

from typing import Any

import torch

from ligerprof.runs.simulated.internals.call import Call, Internal
from ligerprof.torch_memory.embedding import embedding_gradient

aten = torch.ops.aten


def _embedding_dense_backward(call: Call) -> Any:
    gradient, indices, rows = call.args[:3]
    blocks = embedding_gradient(indices.numel(), rows, gradient.shape[-1], width=indices.element_size())
    if blocks is None:
        return call.run()
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


EMBEDDING_INTERNALS: dict[Any, Internal] = {aten.embedding_dense_backward.default: _embedding_dense_backward}
