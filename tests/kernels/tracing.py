"""Trace patched models with torch.compile for a GPU that need not be present, backward included.

`python -m tests.kernels.tracing FAMILY:KERNELS ...` prints one JSON line each: Triton launches in the graphs, and how
many of them write to the same tensor through two arguments (compiled code would write to two copies, and keep either).
`norm:lengths` is a norm alone, of rows of two lengths. The compiled functions return zeros of the right shapes.
"""

import json
import sys
import warnings
from typing import Any

import torch
import triton
from torch._functorch.aot_autograd import aot_module_simplified
from torch.utils import _triton as torch_triton
from triton.backends.compiler import GPUTarget

from ligerprof.kernels import apply
from ligerprof.kernels.norm.triton import rms_norm
from tests.kernels.models import batch, tiny_model

# the first layer is traced, and the norm behind it
ONE_LAYER = {"gpt2": {"n_layer": 1}}


class Driver:
    """The part of a GPU driver that Triton needs to parse a kernel."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def is_active(self) -> bool:
        return True


class Launches:
    """A backend that counts Triton launches in the graphs it is given."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.written_twice = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        return aot_module_simplified(module, inputs, fw_compiler=self._compile, bw_compiler=self._compile)

    def _compile(self, module: torch.fx.GraphModule, _inputs: Any) -> Any:
        launches = [node for node in module.graph.nodes if "triton_kernel_wrapper" in str(node.target)]
        self.counts.append(len(launches))
        for node in launches:
            written = [node.kwargs["kwargs"][name] for name in node.kwargs["tensors_to_clone"]]
            self.written_twice += len(written) != len(set(written))
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        return lambda *_: [_zeros(value) for value in output.args[0]]


def _zeros(value: Any) -> Any:
    if not isinstance(value, torch.fx.Node):
        return value
    example = value.meta["val"]
    if not isinstance(example, torch.Tensor):
        return _size(example)
    with torch.no_grad():
        return torch.zeros([_size(size) for size in example.shape], dtype=example.dtype)


def _size(size: Any) -> int:
    return int(size.node.hint if isinstance(size, torch.SymInt) else size)


def _trace_norm(launches: Launches) -> None:
    compiled = torch.compile(lambda x, weight: rms_norm(x, weight, 1e-6), backend=launches, fullgraph=True)
    # a second length becomes a symbol
    for columns in (48, 96):
        compiled(torch.randn(3, columns, requires_grad=True), torch.randn(columns, requires_grad=True)).sum().backward()


def main(cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch_triton.has_triton = lambda: True
    triton.runtime.driver.set_active(Driver())
    for case in cases:
        family, kernels = case.split(":")
        torch._dynamo.reset()
        launches = Launches()
        if family == "norm":
            _trace_norm(launches)
        else:
            model = tiny_model(family, **ONE_LAYER.get(family, {"num_hidden_layers": 1}))
            with apply(model, kernels, device_kind="simulated"):
                torch.compile(model, backend=launches, fullgraph=True)(**batch(model)).loss.backward()
        print(json.dumps({"case": case, "launches": launches.counts, "twice": launches.written_twice}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
