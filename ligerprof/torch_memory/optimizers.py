"""What each optimizer keeps for a parameter, what its step allocates, and what it goes with: one row per optimizer.

Read in torch 2.13 (torch/optim), transformers 5.23, bitsandbytes 0.50.2, galore_torch 1.0 and deepspeed/ops/adam.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ligerprof.gpus import GpuSpec
from ligerprof.torch_memory.dtypes import FP32_BYTES, HALF_BYTES, Scratch, highest_bytes, together
from ligerprof.torch_memory.libraries import svd_scratch
from ligerprof.torch_memory.low_bit import EIGHT_BIT_TABLE_SIZES, eight_bit_state_sizes, is_hidden_matrix
from ligerprof.torch_memory.reductions import axes_of, reduction_scratch

# bitsandbytes/optim/optimizer.py, get_state_buffer: smaller states are not paged
SMALLEST_PAGED = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizedTensor:
    """A trainable parameter.

    Attributes:
        width: bytes per element.
        in_layer: whether it belongs to a decoder layer.
        galore_rank: the rank of GaLore's projections.
        fp32_moments: whether an 8-bit optimizer keeps its moments in fp32; transformers' Trainer asks for that in
            embeddings (transformers/trainer.py, create_optimizer).
    """

    shape: tuple[int, ...]
    elements: int
    width: int
    in_layer: bool
    galore_rank: int
    fp32_moments: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of the parameter."""
        return self.elements * self.width

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether it is a matrix of a decoder layer, which GaLore projects and Muon orthogonalizes."""
        return is_hidden_matrix(in_layer=self.in_layer, dimensions=len(self.shape))

    @property
    def projected_bytes(self) -> int:
        """Bytes of the gradient that GaLore's Adam reads: the longer side times the rank (GaLoreProjector, `std`)."""
        if not self.is_hidden_matrix:
            return self.size_bytes
        return max(self.shape) * min(self.galore_rank, *self.shape) * self.width


Tensors = Sequence[OptimizedTensor]


def _nothing(_tensors: Tensors, _gpu: GpuSpec) -> Scratch:
    return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerRow:
    """One optimizer.

    Attributes:
        states: bytes of each state of a parameter in torch's allocator.
        moments: number of states of the parameter's own size and dtype; None if states have other sizes.
        label: words for such states, with the rank of GaLore's projections as `{rank}`.
        shared: bytes of each tensor that all parameters share.
        update: temporaries of the step.
        creation: temporaries while the first step creates states.
        paged: bytes of a parameter's states outside torch's allocator, in CUDA's managed memory.
        made: the class and the arguments that select the implementation; None if a function of its own makes it.
        package: the package of the class, as imported, besides torch and deepspeed; None for those.
        names: in configuration files of transformers and others.
        is_adam: whether it is Adam with two full moments.
        is_eight_bit: whether its moments have 8 bits.
        on_shards: whether it works element by element with torch's operators, on FSDP2's shards as on whole weights.
        is_partitioned: whether the estimate knows how DeepSpeed partitions its states.
        assumed: what an estimate with it assumes, as a sentence without a period.
    """

    states: Callable[[OptimizedTensor], tuple[int, ...]]
    moments: int | None = None
    label: str = ""
    shared: tuple[int, ...] = ()
    update: Callable[[Tensors, GpuSpec], Scratch] = _nothing
    creation: Callable[[Tensors, GpuSpec], Scratch] = _nothing
    paged: Callable[[OptimizedTensor], int] = lambda _tensor: 0
    made: tuple[str, Mapping[str, float]] | None = None
    package: str | None = None
    names: tuple[str, ...] = ()
    is_adam: bool = False
    is_eight_bit: bool = False
    on_shards: bool = False
    is_partitioned: bool = False
    assumed: str = ""


def _whole(count: int) -> Callable[[OptimizedTensor], tuple[int, ...]]:
    return lambda tensor: (tensor.size_bytes,) * count


def _fused_adam_states(tensor: OptimizedTensor) -> tuple[int, ...]:
    """Two moments, and steps counted on the GPU; other implementations count on the host (adamw.py, _init_group)."""
    return (tensor.size_bytes, tensor.size_bytes, FP32_BYTES)


