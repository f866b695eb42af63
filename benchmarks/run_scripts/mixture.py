"""A mixture of experts that routes tokens to its experts in a Python loop."""

import time

import torch
from transformers import MixtralConfig, MixtralForCausalLM

torch.manual_seed(0)
config = MixtralConfig(
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_local_experts=8,
    vocab_size=16000,
)
model = MixtralForCausalLM(config).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(12):
    begin = time.perf_counter()
    tokens = torch.randint(16000, (4, 512), device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    print("STEP", time.perf_counter() - begin)
print("PEAK", torch.cuda.max_memory_allocated())
