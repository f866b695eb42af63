"""Measure a kernel's error against fp64; for the losses on five distributions of logits."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ligerprof.kernels.linear_cross_entropy.plan import ChunkPlan, plan_chunks
from ligerprof.runs.bench.calls import BoundCall, CallTensors, describe_failure, make_tensors, wrap_tensors
from ligerprof.runs.bench.operations import DTYPES, Maker, Operation, Tensors
from ligerprof.runs.bench.providers import Provided
from ligerprof.runs.bench.records import ErrorRecord, MissingRecord
from ligerprof.runs.bench.shapes import BenchShape

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
