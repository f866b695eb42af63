"""Programs of single libraries: measured with the library itself, and simulated with code that was frozen before."""

from cases import Case

_SFT = (
    "trl.scripts.sft --model_name_or_path {data}/llama1b --dataset_name {data}/text --output_dir /tmp/sft-qlora"
    " --load_in_4bit --use_peft --lora_target_modules all-linear --max_steps 3 --max_length 1024 --bf16 true"
    " --per_device_train_batch_size 4 --save_strategy no --report_to none --seed 1"
)
PROGRAMS = [
    Case("qlora-nested", "qlora.py {data}/llama1b --seq 1024"),
    Case("qlora-nf4-wide", "qlora.py {data}/qwen2 --weights nf4 --compute float32 --optim adamw_8bit --seq 256"),
    Case("qlora-fp4-fp16", "qlora.py {data}/smol --weights fp4 --compute float16 --optim paged_lion_8bit"),
    Case("qlora-plain", "qlora.py {data}/smol --no-checkpoints --optim adamw_torch --batch 2"),
    Case("int8-lora", "qlora.py {data}/llama1b --weights int8 --optim adamw_torch"),
    Case("int8-lora-plain", "qlora.py {data}/smol --weights int8 --no-checkpoints --optim adamw_8bit"),
    Case("sft-qlora", _SFT),
    Case("adamw-8bit", "low_bit_optimizers.py {data}/qwen2"),
    Case("paged-adamw-8bit", "low_bit_optimizers.py {data}/qwen2 --optimizer PagedAdamW8bit"),
    Case("paged-adamw", "low_bit_optimizers.py {data}/smol --optimizer PagedAdamW32bit"),
    Case("lion", "low_bit_optimizers.py {data}/smol --optimizer Lion"),
    Case("ademamix-8bit", "low_bit_optimizers.py {data}/smol --optimizer AdEMAMix8bit"),
    Case("lion-8bit", "low_bit_optimizers.py {data}/smol --optimizer Lion8bit"),
    Case("lamb", "low_bit_optimizers.py {data}/smol --optimizer LAMB32bit"),
    Case("torchao-adamw-8bit", "torchao_adamw.py {data}/qwen2"),
    Case("zero-2-offloaded", "zero_trainer.py {data}/smol"),
    Case("zero-3-whole", "zero_trainer.py {data}/smol --stage 3 --no-offload"),
    Case("sentences-cached", "sentences_cached.py"),
    Case("timm-maxvit", "timm_maxvit.py"),
    Case("diffusers-unet", "diffusers_unet.py"),
    Case("wavlm-verify", "speech_verify.py"),
    Case("flex-eager", "flex.py"),
]
CASES = {case.name: case for case in PROGRAMS}
BORDERS: list[str] = []
