"""The memory cost of the norm kernels."""

from dataclasses import dataclass, replace

from ligerprof.kernels.sizes import next_power_of_2
from ligerprof.kernels.spec import KernelMemory, KernelShape, plain_torch, triton_kernel
from ligerprof.torch_memory.dtypes import FP32_BYTES

# columns of a row, which a program holds whole
MAX_COLUMNS = 65536

# elements of a tile: for a program that takes one tile, and for one that walks over several
_TILE_ELEMENTS, _WALKED_ELEMENTS = 4096, 8192
_ELEMENTS_PER_WARP = 1024
_MIN_WARPS, _MAX_WARPS = 4, 32

# tiles in flight in a program that walks: two are prefetched. Prefetching only one is slower than prefetching none
_STAGES = 3
# shared memory that the reductions need
_RESERVED_BYTES = 2048
# of the mean and the reciprocal deviation of a row, which are prefetched with it
_STATISTICS_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPlan:
    """One launch over rows.

    Attributes:
        block: columns per tile: the row's, rounded up to a power of two.
        tile_rows: rows per tile.
        programs: one per tile, or fewer that walk over the tiles; each of those has its own partial sums.
        warps: warps per program.
        stages: tiles in flight per program.
        is_long: see `is_long`.
    """

    block: int
    tile_rows: int
    programs: int
    warps: int
    stages: int
    is_long: bool


def plan_forward(*, rows: int, columns: int, sm_count: int, shared_bytes: int, read_bytes: int) -> RowPlan:
    """One program per tile; long rows are walked as in backward, since only a few fit a multiprocessor.

    The arguments are those of `plan_backward`.
    """
    block = next_power_of_2(columns)
    if is_long(columns):
        return plan_backward(
            rows=rows, columns=columns, sm_count=sm_count, shared_bytes=shared_bytes, read_bytes=read_bytes
        )
    tile_rows = _tile_rows(block, _TILE_ELEMENTS)
    return RowPlan(
        block=block,
        tile_rows=tile_rows,
        programs=-(-rows // tile_rows),
        warps=_warps(tile_rows * block),
        stages=1,
        is_long=False,
    )


def plan_backward(*, rows: int, columns: int, sm_count: int, shared_bytes: int, read_bytes: int) -> RowPlan:
    """Programs that walk over the tiles, one per multiprocessor: enough bytes in flight, and few partial sums.

    Args:
        shared_bytes: shared memory available to one program.
        read_bytes: bytes per column, summed over the tensors that are read row by row.
    """
    block = next_power_of_2(columns)
    tile_rows = _tile_rows(block, _WALKED_ELEMENTS)
    prefetched_bytes = (_STAGES - 1) * tile_rows * (block * read_bytes + _STATISTICS_BYTES)
    prefetches = prefetched_bytes <= shared_bytes - _RESERVED_BYTES
    return RowPlan(
        block=block,
        tile_rows=tile_rows,
        programs=backward_programs(rows=rows, columns=columns, sm_count=sm_count),
        # without prefetching, more warps hide the latency of the loads, and each thread holds less
        warps=_warps(tile_rows * block * (1 if prefetches else 2)),
        stages=_STAGES if prefetches else 1,
        is_long=is_long(columns),
    )


def backward_programs(*, rows: int, columns: int, sm_count: int) -> int:
    """Programs of the backward launch: the fewest that finish in as many turns as one per multiprocessor would."""
    tiles = -(-rows // _tile_rows(next_power_of_2(columns), _WALKED_ELEMENTS))
    turns = max(-(-tiles // sm_count), 1)
    return -(-tiles // turns)


def is_long(columns: int) -> bool:
    """Whether a row and the sums over rows exceed a program's registers in fp32."""
    return columns > _WALKED_ELEMENTS


def _tile_rows(block: int, elements: int) -> int:
    return max(1, elements // block)


def _warps(elements: int) -> int:
    return min(max(elements // _ELEMENTS_PER_WARP, _MIN_WARPS), _MAX_WARPS)


def _rms_memory(shape: KernelShape) -> KernelMemory:
    return _memory(shape, parameters=("weight",), statistics=1)


def _layernorm_memory(shape: KernelShape) -> KernelMemory:
    return _memory(shape, parameters=("weight", "bias"), statistics=2)


def _memory(shape: KernelShape, *, parameters: tuple[str, ...], statistics: int) -> KernelMemory:
    """Keeps the input and `statistics` fp32 values per row; each program of backward sums the parameters' gradients."""
    output_bytes = shape.tokens * shape.hidden * shape.activation_bytes
    programs = backward_programs(rows=shape.tokens, columns=shape.hidden, sm_count=shape.sm_count)
    elements = len(parameters) * shape.hidden if shape.weight_requires_grad else 0
    return KernelMemory(
        kept_inputs=("x", *parameters),
        output_bytes=output_bytes,
        saved_bytes=statistics * shape.tokens * FP32_BYTES,
        backward_gradient_bytes=output_bytes + elements * shape.parameter_bytes,
        backward_temporary_bytes=programs * elements * FP32_BYTES,
    )


def _add_rms_memory(shape: KernelShape) -> KernelMemory:
    """Keeps and returns the sum; both addends share one gradient, cast once if autocast made their dtypes differ.

    `activation_bytes` describes the residual stream; the other addend has the dtype of matrix products.
    """
    alone = _rms_memory(shape)
    elements = shape.tokens * shape.hidden
    cast_bytes = elements * shape.product_bytes if shape.product_bytes != shape.activation_bytes else 0
    return replace(
        alone,
        kept_inputs=("weight",),
        keeps_output=True,
        output_bytes=2 * alone.output_bytes,
        backward_gradient_bytes=alone.backward_gradient_bytes + cast_bytes,
    )


_RMS = triton_kernel("rms", "RMSNorm, one rounding, backward in one pass", "norm:rms_norm", _rms_memory)
_LAYERNORM = triton_kernel(
    "layernorm", "LayerNorm, one rounding, backward in one pass", "norm:layer_norm", _layernorm_memory
)
SPECS = (
    _RMS,
    triton_kernel(
        "rms",
        "residual addition and RMSNorm in one pass each way",
        "norm:add_rms_norm",
        _add_rms_memory,
        name="add_rms",
    ),
    plain_torch(_RMS, "RMSNorm in plain torch, upcast to fp32"),
    _LAYERNORM,
    plain_torch(_LAYERNORM, "LayerNorm of torch"),
)
