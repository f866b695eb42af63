"""A plain loop over a transformers Llama with AdamW."""

import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16, vocab_size=32000
)
model = LlamaForCausalLM(config).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(40):
    begin = time.perf_counter()
    tokens = torch.randint(32000, (4, 512), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    print("STEP", time.perf_counter() - begin)
print("PEAK", torch.cuda.max_memory_allocated())
