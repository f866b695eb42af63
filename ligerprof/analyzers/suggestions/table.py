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
    without_old_outputs,
)
from ligerprof.analyzers.suggestions.fused_loss import LOSS_ROLES, without_logits
from ligerprof.analyzers.suggestions.program import Framework
from ligerprof.analyzers.suggestions.replayed_change import Edit
from ligerprof.analyzers.suggestions.suggestion import Cost
from ligerprof.recipe.categories import Optimizer
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
    recipe: Callable[[TrainingRecipe], TrainingRecipe | None] = field(default=lambda _recipe: None)


def _for_each(frameworks: tuple[Framework, ...], *lines: str) -> dict[Framework, Lines]:
    return dict.fromkeys(frameworks, lines)


def _has(*roles: Role) -> Callable[[Case], bool]:
    return lambda case: len(case.book.blocks(*roles)) > 0


def _uses_liger(case: Case) -> bool:
    return case.program.frameworks[0] in _LIGER_USERS


def _trains_unfused(case: Case) -> bool:
    return case.trains_model and not case.program.has_fused_loss and _has(*LOSS_ROLES)(case)


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
        applies=_trains_unfused,
        edit=lambda case: without_logits(case, "liger" if _uses_liger(case) else "ligerprof"),
        how={
            **_for_each(
                _TRAINERS,
                "use_liger_kernel=True,",
                'liger_kernel_config={"fused_linear_cross_entropy": True, "cross_entropy": False, "rope": False,'
                ' "rms_norm": False, "swiglu": False},',
                "# without liger_kernel_config, norms and MLPs are fused too, which saves more",
            ),
            Framework.AXOLOTL: (
                "plugins: [axolotl.integrations.liger.LigerPlugin]",
                "liger_fused_linear_cross_entropy: true",
            ),
            Framework.LLAMA_FACTORY: ("enable_liger_kernel: true",),
            Framework.LIGERPROF: ("--liger flce",),
            Framework.MODEL: ('ligerprof.kernels.apply(model, "flce")  # before the first step',),
            Framework.TORCH: (
                "from ligerprof.kernels.linear_cross_entropy.triton import fused_linear_cross_entropy",
                "loss = fused_linear_cross_entropy(hidden_states, head.weight, labels)  # in place of head and loss",
            ),
        },
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
            Framework.TORCH: ("optimizer = torch.optim.AdamW(..., fused=True)  # or Adam, SGD: as it is now",),
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
                "del outputs, logits, loss  # every name that refers to the model's output; keep loss.item()",
            ),
        },
    ),
    Row(
        name="zero-grad",
        change="free gradients right after the optimizer step, before the next forward pass",
        cost=Cost.FREE,
        cost_reason="the same results",
        without=(Role.GRADIENTS,),
        applies=lambda case: case.trains_model and case.program.loop in (None, Framework.ACCELERATE),
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
                "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])",
            ),
            Framework.LIGHTNING: ("Trainer(strategy=DDPStrategy(gradient_as_bucket_view=True))",),
            Framework.DDP: ("DistributedDataParallel(model, ..., gradient_as_bucket_view=True)",),
        },
    ),
    Row(
        name="checkpointing",
        change="gradient checkpointing, which keeps only the inputs of layers",
        cost=Cost.TIME,
        cost_reason="each layer's forward pass runs twice, up to a third more compute",
        without=(Role.ACTIVATIONS,),
        applies=lambda case: case.trains_model and not case.program.checkpoints,
        edit=with_checkpointing,
        how={
            **_for_each(
                _TRAINERS, 'gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False},'
            ),
            Framework.AXOLOTL: ("gradient_checkpointing: true",),
            Framework.LLAMA_FACTORY: ("disable_gradient_checkpointing: false",),
            Framework.LIGERPROF: ("--checkpointing",),
            Framework.MODEL: ('model.gradient_checkpointing_enable({"use_reentrant": False})  # and model.train()',),
            Framework.TORCH: (
                "from torch.utils.checkpoint import checkpoint",
                "x = checkpoint(layer, x, use_reentrant=False)  # in the loop over the layers, for layer(x)",
            ),
        },
        recipe=lambda recipe: dataclasses.replace(recipe, checkpointing=True),
    ),
    Row(
        name="half-batch",
        change="half the micro-batch, and twice as many of them per step",
        cost=Cost.TIME,
        cost_reason="smaller kernels; a few percent while they still fill the GPU",
        without=(Role.ACTIVATIONS, Role.CHECKPOINTS, *LOSS_ROLES),
        applies=lambda case: case.trains_model,
        edit=with_half_the_batch,
        how={
            **_for_each(
                _TRAINERS, "per_device_train_batch_size=half of now, gradient_accumulation_steps=twice as many,"
            ),
            Framework.AXOLOTL: ("micro_batch_size: half of now", "gradient_accumulation_steps: twice as many"),
            Framework.LLAMA_FACTORY: (
                "per_device_train_batch_size: half of now",
                "gradient_accumulation_steps: twice as many",
            ),
            Framework.LIGHTNING: ("DataLoader(..., batch_size=half), Trainer(accumulate_grad_batches=2 * now)",),
            Framework.DEEPSPEED: ('"train_micro_batch_size_per_gpu": half, "gradient_accumulation_steps": twice',),
            Framework.LIGERPROF: ("--batch (half) --grad-accum (twice)",),
            Framework.TORCH: (
                "for part in batch.chunk(2):  # then optimizer.step() once",
                "    (loss_of(part) / 2).backward()",
            ),
        },
        recipe=_half_batch,
    ),
)
