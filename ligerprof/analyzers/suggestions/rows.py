"""The table of suggestions: when each applies, what it saves, what it costs, and how to make it in each framework."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ligerprof.analyzers.attribution import frames
from ligerprof.analyzers.suggestions.case import Case, Edit, Framework
from ligerprof.analyzers.suggestions.edits import (
    RANKS,
    with_bucket_views,
    with_checkpointing,
    with_divided_states,
    with_earlier_zero_grad,
    with_half_the_batch,
    with_half_the_evaluation,
    with_half_the_prompts,
    with_optimizer_on_host,
    with_resharding,
    with_sharded_model,
    with_sharded_states_on_host,
    with_smaller_buckets,
    without_graphs,
    without_kept_outputs,
    without_old_outputs,
)
from ligerprof.analyzers.suggestions.fused_loss import (
    LOSS_ROLES,
    takes_log_probabilities,
    with_linear_log_probs,
    without_logits,
)
from ligerprof.analyzers.suggestions.state_edits import (
    ADAPTER_DROPOUT,
    LORA_RANK,
    computes_lora,
    known_recipe,
    parameter_width,
    with_eight_bit_states,
    with_half_precision_reference,
    with_half_precision_weights,
    with_lora,
    with_paged_states,
    with_saved_tensors_on_host,
    without_adapter_dropout,
    without_earlier_models,
)
from ligerprof.kernels.providers.liger.model_types import LIGER_MODEL_TYPES
from ligerprof.models.architectures import ARCHITECTURES
from ligerprof.recipe.categories import Attention, Offload, Optimizer, Precision
from ligerprof.roles import Phase, Role
from ligerprof.serialization import select
from ligerprof.words import ExplainedWord

if TYPE_CHECKING:
    from ligerprof.recipe.training import TrainingRecipe


class Cost(ExplainedWord):
    """The price of a change; the cheapest first."""

    FREE = "free", "same results up to rounding, no slower"
    CHEAP = "cheap", "a few percent of the time"
    TIME = "time", "slower"
    TRAINING = "training", "changes precision or what is trained"


class Basis(ExplainedWord):
    """How exact a saving is."""

    REPLAYED = "replayed", "the recording replayed with the change"
    AT_LEAST = "at least", "replayed, without some of what the change saves"
    ESTIMATED = "estimated", "replayed, without activations that the change may shrink or enlarge"


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """One change that lowers the peak.

    Attributes:
        name: short name, such as `checkpointing`.
        change: what changes, in words.
        without: roles that the change removes or shrinks.
        saves_bytes: by how much the peak is lower; None if this cannot be computed.
        new_peak_bytes: the peak with the change, wherever it then is; None as above.
        how: lines to change, in the words of the framework.
        framework: whose settings these are.
        lets_pass: whether the allocation that failed would have succeeded; None without one, or if unknown.
        least_peak_bytes: the new peak where it is lowest, if it differs from run to run; else None.
        condition: what else the new peak depends on, in a sentence; empty if on nothing.
        new_reserved_bytes: what is reserved with the change, of one that moves blocks and leaves the peak; else None.
        saves_reserved_bytes: by how much that is less; None as above.
    """

    name: str
    change: str
    without: tuple[Role, ...]
    saves_bytes: int | None
    new_peak_bytes: int | None
    cost: Cost
    cost_reason: str
    how: tuple[str, ...]
    framework: Framework
    lets_pass: bool | None = None
    basis: Basis = Basis.REPLAYED
    least_peak_bytes: int | None = None
    condition: str = ""
    new_reserved_bytes: int | None = None
    saves_reserved_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """An entry of `suggestions` in the JSON."""
        names = ("name", "change", "saves_bytes", "new_peak_bytes", "cost", "cost_reason", "how", "framework")
        reserved = () if self.new_reserved_bytes is None else ("new_reserved_bytes", "saves_reserved_bytes")
        return select(self, *names, "lets_pass", "basis", "least_peak_bytes", "condition", *reserved)

    def to_what_if(self) -> dict[str, Any]:
        """An entry of `what_if` in the JSON."""
        command = self.how[0] if self.framework is Framework.LIGERPROF else None
        figures = select(self, "without", "peak_bytes=new_peak_bytes", "saved_bytes=saves_bytes", "change")
        return {**figures, "command": command}


TRAINERS = (Framework.TRL, Framework.TRAINER)
YAML = (Framework.AXOLOTL, Framework.LLAMA_FACTORY)
# whose keys for a recipe's options are in the table of their files
_TABLES = {
    Framework.TRL: "trl-sft",
    Framework.TRAINER: "transformers",
    Framework.AXOLOTL: "axolotl",
    Framework.LLAMA_FACTORY: "llama-factory",
}

Lines = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SuggestionRow:
    """One suggestion.

    Attributes:
        cost: the price, and why it is so low or high.
        applies: whether the change is possible and not made yet.
        edit: its effect; returns None if this cannot be computed.
        torch: lines in plain torch.
        how: lines by framework, for other frameworks whose lines do not follow from `changes`.
        changes: the recipe's options that the suggestion sets; frameworks have them as their files write them.
        skips: frameworks whose lines do not hold for this program.
        changed: a recipe after it, where `changes` alone does not say that; None if it does not apply.
        is_whole: whether the saving is exact all the same, for this program.
        keeps_buckets: whether DDP still has buckets after the change.
        condition: what the saving depends on, in a sentence without its period; empty if on nothing.
    """

    name: str
    change: str
    cost: tuple[Cost, str]
    without: tuple[Role, ...]
    applies: Callable[[Case], bool]
    edit: Callable[[Case], Edit | None]
    torch: Lines = ()
    how: Mapping[Framework, Lines] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    skips: Callable[[Case], tuple[Framework, ...]] = field(default=lambda _case: ())
    changed: "Callable[[TrainingRecipe], TrainingRecipe | None] | None" = None
    basis: Basis = Basis.REPLAYED
    is_whole: Callable[[Case], bool] = field(default=lambda _case: False)
    keeps_buckets: bool = True
    condition: str = ""

    def recipe(self, recipe: "TrainingRecipe") -> "TrainingRecipe | None":
        """The changed recipe of a step of ours, None if it does not apply."""
        if self.changed is not None:
            return self.changed(recipe)
        return dataclasses.replace(recipe, **self.changes) if self.changes else None

    def lines(self, framework: Framework) -> Lines:
        """The lines of a framework; none if it is changed in another way, or not at all."""
        own = self.torch if framework is Framework.TORCH else self.how.get(framework)
        return own or _written(framework, self.changes)


def _written(framework: Framework, changes: Mapping[str, Any]) -> Lines:
    """The lines that set options of a recipe, as flags of ours, lines of YAML, or arguments in Python."""
    if not changes or framework not in (Framework.LIGERPROF, *_TABLES):
        return ()
    from ligerprof.recipe.configs.documents import yaml_text
    from ligerprof.recipe.configs.edits import keys_for
    from ligerprof.recipe.training import RECIPE_OPTIONS

    if framework is Framework.LIGERPROF:
        return (" ".join(word for name, value in changes.items() for word in RECIPE_OPTIONS[name].typed(value)),)
    keys = keys_for(_TABLES[framework], **changes) or {}
    if framework in YAML:
        return tuple(f"{key}: {yaml_text(value)}" for key, value in keys.items())
    texts = {key: json.dumps(value) if isinstance(value, str) else repr(value) for key, value in keys.items()}
    return tuple(f"{key}={text}," for key, text in texts.items())


def for_each(frameworks: tuple[Framework, ...], *lines: str) -> dict[Framework, Lines]:
    """The same lines for several frameworks."""
    return dict.fromkeys(frameworks, lines)


def has(*roles: Role) -> Callable[[Case], bool]:
    """A condition: blocks of some roles exist."""
    return lambda case: len(case.book.blocks(*roles)) > 0


def without(*roles: Role) -> Callable[[Case], Edit]:
    """An effect: blocks of some roles do not exist."""
    return lambda case: case.without(*roles)


def knows_model(case: Case) -> bool:
    """Whether the architecture of a transformers model that runs has a row."""
    return not case.program.model_types.isdisjoint(ARCHITECTURES)


def owns_loop(case: Case) -> bool:
    """Whether the program's own code is the training loop, with accelerate or without a library."""
    return case.program.loop in (None, Framework.ACCELERATE)