def _loop_adam_update(tensors: Tensors, _gpu: GpuSpec) -> Scratch:
    """A square root and the denominator, whose variable holds it until the next one (adam.py, _single_tensor_adam)."""
    events: list[int] = []
    before = 0
    for tensor in tensors:
        now = tensor.size_bytes
        events += (now, now, -now, -before)
        before = now
    return _without_empty(*events, -before)


def _adafactor_states(tensor: OptimizedTensor) -> tuple[int, ...]:
    """Means of rows and columns of a matrix, all variances of a vector (_adafactor.py, _init_group)."""
    if len(tensor.shape) == 1:
        return (tensor.size_bytes,)
    rows, columns = _factor_elements(tensor)
    return rows * tensor.width, columns * tensor.width


def _factor_elements(tensor: OptimizedTensor) -> tuple[int, int]:
    return tensor.elements // tensor.shape[-1], tensor.elements // tensor.shape[-2]


def _adafactor_update(tensors: Tensors, gpu: GpuSpec) -> Scratch:
    """Of a matrix norms of rows and columns and its variance, which becomes the update; of a vector its squares, too.

    Variables hold them until the next ones (_adafactor.py, _single_tensor_adafactor).
    """
    events: list[int] = []
    rows = columns = squares = update = 0
    for tensor in tensors:
        size_bytes = tensor.size_bytes
        if len(tensor.shape) == 1:
            events += (size_bytes, -squares)
            squares = size_bytes
        else:
            of_rows, of_columns = (elements * tensor.width for elements in _factor_elements(tensor))
            events += (of_rows, -rows, of_columns, *_column_reduction(tensor, tensor.width, gpu), -columns)
            rows, columns = of_rows, of_columns
        events += (size_bytes, -update)
        update = size_bytes
    return _without_empty(*events, -rows, -columns, -squares, -update)


def _column_reduction(tensor: OptimizedTensor, width: int, gpu: GpuSpec) -> Scratch:
    """The workspaces of a norm or mean of a matrix over `dim=-2`, of elements of `width` bytes."""
    strides = tuple(prod(tensor.shape[dim + 1 :]) for dim in range(len(tensor.shape)))
    axes = axes_of(tensor.shape, strides, width, (-2,))
    return reduction_scratch(axes, gpu)


def _hf_adafactor_states(tensor: OptimizedTensor) -> tuple[int, ...]:
    """Means of rows and columns, or all variances, in fp32, and the root mean square of the parameter."""
    factors = (tensor.elements,) if len(tensor.shape) == 1 else _factor_elements(tensor)
    return (*(elements * FP32_BYTES for elements in factors), FP32_BYTES)


def _hf_adafactor_update(tensors: Tensors, gpu: GpuSpec) -> Scratch:
    """Squares, the means of a matrix and their roots, and updates, in fp32; and fp32 copies of 16-bit tensors.

    transformers/optimization.py, Adafactor.step. Variables hold copies and update until those of the next parameter.
    """
    events: list[int] = []
    copy = update = 0
    for tensor in tensors:
        now = tensor.elements * FP32_BYTES
        made = 0 if tensor.width == FP32_BYTES else now
        events += (-copy, made, -copy, made, now, now, -now, -update)
        copy, update = made, now
        if len(tensor.shape) > 1:
            rows, columns = (elements * FP32_BYTES for elements in _factor_elements(tensor))
            events += (rows, -rows, columns, *_column_reduction(tensor, FP32_BYTES, gpu), -columns)
            events += (rows, columns, now, -rows, -columns, -now)
        else:
            events += (now, -now)
        # the update with the opposite sign
        events += (now, -now)
    return _without_empty(*events, -copy, -copy, -update)


def _muon_states(tensor: OptimizedTensor) -> tuple[int, ...]:
    """Momentum of a matrix in a decoder layer (_muon.py, _init_group); fused AdamW's moments of any other parameter."""
    return (tensor.size_bytes,) if tensor.is_hidden_matrix else _fused_adam_states(tensor)


def _muon_update(tensors: Tensors, _gpu: GpuSpec) -> Scratch:
    """The update, two iterates in bf16 and two Gram matrices of the shorter side (_muon.py, Newton-Schulz)."""
    events: list[int] = []
    for tensor in tensors:
        if tensor.is_hidden_matrix:
            iterates, grams = (tensor.elements * HALF_BYTES,) * 2, (min(tensor.shape) ** 2 * HALF_BYTES,) * 2
            events += together(tensor.size_bytes, *iterates, *grams)
    return tuple(events)


