"""Time candidates in turns, and measure their errors against fp64.

At its power limit, a GPU lowers its clock according to the work of the last tenths of a second: the same products run
up to a twentieth faster after work that waits for memory. Medians of separate turns compare different clocks. So in
`compare_in_turns` a turn belongs to one candidate. It starts with untimed runs of the references; then references and
candidate alternate without a pause, and each run of the candidate is compared with the mean of the references before
and after it.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ligerprof.kernels.linear_cross_entropy.plan import ChunkPlan, plan_chunks
from ligerprof.runs.bench.operations import DTYPES, Maker, Operation, Outputs, Provided, Tensors
from ligerprof.runs.bench.records import BenchShape, Direction, ErrorRecord, MissingRecord
from ligerprof.text import error_line

WARM_UP_ROUNDS = 2
# timed runs per turn, after one settling time
RUNS_PER_TURN = 3
# longer work keeps the device busy while the host launches the next
_SHORT_SECONDS = 2e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedCall:
    """Work to time; `prepare` restores its inputs and is not timed."""

    name: str
    prepare: Callable[[], object]
    run: Callable[[], object]


class Clock(Protocol):
    """Times asynchronous work."""

    def time(self, run: Callable[[], object], *, head_start: bool) -> Callable[[], float]:
        """Start `run`, after the host has launched all of it if `head_start`; the result waits and returns seconds."""

    def now(self) -> float:
        """Wall-clock seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Repetitions:
    """How often to time each candidate, in whole turns that settle first: `least`, then until `seconds` or `most`."""

    least: int = 10
    most: int = 60
    seconds: float = 2.0
    settle_seconds: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantiles:
    """Median, 20 % and 80 % quantile of one candidate's seconds."""

    median: float
    low: float
    high: float
    count: int


def summarize(seconds: Sequence[float]) -> Quantiles:
    """Quantiles by linear interpolation."""
    low, median, high = (float(value) for value in np.quantile(np.asarray(seconds), (0.2, 0.5, 0.8)))
    return Quantiles(median=median, low=low, high=high, count=len(seconds))


def time_in_turns(candidates: Sequence[TimedCall], clock: Clock, repetitions: Repetitions) -> Mapping[str, Quantiles]:
    """Time candidates in rounds; each candidate has one turn per round, which starts with untimed runs.

    Rounds come in pairs, a random order and its reverse, so that remaining drift affects all alike.
    """
    expected = _warm_up(candidates, clock)
    samples: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    started, number = clock.now(), 0
    while (taken := number * RUNS_PER_TURN) < repetitions.least or (
        taken < repetitions.most and clock.now() - started < repetitions.seconds
    ):
        for index in turn_order(len(candidates), number):
            name = candidates[index].name
            samples[name] += _take_turn(candidates[index], clock, expected[name], repetitions.settle_seconds)
        number += 1
    return {name: summarize(seconds) for name, seconds in samples.items()}


