"""The table of GPUs: memory capacity, multiprocessors and library workspaces."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from ligerprof.errors import RecipeError
from ligerprof.text import short_repr
from ligerprof.units import MIB, format_bytes, parse_bytes, size_text
from ligerprof.words import Word, nearest_names, question

# torch's parseChosenWorkspaceSize (aten/src/ATen/cuda/CublasHandlePool.cpp):
# in KiB, ":4096:2:16:8" before compute capability 9.0, ":32768:1" from 9.0 (9, 10 and 12)
_CUBLAS_BEFORE_HOPPER_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8
_CUBLAS_HOPPER_BYTES = 32 * MIB
# the same function on ROCm, for gfx94x and gfx95x
_HIPBLAS_GFX94_BYTES = 128 * MIB

# measured on H200s with CUDA 13 and torch 2.11, by CUDA's count (benchmarks/results/ranks-h200x2.jsonl); used for all
# GPUs: the context after torch's first call, and the code of torch's, cuBLAS's, attention's and Triton's kernels that a
# training step loads
_CONTEXT_BYTES = 552_402_944
_KERNELS_BYTES = 157_286_400
_LONGEST_NAME = 100


class Vendor(Word):
    """Who makes the GPU; decides between CUDA's and ROCm's libraries."""

    NVIDIA = "nvidia"
    AMD = "amd"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSpec:
    """One GPU model.

    Attributes:
        title: the device name that torch reports.
        memory_bytes: the `total_memory` that torch reports; the smallest of several reports.
        context_bytes: memory of the CUDA context before torch allocates.
        kernels_bytes: code of the kernels that a training step loads.
        sm_count: multiprocessors (AMD: compute units); determines the workspaces of reductions.
        compute_capability: (major, minor); determines the attention backend.
        measured: whether this project measured the figures; the others come from data sheets and public reports.
        nominal: whether no public report of `memory_bytes` is known.
    """

    name: str
    title: str
    memory_bytes: int
    context_bytes: int
    kernels_bytes: int
    sm_count: int
    compute_capability: tuple[int, int]
    max_threads_per_sm: int
    vendor: Vendor = Vendor.NVIDIA
    measured: bool = False
    nominal: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def cublas_workspace_bytes(self) -> int:
        """Bytes of torch's cuBLAS or hipBLAS workspace, per handle and stream."""
        if self.vendor is Vendor.AMD:
            return _HIPBLAS_GFX94_BYTES
        return _CUBLAS_HOPPER_BYTES if self.compute_capability >= (9, 0) else _CUBLAS_BEFORE_HOPPER_BYTES

    @property
    def l2_bytes(self) -> int:
        """Bytes of the level-2 cache."""
        return _L2_MIB.get(self.name, _KINDS[self.compute_capability][1]) * MIB

    @property
    def usable_bytes(self) -> int:
        """Bytes available to torch's allocator in a training step on one GPU."""
        return self.memory_bytes - self.context_bytes - self.kernels_bytes


# data sheets; the H200's as torch reports it
_L2_MIB: Mapping[str, int] = {"h200": 60, "h200-nvl": 60, "l4": 48, "l40s": 96, "l40": 96, "rtx-6000-ada": 96, "t4": 4}
# by compute capability: threads per multiprocessor (CUDA C++ programming guide, "technical specifications per compute
# capability"), and MiB of the level-2 cache of the GPUs that have most; torch reports gfx942 and gfx950 as 9.4 and 9.5
_KINDS: Mapping[tuple[int, int], tuple[int, int]] = {
    (6, 0): (2048, 4),
    (7, 0): (2048, 6),
    (7, 5): (1024, 6),
    (8, 0): (2048, 40),
    (8, 6): (1536, 6),
    (8, 9): (1536, 72),
    (9, 0): (2048, 50),
    (9, 4): (2048, 4),
    (9, 5): (2048, 4),
    (10, 0): (2048, 126),
    (10, 3): (2048, 126),
    (12, 0): (1536, 96),
}


