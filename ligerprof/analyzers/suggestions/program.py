"""Read off a recording's stacks which framework runs the program, and what it already does."""

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ligerprof.analyzers.attribution import frames
from ligerprof.analyzers.attribution.blocks import Attribution
from ligerprof.analyzers.attribution.phases import are_codes_of
from ligerprof.roles import STEP_PHASES
from ligerprof.words import ExplainedWord


class Framework(ExplainedWord):
    """Whose settings a reader can change."""

    LIGERPROF = "ligerprof", "ligerprof step"
    AXOLOTL = "axolotl", "axolotl's YAML"
    LLAMA_FACTORY = "llama-factory", "LLaMA-Factory's YAML"
    TRL = "trl", "the arguments of a TRL trainer, such as SFTConfig"
    TRAINER = "transformers", "transformers.TrainingArguments"
    LIGHTNING = "lightning", "Lightning"
    DEEPSPEED = "deepspeed", "DeepSpeed's JSON"
    FSDP2 = "fsdp2", "torch's fully_shard"
    FSDP1 = "fsdp1", "torch's FullyShardedDataParallel"
    DDP = "ddp", "torch's DistributedDataParallel"
    ACCELERATE = "accelerate", "accelerate"
    MODEL = "transformers-model", "a transformers model in a loop of its own"
    TORCH = "torch", "plain torch"


_WITHOUT_CODE = (Framework.AXOLOTL, Framework.LLAMA_FACTORY)
_INSTALLED = r"(?:^|/)"
# the first that matches runs the training loop
_LOOPS = (
    (Framework.LIGERPROF, r"ligerprof/runs/"),
    (Framework.AXOLOTL, rf"{_INSTALLED}axolotl/"),
    (Framework.LLAMA_FACTORY, rf"{_INSTALLED}llamafactory/"),
    (Framework.TRL, rf"{_INSTALLED}trl/(?:\w+/)*\w*trainer"),
    (Framework.TRAINER, rf"{_INSTALLED}transformers/trainer\w*\.py$"),
    (Framework.LIGHTNING, rf"{_INSTALLED}(?:lightning|pytorch_lightning|lightning_fabric)/"),
    (Framework.ACCELERATE, rf"{_INSTALLED}accelerate/(?:accelerator|utils/operations)\.py$"),
)
_ENGINES = (
    (Framework.DEEPSPEED, rf"{_INSTALLED}deepspeed/runtime/"),
    (Framework.FSDP2, r"torch/distributed/(?:fsdp/_fully_shard|_composable/fsdp)/"),
    (Framework.FSDP1, r"torch/distributed/fsdp/(?:fully_sharded_data_parallel|_runtime_utils|_flat_param)\.py$"),
    (Framework.DDP, r"torch/nn/parallel/distributed\.py$"),
)
_MODEL = rf"{_INSTALLED}transformers/models/"
_MODEL_TYPE = rf"{_MODEL}(\w+)/modeling_"
_PEFT = rf"{_INSTALLED}peft/tuners/"
_COMPILED = r"torch/_inductor/|/torchinductor_|torch/_functorch/_aot"


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """What the stacks of a recording show about its program.

    Attributes:
        files: the files of all Python calls, installed packages by their package's path.
        calls: all of them as `file:function`.
    """

    files: frozenset[str]
    calls: frozenset[str]

    @cached_property
    def loop(self) -> Framework | None:
        """The framework that runs the training loop, None for a loop of its own."""
        return next((one for one, pattern in _LOOPS if self.has_file(pattern)), None)

    @cached_property
    def engine(self) -> Framework | None:
        """The engine that shards or replicates the model."""
        return next((one for one, pattern in _ENGINES if self.has_file(pattern)), None)

    @cached_property
    def frameworks(self) -> tuple[Framework, ...]:
        """Everything that the program uses, the outermost first: how a change is made is looked up in this order.

        The users of some programs change their settings, not code; a trainer's settings contain DeepSpeed's.
        """
        if self.loop is Framework.LIGERPROF:
            return (self.loop,)
        found = [self.loop, self.engine]
        if self.loop in _WITHOUT_CODE:
            found = [self.loop, self.engine if self.engine is Framework.DEEPSPEED else None]
        else:
            found += [Framework.MODEL if self.has_file(_MODEL) else None, Framework.TORCH]
        return tuple(one for one in found if one is not None)

    @cached_property
    def model_types(self) -> frozenset[str]:
        """The `model_type` of each transformers model that runs."""
        found = (re.search(_MODEL_TYPE, file) for file in self.files)
        return frozenset(match.group(1) for match in found if match)

    @cached_property
    def checkpoints(self) -> bool:
        """Whether gradient checkpointing runs."""
        return self.has_file(f"{frames.CHECKPOINT}$")

    @cached_property
    def has_adapters(self) -> bool:
        """Whether peft's adapters are trained."""
        return self.has_file(_PEFT)

    @cached_property
    def has_fused_loss(self) -> bool:
        """Whether a loss computes logits chunk by chunk."""
        return self.has_call(rf"{frames.FUSED_LOSS}|chunked")

    @cached_property
    def has_cross_entropy(self) -> bool:
        """Whether torch's cross-entropy runs."""
        return self.has_call(f"{frames.CROSS_ENTROPY}|{frames.LANGUAGE_MODEL_LOSS}")

    @cached_property
    def generates(self) -> bool:
        """Whether the recording is of text generation."""
        return self.has_file(frames.GENERATION)

    @cached_property
    def evaluates(self) -> bool:
        """Whether a trainer evaluates in the recording."""
        return self.has_call(frames.EVALUATION)

    @cached_property
    def is_compiled(self) -> bool:
        """Whether torch.compile's code runs."""
        return self.has_file(_COMPILED)

    def has_file(self, pattern: str) -> bool:
        """Whether a call's file matches a regular expression."""
        return any(re.search(pattern, file) for file in self.files)

    def has_call(self, pattern: str) -> bool:
        """Whether a call, as `file:function`, matches a regular expression."""
        return any(re.search(pattern, call) for call in self.calls)


def read_program(attribution: Attribution) -> Program:
    """Read the program off the stacks of its forward and backward passes and optimizer steps, or off all stacks."""
    replayed, sites = attribution.replayed, attribution.call_sites
    in_steps = are_codes_of(attribution.phases.codes_of(replayed.allocated_by), *STEP_PHASES)
    chosen = np.flatnonzero(np.bincount(sites.site_of[in_steps])).tolist() or range(len(sites.sites))
    calls = {call for site in chosen for call in sites.sites[site].stack.calls}
    return Program(
        files=frozenset(call.file for call in calls),
        calls=frozenset(f"{call.file}:{call.function}" for call in calls),
    )
