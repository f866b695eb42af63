"""The rules that give a block its role: features, built-in rules in which the first match wins, and a user's own."""

import re
from dataclasses import KW_ONLY, dataclass, fields
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ligerprof.analyzers.attribution import frames
from ligerprof.errors import RulesError
from ligerprof.files import FileKind, parse_json, parse_toml, read_text
from ligerprof.roles import Phase, Role

# properties of a block that its stack alone does not show
Feature = Enum(
    "Feature",
    # lifetime
    "DIES_IN_PHASE OUTLIVES_PHASE OUTLIVES_LAYER NEVER_FREED KEPT_BEFORE KEPT_SO_FAR UNFINISHED DROPPED_BEFORE "
    # size
    "WEIGHT_SIZED UNLIKE_FORWARD UNLIKE_WEIGHTS GATHERED_SIZED HALF_WEIGHT_SIZED HEAD_WEIGHT_SIZED LOGITS_SIZED "
    "SCORES_SIZED SHIFTED_LOGITS_SIZED VOCABULARY_SIZED FIRST_WORKSPACE SMALL "
    # place in the program
    "RECOMPUTED CHECKPOINTING SELECTED REGION_INPUT OUTSIDE_REGIONS IN_LAYER AFTER_LAYERS IN_EMBEDDING IN_HEAD "
    "IN_LOSS_AREA VOCABULARY_LOSS FIRST_COPY IN_MODEL_BODY FIRST_OF_CALL LAST_OF_CALL CASTS_GRADIENTS "
    "CAST_OF_GRADIENT CAST_OF_OTHER_GRADIENT BY_PRODUCT APPLIED ONLY_OF_CALL CAST_ARGUMENT DIES_IN_CALL "
    "ATTENTION_SCORES IN_CACHE FEEDS_PASS FOLLOWS_PASS OLDER_WEIGHT OLDER_MODEL COPIES_WEIGHTS "
    "MASTER_OF_WEIGHTS LIKE_WEIGHTS "
    # buffers and gradients of a data-parallel wrapper
    "REDUCED REDUCTION_INPUT GRADIENT_PARTITION FLAT_WEIGHTS MASTER_COPY BUCKETS_HOLD_GRADIENTS "
    "STAMPED_WITHOUT_CALLS ",
)
# the hash of Enum is a Python function, and sets of features are built and compared for every block
Feature.__hash__ = object.__hash__  # type: ignore[method-assign]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFeatures:
    """The input of the rules.

    Attributes:
        phase: None if unknown.
        stack: Python calls as lines of `file:function`, innermost first.
        inner_stack: the part of `stack` below the innermost call of a module.
        native: C++ functions, one per line.
        node: the autograd node that ran, or "".
        module: dotted name, "" if unknown.
    """

    phase: Phase | None
    stack: str
    inner_stack: str
    native: str
    node: str
    features: frozenset[Feature]
    module: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """A role for the blocks that meet every condition.

    Attributes:
        phases: any of these phases; empty allows any, also an unknown one.
        stack: pattern searched in the Python calls; `^` and `$` match at each line.
        inner: pattern searched in the Python calls below the innermost call of a module, which leaves out the wrappers
            whose forward method called the model.
        native: pattern searched in the C++ functions.
        node: pattern searched in the name of the autograd node.
        has: all of these features.
        has_one: at least one of these features; empty allows any.
        lacks: none of these features.
    """

    role: Role
    phases: tuple[Phase, ...] = ()
    _: KW_ONLY
    stack: str = ""
    inner: str = ""
    native: str = ""
    node: str = ""
    has: tuple[Feature, ...] = ()
    has_one: tuple[Feature, ...] = ()
    lacks: tuple[Feature, ...] = ()

    def matches(self, block: BlockFeatures) -> bool:
        """Whether all conditions hold."""
        return (
            (not self.phases or block.phase in self.phases)
            and block.features.issuperset(self.has)
            and (not self.has_one or not block.features.isdisjoint(self.has_one))
            and block.features.isdisjoint(self.lacks)
            and all(
                not pattern or _occurs(pattern, text)
                for pattern, text in (
                    (self.stack, block.stack),
                    (self.inner, block.inner_stack),
                    (self.native, block.native),
                    (self.node, block.node),
                )
            )
        )


# a recording has few stacks, and each is matched with the same patterns for thousands of blocks
@lru_cache(maxsize=20_000)
def _occurs(pattern: str, text: str) -> bool:
    return _compiled(pattern).search(text) is not None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    # re's own cache is checked in Python
    return re.compile(pattern, re.MULTILINE)


