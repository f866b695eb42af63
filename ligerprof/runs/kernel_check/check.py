"""Run the checks of one kernel, with guards around its tensors; whatever the kernel raises becomes a row.

The bytes of a call are those that it requests on a simulated GPU.
"""

import gc
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, fields, replace
from functools import partial
from inspect import signature
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ligerprof.errors import KernelUnavailableError, LigerprofError
from ligerprof.kernels.device import simulated_device
from ligerprof.kernels.selection import SLOTS
from ligerprof.kernels.spec import KernelMemory, KernelSpec, load_entry
from ligerprof.recipe.routing import UNIFORM
from ligerprof.runs.bench.operations import DTYPES, Maker, Operation, Outputs, Tensors
from ligerprof.runs.kernel_check.cases import (
    CASES,
    CHECKED,
    COMPILED,
    IN_PLACE,
    LARGE,
    LOSS,
    OVERWRITTEN,
    PARAMETERS,
    SIMULATED_GPU,
    Case,
)
from ligerprof.runs.outcome import Progress
from ligerprof.runs.simulated.worker import worker
from ligerprof.simulated_gpu.device import Device
from ligerprof.simulated_gpu.machine import install
from ligerprof.text import error_line, printable
from ligerprof.words import Word


class Result(Word):
    """The outcome of one row."""

    PASS = "pass"  # noqa: S105 - a result, not a password
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckRow:
    """One case of one check.

    Attributes:
        check: memory, values, arguments, gradients, strides, repeat, compile or bytes.
        case: what was called.
        error: the largest relative error, or None if nothing was compared.
        bound: the largest error that passes.
        tensor: the output or gradient (`d_weight`) with the largest error, or what was counted.
        note: why the row failed or was skipped, or what was compared.
    """

    check: str
    case: str
    result: Result
    error: float | None = None
    bound: float | None = None
    tensor: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCheck:
    """All rows of one kernel.

    Attributes:
        device: where it ran, in words.
    """

    kernel: str
    provider: str
    slot: str
    device: str
    rows: tuple[CheckRow, ...]

    @property
    def passed(self) -> bool:
        """Whether no row failed."""
        return all(row.result is not Result.FAIL for row in self.rows)


# elements on each side, more than one block of a small kernel
_MARGIN = 4096
WRITES_OUTSIDE = "writes outside of"
_UNINITIALIZED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


