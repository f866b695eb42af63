"""The table of suggestions: when each applies, what it saves, what it costs, and how to make it in each framework."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ligerprof.analyzers.suggestions.case import Case
from ligerprof.analyzers.suggestions.checkpointing import with_checkpointing
from ligerprof.analyzers.suggestions.edits import (
    with_bucket_views,
    with_earlier_zero_grad,
    with_half_the_batch,
    with_half_the_evaluation,
    with_half_the_prompts,
    with_optimizer_on_host,
    with_resharding,
    with_sharded_states_on_host,
    with_smaller_buckets,
    without_kept_outputs,
    without_old_outputs,
)
from ligerprof.analyzers.suggestions.fused_loss import LOSS_ROLES, without_logits
from ligerprof.analyzers.suggestions.program import Framework
from ligerprof.analyzers.suggestions.replayed_change import Edit
from ligerprof.analyzers.suggestions.suggestion import Cost
from ligerprof.kernels.providers.liger.model_types import LIGER_MODEL_TYPES
from ligerprof.models.architectures import ARCHITECTURES
from ligerprof.recipe.categories import Offload, Optimizer
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role

_TRAINERS = (Framework.TRL, Framework.TRAINER)
_LIGER_USERS = (*_TRAINERS, Framework.AXOLOTL, Framework.LLAMA_FACTORY)
_YAML = (Framework.AXOLOTL, Framework.LLAMA_FACTORY)

Lines = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One suggestion.

    Attributes:
        applies: whether the change is possible and not made yet.
        edit: its effect; returns None if this cannot be computed.
        how: lines by framework; the first of the program's frameworks that has lines is used.
        skips: frameworks whose lines do not hold for this program.
        recipe: the changed recipe of a step of ours, None if it does not apply.
    """

    name: str
    change: str
    cost: Cost
    cost_reason: str
    without: tuple[Role, ...]
    applies: Callable[[Case], bool]
    edit: Callable[[Case], Edit | None]
    how: Mapping[Framework, Lines]
    skips: Callable[[Case], tuple[Framework, ...]] = field(default=lambda _case: ())
    recipe: Callable[[TrainingRecipe], TrainingRecipe | None] = field(default=lambda _recipe: None)


def _for_each(frameworks: tuple[Framework, ...], *lines: str) -> dict[Framework, Lines]:
    return dict.fromkeys(frameworks, lines)


def _has(*roles: Role) -> Callable[[Case], bool]:
    return lambda case: len(case.book.blocks(*roles)) > 0


def _uses_liger(case: Case) -> bool:
    return case.program.frameworks[0] in _LIGER_USERS


def _can_fuse_loss(case: Case) -> bool:
    program = case.program
    if not case.trains_model or program.has_fused_loss or not program.has_cross_entropy:
        return False
    if _uses_liger(case) and not program.model_types & LIGER_MODEL_TYPES:
        return False
    return _has(*LOSS_ROLES)(case)


def _knows_model(case: Case) -> bool:
    return not case.program.model_types.isdisjoint(ARCHITECTURES)


def _without(*roles: Role) -> Callable[[Case], Edit]:
    return lambda case: case.without(*roles)


def _add_flce(recipe: TrainingRecipe) -> TrainingRecipe:
    others = [name for name in recipe.kernels if name not in ("ce", "flce")]
    return dataclasses.replace(recipe, liger="+".join([*others, "flce"]))


