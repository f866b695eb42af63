"""Fine-tuning with peft's LoRA under gradient checkpointing, as TRL's SFT does it."""

import time

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16, vocab_size=32000
)
model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
model.train()
for _ in range(20):
    begin = time.perf_counter()
    tokens = torch.randint(32000, (4, 1024), device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    print("STEP", time.perf_counter() - begin)
print("PEAK", torch.cuda.max_memory_allocated())
