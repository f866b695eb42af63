"""Programs under torch.compile: measured as they are, and simulated with Inductor's own code."""

from cases import Case

_SFT = (
    "trl.scripts.sft --model_name_or_path {data}/qwen2 --dataset_name {data}/text --output_dir /tmp/sft-compiled"
    " --torch_compile true --max_steps 3 --max_length 512 --bf16 true --packing true --attn_implementation sdpa"
    " --per_device_train_batch_size 4 --save_strategy no --report_to none --seed 1"
)
PROGRAMS = [
    Case("gpt", "compiled/gpt.py"),
    Case("gpt-checkpointed", "compiled/gpt.py --checkpoint"),
    Case("gpt-layers", "compiled/gpt.py --compile layers --checkpoint"),
    Case("gpt-layers-plain", "compiled/gpt.py --compile layers --layers 6"),
    Case("gpt-loss", "compiled/gpt.py --compile loss"),
    Case("gpt-optimizer", "compiled/gpt.py --compile optimizer --layers 6"),
    Case("gpt-lengths", "compiled/gpt.py --lengths 256,512,1024,768,1000 --layers 6"),
    Case("gpt-budget", "compiled/gpt.py --budget 0.5"),
    Case("causal", "compiled/causal.py {data}/qwen2"),
    Case("causal-checkpointed", "compiled/causal.py {data}/qwen3 --checkpoint"),
    Case("causal-lora", "compiled/causal.py {data}/smol --lora --accumulation 2"),
    Case("convnet", "compiled/convnet.py"),
    Case("flex", "compiled/flexible.py"),
    Case("torchao-adamw-8bit", "torchao_adamw.py {data}/qwen2"),
    Case("torchao-adamw-4bit", "torchao_adamw.py {data}/smol --bits 4"),
    Case("float8", "float8.py {data}/qwen2 --compile"),
    Case("float8-rowwise", "float8.py {data}/qwen2 --recipe rowwise --compile --checkpoint"),
    Case("float8-uncompiled", "float8.py {data}/qwen2"),
    Case("float8-rowwise-uncompiled", "float8.py {data}/qwen2 --recipe rowwise --checkpoint"),
    Case("sft", _SFT),
]
for case in PROGRAMS:
    # Inductor remembers which kernels were the fastest
    case.env["TORCHINDUCTOR_CACHE_DIR"] = f"/tmp/inductor-{case.name}"
CASES = {case.name: case for case in PROGRAMS}
BORDERS: list[str] = []