def _eight_bit_states(tensor: OptimizedTensor) -> tuple[int, ...]:
    return (tensor.elements * FP32_BYTES,) * 2 if tensor.fp32_moments else eight_bit_state_sizes(tensor.elements)


def _is_paged(tensor: OptimizedTensor) -> bool:
    return tensor.elements >= SMALLEST_PAGED


def _paged_states(tensor: OptimizedTensor) -> tuple[int, ...]:
    return () if _is_paged(tensor) else (tensor.elements * FP32_BYTES,) * 2


def _paged_eight_bit_states(tensor: OptimizedTensor) -> tuple[int, ...]:
    """The scales of moments in 8 bits are not paged (Optimizer2State.init_state)."""
    if tensor.fp32_moments:
        return _paged_states(tensor)
    sizes = eight_bit_state_sizes(tensor.elements)
    return sizes[2:] if _is_paged(tensor) else sizes


def _paged_bytes(moment_width: int) -> Callable[[OptimizedTensor], int]:
    def paged(tensor: OptimizedTensor) -> int:
        width = FP32_BYTES if tensor.fp32_moments else moment_width
        return 2 * width * tensor.elements if _is_paged(tensor) else 0

    return paged


def _galore_states(tensor: OptimizedTensor) -> tuple[int, ...]:
    """Projection and two moments of a projected tensor, else two moments.

    The projection of an fp32 gradient is a view of all singular vectors of the shorter side, so all of them stay;
    in 16 bits it is a copy of the first ones (get_orthogonal_matrix).
    """
    moments = (tensor.projected_bytes, tensor.projected_bytes)
    if not tensor.is_hidden_matrix:
        return moments
    shorter = min(tensor.shape)
    vectors = shorter if tensor.width == FP32_BYTES else min(tensor.galore_rank, shorter)
    return vectors * shorter * tensor.width, *moments


def _galore_creation(tensors: Tensors, _gpu: GpuSpec) -> Scratch:
    """What a singular value decomposition of a gradient takes at most, without a workspace that is not known.

    An fp32 copy of a 16-bit gradient, the copy that is overwritten, both sets of vectors, and the workspace
    (get_orthogonal_matrix in galore_torch; `svd_scratch`).
    """
    taken = [0]
    for tensor in tensors:
        if tensor.is_hidden_matrix:
            copies = 0 if tensor.width == FP32_BYTES else 1
            vectors_bytes = ((1 + copies) * tensor.elements + min(tensor.shape) ** 2) * FP32_BYTES
            taken.append(vectors_bytes + highest_bytes(svd_scratch(*tensor.shape)))
    return together(max(taken))


def _galore_update(tensors: Tensors, _gpu: GpuSpec) -> Scratch:
    """The most that the optimizer's step holds: galore_torch's Adam goes tensor by tensor (adamw.py, `step`).

    Each tensor's denominator and normalized gradient live in variables until the next tensor's take their place. A
    projected one also has its projected gradient, and what is projected back before and after it is scaled. Tensors
    that are not projected come first.
    """
    most_bytes = denominator = normalized = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.is_hidden_matrix):
        low = tensor.projected_bytes
        gradient, made = (low, 3 * low + 2 * tensor.size_bytes) if tensor.is_hidden_matrix else (0, 2 * low)
        most_bytes = max(most_bytes, gradient + denominator + low + normalized, gradient + low + normalized + low, made)
        denominator, normalized = low, tensor.size_bytes
    return together(most_bytes)


def _without_empty(*events: int) -> Scratch:
    return tuple(filter(None, events))


