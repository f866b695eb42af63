"""The state that all parts of a model share while they are traced onto a tape: sizes, dtypes, weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ligerprof.analyzers.estimate.hooks import Hooks
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.tape import Tape
from ligerprof.analyzers.estimate.tensors import Tensor, Value, Weight
from ligerprof.kernels.spec import KernelSpec
from ligerprof.models import ModelSpec
from ligerprof.recipe.categories import Attention
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.torch_memory import autocast
from ligerprof.torch_memory.dtypes import DTYPE_BYTES, FP32_BYTES


@dataclass(slots=True, eq=False)
class Context:
    """A forward pass that is being traced.

    Attributes:
        tape: receives the operations; a checkpointed layer has its own.
        weights: every parameter by name.
        kernels: the fused kernels of the recipe, by name.
        layer: the index of the decoder layer.
        mask: the layer's attention mask, if it has one.
        leaf: the layer's input if autograd takes it for a leaf, so that autocast caches its copy as it does weights'.
        casts: autocast's cache of weight copies, which are freed when autocast ends.
        hooks: what the engine does around modules.
        autocasts: whether autocast is on where the recipe has it.
        unpacks_once: whether it is a layer under non-reentrant checkpointing, whose hooks release what they unpack.
    """

    recipe: TrainingRecipe
    tape: Tape
    weights: Mapping[str, Weight]
    kernels: Mapping[str, KernelSpec]
    layer: int = 0
    mask: Value | None = None
    leaf: Value | None = None
    leaf_cast: Value | None = None
    casts: list[Value] = field(default_factory=list)
    hooks: Hooks = field(default_factory=Hooks)
    autocasts: bool = True
    unpacks_once: bool = False

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
        """Bytes per element of the residual stream, which has the weights' dtype."""
        return DTYPE_BYTES[self.recipe.gathered_dtype]

    @property
    def compute_bytes(self) -> int:
        """Bytes per element of matrix products' operands."""
        return DTYPE_BYTES[self.recipe.compute_dtype]

    @property
    def half_bytes(self) -> int | None:
        """Bytes per element of autocast's dtype, None without autocast."""
        return DTYPE_BYTES[self.recipe.autocast] if self.recipe.autocast and self.autocasts else None

    def is_float16(self, value: Value) -> bool:
        """Whether an activation is in fp16, which is the only dtype of its width in the recipe if it is."""
        return self.recipe.precision.uses_float16 and value.width == DTYPE_BYTES["float16"]

    @property
    def rotates(self) -> bool:
        """Whether the layer rotates query and key."""
        return self.spec.layer_kinds.rotated[self.layer]

    def is_fused(self, slot: str, name: str = "") -> bool:
        """Whether a kernel with a stated memory cost fills the slot, in the module of that name if one is given.

        Plain torch is counted by operation.
        """
        return self.replaces(slot, name) and self.kernels[slot].memory is not None

    def replaces(self, slot: str, name: str) -> bool:
        """Whether a kernel fills the slot in the module of that name."""
        kernel = self.kernels.get(slot)
        return kernel is not None and name.rpartition(".")[2] not in kernel.leaves(self.spec)

    def cast(self, value: Value, width: int, *, role: Role = Role.ACTIVATIONS) -> Value:
        """`value.to(dtype)`: a copy, or one more reference to the tensor itself."""
        if value.width == width:
            return self.tape.name(value)
        gradient_role = Role.ACTIVATIONS if role is Role.ACTIVATIONS else value.gradient_role
        return self.tape.run(
            Operation(elements=value.elements, width=width, inputs=(value,), role=role, gradient_role=gradient_role)
        )

    def cast_weight(self, weight: Weight, width: int) -> Tensor:
        """`weight.to(dtype)`: a copy that autocast does not keep, or the weight itself."""
        if weight.width == width:
            return weight
        return self.tape.run(Operation(elements=weight.elements, width=width, inputs=(weight,)))

    def cast_for(self, operator: str, value: Value) -> Value:
        """The tensor that autocast passes to `operator`: in fp32 if the operator is on that list."""
        widens = self.half_bytes is not None and operator in autocast.FP32
        return self.cast(value, FP32_BYTES if widens else value.width)

    def result_width(self, operator: str, value: Value) -> int:
        """Bytes per element of what `operator` returns: autocast requests fp32 of some, without a cast of the input."""
        widens = self.half_bytes is not None and operator in autocast.FP32_RESULT
        return FP32_BYTES if widens else value.width

    def autocast(self, value: Value) -> Value:
        """The tensor that autocast passes to a matrix product."""
        width = self.half_bytes or value.width
        if value is not self.leaf or value.width == width:
            return self.cast(value, width)
        if self.leaf_cast is None:
            self.leaf_cast = self.cast(value, width)
            self.casts.append(self.leaf_cast)
        return self.tape.name(self.leaf_cast)

    def autocast_weight(self, weight: Tensor) -> Tensor:
        """The weight that a matrix product reads; autocast caches the copy of a trainable weight until it ends."""
        if self.half_bytes is None or weight.width == self.half_bytes:
            return weight
        if isinstance(weight, Value):
            return self.cast(weight, self.half_bytes)
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
        """Clear autocast's cache, as the end of its outermost context does."""
        self.tape.release(*self.casts)
        self.casts.clear()


def is_eager(recipe: TrainingRecipe) -> bool:
    """Whether attention runs as separate tensor operations."""
    return recipe.attention is Attention.EAGER
