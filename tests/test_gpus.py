import pytest

from ligerprof.errors import RecipeError
from ligerprof.gpus import GPUS, find_gpu
from ligerprof.units import GIB, MIB


def test_every_gpu_is_found_by_its_name() -> None:
    assert all(find_gpu(name) is gpu and gpu.name == name for name, gpu in GPUS.items())


def test_an_unknown_gpu_is_a_usage_error_that_lists_the_known_gpus() -> None:
    with pytest.raises(RecipeError, match="h200, h100") as caught:
        find_gpu("h2000")
    assert caught.value.exit_code == 2


ADVERTISED_GIB = {
    "h200": 141,
    "h100": 80,
    "a100-80g": 80,
    "a100-40g": 40,
    "l40s": 48,
    "rtx4090": 24,
    "rtx3090": 24,
    "t4": 16,
    "mi300x": 192,
}


@pytest.mark.parametrize("name", sorted(GPUS))
def test_memory_is_a_little_less_than_advertised(name: str) -> None:
    gpu = GPUS[name]
    # the T4 and the L40S store error-correction codes in the same memory
    assert 0.9 * ADVERTISED_GIB[name] * GIB < gpu.memory_bytes < ADVERTISED_GIB[name] * GIB
    assert 0 < gpu.usable_bytes < gpu.memory_bytes


def test_blas_workspaces_are_the_defaults_of_torch() -> None:
    workspaces = {name: GPUS[name].cublas_workspace_bytes for name in ("h200", "a100-80g", "mi300x")}
    assert workspaces == {"h200": 32 * MIB, "a100-80g": 8_519_680, "mi300x": 128 * MIB}


def test_max_threads_follow_the_compute_capability() -> None:
    threads = {name: gpu.max_threads_per_sm for name, gpu in GPUS.items()}
    assert threads["h200"] == threads["a100-40g"] == threads["mi300x"] == 2048
    assert threads["rtx3090"] == threads["rtx4090"] == threads["l40s"] == 1536
    assert threads["t4"] == 1024