_OFFLOADING = r":pack_to_cpu$|:pack_tensor$|/activation_offloading\.py:|offload_checkpoint"
_OFFLOADING_TRAINERS = r"trl/trainer/(?:sft|dpo|kto|reward)_trainer\.py$"
_GENERATING_TRAINERS = r"trl/trainer/(?:grpo|rloo)_trainer\.py$"
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


def _sdpa(recipe: "TrainingRecipe") -> "TrainingRecipe | None":
    """Transformers computes some models with eager attention alone."""
    return None if recipe.spec.needs_eager else dataclasses.replace(recipe, attention=Attention.SDPA)


def _half_batch(recipe: "TrainingRecipe") -> "TrainingRecipe | None":
    if recipe.batch % 2:
        return None
    return dataclasses.replace(recipe, batch=recipe.batch // 2, grad_accum=2 * recipe.grad_accum)


_PASS_ROWS: tuple[SuggestionRow, ...] = (
    SuggestionRow(
        name="fused-loss",
        change="a fused linear cross-entropy, which computes the logits chunk by chunk",
        cost=(Cost.FREE, "the same loss up to rounding"),
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
            Framework.LLAMA_FACTORY: ("enable_liger_kernel: true",),
            Framework.MODEL: ('ligerprof.kernels.apply(model, "flce")  # once it is on the GPU',),
        },
        torch=(
            "from ligerprof.kernels.linear_cross_entropy import triton",
            "# in place of the head and the loss:",
            "loss = triton.fused_linear_cross_entropy(hidden, head.weight, labels)",
        ),
        skips=lambda case: () if knows_model(case) else (Framework.MODEL,),
        changes={"liger": "flce"},
        changed=_add_flce,
    ),
    SuggestionRow(
        name="label-logits",
        change="log-probabilities of the labels from hidden states, without the logits of all tokens",
        cost=(Cost.CHEAP, "the same log-probabilities; backward computes the logits of a few tokens again"),
        without=LOSS_ROLES,
        applies=_can_fuse_log_probabilities,
        edit=with_linear_log_probs,
        basis=Basis.ESTIMATED,
        torch=(
            "from ligerprof.kernels.linear_cross_entropy import scores",
            "# in place of the head, log_softmax and gather; hidden: of the last norm",
            "found = scores.linear_log_probs(hidden, head.weight, labels)",
            "logps = found.log_probs  # labels of -100 give 0; entropy=True: entropies",
            "# scores.linear_label_logits: the labels' logits alone",
        ),
    ),
    SuggestionRow(
        name="fused-optimizer",
        change="a fused optimizer step, which allocates no temporary tensors",
        cost=(Cost.FREE, "the same update in one kernel"),
        without=(Role.OPTIMIZER_TEMPORARIES,),
        applies=lambda case: case.program.has_call(r"torch/optim/\w+\.py:_(?:multi|single)_tensor_(?:adam|adamw|sgd)$"),
        edit=without(Role.OPTIMIZER_TEMPORARIES),
        changes={"optimizer": Optimizer.ADAMW_FUSED},
        torch=("optimizer = torch.optim.AdamW(..., fused=True)  # or Adam, SGD",),
    ),
    SuggestionRow(
        name="sdpa",
        change="attention without score matrices",
        cost=(Cost.FREE, "the same attention up to rounding, faster"),
        without=(Role.ATTENTION_TEMPORARIES,),
        applies=lambda case: case.program.has_call(frames.EAGER_CALL),
        edit=without(Role.ATTENTION_TEMPORARIES),
        changes={"attention": Attention.SDPA},
        changed=_sdpa,
        how={Framework.MODEL: ('model = AutoModel….from_pretrained(..., attn_implementation="sdpa")',)},
    ),
    SuggestionRow(
        name="del-outputs",
        change="free the model's outputs when backward has run, instead of keeping them into the next step",
        cost=(Cost.FREE, "the same results"),
        without=LOSS_ROLES,
        applies=lambda case: case.trains_model and owns_loop(case),
        edit=without_old_outputs,
        torch=(
            "loss.backward()",
            "del outputs, logits, loss  # each name of an output; keep loss.item()",
        ),
    ),
    SuggestionRow(
        name="kept-outputs",
        change="keep numbers or host copies of what the program collects, instead of tensors on the GPU",
        cost=(Cost.FREE, "the same values, in main memory"),
        without=(*LOSS_ROLES, Role.KV_CACHE),
        applies=lambda case: (case.trains_model or not case.program.generates) and owns_loop(case),
        edit=without_kept_outputs,
        torch=(
            "total += loss.item()  # not loss, which keeps its graph",
            "collected.append(logits.detach().cpu())  # not logits",
            "sequences.append(out.sequences)  # not out.past_key_values",
        ),
    ),
    SuggestionRow(
        name="earlier-models",
        change="free the models that the process built earlier, with their gradients and optimizers",
        cost=(Cost.FREE, "nothing that runs uses them"),
        without=(Role.PARAMETERS, Role.GRADIENTS, Role.OPTIMIZER_STATES, Role.OTHER),
        applies=lambda case: case.trains_model,
        edit=without_earlier_models,
        torch=(
            "del model, optimizer  # of the earlier training, and what else holds them",
            "gc.collect()",
            "# or each training in a process of its own",
        ),
    ),
    SuggestionRow(
        name="no-grad",
        change="forward passes without autograd where no backward pass follows, as in an evaluation",
        cost=(Cost.FREE, "the same outputs"),
        without=(Role.ACTIVATIONS, Role.ATTENTION_TEMPORARIES),
        applies=lambda case: not case.program.is_compiled,
        edit=without_graphs,
        basis=Basis.AT_LEAST,
        torch=(
            "model.eval()",
            "with torch.no_grad():  # around the evaluation",
            "    outputs = model(...)",
        ),
    ),
    SuggestionRow(
        name="zero-grad",
        change="free gradients right after the optimizer step, before the next forward pass",
        cost=(Cost.FREE, "the same results"),
        without=(Role.GRADIENTS,),
        applies=lambda case: case.trains_model and owns_loop(case) and case.program.engine is None,
        edit=with_earlier_zero_grad,
        torch=("optimizer.step()", "optimizer.zero_grad(set_to_none=True)"),
    ),
    SuggestionRow(
        name="eval-batch",
        change="half the batch of evaluations",
        cost=(Cost.CHEAP, "the same metrics; smaller kernels in evaluations"),
        without=(Role.LOGITS, Role.CE_TEMPORARIES, Role.ACTIVATIONS),
        applies=lambda case: len(case.evaluation) > 0,
        edit=with_half_the_evaluation,
        how={
            **for_each(TRAINERS, "per_device_eval_batch_size=... // 2,"),
            Framework.AXOLOTL: ("eval_batch_size: half of now",),
            Framework.LLAMA_FACTORY: ("per_device_eval_batch_size: half of now",),
            Framework.LIGHTNING: ("DataLoader(..., batch_size=half)  # in val_dataloader",),
        },
        torch=("DataLoader(..., batch_size=half)  # of the evaluation",),
    ),
    SuggestionRow(
        name="half-prompts",
        change="half the prompts at a time",
        cost=(Cost.TIME, "two generations, each with smaller kernels"),
        without=(Role.KV_CACHE, Role.ACTIVATIONS),
        applies=lambda case: len(case.generation) > 0 or (case.program.generates and not case.trains_model),
        edit=with_half_the_prompts,
        how={
            Framework.TRL: (
                "steps_per_generation=... // 2,",
                "# if not set, it is gradient_accumulation_steps; if it is 1:",
                "# per_device_train_batch_size=... // 2, gradient_accumulation_steps=... * 2,",
            ),
            Framework.MODEL: ("for part in prompts.chunk(2):", "    model.generate(part, ...)"),
        },
        skips=lambda case: () if case.program.has_file(_GENERATING_TRAINERS) else (Framework.TRL,),
    ),
    SuggestionRow(
        name="checkpointing",
        change="gradient checkpointing, which keeps only the inputs of layers",
        cost=(Cost.TIME, "layers run forward twice, up to a third more compute"),
        without=(Role.ACTIVATIONS,),
        # a compiler decides itself what to keep and what to compute again
        applies=lambda case: case.trains_model and not case.program.checkpoints and not case.program.is_compiled,
        edit=with_checkpointing,
        how={
            **for_each(
                TRAINERS, "gradient_checkpointing=True,", 'gradient_checkpointing_kwargs={"use_reentrant": False},'
            ),
            Framework.MODEL: ('model.gradient_checkpointing_enable({"use_reentrant": False})',),
        },
        torch=(
            "from torch.utils.checkpoint import checkpoint",
            "# in the loop over the layers, for x = layer(x):",
            "x = checkpoint(layer, x, use_reentrant=False)",
        ),
        changes={"checkpointing": True},
    ),
    SuggestionRow(
        name="activation-offload",
        change="tensors that backward needs in main memory",
        cost=(Cost.TIME, "they cross PCIe twice per step"),
        without=(Role.ACTIVATIONS, Role.CHECKPOINTS),
        applies=_can_offload_activations,
        edit=with_saved_tensors_on_host,
        basis=Basis.ESTIMATED,
        how={
            Framework.TRL: ("activation_offloading=True,",),
            Framework.AXOLOTL: ("activation_offloading: true",),
        },
        torch=(
            "# around the forward pass:",
            "with torch.autograd.graph.save_on_cpu(pin_memory=True):",
        ),
    ),
    SuggestionRow(
        name="half-batch",
        change="half the micro-batch, and twice as many of them per step",
        cost=(Cost.TIME, "smaller kernels; a few percent if they still fill the GPU"),
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
        },
        torch=(
            "for part in batch.chunk(2):  # then optimizer.step() once",
            "    (loss_of(part) / 2).backward()",
        ),
        changed=_half_batch,
    ),
)


