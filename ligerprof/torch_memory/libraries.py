"""What cuBLAS, cuSOLVER and cuDNN allocate besides their results: workspaces, reserves and states."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ligerprof.gpus import GpuSpec
from ligerprof.torch_memory.dtypes import FP32_BYTES, HALF_BYTES, Scratch
from ligerprof.units import MIB

# parseCUDABlasLtWorkspaceSize (aten/src/ATen/cuda/CUDABlas.cpp): 1024 KiB unless CUBLASLT_WORKSPACE_SIZE is set;
# measured on one H200 with torch 2.11
LT_WORKSPACE_BYTES = MIB
# from which compute capability on torch has grouped products (aten/src/ATen/native/cuda/GroupedBlas.cpp)
GROUPED_MM_CAPABILITY = (8, 0)


def thread_workspace_bytes(gpu: GpuSpec, *, adds_bias: bool) -> int:
    """What one thread keeps: a product that adds a bias vector goes through cuBLASLt (getCUDABlasLtWorkspace)."""
    return gpu.cublas_workspace_bytes + (LT_WORKSPACE_BYTES if adds_bias else 0)


# of the shorter side; smaller matrices follow other rules
_SMALLEST_SIDE = 512
# of the longer side to the shorter one; between 1 and this, nothing was measured
_SMALLEST_RATIO = 1.5
_STATUS_BYTES = 4


def svd_workspace_bytes(rows: int, columns: int) -> int | None:
    """Bytes of cuSOLVER's workspace for an fp32 matrix; None for shapes whose rule is not known."""
    long, short = max(rows, columns), min(rows, columns)
    if short < _SMALLEST_SIDE or 1 < long / short < _SMALLEST_RATIO:
        return None
    if long == short:
        elements = 2 * short**2 + short**2 // 256 + 65 * short + 32 * -(-short // 1024) + 1024
        return elements * FP32_BYTES
    # a wide matrix is transposed
    elements = long * short * (2 if rows < columns else 1) + 256 * long + short**2 + 514 * short + 65_792
    return elements * FP32_BYTES


def svd_scratch(rows: int, columns: int) -> Scratch:
    """Blocks next to the results: the status, the copy that is overwritten, a known workspace, and two checks."""
    working = (rows * columns * FP32_BYTES, svd_workspace_bytes(rows, columns) or 0)
    sizes = [size for size in working if size]
    return (_STATUS_BYTES, *sizes, *(-size for size in reversed(sizes)), 1, 1, -1, -1, -_STATUS_BYTES)


CUDNN_VERSION = 91900
# of relu, tanh, LSTM and GRU
_GATES, _SAVED = (1, 1, 4, 3), (1, 1, 5, 6)
_WIDE = 1024
_SMALL_LAYER_BYTES = 8 << 20
_HEADER_BYTES = 256
_THREADS, _GENERATOR_BYTES = 2048, 24


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentLayers:
    """Layers of one call.

    Attributes:
        mode: cudnnRNNMode_t: 0 relu, 1 tanh, 2 LSTM, 3 GRU.
        steps: the longest sequence.
        batch: sequences.
        rows: steps of all sequences together.
        projected_size: of the LSTM's state, 0 if it is not projected.
        directions: 2 if bidirectional.
        width: bytes per element.
    """

    mode: int
    steps: int
    batch: int
    rows: int
    input_size: int
    hidden_size: int
    projected_size: int
    layers: int
    directions: int
    dropout: float
    width: int


def spaces(problem: RecurrentLayers, *, train: bool) -> tuple[int, int]:
    """Bytes of workspace and reserve space (cudnnGetRNNTempSpaceSizes).

    Reserve spaces are those of all 78 layers measured on an H200 with cuDNN 9; workspaces are within 10 % for most
    (benchmarks/results/recurrent-h200.jsonl).
    """
    gates, between = _GATES[problem.mode], problem.layers - 1
    elements = problem.directions * problem.rows * problem.hidden_size
    states_bytes = elements * problem.width
    outputs = problem.directions * (problem.projected_size or problem.hidden_size)
    inputs = problem.input_size + between * outputs + problem.layers * problem.hidden_size
    weights_bytes = problem.directions * gates * problem.hidden_size * inputs * problem.width
    workspace_bytes = (gates + 2 + between) * states_bytes + weights_bytes
    if problem.hidden_size < _WIDE:
        workspace_bytes += problem.layers * problem.directions * _SMALL_LAYER_BYTES
    if not train:
        return workspace_bytes, 0
    # a bit per output between layers that dropout keeps
    mask_bytes = between * problem.directions * elements // 8 if problem.dropout else 0
    saved_bytes = (problem.layers * _SAVED[problem.mode] + between) * states_bytes
    return workspace_bytes, saved_bytes + mask_bytes + _HEADER_BYTES


