"""Global-memory workspaces of CUDA reductions: partial results that thread blocks leave for the last one."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ligerprof.gpus import GpuSpec
from ligerprof.torch_memory.dtypes import FP32_BYTES, HALF_BYTES, Scratch, together

# MultiTensorApply.cuh, kChunkSize
_CHUNK = 65_536


def norm_partials_bytes(tensors: Iterable[int]) -> int:
    """A partial norm in fp32 for every tensor and every chunk of the largest one.

    aten/src/ATen/native/cuda/ForeachReduceOp.cu, foreach_tensor_norm_cuda: `output_per_tensor`.

    Args:
        tensors: elements of each tensor.
    """
    elements = list(tensors)
    return FP32_BYTES * len(elements) * max(-(-count // _CHUNK) for count in elements)


# mnt_wrapper::MAX_NUM_THREADS, warp size, min_values_per_thread, max_values_per_thread
_MAX_THREADS = 512
_WARP = 32
_MIN_VALUES = 16
_MAX_VALUES = 256
# input_vec_size: ReduceSumProdKernel.cu asks for 8 of 16-bit elements, all others take vt0
VECTOR = 4
_SUM_VECTOR_16_BIT = 8
_MIN_VECTORIZED = 128
_LARGEST_OFFSET = 2**31 - 1
# each is at least half of 2 GiB
_MOST_PIECES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """A reduction's dimensions as TensorIterator leaves them: reduced ones first, fastest first, joined.

    Attributes:
        reduced: (extent, stride in bytes) of each reduced dimension.
        kept: the same of the others.
        element_bytes: of the input.
    """

    reduced: tuple[tuple[int, int], ...]
    kept: tuple[tuple[int, int], ...]
    element_bytes: int

    @property
    def inputs(self) -> int:
        """Elements that each result adds up."""
        return math.prod(extent for extent, _ in self.reduced)

    @property
    def outputs(self) -> int:
        """Results."""
        return math.prod(extent for extent, _ in self.kept)

    @property
    def reduces_fastest(self) -> bool:
        """Whether the dimension with the smallest stride is a reduced one."""
        return not self.kept or (bool(self.reduced) and self.reduced[0][1] < self.kept[0][1])

    @property
    def needs_64_bit(self) -> bool:
        """Whether an offset does not fit 32 bits (TensorIteratorBase::can_use_32bit_indexing)."""
        span = 1 + sum((extent - 1) * stride for extent, stride in (*self.reduced, *self.kept))
        return self.inputs * self.outputs > _LARGEST_OFFSET or span > _LARGEST_OFFSET


def axes_of(shape: Sequence[int], strides: Sequence[int], element_bytes: int, dims: Sequence[int]) -> Axes:
    """Order and join the dimensions of a reduction over `dims` (none means all); strides are in elements."""
    reduced_dims = {dim % len(shape) for dim in dims} or set(range(len(shape)))
    dimensions = [(extent, stride * element_bytes) for extent, stride in zip(shape, strides, strict=True)]
    reduced = [dimensions[dim] for dim in range(len(shape)) if dim in reduced_dims]
    kept = [dimensions[dim] for dim in range(len(shape)) if dim not in reduced_dims]
    return Axes(reduced=_join(reduced), kept=_join(kept), element_bytes=element_bytes)


def _join(dimensions: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for extent, stride in sorted((item for item in dimensions if item[0] != 1), key=lambda item: item[1]):
        if joined and joined[-1][0] * joined[-1][1] == stride:
            joined[-1] = (joined[-1][0] * extent, joined[-1][1])
        else:
            joined.append((extent, stride))
    return tuple(joined)


def workspace_bytes(axes: Axes, *, accumulator_bytes: int, vector: int, gpu: GpuSpec) -> tuple[int, int]:
    """Bytes of partial results and of semaphores; zeros where no block shares an output with another.

    Args:
        axes: what is reduced.
        accumulator_bytes: of one partial result.
        vector: input_vec_size of the kernel.
        gpu: sizes the launch.
    """
    if axes.inputs <= 1 or axes.outputs < 1:
        return 0, 0
    across, down, output_vector = _launch_extents(axes, vector)
    width, height = _block(across, down, _MAX_THREADS // output_vector)
    step_input, step_output = (width, 1) if axes.reduces_fastest else (1, width)
    splits_rows = -(-axes.inputs // step_input) >= min(height * 16, _MAX_VALUES)
    if splits_rows:
        step_input *= height
    else:
        step_output *= height
    grid = -(-(axes.outputs // output_vector) // step_output)
    values = -(-axes.inputs // step_input)
    wanted_grid = gpu.sm_count * (gpu.max_threads_per_sm // (width * height))
    if not splits_rows or values < _MAX_VALUES or grid > wanted_grid:
        return 0, 0
    blocks = max(min(-(-wanted_grid // grid), -(-values // _MIN_VALUES)), -(-values // _MAX_VALUES))
    if blocks <= 1:
        return 0, 0
    lanes = 1 if axes.reduces_fastest else width * output_vector
    return accumulator_bytes * axes.outputs * blocks * lanes, 4 * grid


def _launch_extents(axes: Axes, vector: int) -> tuple[int, int, int]:
    """Extents mapped to a block's x and y, and how many outputs one thread takes."""
    if axes.reduces_fastest:
        contiguous = bool(axes.reduced) and axes.reduced[0][1] == axes.element_bytes
        vectorized = contiguous and axes.inputs >= _MIN_VECTORIZED and len(axes.reduced) == 1
        return axes.inputs // (vector if vectorized else 1), axes.outputs, 1
    output_vector = _output_vector(axes) if axes.kept[0][1] == axes.element_bytes else 1
    return axes.outputs // output_vector, axes.inputs, output_vector


