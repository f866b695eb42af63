"""The one vocabulary of who holds memory and when; every figure of the product is told in it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from ligerprof.words import Word


class Role(str, Enum):
    """Who holds bytes. The value is the word in the JSON; the order is the order of every table."""

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
    Role.GRADIENTS: "gradients of parameters, also those a fused loss makes in the forward pass",
    Role.OPTIMIZER_STATES: "moments, step counters, fp32 master copies",
    Role.OPTIMIZER_TEMPORARIES: "what the optimizer step allocates and drops",
    Role.WEIGHT_CASTS: "autocast's 16-bit copies of weights",
    Role.CHECKPOINTS: "inputs of decoder layers that checkpointing keeps",
    Role.ACTIVATIONS: "what else is saved for backward, recomputed or held inside a layer",
    Role.ATTENTION_TEMPORARIES: "attention's score matrices and workspaces",
    Role.LOGITS: "the head's output and its upcast copy",
    Role.SHIFT_LOGITS: "the contiguous shifted copy of the logits",
    Role.CE_TEMPORARIES: "what the loss allocates: log-probabilities and gradients of the logits",
    Role.KERNEL_WORKSPACE: "chunk buffers and accumulators of fused kernels",
    Role.LIBRARY_WORKSPACE: "cuBLAS and cuDNN",
    Role.COMMUNICATION: "ZeRO's gathered parameters and buckets",
    Role.INPUTS: "tokens, labels, masks, positions",
    Role.ALLOCATOR_ROUNDING: "block bytes beyond what was requested",
    Role.OTHER: "named, but none of these",
    Role.UNATTRIBUTED: "not named",
}


class Backend(Word):
    """How the figures of a training step came about."""

    ESTIMATED = "estimated"
    SIMULATED = "simulated"
    MEASURED = "measured"
    # read from a recording, which does not say whether a GPU or a simulator made it
    SNAPSHOT = "snapshot"


class Phase(str, Enum):
    """When bytes were asked for. The loss belongs to forward and backward."""

    BUILD = "build"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    OUTSIDE = "outside"


STEP_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBreakdown:
    """Bytes by role, every role present. Estimated, simulated and measured figures are all this type.

    Attributes:
        roles: role to requested bytes; with `allocator_rounding` they add up to allocated bytes.
    """

    roles: Mapping[Role, int]

    def __post_init__(self) -> None:
        complete = {role: int(self.roles.get(role, 0)) for role in Role}
        object.__setattr__(self, "roles", complete)

    @property
    def total_bytes(self) -> int:
        """All roles together."""
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
            ValueError: a word that is no role.
        """
        return cls(roles={Role(word): size_bytes for word, size_bytes in roles.items()})