def dropout_state_bytes(sm_count: int) -> int:
    """cudnnDropoutGetStatesSize: a random generator for each thread."""
    return sm_count * _THREADS * _GENERATOR_BYTES


_CHANNEL_BYTES = 16
_CONVOLUTION_HEADER_BYTES = 131
_PADDED_HEADER_BYTES = 16
_POINTWISE_BYTES = 400
# parts of a weight's gradient, in fp32
_WEIGHT_PARTS = 13
_MOST_PART_BYTES = {2: 3_600_000, 4: 8_260_000}
_SMALL_WEIGHT = 1 << 18
# without images, parts let about this many blocks compute the product; each has a square of the gradient
_BLOCKS, _SIDE = 64, 128
# kernels of their own for the first layer of images
_IMAGE_CHANNELS, _IMAGE_KERNEL = 4, 3
_IMAGE_DIMENSIONS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Convolution:
    """A convolution; of a transposed one, the source is what has fewer positions.

    Attributes:
        source, result: batch, channels and positions.
        weight: outer and inner channels and kernel.
        width: bytes per element.
        channels_last: layout of source and result.
    """

    source: Sequence[int]
    weight: Sequence[int]
    result: Sequence[int]
    stride: Sequence[int]
    groups: int
    width: int
    channels_last: bool

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel has a filter of its own, which cuDNN leaves to torch's kernels."""
        return 1 < self.groups == self.source[1]

    @property
    def is_pointwise(self) -> bool:
        """Whether it is a matrix product."""
        return prod(self.weight[2:]) == 1 and prod(self.stride) == 1

    def _padded_bytes(self, channels: int) -> int:
        return -(-channels * self.width // _CHANNEL_BYTES) * _CHANNEL_BYTES

    def _copies_bytes(self) -> int:
        """Source, weight and result in the layout of the kernels, where they are not."""
        inner, outer = self.source[1], self.result[1]
        source_bytes = self.source[0] * prod(self.source[2:]) * self._padded_bytes(inner)
        result_bytes = self.result[0] * prod(self.result[2:]) * self._padded_bytes(outer)
        per_group = self._padded_bytes(self.weight[1]) // self.width
        weight_bytes = prod(self.weight[2:]) * self._padded_bytes(self.weight[0]) * per_group
        if not self.channels_last:
            return source_bytes + weight_bytes + result_bytes
        is_odd = [self._padded_bytes(channels) != channels * self.width for channels in (inner, outer)]
        return source_bytes * is_odd[0] + weight_bytes * any(is_odd) + result_bytes * is_odd[1]

    def _takes_none(self) -> bool:
        return self.is_depthwise or self.width not in (HALF_BYTES, FP32_BYTES)

    def _is_image(self) -> bool:
        """Whether it is the first layer of images, which has kernels that read them as they are."""
        channels = min(self.source[1], self.weight[1])
        is_small = channels <= _IMAGE_CHANNELS and set(self.weight[2:]) == {_IMAGE_KERNEL}
        return is_small and not self.channels_last

    def forward_bytes(self, *, is_gradient: bool = False) -> int:
        """Workspace of the result, or of the source's gradient."""
        if self._takes_none() or (self._is_image() and not (is_gradient and self.width == HALF_BYTES)):
            return 0
        if self.is_pointwise:
            return _POINTWISE_BYTES
        copies_bytes = self._copies_bytes()
        return copies_bytes + (_PADDED_HEADER_BYTES if copies_bytes else 0) + _CONVOLUTION_HEADER_BYTES

    def weight_gradient_bytes(self) -> int:
        """Workspace of the weight's gradient."""
        if self._takes_none() or (self._is_image() and self.width == FP32_BYTES):
            return 0
        return self._parts_bytes() + (0 if self.is_pointwise else self._copies_bytes())

    def _parts_bytes(self) -> int:
        """The parts of a weight's gradient, in fp32."""
        elements = prod(self.weight)
        if len(self.weight) == _IMAGE_DIMENSIONS:
            most_bytes = _MOST_PART_BYTES[FP32_BYTES if elements <= _SMALL_WEIGHT else self.width]
            return min(_WEIGHT_PARTS * elements * FP32_BYTES, most_bytes)
        rows, columns = self.weight[0] // self.groups, self.weight[1] * prod(self.weight[2:])
        parts = _BLOCKS // (-(-rows // _SIDE) * -(-columns // _SIDE) * self.groups)
        return parts * elements * FP32_BYTES if parts > 1 else 0
