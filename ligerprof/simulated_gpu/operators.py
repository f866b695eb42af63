"""CUDA's kernels on the simulated GPU: each makes its result's tensors, in CUDA's order and with CUDA's temporaries.

torch's dispatcher calls them below autograd and autocast. What consists of other operators on a GPU does so here, too:
only operators that have a kernel of their own for CUDA are registered, by torch's native_functions.yaml, or by its
dispatcher where torch was built with CUDA.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import UnsupportedOperatorException

from ligerprof.errors import UnsupportedError
from ligerprof.simulated_gpu.attention import attention_for
from ligerprof.simulated_gpu.device import Device
from ligerprof.simulated_gpu.internals import INTERNALS, Call
from ligerprof.simulated_gpu.plans import Plan, Planner, realized
from ligerprof.simulated_gpu.rules import RULES, Rule
from ligerprof.simulated_gpu.values import MOST_FLOATS, MOST_INTEGERS, Values, at_place, is_small, tensors_in
from ligerprof.torch_memory.allocator.caching import AllocatorFullError

aten = torch.ops.aten

# backend.cpp has these
_IN_CPP = frozenset(
    [
        *("empty.memory_format", "empty_strided", "resize_", "as_strided", "view", "view.dtype", "_reshape_alias"),
        *("unfold", "view_as_real", "view_as_complex", "is_set_to", "set_", "set_.source_Tensor"),
        *("set_.source_Storage", "set_.source_Storage_storage_offset"),
    ]
)
# composite operators that call a function for each device below the dispatcher
_STUBS = ("copy_", "record_stream", "convolution", "convolution_backward")
_ENTRY = re.compile(r"^- func: ([\w.]+)\(", re.MULTILINE)
_HAS_CUDA = re.compile(r"^    (?:[\w ]+, )*CUDA(?:, [\w ]+)*:", re.MULTILINE)
# structured operators have a kernel for each device, also where only a ufunc is named
_IS_STRUCTURED = re.compile(r"^  structured(?:_delegate)?:", re.MULTILINE)


class Operators:
    """Runs operators on tensors of the simulated GPU.

    Attributes:
        message_of: what the error says when memory has run out.
        watch: a context around each operator, given the operator and its arguments; None: nothing watches.
        ran: called with each operator, its arguments and its result; None: nothing counts.
    """

    def __init__(self, device: Device, values: Values, require_own: Callable[[int], None]) -> None:
        self.device, self.values, self._require_own = device, values, require_own
        self.attention_used: set[str] = set()
        self.message_of: Callable[[AllocatorFullError], str] = str
        self.watch: Callable[[Any, Sequence[Any]], AbstractContextManager[None]] | None = None
        self.ran: Callable[[Any, Sequence[Any], Mapping[str, Any], Any], None] | None = None
        self._planner = Planner()
        self._libraries: list[torch.library.Library] = []

    def register(self) -> None:
        """Make these the kernels of the dispatch key CUDA, for the rest of the process."""
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for name in cuda_operators():
            library.impl(name, partial(self.run, _operator(name)), "CUDA")  # type: ignore[no-untyped-call]
        attention = attention_for(lambda: self.device.gpu, self.attention_used)
        for key in ("AutogradCUDA", "CUDA"):
            library.impl("scaled_dot_product_attention", attention, key)  # type: ignore[no-untyped-call]
        others = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
        others.fallback(self.run, "CUDA")  # type: ignore[no-untyped-call]
        for kind in ("Sparse", "SparseCsr", "Quantized", "NestedTensor"):
            others.fallback(partial(_refuse, kind), f"{kind}CUDA")  # type: ignore[no-untyped-call]
            for name in _with_kernels(f"{kind}CUDA"):
                library.impl(name, partial(_refuse, kind, _operator(name)), f"{kind}CUDA")  # type: ignore[no-untyped-call]
        self._libraries += [library, others]

    def run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an operator: allocate what it allocates, and follow the values."""
        device = kwargs.get("device")
        if device is not None and device.type == "cuda" and device.index is not None:
            self._require_own(device.index)
        rule: Rule = RULES.get(func, Operators.compute)
        try:
            if self.ran is not None:
                result = rule(self, func, args, kwargs)
                self.ran(func, args, kwargs, result)
                return result
            if self.watch is None:
                return rule(self, func, args, kwargs)
            with self.watch(func, args):
                return rule(self, func, args, kwargs)
        except AllocatorFullError as full:
            # a temporary, which no storage of torch's asks for
            raise torch.OutOfMemoryError(self.message_of(full)) from None

    def compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator whose shapes follow from its arguments' shapes."""
        internal = INTERNALS.get(func)
        if internal is None:
            return self.compute_at_once(func, args, kwargs)
        self.device.addresses.kernels_ran = True

        def planned(*, on_meta: bool) -> Any:
            inputs: list[Tensor] = []
            plan = self.plan(func, args, kwargs, inputs)
            return realized(plan, inputs, on_meta=on_meta)

        call = Call(self.device, func, args, kwargs, planned)
        result = call.real(internal(call))
        small = any(is_small(tensor) for tensor in tensors_in(result))
        if small or func._schema.is_mutable:
            self.values.after(func, args, kwargs, result, list(tensors_in((args, tuple(kwargs.values())))))
        return result

    def compute_at_once(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator that allocates its result alone, as far as this function knows."""
        self.device.addresses.kernels_ran = True
        inputs: list[Tensor] = []
        plan = self.plan(func, args, kwargs, inputs)
        result = realized(plan, inputs)
        if func._schema.is_mutable or 0 < plan.elements[0] <= MOST_INTEGERS or 0 < plan.elements[1] <= MOST_FLOATS:
            self.values.after(func, args, kwargs, result, inputs)
        return result

    def plan(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: list[Tensor]) -> Plan:
        """The plan of a call; `inputs` receives its tensors.

        Raises:
            UnsupportedError: torch does not know the shapes of the operator's result.
        """
        try:
            return self._planner.plan(func, args, kwargs, inputs)
        except (UnsupportedOperatorException, NotImplementedError) as error:
            raise UnsupportedError(
                f"{at_place()}the simulated GPU cannot run {func}: torch has no rule for the shape of its result."
                " Run without it, or on a GPU."
            ) from error


def _refuse(kind: str, func: Any, *_args: Any, **_kwargs: Any) -> None:
    such = ", as are gradients of embeddings with sparse=True" if kind == "Sparse" else ""
    raise UnsupportedError(
        f"{at_place()}{func}: the simulated GPU does not cover tensors of the kind {kind}{such}."
        " Run without them, or on a GPU."
    )


def cuda_operators() -> Iterator[str]:
    """Names of the operators of ATen that have a kernel of their own for CUDA, without those of backend.cpp."""
    names = _with_kernels("CUDA") if torch._C._has_cuda else _names_in_yaml()
    known = {name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    for name in dict.fromkeys((*names, *_STUBS)):
        if name in known and name not in _IN_CPP:
            yield name


def _with_kernels(key: str) -> Iterator[str]:
    """Names of the operators of ATen that torch has a kernel for, which would use a GPU of this machine."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and has(name, key):
            yield name.removeprefix("aten::")


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _names_in_yaml() -> Iterator[str]:
    """What torch's own build reads: operators with a dispatch to CUDA, and structured ones."""
    spec = find_spec("torchgen")
    folders = [] if spec is None else spec.submodule_search_locations or []
    text = Path(next(iter(folders)), "packaged/ATen/native/native_functions.yaml").read_text()
    starts = list(_ENTRY.finditer(text))
    ends = [*(start.start() for start in starts[1:]), len(text)]
    for start, end in zip(starts, ends, strict=True):
        entry = text[start.start() : end]
        if _HAS_CUDA.search(entry) or _IS_STRUCTURED.search(entry):
            yield start[1]
