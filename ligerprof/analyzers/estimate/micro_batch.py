"""Forward and backward of one micro-batch through the whole model.

Of layers that repeat, alone or in a pattern, one repetition is run in place of all in the middle
(`traced_layers`). Each repetition changes the bytes by the same amount, so the highest moment is in the
first or the last of them (`Meter.repeat`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ligerprof.analyzers.estimate.context import Context
from ligerprof.analyzers.estimate.hooks import Hooks, Part
from ligerprof.analyzers.estimate.layers import run_layer
from ligerprof.analyzers.estimate.masks import last_reader
from ligerprof.analyzers.estimate.meter import Allocation, Meter
from ligerprof.analyzers.estimate.model import ModelReplay, keeps_tables
from ligerprof.analyzers.estimate.offloading import Offloading, PackedTensor
from ligerprof.analyzers.estimate.output_cache import OutputCache
from ligerprof.analyzers.estimate.places import EMBEDDING, HEAD, WHOLE
from ligerprof.analyzers.estimate.recomputed import TapeWithParts
from ligerprof.analyzers.estimate.tape import Tape
from ligerprof.analyzers.estimate.tensors import Value, Weight
from ligerprof.analyzers.estimate.traced import Repetition, traced_layers
from ligerprof.kernels.spec import KernelSpec
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.torch_memory.dtypes import FP32_BYTES


@dataclass(slots=True, eq=False)
class _Layer:
    """One decoder layer between its forward and its backward.

    Attributes:
        repetition: the layers that repeat with it.
        unread: what it returns besides its output.
        checkpoint: the input that checkpointing keeps for it, else None.
        packed_mask: the mask in main memory if checkpointing saves and offloads that, too, else None.
        cache: the outputs that selective checkpointing keeps, else None.
    """

    index: int
    repetition: Repetition
    source: Value
    output: Value
    unread: list[Value]
    context: Context
    checkpoint: Allocation | PackedTensor | None
    packed_mask: PackedTensor | None
    cache: OutputCache | None

    @property
    def place(self) -> str:
        """The name of the layers that it represents."""
        return self.repetition.place(self.index)


class MicroBatch:
    """One pass over the model on a meter that holds already what is static.

    Attributes:
        evaluates: whether the pass has no backward, so that the decoder's local tensors end with it.
        copies_embedding: whether autocast keeps a copy of the embedding's output, and with it the output.
        offloading: what is saved in main memory, or None.
    """

    def __init__(
        self,
        recipe: TrainingRecipe,
        weights: Mapping[str, Weight],
        kernels: Mapping[str, KernelSpec],
        meter: Meter,
        hooks: Hooks,
    ) -> None:
        self._recipe, self._weights, self._kernels, self._meter = recipe, weights, kernels, meter
        self._hooks = hooks
        self.evaluates = False
        self.copies_embedding = False
        # by whether the mask's layers have a window; and those that checkpoints hold
        self._layer_masks: dict[bool, Value] = {}
        self._masks: dict[bool, Value] = {}
        self._copied: list[Value] = []
        self._traced = traced_layers(recipe)
        self.offloading = Offloading(meter) if recipe.activation_offload else None
        self._bottom = self._new_context(Tape(meter, offloading=self.offloading))
        self._top = self._new_context(TapeWithParts(meter, offloading=self.offloading))
        self._layers: list[_Layer] = []
        # the embedding's output, if autograd starts there
        self._leaf: Value | None = None
        self._until_backward_ends: list[Allocation] = []
        self._until_graph_is_freed: list[Allocation] = []

    @property
    def offloaded_bytes(self) -> int:
        """Main memory that saved tensors take."""
        return 0 if self.offloading is None else self.offloading.host_bytes

    def forward(self) -> None:
        """Run embedding, layers, head and loss; what is left is what backward needs."""
        self._hooks.enter(Part.ROOT)
        self._loss = ModelReplay(self._bottom, self._top, self._run_layers, self._stream_role(0)).loss()
        self._hooks.leave(Part.ROOT)
        for layer in self._layers:
            self._meter.place = layer.place
            self._meter.repeat(layer.repetition.times, layer.context.leave_autocast, first_layer=layer.repetition.first)
        self._meter.place = HEAD
        self._top.leave_autocast()
        self._bottom.leave_autocast()
        self._bottom.tape.release(*self._copied)

    def _run_layers(self, model: ModelReplay, stream: Value, held: Allocation) -> tuple[Value, Allocation]:
        """Run the layers between the steps of `model`, with what they need for longer than its variables live."""
        self._masks = {
            windowed: mask
            for windowed, mask in model.masks.items()
            if not self._offloads_masks and last_reader(self._recipe, windowed=windowed) is not None
        }
        for mask in self._masks.values():
            self._bottom.tape.name(mask)
        if not self.evaluates and keeps_tables(self._recipe):
            self._until_backward_ends += [self._meter.keep(block) for block in model.tables]
        self._leaf = model.leaf
        if model.leaf is not None:
            self.copies_embedding |= model.leaf.block is stream.block
            block = self._bottom.tape.hand_over(model.leaf)
            if self.evaluates:
                # without a graph
                self._meter.drop(block)
            else:
                self._until_graph_is_freed.append(block)
        self._layer_masks = model.masks
        first = stream
        for repetition in self._traced:
            stream, held = self._layers_forward(repetition, stream, held)
        self._drop_unread()
        if self._layers[0].context.leaf_cast is not None:
            # autocast's copy of a leaf holds it
            self._copied.append(self._bottom.tape.name(first))
        return stream, held

    def backward(self) -> None:
        """Walk back from the loss; what is left are the gradients of the weights."""
        self._meter.place = HEAD
        gradient = self._meter.take(FP32_BYTES, Role.OTHER)
        self._hooks.gradient_arrives(Part.ROOT)
        flowing = self._top.tape.backward(self._loss, gradient, self._layers[-1].output)
        if flowing is not None:
            self._hooks.gradient_leaves(Part.NORM)
        self._top.tape.release(self._loss)
        for repetition in reversed(self._traced):
            flowing = self._layers_backward(repetition, flowing)
            if not self._recipe.reentrant:
                self._release_masks_after(repetition.first)
        self._end_shared()
        self._meter.place = EMBEDDING
        if flowing is not None:
            self._hooks.gradient_arrives(Part.EMBEDDING)
            of_leaf = self._bottom.tape.backward(self._layers[0].source, flowing, self._leaf)
            # a leaf lives as long as the graph, and with it its gradient
            self._until_graph_is_freed += [] if of_leaf is None else [of_leaf]
        self._bottom.tape.forget_gradients()
        self._end_tables()
        self._meter.place = WHOLE
        self._hooks.end_backward()
        if self.offloading is not None:
            self.offloading.clear()
        self._free_graph()

    def _free_graph(self) -> None:
        """The loss is detached after backward, as transformers' Trainer returns it."""
        for block in self._until_graph_is_freed:
            self._meter.drop(block)
        for layer in self._layers:
            self._meter.place = layer.place
            self._meter.repeat(
                layer.repetition.times, layer.context.tape.release_pins, first_layer=layer.repetition.first
            )
        self._meter.place = WHOLE

    def _stream_role(self, index: int) -> Role:
        """The role of the input of a layer."""
        return Role.CHECKPOINTS if self._recipe.checkpoints_layer(index) else Role.ACTIVATIONS

    def _release_masks_after(self, index: int) -> None:
        """The checkpoint of a mask's last reader ends with that layer's backward."""
        for windowed in tuple(self._masks):
            if last_reader(self._recipe, windowed=windowed) == index:
                self._bottom.tape.release(self._masks.pop(windowed))

    def _end_shared(self) -> None:
        """Masks and rotary tables end; reentrant checkpointing's functions hold them as long as the graph."""
        if not self._recipe.reentrant:
            return
        masks = (self._bottom.tape.hand_over(mask) for mask in self._masks.values())
        self._until_graph_is_freed += [*self._until_backward_ends, *masks]
        self._until_backward_ends = []

    def _end_tables(self) -> None:
        for block in self._until_backward_ends:
            self._meter.drop(block)
        self._until_backward_ends = []

    def _new_context(self, tape: Tape, index: int = 0, *, checkpointed: bool = False) -> Context:
        tape.hooks = self._hooks
        return Context(
            recipe=self._recipe,
            tape=tape,
            weights=self._weights,
            kernels=self._kernels,
            layer=index,
            mask=self._layer_masks.get(self._recipe.spec.layer_kinds.windowed[index]),
            hooks=self._hooks,
            unpacks_once=checkpointed and not self._recipe.reentrant,
        )

    def _layers_forward(self, repetition: Repetition, stream: Value, held: Allocation) -> tuple[Value, Allocation]:
        """Run layers on `stream`; the caller's loop variable `held` moves on to the last one's output."""
        reached = stream, held

        def run() -> None:
            nonlocal reached
            for index in repetition.indices:
                self._meter.place = repetition.place(index)
                reached = self._layer_forward(index, repetition, *reached)
            if repetition.times > 1:
                self._drop_unread()

        if repetition.times > 1:
            self._drop_unread()
        self._meter.repeat(repetition.times, run, repetition.places, first_layer=repetition.first)
        return reached

    def _layer_forward(
        self, index: int, repetition: Repetition, stream: Value, held: Allocation
    ) -> tuple[Value, Allocation]:
        checkpointing = self._recipe.checkpoints_layer(index)
        policy = self._recipe.policy_of_layer(index)
        cache = OutputCache(policy) if checkpointing and policy is not None else None
        pinning = not (checkpointing and self._recipe.reentrant)
        tape = Tape(self._meter, saving=not checkpointing, pinning=pinning, cache=cache)
        context = self._new_context(tape, index, checkpointed=checkpointing)
        if index == 0 and self.copies_embedding:
            context.leaf = stream
        is_last = index == self._recipe.spec.layers - 1
        output_role = Role.ACTIVATIONS if is_last else self._stream_role(index + 1)
        checkpoint = self._keep_input(held) if checkpointing else None
        packed_mask = self._pack_mask(context) if checkpointing else None
        self._hooks.enter(index)
        output, *unread = run_layer(context, stream, index, output_role)
        self._meter.drop(held)
        self._hooks.leave(index)
        self._drop_unread()
        self._layers.append(_Layer(index, repetition, stream, output, unread, context, checkpoint, packed_mask, cache))
        return output, context.tape.hand_over(output)

    def _drop_unread(self) -> None:
        """The loop's variable holds what a layer has returned until the next one returns."""
        if self._layers:
            self._layers[-1].context.tape.release(*self._layers[-1].unread)

    def _layers_backward(self, repetition: Repetition, gradient: Allocation | None) -> Allocation | None:
        flowing = gradient

        def run() -> None:
            nonlocal flowing
            for layer in reversed([layer for layer in self._layers if layer.repetition is repetition]):
                self._meter.place = layer.place
                flowing = None if flowing is None else self._layer_backward(layer, flowing)

        self._meter.repeat(repetition.times, run, repetition.places, first_layer=repetition.first, backward=True)
        return flowing

    def _layer_backward(self, layer: _Layer, gradient: Allocation) -> Allocation | None:
        self._hooks.gradient_arrives(layer.index)
        if layer.checkpoint is None:
            flowing = layer.context.tape.backward(layer.output, gradient, layer.source)
        else:
            flowing = self._recompute_and_backward(layer, gradient)
        if layer.source.needs_gradient:
            self._hooks.gradient_leaves(layer.index)
        return flowing

    def _recompute_and_backward(self, layer: _Layer, gradient: Allocation) -> Allocation | None:
        """torch.utils.checkpoint: run the layer again when its backward first needs a saved tensor.

        That run stops at the last tensor that backward needs. The reentrant kind runs the layer
        again before its backward begins, to the end, and holds its output.
        """
        first_pass = layer.context.tape
        reentrant = self._recipe.reentrant
        if not reentrant:
            first_pass.start_backward(layer.output, gradient)
        if layer.cache is not None:
            layer.cache.start_pass()
        again = Tape(self._meter, stop_after_saves=None if reentrant else first_pass.saves_seen, cache=layer.cache)
        context = self._new_context(again, layer.index, checkpointed=True)
        offloading, loaded = self.offloading, None
        if offloading is not None and isinstance(layer.checkpoint, PackedTensor):
            loaded = layer.source.block = offloading.unpack(layer.checkpoint, starts_node=True)
        loaded_mask = self._load_mask(layer, context)
        # autograd makes zeros of the gradients that a reentrant layer's function does not get
        zeros = [self._meter.take(item.size_bytes, item.gradient_role) for item in layer.unread if reentrant]
        # the reentrant kind detaches the layer's input
        context.leaf = layer.source if reentrant or (layer.index == 0 and self.copies_embedding) else None
        output, *unread = run_layer(context, layer.source, layer.index, Role.ACTIVATIONS)
        context.leave_autocast()
        if reentrant:
            # its backward function holds the gradient that it was called with
            argument = self._meter.keep(gradient)
            for item, zero in zip(unread, zeros, strict=True):
                context.tape.expect(item, zero)
            flowing = context.tape.backward(output, gradient, layer.source)
            context.tape.release_pins()
            for held in (argument, *zeros):
                self._meter.drop(held)
            context.tape.release(output, *unread)
            self._drop_input(layer)
            return flowing
        context.tape.take_over(first_pass)
        for block in (loaded, loaded_mask):
            if block is not None:
                self._meter.drop(block)
        after_first = None if offloading is None or loaded is None else offloading.end_node
        # the holders of what was saved keep the arguments of the recomputation
        return context.tape.finish_backward(
            layer.source, after_first=after_first, after_saved=lambda: self._drop_input(layer)
        )

    def _drop_input(self, layer: _Layer) -> None:
        if isinstance(layer.checkpoint, Allocation):
            self._meter.drop(layer.checkpoint)

    @property
    def _offloads_masks(self) -> bool:
        """Whether masks are saved with the layers' inputs, and moved to main memory with them."""
        return self._recipe.spec.architecture.mask_by_position and self.offloading is not None

    def _pack_mask(self, context: Context) -> PackedTensor | None:
        """Save the mask of a layer."""
        mask = context.mask
        if self.offloading is None or not self._offloads_masks or mask is None or mask.block is None:
            return None
        return self.offloading.pack(mask.block)

    def _load_mask(self, layer: _Layer, context: Context) -> Allocation | None:
        """The mask of a layer that is recomputed, which replaces the context's."""
        if self.offloading is None or layer.packed_mask is None:
            return None
        block = self.offloading.unpack(layer.packed_mask, starts_node=False)
        assert context.mask is not None
        context.mask = replace(context.mask, block=block)
        return block

    def _keep_input(self, block: Allocation) -> Allocation | PackedTensor:
        """Keep a layer's input for its recomputation, on the GPU or in main memory."""
        return self._meter.keep(block) if self.offloading is None else self.offloading.pack(block)
