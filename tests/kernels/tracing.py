"""Trace patched models with torch.compile for a GPU that need not be present, backward included.

`python -m tests.kernels.tracing FAMILY:KERNELS ...` prints one JSON line each: Triton launches in the graphs, and how
many of them write to the same tensor through two arguments (compiled code would write to two copies, and keep either).
The compiled functions return zeros of the right shapes.
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
    with torch.no_grad():
        return torch.zeros(value.meta["val"].shape, dtype=value.meta["val"].dtype)


def main(cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch_triton.has_triton = lambda: True
    triton.runtime.driver.set_active(Driver())
    for case in cases:
        family, kernels = case.split(":")
        torch._dynamo.reset()
        launches, model = Launches(), tiny_model(family, **ONE_LAYER.get(family, {"num_hidden_layers": 1}))
        with apply(model, kernels, device_kind="simulated"):
            torch.compile(model, backend=launches, fullgraph=True)(**batch(model)).loss.backward()
        print(json.dumps({"case": case, "launches": launches.counts, "twice": launches.written_twice}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
