"""The measured programs: name, what runs (a file here or a module), small sizes to try it on a CPU, environment."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    name: str
    argv: str
    tiny: str | None = None  # arguments that end the command on a CPU; None: needs a GPU
    env: dict[str, str] = field(default_factory=dict)


EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
SMALL = "--layers 2 --width 128 --batch 2"
PROGRAMS = [
    Case("scaler-fp16", "scaler_fp16.py", f"{SMALL} --seq 32 --vocabulary 200"),
    Case("foreach-off", "foreach_off.py", f"{SMALL} --seq 32"),
    Case("checkpoint-plain", "checkpointed.py --kind plain", f"{SMALL} --seq 32"),
    Case("checkpoint-reentrant", "checkpointed.py --kind reentrant", f"{SMALL} --seq 32"),
    Case("checkpoint-sequential", "checkpointed.py --kind sequential", "--layers 4 --width 128 --batch 2 --seq 32"),
    Case("checkpoint-selective", "selective.py", f"{SMALL} --seq 32"),
    Case("save-on-cpu", "offloaded.py", f"{SMALL} --seq 32"),
    Case("accelerate-loop", "accelerate_loop.py {data}/smol {data}/text", "--rows 8"),
    Case("trainer-causal", "trainer_causal.py", f"{SMALL} --seq 32 --vocabulary 200"),
    Case("trainer-adafactor", "trainer_causal.py --optim adafactor --seq 1024", f"{SMALL} --seq 32 --vocabulary 200"),
    Case("trainer-classify", "trainer_classify.py", f"{SMALL} --seq 32"),
    Case("trainer-t5", "trainer_t5.py", f"{SMALL} --source 32 --target 8"),
    Case("peft-ia3", "peft_trainer.py {data}/qwen2 --method ia3", "--batch 2 --seq 32"),
    Case("peft-prompt", "peft_trainer.py {data}/smol --method prompt", "--batch 2 --seq 32"),
    Case("peft-prefix", "peft_trainer.py {data}/qwen2 --method prefix", "--batch 2 --seq 32"),
    Case("peft-lora-embeddings", "peft_trainer.py {data}/smol --method lora-embeddings", "--batch 2 --seq 32"),
    Case("lightning-bf16-true", "lightning_own.py", f"{SMALL} --seq 32"),
    Case("lightning-fp16-mixed", "lightning_own.py --precision 16-mixed", f"{SMALL} --seq 32 --precision bf16-mixed"),
    Case("resnet-channels-last", "resnet.py", "--batch 2 --size 64 --depths 1 1 1 1 --width 16"),
    Case("unet", "unet.py", "--batch 2 --size 16 --width 64"),
    Case("qwen2-vl", "vision_language.py", f"{SMALL} --text 16 --side 8 --depth 1"),
    Case(
        "qwen2-vl-frozen",
        "vision_language.py --freeze --batch 8",
        "--layers 2 --width 128 --text 16 --side 8 --depth 1",
    ),
    Case("llava-lora", "llava.py", f"{SMALL} --depth 1 --size 56"),
    Case("lstm", "lstm.py", "--width 64 --batch 2 --piece 16 --vocabulary 100"),
    Case("nn-transformer", "translate.py", "--layers 1 --width 64 --batch 2 --seq 16 --vocabulary 100"),
    Case("oom-growing", "oom_growing.py"),
    Case("oom-optimizer", "oom_optimizer.py"),
    Case("oom-halved", "oom_halved.py"),
    Case("auto-find-batch-size", "auto_batch.py"),
    Case("liger-loop", "liger_loop.py"),
    Case("own-kernels", "own_kernels.py"),
    Case("lengths", "lengths.py", f"{SMALL} --longest 64"),
    Case("lengths-expandable", "lengths.py", f"{SMALL} --longest 64", EXPANDABLE),
    Case("sentence-pairs", "sentences.py", "--layers 1 --width 64 --batch 4 --seq 16"),
    Case("distillation", "distill.py", "--layers 1 --width 128 --batch 2 --seq 16"),
    Case("prefetched-streams", "prefetched.py"),
    Case("mixtral", "mixture.py", f"{SMALL} --seq 16"),
    Case("timm-convnext", "timm_convnext.py"),
    Case("timm-vit", "timm_vit.py"),
    Case("rl-loop", "rl_loop.py"),
    Case("lightning-fit", "lightning_fit.py"),
]
TRL = [
    "sft-completion",
    "sft-dora",
    "sft-assistant",
    "sft-evaluated",
    "sft-dft",
    "sft-liger",
    "dpo-reference",
    "dpo-precomputed",
    "reward-pairs",
    "grpo-reference",
    "rloo-lora",
    "kto-lora",
    "sft-lora-1b",
    "sft-full-1b-liger",
    "sft-moe",
    "sft-packing",
    "sft-nll-reentrant",
    "dpo-lora-1b",
]
CASES = {case.name: case for case in PROGRAMS} | {
    name: Case(name, f"trl.scripts.{name.split('-')[0]} --config {{data}}/configs/{name}.yaml", "") for name in TRL
}
# programs whose smallest memory is searched
BORDERS = ["scaler-fp16", "trainer-causal", "unet", "lengths", "sft-completion"]