OPTIMIZERS: Mapping[str, OptimizerRow] = {
    "adamw-fused": OptimizerRow(
        states=_fused_adam_states,
        moments=2,
        made=("AdamW", {"fused": True}),
        names=("adamw_torch_fused", "adamw_fused"),
        is_adam=True,
        on_shards=True,
        is_partitioned=True,
    ),
    "adamw-foreach": OptimizerRow(
        states=_whole(2),
        moments=2,
        # the square roots of all second moments (adam.py, _multi_tensor_adam)
        update=lambda tensors, _gpu: together(*(tensor.size_bytes for tensor in tensors)),
        made=("AdamW", {"foreach": True}),
        names=("adamw_torch", "adamw_hf"),
        is_adam=True,
        on_shards=True,
        is_partitioned=True,
    ),
    "adamw": OptimizerRow(
        states=_whole(2),
        moments=2,
        update=_loop_adam_update,
        made=("AdamW", {"foreach": False}),
        is_adam=True,
        on_shards=True,
    ),
    "adamw-8bit": OptimizerRow(
        states=_eight_bit_states,
        label="8-bit moments",
        shared=EIGHT_BIT_TABLE_SIZES,
        made=("AdamW8bit", {}),
        package="bitsandbytes",
        names=("adamw_bnb_8bit", "adamw_8bit"),
        is_eight_bit=True,
    ),
    "paged-adamw": OptimizerRow(
        states=_paged_states,
        label="moments that are not paged",
        paged=_paged_bytes(FP32_BYTES),
        # its states have 32 bits
        made=("PagedAdamW", {}),
        package="bitsandbytes",
        names=("paged_adamw_32bit", "paged_adamw"),
    ),
    "paged-adamw-8bit": OptimizerRow(
        states=_paged_eight_bit_states,
        label="moments that are not paged",
        shared=EIGHT_BIT_TABLE_SIZES,
        paged=_paged_bytes(1),
        made=("PagedAdamW8bit", {}),
        package="bitsandbytes",
        names=("paged_adamw_8bit",),
        is_eight_bit=True,
    ),
    "adafactor": OptimizerRow(
        states=_adafactor_states,
        label="factored moments",
        update=_adafactor_update,
        made=("Adafactor", {"foreach": False}),
        assumed="Adafactor is torch.optim's; that of transformers' Trainer is adafactor-hf",
    ),
    "adafactor-hf": OptimizerRow(
        states=_hf_adafactor_states,
        label="factored fp32 moments",
        update=_hf_adafactor_update,
        names=("adafactor",),
    ),
    # bitsandbytes/optim/lion.py: Optimizer1State with a moment in fp32
    "lion": OptimizerRow(
        states=lambda tensor: (tensor.elements * FP32_BYTES,),
        label="fp32 moments",
        made=("Lion", {}),
        package="bitsandbytes",
        names=("lion_32bit", "lion", "lion_pytorch"),
        assumed="Lion as in bitsandbytes 0.50, with moments in fp32",
    ),
    # bitsandbytes/optim/ademamix.py: a fast and a slow mean in one tensor, and the squares, all in fp32
    "ademamix": OptimizerRow(
        states=lambda tensor: (2 * tensor.elements * FP32_BYTES, tensor.elements * FP32_BYTES),
        label="three fp32 moments",
        made=("AdEMAMix", {}),
        package="bitsandbytes",
        names=("ademamix",),
        assumed="AdEMAMix as in bitsandbytes 0.50, with moments in fp32",
    ),
    "muon": OptimizerRow(
        states=_muon_states,
        label="momentum and moments",
        update=_muon_update,
        names=("muon",),
        assumed="torch.optim.Muon on the matrices of decoder layers, fused AdamW on all other parameters",
    ),
    "galore": OptimizerRow(
        states=_galore_states,
        label="moments of rank {rank}",
        update=_galore_update,
        creation=_galore_creation,
        package="galore_torch",
        names=("galore_adamw", "galore"),
        assumed=(
            "GaLore as in galore_torch 1.0, on the matrices of decoder layers, without a decomposition in this step"
        ),
    ),
    # sgd.py without momentum
    "sgd": OptimizerRow(
        states=_whole(0),
        moments=0,
        made=("SGD", {"foreach": True}),
        names=("sgd",),
        on_shards=True,
        is_partitioned=True,
    ),
    # a clone of the first gradient, then updated in place (sgd.py, _multi_tensor_sgd)
    "sgd-momentum": OptimizerRow(states=_whole(1), moments=1, made=("SGD", {"foreach": True, "momentum": 0.9})),
    "none": OptimizerRow(states=_whole(0), moments=0, on_shards=True),
    "deepspeed-cpu-adam": OptimizerRow(states=_whole(2), moments=2, is_adam=True, is_partitioned=True),
}


def moment_count(optimizer: str) -> int:
    """Optimizer states as large as the trainable weights; only for optimizers whose states are."""
    moments = OPTIMIZERS[optimizer].moments
    if moments is None:
        raise ValueError(f"the states of {optimizer} have other sizes")
    return moments


def step_copies(optimizer: str) -> int:
    """Tensors of a parameter's size and dtype that a step makes for all parameters at once."""
    return 1 if optimizer == "adamw-foreach" else 0
