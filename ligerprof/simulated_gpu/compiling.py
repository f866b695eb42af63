"""torch.compile on the simulated GPU: TorchInductor itself decides what a compiled graph allocates.

Dynamo, AOTAutograd and Inductor trace, fuse and write code as on a GPU. The code then runs: it makes its buffers, calls
torch's operators, and launches kernels of Triton, which nobody compiles and which compute nothing.
"""

import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ligerprof.errors import UnsupportedError
from ligerprof.gpus import GpuSpec
from ligerprof.runs.recording.branches import in_launched_program
from ligerprof.runs.recording.imports import after_import_or_now
from ligerprof.runs.recording.settings import say
from ligerprof.simulated_gpu.device import Device
from ligerprof.simulated_gpu.values import Values, place

# which kernel is the fastest, and what trying them allocates, only a GPU tells
_TUNED = "max-autotune"
_THREADS_PER_WARP = 32
# Multiply-adds from which an H200 pads products of 16-bit numbers: 35 of 36 products in
# benchmarks/results/padded-products-h200.jsonl. Products in fp32 stay as they are, and so do unaligned rows.
_PADDED_FROM = 1e10


def install(gpu: GpuSpec, values: Values, *, eager: bool) -> None:
    """Let torch.compile work, or with `eager` return the functions as they are."""
    if eager:
        torch.compile = _as_it_is
        torch.nn.Module.compile = lambda *_, **_named: None  # type: ignore[method-assign]
        return
    bindings: Any = torch._C
    # a buffer of Inductor's code, which a build of torch without CUDA refuses to make
    bindings._dynamo.guards._empty_strided_cuda = lambda shape, strides, dtype: torch.empty_strided(
        shape, strides, dtype=dtype, device="cuda"
    )
    # Inductor's module of CUDA graphs imports it, also where there are none
    bindings._cuda_CUDAAllocator_AllocatorState = type("AllocatorState", (), {})
    after_import_or_now("triton.runtime.driver", lambda module: _set_driver(module, gpu))
    after_import_or_now("torch._inductor.async_compile", _compile_here)
    # code of kernels asks for Triton's driver of a GPU
    helpers = "torch._inductor.runtime.triton_helpers"
    after_import_or_now(helpers, lambda module: setattr(module, "set_driver_to_gpu", lambda: None))
    after_import_or_now(
        "torch._inductor.runtime.triton_heuristics", lambda module: _leave_out_kernels(module, values.forget)
    )
    after_import_or_now("torch._inductor.fx_passes.pad_mm", _pad_as_measured)
    after_import_or_now("torch._inductor", _refuse_tuning)


