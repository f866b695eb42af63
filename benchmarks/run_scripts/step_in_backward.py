"""Each weight has an optimizer that steps as soon as its gradient is complete, inside backward."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8, vocab_size=16000
)
model = LlamaForCausalLM(config).cuda()
optimizers = {weight: torch.optim.Adafactor([weight]) for weight in model.parameters()}


def update(weight: torch.Tensor) -> None:
    optimizers[weight].step()
    optimizers[weight].zero_grad()


for weight in model.parameters():
    weight.register_post_accumulate_grad_hook(update)
for _ in range(5):
    tokens = torch.randint(16000, (4, 256), device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
print("PEAK", torch.cuda.max_memory_allocated())
