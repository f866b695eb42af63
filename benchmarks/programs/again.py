"""Programs of the other modules once more, recorded as their users may: late, without C++ frames, out of memory."""

import torch
import torch.nn.functional as F
from finetuning import SMALL, adapters_autocast, dpo_fp32, grpo_bf16, trained
from models import llama
from pretraining import patches, selective_half
from torch import nn
from truth import DEVICE, TRUTH, program


@program(late=True)
def trainer_late():
    trained(llama(**SMALL), bf16=True, gradient_accumulation_steps=2, max_steps=5)


@program(stacks="python")
def trainer_python():
    trained(llama(**SMALL, tie_word_embeddings=True), bf16=True, gradient_accumulation_steps=2)


@program(stacks="python", context="alloc")
def adapters_python():
    adapters_autocast()


@program(stacks="python")
def grpo_python():
    grpo_bf16()


@program(stacks="python")
def selective_python():
    selective_half()


@program(limit_mib=1300)
def oom_dpo():
    dpo_fp32()


@program(limit_mib=1200)
def oom_patches():
    patches()


@program(limit_mib=1000)
def oom_selective():
    selective_half()


class KeysAndValues(nn.Module):
    def __init__(self, batch, length, heads, width, dtype):
        super().__init__()
        self.register_buffer("k", torch.zeros(batch, heads, length, width, dtype=dtype))
        self.register_buffer("v", torch.zeros(batch, heads, length, width, dtype=dtype))

    def update(self, place, k, v):
        self.k[:, :, place], self.v[:, :, place] = k, v
        return self.k, self.v


class Layer(nn.Module):
    def __init__(self, width=512, heads=8):
        super().__init__()
        self.norm, self.wqkv, self.wo = nn.RMSNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.kv_cache = heads, None

    def forward(self, x, place, mask):
        b, t, c = x.shape
        q, k, v = self.wqkv(self.norm(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        k, v = self.kv_cache.update(place, k, v)
        return x + self.wo(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(b, t, c))


class Fast(nn.Module):
    """As gpt-fast: caches are set up before a generation."""

    def __init__(self, width=512, vocab=32000):
        super().__init__()
        self.tok_embeddings, self.layers = nn.Embedding(vocab, width), nn.ModuleList(Layer() for _ in range(6))
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def setup_caches(self, batch, length):
        for layer in self.layers:
            layer.kv_cache = KeysAndValues(batch, length, layer.heads, 512 // layer.heads, self.output.weight.dtype)
        self.mask = torch.tril(torch.ones(length, length, dtype=torch.bool))

    def forward(self, tokens, place):
        x, mask = self.tok_embeddings(tokens), self.mask[None, None, place]
        for layer in self.layers:
            x = layer(x, place, mask)
        return self.output(self.norm(x))


def decode(compiles):
    model = Fast().to(DEVICE).to(torch.bfloat16).eval()
    with torch.device(DEVICE):
        model.setup_caches(16, 512)
    TRUTH.live("parameters", lambda: list(model.parameters()))
    TRUTH.live("kv_cache", lambda: [buffer for name, buffer in model.named_buffers() if "kv_cache" in name])
    run = torch.compile(model, mode="reduce-overhead", fullgraph=True) if compiles else model
    with torch.inference_mode():
        tokens = torch.randint(0, 32000, (16, 256), device=DEVICE)
        chosen = model(tokens, torch.arange(256, device=DEVICE))[:, -1:].argmax(-1)
        place = torch.tensor([256], device=DEVICE)
        for _ in range(12):
            scores = run(chosen, place)
            shares = F.softmax(scores[:, -1].float() / 0.8, dim=-1)
            chosen = torch.multinomial(shares, 1)
            place += 1


@program()
def fast_decode():
    decode(compiles=False)


@program(needs_compiler=True)
def fast_compiled():
    decode(compiles=True)


@program(needs_compiler=True)
def trainer_compiled():
    trained(llama(**SMALL, tie_word_embeddings=True), bf16=True, torch_compile=True)
