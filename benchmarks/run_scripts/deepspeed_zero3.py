"""DeepSpeed ZeRO-3 with accumulation and a 16-bit checkpoint, under its launcher."""

import tempfile
import time

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SETTINGS = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "gradient_clipping": 1.0,
}
config = LlamaConfig(
    hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8, vocab_size=16000
)
engine, _, _, _ = deepspeed.initialize(model=LlamaForCausalLM(config), config=SETTINGS)
for _ in range(8):
    begin = time.perf_counter()
    for _ in range(2):
        tokens = torch.randint(16000, (2, 512), device=engine.device)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    torch.cuda.synchronize()
    print("STEP", time.perf_counter() - begin)
with tempfile.TemporaryDirectory() as folder:
    engine.save_16bit_model(folder)
print("PEAK", torch.cuda.max_memory_allocated())