class Guards(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Surrounds tensors by NaN: those given to `surround`, and while it is active, uninitialized new memory.

    New memory of floating-point numbers is filled with NaN, too.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._guarded: list[tuple[str, Tensor, int]] = []

    def surround(self, name: str, value: Tensor) -> Tensor:
        """A copy of a tensor, with its gradient, in the middle of a larger one; integers come back as they are."""
        if not _can_be_guarded(value):
            return value
        margin = value.new_full((_MARGIN,), math.nan)
        buffer = torch.cat((margin, value.flatten(), margin))
        self._guarded.append((f"its input {name}", buffer.detach(), value.numel()))
        return buffer[_MARGIN:-_MARGIN].view(value.shape)

    def raise_if_written(self) -> None:
        """Raise ValueError if a kernel wrote outside of a tensor."""
        for name, buffer, elements in self._guarded:
            before, after = buffer[:_MARGIN], buffer[_MARGIN + elements :]
            if not (before.isnan().all() and after.isnan().all()):
                raise ValueError(f"it {WRITES_OUTSIDE} {name}")

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name.removeprefix("aten::") not in _UNINITIALIZED or not _can_be_guarded(result):
            return result
        span = 1 + sum(stride * (size - 1) for size, stride in zip(result.shape, result.stride(), strict=True))
        buffer = torch.full((2 * _MARGIN + span,), math.nan, dtype=result.dtype, device=result.device)
        self._guarded.append((f"a tensor of the sizes {list(result.shape)} that it allocates", buffer, span))
        return buffer.as_strided(result.shape, result.stride(), _MARGIN)


def _can_be_guarded(value: Tensor) -> bool:
    return value.is_floating_point() and value.numel() > 0


class ByteMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Live and peak requested bytes of storages that are created while it is active, except those of `known`."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._born(value.untyped_storage())
        return result

    def _born(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        size_bytes = storage.nbytes()
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._died, size_bytes)

    def _died(self, size_bytes: int) -> None:
        self.live_bytes -= size_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class CallBytes:
    """The bytes of one call, in the terms of KernelMemory.

    Attributes:
        kept_bytes: kept until backward, outputs excluded; gradients computed in forward included.
    """

    output_bytes: int
    kept_bytes: int
    forward_temporary_bytes: int
    backward_bytes: int

    @classmethod
    def stated(cls, memory: KernelMemory) -> "CallBytes":
        """What a kernel declares."""
        return cls(
            output_bytes=memory.output_bytes,
            kept_bytes=memory.saved_bytes + memory.forward_gradient_bytes,
            forward_temporary_bytes=memory.forward_temporary_bytes,
            backward_bytes=memory.backward_gradient_bytes + memory.backward_temporary_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCall:
    """A call of a kernel.

    Attributes:
        kept: names of the states that autograd keeps for backward.
        states: names of the inputs that require a gradient, without parameters.
    """

    measured: CallBytes
    kept: frozenset[str]
    states: frozenset[str]


class Meter(Protocol):
    """Counts bytes; `peak_bytes` may be set, to start over."""

    live_bytes: int
    peak_bytes: int


def measure_call(
    call: Callable[[], tuple[Tensor, ...]],
    given: Iterable[Tensor],
    wanted: list[Tensor],
    *,
    meter: Meter | None = None,
) -> CallBytes:
    """One call with its backward.

    Args:
        given: the tensors that exist before the call.
        wanted: the inputs whose gradients backward computes.
        meter: counts the bytes, if it is active already; None: a `ByteMeter` does.
    """
    given = list(given)
    if meter is None:
        with ByteMeter(given) as counted:
            return measure_call(call, given, wanted, meter=counted)
    known = {value.untyped_storage() for value in given}
    given_bytes = meter.peak_bytes = meter.live_bytes
    outputs = call()
    output_bytes = sum(storage.nbytes() for output in outputs if (storage := output.untyped_storage()) not in known)
    # Triton's interpreter leaves reference cycles that hold the launch's tensors
    gc.collect(0)
    kept_bytes, forward_peak_bytes = meter.live_bytes - given_bytes, meter.peak_bytes - given_bytes
    differentiable = [output for output in outputs if output.requires_grad]
    gradients = [torch.ones_like(output) for output in differentiable]
    meter.peak_bytes = start_bytes = meter.live_bytes
    made = torch.autograd.grad(differentiable, wanted, gradients)
    backward_bytes = meter.peak_bytes - start_bytes
    del made
    return CallBytes(
        output_bytes=output_bytes,
        kept_bytes=kept_bytes - output_bytes,
        forward_temporary_bytes=forward_peak_bytes - kept_bytes,
        backward_bytes=backward_bytes,
    )


Kernel = Callable[..., Any]

# relative error (Frobenius) of a few roundings; Triton's interpreter truncates to bf16 where a GPU rounds
BOUNDS = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1.5e-2}
# share by which allocated bytes may differ from declared ones, and what may always differ
BYTES_BOUND = 0.01
_SMALL_BYTES = 4096
_MOST_LETTERS = 160
_LARGE_TITLE = "bf16, Llama 3.2 1B"
_UNWRITTEN = "{} has NaN: it reads beyond a tensor, or memory that it did not write"


def check_kernel(spec: KernelSpec) -> KernelCheck:
    """Check a kernel on a GPU, or in Triton's interpreter if there is none.

    Raises:
        KernelUnavailableError: it cannot be imported, or nothing of it can be checked here.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    operation = CHECKED[spec.name]
    if any(spec.unavailable_reason(kind) is None for kind in (device.type, "simulated")):
        # an import that fails is one error, not one per row
        load_entry(spec.entry)
        load_entry(spec.reference)
    # a fork must not follow the threads that kernels start
    worker()
    # what a plug-in prints does not belong to the command's output
    with redirect_stdout(sys.stderr):
        rows = tuple(_rows(spec, operation, device))
    if all(row.result is Result.SKIP for row in rows):
        raise KernelUnavailableError(f"kernel {spec.name} of {spec.provider}: {rows[0].note}. Check it elsewhere.")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, Triton's interpreter"
    return KernelCheck(kernel=spec.name, provider=spec.provider, slot=spec.slot, device=where, rows=rows)


@dataclass(slots=True)
class _Launches:
    """Whether Triton's interpreter ran a kernel."""

    seen: bool = False


def _rows(spec: KernelSpec, operation: Operation, device: torch.device) -> Iterator[CheckRow]:
    launches = _Launches()
    unavailable = spec.unavailable_reason(device.type)
    for case in filter(lambda case: case.is_of(operation), CASES):
        reason = unavailable or case.skip_reason(operation)
        if reason is not None:
            yield _skipped(case.check, case.title, reason)
        else:
            compare = _compare_repeated if case.repeats else _compare
            with _noticing(launches):
                row = _guarded(case.check, case.title, partial(compare, spec, operation, case, device))
            yield row
            if WRITES_OUTSIDE in row.note and device.type == "cpu":
                unavailable = f"it {WRITES_OUTSIDE} a tensor, which can end this process"
    if unavailable is None and launches.seen and device.type == "cpu":
        unavailable = "Triton's interpreter cannot be compiled; a GPU is required"
    for case in COMPILED:
        if unavailable is not None:
            yield _skipped(case.check, case.title, unavailable)
        else:
            yield _guarded(case.check, case.title, partial(_compare, spec, operation, case, device))
    yield from _bytes_rows(spec)


def _guarded(check: str, case: str, run: Callable[[], CheckRow]) -> CheckRow:
    try:
        return run()
    except KeyboardInterrupt:
        raise
    except LigerprofError as error:
        if check == "arguments":
            # an option that a kernel refuses is not computed wrongly
            return _skipped(check, case, f"refused: {error}")
        return CheckRow(check=check, case=case, result=Result.FAIL, note=error_line(error, _MOST_LETTERS))
    except BaseException as error:  # a kernel may fail in any way, and the other rows still run
        return CheckRow(check=check, case=case, result=Result.FAIL, note=error_line(error, _MOST_LETTERS))


def _skipped(check: str, case: str, reason: str) -> CheckRow:
    return CheckRow(check=check, case=case, result=Result.SKIP, note=printable(" ".join(reason.split())))


@contextmanager
def _noticing(launches: _Launches) -> Iterator[None]:
    try:
        from triton.runtime.jit import KernelInterface
    except ImportError:
        yield
        return
    launcher = KernelInterface.__getitem__

    def notice(self: Any, grid: Any) -> Any:
        launches.seen = True
        return launcher(self, grid)

    with mock.patch.object(KernelInterface, "__getitem__", notice):
        yield


def _compare(spec: KernelSpec, operation: Operation, case: Case, device: torch.device) -> CheckRow:
    """Outputs and gradients against the reference's in fp64."""
    operation = case.adapted(operation) or operation
    kernel, reference = load_entry(spec.entry), load_entry(spec.reference)
    if case.overwrites:
        kernel = partial(kernel, overwrite=True)
    if case in COMPILED:
        torch._dynamo.reset()
        # without a GPU only the graph is checked, and no C++ compiler is needed
        backend = "inductor" if device.type == "cuda" else "aot_eager"
        kernel = torch.compile(kernel, fullgraph=True, dynamic=case.dynamic, backend=backend)
    leaves, given = case.make(operation, device)
    wide = {name: _widened(value) for name, value in leaves.items()}
    truth = _results(operation, case, reference, wide, case.arranged(wide))
    with torch.no_grad():
        like = operation.call(reference, given, case.options)
    guards = Guards()
    if case.guarded:
        given = {name: guards.surround(name, value) for name, value in given.items()}
    with guards if case.guarded else nullcontext():
        found = _results(operation, case, kernel, leaves, given, like)
    guards.raise_if_written()
    # a mean over no labels is not a number, or zero
    compared = {name: value for name, value in truth.items() if case.shape.tokens or value.isfinite().all()}
    errors = {name: _error(found[name], value) for name, value in compared.items()}
    worst = max(errors, key=lambda name: errors[name])
    bound = BOUNDS[case.dtype]
    passes = errors[worst] <= bound
    return CheckRow(
        check=case.check,
        case=case.title,
        result=Result.PASS if passes else Result.FAIL,
        error=errors[worst],
        bound=bound,
        tensor=worst,
        note=_UNWRITTEN.format(worst) if case.guarded and not passes and math.isinf(errors[worst]) else "",
    )


def _compare_repeated(spec: KernelSpec, operation: Operation, case: Case, device: torch.device) -> CheckRow:
    """Whether a call leaves the results of an earlier one alone, and gives the same bits as one with equal inputs."""
    kernel = load_entry(spec.entry)
    calls: list[dict[str, Tensor]] = []
    copies: list[dict[str, Tensor]] = []
    for seed in (0, 1, 0):
        leaves, given = case.make(operation, device, seed)
        named = _outputs(operation, case, kernel, given)
        made = _gradients(operation, case, leaves, named)
        calls.append({**named, **made})
        copies.append({name: value.detach().clone() for name, value in calls[-1].items()})
    # the third call has other inputs than the second, and those of the first
    later = (calls[1], copies[1], "a later call changes it")
    for found, right, what in (later, (copies[2], copies[0], "it differs between calls with equal inputs")):
        for name, value in found.items():
            if not torch.equal(value, right[name]):
                error = _error(value, right[name])
                row = CheckRow(check=case.check, case=case.title, result=Result.FAIL, error=error, bound=0.0)
                return replace(row, tensor=name, note=what)
    return CheckRow(check=case.check, case=case.title, result=Result.PASS, error=0.0, bound=0.0)


def _widened(leaf: Tensor) -> Tensor:
    if not leaf.is_floating_point():
        return leaf.cpu()
    return leaf.detach().cpu().double().requires_grad_(leaf.requires_grad)


def _results(
    operation: Operation, case: Case, kernel: Kernel, leaves: Tensors, given: Tensors, like: Outputs | None = None
) -> dict[str, Tensor]:
    """Outputs and gradients by name.

    Args:
        like: outputs of the same call, whose shapes and dtypes these must have.

    Raises:
        ValueError: an output has another shape or dtype, or the kernel writes over tensors that are not its own, or
            unseen by autograd.
    """
    before = {name: value.detach().clone() for name, value in given.items()}
    versions = {name: value._version for name, value in given.items()}
    named = _outputs(operation, case, kernel, given)
    for name, value in before.items():
        if torch.equal(value, given[name].detach()):
            continue
        if name not in OVERWRITTEN:
            raise ValueError(f"forward writes over its input {name}")
        if case.check == "memory" and given[name]._version == versions[name]:
            raise ValueError(f"forward writes over {name} without a new version (ctx.mark_dirty), unseen by autograd")
    for (name, output), right in zip(named.items(), like or (), strict=False):
        if output.shape != right.shape:
            raise ValueError(f"{name} has the shape {tuple(output.shape)}, and the reference's {tuple(right.shape)}")
        # providers return losses in fp32 or in the logits' dtype
        if output.dtype != right.dtype and operation.outputs != LOSS:
            raise ValueError(f"{name} is {output.dtype}, and the reference's {right.dtype}")
    kept = {name: output.detach().clone() for name, output in named.items()}
    return {**kept, **_gradients(operation, case, leaves, named)}


def _outputs(operation: Operation, case: Case, kernel: Kernel, given: Tensors) -> dict[str, Tensor]:
    return dict(zip(operation.outputs, operation.call(kernel, given, case.options), strict=True))


def _gradients(operation: Operation, case: Case, leaves: Tensors, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of the inputs that want one, by name.

    Raises:
        ValueError: backward writes over the gradients that it receives.
    """
    generator = torch.Generator().manual_seed(1)
    outputs = list(named.values())[: 1 if case.first_only else None]
    if case.freezes_states:
        # such as a sum of inputs
        outputs = [output for output in outputs if output.requires_grad]
    gradients = [
        case.gradient_layout(torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output))
        for output in outputs
    ]
    before = [gradient.clone() for gradient in gradients]
    wanted = case.wanted(operation)
    differentiate = partial(
        torch.autograd.grad, outputs, [leaves[name] for name in wanted], gradients, materialize_grads=True
    )
    if case.retains:
        differentiate(retain_graph=True)
    made = differentiate()
    if not all(torch.equal(gradient, right) for gradient, right in zip(gradients, before, strict=True)):
        raise ValueError("backward writes over the gradient that it receives, which others may still read")
    return {f"d_{name}": value for name, value in zip(wanted, made, strict=True)}


def _error(value: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the truth's; infinite where only one of them is a number."""
    value, truth = value.detach().cpu().double(), truth.detach().cpu().double()
    if value.shape != truth.shape or not torch.equal(value.isfinite(), truth.isfinite()):
        return math.inf
    numbers = truth.isfinite()
    value, truth = value[numbers], truth[numbers]
    size = float(truth.norm())
    return float((value - truth).norm()) / (size if size > 0 else 1.0)


def _bytes_rows(spec: KernelSpec) -> Iterator[CheckRow]:
    case = _LARGE_TITLE
    reason = spec.unavailable_reason("simulated") or (None if spec.memory else "its bytes are not declared")
    if reason is not None:
        yield _skipped("bytes", case, reason)
        return
    compared: list[CheckRow] = []

    def run() -> CheckRow:
        compared.extend(_compare_bytes(spec))
        return compared[0]

    failed = _guarded("bytes", case, run)
    yield from compared or [failed]


def _compare_bytes(spec: KernelSpec) -> Iterator[CheckRow]:
    """Bytes of each part of a call on a simulated GPU against the declared ones."""
    assert spec.memory is not None
    declared = spec.memory(LARGE.of_a_call(element_bytes=2, sm_count=SIMULATED_GPU.sm_count))
    called: MeasuredCall = worker().run(
        "ligerprof.runs.kernel_check.check:call_here",
        None,
        lambda _text: None,
        operation=spec.name,
        entry=spec.entry,
        reference=spec.reference,
        overwrites=spec.name == SLOTS[spec.slot].with_next_linear,
        search_path=sys.path,
    )
    yield _compare_kept(spec, declared, called)
    stated = CallBytes.stated(declared)
    for part in fields(CallBytes):
        found_bytes, declared_bytes = getattr(called.measured, part.name), getattr(stated, part.name)
        difference = abs(found_bytes - declared_bytes)
        share = difference / max(declared_bytes, found_bytes, 1)
        yield CheckRow(
            check="bytes",
            case=_LARGE_TITLE,
            result=Result.PASS if share <= BYTES_BOUND or difference <= _SMALL_BYTES else Result.FAIL,
            error=share,
            bound=BYTES_BOUND,
            tensor=part.name.removesuffix("_bytes"),
            note=f"{found_bytes:,} allocated, {declared_bytes:,} declared",
        )


def _compare_kept(spec: KernelSpec, memory: KernelMemory, called: MeasuredCall) -> CheckRow:
    """The activations that autograd keeps of the inputs, against the declared ones."""
    declared = set(memory.kept_inputs)
    names = list(signature(load_entry(spec.reference)).parameters)
    unknown = sorted(declared - set(names))
    expected = declared & called.states
    passes = not unknown and called.kept == expected
    texts = ["+".join(name for name in names if name in found) or "none" for found in (called.kept, expected)]
    return CheckRow(
        check="bytes",
        case=_LARGE_TITLE,
        result=Result.PASS if passes else Result.FAIL,
        error=0.0 if passes else 1.0,
        bound=0.0,
        tensor="kept inputs",
        note=printable(
            f"{unknown[0]} is declared, and the inputs are {', '.join(names)}"
            if unknown
            else f"{texts[0]} kept, {texts[1]} declared"
        ),
    )


_CAPACITY_BYTES = 2**40
# as a patched model computes its loss
_AS_TRAINED = replace(IN_PLACE, shift=True)
# the model makes them, so they are no leaves
_MADE = frozenset({"queries", "keys", "gate", "up", "logits"})


class RequestedBytes:
    """A meter of requested bytes, without rounding and remainders; libraries' workspaces are counted by step."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.live_bytes = self.peak_bytes = 0
        device.observer = self._observe

    def _observe(self, action: str, _address: int, size_bytes: int, _context: object) -> None:
        if self._device.workspace:
            return
        if action == "alloc":
            self.live_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        elif action == "free_completed":
            self.live_bytes -= size_bytes


def requested_meter() -> RequestedBytes:
    """A meter of this process's simulated GPU, a `SIMULATED_GPU` that is empty."""
    machine = install(SIMULATED_GPU)
    machine.restart(SIMULATED_GPU, _CAPACITY_BYTES, None, limit_bytes=None, routing=UNIFORM)
    return RequestedBytes(machine.device)


def call_here(
    _progress: Progress, *, operation: str, entry: str, reference: str, overwrites: bool, search_path: Sequence[str]
) -> MeasuredCall:
    """Call a kernel in this process, which has not simulated before and ends afterwards.

    Args:
        operation: a name in `CHECKED`.
        entry, reference: functions as `module:name`.
        overwrites: whether the kernel is called with `overwrite=True`, as a patched model calls it.
        search_path: where modules are looked for.
    """
    sys.path[:] = search_path
    meter = requested_meter()
    called = CHECKED[operation]
    with simulated_device(sm_count=SIMULATED_GPU.sm_count):
        maker = Maker(dtype=DTYPES["bf16"], generator=torch.Generator("cuda"))
        leaves = called.make(LARGE, maker)
        leaves = {name: value.requires_grad_(name in called.wants) for name, value in leaves.items()}
        given = {name: value.clone() if name in _MADE else value for name, value in leaves.items()}
        kernel = load_entry(entry)
        if overwrites:
            kernel = partial(kernel, overwrite=True)
        call = partial(called.call, kernel, given, _AS_TRAINED)
        # a provider may import its modules in its first call
        call()
        wanted = [given[name] for name in called.wants]
        measured = measure_call(call, [*leaves.values(), *given.values()], wanted, meter=meter)
        names = signature(load_entry(reference)).parameters
        arguments = dict(zip(names, called.arguments(given, IN_PLACE), strict=False))
        return MeasuredCall(
            measured=measured,
            kept=_kept(partial(called.call, kernel, given, IN_PLACE), arguments),
            states=frozenset(_states(arguments)),
        )


def _states(arguments: Tensors) -> dict[str, Tensor]:
    return {
        name: value
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.requires_grad and name not in PARAMETERS
    }


def _kept(call: partial[Any], arguments: Tensors) -> frozenset[str]:
    """Names of the states that autograd keeps; parameters exist anyway."""
    states = _states(arguments)
    storages: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        storages.add(tensor.untyped_storage()._cdata)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = call()
        kept = frozenset(name for name, value in states.items() if value.untyped_storage()._cdata in storages)
    del outputs
    return kept
