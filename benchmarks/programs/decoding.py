"""Programs that generate: a compiled static cache, a decode step as a CUDA graph, sliding windows, own loops."""

import torch
import torch.nn.functional as F
from finetuning import SMALL, with_head_noted
from models import llama
from torch import nn
from truth import DEVICE, TRUTH, program

HALF = SMALL | {"dtype": torch.bfloat16}


@program(needs_compiler=True)
def static_compiled():
    """The decode step is compiled with CUDA graphs, as transformers does for a static cache."""
    model = llama(**(HALF | {"num_hidden_layers": 2})).to(DEVICE).eval()
    TRUTH.model(model)
    tokens = torch.randint(0, 32000, (8, 128), device=DEVICE)
    TRUTH.tag(tokens, "inputs")
    model.generate(tokens, max_new_tokens=12, cache_implementation="static", do_sample=False, pad_token_id=0)


@program()
def static_eager_sampled():
    model = with_head_noted(llama(**HALF)).to(DEVICE).eval()
    TRUTH.model(model)
    tokens = torch.randint(0, 32000, (8, 256), device=DEVICE)
    options = {"do_sample": True, "top_k": 50, "temperature": 0.7, "pad_token_id": 0, "disable_compile": True}
    model.generate(tokens, max_new_tokens=16, cache_implementation="static", **options)


@program()
def own_loop():
    """A loop over the cache that the model returns, scores kept for each token."""
    model = with_head_noted(llama(**HALF)).to(DEVICE).eval()
    TRUTH.model(model)
    kept = []
    with torch.inference_mode():
        tokens = torch.randint(0, 32000, (16, 256), device=DEVICE)
        TRUTH.tag(tokens, "inputs")
        out = model(input_ids=tokens, use_cache=True, logits_to_keep=1)
        for _ in range(24):
            scores = out.logits[:, -1].float()
            kept.append(scores)
            chosen = torch.multinomial(F.softmax(scores / 0.8, dim=-1), 1)
            out = model(input_ids=chosen, past_key_values=out.past_key_values, use_cache=True)
            for layer in getattr(out.past_key_values, "layers", ()):
                TRUTH.tag(layer.keys, "kv_cache")
                TRUTH.tag(layer.values, "kv_cache")


class Cached(nn.Module):
    """Attention with buffers of keys and values that it fills in place."""

    def __init__(self, width=512, heads=8, batch=16, length=512):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.register_buffer("k_cache", torch.zeros(batch, heads, length, width // heads))
        self.register_buffer("v_cache", torch.zeros(batch, heads, length, width // heads))

    def forward(self, x, place, mask):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        self.k_cache.index_copy_(2, place, k)
        self.v_cache.index_copy_(2, place, v)
        out = F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=mask)
        return x + self.out(out.transpose(1, 2).reshape(b, t, c))


class Decoder(nn.Module):
    def __init__(self, width=512, vocab=32000):
        super().__init__()
        self.wte, self.h = nn.Embedding(vocab, width), nn.ModuleList(Cached() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens, place):
        mask = (torch.arange(512, device=place.device)[None] <= place[:, None])[None, None]
        x = self.wte(tokens)
        for layer in self.h:
            x = layer(x, place, mask)
        return self.head(self.norm(x))


@program()
def graphed_decode():
    """gpt-fast's way: buffers of keys and values, and one CUDA graph that decodes a token."""
    model = Decoder().to(DEVICE).to(torch.bfloat16).eval()
    TRUTH.live("parameters", lambda: list(model.parameters()))
    TRUTH.live("kv_cache", lambda: [buffer for name, buffer in model.named_buffers() if "cache" in name])
    with torch.inference_mode():
        tokens = torch.randint(0, 32000, (16, 256), device=DEVICE)
        chosen = model(tokens, torch.arange(256, device=DEVICE))[:, -1:].argmax(-1)
        place = torch.tensor([256], device=DEVICE)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                model(chosen, place)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            scores = model(chosen, place)
        for _ in range(16):
            place += 1
            chosen.copy_(scores.argmax(-1))
            graph.replay()
