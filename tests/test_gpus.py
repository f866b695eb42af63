import pytest

from ligerprof.analyzers.estimate import estimate
from ligerprof.errors import RecipeError
from ligerprof.gpus import GPUS, find_gpu
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.units import GIB, MIB


def test_every_gpu_is_found_by_its_name() -> None:
    assert all(find_gpu(name) is gpu and gpu.name == name for name, gpu in GPUS.items())


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("4090", "rtx4090"),
        ("RTX 5090", "rtx5090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("B200", "b200"),
        ("GB200", "gb200"),
        ("H20", "h20"),
        ("L4", "l4"),
        ("L40S", "l40s"),
        ("A10G", "a10g"),
        ("A6000", "rtx-a6000"),
        ("RTX 6000 Ada", "rtx-6000-ada"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("V100", "v100-16g"),
        ("V100 32GB", "v100-32g"),
        ("Tesla T4", "t4"),
        ("A100 80GB", "a100-80g"),
        ("a100_40g", "a100-40g"),
        ("A100-SXM4-80GB", "a100-80g"),
        ("H100 SXM", "h100"),
        ("NVIDIA H800", "h100"),
        ("A800", "a100-80g"),
        ("MI300X", "mi300x"),
        ("AMD Instinct MI325X", "mi325x"),
        ("GH200", "gh200"),
        ("GH200 480GB", "gh200"),
        ("H200 NVL", "h200-nvl"),
        ("H100 NVL", "h100-nvl"),
        ("B300", "b300"),
        ("MI350X", "mi350x"),
        ("Tesla P100", "p100"),
        ("RTX PRO 6000 Blackwell", "rtx-pro-6000"),
        ("RTX 4060 Ti", "rtx4060ti"),
        ("4060 Ti 16GB", "rtx4060ti-16g"),
        ("RTX 4070 Ti Super", "rtx4070ti-super"),
        ("RTX 4090 Laptop", "rtx4090-laptop"),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", "rtx3060-laptop"),
    ],
)
def test_gpus_are_found_by_the_names_that_people_use(typed: str, name: str) -> None:
    assert find_gpu(typed) is GPUS[name]