_BUILD, _BACKWARD = (Phase.BUILD,), (Phase.BACKWARD,)
_NOT_BUILD = tuple(phase for phase in Phase if phase is not Phase.BUILD)
# the part of FSDP that returns reduced gradients, or keeps those that are not reduced yet
_FSDP_GRADIENTS = (
    rf"{frames.FSDP2_REDUCTION}|{frames.FSDP2_ACCUMULATION}"
    r"|fsdp/_runtime_utils\.py:(?:_reduce_grad|_reduce_grad_no_shard)$"
    r"|fsdp/_flat_param\.py:prepare_gradient_for_(?:backward|optim)$"
)
# copies of a wrapped module's inputs and outputs, which are what the copied tensors are
_COPIES = (
    r"_fsdp_common\.py:_cast_fp_tensor$|distributed/utils\.py:cast_fn$|:_cast_forward_inputs$"
    r"|nn/parallel/distributed\.py:forward\ntorch/autograd/function\.py:apply$"
)
_BF16_OPTIMIZER = r"\A\S*runtime/bf16_optimizer\.py:_setup_for_real_optimizer$"
_ZERO = r"deepspeed/runtime/zero/(?!linear|tiling)|deepspeed/(?:runtime/)?comm/"
_COLLECTIVES = (
    r"distributed_c10d\.py:|distributed/_functional_collectives|distributed/_symmetric_memory"
    r"|nn/parallel/distributed\.py:|distributed/algorithms/ddp_comm_hooks/|distributed/utils\.py:_sync_"
    r"|distributed/pipelining/\w+\.py:_make_tensor_from_meta$"
)

# these come before the rules for optimizers
STATE_RULES: tuple[Rule, ...] = (
    # FSDP2 and FSDP1: the shards, also where the first forward pass pads them anew
    Rule(Role.PARAMETERS, inner=r"_fsdp_param\.py:(?:_init_sharded_param|reset_sharded_param)$"),
    Rule(Role.COMMUNICATION, has=(Feature.REDUCTION_INPUT,)),
    Rule(Role.GRADIENTS, _BACKWARD, inner=_FSDP_GRADIENTS, has_one=(Feature.OUTLIVES_PHASE, Feature.NEVER_FREED)),
    Rule(Role.GRADIENTS, _BACKWARD, has=(Feature.REDUCED,)),
    # DDP's buckets: with gradient_as_bucket_view, gradients are views of them
    Rule(Role.GRADIENTS, inner=frames.DDP_BUCKET, has=(Feature.BUCKETS_HOLD_GRADIENTS,)),
    # ZeroRedundancyOptimizer's parameters_as_bucket_view moves weights into buckets
    Rule(Role.PARAMETERS, inner=r"optim/zero_redundancy_optimizer\.py:_build_param_buckets$"),
    # DeepSpeed ZeRO's weights, master copies and gradients
    Rule(
        Role.PARAMETERS,
        _BUILD,
        inner=r"deepspeed/runtime/zero/.*:(?:flatten_dense_tensors_aligned|defragment|_partition_param)$",
    ),
    Rule(
        Role.OPTIMIZER_STATES,
        inner=r"deepspeed/runtime/.*:(?:_create_fp32_partitions|initialize_optimizer_states)$"
        r"|\A\S*fp16/(?:un)?fused_optimizer\.py:__init__$",
    ),
    Rule(Role.PARAMETERS, has=(Feature.FLAT_WEIGHTS,)),
    Rule(Role.OPTIMIZER_STATES, has=(Feature.MASTER_COPY,)),
    Rule(
        Role.GRADIENTS,
        inner=r"zero/stage_1_and_2\.py:(?:copy_grads_in_partition|_build_compact_grad_partition_buffer"
        r"|_fill_param_grad_accum_attribute)$",
    ),
    # DeepSpeed's bf16 without ZeRO: the 16-bit copy of the partition, its fp32 copy, and fp32 gradients of all weights
    Rule(Role.GRADIENTS, inner=_BF16_OPTIMIZER, has=(Feature.ONLY_OF_CALL,)),
    Rule(Role.OPTIMIZER_STATES, inner=_BF16_OPTIMIZER),
    Rule(
        Role.GRADIENTS,
        _BACKWARD,
        inner=r"\A\S*zero/linear\.py:backward$",
        has_one=(Feature.WEIGHT_SIZED, Feature.GATHERED_SIZED),
    ),
    Rule(Role.GRADIENTS, has=(Feature.GRADIENT_PARTITION,)),
)

