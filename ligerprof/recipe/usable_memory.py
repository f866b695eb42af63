"""The memory of a GPU that torch's allocator can reserve, and what an engine for generation may have of it."""

from dataclasses import dataclass
from typing import Any

from ligerprof.errors import RecipeError
from ligerprof.recipe.training_options import TrainingOptions
from ligerprof.torch_memory.distributed import nccl_bytes
from ligerprof.units import GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """The most that torch's allocator may reserve; `source` says where the limit comes from."""

    size_bytes: int
    source: str


def find_limit(options: TrainingOptions) -> Limit:
    """The recipe's memory limit, else what its GPU leaves for torch; raises RecipeError if it is above the GPU's."""
    gpu, given_bytes = options.gpu_spec, options.memory_limit_bytes
    if given_bytes is not None and given_bytes > gpu.memory_bytes:
        raise RecipeError(
            f"--memory-limit {given_bytes} bytes is more than {gpu.title} has. Lower it, or choose --gpu."
        )
    return lowest_limit(options)


def lowest_limit(options: TrainingOptions) -> Limit:
    """The same for a limit of any size."""
    usable, given_bytes = usable_memory(options), options.memory_limit_bytes
    if given_bytes is not None and given_bytes <= usable.size_bytes:
        return Limit(size_bytes=given_bytes, source="--memory-limit")
    return usable


def usable_memory(options: TrainingOptions) -> Limit:
    """The GPU's memory without what is outside torch's allocator."""
    gpu = options.gpu_spec
    return Limit(
        size_bytes=max(0, gpu.memory_bytes - outside_bytes(options)),
        source=f"{gpu.title} less the CUDA context{' and NCCL' if options.gpus > 1 else ''}",
    )


def outside_bytes(options: TrainingOptions) -> int:
    """CUDA's context, the code of kernels and, on several GPUs, NCCL's buffers."""
    gpu = options.gpu_spec
    # HSDP has a communicator of the replicas and one of the shards; that of a single rank takes nothing
    further = sum(size > 1 for size in (options.replicate, options.shards)) if options.replicate > 1 else 0
    return gpu.memory_bytes - gpu.usable_bytes + nccl_bytes(options.gpus, further_communicators=further)


# of vLLM: CUDA graphs, workspaces and the activations of one pass; an assumption, which nothing here measured
ENGINE_EXTRA_BYTES = 2 * GIB
# vLLM's block_size
_TOKENS_OF_BLOCK = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class ColocatedEngine:
    """An engine as vLLM's, in the process of a training: arithmetic by rules that nothing here measured.

    The engine takes `gpu_memory_utilization` of the whole GPU: for its weights in 16 bits, `ENGINE_EXTRA_BYTES`, and
    keys and values. Awake, all of that stays while the training reaches its peak. Asleep, it keeps
    `ENGINE_EXTRA_BYTES`, and when it wakes, the training has emptied its cache and holds weights and optimizer states.

    Attributes:
        usable_bytes: without the context of the process.
        training_bytes: reserved at the peak of the training, its own generation included.
        held_bytes: of weights and optimizer states.
        token_bytes: of the keys and values of one token.
    """

    gpu_bytes: int
    usable_bytes: int
    training_bytes: int
    held_bytes: int
    weights_bytes: int
    token_bytes: int

    def utilization(self, *, sleeps: bool) -> float:
        """The largest `gpu_memory_utilization` with which the training fits, rounded down to hundredths; 0 if none."""
        if sleeps and self.training_bytes + ENGINE_EXTRA_BYTES > self.usable_bytes:
            return 0.0
        left_bytes = self.usable_bytes - (self.held_bytes if sleeps else self.training_bytes)
        return max(0, left_bytes * 100 // self.gpu_bytes) / 100

    def tokens(self, *, sleeps: bool) -> int:
        """How many tokens its keys and values have room for then: of all sequences at once, prompts included."""
        share_bytes = round(self.utilization(sleeps=sleeps) * 100) * self.gpu_bytes // 100
        left_bytes = share_bytes - self.weights_bytes - ENGINE_EXTRA_BYTES
        return max(0, left_bytes // self.token_bytes // _TOKENS_OF_BLOCK * _TOKENS_OF_BLOCK)

    def sequences(self, tokens: int, *, sleeps: bool) -> int:
        """The most sequences of so many tokens at once, such as `num_generations` of one prompt."""
        return self.tokens(sleeps=sleeps) // tokens

    def longest(self, sequences: int, *, sleeps: bool) -> int:
        """The most tokens of each of so many sequences: the prompt and `max_completion_length`."""
        return self.tokens(sleeps=sleeps) // sequences

    def to_json(self) -> dict[str, Any]:
        """The object `engine` in the JSON."""
        found = {
            name: {"gpu_memory_utilization": self.utilization(sleeps=sleeps), "kv_tokens": self.tokens(sleeps=sleeps)}
            for name, sleeps in (("awake", False), ("asleep", True))
        }
        return {"measured": False, "kv_token_bytes": self.token_bytes, **found}
