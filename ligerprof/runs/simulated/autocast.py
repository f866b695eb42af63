"""Autocast on fake CPU tensors as autocast does it on CUDA.

torch.autocast("cuda") switches itself off where there is no CUDA, so the simulator uses torch.autocast("cpu"), whose
lists of operators differ. While a simulation runs, the CPU key gets the lists of CUDA's (ATen/autocast_mode.h:
AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE, AT_FORALL_PROMOTE, and what AT_FORALL_LOWER_PRECISION_FP has more).
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Operator = Callable[..., Any]
Caster = Callable[[Operator], Operator]

_KEY = "AutocastCPU"

# the operators of each list that occur in language models; losses of other kinds, convolutions and upsampling do not
_FP32 = (
    "acos",
    "asin",
    "cosh",
    "cosine_similarity",
    "erfinv",
    "exp",
    "expm1",
    "group_norm",
    "kl_div",
    "layer_norm",
    "log",
    "log10",
    "log1p",
    "log2",
    "logsumexp",
    "mse_loss",
    "native_layer_norm",
    "nll_loss",
    "nll_loss2d",
    "pow.Scalar",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "reciprocal",
    "rms_norm",
    "rsqrt",
    "sinh",
    "softplus",
    "tan",
)
_FP32_RESULT = (
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "log_softmax.int",
    "prod",
    "prod.dim_int",
    "softmax.int",
    "sum",
    "sum.dim_IntList",
)
_WIDEST = ("addcdiv", "addcmul", "atan2", "dot", "index_put", "scatter_add", "tensordot", "vdot")
_LOWER = ("addmv", "addr", "einsum", "mv")
# on the lists of CPUs alone
_CPU_ALONE = ("cat", "cross_entropy_loss", "index_copy", "stack")


def register(library: torch.library.Library) -> None:
    """Give the CPU key CUDA's lists until the library is destroyed."""
    for names, caster in ((_FP32, _in_fp32), (_FP32_RESULT, _to_fp32), (_WIDEST, _in_widest), (_LOWER, _in_lower)):
        for name in names:
            _override(library, name, caster(_operator(name)))
    for name in _CPU_ALONE:
        _override(library, name, torch.library.fallthrough_kernel)


def _override(library: torch.library.Library, name: str, function: Any) -> None:
    with warnings.catch_warnings():
        # that a kernel is overridden is the point
        warnings.filterwarnings("ignore", message=".*only once for all operators", category=UserWarning)
        library.impl(name, function, _KEY, allow_override=True)  # type: ignore[no-untyped-call]


def _operator(name: str) -> Operator:
    packet, _, overload = name.partition(".")
    operator: Operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return operator


@contextmanager
def _without_autocast() -> Iterator[None]:
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        yield


def _eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_cast(item, dtype) for item in value)
    return value.to(dtype) if _eligible(value) else value


def _call(operator: Operator, args: Any, kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    with _without_autocast():
        return operator(*_cast(args, dtype), **{name: _cast(value, dtype) for name, value in kwargs.items()})


def _in_fp32(operator: Operator) -> Operator:
    return lambda *args, **kwargs: _call(operator, args, kwargs, torch.float32)


def _in_lower(operator: Operator) -> Operator:
    return lambda *args, **kwargs: _call(operator, args, kwargs, torch.get_autocast_dtype("cpu"))


def _in_widest(operator: Operator) -> Operator:
    def run(*args: Any, **kwargs: Any) -> Any:
        floats = [value.dtype for value in (*args, *kwargs.values()) if _eligible(value)]
        widest = torch.float32 if torch.float32 in floats else torch.get_autocast_dtype("cpu")
        return _call(operator, args, kwargs, widest)

    return run


def _to_fp32(operator: Operator) -> Operator:
    """Ask for an fp32 result where the caller did not ask for a type (fp32_set_opt_dtype)."""

    def run(*args: Any, **kwargs: Any) -> Any:
        names = [argument.name for argument in operator._schema.arguments]  # type: ignore[attr-defined]
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("dtype") is None and _eligible(args[0]):
            given["dtype"] = torch.float32
        with _without_autocast():
            return operator(**given)

    return run