# these come after the rules for optimizers' states; an optimizer step also gathers weights
OPTIMIZER_COMMUNICATION = Rule(
    Role.COMMUNICATION,
    (Phase.OPTIMIZER,),
    inner=rf"deepspeed/runtime/zero/partition|deepspeed/(?:runtime/)?comm/|{frames.FSDP}|{_COLLECTIVES}",
)

# these come after the rules for optimizers
COMMUNICATION_RULES: tuple[Rule, ...] = (
    # batches that a wrapper moves to the GPU
    Rule(Role.INPUTS, inner=r"distributed/utils\.py:(?:_to_kwargs|_recursive_to)$"),
    # a collective's result that backward needs, as of sequence parallelism
    Rule(
        Role.ACTIVATIONS, (Phase.FORWARD,), inner=r"distributed/_functional_collectives", has=(Feature.OUTLIVES_PHASE,)
    ),
    # gathered parameters, and buffers that move parameters and gradients between ranks or to the host
    Rule(Role.COMMUNICATION, inner=rf"\A(?![\s\S]*?(?:{_COPIES}))[\s\S]*?(?:{_ZERO}|{_COLLECTIVES})"),
    Rule(Role.COMMUNICATION, _NOT_BUILD, inner=rf"\A(?![\s\S]*?(?:{_COPIES}))[\s\S]*?{frames.FSDP}"),
    # a recording that ends within backward, as where memory ran out
    Rule(
        Role.ACTIVATIONS,
        _BACKWARD,
        # weights are gathered in the dtype of the computation
        node=r"^ToCopyBackward",
        has=(Feature.GATHERED_SIZED, Feature.UNFINISHED),
        lacks=(Feature.CAST_OF_GRADIENT, Feature.KEPT_BEFORE),
    ),
    Rule(
        Role.GRADIENTS,
        _BACKWARD,
        has=(Feature.GATHERED_SIZED, Feature.KEPT_SO_FAR),
        lacks=(Feature.RECOMPUTED, Feature.DROPPED_BEFORE, Feature.BY_PRODUCT),
    ),
)


_FORWARD = (Phase.FORWARD,)
_OPTIMIZER, _OUTSIDE, _PASSES = (Phase.OPTIMIZER,), (Phase.OUTSIDE,), (Phase.FORWARD, Phase.BACKWARD)
# the plain torch of our own fused loss computes what the model's loss does
_FUSED_LOSS = rf"\A(?![\s\S]*/linear_cross_entropy/reference\.py:)[\s\S]*?(?:{frames.FUSED_LOSS})"
# a chunk of TRL's chunked_nll, and of ours: the head's product, and what the loss makes of it
_NLL_CHUNK = rf"\A\S*{frames.NLL_CHUNK}"
# autograd's threads have no Python calls: in a forward pass, they run the backward of a part of the loss
_NO_CALLS = r"\A\Z"
_LOSS = f"{frames.CROSS_ENTROPY}|{frames.LOG_SOFTMAX}|{frames.COMPUTED_LOSS}"
_LOG_SOFTMAX = r"at::_ops::(?:_?log_softmax|logsumexp)"
# nodes that compute gradients of activations; of weights they compute sums, which are small
_NOT_ELEMENTWISE = (
    r"^(?!(?:Mul|Div|Pow|Neg|Exp|Log|Sqrt|Rsqrt|Abs|Clamp|Mean|Silu|Gelu|Relu|LeakyRelu|Elu|Softplus|Mish|Hardtanh"
    r"|Hardswish|Threshold|Sigmoid|Tanh|Softmax|LogSoftmax|MaskedFill|Where|ScaledDotProduct|NativeDropout|FusedDropout"
    r"|Index|Gather|MaxPool|AvgPool|AdaptiveAvgPool|Upsample)\w*Backward)"
)
# inductor and Triton measure kernels on tensors of their own
_MEASURES = (
    r"torch/_inductor/(?:runtime/benchmarking|fx_passes/pad_mm|select_algorithm|autotune_process)\.py:"
    r"|triton/(?:testing|runtime/autotuner)\.py:"
)
# where there are C++ frames, they show the cast
_AUTOCAST = r"\A\Z|at::autocast::\w*cast\("
_COPY_OPERATORS = r"at::_ops::(?:clone|_to_copy)::"
_SCALES = r"at::_ops::(?:clone|_to_copy|div_\w+|mul_\w+)::"
# a reference model or a moving average made with `copy.deepcopy`: weights, and buffers in modules of modules. A default
# device, as of `with torch.device("cuda")`, and dispatch modes add frames
_MODES = r"\A(?:\S*torch/(?:_ops|_compile|utils/_device|_dynamo/eval_frame)\.py:\w+\n)*"
_STORAGE_COPY = r"\A(?:\S*(?:\btorch/\S+|\bcopy)\.py:\w+\n)*?"
_DEEP_COPY = (
    rf"{_MODES}\S*torch/nn/parameter\.py:__deepcopy__$"
    rf"|{_STORAGE_COPY}\S*torch/_tensor\.py:__deepcopy__\n(?:.*\n)*?.*copy\.py:_reconstruct\n(?:.*\n)*?.*copy\.py:_reconstruct$"
)
# `copy.deepcopy` of the state_dict of a model, and of an optimizer, whose states are in an object for each weight
_TENSOR_COPY = rf"{_STORAGE_COPY}\S*torch/_tensor\.py:__deepcopy__\n\S*\bcopy\.py:deepcopy\n"
_COPIED_WEIGHTS = rf"{_TENSOR_COPY}\S*\bcopy\.py:_reconstruct\n\S*\bcopy\.py:deepcopy$"
_COPIED_STATES = rf"{_TENSOR_COPY}(?:\S*\bcopy\.py:_deepcopy_dict\n\S*\bcopy\.py:deepcopy(?:\n|$)){{3}}"
# a later model of the program, made on the GPU layer by layer
_CONSTRUCTOR = rf"{_MODES}\S*:__init__$"

