"""Suggestions for the passes of a program: its loss, attention, activations, batch, and the loop around them."""

import dataclasses
from typing import TYPE_CHECKING

from ligerprof.analyzers.suggestions.case import Case
from ligerprof.analyzers.suggestions.checkpointing import with_checkpointing
from ligerprof.analyzers.suggestions.edits import (
    with_earlier_zero_grad,
    with_half_the_batch,
    with_half_the_evaluation,
    with_half_the_prompts,
    without_kept_outputs,
    without_old_outputs,
)
from ligerprof.analyzers.suggestions.forward_only import without_graphs
from ligerprof.analyzers.suggestions.fused_loss import LOSS_ROLES, without_logits
from ligerprof.analyzers.suggestions.log_probabilities import takes_log_probabilities, with_linear_log_probs
from ligerprof.analyzers.suggestions.program import Framework
from ligerprof.analyzers.suggestions.row import TRAINERS, YAML, Row, for_each, has, knows_model, owns_loop, without
from ligerprof.analyzers.suggestions.state_edits import with_saved_tensors_on_host, without_earlier_models
from ligerprof.analyzers.suggestions.suggestion import Basis, Cost
from ligerprof.kernels.providers.liger.model_types import LIGER_MODEL_TYPES
from ligerprof.recipe.categories import Optimizer
from ligerprof.roles import Role

if TYPE_CHECKING:
    from ligerprof.recipe.training import TrainingRecipe

_OFFLOADING = r":pack_to_cpu$|:pack_tensor$|/activation_offloading\.py:|offload_checkpoint"
_OFFLOADING_TRAINERS = r"trl/trainer/(?:sft|dpo|kto|reward)_trainer\.py$"
_LIGER_USERS = (*TRAINERS, *YAML)


def _uses_liger(case: Case) -> bool:
    return case.program.frameworks[0] in _LIGER_USERS


def _can_fuse_loss(case: Case) -> bool:
    program = case.program
    if not case.trains_model or program.has_fused_loss or not program.has_cross_entropy:
        return False
    if _uses_liger(case) and not program.model_types & LIGER_MODEL_TYPES:
        return False
    return has(*LOSS_ROLES)(case)


def _can_fuse_log_probabilities(case: Case) -> bool:
    program = case.program
    if not case.trains_model or program.has_fused_loss or program.has_cross_entropy or program.is_compiled:
        return False
    return has(*LOSS_ROLES)(case) and takes_log_probabilities(case)


def _can_offload_activations(case: Case) -> bool:
    """Whether hooks on saved tensors reach the forward pass, and nothing offloads or compiles it yet."""
    program = case.program
    if program.loop in (Framework.TRAINER, Framework.LIGHTNING) or program.engine not in (None, Framework.DDP):
        return False
    if program.loop is Framework.TRL and not program.has_file(_OFFLOADING_TRAINERS):
        return False
    return case.trains_model and not program.is_compiled and not program.has_call(_OFFLOADING)


def _add_flce(recipe: "TrainingRecipe") -> "TrainingRecipe":
    others = [name for name in recipe.kernels if name not in ("ce", "flce")]
    return dataclasses.replace(recipe, liger="+".join([*others, "flce"]))