def _output_vector(axes: Axes) -> int:
    """get_output_vec_size: the widest of 4, 2, 1 that divides the extent and every other stride."""
    counts = [axes.kept[0][0], *(stride // axes.element_bytes for _, stride in (*axes.reduced, *axes.kept[1:]))]
    return next(width for width in (4, 2, 1) if all(count % width == 0 for count in counts))


def _block(across: int, down: int, threads: int) -> tuple[int, int]:
    """ReduceConfig::set_block_dimension."""
    across_pow2 = _last_power(across) if across < threads else threads
    down_pow2 = _last_power(down) if down < threads else threads
    width = min(across_pow2, _WARP)
    height = min(down_pow2, threads // width)
    return min(across_pow2, threads // height), height


def _last_power(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)


def split_to_32_bit(axes: Axes) -> list[Axes]:
    """Halve the widest dimension until offsets fit 32 bits (TensorIterator::with_32bit_indexing).

    Of a tensor in more pieces than fit any device, equal pieces count once.
    """
    pieces, wide = [axes], axes.needs_64_bit
    while wide:
        pieces = [half for piece in pieces for half in (_halves(piece) if piece.needs_64_bit else (piece,))]
        if len(pieces) > _MOST_PIECES:
            pieces = list(dict.fromkeys(pieces))
        wide = any(piece.needs_64_bit for piece in pieces)
    return pieces


def _halves(axes: Axes) -> tuple[Axes, Axes]:
    dimensions = (*axes.reduced, *axes.kept)
    widest = max(range(len(dimensions)), key=lambda index: (dimensions[index][0] - 1) * dimensions[index][1])
    extent, stride = dimensions[widest]
    cut = len(axes.reduced)

    def with_extent(part: int) -> Axes:
        changed = (*dimensions[:widest], (part, stride), *dimensions[widest + 1 :])
        return Axes(reduced=changed[:cut], kept=changed[cut:], element_bytes=axes.element_bytes)

    return with_extent(extent // 2), with_extent(extent - extent // 2)


def sum_vector(element_bytes: int) -> int:
    """input_vec_size of a sum."""
    return _SUM_VECTOR_16_BIT if element_bytes == HALF_BYTES else VECTOR


def reduction_scratch(
    axes: Axes, gpu: GpuSpec, *, vector: int = VECTOR, accumulator_bytes: int | None = None
) -> Scratch:
    """The workspaces of one reduction, once for each 32-bit piece (gpu_reduce_kernel).

    Args:
        vector: input_vec_size of the kernel.
        accumulator_bytes: of one partial result; by default fp32 or the input's type, if that is wider.
    """
    accumulator = accumulator_bytes or max(axes.element_bytes, FP32_BYTES)
    sizes = (
        workspace_bytes(piece, accumulator_bytes=accumulator, vector=vector, gpu=gpu) for piece in split_to_32_bit(axes)
    )
    return tuple(size for partial, semaphores in sizes for size in together(partial, semaphores))


def column_sum_scratch(rows: int, columns: int, element_bytes: int, gpu: GpuSpec) -> Scratch:
    """The workspaces of a sum over the rows of a contiguous matrix, as the gradient of a bias is."""
    axes = axes_of((rows, columns), (columns, 1), element_bytes, (0,))
    return reduction_scratch(axes, gpu, vector=sum_vector(element_bytes))