def _gpu(
    name: str, title: str, memory_mib: float, sm_count: int, capability: tuple[int, int], *aliases: str
) -> GpuSpec:
    return GpuSpec(
        name=name,
        title=title,
        memory_bytes=int(memory_mib * MIB),
        context_bytes=_CONTEXT_BYTES,
        kernels_bytes=_KERNELS_BYTES,
        sm_count=sm_count,
        compute_capability=capability,
        max_threads_per_sm=_KINDS[capability][0],
        vendor=Vendor.AMD if title.startswith("AMD") else Vendor.NVIDIA,
        measured=name == "h200",
        nominal=name in _NOMINAL,
        aliases=aliases,
    )


# GPUs of which no public report of torch's `total_memory` is known
_NOMINAL = frozenset({"h200-nvl", "gb200", "mi325x", "rtx5090-laptop", "rtx4090-laptop", "rtx3070-laptop"})
# other editions with as much memory
_RTX_PRO_6000 = (
    "RTX PRO 6000 Blackwell",
    "RTX PRO 6000 Blackwell Workstation Edition",
    "RTX PRO 6000 Blackwell Max-Q Workstation Edition",
)
# memory as torch prints it: measured, in torch's environment reports and error messages, or in deviceQuery's output;
# the smallest of several. A comment names the report, or says what `torch.cuda.get_device_properties` prints in public
# logs; reports of one GPU differ by up to 4 % with driver, error correction and virtualization. Multiprocessors and
# compute units are those of data sheets
GPUS: dict[str, GpuSpec] = {
    gpu.name: gpu
    for gpu in (
        _gpu("h200", "NVIDIA H200", 143155.9375, 132, (9, 0)),
        # nvidia-smi prints the same 143771 MiB for both
        _gpu("h200-nvl", "NVIDIA H200 NVL", 143155.9375, 132, (9, 0)),
        # 94.50 GiB in messages of torch
        _gpu("gh200", "NVIDIA GH200 480GB", 96762, 132, (9, 0), "gh200-96g"),
        # 79.18 GiB in many messages of torch; total_memory=81082MB, 81089MB, 81090MB
        _gpu("h100", "NVIDIA H100 80GB HBM3", 81082, 132, (9, 0), "h100-sxm", "h100-80g", "h800"),
        # total_memory=81008MB
        _gpu("h100-pcie", "NVIDIA H100 PCIe", 81008, 114, (9, 0)),
        # 99456909312 bytes; 93.11 GiB in messages of torch
        _gpu("h100-nvl", "NVIDIA H100 NVL", 94849.5, 132, (9, 0), "h100-94g"),
        # 95.00 GiB: github.com/modelscope/DiffSynth-Studio/issues/1238; total_memory=97285MB
        _gpu("h20", "NVIDIA H20", 97280, 78, (9, 0)),
        # 178.35 GiB: github.com/pytorch/ao/pull/4002
        _gpu("b200", "NVIDIA B200", 182630, 148, (10, 0)),
        _gpu("gb200", "NVIDIA GB200", 188733, 152, (10, 0)),
        # 267.69 GiB in messages of torch
        _gpu("b300", "NVIDIA B300 SXM6 AC", 274109, 148, (10, 3)),
        # 79.15 GiB in many messages of torch; 79.14 GiB: github.com/lianqi1008/Control-GIC/issues/6
        _gpu("a100-80g", "NVIDIA A100-SXM4-80GB", 81049, 108, (8, 0), "a100-80", "a800"),
        # 42298834944 bytes in deviceQuery: github.com/bottlerocket-os/bottlerocket/pull/3873
        _gpu("a100-40g", "NVIDIA A100-SXM4-40GB", 40339, 108, (8, 0), "a100-40"),
        # 23.53 GiB: github.com/google/RB-Modulation/issues/5
        _gpu("a30", "NVIDIA A30", 24094, 56, (8, 0)),
        # at most 44.42 GiB: github.com/stepfun-ai/Step-Video-T2V/issues/8
        _gpu("l40s", "NVIDIA L40S", 45466, 142, (8, 9)),
        # 44.40 GiB: github.com/NVlabs/Eagle/issues/68 and github.com/QwenLM/Qwen3-VL/issues/2097
        _gpu("l40", "NVIDIA L40", 45465, 142, (8, 9)),
        # 23612293120 bytes in deviceQuery
        _gpu("l4", "NVIDIA L4", 22518, 58, (8, 9)),
        # total_memory=45416MB
        _gpu("a40", "NVIDIA A40", 45416, 84, (8, 6)),
        # 23609475072 bytes in deviceQuery
        _gpu("a10", "NVIDIA A10", 22515, 72, (8, 6)),
        # total_memory=22587MB at most
        _gpu("a10g", "NVIDIA A10G", 22502, 80, (8, 6)),
        # total_memory=14930MB to 15109MB
        _gpu("t4", "Tesla T4", 14913, 40, (7, 5)),
        # 31.74 GiB: github.com/liucongg/ChatGLM-Finetuning/issues/73
        _gpu("v100-32g", "Tesla V100-SXM2-32GB", 32501, 80, (7, 0), "v100-32"),
        # 15.75 GiB: github.com/Morizeyao/GPT2-Chinese/issues/215
        _gpu("v100-16g", "Tesla V100-SXM2-16GB", 16128, 80, (7, 0), "v100-16", "v100"),
        # total_memory=16280MB; 16276MB
        _gpu("p100", "Tesla P100-PCIE-16GB", 16276, 56, (6, 0), "p100-16g", "Tesla P100-SXM2-16GB"),
        # total_memory=97250MB
        _gpu("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 97249, 188, (12, 0), *_RTX_PRO_6000),
        # 47.38 GiB; 44.43 GiB with error correction, which is off by default: github.com/DINGYANB/MTVCrafter/issues/21
        _gpu("rtx-6000-ada", "NVIDIA RTX 6000 Ada Generation", 48517, 142, (8, 9), "6000-ada"),
        # total_memory=48676MB at most
        _gpu("rtx-a6000", "NVIDIA RTX A6000", 48568, 84, (8, 6), "a6000"),
        # total_memory=24114MB, 24138MB
        _gpu("rtx-a5000", "NVIDIA RTX A5000", 24114, 64, (8, 6), "a5000"),
        # 16117 MiB as Ultralytics prints `total_memory`; so are the figures in MiB below
        _gpu("rtx-a4000", "NVIDIA RTX A4000", 16117, 48, (8, 6), "a4000"),
        # 31.36 GiB: github.com/TrajectoryCrafter/TrajectoryCrafter/issues/20
        _gpu("rtx5090", "NVIDIA GeForce RTX 5090", 32112, 170, (12, 0), "5090"),
        # total_memory=16302MB at most
        _gpu("rtx5080", "NVIDIA GeForce RTX 5080", 15841, 84, (12, 0), "5080"),
        # 15880 MiB
        _gpu("rtx5070ti", "NVIDIA GeForce RTX 5070 Ti", 15880, 70, (12, 0), "5070ti"),
        # 11755 MB in hashcat's list of devices
        _gpu("rtx5070", "NVIDIA GeForce RTX 5070", 11755, 48, (12, 0), "5070"),
        # 15848 MiB, 15850 MiB
        _gpu("rtx5060ti-16g", "NVIDIA GeForce RTX 5060 Ti", 15848, 36, (12, 0), "5060ti", "rtx5060ti", "5060ti-16g"),
        # 23.52 GiB: github.com/Soul-AILab/SoulX-FlashTalk/issues/5
        _gpu("rtx4090", "NVIDIA GeForce RTX 4090", 24084, 128, (8, 9), "4090"),
        # total_memory=16049MB
        _gpu("rtx4080", "NVIDIA GeForce RTX 4080", 16049, 76, (8, 9), "4080"),
        # 15.6 GiB
        _gpu("rtx4080-super", "NVIDIA GeForce RTX 4080 SUPER", 15923, 80, (8, 9), "4080-super", "4080s"),
        # total_memory=15934MB, 15974MB
        _gpu("rtx4070ti-super", "NVIDIA GeForce RTX 4070 Ti SUPER", 15934, 66, (8, 9), "4070ti-super", "4070tis"),
        # 12007 MiB, 12282 MiB at most
        _gpu("rtx4070ti", "NVIDIA GeForce RTX 4070 Ti", 12007, 60, (8, 9), "4070ti"),
        # 11998 MiB
        _gpu("rtx4070-super", "NVIDIA GeForce RTX 4070 SUPER", 11998, 56, (8, 9), "4070-super", "4070s"),
        # 11994 MiB, 12282 MiB at most
        _gpu("rtx4070", "NVIDIA GeForce RTX 4070", 11994, 46, (8, 9), "4070"),
        # 7806 MiB and 15.57 GiB: the name that torch reports is the same
        _gpu("rtx4060ti", "NVIDIA GeForce RTX 4060 Ti", 7806, 34, (8, 9), "4060ti", "4060ti-8g", "rtx4060ti-8g"),
        _gpu("rtx4060ti-16g", "NVIDIA GeForce RTX 4060 Ti 16GB", 15938, 34, (8, 9), "4060ti-16g"),
        # 7807 MiB
        _gpu("rtx4060", "NVIDIA GeForce RTX 4060", 7807, 24, (8, 9), "4060"),
        # total_memory=24259MB, 24575MB at most
        _gpu("rtx3090", "NVIDIA GeForce RTX 3090", 24136, 82, (8, 6), "3090"),
        # 11910 MiB, 12054 MiB
        _gpu("rtx3080ti", "NVIDIA GeForce RTX 3080 Ti", 11910, 80, (8, 6), "3080ti"),
        # total_memory=10240MB at most
        _gpu("rtx3080", "NVIDIA GeForce RTX 3080", 10014, 68, (8, 6), "3080"),
        # 7753 MiB, 8192 MiB at most
        _gpu("rtx3070", "NVIDIA GeForce RTX 3070", 7753, 46, (8, 6), "3070"),
        # 11931 MB in torch.cuda.get_device_properties
        _gpu("rtx3060", "NVIDIA GeForce RTX 3060", 11931, 28, (8, 6), "3060"),
        # 10.73 GiB: github.com/Morizeyao/GPT2-Chinese/issues/104
        _gpu("rtx2080ti", "NVIDIA GeForce RTX 2080 Ti", 10987, 68, (7, 5), "2080ti"),
        # laptops: 24463 MiB and 16376 MiB in nvidia-smi; 11.6 GiB; 7806 MiB twice; 8191 MiB; 5806 MiB
        _gpu("rtx5090-laptop", "NVIDIA GeForce RTX 5090 Laptop GPU", 24001, 82, (12, 0), "5090-laptop"),
        _gpu("rtx4090-laptop", "NVIDIA GeForce RTX 4090 Laptop GPU", 15938, 76, (8, 9), "4090-laptop"),
        _gpu("rtx4080-laptop", "NVIDIA GeForce RTX 4080 Laptop GPU", 11827, 58, (8, 9), "4080-laptop"),
        _gpu("rtx4070-laptop", "NVIDIA GeForce RTX 4070 Laptop GPU", 7806, 36, (8, 9), "4070-laptop"),
        _gpu("rtx4060-laptop", "NVIDIA GeForce RTX 4060 Laptop GPU", 7806, 24, (8, 9), "4060-laptop"),
        _gpu("rtx3080-laptop", "NVIDIA GeForce RTX 3080 Laptop GPU", 8191, 48, (8, 6), "3080-laptop"),
        _gpu("rtx3070-laptop", "NVIDIA GeForce RTX 3070 Laptop GPU", 7753, 40, (8, 6), "3070-laptop"),
        _gpu("rtx3060-laptop", "NVIDIA GeForce RTX 3060 Laptop GPU", 5806, 30, (8, 6), "3060-laptop"),
        # total_memory=196592MB at most
        _gpu("mi300x", "AMD Instinct MI300X", 196292, 304, (9, 4)),
        _gpu("mi325x", "AMD Instinct MI325X", 262123, 304, (9, 4)),
        # 251.98 GiB in messages of torch, 270.6 GB in hipBLASLt's; the data sheet has 288 GB, as for the MI355X
        _gpu("mi350x", "AMD Instinct MI350X", 258022, 256, (9, 5)),
        # 287.98 GiB: github.com/ROCm/TheRock/issues/2118
        _gpu("mi355x", "AMD Instinct MI355X", 294891, 256, (9, 5)),
    )
}

DEFAULT_GPU = "h200"
# makers, brands and words that people write or leave out, each as a word of its own
_OPTIONAL_WORDS = frozenset({"nvidia", "amd", "geforce", "instinct", "tesla", "quadro", "generation", "gpu"})
_OWN_SIZE = re.compile(r"(?P<size>[^:]+):\s*(?:sm_?)?(?P<major>[0-9]{1,2})\.?(?P<minor>[0-9])", flags=re.IGNORECASE)


def find_gpu(name: str) -> GpuSpec:
    """Look up a GPU by a name that people use, or describe one such as `24GiB:sm89`.

    Upper and lower case, spaces and hyphens, and the maker's name do not matter: `4090` and `NVIDIA GeForce RTX 4090`
    are rtx4090. Raises RecipeError if no GPU or several have this name, or a size or capability is not known.
    """
    if name in GPUS:
        return GPUS[name]
    if ":" in name:
        return _own_gpu(name)
    if found := _gpus_by_name().get(_plain(name)):
        return found
    starting = [gpu.name for gpu in GPUS.values() if _plain(gpu.name).startswith(_plain(name) or "?")]
    nearest = starting or nearest_names(_plain(name), _gpus_by_name())
    meant = question(dict.fromkeys(_gpus_by_name()[_plain(each)].name for each in nearest))
    raise RecipeError(
        f"unknown GPU {short_repr(name)}.{meant} `ligerprof env` lists the names;"
        " 24GiB:sm89 is a GPU of that size and compute capability."
    )


def _plain(name: str) -> str:
    """A name without what people vary: `RTX 6000 Ada Generation` is `rtx6000ada`, `A100 80GB` is `a10080g`."""
    words = re.split(r"[\s_-]+", name[:_LONGEST_NAME].casefold())
    joined = "".join(word for word in words if word not in _OPTIONAL_WORDS)
    return re.sub(r"(?<=[0-9])gi?b", "g", joined)


@cache
def _gpus_by_name() -> Mapping[str, GpuSpec]:
    return {_plain(name): gpu for gpu in GPUS.values() for name in (gpu.name, gpu.title, *gpu.aliases)}


@cache
def _own_gpu(text: str) -> GpuSpec:
    """A GPU such as `24GiB:sm89`, with the multiprocessors of the table's largest GPU of that compute capability."""
    match = _OWN_SIZE.fullmatch(text.strip())
    known = sorted({gpu.compute_capability for gpu in GPUS.values() if gpu.vendor is Vendor.NVIDIA})
    capability = (int(match["major"]), int(match["minor"])) if match else None
    if match is None or capability not in known:
        words = ", ".join(f"sm{major}{minor}" for major, minor in known)
        raise RecipeError(f"{short_repr(text)} is not a GPU. Write a size and one of {words}, such as 24GiB:sm89.")
    size_bytes = parse_bytes(match["size"])
    if size_bytes <= 2 * (_CONTEXT_BYTES + _KERNELS_BYTES):
        raise RecipeError(f"{short_repr(text)}: {format_bytes(size_bytes)} is too small. Is the unit missing?")
    largest = max((gpu for gpu in GPUS.values() if gpu.compute_capability == capability), key=lambda gpu: gpu.sm_count)
    name = f"{size_text(size_bytes)}:sm{capability[0]}{capability[1]}"
    return replace(
        largest, name=name, title=f"a GPU {name}", memory_bytes=size_bytes, measured=False, nominal=False, aliases=()
    )
