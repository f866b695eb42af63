"""DPO and GRPO, written by hand."""

import torch
import torch.nn.functional as F
from models import llama
from truth import TRUTH, program


def logprobs(model, tokens):
    logits = model(input_ids=tokens, use_cache=False).logits
    TRUTH.tag(logits, "logits", "logits")
    shifted = logits[:, :-1].float()
    TRUTH.tag(shifted, "ce_or_logits", "upcast slice")
    return torch.gather(shifted.log_softmax(-1), 2, tokens[:, 1:].unsqueeze(2)).squeeze(2).sum(-1)


@program()
def dpo():
    policy, reference = llama().cuda(), llama().cuda().eval().requires_grad_(requires_grad=False)
    TRUTH.model(policy)
    TRUTH.model(reference)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, foreach=True)
    TRUTH.optimizer(optimizer)
    for _ in range(2):
        chosen, rejected = (torch.randint(0, 32000, (4, 384), device="cuda") for _ in range(2))
        tokens = torch.cat([chosen, rejected])
        with torch.no_grad():
            expected = logprobs(reference, tokens)
        actual = logprobs(policy, tokens)
        margin = (actual[:4] - expected[:4]) - (actual[4:] - expected[4:])
        loss = -F.logsigmoid(0.1 * margin).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program()
def grpo():
    model = llama(num_hidden_layers=4).cuda()
    TRUTH.model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    TRUTH.optimizer(optimizer)
    for _ in range(2):
        with torch.no_grad():
            model.eval()
            rolled = model.generate(torch.randint(0, 32000, (8, 64), device="cuda"), max_new_tokens=48, do_sample=True)
            model.train()
        advantages = torch.randn(8, 1, device="cuda")
        logits = model(input_ids=rolled).logits[:, :-1] / 0.9
        TRUTH.tag(logits, "logits", "scaled logits")
        chosen = torch.stack(
            [F.log_softmax(row, dim=-1).gather(1, t[1:, None])[:, 0] for row, t in zip(logits, rolled, strict=True)]
        )
        loss = -(torch.exp(chosen - chosen.detach()) * advantages).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
