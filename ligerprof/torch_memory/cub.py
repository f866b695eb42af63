"""Temporary storage of CUB's device-wide algorithms, as measured on one H200 with CUDA 13."""

from ligerprof.gpus import GpuSpec

# allocations of one call are laid out one after the other, each aligned
_ALIGNMENT = 256
# DeviceRadixSort in one sweep: for each pass over 8 bits 256 counters of 8 bytes, and for each tile 256 counters of 4
# bytes; items per tile by bytes of a key
_PASS_BYTES = 256 * 8
_SORT_TILES = {8: 384 * 12, 4: 384 * 14, 2: 512 * 11}
_PARTIAL_SORT_TILE = 384 * 15
_SORT_TILE_BYTES = 256 * 4
# DeviceScan: a state of 16 bytes for each tile and for 32 more
_SCAN_STATE_BYTES = 16
_SCAN_PADDING = 32
# DeviceReduce: numbers of 4 bytes, in one tile or by as many blocks as fit on the GPU five times
_REDUCE_TILE = 256 * 16
_REDUCE_THREADS = 256
_REDUCE_WAVES = 5
# DeviceSelect by flags: a state of 8 bytes for each tile and for 32 more
_SELECT_TILE = 384 * 11
_SELECT_STATE_BYTES = 8
LONG_SCAN_TILE = 384 * 12
SHORT_SCAN_TILE = 128 * 7


def sort_bytes(count: int, value_bytes: int, key_bytes: int = 8, *, key_bits: int | None = None) -> int:
    """DeviceRadixSort::SortPairs: second buffers of keys and values, and counters.

    Args:
        key_bits: bits of the keys that are compared; None: all.
    """
    passes = key_bytes if key_bits is None else max(-(-key_bits // 8), 1)
    buffers_bytes = _aligned(count * key_bytes) + _aligned(count * value_bytes)
    tile = _SORT_TILES.get(key_bytes, _SORT_TILES[2])
    return buffers_bytes + passes * _PASS_BYTES + _tile_counters_bytes(count, tile)


def partial_sort_bytes(count: int) -> int:
    """DeviceRadixSort over a few bits between two buffers of the caller's."""
    return _PASS_BYTES + _tile_counters_bytes(count, _PARTIAL_SORT_TILE)


def _tile_counters_bytes(count: int, tile: int) -> int:
    return -(-count // tile) * _SORT_TILE_BYTES + 2 * _ALIGNMENT - 1


def scan_bytes(count: int, tile: int) -> int:
    """DeviceScan, or what is built like it, over `count` items in tiles of `tile`."""
    return _aligned((_SCAN_PADDING + -(-count // tile)) * _SCAN_STATE_BYTES) + 2 * _ALIGNMENT - 1


def select_bytes(count: int) -> int:
    """DeviceSelect::Flagged among `count` items."""
    states = _SCAN_PADDING + -(-count // _SELECT_TILE)
    return _aligned(states * _SELECT_STATE_BYTES) + 2 * _ALIGNMENT - 1


def count_bytes(count: int, gpu: GpuSpec) -> int:
    """DeviceReduce::Sum of `count` flags as numbers of 4 bytes."""
    if count <= _REDUCE_TILE:
        return 1
    blocks = gpu.sm_count * (gpu.max_threads_per_sm // _REDUCE_THREADS) * _REDUCE_WAVES
    return _aligned(blocks * 4) + _ALIGNMENT - 1


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