def _half_batch(recipe: "TrainingRecipe") -> "TrainingRecipe | None":
    if recipe.batch % 2:
        return None
    return dataclasses.replace(recipe, batch=recipe.batch // 2, grad_accum=2 * recipe.grad_accum)


PASS_ROWS: tuple[Row, ...] = (
    Row(
        name="fused-loss",
        change="a fused linear cross-entropy, which computes the logits chunk by chunk",
        cost=Cost.FREE,
        cost_reason="the same loss up to rounding",
        without=LOSS_ROLES,
        applies=_can_fuse_loss,
        edit=lambda case: without_logits(case, "liger" if _uses_liger(case) else "ligerprof"),
        how={
            **for_each(
                TRAINERS,
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
        skips=lambda case: () if knows_model(case) else (Framework.MODEL,),
        recipe=_add_flce,
    ),
    Row(
        name="label-logits",
        change="log-probabilities of the labels from hidden states, without the logits of all tokens",
        cost=Cost.CHEAP,
        cost_reason="the same log-probabilities; backward computes the logits of a few tokens again",
        without=LOSS_ROLES,
        applies=_can_fuse_log_probabilities,
        edit=with_linear_log_probs,
        basis=Basis.ESTIMATED,
        how={
            Framework.TORCH: (
                "from ligerprof.kernels.linear_cross_entropy import scores",
                "# in place of the head, log_softmax and gather; hidden: of the last norm",
                "found = scores.linear_log_probs(hidden, head.weight, labels)",
                "logps = found.log_probs  # labels of -100 give 0; entropy=True: entropies",
                "# scores.linear_label_logits: the labels' logits alone",
            ),
        },
    ),
    Row(
        name="fused-optimizer",
        change="a fused optimizer step, which allocates no temporary tensors",
        cost=Cost.FREE,
        cost_reason="the same update in one kernel",
        without=(Role.OPTIMIZER_TEMPORARIES,),
        applies=lambda case: case.program.has_call(r"torch/optim/\w+\.py:_(?:multi|single)_tensor_(?:adam|adamw|sgd)$"),
        edit=without(Role.OPTIMIZER_TEMPORARIES),
        how={
            **for_each(TRAINERS, 'optim="adamw_torch_fused",'),
            **for_each(YAML, "optim: adamw_torch_fused"),
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
        edit=without(Role.ATTENTION_TEMPORARIES),
        how={
            Framework.AXOLOTL: ("attn_implementation: sdpa",),
            Framework.LLAMA_FACTORY: ("flash_attn: sdpa",),
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
        applies=lambda case: case.trains_model and owns_loop(case),
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
        applies=lambda case: not case.program.generates and owns_loop(case),
        edit=without_kept_outputs,
        how={
            Framework.TORCH: (
                "total += loss.item()  # not loss, which keeps its graph",
                "collected.append(logits.detach().cpu())  # not logits",
            ),
        },
    ),
    Row(
        name="earlier-models",
        change="free the models that the process built earlier, with their gradients and optimizers",
        cost=Cost.FREE,
        cost_reason="nothing that runs uses them",
        without=(Role.PARAMETERS, Role.GRADIENTS, Role.OPTIMIZER_STATES, Role.OTHER),
        applies=lambda case: case.trains_model,
        edit=without_earlier_models,
        how={
            Framework.TORCH: (
                "del model, optimizer  # of the earlier training, and what else holds them",
                "gc.collect()",
                "# or each training in a process of its own",
            ),
        },
    ),
    Row(
        name="no-grad",
        change="forward passes without autograd where no backward pass follows, as in an evaluation",
        cost=Cost.FREE,
        cost_reason="the same outputs",
        without=(Role.ACTIVATIONS, Role.ATTENTION_TEMPORARIES),
        applies=lambda case: not case.program.is_compiled,
        edit=without_graphs,
        basis=Basis.AT_LEAST,
        how={
            Framework.TORCH: (
                "model.eval()",
                "with torch.no_grad():  # around the evaluation",
                "    outputs = model(...)",
            ),
        },
    ),
    Row(
        name="zero-grad",
        change="free gradients right after the optimizer step, before the next forward pass",
        cost=Cost.FREE,
        cost_reason="the same results",
        without=(Role.GRADIENTS,),
        applies=lambda case: case.trains_model and owns_loop(case) and case.program.engine is None,
        edit=with_earlier_zero_grad,
        how={Framework.TORCH: ("optimizer.step()", "optimizer.zero_grad(set_to_none=True)")},
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
            **for_each(TRAINERS, "per_device_eval_batch_size=... // 2,"),
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
            **for_each(
                TRAINERS, "gradient_checkpointing=True,", 'gradient_checkpointing_kwargs={"use_reentrant": False},'
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
        name="activation-offload",
        change="tensors that backward needs in main memory",
        cost=Cost.TIME,
        cost_reason="they cross PCIe twice per step",
        without=(Role.ACTIVATIONS, Role.CHECKPOINTS),
        applies=_can_offload_activations,
        edit=with_saved_tensors_on_host,
        basis=Basis.ESTIMATED,
        how={
            Framework.TRL: ("activation_offloading=True,",),
            Framework.AXOLOTL: ("activation_offloading: true",),
            Framework.TORCH: (
                "# around the forward pass:",
                "with torch.autograd.graph.save_on_cpu(pin_memory=True):",
            ),
        },
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
            **for_each(TRAINERS, "per_device_train_batch_size=... // 2, gradient_accumulation_steps=... * 2,"),
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