# a matrix product's backward computes the weight's gradient first, and last if it adds a bias
_PRODUCT_GRADIENTS = tuple(
    Rule(Role.GRADIENTS, _BACKWARD, node=node, has=(place, *size), lacks=(Feature.RECOMPUTED,))
    for node, place in ((r"^B?[Mm]mBackward", Feature.FIRST_OF_CALL), (r"^AddmmBackward", Feature.LAST_OF_CALL))
    # under autocast it is 16-bit and then cast
    for size in ((Feature.WEIGHT_SIZED,), (Feature.HALF_WEIGHT_SIZED, Feature.CASTS_GRADIENTS))
)

RULES: tuple[Rule, ...] = (
    # libraries: named in C++ frames, or a known size that is allocated once and never freed
    Rule(Role.LIBRARY_WORKSPACE, native=r"CUDABlas|cublas\w*[wW]orkspace|[cC]udnn\w*[wW]orkspace"),
    # its C++ frames name it where there are any
    Rule(
        Role.LIBRARY_WORKSPACE, (*_BUILD, *_PASSES), native=r"\A\Z", has=(Feature.FIRST_WORKSPACE, Feature.NEVER_FREED)
    ),
    Rule(Role.OTHER, stack=_MEASURES),
    Rule(Role.OTHER, has=(Feature.OLDER_MODEL,)),
    Rule(Role.PARAMETERS, has=(Feature.OLDER_WEIGHT,)),
    Rule(Role.KV_CACHE, has=(Feature.IN_CACHE,)),
    *STATE_RULES,
    # the optimizer's states and temporaries
    Rule(Role.OPTIMIZER_STATES, stack=frames.OPTIMIZER_STATE + r"|torch/optim/optimizer\.py:load_state_dict$"),
    # Adagrad and others allocate their states when they are made
    Rule(Role.OPTIMIZER_STATES, stack=r"torch/optim/(?!swa_utils)\w+\.py:__init__$"),
    OPTIMIZER_COMMUNICATION,
    Rule(Role.OPTIMIZER_STATES, _OPTIMIZER, has=(Feature.OUTLIVES_PHASE,)),
    # where a recording ends within the first step, torch's own code tells copies to be kept from temporaries
    Rule(
        Role.OPTIMIZER_STATES,
        _OPTIMIZER,
        stack=r"\A\S*torch/optim/sgd\.py:_(?:single|multi)_tensor_sgd$",
        native=r"at::_ops::clone::",
        has=(Feature.UNFINISHED,),
    ),
    Rule(
        Role.UNATTRIBUTED,
        _OPTIMIZER,
        stack=r"\A(?!\S*torch/(?:optim/(?!sgd|lbfgs)|nn/utils|amp/))",
        has=(Feature.UNFINISHED,),
        lacks=(Feature.DROPPED_BEFORE,),
    ),
    Rule(Role.OPTIMIZER_TEMPORARIES, _OPTIMIZER),
    *COMMUNICATION_RULES,
    # the steps before the chosen ones have only a phase: too little to know logits from activations
    Rule(Role.GRADIENTS, _BACKWARD, has=(Feature.STAMPED_WITHOUT_CALLS, Feature.OUTLIVES_PHASE)),
    Rule(Role.UNATTRIBUTED, _PASSES, has=(Feature.STAMPED_WITHOUT_CALLS,)),
    # the outputs of a pipeline's micro-batches, put together (torch 2.11 and 2.13)
    Rule(Role.ACTIVATIONS, _OUTSIDE, stack=r"distributed/pipelining/microbatch\.py:merge_chunks$"),
    # inputs of the model
    Rule(Role.INPUTS, stack=r":make_batch$|/dataloader\.py:|/data_collator\.py:|/data/_utils/"),
    Rule(Role.INPUTS, _FORWARD, stack=r"\Atransformers/\S*mask\w*\.py:"),
    Rule(Role.INPUTS, _FORWARD, has=(Feature.IN_MODEL_BODY, Feature.SMALL)),
    Rule(
        Role.INPUTS,
        _FORWARD,
        has=(Feature.IN_LOSS_AREA, Feature.SMALL),
        lacks=(Feature.IN_HEAD,),
        stack=r"\A\S*(?:loss_utils|modeling_\w+)\.py:",
    ),
    # copies of weights and states that are gathered or converted to be written to a file
    Rule(Role.OTHER, (Phase.SAVING,)),
    # building or loading the model; rotary frequencies are buffers, not weights
    Rule(Role.OTHER, _BUILD, stack=r"(?:\b|_)rope(?:\b|_)|[rR]otary"),
    Rule(Role.PARAMETERS, _BUILD),
    # outside the model: what a script computes from its output, and what it feeds to the next pass
    Rule(Role.CE_TEMPORARIES, _OUTSIDE, stack=_LOSS, has=(Feature.FOLLOWS_PASS, Feature.VOCABULARY_SIZED)),
    Rule(Role.CE_TEMPORARIES, _OUTSIDE, native=_LOG_SOFTMAX, has=(Feature.FOLLOWS_PASS, Feature.VOCABULARY_SIZED)),
    Rule(Role.CE_TEMPORARIES, _OUTSIDE, stack=_LOSS, has=(Feature.FOLLOWS_PASS, Feature.SHIFTED_LOGITS_SIZED)),
    Rule(Role.SHIFT_LOGITS, _OUTSIDE, has=(Feature.FOLLOWS_PASS, Feature.SHIFTED_LOGITS_SIZED)),
    Rule(Role.LOGITS, _OUTSIDE, has=(Feature.FOLLOWS_PASS, Feature.VOCABULARY_SIZED), lacks=(Feature.WEIGHT_SIZED,)),
    Rule(Role.ACTIVATIONS, _OUTSIDE, has=(Feature.FOLLOWS_PASS,), lacks=(Feature.FEEDS_PASS,)),
    # what a script computes from the model's output, and keeps while the next pass runs
    Rule(Role.ACTIVATIONS, _OUTSIDE, has=(Feature.FOLLOWS_PASS, Feature.SCORES_SIZED)),
    Rule(Role.LOGITS, _OUTSIDE, stack=frames.COMPILED_FORWARD, has=(Feature.VOCABULARY_SIZED,)),
    Rule(Role.ACTIVATIONS, _OUTSIDE, stack=frames.COMPILED_FORWARD),
    Rule(Role.PARAMETERS, _OUTSIDE, inner=_DEEP_COPY),
    Rule(Role.PARAMETERS, _OUTSIDE, inner=_COPIED_WEIGHTS, has=(Feature.FEEDS_PASS,)),
    Rule(Role.OPTIMIZER_STATES, _OUTSIDE, inner=_COPIED_STATES, has=(Feature.FEEDS_PASS,)),
    Rule(Role.PARAMETERS, _OUTSIDE, inner=_CONSTRUCTOR, has=(Feature.FEEDS_PASS,)),
    # a script's own lists of copies; of tensors that are merely as large, nothing shows what they are
    Rule(Role.PARAMETERS, _OUTSIDE, native=_COPY_OPERATORS, has=(Feature.COPIES_WEIGHTS, Feature.FEEDS_PASS)),
    Rule(Role.OPTIMIZER_STATES, _OUTSIDE, native=_COPY_OPERATORS, has=(Feature.MASTER_OF_WEIGHTS, Feature.FEEDS_PASS)),
    Rule(Role.UNATTRIBUTED, _OUTSIDE, has=(Feature.LIKE_WEIGHTS,)),
    # a list of copies that the recording does not see completed
    Rule(Role.UNATTRIBUTED, _OUTSIDE, has=(Feature.WEIGHT_SIZED, Feature.UNFINISHED), lacks=(Feature.SMALL,)),
    Rule(Role.INPUTS, _OUTSIDE),
    # losses in checkpointed chunks, whose head has no module call: the product is the last block of its line
    Rule(Role.WEIGHT_CASTS, _PASSES, stack=_NLL_CHUNK, has=(Feature.HALF_WEIGHT_SIZED,), lacks=(Feature.LAST_OF_CALL,)),
    Rule(
        Role.LOGITS,
        _PASSES,
        stack=_NLL_CHUNK,
        has=(Feature.VOCABULARY_SIZED,),
        has_one=(Feature.LAST_OF_CALL, Feature.ONLY_OF_CALL),
        lacks=(Feature.SMALL,),
    ),
    Rule(Role.CE_TEMPORARIES, _PASSES, stack=frames.NLL_CHUNK),
    # losses that run backward for each chunk of tokens
    *(
        Rule(Role.GRADIENTS, _FORWARD, stack=_NO_CALLS, node=node, has=(place, *size))
        for node, place in ((r"^B?[Mm]mBackward", Feature.FIRST_OF_CALL), (r"^(?:ToCopy|T)Backward", Feature.IN_HEAD))
        for size in ((Feature.WEIGHT_SIZED,), (Feature.HALF_WEIGHT_SIZED, Feature.CASTS_GRADIENTS))
    ),
    Rule(Role.CE_TEMPORARIES, _FORWARD, stack=_NO_CALLS, has=(Feature.IN_LOSS_AREA, Feature.VOCABULARY_LOSS)),
    # fused losses: the head's gradient is computed in forward, and chunks die with the call
    Rule(Role.GRADIENTS, _FORWARD, stack=_FUSED_LOSS, has=(Feature.HEAD_WEIGHT_SIZED,), lacks=(Feature.DIES_IN_PHASE,)),
    Rule(Role.KERNEL_WORKSPACE, _FORWARD, stack=_FUSED_LOSS, lacks=(Feature.OUTLIVES_PHASE,)),
    Rule(Role.CE_TEMPORARIES, _FORWARD, stack=_FUSED_LOSS, has=(Feature.SMALL,)),
    Rule(Role.ACTIVATIONS, _FORWARD, stack=_FUSED_LOSS),
    Rule(Role.CE_TEMPORARIES, _FORWARD, stack=frames.LOSS_KERNEL),
    # autocast's copies of weights and biases
    *(
        Rule(Role.WEIGHT_CASTS, stack=stack, native=_AUTOCAST, has=(Feature.HALF_WEIGHT_SIZED, Feature.CAST_ARGUMENT))
        for stack in (frames.LINEAR, frames.CONVOLUTION)
    ),
    # the same, by a kernel that includes a linear layer
    Rule(
        Role.WEIGHT_CASTS,
        stack=r"\A\S*ligerprof/kernels/(?:gated/triton\.py:gated_linear|linear_cross_entropy/reference\.py:\w+)$",
        has=(Feature.HALF_WEIGHT_SIZED,),
    ),
    # the loss in forward
    Rule(Role.CE_TEMPORARIES, _FORWARD, stack=_LOSS, has=(Feature.VOCABULARY_LOSS,)),
    Rule(Role.CE_TEMPORARIES, _FORWARD, native=_LOG_SOFTMAX, has=(Feature.IN_LOSS_AREA, Feature.VOCABULARY_SIZED)),
    Rule(Role.SHIFT_LOGITS, _FORWARD, has=(Feature.IN_LOSS_AREA, Feature.SHIFTED_LOGITS_SIZED, Feature.FIRST_COPY)),
    Rule(Role.LOGITS, _FORWARD, has=(Feature.IN_LOSS_AREA, Feature.LOGITS_SIZED)),
    # slices of any length, cast or divided by a temperature
    Rule(
        Role.LOGITS,
        _FORWARD,
        native=_SCALES,
        has=(Feature.IN_LOSS_AREA, Feature.VOCABULARY_SIZED, Feature.FIRST_COPY),
        lacks=(Feature.IN_HEAD,),
    ),
    Rule(Role.CE_TEMPORARIES, _FORWARD, has=(Feature.IN_LOSS_AREA, Feature.VOCABULARY_SIZED), lacks=(Feature.IN_HEAD,)),
    # gradients that an optimizer applies within backward, or that are cast to their weights' dtype
    Rule(Role.GRADIENTS, _BACKWARD, has=(Feature.APPLIED,), lacks=(Feature.RECOMPUTED, Feature.UNLIKE_WEIGHTS)),
    Rule(Role.GRADIENTS, _BACKWARD, has=(Feature.CAST_OF_GRADIENT, Feature.WEIGHT_SIZED), lacks=(Feature.RECOMPUTED,)),
    # the loss in backward
    Rule(Role.KERNEL_WORKSPACE, _BACKWARD, stack=frames.TILED_LOSS, has=(Feature.DIES_IN_PHASE,)),
    Rule(Role.CE_TEMPORARIES, _BACKWARD, stack=r":_make_grads$|:scale_loss$|:scale$", has=(Feature.VOCABULARY_LOSS,)),
    Rule(
        Role.CE_TEMPORARIES,
        _BACKWARD,
        node=r"NllLoss|LogSoftmax|CrossEntropy",
        has=(Feature.VOCABULARY_LOSS,),
        lacks=(Feature.RECOMPUTED,),
    ),
    # the head's gradient, which the next rules would take for the loss's
    *_PRODUCT_GRADIENTS,
    Rule(
        Role.CE_TEMPORARIES,
        _BACKWARD,
        # the head's product computes the gradients of its weight and input, which can be as large
        node=r"^(?!B?[Mm]m|Addmm).",
        has_one=(Feature.LOGITS_SIZED, Feature.SHIFTED_LOGITS_SIZED),
        lacks=(Feature.RECOMPUTED, Feature.WEIGHT_SIZED),
    ),
    Rule(
        Role.CE_TEMPORARIES,
        _BACKWARD,
        node=r"\A\Z",
        has_one=(Feature.LOGITS_SIZED, Feature.SHIFTED_LOGITS_SIZED),
        lacks=(Feature.RECOMPUTED, Feature.WEIGHT_SIZED, Feature.HALF_WEIGHT_SIZED),
    ),
    Rule(
        Role.CE_TEMPORARIES,
        _BACKWARD,
        has=(Feature.IN_LOSS_AREA, Feature.DIES_IN_PHASE),
        lacks=(Feature.RECOMPUTED, Feature.IN_HEAD),
    ),
    # gradients
    # sparse ones have the size of the rows; what is as large as no weight is the gradient of an activation
    Rule(Role.GRADIENTS, _BACKWARD, node=r"^Embedding", has=(Feature.OUTLIVES_PHASE,)),
    Rule(Role.GRADIENTS, _BACKWARD, has=(Feature.OUTLIVES_PHASE,), lacks=(Feature.UNLIKE_WEIGHTS,)),
    Rule(Role.GRADIENTS, _BACKWARD, node=r"^Embedding|AccumulateGrad", has=(Feature.WEIGHT_SIZED,)),
    # a table that the model uses twice has two gradients; one is added to the other
    Rule(
        Role.GRADIENTS,
        _BACKWARD,
        node=_NOT_ELEMENTWISE,
        has=(Feature.HEAD_WEIGHT_SIZED, Feature.UNLIKE_FORWARD),
        lacks=(Feature.RECOMPUTED, Feature.BY_PRODUCT),
    ),
    # a recording can end within backward
    Rule(Role.GRADIENTS, _BACKWARD, has=(Feature.KEPT_BEFORE,), lacks=(Feature.UNLIKE_WEIGHTS, Feature.BY_PRODUCT)),
    Rule(Role.GRADIENTS, _BACKWARD, has=(Feature.KEPT_BEFORE, Feature.HALF_WEIGHT_SIZED)),
    Rule(
        Role.GRADIENTS,
        _BACKWARD,
        node=_NOT_ELEMENTWISE,
        has=(Feature.WEIGHT_SIZED, Feature.KEPT_SO_FAR),
        lacks=(Feature.RECOMPUTED, Feature.DROPPED_BEFORE, Feature.CAST_OF_OTHER_GRADIENT, Feature.BY_PRODUCT),
    ),
    # attention, forward, recomputed and backward
    Rule(Role.ATTENTION_TEMPORARIES, has=(Feature.ATTENTION_SCORES,)),
    Rule(
        Role.ATTENTION_TEMPORARIES,
        stack=r"\A\S*(?:sdpa|flash|eager|flex)\w*attention\w*\.py:|:scaled_dot_product_attention$|" + frames.EAGER_CALL,
        has=(Feature.DIES_IN_CALL,),
    ),
    Rule(Role.ATTENTION_TEMPORARIES, _BACKWARD, node=r"ScaledDotProduct|Attention", has=(Feature.DIES_IN_CALL,)),
    # inputs of layers that checkpointing keeps; a selective policy also keeps results of operators
    Rule(Role.ACTIVATIONS, _FORWARD, has=(Feature.SELECTED,)),
    Rule(Role.CHECKPOINTS, _FORWARD, has=(Feature.REGION_INPUT,), lacks=(Feature.SMALL,)),
    Rule(
        Role.CHECKPOINTS,
        _FORWARD,
        has=(Feature.CHECKPOINTING, Feature.IN_EMBEDDING),
        lacks=(Feature.OUTSIDE_REGIONS, Feature.SMALL),
    ),
    Rule(
        Role.CHECKPOINTS,
        _FORWARD,
        has=(Feature.CHECKPOINTING, Feature.IN_LAYER, Feature.OUTLIVES_LAYER),
        lacks=(Feature.AFTER_LAYERS, Feature.OUTSIDE_REGIONS, Feature.SMALL),
    ),
    # everything else in both passes
    Rule(Role.ACTIVATIONS, _PASSES),
)


