"""The categories of a recipe, each with the facts that follow from a member alone."""

from ligerprof.torch_memory.optimizers import OPTIMIZERS, OptimizerRow
from ligerprof.words import Word


class Precision(Word):
    """Dtypes of weights, gradients, moments and products."""

    AMP = "amp"
    AMP_FP16 = "amp-fp16"
    BF16_AMP = "bf16-amp"
    FP16_AMP = "fp16-amp"
    MIXED = "mixed"
    MIXED_FP16 = "mixed-fp16"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def autocast(self) -> str | None:
        """The dtype that autocast computes in, as torch names it, or None without autocast."""
        if self in (Precision.AMP_FP16, Precision.FP16_AMP):
            return "float16"
        return "bfloat16" if self in (Precision.AMP, Precision.BF16_AMP) else None

    @property
    def weight_dtype(self) -> str:
        """The dtype of the module's parameters, as torch names it."""
        if self in (Precision.FP32, Precision.AMP, Precision.AMP_FP16):
            return "float32"
        return "float16" if self.uses_float16 else "bfloat16"

    @property
    def compute_dtype(self) -> str:
        """The dtype of matrix products, as torch names it."""
        return self.autocast or self.weight_dtype

    @property
    def is_mixed(self) -> bool:
        """Whether a training step computes with 16-bit copies of fp32 weights that the engine keeps."""
        return self in (Precision.MIXED, Precision.MIXED_FP16)

    @property
    def uses_float16(self) -> bool:
        """Whether the 16-bit dtype is float16; its losses are scaled."""
        return self in (Precision.AMP_FP16, Precision.FP16_AMP, Precision.MIXED_FP16, Precision.FP16)


class Optimizer(Word):
    """The optimizer and its implementation."""

    ADAMW_FUSED = "adamw-fused"
    ADAMW_FOREACH = "adamw-foreach"
    ADAMW = "adamw"
    ADAMW_8BIT = "adamw-8bit"
    PAGED_ADAMW = "paged-adamw"
    PAGED_ADAMW_8BIT = "paged-adamw-8bit"
    ADAFACTOR = "adafactor"
    ADAFACTOR_HF = "adafactor-hf"
    LION = "lion"
    ADEMAMIX = "ademamix"
    MUON = "muon"
    GALORE = "galore"
    SGD = "sgd"
    SGD_MOMENTUM = "sgd-momentum"
    NONE = "none"
    DEEPSPEED_CPU_ADAM = "deepspeed-cpu-adam"
    # replaced by an optimizer when a recipe is made
    DEFAULT = "default"

    @property
    def row(self) -> OptimizerRow:
        """Its memory, and what it goes with."""
        return OPTIMIZERS[self]


class Attention(Word):
    """The attention implementation, as transformers names it."""

    SDPA = "sdpa"
    EAGER = "eager"
    FLASH = "flash"
    # resolved by the recipe: sdpa, or eager for models that transformers computes with eager alone
    DEFAULT = "default"


class ExpertsImplementation(Word):
    """The implementation of a mixture of experts, as transformers names it."""

    GROUPED_MM = "grouped_mm"
    EAGER = "eager"


class Loss(Word):
    """The loss over the vocabulary: transformers' today or that of version 4.45, TRL's, torch's or torchtitan's."""

    HF = "hf"
    HF_4_45 = "hf-4.45"
    CHUNKED_NLL = "chunked-nll"
    TORCH_LINEAR = "torch-linear"
    TITAN_CHUNKED = "titan-chunked"
    TRL_TILED = "trl-tiled"

    @property
    def is_chunked(self) -> bool:
        """Whether it computes a part of the logits at a time."""
        return self not in (Loss.HF, Loss.HF_4_45)


class LengthOrder(Word):
    """The order in which a sampler takes sequences."""

    RANDOM = "random"
    GROUPED = "grouped"
    FILE = "file"


class PackingStrategy(Word):
    """How sequences are put into rows: best fit decreasing, or one after another."""

    BFD = "bfd"
    SEQUENTIAL = "sequential"


class Engine(Word):
    """The library that runs the training step."""

    TORCH = "torch"
    DDP = "ddp"
    FSDP1 = "fsdp1"
    FSDP2 = "fsdp2"
    DEEPSPEED = "deepspeed"

    @property
    def is_fsdp(self) -> bool:
        """Whether torch shards weights, gradients and states, and gathers the weights of one module at a time."""
        return self in (Engine.FSDP1, Engine.FSDP2)

    @property
    def syncs_gradients(self) -> bool:
        """Whether it can leave out the reduction of gradients in a micro-batch (`no_sync`)."""
        return self is Engine.DDP or self.is_fsdp


class Wrap(Word):
    """Which modules FSDP2 shards as groups: decoder layers and the root, or the groups of accelerate 1.15."""

    LAYERS = "layers"
    ACCELERATE = "accelerate"


class BackwardPrefetch(Word):
    """When FSDP1's backward gathers the next layer: before a layer's gradients, after them, or in its turn."""

    PRE = "pre"
    POST = "post"
    NONE = "none"


class ReduceDtype(Word):
    """The dtype that FSDP reduces gradients in, as torch names it."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class AdapterDtype(Word):
    """The dtype of adapters, their gradients and their moments, as torch names it."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Quantization(Word):
    """The format of frozen weights under adapters: NF4 or LLM.int8 of bitsandbytes."""

    FOUR_BIT = "4bit"
    EIGHT_BIT = "8bit"


class Step(Word):
    """The steps of a run that differ in memory: the first has no optimizer states, DDP's second rebuilds buckets."""

    FIRST = "first"
    SECOND = "second"
    STEADY = "steady"


class GradSync(Word):
    """Which accumulated micro-batches reduce their gradients over the GPUs."""

    LAST = "last"
    EVERY = "every"


class Offload(Word):
    """What DeepSpeed or FSDP2 keeps outside GPU memory."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    ALL = "all"
    NVME = "nvme"

    @property
    def device(self) -> str:
        """DeepSpeed's name of the device that the optimizer state is on."""
        return {Offload.NONE: "none", Offload.NVME: "nvme"}.get(self, "cpu")

    @property
    def moves_parameters(self) -> bool:
        """Whether the parameters leave the GPU as well."""
        return self in (Offload.ALL, Offload.NVME)


class Device(Word):
    """Where the step runs; `auto` is CUDA where a device is present, else the simulator."""

    AUTO = "auto"
    CUDA = "cuda"
    SIMULATED = "simulated"


class FlceBudget(Word):
    """Workspaces of the fused loss that have a name; other sizes are given in bytes."""

    LEAN = "lean"
    BALANCED = "balanced"
    AUTO = "auto"


class Axis(Word):
    """The two sizes of a micro-batch, by the recipe field that holds each."""

    BATCH = "batch"
    SEQ = "seq"
