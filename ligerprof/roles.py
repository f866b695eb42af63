"""Roles and phases: the vocabulary of every memory figure."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from ligerprof.words import Word


class Role(str, Enum):
    """What memory is used for. The value is the name in JSON; tables list roles in this order."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER_STATES = "optimizer_states"
    OPTIMIZER_TEMPORARIES = "optimizer_temporaries"
    WEIGHT_CASTS = "weight_casts"
    CHECKPOINTS = "checkpoints"
    ACTIVATIONS = "activations"
    ATTENTION_TEMPORARIES = "attention_temporaries"
    LOGITS = "logits"
    SHIFT_LOGITS = "shift_logits"
    CE_TEMPORARIES = "ce_temporaries"
    KERNEL_WORKSPACE = "kernel_workspace"
    LIBRARY_WORKSPACE = "library_workspace"
    COMMUNICATION = "communication"
    INPUTS = "inputs"
    ALLOCATOR_ROUNDING = "allocator_rounding"
    OTHER = "other"
    UNATTRIBUTED = "unattributed"


ROLE_MEANINGS: Mapping[Role, str] = {
    Role.PARAMETERS: "weights of the model",
    Role.GRADIENTS: "gradients of parameters, including those that a fused loss computes in forward",
    Role.OPTIMIZER_STATES: "moments, step counters, fp32 master copies",
    Role.OPTIMIZER_TEMPORARIES: "temporary tensors of the optimizer step",
    Role.WEIGHT_CASTS: "autocast's 16-bit copies of weights",
    Role.CHECKPOINTS: "inputs of decoder layers that checkpointing keeps",
    Role.ACTIVATIONS: "other tensors saved for backward, recomputed, or temporary in a layer",
    Role.ATTENTION_TEMPORARIES: "attention's score matrices and workspaces",
    Role.LOGITS: "the head's output and its upcast copy",
    Role.SHIFT_LOGITS: "the contiguous shifted copy of the logits",
    Role.CE_TEMPORARIES: "temporary tensors of the loss: log-probabilities and gradients of the logits",
    Role.KERNEL_WORKSPACE: "chunk buffers and accumulators of fused kernels",
    Role.LIBRARY_WORKSPACE: "cuBLAS and cuDNN",
    Role.COMMUNICATION: "ZeRO's gathered parameters and buckets",
    Role.INPUTS: "tokens, labels, masks, positions",
    Role.ALLOCATOR_ROUNDING: "block bytes beyond the requested size",
    Role.OTHER: "identified, but none of these roles",
    Role.UNATTRIBUTED: "not identified",
}


class Backend(Word):
    """How the figures of a training step came about."""

    ESTIMATED = "estimated"
    SIMULATED = "simulated"
    MEASURED = "measured"
    # read from a recording, which does not say whether a GPU or a simulator made it
    SNAPSHOT = "snapshot"


class Phase(str, Enum):
    """When bytes were requested. The loss belongs to forward and backward."""

    BUILD = "build"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    OUTSIDE = "outside"


STEP_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBreakdown:
    """Bytes by role, with every role present; the type of estimated, simulated and measured figures.

    Attributes:
        roles: requested bytes by role; with `allocator_rounding` they sum to the allocated bytes.
    """

    roles: Mapping[Role, int]

    def __post_init__(self) -> None:
        complete = {role: int(self.roles.get(role, 0)) for role in Role}
        object.__setattr__(self, "roles", complete)

    @property
    def total_bytes(self) -> int:
        """The sum over all roles."""
        return sum(self.roles.values())

    def __getitem__(self, role: Role) -> int:
        return self.roles[role]

    def to_json(self) -> dict[str, int]:
        """The `roles` object of any command's JSON, zeros included."""
        return {role.value: size_bytes for role, size_bytes in self.roles.items()}

    @classmethod
    def from_json(cls, roles: Mapping[str, int]) -> "MemoryBreakdown":
        """Read the `roles` object of any command's JSON.

        Raises:
            ValueError: a key is not the name of a role.
        """
        return cls(roles={Role(word): size_bytes for word, size_bytes in roles.items()})
