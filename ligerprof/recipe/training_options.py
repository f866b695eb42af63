"""The options of a recipe that decide what a step allocates."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ligerprof.errors import RecipeError
from ligerprof.files import FileKind, is_file, read_listed
from ligerprof.gpus import DEFAULT_GPU, GpuSpec, find_gpu
from ligerprof.kernels.selection import select_providers
from ligerprof.models import DEFAULT_MODEL, ModelSpec, load_model
from ligerprof.recipe import categories
from ligerprof.recipe.options import Group, Options, option
from ligerprof.recipe.routing import UNIFORM, canonical_routing
from ligerprof.text import short_repr
from ligerprof.torch_memory import saved_tensors
from ligerprof.units import MIB

_Read = TypeVar("_Read")
_HINT = "--selective names a policy or a file with one operator per line."
_FILE = FileKind(error=RecipeError, hint=_HINT, max_bytes=2**16)


def canonical_policy(value: Any) -> str:
    """A policy as a recipe stores it: a name, operators joined by `+`, or runs of layers with a policy each.

    A file has one operator per line, such as `aten.mm.default`, or `aten.mm.default/2` to keep the first of each two
    calls; `#` starts a comment. `find_policy` says what else may follow. Raises RecipeError for anything else.
    """
    text = str(value)
    if "*" in text and not is_file(text):
        return ",".join(f"{run.layers}*{run.name}" for run in _read(text, "", saved_tensors.layer_runs))
    if text.partition("-")[0] in saved_tensors.NAMES and not is_file(text):
        _read(text, "")
        return text
    if is_file(text):
        operators, where = read_listed(Path(text), _FILE), f"{text}: "
    else:
        operators, where = text.split("+"), ""
    if not operators:
        raise RecipeError(f"{where}names no operator. {_HINT}")
    return saved_tensors.policy_text(_read("+".join(operators), where))


def _read(text: str, where: str, read: Callable[[str], _Read] = saved_tensors.find_policy) -> _Read:  # type: ignore[assignment]
    try:
        return read(text)
    except ValueError as error:
        raise RecipeError(
            f"{where}{short_repr(str(error))} is neither a file nor an operator such as aten.mm.default."
            f" Known policies: {', '.join(saved_tensors.NAMES)}."
        ) from None


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """The model, the micro-batch, and how tokens choose experts."""

    model: str | ModelSpec = option(
        Group.MODEL,
        "A name or hub id from `ligerprof models` or the local Hugging Face cache, a config.json, or a model folder.",
        default=DEFAULT_MODEL,
        metavar="NAME|PATH",
    )
    like: str | None = option(
        Group.MODEL,
        "A known model whose architecture and sizes stand in where the model's name is unknown, as a fine-tune's.",
        metavar="NAME|PATH",
    )
    batch: int = option(Group.MODEL, "Sequences per micro-batch and GPU.", default=4, minimum=1)
    seq: int = option(Group.MODEL, "Tokens per sequence.", default=1024, minimum=1)
    grad_accum: int = option(Group.MODEL, "Micro-batches accumulated before the optimizer steps.", default=1, minimum=1)
    padding: float = option(
        Group.MODEL,
        "Share of tokens that are padding; 0 passes no mask.",
        default=0.0,
        minimum=0,
        below=1,
        requirement="a share from 0 up to, but not including, 1",
    )
    packing: bool = option(
        Group.MODEL,
        "Train on one row of batch x seq tokens without padding, in which positions restart with each document.",
        default=False,
        negatable=True,
    )
    eval_batch: int | None = option(
        Group.MODEL, "Sequences per evaluation batch; without it, nothing is evaluated.", minimum=1
    )
    eval_follows_batch: bool = option(
        Group.MODEL, "Evaluate with as many sequences as --batch, also where a search changes that.", default=False
    )
    experts: categories.ExpertsImplementation | None = option(
        Group.MODEL,
        "Implementation of a mixture of experts, as transformers names it: all experts in one product, or one after"
        " another.",
        default_text="that of the config, else grouped_mm",
    )
    routing: str = option(
        Group.MODEL,
        "How tokens choose experts: evenly, all the same ones, or in the shares of a file. It matters if experts run"
        " one after another.",
        default=UNIFORM,
        metavar="uniform|worst|FILE",
        canonical=canonical_routing,
        has_commas=True,
    )


def described(model: str | ModelSpec, like: str | None) -> ModelSpec:
    """The spec of a recipe's model; `like` stands in for an unknown name, and is in JSON next to its sizes."""
    if isinstance(model, str):
        return load_model(model, like)
    return model if model.like == like else replace(model, like=like)


ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(ModelOptions):
    """Everything that decides what a training step allocates.

    Attributes:
        optimizer: `default` becomes adamw-fused, or deepspeed-cpu-adam if the optimizer is offloaded.
        clip: None becomes 1.0 with DeepSpeed.
        deepspeed_config: a JSON file for DeepSpeed, or its content.
        kernels: the kernels that `liger` selects for this model.
        providers: the provider of each of these kernels.
    """

    liger: str = option(
        Group.KERNELS,
        "Fused kernels: none, all, no-flce, or names joined by '+' (see `ligerprof kernels`); a name can have"
        " its own provider, as in rms:liger+flce.",
        default="none",
        metavar="SET",
    )
    provider: str = option(
        Group.KERNELS,
        "Whose kernels, where --liger names no other: ligerprof, torch, liger, …",
        default="ligerprof",
        metavar="NAME",
    )
    flce_budget: categories.FlceBudget | int = option(
        Group.KERNELS,
        "Workspace of the fused loss.",
        default=categories.FlceBudget.BALANCED,
        is_size=True,
        metavar="lean|balanced|auto|SIZE",
        minimum=1,
        requirement="a positive size in bytes",
    )
    precision: categories.Precision = option(
        Group.TRAINING,
        "Dtypes of weights, gradients, moments and products. bf16=True of the Trainer is amp over fp32 weights and"
        " bf16-amp over weights loaded in bf16.",
        default=categories.Precision.AMP,
    )
    checkpointing: bool = option(Group.TRAINING, "Recompute decoder layers in the backward pass.", default=True)
    checkpoint_every: int = option(
        Group.TRAINING,
        "Checkpoint the first of each N decoder layers; the others are not recomputed.",
        default=1,
        minimum=1,
    )
    selective: str | None = option(
        Group.TRAINING,
        "Outputs that checkpointed layers keep instead of computing them again: of matrix products, of attention,"
        " torchtitan's choice, or of the operators that a file lists. Or runs of layers, such as"
        " 12*nothing,4*matmuls,4*everything, the last of which are not checkpointed.",
        metavar="matmuls|attention|torchtitan|FILE|RUNS",
        canonical=canonical_policy,
    )
    reentrant: bool = option(Group.TRAINING, "Use torch's older, reentrant checkpointing.", default=False)
    activation_offload: bool = option(
        Group.TRAINING,
        "Keep what autograd saves in main memory between the passes, as TRL and torchtune do.",
        default=False,
    )
    compile: bool = option(
        Group.TRAINING,
        "Compile the model with torch.compile; measured only, the estimate is of the step without it.",
        default=False,
        negatable=True,
    )
    optimizer: categories.Optimizer = option(
        Group.TRAINING,
        "Optimizer and its implementation.",
        default=categories.Optimizer.DEFAULT,
        default_text="adamw-fused; deepspeed-cpu-adam if DeepSpeed offloads the optimizer",
    )
    fp32_embedding_states: bool = option(
        Group.TRAINING,
        "8-bit optimizers: keep the moments of embeddings in fp32, as transformers' Trainer does.",
        default=False,
    )
    galore_rank: int = option(Group.TRAINING, "Rank of GaLore's projections.", default=128, minimum=1)
    clip: float | None = option(
        Group.TRAINING,
        "Largest gradient norm; 0 never clips.",
        minimum=0,
        requirement="a positive norm, or 0 not to clip",
        default_text="none; 1.0 with deepspeed",
    )
    attention: categories.Attention = option(
        Group.TRAINING,
        "Attention implementation.",
        default=categories.Attention.DEFAULT,
        default_text="sdpa; eager for models that transformers computes with eager alone",
    )
    loss: categories.Loss = option(
        Group.TRAINING,
        "Loss over the vocabulary: transformers' of today or of version 4.45, TRL's chunked_nll (up to version 1.14),"
        " TRL's loss in tiles (1.15 and later), torch's F.linear_cross_entropy, or torchtitan's chunked loss.",
        default=categories.Loss.HF,
    )
    lora: int | None = option(
        Group.TRAINING, "Train LoRA adapters of rank R on the linear layers.", metavar="R", minimum=1
    )
    qlora: int | None = option(
        Group.TRAINING, "Train LoRA adapters of rank R over 4-bit weights.", metavar="R", minimum=1
    )
    quantization: categories.Quantization | None = option(
        Group.TRAINING,
        "Format of the frozen weights under --lora: 8bit is LLM.int8 of bitsandbytes, 4bit is the same as --qlora.",
    )
    lora_targets: str = option(
        Group.TRAINING,
        "Layers that get adapters: all-linear, or module names joined by '+', such as q_proj+v_proj (peft's default);"
        " also lm_head and embed_tokens.",
        default=ALL_LINEAR,
        metavar="NAMES",
    )
    lora_dropout: float = option(
        Group.TRAINING, "Dropout of the adapters' inputs; TRL's default is 0.05.", default=0.0, minimum=0, below=1
    )
    dora: bool = option(
        Group.TRAINING, "Train a magnitude per output next to LoRA's matrices (DoRA of peft).", default=False
    )
    adapter_dtype: categories.AdapterDtype = option(
        Group.TRAINING, "Dtype of adapters: peft's float32, or bfloat16.", default=categories.AdapterDtype.FLOAT32
    )
    nested_quant: bool = option(Group.TRAINING, "QLoRA: quantize the scales of 4-bit weights, too.", default=True)
    modules_to_save: str | None = option(
        Group.TRAINING,
        "Modules trained in full next to adapters: names joined by '+', such as embed_tokens+lm_head (peft).",
        metavar="NAMES",
    )
    fp32_saved_modules: bool = option(
        Group.TRAINING,
        "Cast the modules of --modules-to-save to fp32, as LLaMA-Factory does.",
        default=False,
        negatable=True,
    )
    engine: categories.Engine = option(Group.SEVERAL_GPUS, "Library that trains.", default=categories.Engine.TORCH)
    zero: int = option(Group.SEVERAL_GPUS, "ZeRO stage.", default=0, metavar="0-3", minimum=0, maximum=3)
    offload: categories.Offload = option(
        Group.SEVERAL_GPUS,
        "What is kept in host memory: DeepSpeed's, or all with FSDP2.",
        default=categories.Offload.NONE,
    )
    nvme_path: str | None = option(Group.SEVERAL_GPUS, "Folder on the disk that --offload nvme uses.", metavar="DIR")
    deepspeed_config: str | Mapping[str, Any] | None = option(
        Group.SEVERAL_GPUS, "DeepSpeed's JSON, a file or its text, for what no option here decides.", metavar="FILE"
    )
    gpus: int = option(Group.SEVERAL_GPUS, "GPUs that train together.", default=1, minimum=1)
    reshard: bool = option(
        Group.SEVERAL_GPUS, "FSDP: free a layer's gathered weights between its forward and backward.", default=True
    )
    wrap: categories.Wrap = option(
        Group.SEVERAL_GPUS,
        "FSDP2: modules gathered together: each decoder layer and the rest, or those that accelerate 1.15 wraps.",
        default=categories.Wrap.LAYERS,
    )
    reduce_dtype: categories.ReduceDtype | None = option(
        Group.SEVERAL_GPUS,
        "FSDP: dtype of the gradients' reduction.",
        default_text="float32 with mixed, else the dtype of the gradients",
    )
    backward_prefetch: categories.BackwardPrefetch = option(
        Group.SEVERAL_GPUS,
        "FSDP1: gather the next layer's weights before a layer's gradients are computed, after, or not in advance.",
        default=categories.BackwardPrefetch.PRE,
    )
    grad_sync: categories.GradSync = option(
        Group.SEVERAL_GPUS,
        "DDP and FSDP: reduce gradients in the last accumulated micro-batch, or in every one.",
        default=categories.GradSync.LAST,
    )
    bucket_view: bool = option(
        Group.SEVERAL_GPUS,
        "DDP: gradients are views of the buckets that they are reduced in (gradient_as_bucket_view).",
        default=False,
    )
    replicate: int = option(
        Group.SEVERAL_GPUS,
        "FSDP2: copies of the sharded model (HSDP); each is sharded over gpus / replicate GPUs.",
        default=1,
        minimum=1,
    )
    save_whole: bool = option(
        Group.SEVERAL_GPUS,
        "FSDP and ZeRO-3: gather the weights to save the model whole, rather than save shards.",
        default=True,
    )
    gpu: str = option(
        Group.MEMORY,
        "GPU that a simulation or an estimate is for: a name from `ligerprof env`, or 24GiB:sm89.",
        default=DEFAULT_GPU,
        metavar="NAME|SIZE:smNN",
        canonical=lambda name: find_gpu(name).name,
    )
    memory_limit_bytes: int | None = option(
        Group.MEMORY,
        "Limit on reserved bytes, such as 24GiB.",
        flag="--memory-limit",
        is_size=True,
        minimum=MIB,
        requirement="at least 1 MiB, with a unit as in 24GiB",
    )
    host_memory_bytes: int | None = option(
        Group.MEMORY,
        "Limit on the main memory that the offload of all GPUs takes, such as 256GiB.",
        flag="--host-memory",
        is_size=True,
        minimum=MIB,
        requirement="at least 1 MiB, with a unit as in 256GiB",
    )
    alloc_conf: str | None = option(Group.MEMORY, "PYTORCH_CUDA_ALLOC_CONF of the run.", has_commas=True)
    lengths: str | None = option(
        Group.LENGTHS,
        "Judge a whole run over sequences of these lengths, one per line; longer ones are cut to --seq.",
        metavar="FILE",
    )
    length_order: categories.LengthOrder = option(
        Group.LENGTHS,
        "Order of the sequences: random, grouped by length as the Trainer does, or as in the file.",
        default=categories.LengthOrder.RANDOM,
    )
    pad_to_multiple_of: int = option(
        Group.LENGTHS, "Pad the longest sequence of a batch to a multiple of N tokens.", default=1, minimum=1
    )
    packing_strategy: categories.PackingStrategy = option(
        Group.LENGTHS,
        "How --packing fills rows of --seq tokens: best fit decreasing, or one sequence after another.",
        default=categories.PackingStrategy.BFD,
    )
    spec: ModelSpec = field(init=False, repr=False)
    kernels: tuple[str, ...] = field(init=False)
    providers: Mapping[str, str] = field(init=False, repr=False, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._settle("spec", described(self.model, self.like))
        self._settle("like", self.spec.like)
        self._settle("providers", select_providers(self.liger, self.provider, self.spec))
        self._settle("kernels", tuple(self.providers))
        if self.quantization is categories.Quantization.FOUR_BIT and (self.lora is None) is not (self.qlora is None):
            # --lora R --quantization 4bit is --qlora R
            self._settle("qlora", self.qlora or self.lora)
            self._settle("lora", None)
            self._settle("quantization", None)
        if self.attention is categories.Attention.DEFAULT:
            self._settle(
                "attention", categories.Attention.EAGER if self.spec.needs_eager else categories.Attention.SDPA
            )
        if self.optimizer is categories.Optimizer.DEFAULT:
            on_gpu = self.offload is categories.Offload.NONE or self.engine is not categories.Engine.DEEPSPEED
            self._settle(
                "optimizer", categories.Optimizer.ADAMW_FUSED if on_gpu else categories.Optimizer.DEEPSPEED_CPU_ADAM
            )
        if self.clip is None and self.engine is categories.Engine.DEEPSPEED:
            self._settle("clip", 1.0)

    @property
    def packed_bits(self) -> int | None:
        """Bits of the frozen weights of linear layers under adapters: 4, 8, or None if they are not quantized."""
        if self.qlora is not None:
            return 4
        return 8 if self.quantization is categories.Quantization.EIGHT_BIT else None

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.batch * self.seq

    @property
    def rows(self) -> int:
        """Rows of the tensors that the model is called with: the sequences, or one if they are packed."""
        return 1 if self.packing else self.batch

    @property
    def row_tokens(self) -> int:
        """Tokens of each row."""
        return self.tokens // self.rows

    @property
    def packed_lengths(self) -> tuple[int, ...]:
        """Tokens of each document of a packed row: at least two documents, where there are two tokens."""
        if self.batch > 1 or self.seq == 1:
            return (self.seq,) * self.batch
        return (self.seq // 2, self.seq - self.seq // 2)

    @property
    def holds_several_documents(self) -> bool:
        """Whether a row holds documents that attention must keep apart."""
        return self.packing and len(self.packed_lengths) > 1

    @property
    def runs_experts_in_turn(self) -> bool:
        """Whether one expert runs after another, so that sizes depend on the routing."""
        row = self.spec.architecture.mlp.experts
        if not self.spec.experts or row is None or row.multiplies_all:
            return False
        given = self.experts or self.spec.experts_implementation
        return given == categories.ExpertsImplementation.EAGER

    @property
    def padded_tokens(self) -> int:
        """Tokens of padding at the end of each sequence."""
        return round(self.padding * self.seq)

    @property
    def labelled_tokens(self) -> int:
        """Tokens of one micro-batch whose successor has a label; the last one of a document has none."""
        if self.packing:
            return self.tokens - len(self.packed_lengths)
        return self.batch * max(self.seq - 1 - self.padded_tokens, 0)

    @property
    def gpu_spec(self) -> GpuSpec:
        """The GPU that a simulation or an estimate is for."""
        return find_gpu(self.gpu)

    def checkpoints_layer(self, index: int) -> bool:
        """Whether a decoder layer is checkpointed: each N-th from the first, as by transformers' `every_n_layers`."""
        run = self.run_of_layer(index)
        return (
            self.checkpointing
            and index % self.checkpoint_every == 0
            and (run is None or run.name != saved_tensors.EVERYTHING)
        )

    def run_of_layer(self, index: int) -> saved_tensors.LayerRun | None:
        """The run of `selective` that a decoder layer belongs to; None without one."""
        end = 0
        for run in () if self.selective is None else saved_tensors.layer_runs(self.selective):
            end += run.layers
            if not run.layers or index < end:
                return run
        return None

    def policy_of_layer(self, index: int) -> saved_tensors.SavePolicy | None:
        """Which outputs a checkpointed layer keeps; None if it keeps none."""
        run = self.run_of_layer(index)
        return None if run is None or run.policy is None or not run.policy.every else run.policy

    @property
    def adapted_layers(self) -> tuple[str, ...]:
        """Module names of the linear layers that LoRA's or QLoRA's adapters are trained on."""
        if self.lora_targets == ALL_LINEAR:
            return self.spec.architecture.lora_targets
        return tuple(self.lora_targets.replace(",", "+").split("+"))

    @property
    def adapts_head(self) -> bool:
        """Whether LoRA adapts the output layer, which is not among all-linear."""
        return self.spec.architecture.head.rpartition(".")[2] in self.adapted_layers

    @property
    def adapts_embedding(self) -> bool:
        """Whether LoRA adapts the embedding of tokens."""
        return self.spec.architecture.embedding.rpartition(".")[2] in self.adapted_layers

    @property
    def saved_modules(self) -> tuple[str, ...]:
        """Names of the modules that peft copies and trains in full next to adapters."""
        return () if self.modules_to_save is None else tuple(self.modules_to_save.replace(",", "+").split("+"))

    def trains_in_full(self, module: str) -> bool:
        """Whether peft trains a copy of a module: its path ends with one of the names (`_set_trainable`)."""
        return bool(self.saved_modules) and module.endswith(self.saved_modules)

    @property
    def autocast(self) -> str | None:
        """The dtype that autocast computes in, `bfloat16` or `float16`, or None."""
        return self.precision.autocast

    @property
    def weight_dtype(self) -> str:
        """The dtype of the module's parameters, as torch names it; under FSDP that of the shards."""
        return "float32" if self.casts_gathered else self.precision.weight_dtype

    @property
    def compute_dtype(self) -> str:
        """The dtype of matrix products, as torch names it."""
        return self.precision.compute_dtype

    @property
    def casts_gathered(self) -> bool:
        """Whether FSDP gathers fp32 shards in 16 bits, as its mixed-precision policy does."""
        return self.engine.is_fsdp and self.precision.is_mixed

    @property
    def gathered_dtype(self) -> str:
        """The dtype of FSDP's gathered weights and of their gradients, as torch names it."""
        return self.precision.weight_dtype

    @property
    def reduction_dtype(self) -> str:
        """The dtype that FSDP reduces gradients in, as torch names it."""
        if self.reduce_dtype is not None:
            return self.reduce_dtype.value
        return categories.ReduceDtype.FLOAT32.value if self.casts_gathered else self.gathered_dtype

    @property
    def shards(self) -> int:
        """Number of GPUs that each weight is sharded over; 1 for engines that do not shard it."""
        return self.gpus // self.replicate if self.engine.is_fsdp else 1

    @property
    def provider_names(self) -> str:
        """The provider of all kernels, or the providers joined by `+`."""
        return "+".join(dict.fromkeys(self.providers.values())) or self.provider


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """Where a step runs, and how often. The steady step allocates the same bytes whatever these are."""

    device: categories.Device = option(Group.RUN, "Where the step runs.", default=categories.Device.AUTO)
    warmup: int = option(
        Group.RUN,
        "Steps before the profiled one.",
        default=1,
        default_text="1; 2 with ddp",
        minimum=1,
        requirement="at least 1: the first step is not the steady one",
    )
    repeats: int = option(Group.RUN, "Steps that are timed.", default=10, minimum=1)
