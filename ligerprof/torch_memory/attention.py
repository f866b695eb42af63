"""scaled_dot_product_attention on CUDA: which kernel runs, what it allocates, and what math attention computes."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from math import ceil
from typing import Protocol, TypeVar

from ligerprof.gpus import GpuSpec, Vendor
from ligerprof.torch_memory.dtypes import DTYPE_BYTES, FP32_BYTES, HALF_BYTES, INDEX_BYTES, Scratch, together

# check_prefer_cudnn_attention: the generations where cuDNN comes first
_CUDNN_FIRST = (9, 10)
_CUDNN_LARGEST_HEAD = 128
_CUDNN_LARGEST_HEAD_HOPPER = 256
_CUDNN_ALIGNMENT = 8
_FLASH_LARGEST_HEAD = 256
# check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_sm120
_FLASH_LARGEST_TRAINED_HEAD, _FLASH_WIDE_HEAD = 192, 224
_SMALL_BLACKWELL = 12


class AttentionKernel(str, Enum):
    """What scaled_dot_product_attention runs on (SDPBackend)."""

    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"

    @property
    def label(self) -> str:
        """Words in front of "kernel"."""
        return _LABELS[self]

    @property
    def operator(self) -> str:
        """The operator that runs it; empty for the one that torch decomposes."""
        return "" if self is AttentionKernel.MATH else f"aten._scaled_dot_product_{self.value}_attention.default"


_LABELS = {
    AttentionKernel.CUDNN: "cuDNN's",
    AttentionKernel.FLASH: "FlashAttention's",
    AttentionKernel.EFFICIENT: "the memory-efficient",
    AttentionKernel.MATH: "no fused",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionProblem:
    """One call of scaled_dot_product_attention, as the choice of a kernel and its allocations depend on it.

    Attributes:
        dtype: of query, key and value, as torch names it.
        kv_heads: heads of key and value.
        queries, keys: tokens per sequence.
        head_dim: elements per head of query and key.
        value_dim: elements per head of value and output.
        masked: whether a mask is passed.
        causal: whether `is_causal` is set.
        grouped: whether `enable_gqa` is set.
        needs_gradient: whether autograd records the call (should_compute_logsumexp).
        dense: whether each tensor has four axes and its last one is contiguous, which the mask's must be, too.
    """

    dtype: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    masked: bool = False
    causal: bool = False
    dropout: float = 0.0
    grouped: bool = False
    needs_gradient: bool = True
    dense: bool = True

    @property
    def element_bytes(self) -> int:
        """Bytes per element of query, key and value."""
        return DTYPE_BYTES[self.dtype]

    @property
    def is_half(self) -> bool:
        """Whether it computes in 16 bits."""
        return self.element_bytes == HALF_BYTES

    @property
    def rows(self) -> int:
        """Rows of the score matrices."""
        return self.batch * self.heads * self.queries


def choose_kernel(
    problem: AttentionProblem, gpu: GpuSpec, allowed: Collection[AttentionKernel] = tuple(AttentionKernel)
) -> AttentionKernel:
    """The first kernel that takes the problem, in torch's order of preference (select_sdp_backend).

    Args:
        allowed: the kernels that are not switched off (torch.nn.attention.sdpa_kernel).
    """
    takes = {
        AttentionKernel.CUDNN: gpu.vendor is Vendor.NVIDIA and _cudnn_takes(problem, gpu),
        AttentionKernel.FLASH: _flash_takes(problem, gpu),
        AttentionKernel.EFFICIENT: _efficient_takes(problem, gpu),
        AttentionKernel.MATH: True,
    }
    order = list(takes)
    if gpu.compute_capability[0] not in _CUDNN_FIRST:
        order.append(order.pop(0))
    return next((kernel for kernel in order if takes[kernel] and kernel in allowed), AttentionKernel.MATH)


def _groups_fit(problem: AttentionProblem) -> bool:
    """check_batch_size_and_num_heads_dense of a kernel that groups heads."""
    return problem.heads == problem.kv_heads or (problem.grouped and problem.heads % problem.kv_heads == 0)


def _cudnn_takes(problem: AttentionProblem, gpu: GpuSpec) -> bool:
    """can_use_cudnn_attention."""
    limit = _CUDNN_LARGEST_HEAD_HOPPER if gpu.compute_capability == (9, 0) else _CUDNN_LARGEST_HEAD
    widths = (problem.head_dim, problem.value_dim)
    widths_fit = all(width <= limit and width % _CUDNN_ALIGNMENT == 0 for width in widths)
    return problem.is_half and problem.dense and _groups_fit(problem) and widths_fit and problem.keys > 1


def _flash_takes(problem: AttentionProblem, gpu: GpuSpec) -> bool:
    """can_use_flash_attention; it pads head dimensions that are not multiples of 8."""
    if not problem.is_half or problem.masked or gpu.compute_capability < (8, 0):
        return False
    width = problem.head_dim
    square = not problem.causal or problem.queries == problem.keys
    small_chip = (8, 6) <= gpu.compute_capability <= (8, 9) or gpu.compute_capability[0] == _SMALL_BLACKWELL
    trainable = width <= _FLASH_LARGEST_TRAINED_HEAD or (width > _FLASH_WIDE_HEAD and problem.dropout == 0.0)
    fits = width == problem.value_dim and width <= _FLASH_LARGEST_HEAD and square and _groups_fit(problem)
    return fits and problem.dense and (trainable or not (small_chip and problem.needs_gradient))


def _efficient_takes(problem: AttentionProblem, gpu: GpuSpec) -> bool:
    """can_use_mem_efficient_attention; it does not group heads, and reads bf16 from compute capability 8.0 on."""
    if not problem.dense or problem.heads != problem.kv_heads:
        return False
    if problem.dtype == "bfloat16" and gpu.compute_capability < (8, 0):
        return False
    alignment = _gemm_alignment(problem, gpu)
    return problem.head_dim % alignment == 0 and problem.value_dim % alignment == 0


def _gemm_alignment(problem: AttentionProblem, gpu: GpuSpec) -> int:
    """The number of elements that a tensor core loads at once (minimum_gemm_alignment); 1 without tensor cores."""
    if problem.is_half and gpu.compute_capability >= (7, 0):
        return 8
    return 4 if gpu.compute_capability >= (8, 0) else 1


_CUDNN_WORKSPACE_BYTES = 256
# scaled_dot_product_attention pads the last axis for flash (pad_last_dim<8>)
_FLASH_ALIGNMENT = 8
_FLASH_ROWS = 128
_FLASH_QUERY_TILE = 64
_SPLIT_EFFICIENCY = 0.85
_LARGEST_SPLIT = 128
# kAlignLSE: rows of the memory-efficient kernel's log-sum-exp come in multiples of it
_EFFICIENT_ROWS = 32
# mem_eff_alignment in pad_bias
_MASK_ALIGNMENT = 8
# GradQTempStorage carries a lock, a counter and padding next to its tile
_TILE_HEADER_BYTES = 16
_STAGED_SPLITS = 200


def flash_padding(head_dim: int) -> int:
    """Elements that scaled_dot_product_attention adds to each head before flash attention."""
    return -head_dim % _FLASH_ALIGNMENT


def mask_padding(keys: int) -> int:
    """Elements that it adds to each row of the memory-efficient kernel's mask (pad_bias)."""
    return -keys % _MASK_ALIGNMENT


