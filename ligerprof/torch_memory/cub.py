"""Temporary storage of CUB's device-wide algorithms, as measured on one H200 with CUDA 13."""

# allocations of one call are laid out one after the other, each aligned
_ALIGNMENT = 256
# DeviceRadixSort in one sweep: 8 passes of 256 counters of 8 bytes, a row of pass counters, and for each tile of 384
# threads and 12 items 256 counters of 4 bytes
_PASSES_BYTES = 8 * 256 * 8
_SORT_TILE = 384 * 12
_SORT_TILE_BYTES = 256 * 4
# DeviceScan: a state of 16 bytes for each tile and for 32 more
_SCAN_STATE_BYTES = 16
_SCAN_PADDING = 32
LONG_SCAN_TILE = 384 * 12
SHORT_SCAN_TILE = 128 * 7


def sort_bytes(count: int, item_bytes: int) -> int:
    """DeviceRadixSort::SortPairs of 64-bit keys: a second buffer of keys and values, and counters."""
    tiles = -(-count // _SORT_TILE)
    return 2 * _aligned(count * item_bytes) + _PASSES_BYTES + tiles * _SORT_TILE_BYTES + 2 * _ALIGNMENT - 1


def scan_bytes(count: int, tile: int) -> int:
    """DeviceScan, or what is built like it, over `count` items in tiles of `tile`."""
    return _aligned((_SCAN_PADDING + -(-count // tile)) * _SCAN_STATE_BYTES) + 2 * _ALIGNMENT - 1


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