@pytest.mark.parametrize("name", sorted(GPUS))
def test_titles_and_aliases_are_unique(name: str) -> None:
    gpu = GPUS[name]
    assert all(find_gpu(each) is gpu and find_gpu(each.upper()) is gpu for each in (gpu.title, *gpu.aliases))


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("h2000", "unknown GPU 'h2000'. Did you mean h200 or "),
        ("a100", "Did you mean a100-80g or a100-40g?"),
        ("rtx 4091", "Did you mean rtx4090 or "),
        ("zzzz", "unknown GPU 'zzzz'. `ligerprof env` lists the names"),
        ("", "unknown GPU ''. `ligerprof env`"),
        ("24GiB:sm13", "'24GiB:sm13' is not a GPU. Write a size and one of sm60, sm70, sm75,"),
        ("24GiB:", "is not a GPU. Write a size"),
        ("24:sm89", "'24' has no unit. Write it as 24GiB or 500MiB"),
        ("lots:sm89", "'lots' is not a size"),
    ],
)
def test_an_unknown_gpu_is_a_usage_error_with_the_nearest_names(typed: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        find_gpu(typed)
    assert says in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("typed", ["24GiB:sm89", "24gib:SM_89", "24GiB:8.9", "24576 MiB : sm89"])
def test_a_size_and_a_compute_capability_are_a_gpu(typed: str) -> None:
    gpu = find_gpu(typed)
    assert (gpu.name, gpu.memory_bytes, gpu.compute_capability) == ("24GiB:sm89", 24 * GIB, (8, 9))
    assert (gpu.max_threads_per_sm, gpu.measured, gpu.aliases) == (1536, False, ())
    # the largest of the table, so that no workspace is too small
    assert gpu.sm_count == max(each.sm_count for each in GPUS.values() if each.compute_capability == (8, 9))
    assert find_gpu(gpu.name) == gpu
    assert find_gpu("96GiB:sm120").compute_capability == (12, 0)


ADVERTISED_GIB = {
    "h200": 141,
    "h200-nvl": 141,
    "gh200": 96,
    "h100": 80,
    "h100-pcie": 80,
    "h100-nvl": 94,
    "h20": 96,
    "b200": 180,
    "gb200": 186,
    "b300": 288,
    "a100-80g": 80,
    "a100-40g": 40,
    "a30": 24,
    "l40s": 48,
    "l40": 48,
    "l4": 24,
    "a40": 48,
    "a10": 24,
    "a10g": 24,
    "t4": 16,
    "v100-32g": 32,
    "v100-16g": 16,
    "p100": 16,
    "rtx-pro-6000": 96,
    "rtx-6000-ada": 48,
    "rtx-a6000": 48,
    "rtx-a5000": 24,
    "rtx-a4000": 16,
    "rtx5090": 32,
    "rtx5080": 16,
    "rtx5070ti": 16,
    "rtx5070": 12,
    "rtx5060ti-16g": 16,
    "rtx4090": 24,
    "rtx4080": 16,
    "rtx4080-super": 16,
    "rtx4070ti-super": 16,
    "rtx4070ti": 12,
    "rtx4070-super": 12,
    "rtx4070": 12,
    "rtx4060ti": 8,
    "rtx4060ti-16g": 16,
    "rtx4060": 8,
    "rtx3090": 24,
    "rtx3080ti": 12,
    "rtx3080": 10,
    "rtx3070": 8,
    "rtx3060": 12,
    "rtx2080ti": 11,
    "rtx5090-laptop": 24,
    "rtx4090-laptop": 16,
    "rtx4080-laptop": 12,
    "rtx4070-laptop": 8,
    "rtx4060-laptop": 8,
    "rtx3080-laptop": 8,
    "rtx3070-laptop": 8,
    "rtx3060-laptop": 6,
    "mi300x": 192,
    "mi325x": 256,
    "mi350x": 288,
    "mi355x": 288,
}


@pytest.mark.parametrize("name", sorted(GPUS))
def test_memory_is_a_little_less_than_advertised(name: str) -> None:
    gpu = GPUS[name]
    # the T4 and the L40S store error-correction codes in the same memory; torch sees 252 GiB of an MI350X
    least = 0.87 if name == "mi350x" else 0.9
    assert least * ADVERTISED_GIB[name] * GIB < gpu.memory_bytes < ADVERTISED_GIB[name] * GIB
    assert 0 < gpu.usable_bytes < gpu.memory_bytes


def test_blas_workspaces_are_the_defaults_of_torch() -> None:
    workspaces = {name: GPUS[name].cublas_workspace_bytes for name in ("h200", "a100-80g", "mi300x")}
    assert workspaces == {"h200": 32 * MIB, "a100-80g": 8_519_680, "mi300x": 128 * MIB}


def test_max_threads_follow_the_compute_capability() -> None:
    threads = {name: gpu.max_threads_per_sm for name, gpu in GPUS.items()}
    assert threads["h200"] == threads["a100-40g"] == threads["mi300x"] == 2048
    assert threads["rtx3090"] == threads["rtx4090"] == threads["l40s"] == 1536
    assert threads["t4"] == 1024
    assert threads["p100"] == threads["b300"] == 2048


def test_a_capacity_without_a_report_is_said_to_be_nominal() -> None:
    nominal = [name for name, gpu in GPUS.items() if gpu.nominal]
    assert nominal == ["h200-nvl", "gb200", "rtx5090-laptop", "rtx4090-laptop", "rtx3070-laptop", "mi325x"]
    for name in ("gb200", "h100"):
        assumed = estimate(TrainingRecipe(model="tiny", gpu=name)).assumed
        assert any("is nominal" in line for line in assumed) == (name == "gb200")
    assert not find_gpu("24GiB:sm100").nominal