def log_sum_exp_bytes(kernel: AttentionKernel, problem: AttentionProblem) -> int:
    """Bytes of the softmax statistics, one fp32 number per row of the scores; some kernels pad the rows."""
    if kernel is not AttentionKernel.EFFICIENT:
        return FP32_BYTES * problem.rows
    padded = _round_up(problem.queries, _EFFICIENT_ROWS) if problem.needs_gradient else 0
    return FP32_BYTES * problem.batch * problem.heads * padded


def random_state_sizes(kernel: AttentionKernel) -> tuple[int, ...]:
    """Bytes of each tensor on the GPU that holds seed and offset of dropout; the memory-efficient kernel has none."""
    return {
        AttentionKernel.CUDNN: (INDEX_BYTES, INDEX_BYTES),
        AttentionKernel.FLASH: (2 * INDEX_BYTES, INDEX_BYTES),
    }.get(kernel, ())


def forward_scratch(kernel: AttentionKernel, problem: AttentionProblem, gpu: GpuSpec) -> Scratch:
    """What the forward kernel allocates beyond its results."""
    if kernel is AttentionKernel.CUDNN:
        return together(_CUDNN_WORKSPACE_BYTES)
    if kernel is AttentionKernel.FLASH:
        return together(*flash_split_sizes(problem, gpu))
    # 16-bit heads wider than 128 are accumulated in fp32 outside of registers
    wide = problem.is_half and problem.head_dim > 128
    return together(FP32_BYTES * problem.rows * problem.head_dim if wide else 0)


