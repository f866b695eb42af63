"""Page-locked main memory."""


def pinned_bytes(size_bytes: int) -> int:
    """What torch takes for a request: a power of two (ATen/core/CachingHostAllocator.h, allocate)."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0
