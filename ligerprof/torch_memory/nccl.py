"""GPU memory that NCCL takes for a process group, outside torch's allocator."""

# Two H200 connected by NVLink, NCCL of torch 2.11 (benchmarks/results/ranks-h200x2.jsonl). Connecting the ranks of the
# process group; the channels of its first collective; and a further communicator over some of the ranks, as HSDP has.
_CONNECTION_BYTES = 480_313_344
_CHANNELS_BYTES = 497_025_024
_FURTHER_COMMUNICATOR_BYTES = 408_944_640


def nccl_bytes(ranks: int, *, further_communicators: int = 0) -> int:
    """Bytes on each GPU of a process group whose collectives have run; the number of ranks was not varied."""
    if ranks == 1:
        return 0
    return _CONNECTION_BYTES + _CHANNELS_BYTES + further_communicators * _FURTHER_COMMUNICATOR_BYTES
