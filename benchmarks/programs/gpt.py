"""A GPT written by hand as nanoGPT's, and its training loop."""

import torch
import torch.nn.functional as F
from torch import nn
from truth import TRUTH


class SelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.c_attn, self.c_proj, self.n_head = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd), n_head

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(c, dim=2)
        q, k, v = (z.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Mlp(nn.Module):
    def __init__(self, n_embd):
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(n_embd), SelfAttention(n_embd, n_head)
        self.ln_2, self.mlp = nn.LayerNorm(n_embd), Mlp(n_embd)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    def __init__(self, vocab=50304, n_embd=768, n_head=12, n_layer=8, block=1024, wrap=None):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, n_embd), nn.Embedding(block, n_embd)
        self.h = nn.ModuleList([Block(n_embd, n_head) for _ in range(n_layer)])
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab, bias=False)
        self.wte.weight = self.lm_head.weight
        self.wrap = wrap

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = self.wrap(block, x) if self.wrap else block(x)
        logits = self.lm_head(self.ln_f(x))
        TRUTH.tag(logits, "logits") if not torch.compiler.is_compiling() else None
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def train_gpt(model, steps=3, accum=1, optimizer=None, autocast=True, batch=8, seq=512, vocab=50304):
    model = model.cuda()
    TRUTH.model(model)
    optimizer = (optimizer or (lambda ps: torch.optim.AdamW(ps, lr=1e-4, fused=True)))(model.parameters())
    TRUTH.optimizer(optimizer)
    for _ in range(steps):
        for _ in range(accum):
            x = torch.randint(0, vocab, (batch, seq)).pin_memory().to("cuda", non_blocking=True)
            y = torch.randint(0, vocab, (batch, seq)).pin_memory().to("cuda", non_blocking=True)
            TRUTH.tag(x, "inputs")
            TRUTH.tag(y, "inputs")
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                _, loss = model(x, y)
                loss = loss / accum
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
