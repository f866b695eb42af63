"""A loop over longer and longer sequences, with 6 GiB: memory runs out, and nothing catches it."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
if device == "cuda":
    torch.cuda.set_per_process_memory_fraction(6 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
config = LlamaConfig(
    hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16, vocab_size=32000
)
model = LlamaForCausalLM(config).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
lengths = [128, 256, 512, 1024, 1536, 2048, 3072, 4096] if device == "cuda" else [8, 16]
for step, length in enumerate(lengths):
    tokens = torch.randint(32000, (2, length), device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} length {length} loss {loss.item():.3f}", flush=True)
