"""What cuDNN's convolutions allocate besides their results.

Tensor cores read channels last. In other layouts, cuDNN copies the source, the weight and the result into its
workspace, with channels in multiples of 16 bytes; gradients of weights are sums of parts. The rules follow 297
convolutions measured on an H200 with cuDNN 9 (benchmarks/results/convolutions-h200.jsonl). cuDNN's heuristics may
choose another algorithm: of the workspaces there, 73 % of conv2d and 62 % of conv1d and conv3d are within 5 % of the
bytes that the convolution reads and writes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

_CHANNEL_BYTES = 16
_HEADER_BYTES = 131
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
_FP32_BYTES = 4
_IMAGE_DIMENSIONS = 4
_HALF_BYTES = 2


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
        return self.is_depthwise or self.width not in (_HALF_BYTES, _FP32_BYTES)

    def _is_image(self) -> bool:
        """Whether it is the first layer of images, which has kernels that read them as they are."""
        channels = min(self.source[1], self.weight[1])
        is_small = channels <= _IMAGE_CHANNELS and set(self.weight[2:]) == {_IMAGE_KERNEL}
        return is_small and not self.channels_last

    def forward_bytes(self, *, is_gradient: bool = False) -> int:
        """Workspace of the result, or of the source's gradient."""
        if self._takes_none() or (self._is_image() and not (is_gradient and self.width == _HALF_BYTES)):
            return 0
        if self.is_pointwise:
            return _POINTWISE_BYTES
        copies_bytes = self._copies_bytes()
        return copies_bytes + (_PADDED_HEADER_BYTES if copies_bytes else 0) + _HEADER_BYTES

    def weight_gradient_bytes(self) -> int:
        """Workspace of the weight's gradient."""
        if self._takes_none() or (self._is_image() and self.width == _FP32_BYTES):
            return 0
        return self._parts_bytes() + (0 if self.is_pointwise else self._copies_bytes())

    def _parts_bytes(self) -> int:
        """The parts of a weight's gradient, in fp32."""
        elements = prod(self.weight)
        if len(self.weight) == _IMAGE_DIMENSIONS:
            most_bytes = _MOST_PART_BYTES[_FP32_BYTES if elements <= _SMALL_WEIGHT else self.width]
            return min(_WEIGHT_PARTS * elements * _FP32_BYTES, most_bytes)
        rows, columns = self.weight[0] // self.groups, self.weight[1] * prod(self.weight[2:])
        parts = _BLOCKS // (-(-rows // _SIDE) * -(-columns // _SIDE) * self.groups)
        return parts * elements * _FP32_BYTES if parts > 1 else 0
