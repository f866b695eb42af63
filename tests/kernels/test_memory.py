"""Each kernel's declared bytes against the bytes that it requests, to the byte."""

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from ligerprof.kernels import KERNEL_NAMES, KernelMemory, KernelShape, find_kernel
from ligerprof.kernels.device import simulated_device, sm_count
from ligerprof.kernels.options import RETURNS, LossOptions
from ligerprof.kernels.selection import SLOTS
from ligerprof.kernels.spec import load_entry
from ligerprof.runs.kernel_check.check import CallBytes, RequestedBytes, measure_call, requested_meter
from ligerprof.runs.simulated.worker import worker
from tests.kernels.counting import count_plain_torch
from tests.sampling import sampled

EPS = 1e-6
ALL_KERNELS = (*KERNEL_NAMES, *(variant for slot in SLOTS.values() for variant in slot.fused_variants))
SMALL = KernelShape(
    tokens=22,
    sequences=2,
    hidden=24,
    intermediate=200,
    vocab=509,
    heads=6,
    kv_heads=2,
    head_dim=12,
    activation_bytes=4,
    parameter_bytes=4,
    sm_count=4,
)
LLAMA_1B = KernelShape(
    tokens=4096,
    sequences=4,
    hidden=2048,
    intermediate=8192,
    vocab=128256,
    heads=32,
    kv_heads=8,
    head_dim=64,
    activation_bytes=2,
    parameter_bytes=2,
    sm_count=132,
)


def measure(function: Callable[..., Any], inputs: list[Tensor], gpu: RequestedBytes | None = None) -> CallBytes:
    """One call with its backward; `gpu` counts the bytes if the inputs are on a simulated GPU."""

    def call() -> tuple[Tensor, ...]:
        outputs = function(*inputs)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    return measure_call(call, inputs, [value for value in inputs if value.requires_grad], meter=gpu)


