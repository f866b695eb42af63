"""Memory runs out in the seventh step, in which the sequences are long; with FRACTION of the device."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.cuda.set_per_process_memory_fraction(3 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
config = LlamaConfig(
    hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8, vocab_size=32000
)
model = LlamaForCausalLM(config).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10):
    tokens = torch.randint(32000, (4, 256 if step < 6 else 4096), device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
