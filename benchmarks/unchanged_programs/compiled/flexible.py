"""FlexAttention compiled, with a sliding window of a causal mask, in a small encoder-like stack."""

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

attend = torch.compile(flex_attention)
BATCH, HEADS, LENGTH, SIZE = 2, 8, 2048, 64


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(HEADS * SIZE)
        self.qkv = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE, bias=False)
        self.out = nn.Linear(HEADS * SIZE, HEADS * SIZE, bias=False)

    def forward(self, x, mask):
        q, k, v = self.qkv(self.norm(x)).view(BATCH, LENGTH, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        return x + self.out(attend(q, k, v, block_mask=mask).transpose(1, 2).reshape(BATCH, LENGTH, -1))


torch.manual_seed(0)
mask = create_block_mask(lambda _b, _h, q, k: (q >= k) & (q - k < 256), None, None, LENGTH, LENGTH, device="cuda")
layers = nn.ModuleList(Layer() for _ in range(6)).cuda().bfloat16()
optimizer = torch.optim.AdamW(layers.parameters())
for step in range(3):
    x = torch.randn(BATCH, LENGTH, HEADS * SIZE, device="cuda", dtype=torch.bfloat16)
    for layer in layers:
        x = layer(x, mask)
    loss = x.float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.3f}")
