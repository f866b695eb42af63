"""The constructor of DeepSpeed's ZeRO-1 and ZeRO-2 optimizer, by what its source allocates."""

import pytest

from ligerprof.roles import Role
from tests.analyzers.attribution.recording import MIB, Recording

MAIN = [("train.py", 90, "main"), ("train.py", 99, "<module>")]
DEEPSPEED = [("deepspeed/runtime/engine.py", 300, "__init__"), ("deepspeed/__init__.py", 200, "initialize"), *MAIN]
ZERO = "deepspeed/runtime/zero/stage_1_and_2.py"
MODEL = [("torch/nn/modules/module.py", 900, "_apply"), ("train.py", 50, "build"), *MAIN]
# 16-bit weights of two groups, such as matrices and norms
WEIGHTS = ((12 * MIB, 9 * MIB, 6 * MIB), (2 * MIB, MIB))
LARGEST = max(WEIGHTS[0])


def constructor(line: int) -> list[tuple[str, int, str]]:
    return [(ZERO, line, "__init__"), *DEEPSPEED]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("width", [2, 4])
def test_constructor_makes_weights_and_their_copies(ranks: int, on_host: bool, offloads: bool, width: int) -> None:
    recording, expected = Recording(), []
    scale = width // 2
    for group in WEIGHTS:
        for size in group:
            block = recording.alloc(size * scale, MODEL)
            expected.append(Role.PARAMETERS)
            if on_host:
                recording.free(block)
    for group in WEIGHTS:
        flat = sum(group) * scale
        if on_host:
            for _ in group:
                recording.alloc(width, constructor(460))
                expected.append(Role.COMMUNICATION)
            recording.alloc(flat, constructor(524))
        else:
            recording.alloc(
                flat,
                [(ZERO, 1399, "flatten_dense_tensors_aligned"), *constructor(505)],
            )
        expected.append(Role.PARAMETERS)
        clone = recording.alloc(flat // ranks, constructor(560))
        expected.append(Role.OPTIMIZER_STATES)
        if width == 2 and not offloads:
            recording.alloc(2 * flat // ranks, constructor(560))
            expected.append(Role.OPTIMIZER_STATES)
        if width == 2 or offloads:
            recording.free(clone)
    if offloads:
        recording.alloc(LARGEST * scale, constructor(659))
        expected.append(Role.COMMUNICATION)

    assert recording.roles() == expected


def test_weights_are_parameters_where_memory_ran_out_before_they_were_copied() -> None:
    recording = Recording()
    recording.alloc(sum(WEIGHTS[0]), constructor(524))

    assert recording.roles() == [Role.PARAMETERS]
