"""The rules that give a block its role: one table, in which the first matching row wins."""

from functools import cache, lru_cache

from ligerprof.analyzers.attribution import frames
from ligerprof.analyzers.attribution.features import BlockFeatures, Feature
from ligerprof.analyzers.attribution.rule import Rule
from ligerprof.analyzers.attribution.sharding_rules import (
    COMMUNICATION_RULES,
    OPTIMIZER_COMMUNICATION,
    STATE_RULES,
)
from ligerprof.roles import Phase, Role

_BUILD, _FORWARD, _BACKWARD = (Phase.BUILD,), (Phase.FORWARD,), (Phase.BACKWARD,)
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
_COPIES = r"at::_ops::(?:clone|_to_copy)::"
_SCALES = r"at::_ops::(?:clone|_to_copy|div_\w+|mul_\w+)::"
# a reference model or a moving average made with `copy.deepcopy`: weights, and buffers in modules of modules. A default
# device, as of `with torch.device("cuda")`, and dispatch modes add frames
_MODES = r"\A(?:\S*torch/(?:_ops|_compile|utils/_device|_dynamo/eval_frame)\.py:\w+\n)*"
_DEEP_COPY = (
    rf"{_MODES}\S*torch/nn/parameter\.py:__deepcopy__$"
    rf"|{_MODES}\S*torch/_tensor\.py:__deepcopy__\n(?:.*\n)*?.*copy\.py:_reconstruct\n(?:.*\n)*?.*copy\.py:_reconstruct$"
)

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
    Rule(Role.SHIFT_LOGITS, _OUTSIDE, has=(Feature.FOLLOWS_PASS, Feature.SHIFTED_LOGITS_SIZED)),
    Rule(Role.LOGITS, _OUTSIDE, has=(Feature.FOLLOWS_PASS, Feature.VOCABULARY_SIZED), lacks=(Feature.WEIGHT_SIZED,)),
    Rule(Role.ACTIVATIONS, _OUTSIDE, has=(Feature.FOLLOWS_PASS,), lacks=(Feature.FEEDS_PASS,)),
    # what a script computes from the model's output, and keeps while the next pass runs
    Rule(Role.ACTIVATIONS, _OUTSIDE, has=(Feature.FOLLOWS_PASS, Feature.SCORES_SIZED)),
    Rule(Role.PARAMETERS, _OUTSIDE, inner=_DEEP_COPY),
    # a script's own lists of copies; of tensors that are merely as large, nothing shows what they are
    Rule(Role.PARAMETERS, _OUTSIDE, native=_COPIES, has=(Feature.COPIES_WEIGHTS, Feature.FEEDS_PASS)),
    Rule(Role.OPTIMIZER_STATES, _OUTSIDE, native=_COPIES, has=(Feature.MASTER_OF_WEIGHTS, Feature.FEEDS_PASS)),
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
    Rule(
        Role.CE_TEMPORARIES,
        _FORWARD,
        native=_LOG_SOFTMAX,
        has=(Feature.IN_LOSS_AREA, Feature.VOCABULARY_SIZED),
    ),
    Rule(
        Role.SHIFT_LOGITS,
        _FORWARD,
        has=(Feature.IN_LOSS_AREA, Feature.SHIFTED_LOGITS_SIZED, Feature.FIRST_COPY),
    ),
    Rule(Role.LOGITS, _FORWARD, has=(Feature.IN_LOSS_AREA, Feature.LOGITS_SIZED)),
    # slices of any length, cast or divided by a temperature
    Rule(
        Role.LOGITS,
        _FORWARD,
        native=_SCALES,
        has=(Feature.IN_LOSS_AREA, Feature.VOCABULARY_SIZED, Feature.FIRST_COPY),
        lacks=(Feature.IN_HEAD,),
    ),
    Rule(
        Role.CE_TEMPORARIES,
        _FORWARD,
        has=(Feature.IN_LOSS_AREA, Feature.VOCABULARY_SIZED),
        lacks=(Feature.IN_HEAD,),
    ),
    # gradients that an optimizer applies within backward, or that are cast to their weights' dtype
    Rule(Role.GRADIENTS, _BACKWARD, has=(Feature.APPLIED,), lacks=(Feature.RECOMPUTED, Feature.UNLIKE_WEIGHTS)),
    Rule(Role.GRADIENTS, _BACKWARD, has=(Feature.CAST_OF_GRADIENT, Feature.WEIGHT_SIZED), lacks=(Feature.RECOMPUTED,)),
    # the loss in backward
    Rule(Role.KERNEL_WORKSPACE, _BACKWARD, stack=frames.TILED_LOSS, has=(Feature.DIES_IN_PHASE,)),
    Rule(
        Role.CE_TEMPORARIES,
        _BACKWARD,
        stack=r":_make_grads$|:scale_loss$|:scale$",
        has=(Feature.VOCABULARY_LOSS,),
    ),
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
        lacks=(
            Feature.RECOMPUTED,
            Feature.DROPPED_BEFORE,
            Feature.CAST_OF_OTHER_GRADIENT,
            Feature.BY_PRODUCT,
        ),
    ),
    # attention, forward, recomputed and backward
    Rule(Role.ATTENTION_TEMPORARIES, has=(Feature.ATTENTION_SCORES,)),
    Rule(
        Role.ATTENTION_TEMPORARIES,
        stack=r"\A\S*(?:sdpa|flash|eager|flex)\w*attention\w*\.py:|:scaled_dot_product_attention$|:"
        + frames.EAGER_ATTENTION
        + "$",
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
