"""The work of a step from the estimate's own operations, without torch."""

from collections.abc import Callable, Collection, Iterable
from math import isqrt

from ligerprof.analyzers.estimate import settle_flce_budget
from ligerprof.analyzers.estimate.hooks import Hooks
from ligerprof.analyzers.estimate.meter import Meter
from ligerprof.analyzers.estimate.micro_batch import MicroBatch
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.places import HEAD
from ligerprof.analyzers.estimate.static import make_weights
from ligerprof.analyzers.estimate.tensors import Tensor, Weight
from ligerprof.analyzers.step_time.rates import (
    SHEETS,
    Host,
    Kind,
    Ledger,
    Part,
    StepTime,
    Work,
    find_rates,
    product,
    step_time,
)
from ligerprof.errors import LigerprofError, UnsupportedError
from ligerprof.kernels.registry import find_kernel_set
from ligerprof.recipe.categories import Engine, Loss, Optimizer
from ligerprof.recipe.lengths import at_longest
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Phase, Role
from ligerprof.torch_memory.allocator.settings import SizeRules
from ligerprof.torch_memory.dtypes import FP32_BYTES, Scratch
from ligerprof.torch_memory.saved_tensors import BMM

_NAMES = {2: "bf16", 4: "fp32"}
# kernels, and bytes moved per byte of the weights: what the operators of torch's optimizers read and write; a test
# compares them with the simulated step
_OPTIMIZERS = {
    # reads weights, gradients and moments, and writes all but gradients
    Optimizer.ADAMW_FUSED: (1, 7.0),
    Optimizer.ADAMW_FOREACH: (12, 30.0),
    Optimizer.ADAMW: (12, 30.0),
    Optimizer.SGD: (1, 3.0),
    Optimizer.SGD_MOMENTUM: (3, 8.0),
    Optimizer.NONE: (0, 0.0),
}
# tensors of one launch of a kernel over a list of tensors
_TENSORS_PER_LAUNCH = 30


def account(recipe: TrainingRecipe) -> Ledger:
    """The work of a steady step.

    Raises:
        UnsupportedError: the estimate's operations do not cover all work of the recipe.
        UnknownModelError: as the estimate.
    """
    if (reason := _unknown(recipe)) is not None:
        raise UnsupportedError(f"the time of {reason} is not known.")
    recipe = settle_flce_budget(at_longest(recipe))
    kernels, weights = find_kernel_set(recipe.providers, recipe.spec), make_weights(recipe)
    whole = Ledger()
    for times in (1, recipe.grad_accum - 1)[: min(recipe.grad_accum, 2)]:
        meter = _WorkMeter(recipe)
        micro_batch = MicroBatch(recipe, weights, kernels, meter, Hooks())
        for run, thread in ((micro_batch.forward, Phase.FORWARD), (micro_batch.backward, Phase.BACKWARD)):
            with meter.in_thread(thread):
                run()
        whole.add_all(meter.ledger, times)
    _add_update(whole, recipe, [weight for weight in weights.values() if weight.trainable])
    return whole


def predicted_time(recipe: TrainingRecipe) -> StepTime:
    """The time of a steady step, without torch.

    Raises:
        UnsupportedError: it is not known for the GPU, or for an option of the recipe.
        UnknownModelError: as the estimate.
    """
    gpu = recipe.gpu_spec
    if find_rates(gpu.name) is None:
        raise UnsupportedError(f"the rates of {gpu.title} are not known. Known: {', '.join(SHEETS)}.")
    found = step_time(account(recipe), gpu.name, recipe.tokens * recipe.grad_accum)
    assert found is not None
    return found


def time_or_reason(recipe: TrainingRecipe) -> StepTime | str:
    """The time of a steady step, or why it is not known."""
    try:
        return predicted_time(recipe)
    except LigerprofError as error:
        return str(error)


