"""A compiled model; graph breaks and compilations are printed."""

import time

import torch
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8, vocab_size=8000
)
model = torch.compile(LlamaForCausalLM(config).cuda())
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(24):
    begin = time.perf_counter()
    tokens = torch.randint(8000, (4, 512), device="cuda")
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    print("STEP", time.perf_counter() - begin)
print("GRAPHS", counters["stats"].get("unique_graphs"), "BREAKS", sum(counters["graph_break"].values()))
print("PEAK", torch.cuda.max_memory_allocated())
