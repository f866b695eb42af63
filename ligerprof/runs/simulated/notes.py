"""Notes on a simulated result: its assumptions and stand-ins."""

from collections.abc import Iterator
from importlib.util import find_spec

from ligerprof.recipe.categories import Engine, Optimizer
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.torch_memory.attention import AttentionKernel


def notes_on(recipe: TrainingRecipe, attention_used: set[str]) -> Iterator[str]:
    """Yield one sentence per note.

    Args:
        recipe: what was simulated.
        attention_used: values of the AttentionKernels that ran.
    """
    gpu = recipe.gpu_spec
    yield (
        f"Simulated, not measured: transformers' code ran on a model of torch's CUDA allocator and operators, for one"
        f" {gpu.title}."
    )
    if not gpu.measured:
        yield (
            f"Assumed for {gpu.title}: its figures come from data sheets, and its attention kernel and workspaces from"
            " torch's source; only the H200 was measured."
        )
    if attention_used:
        kernels = " and ".join(sorted(AttentionKernel(name).label for name in attention_used))
        yield f"scaled_dot_product_attention uses {kernels} kernel there."
    if recipe.engine is Engine.DDP:
        yield "NCCL is taken to hold DDP's first bucket until the second step's first reduction."
    if recipe.packed_bits == 8:
        yield "8-bit weights: no input has outliers (LLM.int8)."
    if recipe.packed_bits is not None and find_spec("bitsandbytes") is None:
        kind = "LLM.int8" if recipe.packed_bits == 8 else "NF4, double quantization"
        yield (
            f"{recipe.packed_bits}-bit weights are stand-ins with the storages of bitsandbytes 0.50 ({kind}), which is"
            " not installed."
        )
    if (package := recipe.optimizer.row.package) is not None and find_spec(package) is None:
        version = {"bitsandbytes": "0.50", "galore_torch": "1.0"}[package]
        yield (
            f"The states of {recipe.optimizer} are stand-ins with the sizes of those of {package} {version}, which is"
            " not installed."
        )
    if recipe.optimizer is Optimizer.GALORE:
        yield (
            "cuSOLVER's workspace is not counted for matrices with fewer than 512 rows or columns, and for those that"
            " are nearly square."
        )
    if recipe.padding > 0:
        yield "Every batch is assumed to contain padding, and so to have a mask."
    if recipe.holds_several_documents:
        yield "Every packed row is assumed to hold several documents."
