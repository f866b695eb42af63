"""A model around its decoder layers: its tape of tensor operators, with the head and loss that the recipe chooses."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ligerprof.analyzers.estimate.chunked_loss import log_softmax, nll
from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.hooks import Part
from ligerprof.analyzers.estimate.lora import adapter_rank, add_adapter_to_embedding
from ligerprof.analyzers.estimate.loss import head_and_loss, loss_of_logits, loss_takes_output, project_to_logits
from ligerprof.analyzers.estimate.masks import steps_of_mask
from ligerprof.analyzers.estimate.meter import Allocation
from ligerprof.analyzers.estimate.norms import norm
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.operations import renamed, scale
from ligerprof.analyzers.estimate.operators import Replay
from ligerprof.analyzers.estimate.places import EMBEDDING, HEAD, WHOLE
from ligerprof.analyzers.estimate.tensors import Tensor, Value
from ligerprof.models.layer_tape import PLAIN_MASK, Operand, Step, layers_make_tables, model_tape
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.torch_memory.dtypes import INDEX_BYTES
from ligerprof.torch_memory.sorting import embedding_scratch

Layers = Callable[["ModelReplay", Value, Allocation], tuple[Value, Allocation]]
# of what the embedding is made of
_IN_EMBEDDING = ("embed", "add", "multiply", "dropout")


class ModelReplay(Replay):
    """Runs the steps of a model's tape.

    Args:
        context: what runs before the layers.
        top: what runs after them.
        layers: runs them on the residual stream, with the reference that the loop's variable hands over.
        stream_role: the role of what the first layer reads.

    Attributes:
        masks: by whether their layers have a window.
        leaf: what autograd starts at, if that is not at a parameter, held once for the caller.
    """

    def __init__(self, context: Context, top: Context, layers: Layers, stream_role: Role) -> None:
        # indices of tokens, or their positions
        self._given = Value(context.tokens, INDEX_BYTES, needs_gradient=False, block=None)
        super().__init__(context, self._given)
        self._bottom, self._top, self._layers, self._stream_role = context, top, layers, stream_role
        self._steps = model_tape(context.spec)
        self._stream = next(step[2][0] for step in self._steps if step[0] == "layers")
        self._embeddings = sum(step[0] == "embed" for step in self._steps)
        self.masks: dict[bool, Value] = {}
        self.leaf: Value | None = None

    def loss(self) -> Value:
        """The loss, which one variable holds."""
        return self.run(self._steps)

    @property
    def tables(self) -> list[Allocation]:
        """The memory of the rotary tables."""
        numbers = [step[1] for step in self._steps if step[0] == "tables"]
        flat = [item for found in numbers for item in ([found] if isinstance(found, int) else found)]
        made = (self._values.get(number) for number in flat)
        return [value.block for value in made if isinstance(value, Value) and value.block is not None]

    def role_of(self, results: int | Sequence[int], _output: int | None) -> Role:
        """The role of what a step makes."""
        if self.context is self._top:
            return Role.LOGITS
        return self._stream_role if results == self._stream else Role.ACTIVATIONS

    def release(self, *values: Value) -> None:
        """Variables end of what ran before or after the layers."""
        self._bottom.tape.release(*values)
        self._top.tape.release(*values)

    def replaced(
        self, step: Step, values: Sequence[Any], _following: Iterable[Step]
    ) -> tuple[Sequence[Tensor | None], int]:
        """What the caller, another loss or a kernel makes in place of a step, and of how many of the next ones."""
        kind, _, operands, *details = step
        if self.context is self._bottom:
            self.tape.meter.place = EMBEDDING if kind in _IN_EMBEDDING else WHOLE
        if kind == "layers":
            return [self._run_layers(values[0], operands[0], moves=details[0])], 0
        if kind == "tables" and details[0] >= len(set(self.context.spec.layer_kinds.windowed)):
            return [None], details[1]
        if self.context is self._top and kind in ("multiply", "keep output") and loss_takes_output(self.context):
            return [self.tape.name(values[0])], 0
        if kind in ("head", "loss"):
            made = (head_and_loss if kind == "head" else loss_of_logits)(self.context, values[0])
            return ([], 0) if made is None else ([made], details[0])
        return (), 0

    def _run_layers(self, stream: Value, number: int, *, moves: bool) -> Value:
        """Run the layers; `moves` says that the loop's variable is the only one of the stream."""
        tape = self.tape
        held = self._held.pop(number) if moves else [tape.name(stream)]
        block = tape.hand_over(stream)
        self.release(*held[1:])
        output, left = self._layers(self, stream, block)
        self.context, self.tape = self._top, self._top.tape
        self.tape.receive(left)
        self.tape.meter.place = HEAD
        return output

    def make_tables(self, *_given: object) -> tuple[()]:
        """Nothing by itself: the steps that follow make it."""
        return ()

    make_head = make_loss = make_tables

    def make_embed(self, indices: Value, path: str, scales: bool) -> Value:
        """The rows of an embedding, with the number that its module may multiply them by."""
        context, row = self.context, self.context.spec.architecture
        is_tokens = path == row.embedding
        if is_tokens:
            context.hooks.enter(Part.EMBEDDING)
        role = self._stream_role if row.positions is None else Role.ACTIVATIONS
        embedded = look_up(context, f"{path}.weight", indices.elements, role)
        if f"{path}.lora_A" in context.weights:
            embedded = add_adapter_to_embedding(context, embedded, path, role)
        if scales:
            embedded = renamed(context, embedded, scale(context, embedded, role=role))
        # enable_input_require_grads: without it a checkpointed layer would have nothing to differentiate
        if is_tokens and embedding_is_leaf(context.recipe):
            embedded.needs_gradient = True
            self.leaf = self.tape.name(embedded)
        self._embeddings -= 1
        if not self._embeddings:
            context.hooks.leave(Part.EMBEDDING)
        return embedded

    def make_new(self, sizes: Sequence[str | int], like: Operand, *, role: Role = Role.ACTIVATIONS) -> Value:
        """A tensor without a gradient."""
        return super().make_new(sizes, like, role=Role.INPUTS if like == "long" else role)

    def make_mask(self, function: str) -> Value | None:
        """The mask that a function of transformers makes, if attention has one."""
        made = _MaskReplay(self.context, self._given).outputs(steps_of_mask(self.context.recipe, function))
        self.masks.update((function != PLAIN_MASK, mask) for mask in made)
        return made[0] if made else None

    def make_norm(self, value: Value, path: str) -> Value:
        """The norm after the layers."""
        self.context.hooks.enter(Part.NORM)
        output = norm(self.context, value, path)
        self.context.hooks.leave(Part.NORM)
        return output

    def make_linear(self, value: Value, _path: str) -> Value:
        """The head."""
        return project_to_logits(self.context, value)

    def make_log_softmax(self, logits: Value) -> Value:
        """`log_softmax` in fp32."""
        return log_softmax(self.tape, logits)

    def make_nll(self, log_probabilities: Value, labels: Value) -> Value:
        """The mean loss."""
        return nll(self.tape, log_probabilities, labels)


