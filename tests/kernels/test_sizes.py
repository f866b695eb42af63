import triton
from hypothesis import given
from hypothesis import strategies as st

from ligerprof.kernels.sizes import ceil_div, next_power_of_2


@given(value=st.integers(1, 2**40), divisor=st.integers(1, 2**20))
def test_sizes_are_those_that_triton_computes(value: int, divisor: int) -> None:
    assert ceil_div(value, divisor) == triton.cdiv(value, divisor)
    assert next_power_of_2(value) == triton.next_power_of_2(value)
