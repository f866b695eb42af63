"""Training with samples that the model generates between the steps."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8, vocab_size=16000
)
model = LlamaForCausalLM(config).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    prompts = torch.randint(16000, (32, 16), device="cuda")
    model.eval()
    with torch.no_grad():
        samples = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=32, do_sample=True, pad_token_id=0
        )
    model.train()
    model(input_ids=samples, labels=samples).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("PEAK", torch.cuda.max_memory_allocated())