# the features of a block take 2 KB
@lru_cache(maxsize=5_000)
def role_of(block: BlockFeatures, rules: tuple[Rule, ...] = RULES) -> Role:
    """The role of the first rule that matches, unattributed if none does."""
    of_phase = _rules_of(block.phase) if rules is RULES else rules
    return next((rule.role for rule in of_phase if rule.matches(block)), Role.UNATTRIBUTED)


@cache
def _rules_of(phase: Phase | None) -> tuple[Rule, ...]:
    """The built-in rules that can match in a phase."""
    return tuple(rule for rule in RULES if not rule.phases or phase in rule.phases)


_FILE = FileKind(error=RulesError, hint="See docs/roles.md.", max_bytes=2**20)
_LONGEST_PATTERN = 500
_MOST_RULES = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class UserRule:
    """A role for the blocks that meet every given condition.

    Conditions are shell patterns (`*`, `?`, `[a-z]`) for a whole name. Unlike regular expressions,
    they match in time proportional to the text for any pattern.

    Attributes:
        frame: pattern for any Python call of the stack, as `path/file.py:function`.
    """

    role: Role
    module: str = ""
    frame: str = ""
    node: str = ""
    phase: Phase | None = None

    def matches(self, block: BlockFeatures) -> bool:
        """Whether all conditions hold."""
        return (
            (self.phase is None or block.phase is self.phase)
            and (not self.module or fnmatchcase(block.module, self.module))
            and (not self.node or fnmatchcase(block.node, self.node))
            and (not self.frame or any(fnmatchcase(call, self.frame) for call in block.stack.split("\n")))
        )


