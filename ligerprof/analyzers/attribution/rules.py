"""The rules that give a block its role: one table, read from the top, first match wins."""

import re
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

from ligerprof.roles import Phase, Role


class Trait(Enum):
    """What the replay knows of a block beyond its stack."""

    # lifetime, in runs of equal phase
    DIES_IN_PHASE = auto()
    OUTLIVES_PHASE = auto()
    OUTLIVES_LAYER = auto()
    OUTLIVES_STEP = auto()
    NEVER_FREED = auto()
    # size
    WEIGHT_SIZED = auto()
    HALF_WEIGHT_SIZED = auto()
    HEAD_WEIGHT_SIZED = auto()
    PLANE_SIZED = auto()
    SHIFTED_PLANE_SIZED = auto()
    WORKSPACE_SIZED = auto()
    FIRST_WORKSPACE = auto()
    SMALL = auto()
    # place
    RECOMPUTED = auto()
    CHECKPOINTING = auto()
    IN_LAYER = auto()
    AFTER_LAYERS = auto()
    IN_EMBEDDING = auto()
    IN_HEAD = auto()
    IN_LOSS_AREA = auto()
    IN_MODEL_BODY = auto()
    FIRST_OF_CALL = auto()
    CAST_ARGUMENT = auto()
    DIES_IN_CALL = auto()
    ATTENTION_SCORES = auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What rules look at.

    Attributes:
        phase: None where it is unknown.
        stack: Python calls as `file:function`, one a line, innermost first.
        native: C++ functions, one a line.
        node: the autograd node that ran, or "".
        module: dotted name, "" where unknown.
    """

    phase: Phase | None
    stack: str
    native: str
    node: str
    traits: frozenset[Trait]
    module: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A role for blocks that meet every condition given; patterns are searched for, lines matched by `^` and `$`.

    Attributes:
        phases: any of these; empty is any, also an unknown one.
        has: all of these traits.
        lacks: none of these.
    """

    role: Role
    phases: tuple[Phase, ...] = ()
    stack: str = ""
    native: str = ""
    node: str = ""
    has: tuple[Trait, ...] = ()
    lacks: tuple[Trait, ...] = ()

    def matches(self, facts: Facts) -> bool:
        """Whether all conditions hold."""
        return (
            (not self.phases or facts.phase in self.phases)
            and facts.traits.issuperset(self.has)
            and facts.traits.isdisjoint(self.lacks)
            and all(
                not pattern or re.search(pattern, text, re.MULTILINE)
                for pattern, text in (
                    (self.stack, facts.stack),
                    (self.native, facts.native),
                    (self.node, facts.node),
                )
            )
        )


_BUILD, _FORWARD, _BACKWARD = Phase.BUILD, Phase.FORWARD, Phase.BACKWARD
_OPTIMIZER, _OUTSIDE = Phase.OPTIMIZER, Phase.OUTSIDE
_FUSED_LOSS = r"fused_linear_cross_entropy|ligerprof/kernels/linear_cross_entropy/|cut_cross_entropy/"
_FUSED_CE = r"liger_kernel/ops/cross_entropy\.py|ligerprof/kernels/cross_entropy/"
_LOSS = r"/functional\.py:(?:cross_entropy|nll_loss|log_softmax)$|loss_utils\.py:fixed_cross_entropy$"
_COLLECTIVES = (
    r"deepspeed/runtime/zero/partition|deepspeed/runtime/comm|deepspeed/comm/|distributed_c10d\.py:"
    r"|distributed/(?:fsdp|_composable|_functional_collectives)|parallel/distributed\.py:"
)
_LINEAR = r"nn/modules/linear\.py:forward$|zero/linear\.py:|functional\.py:linear$|pytorch_utils\.py:forward$"

