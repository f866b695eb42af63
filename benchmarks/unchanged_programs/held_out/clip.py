"""CLIP from scratch: contrastive loss over a large batch that is embedded in pieces, twice."""

import argparse

import torch
import torch.nn.functional as F
from transformers import CLIPConfig, CLIPModel

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=12)
p.add_argument("--width", type=int, default=768)
p.add_argument("--batch", type=int, default=256)
p.add_argument("--piece", type=int, default=64)
p.add_argument("--size", type=int, default=224)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
common = {"num_hidden_layers": args.layers, "hidden_size": args.width, "intermediate_size": 4 * args.width}
common["num_attention_heads"] = args.width // 64
config = CLIPConfig(
    text_config={**common, "vocab_size": 49408, "eos_token_id": 2},
    vision_config={**common, "image_size": args.size, "patch_size": 16},
)
model = CLIPModel(config).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2)


def embed(images: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.autocast(device, dtype=torch.bfloat16):
        both = model(input_ids=words, pixel_values=images)
    return both.image_embeds.float(), both.text_embeds.float()


for step in range(3):
    images = torch.randn(args.batch, 3, args.size, args.size).to(device).split(args.piece)
    words = torch.randint(3, 49000, (args.batch, 77)).to(device)
    words[:, -1] = 2
    pieces = list(zip(images, words.split(args.piece), strict=True))
    with torch.no_grad():
        found = [embed(*piece) for piece in pieces]
    ends = [torch.cat(parts).requires_grad_() for parts in zip(*found, strict=True)]
    logits = ends[0] @ ends[1].T * model.logit_scale.exp()
    same = torch.arange(args.batch, device=device)
    loss = (F.cross_entropy(logits, same) + F.cross_entropy(logits.T, same)) / 2
    loss.backward()
    for i, piece in enumerate(pieces):
        place = slice(i * args.piece, (i + 1) * args.piece)
        torch.autograd.backward(embed(*piece), [end.grad[place] for end in ends])
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")
