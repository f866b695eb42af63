"""What kind of work a GPU kernel does, told from its name: the one table of rules."""

import re
from collections.abc import Sequence
from enum import Enum
from functools import lru_cache


class KernelClass(str, Enum):
    """The kinds of GPU work that time is added up by."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    FUSED = "fused"
    COMPILED = "compiled"
    SOFTMAX_LOSS = "softmax_loss"
    REDUCTION = "reduction"
    OPTIMIZER = "optimizer"
    COPY = "copy"
    ELEMENTWISE = "elementwise"
    INDEXING = "indexing"
    COMMUNICATION = "communication"
    OTHER = "other"


CLASS_MEANINGS: dict[KernelClass, str] = {
    KernelClass.MATMUL: "matrix products",
    KernelClass.ATTENTION: "fused attention",
    KernelClass.FUSED: "fused kernels, ours and others'",
    KernelClass.COMPILED: "kernels that torch.compile wrote",
    KernelClass.SOFTMAX_LOSS: "softmax and loss",
    KernelClass.REDUCTION: "sums, means, norms",
    KernelClass.OPTIMIZER: "optimizer and foreach",
    KernelClass.COPY: "copies, casts, joins, fills",
    KernelClass.ELEMENTWISE: "elementwise",
    KernelClass.INDEXING: "embedding, gather, sort",
    KernelClass.COMMUNICATION: "between GPUs",
    KernelClass.OTHER: "none of these",
}

# the first rule that is found anywhere in a name decides: what is special stands before what is general
RULES: Sequence[tuple[KernelClass, str]] = (
    (KernelClass.COMMUNICATION, r"nccl|rccl|nvshmem|symm_mem|all_?reduce_kernel|all_?gather_kernel"),
    (KernelClass.COPY, r"^Mem(cpy|set)\b|memcpy|memset"),
    # matrix products that torch.compile picked a template for
    (KernelClass.MATMUL, r"^triton_(tem|mm)_"),
    (KernelClass.COMPILED, r"^triton_(poi|red|per|for|foreach|spl|helper|unk)_"),
    # ours
    (KernelClass.FUSED, r"^_(?!\w*attn)\w+_(fwd|bwd)_kernel|^_(rope|column_sums|total|scale|reciprocal_count)_kernel"),
    (KernelClass.FUSED, r"^_?cross_entropy_kernel"),
    # liger-kernel's: most end in _forward_kernel or _backward_kernel, some have the two the other way round
    (KernelClass.FUSED, r"liger|^_?\w+_(forward|backward)_kernel(_tiled|_inference)?$|^_\w+_kernel_(forward|backward)"),
    (KernelClass.FUSED, r"^element_mul_kernel|^_(llama4_rope|jsd|kldiv|tv_distance)_kernel|^_(triton|fused)_\w+$"),
    # cut-cross-entropy's
    (KernelClass.FUSED, r"^_?(cce|indexed_neg_dot|dlse)_\w*kernel|^_tl_\w+_kernel"),
    (KernelClass.ATTENTION, r"flash|fmha|sdpa|attention|_attn|attn_|\bmha_|cudnn::fusion::(compute_dot|convert_dq)"),
    (KernelClass.OPTIMIZER, r"multi_tensor_apply|FusedAdam|FusedOptimizer|adam|lamb_|kOptimizer|PercentileClipping"),
    (KernelClass.SOFTMAX_LOSS, r"[Ss]oft_?[Mm]ax|nll_loss|cross_entropy|log_?sum_?exp"),
    (KernelClass.MATMUL, r"nvjet|gemm|gemv|cutlass|\bcublas|xmma|splitK|wgmma|dot_kernel|Cijk_|ampere_\w*(s|h|bf)16"),
    # torch.arange and the like, which no index goes into
    (KernelClass.ELEMENTWISE, r"elementwise_kernel_with_index"),
    (KernelClass.INDEXING, r"embedding|gather|scatter|index|sort|unique|compute_grad_weight|krn_partial|segment"),
    (
        KernelClass.INDEXING,
        r"compute_num_of_partial|\bscan\b|scan_innermost|DeviceScan|DeviceCompact|DeviceSelect|topk",
    ),
    (KernelClass.COPY, r"copy_kernel|CatArray|FillFunctor|direct_copy|transpose|_to_copy"),
    (KernelClass.REDUCTION, r"reduce|layer_?norm|rms_?norm|group_?norm|batch_?norm|Norm|DeviceReduce|cumsum|cumprod"),
    (KernelClass.ELEMENTWISE, r"elementwise|pointwise|dropout|distribution_|bernoulli|arange|where"),
)
_COMPILED_RULES = tuple((kind, re.compile(pattern, re.ASCII)) for kind, pattern in RULES)

# names that say nothing without what they are made for, which stands in the angle brackets
_HOLLOW_NAMES = {"Kernel", "Kernel2", "device_kernel", "kernel"}
_ANONYMOUS = "(anonymous namespace)::"
_PREFIX = re.compile(r"^(void|int|float|static|__global__)\s+")


@lru_cache(maxsize=100_000)
def kernel_class(name: str) -> KernelClass:
    """The class of a kernel, a copy or a fill."""
    for kind, pattern in _COMPILED_RULES:
        if pattern.search(name):
            return kind
    return KernelClass.OTHER


def short_name(name: str) -> str:
    """A kernel's name without its namespaces, template arguments and parameters."""
    if name.startswith("Mem"):
        return name.partition(" (")[0]
    plain = _PREFIX.sub("", name.replace(_ANONYMOUS, ""))
    head, _, made_for = plain.partition("<")
    base = head.partition("(")[0].rpartition("::")[2].strip()
    if base in _HOLLOW_NAMES and made_for:
        return re.split(r"[<>,(]", made_for, maxsplit=1)[0].rpartition("::")[2].strip() or base
    return base or plain
