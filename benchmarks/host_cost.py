"""Time what each kernel costs the host, without a GPU: Triton launches nothing, and tensors are tiny ones on the CPU.

    python benchmarks/host_cost.py                     # needs liger-kernel for its columns
    python benchmarks/host_cost.py --before TREE       # another tree of this package, in the same turns

Prints processor time per call in microseconds, forward / forward and backward: the lowest of many short batches, whose
order changes from round to round. Allocations and torch's own operations are those of the CPU, so that the columns can
be compared with each other, but not with a GPU's host.
"""

import argparse
import contextlib
import importlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kernel_turns import OLD, import_renamed, load_kernel
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

# the fused loss is mostly torch's products, whose cost on the CPU says nothing
KERNELS = ("rms", "add_rms", "layernorm", "rope", "swiglu", "geglu", "ce")
CALLS, ROUNDS = 20, 60


class Nothing:
    """A compiled kernel's launcher, and the library that loads it."""

    def __init__(self, *_: Any) -> None: ...

    def __call__(self, *_: Any) -> None: ...

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        return 0, 0, 32, 0, 1024

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}


class LaunchesNothing(DriverBase):  # type: ignore[misc]
    """Compiles for an H100 or H200."""

    launcher_cls = Nothing

    def __init__(self) -> None:
        self.utils = Nothing()

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name

    def get_benchmarker(self) -> Callable[..., Any]:
        raise NotImplementedError


def allow_cpu(package: str) -> None:
    """Let a tree's kernels take tensors on the CPU."""
    for name in ("device", "tensors"):
        importlib.import_module(f"{package}.kernels.{name}").triton_unavailable_reason = lambda _kind: None  # type: ignore[attr-defined]


def calls(kernel: str, packages: dict[str, str]) -> dict[str, Any]:
    """Each candidate's call on the same tensors."""
    from ligerprof.runs.bench.accuracy import BoundCall, make_tensors
    from ligerprof.runs.bench.operations import OPERATIONS, Maker, find_provided
    from ligerprof.runs.bench.records import TINY

    operation = OPERATIONS[kernel]
    maker = Maker(dtype=torch.bfloat16, generator=torch.Generator("cpu").manual_seed(0))
    tensors = make_tensors(operation, TINY, maker)
    found = {title: load_kernel(package, kernel, "balanced") for title, package in packages.items()}
    with contextlib.suppress(ImportError):
        found |= {one.name: one for one in find_provided(kernel, ["liger"], "cuda")[0]}
    return {title: BoundCall(operation, provided, tensors) for title, provided in found.items()}


def lowest_us(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Processor time of one call of each."""
    lowest = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run()
    for _ in range(ROUNDS):
        for name in random.sample(list(runs), len(runs)):
            run, started = runs[name], time.process_time()
            for _ in range(CALLS):
                run()
            lowest[name] = min(lowest[name], (time.process_time() - started) / CALLS)
    return {name: 1e6 * seconds for name, seconds in lowest.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="folder that holds another tree's ligerprof/")
    parser.add_argument("--only", default=",".join(KERNELS), help="these kernels, joined by commas (default: all)")
    arguments = parser.parse_args()
    driver.set_active(LaunchesNothing())
    packages = {"ligerprof": "ligerprof"}
    if arguments.before is not None:
        import_renamed(arguments.before)
        packages = {"before": OLD, **packages}
    for package in packages.values():
        allow_cpu(package)
    for kernel in arguments.only.split(","):
        found = calls(kernel, packages)
        forward = lowest_us({name: call.forward for name, call in found.items()})
        both = lowest_us({name: call.full for name, call in found.items()})
        cells = [f"{name} {forward[name]:6.1f} / {both[name]:6.1f}" for name in found]
        print(f"{kernel:10} {'   '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