class _MaskReplay(Replay):
    """Runs the steps of a function that makes a mask."""

    def role_of(self, _results: int | Sequence[int], _output: int | None) -> Role:
        """All are inputs."""
        return Role.INPUTS

    def make_new(self, sizes: Sequence[str | int], like: Operand, *, role: Role = Role.INPUTS) -> Value:
        """A tensor without a gradient."""
        return super().make_new(sizes, like, role=role)


def embedding_is_leaf(recipe: TrainingRecipe) -> bool:
    """Whether autograd starts at the output of a frozen embedding, so that checkpointed layers have a gradient."""
    is_frozen = not (recipe.trains_in_full(recipe.spec.architecture.embedding) or recipe.adapts_embedding)
    return adapter_rank(recipe) is not None and recipe.checkpointing and is_frozen


def look_up(context: Context, name: str, tokens: int, role: Role) -> Value:
    """The rows of an embedding."""
    weight = context.weights[name]
    hidden = weight.shape[-1]
    sorting, summing = embedding_scratch(tokens, weight.elements // hidden, hidden)
    return context.tape.run(
        Operation(
            elements=tokens * hidden,
            width=weight.width,
            inputs=(weight,),
            role=role,
            scratch_role=Role.ACTIVATIONS,
            other_saves=1,
            leading_gradient_scratch=sorting,
            backward_scratch_bytes=summing,
        )
    )


def keeps_tables(recipe: TrainingRecipe) -> bool:
    """Whether the rotary tables live until backward ends: layers save them, or their checkpoints hold them.

    Layers that make tables of their own do not.
    """
    return recipe.checkpointing or not layers_make_tables(recipe.spec.model_type)