def backward_scratch(kernel: AttentionKernel, problem: AttentionProblem) -> Scratch:
    """What the backward kernel allocates beyond the gradients."""
    return {
        AttentionKernel.CUDNN: _cudnn_backward,
        AttentionKernel.FLASH: _flash_backward,
        AttentionKernel.EFFICIENT: _efficient_backward,
    }[kernel](problem)


def _cudnn_backward(problem: AttentionProblem) -> Scratch:
    """An fp32 accumulator of the query's gradient and row sums; with grouped heads, ungrouped gradients of K and V."""
    workspace_bytes = FP32_BYTES * problem.rows * (problem.head_dim + 1) + _CUDNN_WORKSPACE_BYTES
    if problem.kv_heads != problem.heads:
        keys = problem.batch * problem.heads * problem.keys
        workspace_bytes += keys * (problem.head_dim + problem.value_dim) * problem.element_bytes
    return together(workspace_bytes)


def flash_split_sizes(problem: AttentionProblem, gpu: GpuSpec) -> tuple[int, ...]:
    """fp32 row sums and partial outputs, where there are too few blocks for the GPU and keys are split (mha_fwd)."""
    splits = _flash_splits(problem, gpu) if problem.dropout == 0.0 else 1
    if splits == 1:
        return ()
    rows_bytes = FP32_BYTES * splits * problem.rows
    return rows_bytes, rows_bytes * _round_up(problem.head_dim, 32)


def _flash_splits(problem: AttentionProblem, gpu: GpuSpec) -> int:
    """num_splits_heuristic of flash_api.cpp."""
    key_tile = 256 if problem.head_dim <= 64 else 128 if problem.head_dim <= 128 else 64
    blocks = problem.batch * problem.heads * ceil(problem.queries / _FLASH_QUERY_TILE)
    places = 2 * gpu.sm_count
    if blocks >= 0.8 * places:
        return 1
    tiles = ceil(problem.keys / key_tile)
    efficiency = {}
    for splits in range(1, min(_LARGEST_SPLIT, places, tiles) + 1):
        if splits == 1 or ceil(tiles / splits) != ceil(tiles / (splits - 1)):
            waves = blocks * splits / places
            efficiency[splits] = waves / ceil(waves)
    best = max(efficiency.values())
    return next(splits for splits, share in efficiency.items() if share >= _SPLIT_EFFICIENCY * best)


def _flash_backward(problem: AttentionProblem) -> Scratch:
    """Row sums and the query's gradient in fp32; with grouped heads, ungrouped gradients of K and V (mha_bwd)."""
    width = problem.head_dim
    rows_bytes = FP32_BYTES * problem.batch * problem.heads * _round_up(problem.queries, _FLASH_ROWS)
    columns = _round_up(width, 32 if width <= 128 else 64)
    grouped = problem.kv_heads != problem.heads
    ungrouped_bytes = problem.batch * problem.heads * problem.keys * width * problem.element_bytes if grouped else 0
    return together(rows_bytes, rows_bytes * columns, ungrouped_bytes, ungrouped_bytes)


def _efficient_backward(problem: AttentionProblem) -> Scratch:
    """The row sums `delta` and a workspace; in fp32 the kernel does not compute delta itself.

    It is a product, its sum, and the sum with its axes in order then.
    """
    delta_bytes = FP32_BYTES * problem.rows
    product_bytes = delta_bytes * problem.head_dim
    workspace_bytes = problem.batch * problem.heads * _efficient_workspace_bytes(problem)
    made = (
        (delta_bytes,) if problem.is_half else (product_bytes, delta_bytes, delta_bytes, -delta_bytes, -product_bytes)
    )
    return (*made, workspace_bytes, -delta_bytes, -workspace_bytes)


