"""Compile every launch of every kernel for a GPU that need not be present.

`python -m tests.kernels.compiling CAPABILITY CASE...` prints one JSON line per launch: kernel, case, number of
16-byte loads and stores and of exponentials, shared memory, and registers and spilled bytes per thread (null if Triton
has no cuobjdump).
"""

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.autotuner import Heuristics

from ligerprof.kernels import KernelShape, find_kernel
from ligerprof.kernels.cross_entropy import blocks as row_blocks
from ligerprof.kernels.cross_entropy import rows
from ligerprof.kernels.cross_entropy.arguments import LossArguments
from ligerprof.kernels.device import simulated_device
from ligerprof.kernels.options import PLAIN_LOSS
from ligerprof.kernels.spec import load_entry
from tests.kernels.test_memory import ALL_KERNELS, LLAMA_1B, problem

CASES = {
    "llama-1b": LLAMA_1B,
    "llama-8b": dataclasses.replace(LLAMA_1B, hidden=4096, intermediate=14336, head_dim=128),
    "gpt2-xl-fp32": dataclasses.replace(LLAMA_1B, hidden=1600, vocab=50257, activation_bytes=4, parameter_bytes=4),
    "gpt2-xl": dataclasses.replace(LLAMA_1B, hidden=1600, vocab=50257),
}
# of the norms alone: hidden sizes
NORM_CASES = {
    f"norm-{hidden}-{8 * size}": dataclasses.replace(
        LLAMA_1B, hidden=hidden, activation_bytes=size, parameter_bytes=size
    )
    for hidden in (1, 4096, 8192, 12288, 16384)
    for size in (2, 4)
}
_NORMS = ("rms", "add_rms", "layernorm")
# the case of rows that wait for their turn
WAITING = "waiting"
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64"}
_ALIGNED = [["tt.divisibility", 16]]


# a launch's kernel, arguments and options
Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


def record_launches() -> list[Launch]:
    """From now on, launches are only added to this list."""
    seen: list[Launch] = []
    triton.runtime.jit.KernelInterface.__getitem__ = lambda kernel, _grid: lambda *a, **k: seen.append((kernel, a, k))
    return seen


def waiting_launches(_slot: str, _shape: None) -> list[Launch]:
    """Rows that wait for their turn: whole ones, and ones in two blocks of the scratch."""
    vocab = 128256
    rows.waiting_rows = row_blocks.waiting_rows = lambda *_: 132
    logits = torch.empty(1, vocab, dtype=torch.bfloat16)
    labels, loss, scale = torch.zeros(1, dtype=torch.int64), torch.empty(1), torch.empty(1)
    sizes = {"seq_len": 1, "vocab": vocab, "words": vocab}
    arguments = LossArguments(labels_N=labels, loss_N=loss, options=PLAIN_LOSS, scale=scale, **sizes)
    seen = record_launches()
    rows.loss_and_gradient(arguments, logits, logits)
    head = torch.empty(vocab, dtype=torch.bfloat16)
    blocks = (64896, vocab - 64896)
    row_blocks.loss_and_gradient_of_blocks(
        arguments, logits[:, : blocks[0]], head, blocks, growth=(1, 1), word_elements=16, first_row=0
    )
    assert all(options["first_rows"] == 132 for _, _, options in seen)
    return seen


def launches(slot: str, shape: KernelShape) -> Iterator[Launch]:
    """The launches of a call and its backward."""
    seen = record_launches()
    with FakeTensorMode(), simulated_device(sm_count=132):
        adapt, inputs = problem(slot, shape, "cpu")
        outputs = adapt(load_entry(find_kernel(slot).entry))(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        wanted = [value for value in inputs if value.requires_grad]
        torch.autograd.grad(outputs, wanted, [torch.ones_like(output) for output in outputs])
    yield from seen


def compile_launch(kernel: Any, given: tuple[Any, ...], options: dict[str, Any], capability: int) -> Any:
    """Compile a launch as Triton would, with the same specialization of arguments."""
    while isinstance(kernel, Heuristics):
        for name, choose in kernel.values.items():
            options[name] = choose({**dict(zip(kernel.arg_names, given, strict=False)), **options})
        kernel = kernel.fn
    compiling = {name: options[name] for name in ("num_warps", "num_stages", "maxnreg") if name in options}
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for index, parameter in enumerate(kernel.params):
        value = given[index] if index < len(given) else options[parameter.name]
        special = not parameter.do_not_specialize
        kind = "fp32"
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and special):
            kind, constants[(index,)] = "constexpr", value
        elif isinstance(value, Tensor):
            kind, attributes[(index,)] = _POINTERS[value.dtype], _ALIGNED
        elif isinstance(value, int):
            kind = "i32" if abs(value) < 2**31 else "i64"
            if special and value % 16 == 0:
                attributes[(index,)] = _ALIGNED
        signature[parameter.name] = kind
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=compiling)


def registers(compiled: Any) -> dict[str, int | None]:
    """Registers and stack bytes of a thread."""
    if not _CUOBJDUMP.exists():
        return {"registers": None, "stack_bytes": None}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        Path(cubin.name).write_bytes(compiled.asm["cubin"])
        usage = subprocess.check_output([_CUOBJDUMP, "--dump-resource-usage", cubin.name], text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return {"registers": int(found[1]), "stack_bytes": int(found[2])}


def main(capability: int, cases: list[str]) -> None:
    done: set[str] = set()
    shapes = CASES | NORM_CASES
    for case in cases:
        of_case = waiting_launches if case == WAITING else launches
        for slot in ("flce",) if case == WAITING else _NORMS if case in NORM_CASES else ALL_KERNELS:
            for kernel, given, options in of_case(slot, shapes.get(case)):
                compiled = compile_launch(kernel, given, options, capability)
                if compiled.hash in done:
                    continue
                done.add(compiled.hash)
                # a cache hint may come in between
                wide_loads = len(re.findall(r"ld\.global\S*\.v4", compiled.asm["ptx"]))
                name = compiled.name
                launch = {"slot": slot, "case": case, "kernel": name, "wide_loads": wide_loads}
                launch["wide_stores"] = len(re.findall(r"st\.global\S*\.v4", compiled.asm["ptx"]))
                launch["exponentials"] = compiled.asm["ptx"].count("ex2.approx")
                launch["shared_bytes"] = compiled.metadata.shared
                print(json.dumps(launch | registers(compiled)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
