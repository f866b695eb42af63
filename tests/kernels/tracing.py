"""Trace patched models with torch.compile for a GPU that need not be present, backward included.

`python -m tests.kernels.tracing FAMILY:KERNELS ...` prints one JSON line each: Triton launches in the graphs, how many
of them write to the same tensor through two arguments (compiled code would write to two copies, and keep either), and
how many arguments that they write are views (compiled code copies them).
`KERNEL:lengths` is a kernel alone, of rows of four lengths. The graphs run without their launches, whose results keep
the values that they were allocated with; a row's stride and length in the arguments must be those of the tensors.
"""

import json
import operator
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _triton as torch_triton
from torch.utils._pytree import tree_map_only
from triton.backends.compiler import GPUTarget

from ligerprof.kernels import apply
from ligerprof.kernels.gated.triton import swiglu, swiglu_linear
from ligerprof.kernels.norm.triton import rms_norm
from ligerprof.kernels.rope.triton import apply_rope
from ligerprof.kernels.tensors import as_rows
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
        self.written_views = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        return aot_module_simplified(module, inputs, fw_compiler=self._compile, bw_compiler=self._compile)

    def _compile(self, module: torch.fx.GraphModule, _inputs: Any) -> Any:
        launches = [node for node in module.graph.nodes if "triton_kernel_wrapper" in str(node.target)]
        self.counts.append(len(launches))
        for node in launches:
            written = [node.kwargs["kwargs"][name] for name in node.kwargs["tensors_to_clone"]]
            self.written_twice += len(written) != len(set(written))
            self.written_views += sum(_is_view(memory) for memory in written)
        return make_boxed_func(_WithoutLaunches(module).run)


def _is_view(node: torch.fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, torch.fx.Node) and str(source.target).split(".")[1] in _VIEWS


_VIEWS = ("as_strided", "select", "slice", "unbind", "view")


class _WithoutLaunches(torch.fx.Interpreter):
    """Runs a graph, so that its results have the shapes of this call and not those that were traced."""

    def run_node(self, node: torch.fx.Node) -> Any:
        if getattr(node.target, "namespace", None) == "ligerprof":
            # an operator with launches of its own: zeros
            with FakeTensorMode() as mode:
                given = tree_map_only(torch.Tensor, mode.from_tensor, self.fetch_args_kwargs_from_env(node))
                results = node.target(*given[0], **given[1])  # type: ignore[operator]
            return tree_map_only(torch.Tensor, lambda value: torch.zeros(value.shape, dtype=value.dtype), results)
        if "triton_kernel_wrapper" not in str(node.target):
            return super().run_node(node)
        launch = self.fetch_args_kwargs_from_env(node)[1]
        given = {**launch["kwargs"], **kernel_side_table.get_constant_args(launch["constant_args_idx"])}
        for name, value in given.items():
            rows = given.get(name.replace("_stride", "_ptr"))
            if name.endswith("_stride") and rows is not None:
                assert value == as_rows(rows).stride(0), (name, value, rows.shape, rows.stride())
        if "x_ptr" in given:
            assert given["columns"] == given["x_ptr"].shape[-1]
        return {name: given[name].clone() for name in launch.get("tensors_to_clone", ())}


def _normal(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, requires_grad=True)


# kernels, and their inputs with rows of a length
ALONE: dict[str, tuple[Callable[..., torch.Tensor], Callable[[int], list[torch.Tensor]]]] = {
    "rms": (lambda x, w: rms_norm(x, w, 1e-6), lambda n: [_normal(3, n), _normal(n)]),
    # with gaps between the rows
    "rms-gaps": (
        lambda x, w: rms_norm(x.repeat(1, 2)[:, : x.shape[1]], w, 1e-6),
        lambda n: [_normal(3, n), _normal(n)],
    ),
    # each sequence with as many tokens as a token has columns; a weight for each head
    "rms-sequences": (lambda x, w: rms_norm(x, w, 1e-6), lambda n: [_normal(2, n, n), _normal(n)]),
    "rms-heads": (lambda x, w: rms_norm(x.transpose(1, 2), w, 1e-6), lambda n: [_normal(2, 3, n, n), _normal(3, n)]),
    "rope": (
        lambda *given: torch.stack([rotated.square().sum() for rotated in apply_rope(*given)]),
        lambda n: [_normal(2, 6, 3, n), _normal(2, 3, 3, n), *torch.randn(2, 1, 3, n)],
    ),
    "swiglu": (swiglu, lambda n: [_normal(3, n), _normal(3, n)]),
    "swiglu-sequences": (swiglu, lambda n: [_normal(2, n, n), _normal(2, n, n)]),
    # whose incoming gradient is one element, expanded
    "summed_swiglu": (lambda *gates: swiglu(*gates).sum(), lambda n: [_normal(3, n), _normal(3, n)]),
    "swiglu_linear": (swiglu_linear, lambda n: [_normal(3, n), _normal(3, n), _normal(40, n)]),
    "swiglu_linear-bias": (swiglu_linear, lambda n: [_normal(2, n, n), _normal(2, n, n), _normal(40, n), _normal(40)]),
}


def _trace_lengths(name: str, launches: Launches) -> None:
    function, inputs = ALONE[name]
    compiled = torch.compile(function, backend=launches, fullgraph=True)
    # the second length becomes a symbol, which the third one reuses
    for columns in (48, 96, 160, 6):
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
        written = {"twice": launches.written_twice, "views": launches.written_views}
        print(json.dumps({"case": case, "launches": launches.counts, **written}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