def _efficient_workspace_bytes(problem: AttentionProblem) -> int:
    """Per head: tiles of the query's gradient, staged gradients of K and V (workspace_elements_gq, _gk, _gv)."""
    width = problem.head_dim
    rows = 128 if problem.is_half and 64 < width <= 128 else 64
    columns = 64 if width <= 64 else 128
    tiles = ceil(problem.queries / rows) * ceil(width / columns)
    size_bytes = tiles * (FP32_BYTES * rows * columns + _TILE_HEADER_BYTES)
    if problem.is_half and width > 128:
        splits = min(ceil(problem.keys / 64), max(1, _STAGED_SPLITS // (problem.batch * problem.heads)))
        size_bytes += 2 * splits * 64 * _round_up(width, 64) * FP32_BYTES
    return size_bytes


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


T = TypeVar("T")


class AttentionOperations(Protocol[T]):
    """The operations on tensors of one call; each returns a new tensor, or the same one where torch does."""

    def additive_mask(self, mask: T) -> T:
        """A boolean mask as numbers of the query's dtype: 0 or minus infinity (convert_boolean_attn_mask)."""

    def causal_mask(self) -> T:
        """The fp32 mask of numbers that math attention adds where `is_causal` is set."""

    def pad_heads(self, tensor: T, missing: int) -> T:
        """Query, key or value with `missing` more elements per head."""

    def narrow_heads(self, tensor: T, missing: int) -> T:
        """A view of the output without the last `missing` elements of each head."""

    def pad_mask(self, mask: T, missing: int) -> T:
        """A view of the mask within rows that are `missing` elements longer (pad_bias)."""

    def run(self, kernel: AttentionKernel, inputs: tuple[T, T, T], mask: T | None) -> T:
        """The output of a fused kernel."""

    def widen(self, tensor: T) -> T:
        """16-bit numbers as fp32."""

    def scale(self, tensor: T) -> T:
        """Times the square root of the scaling factor."""

    def repeat_heads(self, tensor: T) -> T:
        """Key or value with a head for each of the query's (pre_process_group_query_attention_input)."""

    def multiply(self, query: T, key: T) -> T:
        """Scores: query times scaled and transposed key."""

    def add_in_place(self, scores: T, mask: T) -> None:
        """Scores plus mask."""

    def softmax(self, scores: T) -> T:
        """`_safe_softmax` of each row."""

    def drop(self, probabilities: T) -> T:
        """Dropout."""

    def restore_dtype(self, tensor: T) -> T:
        """In the query's dtype again."""

    def weigh(self, probabilities: T, value: T) -> T:
        """Probabilities times value."""

    def release(self, *tensors: T | None) -> None:
        """C++ variables that end here."""

    def replace(self, old: T, new: T) -> T:
        """The C++ variable of `old` holds `new` from here on."""


def attend(
    operations: AttentionOperations[T],
    kernel: AttentionKernel,
    problem: AttentionProblem,
    inputs: tuple[T, T, T],
    mask: T | None,
) -> T:
    """Attention of query over key and value, the three `inputs`."""
    bias = operations.additive_mask(mask) if mask is not None else None
    if kernel is AttentionKernel.MATH:
        return _math(operations, problem, inputs, bias)
    if kernel is AttentionKernel.FLASH and (missing := flash_padding(problem.head_dim)):
        return _flash_padded(operations, inputs, missing)
    if kernel is AttentionKernel.EFFICIENT and bias is not None and (missing := mask_padding(problem.keys)):
        bias = operations.replace(bias, operations.pad_mask(bias, missing))
    output = operations.run(kernel, inputs, bias)
    operations.release(bias)
    return output


def _flash_padded(operations: AttentionOperations[T], inputs: tuple[T, T, T], missing: int) -> T:
    query, key, value = (operations.pad_heads(tensor, missing) for tensor in inputs)
    padded = operations.run(AttentionKernel.FLASH, (query, key, value), None)
    output = operations.narrow_heads(padded, missing)
    operations.release(padded, value, key, query)
    return output


def _math(operations: AttentionOperations[T], problem: AttentionProblem, inputs: tuple[T, T, T], bias: T | None) -> T:
    """_scaled_dot_product_attention_math: all in fp32, the scores kept in full."""
    wide_query, wide_key, wide_value = (operations.widen(tensor) for tensor in inputs)
    query = operations.scale(wide_query)
    if problem.causal:
        bias = operations.causal_mask()
    key, value = (operations.repeat_heads(tensor) for tensor in (wide_key, wide_value))
    scores = operations.multiply(query, key)
    if bias is not None:
        operations.add_in_place(scores, bias)
    scores = operations.replace(scores, operations.softmax(scores))
    if problem.dropout > 0.0:
        scores = operations.replace(scores, operations.drop(scores))
    # arguments of the returned tuple are made from the right
    weights = operations.restore_dtype(scores)
    product = operations.weigh(scores, value)
    output = operations.restore_dtype(product)
    operations.release(product, scores, value, key, query, wide_value, wide_key, wide_query, bias, weights)
    # as C++ destroys locals: in reverse order
    del product, scores, value, key, query, wide_value, wide_key, wide_query, bias, weights
    return output