_FOR_TWO_RANKS = f"Computed for {RANKS} ranks; more ranks save more"


def _can_shard(case: Case) -> bool:
    """Whether DDP replicates the model, and the optimizer holds the states of all of it."""
    program = case.program
    if program.engine is not Framework.DDP or not owns_loop(case) or not has(Role.OPTIMIZER_STATES)(case):
        return False
    return not program.has_file(r"torch/distributed/optim/zero_redundancy_optimizer\.py$")


_SHARDING_ROWS: tuple[SuggestionRow, ...] = (
    SuggestionRow(
        name="bucket-views",
        change="gradients in DDP's buckets instead of next to them",
        cost=(Cost.FREE, "the same results, one copy less"),
        without=(Role.GRADIENTS,),
        applies=lambda case: case.program.engine is Framework.DDP and has(Role.COMMUNICATION)(case),
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
    SuggestionRow(
        name="reshard",
        change="gathered weights freed after each layer's forward pass",
        cost=(Cost.CHEAP, "one more all-gather per layer and step"),
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
    SuggestionRow(
        name="shard-optimizer",
        change="each rank updates a part of the weights, and holds the optimizer states of that part alone",
        cost=(Cost.CHEAP, "after each step, the ranks send each other their weights"),
        without=(Role.OPTIMIZER_STATES, Role.OPTIMIZER_TEMPORARIES),
        applies=_can_shard,
        edit=with_divided_states,
        condition=_FOR_TWO_RANKS,
        how={
            Framework.DDP: (
                "from torch.distributed.optim import ZeroRedundancyOptimizer",
                "optimizer = ZeroRedundancyOptimizer(",
                "    model.parameters(), optimizer_class=torch.optim.AdamW, ...)",
            ),
        },
    ),
    SuggestionRow(
        name="shard-model",
        change="weights, gradients and optimizer states divided among the ranks (FSDP2)",
        cost=(Cost.TIME, "two all-gathers per layer and step"),
        without=(Role.PARAMETERS, Role.GRADIENTS, Role.OPTIMIZER_STATES, Role.COMMUNICATION),
        applies=lambda case: _can_shard(case) and case.trains_model,
        edit=with_sharded_model,
        basis=Basis.ESTIMATED,
        keeps_buckets=False,
        condition=_FOR_TWO_RANKS,
        how={
            Framework.DDP: (
                "from torch.distributed.fsdp import fully_shard",
                "# in place of DistributedDataParallel(model), for each layer of the model:",
                "fully_shard(layer)",
                "fully_shard(model)  # after its layers, before the optimizer",
            ),
        },
    ),
    SuggestionRow(
        name="small-buckets",
        change="a tenth of the buffer in which DeepSpeed collects gradients",
        cost=(Cost.CHEAP, "more and smaller reductions"),
        without=(Role.COMMUNICATION,),
        applies=lambda case: case.program.engine is Framework.DEEPSPEED,
        edit=with_smaller_buckets,
        how={
            Framework.DEEPSPEED: ('"zero_optimization": {"reduce_bucket_size": 50000000}  # the default / 10',),
        },
    ),
    SuggestionRow(
        name="offload-optimizer",
        change="optimizer states in main memory",
        cost=(Cost.TIME, "Adam runs on the CPU; gradients and weights cross PCIe every step"),
        without=(Role.OPTIMIZER_STATES,),
        applies=lambda case: case.program.engine is Framework.DEEPSPEED and has(Role.OPTIMIZER_STATES)(case),
        edit=with_optimizer_on_host,
        how={
            Framework.LIGERPROF: ("--offload optimizer  # next to --engine deepspeed",),
            Framework.DEEPSPEED: (
                '"zero_optimization": {"offload_optimizer": {"device": "cpu"}}',
                '"zero_force_ds_cpu_optimizer": false  # if the script makes the optimizer',
            ),
        },
        changed=lambda recipe: dataclasses.replace(recipe, offload=Offload.OPTIMIZER, optimizer=Optimizer.DEFAULT),
    ),
    SuggestionRow(
        name="cpu-offload",
        change="sharded weights, gradients and optimizer states in main memory",
        cost=(Cost.TIME, "weights and gradients cross PCIe, Adam runs on the CPU"),
        without=(Role.PARAMETERS, Role.OPTIMIZER_STATES),
        applies=lambda case: case.program.engine is Framework.FSDP2 and has(Role.OPTIMIZER_STATES)(case),
        edit=with_sharded_states_on_host,
        how={
            Framework.FSDP2: (
                "from torch.distributed.fsdp import CPUOffloadPolicy",
                "# in each call, with the model built on the CPU:",
                "fully_shard(module, ..., offload_policy=CPUOffloadPolicy())",
            ),
        },
    ),
)


_ADAM = r"torch/optim/adamw?\.py:\w+$"
_LOW_BIT = r"(?:^|/)(?:bitsandbytes|torchao|galore_torch)/"
_WHOLE_STATES = (None, Framework.DDP)


def _has_adam(case: Case) -> bool:
    """Whether torch's Adam updates whole tensors that no engine has sharded."""
    program = case.program
    whole = program.engine in _WHOLE_STATES and not program.is_compiled
    return whole and program.has_call(_ADAM) and not program.has_file(_LOW_BIT)


def _autocasts_fp32(case: Case) -> bool:
    program = case.program
    if program.engine not in _WHOLE_STATES or program.has_adapters or program.has_file(_LOW_BIT):
        return False
    return case.trains_model and has(Role.WEIGHT_CASTS)(case)


def _can_add_adapters(case: Case) -> bool:
    program = case.program
    if program.engine is not None or program.has_adapters or program.is_compiled:
        return False
    return case.trains_model and knows_model(case) and parameter_width(case) is not None


def _bf16_weights(recipe: "TrainingRecipe") -> "TrainingRecipe | None":
    return dataclasses.replace(recipe, precision=Precision.BF16) if recipe.precision is Precision.AMP else None


def _lora(recipe: "TrainingRecipe") -> "TrainingRecipe | None":
    return None if recipe.lora or recipe.qlora else dataclasses.replace(recipe, lora=LORA_RANK)


_STATE_ROWS: tuple[SuggestionRow, ...] = (
    SuggestionRow(
        name="paged-optimizer",
        change="optimizer states in memory that pages between GPU and host",
        cost=(Cost.TIME, "the same results; states that do not fit cross PCIe every step"),
        without=(Role.OPTIMIZER_STATES, Role.OPTIMIZER_TEMPORARIES),
        applies=lambda case: _has_adam(case) and has(Role.OPTIMIZER_STATES)(case),
        edit=with_paged_states,
        changes={"optimizer": Optimizer.PAGED_ADAMW},
        torch=("optimizer = bitsandbytes.optim.PagedAdamW32bit(...)",),
    ),
    SuggestionRow(
        name="8-bit-optimizer",
        change="Adam with moments in 8 bits",
        cost=(Cost.TRAINING, "moments are rounded to 8 bits in each step"),
        without=(Role.OPTIMIZER_STATES, Role.OPTIMIZER_TEMPORARIES),
        applies=lambda case: _has_adam(case) and has(Role.OPTIMIZER_STATES)(case),
        edit=with_eight_bit_states,
        changes={"optimizer": Optimizer.ADAMW_8BIT},
        torch=("optimizer = bitsandbytes.optim.AdamW8bit(...)  # or Adam8bit",),
    ),
    SuggestionRow(
        name="lora-dropout",
        change="LoRA adapters without dropout, which keep no masks",
        cost=(Cost.TRAINING, "adapters lose this regularization; peft's default has none"),
        without=(Role.ACTIVATIONS,),
        applies=lambda case: len(case.blocks_from(ADAPTER_DROPOUT)) > 0,
        edit=without_adapter_dropout,
        basis=Basis.AT_LEAST,
        how={
            Framework.TRL: ("# of LoraConfig, or of TRL's ModelConfig:", "lora_dropout=0.0,"),
        },
        torch=("LoraConfig(..., lora_dropout=0.0)",),
        changes={"lora_dropout": 0.0},
        changed=lambda recipe: dataclasses.replace(recipe, lora_dropout=0.0) if recipe.lora_dropout else None,
    ),
    SuggestionRow(
        name="bf16-weights",
        change="weights, gradients and optimizer states in bf16 instead of fp32",
        cost=(Cost.TRAINING, "updates below bf16's resolution are lost"),
        without=(Role.PARAMETERS, Role.GRADIENTS, Role.OPTIMIZER_STATES, Role.WEIGHT_CASTS),
        applies=_autocasts_fp32,
        edit=with_half_precision_weights,
        basis=Basis.ESTIMATED,
        is_whole=lambda case: known_recipe(case) is not None,
        how={
            Framework.LLAMA_FACTORY: ("pure_bf16: true  # instead of bf16: true",),
            Framework.LIGHTNING: ('Trainer(..., precision="bf16-true")',),
            Framework.MODEL: ("model = AutoModel….from_pretrained(..., dtype=torch.bfloat16)",),
        },
        torch=("model = model.to(torch.bfloat16)  # before the optimizer",),
        changes={"precision": Precision.BF16},
        changed=_bf16_weights,
    ),
    SuggestionRow(
        name="bf16-reference",
        change="the reference in bf16, as the policy is, instead of fp32",
        cost=(Cost.CHEAP, "the same log-probabilities up to rounding, faster"),
        without=(Role.PARAMETERS,),
        applies=lambda case: case.trains_model and case.runs_in(Phase.SCORING),
        edit=with_half_precision_reference,
        how={
            Framework.MODEL: ("reference = AutoModel….from_pretrained(..., dtype=torch.bfloat16)",),
        },
        torch=("reference = reference.to(torch.bfloat16)",),
    ),
    SuggestionRow(
        name="lora",
        change=f"LoRA adapters of rank {LORA_RANK} instead of all weights",
        cost=(Cost.TRAINING, "only the adapters of linear layers learn"),
        without=(Role.GRADIENTS, Role.OPTIMIZER_STATES, Role.OPTIMIZER_TEMPORARIES),
        applies=_can_add_adapters,
        edit=with_lora,
        basis=Basis.AT_LEAST,
        is_whole=computes_lora,
        how={
            Framework.TRL: (
                "# of the trainer, not of its config:",
                f'peft_config=LoraConfig(r={LORA_RANK}, target_modules="all-linear"),',
            ),
            Framework.MODEL: (
                "from peft import LoraConfig, get_peft_model",
                f'adapters = LoraConfig(r={LORA_RANK}, target_modules="all-linear")',
                "model = get_peft_model(model, adapters)  # before the optimizer",
            ),
        },
        changes={"lora": LORA_RANK},
        changed=_lora,
    ),
)


ROWS: tuple[SuggestionRow, ...] = (*_PASS_ROWS, *_SHARDING_ROWS, *_STATE_ROWS)
