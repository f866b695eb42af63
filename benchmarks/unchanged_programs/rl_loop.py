"""Policy gradients by hand: a policy generates, a frozen reference weighs the tokens, AdamW steps."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.for_model(
    "qwen3",
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    tie_word_embeddings=True,
)
with torch.device("cuda"):
    policy = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
reference.requires_grad_(requires_grad=False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)


def log_probabilities(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return torch.gather(model(tokens).logits[:, :-1].float().log_softmax(-1), 2, tokens[:, 1:, None])[..., 0]


for _ in range(3):
    prompts = torch.randint(0, 151936, (8, 64), device="cuda")
    policy.eval()
    with torch.no_grad():
        tokens = policy.generate(prompts, max_new_tokens=64, min_new_tokens=64, do_sample=True, pad_token_id=0)
    policy.train()
    rewards = torch.randn(8, device="cuda")
    ours = log_probabilities(policy, tokens)
    with torch.no_grad():
        theirs = log_probabilities(reference, tokens)
    penalty = torch.exp(theirs - ours) - (theirs - ours) - 1
    loss = (-(rewards[:, None] * torch.exp(ours - ours.detach())) + 0.04 * penalty)[:, 63:].mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item())
