"""Trace patched models with torch.compile for a GPU that need not be present, backward included.

`python -m tests.kernels.tracing FAMILY:KERNELS ...` prints one JSON line each: Triton launches in the graphs, and how
many of them write to the same tensor through two arguments (compiled code would write to two copies, and keep either).
`KERNEL:lengths` is a kernel alone, of rows of two lengths. The compiled functions return zeros of the right shapes.
"""

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch._functorch.aot_autograd import aot_module_simplified
from torch.utils import _triton as torch_triton
from triton.backends.compiler import GPUTarget

from ligerprof.kernels import apply
from ligerprof.kernels.gated.triton import swiglu, swiglu_linear
from ligerprof.kernels.linear_cross_entropy.scores import linear_label_logits
from ligerprof.kernels.norm.triton import rms_norm
from ligerprof.kernels.options import LossOptions
from ligerprof.kernels.rope.triton import apply_rope
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


def _normal(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, requires_grad=True)


def _label_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear_label_logits(hidden, weight, torch.tensor([1, 0, 4]), LossOptions(check_labels=False))


# kernels, and their inputs with rows of a length
ALONE: dict[str, tuple[Callable[..., torch.Tensor], Callable[[int], list[torch.Tensor]]]] = {
    "rms": (lambda x, w: rms_norm(x, w, 1e-6), lambda n: [_normal(3, n), _normal(n)]),
    "rope": (
        lambda *given: torch.stack([rotated.square().sum() for rotated in apply_rope(*given)]),
        lambda n: [_normal(2, 6, 3, n), _normal(2, 3, 3, n), *torch.randn(2, 1, 3, n)],
    ),
    "swiglu": (swiglu, lambda n: [_normal(3, n), _normal(3, n)]),
    # whose incoming gradient is one element, expanded
    "summed_swiglu": (lambda *gates: swiglu(*gates).sum(), lambda n: [_normal(3, n), _normal(3, n)]),
    "swiglu_linear": (swiglu_linear, lambda n: [_normal(3, n), _normal(3, n), _normal(40, n)]),
    "label_logits": (_label_logits, lambda n: [_normal(3, n), _normal(5, n)]),
}


def _trace_lengths(name: str, launches: Launches) -> None:
    function, inputs = ALONE[name]
    compiled = torch.compile(function, backend=launches, fullgraph=True)
    # a second length becomes a symbol
    for columns in (48, 96):
        compiled(*inputs(columns)).sum().backward()


def main(cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch_triton.has_triton = lambda: True
    triton.runtime.driver.set_active(Driver())
    for case in cases:
        family, kernels = case.split(":")
        torch._dynamo.reset()
        launches = Launches()
        if kernels == "lengths":
            _trace_lengths(family, launches)
        else:
            model = tiny_model(family, **ONE_LAYER.get(family, {"num_hidden_layers": 1}))
            with apply(model, kernels, device_kind="simulated"):
                torch.compile(model, backend=launches, fullgraph=True)(**batch(model)).loss.backward()
        print(json.dumps({"case": case, "launches": launches.counts, "twice": launches.written_twice}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