_KEYS = tuple(each.name for each in fields(UserRule))


def read_rules(path: str | Path) -> tuple[UserRule, ...]:
    """Read a file of rules: JSON if its name ends in `.json`, else TOML.

    Raises:
        RulesError: the file cannot be read, or something in it is not a rule.
    """
    file = Path(path)
    text = read_text(file, _FILE)
    parse = parse_json if file.suffix == ".json" else parse_toml
    values = parse(text, str(file), _FILE)
    rules = values.get("rule") if isinstance(values, dict) else None
    if not isinstance(rules, list) or not 0 < len(rules) <= _MOST_RULES:
        raise RulesError(f"{file}: needs a list `rule` of 1 to {_MOST_RULES} rules. See docs/roles.md.")
    return tuple(_rule(entry, f"{file}: rule {number}") for number, entry in enumerate(rules, 1))


def _rule(entry: Any, where: str) -> UserRule:
    if not isinstance(entry, dict) or not {"role"} < entry.keys() <= set(_KEYS):
        raise RulesError(f"{where}: needs `role` and at least one of {', '.join(_KEYS[1:])}, and nothing else.")
    for key, value in entry.items():
        if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_PATTERN:
            raise RulesError(f"{where}: `{key}` must be a text of 1 to {_LONGEST_PATTERN} characters.")
    words = {key: value for key, value in entry.items() if key not in ("role", "phase")}
    phase = _word(Phase, entry["phase"], where) if "phase" in entry else None
    return UserRule(role=_word(Role, entry["role"], where), phase=phase, **words)


def _word(kind: Any, word: str, where: str) -> Any:
    try:
        return kind(word)
    except ValueError:
        known = ", ".join(each.value for each in kind)
        raise RulesError(f"{where}: unknown {kind.__name__.lower()} {word!r:.60}. Known: {known}.") from None