def problem(slot: str, shape: KernelShape, device: str) -> tuple[Callable[..., Any], list[Tensor]]:
    """A function that adapts the slot's entry to the inputs, and inputs of the shape's sizes and dtypes."""
    dtypes = {2: torch.bfloat16, 4: torch.float32}
    activation, parameter = dtypes[shape.activation_bytes], dtypes[shape.parameter_bytes]
    seq = shape.tokens // shape.sequences

    def data(*size: int, dtype: torch.dtype = activation, grad: bool = True) -> Tensor:
        return torch.randn(size, dtype=dtype, device=device).requires_grad_(grad)

    def weight(*size: int) -> Tensor:
        return data(*size, dtype=parameter, grad=shape.weight_requires_grad)

    options = LossOptions(shift=True, budget=shape.flce_budget, in_place=True)
    states, gates = (shape.sequences, seq, shape.hidden), (shape.sequences, seq, shape.intermediate)
    if slot == "rms":
        return lambda entry: lambda x, w: entry(x, w, EPS, 0.0), [data(*states), weight(shape.hidden)]
    if slot == "layernorm":
        parameters = [weight(shape.hidden), weight(shape.hidden)]
        return lambda entry: lambda x, w, b: entry(x, w, b, EPS), [data(*states), *parameters]
    if slot in ("swiglu", "geglu"):
        return lambda entry: entry, [data(*gates), data(*gates)]
    if slot in ("swiglu_linear", "geglu_linear"):
        # backward writes over gates only if they are not leaves
        made = [data(*gates).clone(), data(*gates).clone(), weight(shape.hidden, shape.intermediate)]
        return lambda entry: lambda gate, up, w: entry(gate, up, w, overwrite=True), made
    if slot == "add_rms":
        added = data(*states, dtype=dtypes[shape.product_bytes])
        return lambda entry: lambda x, r, w: entry(x, r, w, EPS), [added, data(*states), weight(shape.hidden)]
    if slot == "rope":
        # made by linear layers: leaves and their views are never overwritten
        heads = [data(shape.sequences, seq, count, shape.head_dim).clone() for count in (shape.heads, shape.kv_heads)]
        # both halves of a head rotate by the same angles
        half = data(1, seq, shape.head_dim // 2, grad=False).repeat(1, 1, 2)
        angles = [half.cos().to(parameter), half.sin().to(parameter)]
        return lambda entry: lambda q, k, *a: entry(q.transpose(1, 2), k.transpose(1, 2), *a), [*heads, *angles]
    labels = torch.randint(0, shape.vocab, (shape.sequences, seq), device=device)
    names = shape.loss_returns

    def adapt(entry: Any) -> Callable[..., Any]:
        if shape.low_rank:
            return lambda x, w, y, *low_rank: entry(x, w, y, options, low_rank=low_rank)
        if not names:
            return lambda *given: entry(*given, options)
        with_results = load_entry(f"{entry.__module__}:{entry.__name__}_outputs")
        results = lambda *given: with_results(*given, options, returns=names)  # noqa: E731
        return lambda *given: tuple(value for value in results(*given) if value is not None)

    if slot == "ce":
        logits = dtypes[shape.product_bytes]
        # the loss overwrites logits only if they are not a leaf
        given = data(shape.sequences, seq, shape.vocab, dtype=logits).clone()
        return adapt, [given, labels]
    return adapt, [
        data(*states),
        weight(shape.vocab, shape.hidden),
        labels,
        *(
            data(*size, shape.low_rank, dtype=dtypes[shape.factor_bytes])
            for size in ((shape.sequences, seq), (shape.vocab,))
            if shape.low_rank
        ),
    ]


@contextmanager
def launches_left_out(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fake tensors, and Triton launches that do nothing, as in a simulation."""
    import triton

    with monkeypatch.context() as patch, FakeTensorMode(), simulated_device(sm_count=132):
        patch.setattr(triton.runtime.jit.KernelInterface, "__getitem__", lambda _kernel, _grid: lambda *a, **k: None)
        yield


def autocast(shape: KernelShape, device: str) -> Any:
    lower = shape.product_bytes != shape.activation_bytes
    return torch.autocast(device, torch.bfloat16) if lower else nullcontext()


SHAPES = {
    "small-fp32": SMALL,
    "llama-1b-bf16": LLAMA_1B,
    "one-sequence": dataclasses.replace(LLAMA_1B, tokens=777, sequences=1),
    "fp32": dataclasses.replace(LLAMA_1B, activation_bytes=4, parameter_bytes=4),
    "frozen": dataclasses.replace(LLAMA_1B, weight_requires_grad=False),
    "lean": dataclasses.replace(LLAMA_1B, flce_budget="lean"),
    "bytes": dataclasses.replace(LLAMA_1B, flce_budget=700_000_000),
    "odd-vocabulary": dataclasses.replace(LLAMA_1B, vocab=50257, hidden=1600),
}
MIXED = {
    "rows-16-weights-32": dataclasses.replace(LLAMA_1B, parameter_bytes=4),
}
AUTOCAST = dataclasses.replace(LLAMA_1B, activation_bytes=4, parameter_bytes=4, compute_bytes=2)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("slot", ALL_KERNELS)
def test_declared_bytes_are_requested_on_fake_tensors(slot: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(slot, dataclasses.replace(SHAPES[name], sm_count=132), monkeypatch)


@sampled("amp", [False, True], ids=["bf16", "amp"], every=2)
@pytest.mark.parametrize(
    "returns", [("lse",), ("entropy", "predicted_tokens"), ("z_loss", "token_accuracy"), RETURNS], ids="+".join
)
@pytest.mark.parametrize("slot", ["flce", "ce"])
def test_declared_bytes_of_a_losss_results(
    slot: str, returns: tuple[str, ...], amp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = dataclasses.replace(AUTOCAST if amp else LLAMA_1B, loss_returns=returns)
    check(slot, shape, monkeypatch)
    if returns == RETURNS:
        check(slot, dataclasses.replace(shape, weight_requires_grad=False), monkeypatch)


@pytest.mark.parametrize("factor_bytes", [2, 4])
@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
def test_declared_bytes_of_adapters_on_the_head(
    factor_bytes: int, trainable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shape in (LLAMA_1B, AUTOCAST):
        named = {"low_rank": 16, "factor_bytes": factor_bytes, "weight_requires_grad": trainable}
        check("flce", dataclasses.replace(shape, **named), monkeypatch)


@pytest.mark.parametrize("slot", ["flce", "ce"])
def test_declared_bytes_of_a_losss_results_in_a_real_call(slot: str, device: torch.device) -> None:
    shape = dataclasses.replace(SMALL, sm_count=sm_count(device), loss_returns=RETURNS)
    adapt, inputs = problem(slot, shape, device.type)
    assert measure(adapt(load_entry(find_kernel(slot).entry)), inputs) == CallBytes.stated(stated(slot, shape))


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("slot", ["rms", "rope", "layernorm"])
def test_declared_bytes_of_mixed_dtypes(slot: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(slot, MIXED[name], monkeypatch)


@pytest.mark.parametrize("weight_requires_grad", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("slot", ["flce", "ce", "add_rms"])
def test_declared_bytes_under_autocast(slot: str, weight_requires_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check(slot, dataclasses.replace(AUTOCAST, weight_requires_grad=weight_requires_grad), monkeypatch)


PLAIN: dict[str, tuple[str, KernelShape]] = {
    **{f"{slot}-{name}": (slot, SHAPES[name]) for slot in KERNEL_NAMES for name in SHAPES},
    **{f"{slot}-{name}": (slot, shape) for slot in ("rms", "rope") for name, shape in MIXED.items()},
    **{
        f"{slot}-amp-{trainable}": (slot, dataclasses.replace(AUTOCAST, weight_requires_grad=trainable))
        for slot in ("ce", "flce")
        for trainable in (True, False)
    },
}


def measure_plain_torch(_progress: object) -> dict[str, CallBytes]:
    """Each case of `PLAIN`, on the simulated GPU of this process."""
    gpu = requested_meter()
    weight = torch.ones(1, device="cuda", requires_grad=True)

    def measured(slot: str, shape: KernelShape) -> CallBytes:
        # before its next task, autograd's thread drops the results of the one before
        weight.square().backward()  # type: ignore[no-untyped-call]
        adapt, (first, *others) = problem(slot, shape, "cuda")
        # activations are not leaves, whose casts autocast would keep
        inputs = [first.clone(), *others]
        with simulated_device(sm_count=132), autocast(shape, "cuda"):
            return measure(adapt(load_entry(find_kernel(slot, "torch").entry)), inputs, gpu)

    return {name: measured(slot, shape) for name, (slot, shape) in PLAIN.items()}


@pytest.fixture(scope="module")
def plain_torch() -> dict[str, CallBytes]:
    found: dict[str, CallBytes] = worker().run(f"{__name__}:measure_plain_torch", None, lambda _text: None)
    return found


@pytest.mark.parametrize("name", PLAIN)
def test_the_estimate_counts_plain_torch_as_a_simulated_gpu_runs_it(
    name: str, plain_torch: dict[str, CallBytes]
) -> None:
    slot, shape = PLAIN[name]
    # the estimate omits padded labels, a cast of a norm's weight, and workspaces of reductions
    small_bytes = 16 * (shape.tokens + shape.sequences + shape.hidden)
    assert count_plain_torch(slot, shape) == pytest.approx(dataclasses.astuple(plain_torch[name]), abs=small_bytes)


@pytest.mark.parametrize("weight_requires_grad", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("slot", ["swiglu_linear", "geglu_linear"])
def test_declared_bytes_of_gates_that_autocast_cast(
    slot: str, weight_requires_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gates in 16 bit, the weight in 32."""
    shape = dataclasses.replace(LLAMA_1B, parameter_bytes=4, weight_requires_grad=weight_requires_grad)
    with launches_left_out(monkeypatch):
        adapt, inputs = problem(slot, shape, "cpu")
        with torch.autocast("cpu", torch.bfloat16):
            measured = measure(adapt(load_entry(find_kernel(slot).entry)), inputs)
    assert measured == CallBytes.stated(stated(slot, shape))


def allocated(slot: str, provider: str, shape: KernelShape, monkeypatch: pytest.MonkeyPatch) -> CallBytes:
    with launches_left_out(monkeypatch):
        adapt, inputs = problem(slot, shape, "cpu")
        with autocast(shape, "cpu"):
            return measure(adapt(load_entry(find_kernel(slot, provider).entry)), inputs)


def stated(slot: str, shape: KernelShape, provider: str = "ligerprof") -> KernelMemory:
    memory = find_kernel(slot, provider).memory
    assert memory is not None
    return memory(shape)


def check(slot: str, shape: KernelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    assert allocated(slot, "ligerprof", shape, monkeypatch) == CallBytes.stated(stated(slot, shape))


@pytest.mark.parametrize("slot", ALL_KERNELS)
def test_declared_bytes_are_requested_by_a_real_call(slot: str, device: torch.device) -> None:
    shape = dataclasses.replace(SMALL, sm_count=sm_count(device))
    spec = find_kernel(slot)
    adapt, inputs = problem(slot, shape, device.type)
    if device.type == "cuda":
        # compiling leaves reference cycles that hold the launch's tensors
        measure(adapt(load_entry(spec.entry)), inputs)
        gc.collect()
        adapt, inputs = problem(slot, shape, device.type)
    assert measure(adapt(load_entry(spec.entry)), inputs) == CallBytes.stated(stated(slot, shape))


@pytest.mark.parametrize("slot", ALL_KERNELS)
def test_results_without_a_backward_pass_are_freed(slot: str, device: torch.device) -> None:
    """A graph that holds its own result would never be freed."""
    spec = find_kernel(slot)
    adapt, inputs = problem(slot, SMALL, device.type)
    outputs = adapt(load_entry(spec.entry))(*inputs)
    results = outputs if isinstance(outputs, tuple) else (outputs,)
    storages = [StorageWeakRef(result.untyped_storage()) for result in results if isinstance(result, Tensor)]
    assert storages
    del outputs, results, inputs
    gc.collect()
    assert all(storage.expired() for storage in storages)


@pytest.mark.gpu
@pytest.mark.parametrize("slot", ALL_KERNELS)
def test_declared_peak_is_what_the_gpus_allocator_counts(slot: str) -> None:
    """The caching allocator counts the requested bytes of every operator."""
    spec = find_kernel(slot)
    shape = dataclasses.replace(LLAMA_1B, sm_count=sm_count(torch.device("cuda")))
    memory = stated(slot, shape)
    adapt, inputs = problem(slot, shape, "cuda")
    function = adapt(load_entry(spec.entry))
    wanted = [value for value in inputs if value.requires_grad]

    def step() -> tuple[int, int]:
        torch.cuda.reset_peak_memory_stats()
        start_bytes = requested_bytes("current")
        outputs = function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        forward_bytes = requested_bytes("peak") - start_bytes
        grads = [torch.ones_like(output) for output in outputs]
        torch.cuda.reset_peak_memory_stats()
        start_bytes = requested_bytes("current")
        torch.autograd.grad(outputs, wanted, grads)
        return forward_bytes, requested_bytes("peak") - start_bytes

    # the first step allocates cuBLAS's workspaces
    step()
    # compiling leaves reference cycles that hold the launch's tensors: free them before a step is measured
    gc.collect()
    # autograd's thread may let go of the last gradient after `grad` has returned
    time.sleep(0.1)
    kept_bytes = memory.output_bytes + memory.saved_bytes + memory.forward_gradient_bytes
    assert step() == (
        kept_bytes + memory.forward_temporary_bytes,
        memory.backward_gradient_bytes + memory.backward_temporary_bytes,
    )


def requested_bytes(which: str) -> int:
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])