def _unknown(recipe: TrainingRecipe) -> str | None:
    """What the account does not cover; None if it covers the recipe."""
    found = {
        "steps of different lengths": recipe.lengths is not None,
        f"a step under {recipe.engine}": recipe.engine is not Engine.TORCH,
        "a traced model": recipe.spec.tape is not None,
        f"--loss {recipe.loss}": recipe.loss not in (Loss.HF, Loss.HF_4_45),
        "a compiled step": recipe.compile,
        "quantized weights": recipe.packed_bits is not None,
        f"--optimizer {recipe.optimizer}": recipe.optimizer not in _OPTIMIZERS,
        "experts": bool(recipe.spec.experts),
        "recurrent layers": recipe.spec.delta is not None or recipe.spec.state_space is not None,
        "--activation-offload without checkpointing all layers": recipe.activation_offload
        and (recipe.reentrant or not all(map(recipe.checkpoints_layer, range(recipe.spec.layers)))),
    }
    return next((reason for reason, is_so in found.items() if is_so), None)


class _WorkMeter(Meter):
    """A meter that writes a ledger of the operations."""

    def __init__(self, recipe: TrainingRecipe) -> None:
        super().__init__(SizeRules())
        self.ledger = Ledger()
        self._recipe, self._times = recipe, 1

    def repeat(
        self,
        times: int,
        act: Callable[[], None],
        places: Collection[str] = (),
        *,
        first_layer: int = 0,
        backward: bool = False,
    ) -> None:
        """Act once for all repetitions, and count each of them."""
        self._times *= times
        super().repeat(times, act, places, first_layer=first_layer, backward=backward)
        self._times //= times

    def ran(self, operation: object) -> None:
        assert isinstance(operation, Operation)
        part = Part.FORWARD if self._thread is Phase.FORWARD else Part.RECOMPUTE
        for work in self._forward(operation):
            self._note(part, work, Host.TRITON if operation.in_function else Host.OPERATOR)

    def asked(self) -> None:
        part = Part.FORWARD if self._thread is Phase.FORWARD else Part.RECOMPUTE
        self._note(part, None, Host.SELECTION)

    def offloaded(self, size_bytes: int, *, to_host: bool) -> None:
        # backward begins with what the loss saved, and waits for it
        kind = Kind.TRANSFER if self.place == HEAD else Kind.OFFLOAD
        work = Work(kind, "to-host" if to_host else "to-gpu", size_bytes)
        self._note(Part.FORWARD if to_host else Part.BACKWARD, work, None)

    def differentiated(self, operation: object) -> None:
        assert isinstance(operation, Operation)
        for work in self._backward(operation):
            self._note(Part.BACKWARD, work, Host.TRITON if operation.in_function else Host.BACKWARD)

    def summed(self, size_bytes: int) -> None:
        self._note(Part.BACKWARD, Work(Kind.MEMORY, "pointwise", 3 * size_bytes), Host.BACKWARD)

    def _note(self, part: Part, work: Work | None, host: Host | None) -> None:
        self.ledger.add(Part.LOSS if self.place == HEAD else part, work, host, self._times)

    def _forward(self, operation: Operation) -> Iterable[Work]:
        scratch = (*operation.leading_scratch, *_blocks(operation.forward_scratch_bytes))
        yield from () if operation.in_function else _temporaries(scratch)
        if self._is_loss(operation):
            yield from self._loss(operation)[0]
            return
        if operation.in_function and operation.is_product:
            # the gate, and the product of the linear layer after it
            yield from (_moved(operation, 3 * size_bytes) for size_bytes in operation.leading_scratch)
        if operation.is_product or operation.operator == BMM:
            yield from self._products(operation)[: 1 if operation.elements > 1 else 0]
        elif "scaled_dot_product" in operation.operator:
            yield self._attention(operation, is_backward=False)
        elif operation.view_of is None or operation.in_function:
            output_bytes = operation.elements * operation.width
            read = sum(_read_bytes(item, output_bytes) for item in _distinct(operation))
            yield _moved(operation, read + output_bytes + sum(operation.extra_blocks))

    def _backward(self, operation: Operation) -> Iterable[Work]:
        wanted = [item for item in operation.inputs if item.needs_gradient]
        scratch = (*operation.leading_gradient_scratch, *_blocks(operation.backward_scratch_bytes))
        yield from () if operation.in_function else _temporaries(scratch)
        if self._is_loss(operation):
            yield from self._loss(operation)[1]
            return
        if operation.in_function and operation.is_product:
            yield from (_moved(operation, 6 * size_bytes) for size_bytes in operation.leading_gradient_scratch)
        if operation.is_product or operation.operator == BMM:
            yield from self._products(operation)[1:]
        elif "scaled_dot_product" in operation.operator:
            yield self._attention(operation, is_backward=True)
        elif wanted or any(item.needs_gradient for item in operation.reuses):
            incoming = operation.elements * operation.width
            saved = sum(item.size_bytes for item in operation.saves)
            sizes = [_read_bytes(item, incoming) for item in (*wanted, *operation.reuses)]
            if operation.in_function:
                yield _moved(operation, incoming + saved + sum(sizes))
            else:
                yield from (
                    _moved(operation, incoming + saved + size, sums=size < incoming and len(wanted) > 1)
                    for size in sizes
                )

    def _is_loss(self, operation: Operation) -> bool:
        return self.place == HEAD and operation.is_product and operation.in_function

    def _products(self, operation: Operation) -> list[Work]:
        """The product of forward, and those of the gradients that backward computes."""
        width, name = operation.width, _NAMES[operation.width]
        factors = [item for item in operation.inputs[:2] if item.needs_gradient]
        if operation.factor is not None:
            k, n = operation.factor
            m = operation.elements // n
            shapes = [(1, m, n, k)]
            shapes += [(1, n, k, m) if isinstance(item, Weight) else (1, m, k, n) for item in factors]
        elif operation.operator == BMM:
            left, right = operation.inputs[:2]
            batch = self._recipe.rows * self._recipe.spec.heads
            k = isqrt(left.elements * right.elements // operation.elements // batch)
            m, n = left.elements // batch // k, right.elements // batch // k
            shapes = [(batch, m, n, k)] * (1 + len(factors))
        elif operation.elements == 1:
            # the gradients of a linear layer that is fused with the gate before it, of which this is the gate
            weight, gate = operation.saves[2], operation.saves[0]
            m, k = self._recipe.tokens, gate.elements // self._recipe.tokens
            n = weight.elements // k
            shapes = [(1, m, n, k), (1, m, k, n)] + [(1, n, k, m)] * weight.needs_gradient
        else:
            # of a square matrix and a weight
            k = isqrt(operation.saves[0].elements)
            shapes = [(1, operation.elements // k, k, k)] * 2
        works = [product(name, *shape, width) for shape in shapes]
        if len(operation.inputs) > 2 and operation.inputs[2].needs_gradient:
            works.append(Work(Kind.MEMORY, "reduce", operation.elements * width))
        return works

    def _loss(self, operation: Operation) -> tuple[list[Work], list[Work]]:
        """The products of a fused loss and its passes over the logits, in forward and in backward.

        Gradients are computed with it or later; backward of one that computes them later makes the logits again.
        """
        items = [*operation.inputs, *(item for item, _ in operation.early), *operation.saves]
        trains_weight = any(isinstance(item, Weight) and item.needs_gradient for item in items)
        recipe, words, hidden = self._recipe, self._recipe.spec.vocab_size, self._recipe.spec.hidden_size
        width = FP32_BYTES if recipe.compute_dtype == "float32" else 2
        rows = recipe.tokens
        if recipe.providers.get("flce") == "liger":
            # LigerFusedLinearCrossEntropy: a chunk's logits are as large as the input
            rows = 1 << (-(-rows // -(-words // hidden)) - 1).bit_length()
        name, chunks = _NAMES[width], -(-recipe.tokens // rows)
        logits = [product(name, 1, rows, words, hidden, width)] * chunks
        passes = [Work(Kind.MEMORY, "triton", 3 * rows * words * width)] * chunks
        gradients = [product(name, 1, rows, hidden, words, width)] * chunks
        if trains_weight:
            gradients += [product(name, 1, words, hidden, rows, width)] * chunks
            # chunks add to the sum of those before
            gradients += [Work(Kind.MEMORY, "pointwise", words * hidden * width)] * (chunks - 1)
        if operation.early:
            return [*logits, *passes, *gradients], []
        return [*logits, *passes], [*logits, *gradients]

    def _attention(self, operation: Operation, *, is_backward: bool) -> Work:
        recipe, spec = self._recipe, self._recipe.spec
        shape = (recipe.rows, spec.heads, recipe.row_tokens, recipe.row_tokens, spec.head_dim)
        kernel = next(name for name in ("cudnn", "flash", "efficient") if name in operation.operator)
        return Work(Kind.ATTENTION, kernel, 0, shape, len(operation.saves) == 3, is_backward)


def _distinct(operation: Operation) -> Iterable[Tensor]:
    """What an operation reads."""
    read = (*operation.inputs, *operation.passes, *operation.reuses, *operation.saves)
    return {id(item): item for item in read}.values()


def _read_bytes(item: Tensor, output_bytes: int) -> int:
    """Of a table, an embedding reads the rows of its output."""
    return min(item.size_bytes, output_bytes) if isinstance(item, Weight) else item.size_bytes


def _moved(operation: Operation, moved_bytes: int, *, sums: bool = False) -> Work:
    if operation.in_function:
        return Work(Kind.MEMORY, "triton", moved_bytes)
    return Work(Kind.MEMORY, _way(operation, sums=sums), moved_bytes)


def _way(operation: Operation, *, sums: bool) -> str:
    """How torch's kernel moves bytes, by which its rate is known.

    Args:
        sums: whether a gradient is summed to its tensor's shape.
    """
    read = [*operation.inputs, *operation.passes]
    smaller = [item for item in read if item.elements < operation.elements]
    if sums or (len(read) == 1 and operation.elements < read[0].elements and not operation.view_of):
        return "reduce"
    if operation.role in (Role.CE_TEMPORARIES, Role.ATTENTION_TEMPORARIES) and operation.saves_output:
        return "softmax"
    if operation.extra_blocks and len(read) > 1:
        return "norm"
    if smaller and len(read) > 1:
        return "broadcast"
    if read and operation.width > read[0].width:
        return "upcast"
    return "copy" if len(operation.passes) == 1 and not operation.inputs else "pointwise"


def _blocks(scratch: int | Scratch) -> Scratch:
    return (scratch,) if isinstance(scratch, int) else scratch


def _temporaries(scratch: Scratch) -> Iterable[Work]:
    """A temporary is written by one kernel and read by the next."""
    return (Work(Kind.MEMORY, "pointwise", 2 * size_bytes) for size_bytes in scratch if size_bytes > 0)


def _add_update(ledger: Ledger, recipe: TrainingRecipe, weights: list[Weight]) -> None:
    """The optimizer's step, and clipping before it."""
    size_bytes = sum(weight.size_bytes for weight in weights)
    launches, moves = _OPTIMIZERS[recipe.optimizer]
    lists = len(weights) if recipe.optimizer is Optimizer.ADAMW else 1
    kernels = [(moves / launches, launches * lists)] if launches else []
    kernels += [(1.0, 1), (2.0, 1)] if recipe.clip else []
    for moved, times in kernels:
        fused = recipe.optimizer is Optimizer.ADAMW_FUSED and moved > 2
        way = f"fused {_NAMES[weights[0].width]}" if fused else "pointwise"
        work = Work(Kind.MEMORY, way, int(moved * size_bytes / lists))
        ledger.add(Part.OPTIMIZER, work, None, times)
        ledger.add(Part.OPTIMIZER, None, Host.OPTIMIZER, times * max(1, len(weights) // lists // _TENSORS_PER_LAUNCH))