RULES: tuple[Rule, ...] = (
    # libraries: named by C++ frames, or by a known size that is taken once and never given back
    Rule(role=Role.LIBRARY_WORKSPACE, native=r"CUDABlas|cublas\w*[wW]orkspace|[cC]udnn\w*[wW]orkspace"),
    Rule(
        role=Role.LIBRARY_WORKSPACE,
        phases=(_FORWARD, _BACKWARD),
        has=(Trait.FIRST_WORKSPACE, Trait.NEVER_FREED),
    ),
    Rule(
        role=Role.LIBRARY_WORKSPACE,
        phases=(_FORWARD, _BACKWARD),
        has=(Trait.WORKSPACE_SIZED, Trait.OUTLIVES_STEP),
        lacks=(Trait.WEIGHT_SIZED,),
    ),
    # what DeepSpeed's ZeRO makes of weights, master copies and gradients
    Rule(
        role=Role.PARAMETERS,
        phases=(_BUILD,),
        stack=r"deepspeed/runtime/zero/.*:(?:flatten_dense_tensors_aligned|defragment|_partition_param)$",
    ),
    Rule(
        role=Role.OPTIMIZER_STATES,
        stack=r"deepspeed/runtime/.*:(?:_create_fp32_partitions|initialize_optimizer_states)$"
        r"|\A\S*fp16/(?:un)?fused_optimizer\.py:__init__$",
    ),
    # the other block of this constructor holds the largest gradient on its way to main memory
    Rule(role=Role.OPTIMIZER_STATES, stack=r"\A\S*zero/stage_1_and_2\.py:__init__$", lacks=(Trait.HEAD_WEIGHT_SIZED,)),
    Rule(role=Role.GRADIENTS, phases=(_BACKWARD,), stack=r"\A\S*zero/stage_1_and_2\.py:copy_grads_in_partition$"),
    Rule(role=Role.GRADIENTS, phases=(_BACKWARD,), stack=r"\A\S*zero/linear\.py:backward$", has=(Trait.WEIGHT_SIZED,)),
    # the optimizer: what it makes and keeps, and what it drops; within ZeRO's step weights are gathered, too
    Rule(role=Role.OPTIMIZER_STATES, stack=r":_?init_(?:group|state)$|:_init_group$|:init_state$"),
    Rule(role=Role.COMMUNICATION, phases=(_OPTIMIZER,), stack=_COLLECTIVES),
    Rule(role=Role.OPTIMIZER_STATES, phases=(_OPTIMIZER,), has=(Trait.OUTLIVES_PHASE,)),
    Rule(role=Role.OPTIMIZER_TEMPORARIES, phases=(_OPTIMIZER,)),
    # DeepSpeed's and other buffers for moving parameters and gradients between ranks or to the host
    Rule(role=Role.COMMUNICATION, stack=rf"deepspeed/runtime/zero/(?!linear|tiling)|{_COLLECTIVES}"),
    # what feeds the model
    Rule(role=Role.INPUTS, stack=r":make_batch$|/dataloader\.py:|/data_collator\.py:|/data/_utils/"),
    Rule(role=Role.INPUTS, phases=(_FORWARD,), stack=r"\A\S*mask\w*\.py:"),
    Rule(role=Role.INPUTS, phases=(_FORWARD,), has=(Trait.IN_MODEL_BODY, Trait.SMALL)),
    Rule(
        role=Role.INPUTS,
        phases=(_FORWARD,),
        has=(Trait.IN_LOSS_AREA, Trait.SMALL),
        lacks=(Trait.IN_HEAD,),
        stack=r"\A\S*(?:loss_utils|modeling_\w+)\.py:",
    ),
    # the model as it is built or loaded; rotary frequencies are buffers, no weights
    Rule(role=Role.OTHER, phases=(_BUILD,), stack=r"rope|[rR]otary"),
    Rule(role=Role.PARAMETERS, phases=(_BUILD,)),
    Rule(role=Role.INPUTS, phases=(_OUTSIDE,)),
    # fused losses: the head's gradient is made in forward, chunks live no longer than the call
    Rule(
        role=Role.GRADIENTS,
        phases=(_FORWARD,),
        stack=_FUSED_LOSS,
        has=(Trait.HEAD_WEIGHT_SIZED,),
        lacks=(Trait.DIES_IN_PHASE,),
    ),
    Rule(role=Role.KERNEL_WORKSPACE, phases=(_FORWARD,), stack=_FUSED_LOSS, lacks=(Trait.OUTLIVES_PHASE,)),
    Rule(role=Role.CE_TEMPORARIES, phases=(_FORWARD,), stack=_FUSED_LOSS, has=(Trait.SMALL,)),
    Rule(role=Role.ACTIVATIONS, phases=(_FORWARD,), stack=_FUSED_LOSS),
    Rule(role=Role.CE_TEMPORARIES, phases=(_FORWARD,), stack=_FUSED_CE),
    # autocast's copies of weights and biases
    Rule(
        role=Role.WEIGHT_CASTS,
        stack=_LINEAR,
        has=(Trait.HALF_WEIGHT_SIZED, Trait.CAST_ARGUMENT),
    ),
    # the same, made by a kernel that takes in a linear layer
    Rule(
        role=Role.WEIGHT_CASTS,
        stack=r"\A\S*ligerprof/kernels/gated/triton\.py:gated_linear$",
        has=(Trait.HALF_WEIGHT_SIZED,),
    ),
    # the loss in forward
    Rule(role=Role.CE_TEMPORARIES, phases=(_FORWARD,), stack=_LOSS),
    Rule(role=Role.SHIFT_LOGITS, phases=(_FORWARD,), has=(Trait.IN_LOSS_AREA, Trait.SHIFTED_PLANE_SIZED)),
    Rule(role=Role.LOGITS, phases=(_FORWARD,), has=(Trait.IN_LOSS_AREA, Trait.PLANE_SIZED)),
    Rule(role=Role.CE_TEMPORARIES, phases=(_FORWARD,), has=(Trait.IN_LOSS_AREA,), lacks=(Trait.IN_HEAD,)),
    # the loss in backward
    Rule(role=Role.CE_TEMPORARIES, phases=(_BACKWARD,), stack=r":_make_grads$|:scale_loss$|:scale$"),
    Rule(
        role=Role.CE_TEMPORARIES,
        phases=(_BACKWARD,),
        node=r"NllLoss|LogSoftmax|CrossEntropy",
        lacks=(Trait.RECOMPUTED,),
    ),
    Rule(
        role=Role.CE_TEMPORARIES,
        phases=(_BACKWARD,),
        has=(Trait.PLANE_SIZED,),
        lacks=(Trait.RECOMPUTED, Trait.WEIGHT_SIZED),
    ),
    Rule(
        role=Role.CE_TEMPORARIES,
        phases=(_BACKWARD,),
        has=(Trait.SHIFTED_PLANE_SIZED,),
        lacks=(Trait.RECOMPUTED, Trait.WEIGHT_SIZED),
    ),
    Rule(
        role=Role.CE_TEMPORARIES,
        phases=(_BACKWARD,),
        has=(Trait.IN_LOSS_AREA, Trait.DIES_IN_PHASE),
        lacks=(Trait.RECOMPUTED, Trait.IN_HEAD),
    ),
    # gradients
    Rule(role=Role.GRADIENTS, phases=(_BACKWARD,), has=(Trait.OUTLIVES_PHASE,)),
    Rule(role=Role.GRADIENTS, phases=(_BACKWARD,), node=r"^Embedding|AccumulateGrad", has=(Trait.WEIGHT_SIZED,)),
    Rule(
        role=Role.GRADIENTS, phases=(_BACKWARD,), has=(Trait.WEIGHT_SIZED, Trait.NEVER_FREED), lacks=(Trait.RECOMPUTED,)
    ),
    # a matrix product's backward makes the weight's gradient first; autocast's is in 16 bit and soon cast
    Rule(
        role=Role.GRADIENTS,
        phases=(_BACKWARD,),
        node=r"^(?:Mm|Addmm|Bmm)Backward",
        has=(Trait.WEIGHT_SIZED, Trait.FIRST_OF_CALL),
        lacks=(Trait.RECOMPUTED,),
    ),
    Rule(
        role=Role.GRADIENTS,
        phases=(_BACKWARD,),
        node=r"^(?:Mm|Addmm|Bmm)Backward",
        has=(Trait.HALF_WEIGHT_SIZED, Trait.FIRST_OF_CALL),
        lacks=(Trait.RECOMPUTED,),
    ),
    # attention, forward, recomputed and backward
    Rule(role=Role.ATTENTION_TEMPORARIES, has=(Trait.ATTENTION_SCORES,)),
    Rule(
        role=Role.ATTENTION_TEMPORARIES,
        stack=r"\A\S*(?:sdpa|flash|eager|flex)\w*attention\w*\.py:|:scaled_dot_product_attention$|:eager_attention_forward$",
        has=(Trait.DIES_IN_CALL,),
    ),
    Rule(
        role=Role.ATTENTION_TEMPORARIES,
        phases=(_BACKWARD,),
        node=r"ScaledDotProduct|Attention",
        has=(Trait.DIES_IN_CALL,),
    ),
    # what checkpointing keeps
    Rule(
        role=Role.CHECKPOINTS, phases=(_FORWARD,), has=(Trait.CHECKPOINTING, Trait.IN_EMBEDDING), lacks=(Trait.SMALL,)
    ),
    Rule(
        role=Role.CHECKPOINTS,
        phases=(_FORWARD,),
        has=(Trait.CHECKPOINTING, Trait.IN_LAYER, Trait.OUTLIVES_LAYER),
        lacks=(Trait.AFTER_LAYERS, Trait.SMALL),
    ),
    # the rest of both passes
    Rule(role=Role.ACTIVATIONS, phases=(_FORWARD, _BACKWARD)),
)


@lru_cache(maxsize=100_000)
def role_of(facts: Facts, rules: tuple[Rule, ...] = RULES) -> Role:
    """The role of the first rule that matches; unattributed where none does."""
    return next((rule.role for rule in rules if rule.matches(facts)), Role.UNATTRIBUTED)