def turn_order(count: int, number: int) -> list[int]:
    """The order of candidates in round `number`."""
    order: list[int] = np.random.default_rng((0, number // 2)).permutation(count).tolist()
    return order[::-1] if number % 2 else order


def _warm_up(candidates: Sequence[TimedCall], clock: Clock) -> dict[str, tuple[float, float]]:
    """Seconds of one run of each candidate, and its wall-clock seconds with the preparation."""
    expected = {}
    for _ in range(WARM_UP_ROUNDS):
        for candidate in candidates:
            started = clock.now()
            candidate.prepare()
            seconds = clock.time(candidate.run, head_start=True)()
            expected[candidate.name] = seconds, clock.now() - started
    return expected


def _take_turn(candidate: TimedCall, clock: Clock, expected: tuple[float, float], settle_seconds: float) -> list[float]:
    seconds, prepared_seconds = expected
    for _ in range(math.ceil(settle_seconds / prepared_seconds)):
        candidate.prepare()
        candidate.run()
    pending = []
    for _ in range(RUNS_PER_TURN):
        candidate.prepare()
        pending.append(clock.time(candidate.run, head_start=seconds < _SHORT_SECONDS))
    return [read() for read in pending]


Run = Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallTensors:
    """Inputs and the outputs' gradients, with copies, since some kernels overwrite both."""

    inputs: Tensors
    gradients: Outputs
    pristine_inputs: Tensors
    pristine_gradients: Outputs

    def restore(self) -> None:
        """Restore the original values."""
        with torch.no_grad():
            for name, value in self.pristine_inputs.items():
                self.inputs[name].copy_(value)
            for gradient, value in zip(self.gradients, self.pristine_gradients, strict=True):
                gradient.copy_(value)


def make_tensors(operation: Operation, shape: BenchShape, maker: Maker) -> CallTensors:
    """Random inputs, and random gradients of the outputs (one for a loss)."""
    inputs = operation.make(shape, maker)
    gradients = tuple(
        maker.normal(*sizes) if sizes else torch.ones((), device=maker.device)
        for sizes in operation.output_sizes(shape)
    )
    return wrap_tensors(operation, inputs, gradients)


def wrap_tensors(operation: Operation, inputs: Tensors, gradients: Outputs) -> CallTensors:
    """Copy the tensors. The inputs that need a gradient are copies of leaves: kernels write over no leaf."""
    pristine = {name: inputs[name].requires_grad_(True) for name in operation.wants}  # noqa: FBT003 - torch's signature
    return CallTensors(
        inputs={**inputs, **{name: value.clone() for name, value in pristine.items()}},
        gradients=gradients,
        pristine_inputs=pristine,
        pristine_gradients=tuple(gradient.clone() for gradient in gradients),
    )


class BoundCall:
    """A provider's kernel and the tensors to call it on."""

    def __init__(self, operation: Operation, provided: Provided, tensors: CallTensors) -> None:
        self.name = provided.name
        self._operation, self._provided, self._tensors = operation, provided, tensors
        self._pending: Outputs = ()

    def forward(self) -> Outputs:
        """The outputs, with the graph that backward needs."""
        provided = self._provided
        return self._operation.call(provided.kernel, self._tensors.inputs, provided.options)

    def backward(self, outputs: Outputs) -> Outputs:
        """Gradients of the inputs that need one, without accumulation into `.grad`."""
        wanted = [self._tensors.inputs[name] for name in self._operation.wants]
        given = zip(self._tensors.gradients, outputs, strict=True)
        gradients = [gradient.to(output.dtype) for gradient, output in given]
        return torch.autograd.grad(outputs, wanted, gradients)

    def full(self) -> Outputs:
        """Forward and backward: the gradients."""
        return self.backward(self.forward())

    def results(self) -> tuple[Tensor, ...]:
        """Outputs and gradients from restored tensors, in the order of `result_names`."""
        self._tensors.restore()
        outputs = self.forward()
        # some kernels overwrite their outputs in backward
        kept = tuple(output.detach().clone() for output in outputs)
        return (*kept, *self.backward(outputs))

    def candidate(self, direction: Direction) -> TimedCall:
        """The candidate to time for one direction."""
        if direction is Direction.BACKWARD:
            return TimedCall(name=self.name, prepare=self._prepare_backward, run=self._run_backward)
        run = self.forward if direction is Direction.FORWARD else self.full
        return TimedCall(name=self.name, prepare=self._tensors.restore, run=run)

    def _prepare_backward(self) -> None:
        self._tensors.restore()
        self._pending = self.forward()

    def _run_backward(self) -> None:
        outputs, self._pending = self._pending, ()
        self.backward(outputs)


def describe_failure(error: Exception) -> str:
    """An exception in one line of at most 300 characters."""
    return error_line(error, 300)


_LOSSES = ("flce", "ce")
_SMALLEST_CHUNK = 16
EAGER = "torch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Regime:
    """A distribution of logits.

    Attributes:
        offset: added to all logits, through a direction that hidden states and weight rows share.
        sampled: whether labels are drawn from the softmax, as for a trained model, or uniformly.
    """

    name: str
    std: float
    offset: float = 0.0
    sampled: bool = True


REGIMES = (
    Regime(name="random init", std=0.9, sampled=False),
    Regime(name="std 3", std=3.0),
    Regime(name="std 5", std=5.0),
    Regime(name="std 4, offset 20", std=4.0, offset=20.0),
    Regime(name="std 8", std=8.0),
)
_PLAIN = Regime(name="normal", std=1.0, sampled=False)


def error_shape(kernel: str, shape: BenchShape) -> BenchShape:
    """The reduced shape at which `shape` is checked."""
    if kernel not in _LOSSES:
        return dataclasses.replace(shape, sequences=1, seq_len=min(512, shape.tokens))
    # sizes at which fp64 is cheap; the vocabulary is 32 times the hidden size, so that liger-kernel makes 32 chunks,
    # as it does for Llama 3's vocabulary
    tokens, hidden, vocab = min(2048, shape.tokens), min(1024, shape.hidden), min(32768, shape.vocab)
    return dataclasses.replace(shape, sequences=1, seq_len=tokens, hidden=hidden, vocab=vocab)


def relative_error(value: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the difference over that of the exact value; infinite if it is not finite."""
    difference = (value.to(exact.dtype) - exact).norm()
    error = float(difference / exact.norm())
    return error if math.isfinite(error) else math.inf


def make_regime_inputs(regime: Regime, shape: BenchShape, maker: Maker) -> Tensors:
    """Hidden states, weight and labels whose logits have the distribution `regime`."""
    wide = dataclasses.replace(maker, dtype=torch.float32)
    hidden = wide.normal(shape.tokens, shape.hidden)
    weight = wide.normal(shape.vocab, shape.hidden, std=regime.std / shape.hidden**0.5)
    if regime.offset:
        shared = torch.nn.functional.normalize(wide.normal(shape.hidden), dim=0) * regime.offset**0.5
        hidden, weight = hidden + shared, weight + shared
    hidden, weight = hidden.to(maker.dtype), weight.to(maker.dtype)
    labels = maker.labels(shape.tokens, shape.vocab)
    if regime.sampled:
        chances = torch.softmax(hidden.float() @ weight.float().t(), dim=-1)
        labels = torch.multinomial(chances, 1, generator=maker.generator).squeeze(1)
    return {"hidden": hidden, "weight": weight, "labels": labels}


def same_chunks(
    provided: Provided, shape: BenchShape, reduced: BenchShape, element_bytes: int
) -> tuple[Provided, int | None]:
    """Choose a budget that gives a chunked loss as many chunks at the reduced shape as at the real one."""
    if not provided.budgeted:
        return provided, None
    wanted = _plan(shape, element_bytes, provided.options.budget).chunks
    tokens = max(-(-reduced.tokens // wanted), min(_SMALLEST_CHUNK, reduced.tokens))
    whole = _plan(reduced, element_bytes, 2**62)
    plan = _plan(reduced, element_bytes, tokens * (whole.workspace_bytes // whole.chunk_tokens))
    options = dataclasses.replace(provided.options, budget=plan.workspace_bytes)
    return dataclasses.replace(provided, options=options), plan.chunks


def _plan(shape: BenchShape, element_bytes: int, budget: str | int) -> ChunkPlan:
    return plan_chunks(
        tokens=shape.tokens, hidden=shape.hidden, vocab=shape.vocab, element_bytes=element_bytes, budget=budget
    )


def measure_errors(
    operation: Operation, shape: BenchShape, providers: Sequence[Provided], eager: Provided, maker: Maker
) -> Iterator[ErrorRecord | MissingRecord]:
    """Errors of each provider and of torch's eager reference in each regime, at the reduced `shape`."""
    reduced = error_shape(operation.name, shape)
    dtype = next(name for name, dtype in DTYPES.items() if dtype == maker.dtype)
    for regime, tensors in _all_data(operation, reduced, maker):
        exact = _exact_results(operation, tensors)
        baseline = _errors(operation, eager, tensors, exact)
        for provided in providers:
            forced, chunks = same_chunks(provided, shape, reduced, maker.dtype.itemsize)
            subject = operation.subject(provided.name, reduced, dtype)
            try:
                errors = _errors(operation, forced, tensors, exact)
            except Exception as error:  # a third-party kernel may fail in any way; the others still run
                yield MissingRecord(subject=subject, reason=f"{regime.name}: {describe_failure(error)}")
                continue
            for name, value in errors.items():
                yield ErrorRecord(
                    subject=subject,
                    regime=regime.name,
                    tensor=name,
                    error=value,
                    eager_error=baseline[name],
                    ratio=value / baseline[name] if baseline[name] else None,
                    chunks=chunks,
                )


def _all_data(operation: Operation, shape: BenchShape, maker: Maker) -> Iterator[tuple[Regime, CallTensors]]:
    if operation.name not in _LOSSES:
        yield _PLAIN, make_tensors(operation, shape, maker)
        return
    for regime in REGIMES:
        inputs = make_regime_inputs(regime, shape, maker)
        if operation.name == "ce":
            logits = inputs["hidden"].float() @ inputs["weight"].float().t()
            inputs = {"logits": logits.to(maker.dtype), "labels": inputs["labels"]}
        yield regime, wrap_tensors(operation, inputs, (torch.ones((), device=maker.device),))


def _exact_results(operation: Operation, tensors: CallTensors) -> tuple[Tensor, ...]:
    """Outputs and gradients in fp64, by autograd, on the same rounded inputs."""
    inputs = {
        name: value.detach().double() if value.is_floating_point() else value for name, value in tensors.inputs.items()
    }
    wanted = [inputs[name].requires_grad_(True) for name in operation.wants]  # noqa: FBT003 - torch's own signature
    outputs = operation.exact_outputs(inputs)
    gradients = torch.autograd.grad(outputs, wanted, [gradient.double() for gradient in tensors.gradients])
    return (*(output.detach() for output in outputs), *gradients)


def _errors(
    operation: Operation, provided: Provided, tensors: CallTensors, exact: tuple[Tensor, ...]
) -> Mapping[str, float]:
    results = BoundCall(operation, provided, tensors).results()
    errors = {
        name: relative_error(value, right)
        for name, value, right in zip(operation.result_names, results, exact, strict=True)
    }
    # not earlier: a gradient may be in the memory of an input
    tensors.restore()
    return errors
