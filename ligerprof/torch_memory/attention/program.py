"""scaled_dot_product_attention as the sequence of tensor operations that CUDA runs around or instead of a kernel.

The steps are those of aten/src/ATen/native/transformers/attention.cpp in torch 2.11. The simulation carries them out on
tensors without memory, the estimate on sizes.
"""

from typing import Protocol, TypeVar

from ligerprof.torch_memory.attention.fused import flash_padding, mask_padding
from ligerprof.torch_memory.attention.selection import AttentionKernel, AttentionProblem

T = TypeVar("T")


class AttentionOperations(Protocol[T]):
    """The operations on tensors of one call; each returns a new tensor, or the same one where torch does."""

    def additive_mask(self, mask: T) -> T:
        """A boolean mask as numbers of the query's dtype: 0 or minus infinity (convert_boolean_attn_mask)."""
        ...

    def causal_mask(self) -> T:
        """The fp32 mask of numbers that math attention adds where `is_causal` is set."""
        ...

    def pad_heads(self, tensor: T, missing: int) -> T:
        """Query, key or value with `missing` more elements per head."""
        ...

    def narrow_heads(self, tensor: T, missing: int) -> T:
        """A view of the output without the last `missing` elements of each head."""
        ...

    def pad_mask(self, mask: T, missing: int) -> T:
        """A view of the mask within rows that are `missing` elements longer (pad_bias)."""
        ...

    def run(self, kernel: AttentionKernel, inputs: tuple[T, T, T], mask: T | None) -> T:
        """The output of a fused kernel."""
        ...

    def widen(self, tensor: T) -> T:
        """16-bit numbers as fp32."""
        ...

    def scale(self, tensor: T) -> T:
        """Times the square root of the scaling factor."""
        ...

    def repeat_heads(self, tensor: T) -> T:
        """Key or value with a head for each of the query's (pre_process_group_query_attention_input)."""
        ...

    def multiply(self, query: T, key: T) -> T:
        """Scores: query times scaled and transposed key."""
        ...

    def add_in_place(self, scores: T, mask: T) -> None:
        """Scores plus mask."""
        ...

    def softmax(self, scores: T) -> T:
        """`_safe_softmax` of each row."""
        ...

    def drop(self, probabilities: T) -> T:
        """Dropout."""
        ...

    def restore_dtype(self, tensor: T) -> T:
        """In the query's dtype again."""
        ...

    def weigh(self, probabilities: T, value: T) -> T:
        """Probabilities times value."""
        ...

    def release(self, *tensors: T | None) -> None:
        """C++ variables that end here."""
        ...

    def replace(self, old: T, new: T) -> T:
        """The C++ variable of `old` holds `new` from here on."""
        ...


def attend(
    operations: AttentionOperations[T],
    kernel: AttentionKernel,
    problem: AttentionProblem,
    inputs: tuple[T, T, T],
    mask: T | None,
) -> T:
    """Attention of query over key and value, the three `inputs`."""
    bias = operations.additive_mask(mask) if mask is not None else None
    if kernel is AttentionKernel.MATH:
        return _math(operations, problem, inputs, bias)
    if kernel is AttentionKernel.FLASH and (missing := flash_padding(problem.head_dim)):
        return _flash_padded(operations, inputs, missing)
    if kernel is AttentionKernel.EFFICIENT and bias is not None and (missing := mask_padding(problem.keys)):
        bias = operations.replace(bias, operations.pad_mask(bias, missing))
    output = operations.run(kernel, inputs, bias)
    operations.release(bias)
    return output


def _flash_padded(operations: AttentionOperations[T], inputs: tuple[T, T, T], missing: int) -> T:
    query, key, value = (operations.pad_heads(tensor, missing) for tensor in inputs)
    padded = operations.run(AttentionKernel.FLASH, (query, key, value), None)
    output = operations.narrow_heads(padded, missing)
    operations.release(padded, value, key, query)
    return output


def _math(operations: AttentionOperations[T], problem: AttentionProblem, inputs: tuple[T, T, T], bias: T | None) -> T:
    """_scaled_dot_product_attention_math: all in fp32, the scores kept in full."""
    wide_query, wide_key, wide_value = (operations.widen(tensor) for tensor in inputs)
    query = operations.scale(wide_query)
    if problem.causal:
        bias = operations.causal_mask()
    key, value = (operations.repeat_heads(tensor) for tensor in (wide_key, wide_value))
    scores = operations.multiply(query, key)
    if bias is not None:
        operations.add_in_place(scores, bias)
    scores = operations.replace(scores, operations.softmax(scores))
    if problem.dropout > 0.0:
        scores = operations.replace(scores, operations.drop(scores))
    # arguments of the returned tuple are made from the right
    weights = operations.restore_dtype(scores)
    product = operations.weigh(scores, value)
    output = operations.restore_dtype(product)
    operations.release(product, scores, value, key, query, wide_value, wide_key, wide_query, bias, weights)
    # as C++ destroys locals: in reverse order
    del product, scores, value, key, query, wide_value, wide_key, wide_query, bias, weights
    return output
