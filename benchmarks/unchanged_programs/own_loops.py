"""Post-training loops by hand, each with one mistake that runs out of memory, and with the changes that may mend it.

own_loops.py FAULT [--change NAME]
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, Qwen3Config

VOCAB, STEPS, BATCH = 32000, 6, 8
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument(
    "fault",
    choices=("growing-cache", "logged-tensors", "scored-with-graph", "doubled-logits", "fp32-reference", "evaluation"),
)
parser.add_argument("--change", default="")
options = parser.parse_args()
fault, change = options.fault, options.change
# where the optimizer's step would need more than the fault does
extra = "fused-optimizer" if fault == "fp32-reference" else ""
torch.manual_seed(0)


def qwen(dtype: torch.dtype = torch.bfloat16, width: int = 512, layers: int = 8) -> torch.nn.Module:
    config = Qwen3Config(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        head_dim=64,
        vocab_size=VOCAB,
    )
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def log_probs_of(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """Of each token, [B, T - 1]."""
    if change == "label-logits":
        from ligerprof.kernels.linear_cross_entropy import scores

        hidden = model.model(tokens).last_hidden_state[:, :-1]
        return scores.linear_log_probs(hidden, model.lm_head.weight, tokens[:, 1:].contiguous()).log_probs
    logits = model(tokens, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]


def halves(tokens: Tensor) -> Iterator[Tensor]:
    """The micro-batches of a step."""
    yield from tokens.chunk(2) if change == "half-batch" else (tokens,)


def updated(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Its optimizer; checkpoints if they are the change."""
    if change == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True if "fused-optimizer" in (change, extra) else None)


def growing_cache() -> None:
    """Rollouts keep the caches of all earlier ones, for prefixes that may come again."""
    policy = qwen(layers=4)
    optimizer, caches = updated(policy), []
    for _ in range(STEPS):
        prompts = torch.randint(0, VOCAB, (16, 1024), device="cuda")
        policy.eval()
        with torch.no_grad():
            for part in prompts.chunk(2) if change == "half-prompts" else (prompts,):
                out = policy.generate(
                    part, max_new_tokens=8, min_new_tokens=8, return_dict_in_generate=True, pad_token_id=0
                )
                if change not in ("kept-outputs", "kept-cache"):
                    caches.append(out.past_key_values)
        policy.train()
        tokens = out.sequences[:2, -64:]
        log_probs_of(policy, tokens).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def logged_tensors() -> None:
    """Metrics are collected as tensors, with the graphs that they hang on."""
    policy = qwen()
    optimizer, logged = updated(policy), []
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCAB, (BATCH, 256), device="cuda")
        advantages = torch.randn(BATCH, 1, device="cuda")
        log_probs = log_probs_of(policy, tokens)
        entropy = -log_probs.mean()
        logged.append(entropy.item() if change == "kept-outputs" else entropy)
        loss = -(log_probs * advantages).mean()
        loss.backward(retain_graph=True)
        del log_probs, loss, entropy
        optimizer.step()
        optimizer.zero_grad()


def scored_with_graph() -> None:
    """Old log-probabilities are computed with gradients, which nobody takes."""
    policy = qwen()
    optimizer = updated(policy)
    for _ in range(3):
        tokens = torch.randint(0, VOCAB, (4 * BATCH, 256), device="cuda")
        policy.eval()
        with torch.set_grad_enabled(change != "no-grad"):
            old = torch.cat([log_probs_of(policy, part) for part in tokens.chunk(4)])
        policy.train()
        for part, before in zip(tokens.chunk(4), old.detach().chunk(4), strict=True):
            torch.exp(log_probs_of(policy, part) - before).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def doubled_logits() -> None:
    """DPO on chosen and rejected sequences in one batch, from all logits in fp32."""
    policy, reference = qwen(), qwen().eval().requires_grad_(requires_grad=False)
    train_preferences(policy, reference)


def fp32_reference() -> None:
    """The policy is in bf16, and the reference in fp32, which nothing needs."""
    policy = qwen(width=1024, layers=16)
    dtype = torch.bfloat16 if change == "bf16-reference" else torch.float32
    reference = qwen(dtype, width=1024, layers=16).eval().requires_grad_(requires_grad=False)
    train_preferences(policy, reference, batch=4, seq=64)


def train_preferences(policy: torch.nn.Module, reference: torch.nn.Module, batch: int = 16, seq: int = 256) -> None:
    optimizer = updated(policy)
    for _ in range(3):
        pairs = torch.randint(0, VOCAB, (batch // 2, 2 * seq), device="cuda")
        for part in halves(pairs):
            tokens = torch.cat(part.chunk(2, dim=1))
            ours = log_probs_of(policy, tokens).sum(-1)
            with torch.no_grad():
                theirs = log_probs_of(reference, tokens).sum(-1)
            chosen, rejected = (ours - theirs).chunk(2)
            logsigmoid(0.1 * (rejected - chosen)).neg().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluation() -> None:
    """An evaluation of rewards in batches that are much larger than those of training."""
    policy = qwen()
    optimizer = updated(policy)
    for _ in range(3):
        log_probs_of(policy, torch.randint(0, VOCAB, (4, 256), device="cuda")).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        policy.eval()
        judged = torch.randint(0, VOCAB, (64, 256), device="cuda")
        with torch.no_grad():
            for part in judged.chunk(2) if change == "eval-batch" else (judged,):
                log_probs_of(policy, part)
        policy.train()


globals()[fault.replace("-", "_")]()