def without_caches(paths: list[str]) -> list[str]:
    """The paths that are not in Inductor's cache, whose place Inductor keeps in the environment."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return [path for path in paths if folder is None or not Path(path).is_relative_to(folder)]


def _as_it_is(model: Any = None, **_named: Any) -> Any:
    """torch.compile that compiles nothing."""
    return _as_it_is if model is None else model


def _set_driver(module: Any, gpu: GpuSpec) -> None:
    """Inductor asks Triton what it compiles for."""
    from triton.backends.compiler import GPUTarget

    major, minor = gpu.compute_capability
    target = GPUTarget("cuda", 10 * major + minor, _THREADS_PER_WARP)
    module.driver.set_active(SimpleNamespace(get_current_target=lambda: target))


def _compile_here(module: Any) -> None:
    """No processes that compile."""
    module.AsyncCompile.use_process_pool = module.AsyncCompile.wakeup = module.AsyncCompile.warm_pool = lambda *_: None


def _leave_out_kernels(module: Any, forget: Callable[[int], None]) -> None:
    """Each configuration of a kernel has a launcher; Inductor tries them as on a GPU, with buffers for that."""

    def precompile(tuner: Any, *_arguments: Any, **_named: Any) -> None:
        if not tuner.launchers:
            tuner.launchers = [_Launcher(config, tuner, forget) for config in tuner.configs]

    module.CachingAutotuner.precompile = precompile


class _Launcher:
    """Launches a kernel that Inductor has written, which computes nothing: what it writes to is forgotten."""

    # what Inductor asks for of a compiled kernel
    n_regs = n_spills = shared = 0
    cache_hash = ""
    store_cubin = False

    def __init__(self, config: Any, tuner: Any, forget: Callable[[int], None]) -> None:
        self.config, self._forget = config, forget
        self._only_read = {
            index
            for index, name in enumerate(tuner.fn.arg_names)
            if name.startswith("in_ptr") and name not in tuner.mutated_arg_names
        }

    def __call__(self, *arguments: Any, **_named: Any) -> None:
        for index, argument in enumerate(arguments):
            if isinstance(argument, Tensor) and index not in self._only_read:
                self._forget(argument.untyped_storage().data_ptr())


def _pad_as_measured(module: Any) -> None:
    """Inductor times a product with and without padding, in buffers that stay as they are; this gives the answer."""
    should_pad, answers = module._should_pad, [False]
    # the name of torch 2.11
    numbers = getattr(module, "hint_symbols", None) or module.realize_symbols

    def with_sizes(match: Any, left: Tensor, right: Tensor, operator: Any, bias: Tensor | None = None) -> bool:
        rows, inner, columns = numbers((*left.shape[-2:], right.shape[-1]))
        sides = module.get_alignment_size(left)
        is_unaligned = bool(inner % sides or columns % sides)
        is_large = rows * inner * columns >= _PADDED_FROM
        answers[0] = left.dim() == 2 and left.dtype.itemsize == 2 and is_unaligned and is_large
        return bool(should_pad(match, left, right, operator, bias))

    module._should_pad, module.is_padded_faster = with_sizes, lambda *_: answers[0]


def _refuse_tuning(module: Any) -> None:
    options = module.list_mode_options

    def list_mode_options(mode: str | None = None, *others: Any) -> Any:
        if mode is not None and mode.startswith(_TUNED):
            raise UnsupportedError(
                f"{place()}: the simulated GPU does not cover torch.compile(mode={mode!r})."
                " Use the default mode, or add --eager to simulate the code without torch.compile."
            )
        return options(mode, *others)

    module.list_mode_options = list_mode_options


# variables that are read when a program runs, not when a package is imported
_READ_LATE = "ACCELERATE_"
_THREADS = "OMP_NUM_THREADS"
# what the program leaves lives until the process has ended
_left: list[dict[str, Any]] = []


def fork_from_launchers(device: Device) -> None:
    """Let `accelerate launch`, and what is built on it, fork the process of a program that has one."""
    after_import_or_now("accelerate.commands.launch", lambda module: _replace(module, device))


def _replace(module: Any, device: Device) -> None:
    original, prepare = (getattr(module, name, None) for name in ("simple_launcher", "prepare_simple_launcher_cmd_env"))
    if original is None or prepare is None:
        say("this version of accelerate starts the program in a Python of its own, which imports everything again")
        return

    def launch(arguments: Any) -> None:
        command, environment = prepare(arguments)
        if device.allocations or not _can_fork(command, environment):
            original(arguments)
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        process = os.fork()
        if not process:
            _become(command[1:], environment)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if code and arguments.quiet:
            raise SystemExit(1)
        if code:
            raise subprocess.CalledProcessError(returncode=code, cmd=command)

    module.simple_launcher = launch


def _can_fork(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a new Python would start as a fork of this one goes on."""
    names = {name for name in {*environment, *os.environ} if environment.get(name) != os.environ.get(name)}
    return (
        command[0] == sys.executable
        and all(name.startswith(_READ_LATE) for name in names - {_THREADS})
        and threading.active_count() == 1
    )


def _become(words: list[str], environment: Mapping[str, str]) -> None:
    """Run a script, or `-m` and a module, as Python does with these arguments; ends this process."""
    os.environ.update(environment)
    if environment.get(_THREADS, "").isdecimal():
        torch.set_num_threads(int(environment[_THREADS]))
    # the recording begins again with CUDA, as whatever waits for it
    cuda: Any = torch.cuda
    cuda._initialized = False
    sys.orig_argv[1:] = words
    if words[0] == "-m":
        sys.argv = words[1:]
        in_launched_program()
        sys.path[0] = str(Path.cwd())
        _left.append(runpy.run_module(words[1], run_name="__main__", alter_sys=True))
    else:
        sys.argv = words
        in_launched_program()
        sys.path[0] = str(Path(words[0]).resolve().parent)
        _left.append(runpy.run_path(words[0], run_name="__main__"))
    raise SystemExit