def _half_batch(recipe: TrainingRecipe) -> TrainingRecipe | None:
    if recipe.batch % 2:
        return None
    return dataclasses.replace(recipe, batch=recipe.batch // 2, grad_accum=2 * recipe.grad_accum)


ROWS: tuple[Row, ...] = (
    Row(
        name="fused-loss",
        change="a fused linear cross-entropy, which computes the logits chunk by chunk",
        cost=Cost.FREE,
        cost_reason="the same loss up to rounding",
        without=LOSS_ROLES,
        applies=_can_fuse_loss,
        edit=lambda case: without_logits(case, "liger" if _uses_liger(case) else "ligerprof"),
        how={
            **_for_each(
                _TRAINERS,
                "use_liger_kernel=True,",
                'liger_kernel_config={"fused_linear_cross_entropy": True, "rope": False,',
                '    "cross_entropy": False, "rms_norm": False, "swiglu": False},',
                "# without liger_kernel_config, norms and MLPs are fused too: saves more",
            ),
            Framework.AXOLOTL: (
                "plugins: [axolotl.integrations.liger.LigerPlugin]",
                "liger_fused_linear_cross_entropy: true",
            ),
            Framework.LLAMA_FACTORY: ("enable_liger_kernel: true",),
            Framework.LIGERPROF: ("--liger flce",),
            Framework.MODEL: ('ligerprof.kernels.apply(model, "flce")  # once it is on the GPU',),
            Framework.TORCH: (
                "from ligerprof.kernels.linear_cross_entropy import triton",
                "# in place of the head and the loss:",
                "loss = triton.fused_linear_cross_entropy(hidden, head.weight, labels)",
            ),
        },
        skips=lambda case: () if _knows_model(case) else (Framework.MODEL,),
        recipe=_add_flce,
    ),
    Row(
        name="fused-optimizer",
        change="a fused optimizer step, which allocates no temporary tensors",
        cost=Cost.FREE,
        cost_reason="the same update in one kernel",
        without=(Role.OPTIMIZER_TEMPORARIES,),
        applies=lambda case: case.program.has_call(r"torch/optim/\w+\.py:_(?:multi|single)_tensor_(?:adam|adamw|sgd)$"),
        edit=_without(Role.OPTIMIZER_TEMPORARIES),
        how={
            **_for_each(_TRAINERS, 'optim="adamw_torch_fused",'),
            **_for_each(_YAML, "optim: adamw_torch_fused"),
            Framework.AXOLOTL: ("optimizer: adamw_torch_fused",),
            Framework.LIGERPROF: ("--optimizer adamw-fused",),
            Framework.TORCH: ("optimizer = torch.optim.AdamW(..., fused=True)  # or Adam, SGD",),
        },
        recipe=lambda recipe: dataclasses.replace(recipe, optimizer=Optimizer("adamw-fused")),
    ),
    Row(
        name="sdpa",
        change="attention without score matrices",
        cost=Cost.FREE,
        cost_reason="the same attention up to rounding, faster",
        without=(Role.ATTENTION_TEMPORARIES,),
        applies=lambda case: case.program.has_call(r":eager_attention_forward$"),
        edit=_without(Role.ATTENTION_TEMPORARIES),
        how={
            Framework.LIGERPROF: ("--attention sdpa",),
            Framework.MODEL: ('model = AutoModel….from_pretrained(..., attn_implementation="sdpa")',),
        },
    ),
    Row(
        name="del-outputs",
        change="free the model's outputs when backward has run, instead of keeping them into the next step",
        cost=Cost.FREE,
        cost_reason="the same results",
        without=LOSS_ROLES,
        applies=lambda case: case.trains_model and case.program.loop in (None, Framework.ACCELERATE),
        edit=without_old_outputs,
        how={
            Framework.TORCH: (
                "loss.backward()",
                "del outputs, logits, loss  # each name of an output; keep loss.item()",
            ),
        },
    ),
    Row(
        name="kept-outputs",
        change="keep numbers or host copies of what the program collects, instead of tensors on the GPU",
        cost=Cost.FREE,
        cost_reason="the same values, in main memory",
        without=LOSS_ROLES,
        applies=lambda case: not case.program.generates and case.program.loop in (None, Framework.ACCELERATE),
        edit=without_kept_outputs,
        how={
            Framework.TORCH: (
                "total += loss.item()  # not loss, which keeps its graph",
                "collected.append(logits.detach().cpu())  # not logits",
            ),
        },
    ),
    Row(
        name="zero-grad",
        change="free gradients right after the optimizer step, before the next forward pass",
        cost=Cost.FREE,
        cost_reason="the same results",
        without=(Role.GRADIENTS,),
        applies=lambda case: (
            case.trains_model and case.program.loop in (None, Framework.ACCELERATE) and case.program.engine is None
        ),
        edit=with_earlier_zero_grad,
        how={Framework.TORCH: ("optimizer.step()", "optimizer.zero_grad(set_to_none=True)")},
    ),
    Row(
        name="bucket-views",
        change="gradients in DDP's buckets instead of next to them",
        cost=Cost.FREE,
        cost_reason="the same results, one copy less",
        without=(Role.GRADIENTS,),
        applies=lambda case: case.program.engine is Framework.DDP and _has(Role.COMMUNICATION)(case),
        edit=with_bucket_views,
        how={
            Framework.ACCELERATE: (
                "from accelerate import DistributedDataParallelKwargs",
                "views = DistributedDataParallelKwargs(gradient_as_bucket_view=True)",
                "Accelerator(..., kwargs_handlers=[views])",
            ),
            Framework.LIGHTNING: ("Trainer(strategy=DDPStrategy(gradient_as_bucket_view=True))",),
            Framework.DDP: ("DistributedDataParallel(model, ..., gradient_as_bucket_view=True)",),
        },
    ),
    Row(
        name="reshard",
        change="gathered weights freed after each layer's forward pass",
        cost=Cost.CHEAP,
        cost_reason="one more all-gather per layer and step",
        without=(Role.COMMUNICATION,),
        applies=lambda case: case.program.engine is Framework.FSDP2 and case.trains_model,
        edit=with_resharding,
        how={
            Framework.FSDP2: (
                "# for each layer, not the root:",
                "fully_shard(layer, ..., reshard_after_forward=True)",
            )
        },
    ),
    Row(
        name="small-buckets",
        change="a tenth of the buffer in which DeepSpeed collects gradients",
        cost=Cost.CHEAP,
        cost_reason="more and smaller reductions",
        without=(Role.COMMUNICATION,),
        applies=lambda case: case.program.engine is Framework.DEEPSPEED,
        edit=with_smaller_buckets,
        how={
            Framework.DEEPSPEED: ('"zero_optimization": {"reduce_bucket_size": 50000000}  # the default / 10',),
        },
    ),
    Row(
        name="offload-optimizer",
        change="optimizer states in main memory",
        cost=Cost.TIME,
        cost_reason="Adam runs on the CPU; gradients and weights cross PCIe every step",
        without=(Role.OPTIMIZER_STATES,),
        applies=lambda case: case.program.engine is Framework.DEEPSPEED and _has(Role.OPTIMIZER_STATES)(case),
        edit=with_optimizer_on_host,
        how={
            Framework.LIGERPROF: ("--offload optimizer  # next to --engine deepspeed",),
            Framework.DEEPSPEED: (
                '"zero_optimization": {"offload_optimizer": {"device": "cpu"}}',
                '"zero_force_ds_cpu_optimizer": false  # if the script makes the optimizer',
            ),
        },
        recipe=lambda recipe: dataclasses.replace(recipe, offload=Offload.OPTIMIZER, optimizer=Optimizer.DEFAULT),
    ),
    Row(
        name="cpu-offload",
        change="sharded weights, gradients and optimizer states in main memory",
        cost=Cost.TIME,
        cost_reason="weights and gradients cross PCIe, Adam runs on the CPU",
        without=(Role.PARAMETERS, Role.OPTIMIZER_STATES),
        applies=lambda case: case.program.engine is Framework.FSDP2 and _has(Role.OPTIMIZER_STATES)(case),
        edit=with_sharded_states_on_host,
        how={
            Framework.FSDP2: (
                "from torch.distributed.fsdp import CPUOffloadPolicy",
                "# in each call, with the model built on the CPU:",
                "fully_shard(module, ..., offload_policy=CPUOffloadPolicy())",
            ),
        },
    ),
    Row(
        name="eval-batch",
        change="half the batch of evaluations",
        cost=Cost.CHEAP,
        cost_reason="the same metrics; smaller kernels in evaluations",
        without=(Role.LOGITS, Role.CE_TEMPORARIES, Role.ACTIVATIONS),
        applies=lambda case: len(case.evaluation) > 0,
        edit=with_half_the_evaluation,
        how={
            **_for_each(_TRAINERS, "per_device_eval_batch_size=... // 2,"),
            Framework.AXOLOTL: ("eval_batch_size: half of now",),
            Framework.LLAMA_FACTORY: ("per_device_eval_batch_size: half of now",),
            Framework.LIGHTNING: ("DataLoader(..., batch_size=half)  # in val_dataloader",),
            Framework.TORCH: ("DataLoader(..., batch_size=half)  # of the evaluation",),
        },
    ),
    Row(
        name="half-prompts",
        change="half the prompts at a time",
        cost=Cost.TIME,
        cost_reason="two generations, each with smaller kernels",
        without=(Role.KV_CACHE, Role.ACTIVATIONS),
        applies=lambda case: case.program.generates and not case.trains_model,
        edit=with_half_the_prompts,
        how={Framework.MODEL: ("for part in prompts.chunk(2):", "    model.generate(part, ...)")},
    ),
    Row(
        name="checkpointing",
        change="gradient checkpointing, which keeps only the inputs of layers",
        cost=Cost.TIME,
        cost_reason="layers run forward twice, up to a third more compute",
        without=(Role.ACTIVATIONS,),
        # a compiler decides itself what to keep and what to compute again
        applies=lambda case: case.trains_model and not case.program.checkpoints and not case.program.is_compiled,
        edit=with_checkpointing,
        how={
            **_for_each(
                _TRAINERS, "gradient_checkpointing=True,", 'gradient_checkpointing_kwargs={"use_reentrant": False},'
            ),
            Framework.AXOLOTL: ("gradient_checkpointing: true",),
            Framework.LLAMA_FACTORY: ("disable_gradient_checkpointing: false",),
            Framework.LIGERPROF: ("--checkpointing",),
            Framework.MODEL: ('model.gradient_checkpointing_enable({"use_reentrant": False})',),
            Framework.TORCH: (
                "from torch.utils.checkpoint import checkpoint",
                "# in the loop over the layers, for x = layer(x):",
                "x = checkpoint(layer, x, use_reentrant=False)",
            ),
        },
        recipe=lambda recipe: dataclasses.replace(recipe, checkpointing=True),
    ),
    Row(
        name="half-batch",
        change="half the micro-batch, and twice as many of them per step",
        cost=Cost.TIME,
        cost_reason="smaller kernels; a few percent if they still fill the GPU",
        without=(Role.ACTIVATIONS, Role.CHECKPOINTS, *LOSS_ROLES),
        applies=lambda case: case.trains_model,
        edit=with_half_the_batch,
        how={
            **_for_each(_TRAINERS, "per_device_train_batch_size=... // 2, gradient_accumulation_steps=... * 2,"),
            Framework.AXOLOTL: ("micro_batch_size: half of now", "gradient_accumulation_steps: twice as many"),
            Framework.LLAMA_FACTORY: (
                "per_device_train_batch_size: half of now",
                "gradient_accumulation_steps: twice as many",
            ),
            Framework.LIGHTNING: (
                "DataLoader(..., batch_size=... // 2)",
                "Trainer(..., accumulate_grad_batches=... * 2)",
            ),
            Framework.DEEPSPEED: (
                '"train_micro_batch_size_per_gpu": half of now,',
                '"gradient_accumulation_steps": twice as many',
            ),
            Framework.LIGERPROF: ("--grad-accum 2  # and half of --batch; twice as many as now",),
            Framework.TORCH: (
                "for part in batch.chunk(2):  # then optimizer.step() once",
                "    (loss_of(part) / 2).backward()",
            ),
        },
        recipe=_half_batch,
    ),
)
