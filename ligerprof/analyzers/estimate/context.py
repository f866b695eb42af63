"""What every part of a model needs while it is written down on a tape: sizes, dtypes, weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ligerprof.analyzers.estimate.tape import Operation, Tape, Tensor, Value, Weight
from ligerprof.kernels.spec import KernelSpec
from ligerprof.models import ModelSpec
from ligerprof.recipe.categories import Attention
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.torch_memory import autocast
from ligerprof.torch_memory.dtypes import DTYPE_BYTES, FP32_BYTES


@dataclass(slots=True, eq=False)
class Context:
    """One forward pass being written down.

    Attributes:
        tape: where operations go; a checkpointed layer has its own.
        weights: every parameter by name.
        kernels: the fused kernels in place, by name.
        mask: the attention mask, where one is made.
        casts: autocast's cache of weight copies: they live until autocast is left.
    """

    recipe: TrainingRecipe
    tape: Tape
    weights: Mapping[str, Weight]
    kernels: Mapping[str, KernelSpec]
    mask: Value | None = None
    casts: list[Value] = field(default_factory=list)

    @property
    def spec(self) -> ModelSpec:
        """The model's shape."""
        return self.recipe.spec

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch."""
        return self.recipe.tokens

    @property
    def stream_bytes(self) -> int:
        """Bytes an element of the residual stream, which has the weights' dtype."""
        return DTYPE_BYTES[self.recipe.weight_dtype]

    @property
    def compute_bytes(self) -> int:
        """Bytes an element that matrix products read."""
        return DTYPE_BYTES[self.recipe.compute_dtype]

    @property
    def half_bytes(self) -> int | None:
        """Bytes an element that autocast computes in, None without autocast."""
        return DTYPE_BYTES[self.recipe.autocast] if self.recipe.autocast else None

    def is_fused(self, slot: str) -> bool:
        """Whether a kernel with memory of its own fills the slot; plain torch is counted operation by operation."""
        return slot in self.kernels and self.kernels[slot].memory is not None

    def cast(self, value: Value, width: int) -> Value:
        """`value.to(dtype)`: a copy, or the tensor itself under one more name."""
        if value.width == width:
            return self.tape.name(value)
        return self.tape.run(Operation(elements=value.elements, width=width, inputs=(value,)))

    def cast_for(self, operator: str, value: Value) -> Value:
        """The tensor as autocast hands it to `operator`: in fp32 if the operator is on that list."""
        widens = self.half_bytes is not None and operator in autocast.FP32
        return self.cast(value, FP32_BYTES if widens else value.width)

    def autocast(self, value: Value) -> Value:
        """The tensor as autocast hands it to a matrix product."""
        return self.cast(value, self.half_bytes or value.width)

    def autocast_weight(self, weight: Weight) -> Tensor:
        """The weight as a matrix product reads it; autocast keeps the copy of one that trains until it is left."""
        if self.half_bytes is None or weight.width == self.half_bytes:
            return weight
        cast = self.tape.run(
            Operation(
                elements=weight.elements,
                width=self.half_bytes,
                inputs=(weight,),
                role=Role.WEIGHT_CASTS,
                gradient_role=Role.GRADIENTS,
            )
        )
        if weight.trainable:
            self.casts.append(cast)
        return cast

    def leave_autocast(self) -> None:
        """Autocast's cache is cleared when its outermost context ends."""
        self.tape.release(*self.casts)
        self.casts.clear()


def is_eager(recipe: TrainingRecipe) -> bool:
    """Whether attention is written out in tensor operations."""
    return recipe.attention is Attention.EAGER
