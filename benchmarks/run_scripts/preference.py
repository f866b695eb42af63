"""Preference optimization: a policy and a frozen reference that runs without gradients in each step."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8, vocab_size=16000
)
policy = LlamaForCausalLM(config).cuda()
reference = LlamaForCausalLM(config).cuda().eval()
reference.load_state_dict(policy.state_dict())
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5)


def log_probability(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
    return logits.gather(-1, tokens[:, 1:, None]).sum((1, 2))


for _ in range(5):
    pairs = torch.randint(16000, (2, 2, 256), device="cuda")
    chosen, rejected = (log_probability(policy, tokens) for tokens in pairs)
    with torch.no_grad():
        base = log_probability(reference, pairs[0]) - log_probability(reference, pairs[1])
    loss = -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected - base)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("PEAK", torch.cuda.max_memory_allocated())
