"""The categories of a recipe, each with the facts that follow from a member alone."""

from ligerprof.words import Word


class Precision(Word):
    """Dtypes of weights, gradients, moments and products."""

    AMP = "amp"
    AMP_FP16 = "amp-fp16"
    BF16_AMP = "bf16-amp"
    MIXED = "mixed"
    MIXED_FP16 = "mixed-fp16"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def autocast(self) -> str | None:
        """The dtype that autocast computes in, as torch names it, or None without autocast."""
        return {Precision.AMP: "bfloat16", Precision.BF16_AMP: "bfloat16", Precision.AMP_FP16: "float16"}.get(self)

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
        """Whether 16-bit weights have an fp32 master copy, as DeepSpeed keeps one."""
        return self in (Precision.MIXED, Precision.MIXED_FP16)

    @property
    def uses_float16(self) -> bool:
        """Whether the 16-bit dtype is float16; its losses are scaled."""
        return self in (Precision.AMP_FP16, Precision.MIXED_FP16, Precision.FP16)


class Optimizer(Word):
    """The optimizer and its implementation."""

    ADAMW_FUSED = "adamw-fused"
    ADAMW_FOREACH = "adamw-foreach"
    ADAMW_8BIT = "adamw-8bit"
    GALORE = "galore"
    SGD = "sgd"
    NONE = "none"
    DEEPSPEED_CPU_ADAM = "deepspeed-cpu-adam"
    # replaced by an optimizer when a recipe is made
    DEFAULT = "default"

    @classmethod
    def choices(cls) -> tuple["Optimizer", ...]:
        """Every optimizer; a user gets the default one by leaving the option out."""
        return tuple(member for member in cls if member is not Optimizer.DEFAULT)

    @property
    def is_adam(self) -> bool:
        """Whether it is Adam with two full moments."""
        return self in (Optimizer.ADAMW_FUSED, Optimizer.ADAMW_FOREACH, Optimizer.DEEPSPEED_CPU_ADAM)

    @property
    def compresses_moments(self) -> bool:
        """Whether moments take less than two full copies of the parameters."""
        return self in (Optimizer.ADAMW_8BIT, Optimizer.GALORE)


class Attention(Word):
    """The attention implementation, as transformers names it."""

    SDPA = "sdpa"
    EAGER = "eager"
    FLASH = "flash"


class Loss(Word):
    """The loss over the vocabulary: transformers' today, or that of version 4.45."""

    HF = "hf"
    HF_4_45 = "hf-4.45"


class Engine(Word):
    """The library that runs the training step."""

    TORCH = "torch"
    DEEPSPEED = "deepspeed"


class Offload(Word):
    """What DeepSpeed keeps outside GPU memory."""

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
