"""Roles and phases: the vocabulary of every memory figure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ligerprof.text import Printed
from ligerprof.words import ExplainedWord, Word


class Role(ExplainedWord):
    """What memory is used for. The value is the name in JSON; tables list roles in this order."""

    PARAMETERS = "parameters", "weights of the model"
    GRADIENTS = "gradients", "gradients of parameters, including those that a fused loss computes in forward"
    OPTIMIZER_STATES = "optimizer_states", "moments, step counters, fp32 master copies"
    OPTIMIZER_TEMPORARIES = "optimizer_temporaries", "temporary tensors of the optimizer step"
    WEIGHT_CASTS = "weight_casts", "autocast's 16-bit copies of weights"
    CHECKPOINTS = "checkpoints", "inputs of decoder layers that checkpointing keeps"
    ACTIVATIONS = "activations", "other tensors saved for backward, recomputed, or temporary in a layer"
    ATTENTION_TEMPORARIES = "attention_temporaries", "attention's score matrices and workspaces"
    LOGITS = "logits", "the head's output and its upcast copy"
    SHIFT_LOGITS = "shift_logits", "the contiguous shifted copy of the logits"
    CE_TEMPORARIES = "ce_temporaries", "temporary tensors of the loss: log-probabilities and gradients of the logits"
    KERNEL_WORKSPACE = "kernel_workspace", "chunk buffers and accumulators of fused kernels"
    LIBRARY_WORKSPACE = "library_workspace", "cuBLAS and cuDNN"
    COMMUNICATION = "communication", "ZeRO's gathered parameters and buckets"
    KV_CACHE = "kv_cache", "keys and values that a generation keeps between forward passes"
    INPUTS = "inputs", "tokens, labels, masks, positions"
    ALLOCATOR_ROUNDING = "allocator_rounding", "block bytes beyond the requested size"
    OTHER = "other", "identified, but none of these roles"
    UNATTRIBUTED = "unattributed", "not identified"


# columns of roles hold the index of each
ROLES = tuple(Role)
ROLE_CODES: Mapping[Role, int] = {role: code for code, role in enumerate(ROLES)}


class Backend(Word):
    """How the figures of a training step were obtained."""

    ESTIMATED = "estimated"
    SIMULATED = "simulated"
    MEASURED = "measured"
    # a recording, which may come from a GPU or the simulator
    SNAPSHOT = "snapshot"


class Phase(Word):
    """When bytes were requested. The loss belongs to forward and backward."""

    BUILD = "build"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    # phases of loops that train on what a model generates, and on how other models score it
    GENERATION = "generation"
    SCORING = "scoring"
    EVALUATION = "evaluation"
    SAVING = "saving"
    OUTSIDE = "outside"


class View(Word):
    """What a table of the peak sums bytes by."""

    ROLE = "role"
    LAYER = "layer"
    PHASE = "phase"


PASSES = (Phase.FORWARD, Phase.BACKWARD)
STEP_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
# with those that run between steps, or beside the passes of one
REPORTED_PHASES = (*STEP_PHASES, Phase.GENERATION, Phase.SCORING, Phase.EVALUATION, Phase.SAVING)
# forward passes without a backward pass
INFERENCE_PHASES = (Phase.GENERATION, Phase.SCORING, Phase.EVALUATION)


def shown_phases(*found: Iterable[Phase]) -> tuple[Phase, ...]:
    """The phases of a step, and those between steps that any of `found` contains."""
    between = {phase for each in found for phase in each} - set(STEP_PHASES)
    return tuple(phase for phase in REPORTED_PHASES if phase in STEP_PHASES or phase in between)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBreakdown(Printed, Mapping["Role", int]):
    """A mapping from every role to bytes; the type of estimated, simulated and measured figures.

    Attributes:
        roles: requested bytes by role; with `allocator_rounding` they sum to the allocated bytes.
    """

    roles: Mapping[Role, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "roles", {role: int(self.roles.get(role, 0)) for role in Role})

    @property
    def total_bytes(self) -> int:
        """The sum over all roles."""
        return sum(self.roles.values())

    def __getitem__(self, role: Role) -> int:
        return self.roles[role]

    def __iter__(self) -> Iterator[Role]:
        return iter(self.roles)

    def __len__(self) -> int:
        return len(self.roles)

    def to_json(self) -> dict[str, int]:
        """The `roles` object of any command's JSON, zeros included."""
        return {role.value: size_bytes for role, size_bytes in self.roles.items()}

    @classmethod
    def from_json(cls, roles: Mapping[str, int]) -> "MemoryBreakdown":
        """Read the `roles` object of any command's JSON; raises ValueError for a key that is not the name of a role."""
        return cls(roles={Role(word): size_bytes for word, size_bytes in roles.items()})
