"""A Qwen2-VL of random weights learns captions of images of two sizes; the vision tower is frozen or trained."""

import argparse

import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=12)
p.add_argument("--width", type=int, default=896)
p.add_argument("--depth", type=int, default=12)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--text", type=int, default=256)
p.add_argument("--side", type=int, default=32, help="patches along a side of an image")
p.add_argument("--freeze", action="store_true")
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
IMAGE, START, END, VOCABULARY = 31000, 31001, 31002, 32000
heads = args.width // 64
config = Qwen2VLConfig(
    text_config={
        "hidden_size": args.width,
        "intermediate_size": args.width * 4,
        "num_hidden_layers": args.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2 if heads % 2 == 0 else 1,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [8, 12, 12]},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    vision_config={"depth": args.depth, "embed_dim": 640, "hidden_size": args.width, "num_heads": 8, "mlp_ratio": 4},
    image_token_id=IMAGE,
    vision_start_token_id=START,
    vision_end_token_id=END,
    video_token_id=31003,
    tie_word_embeddings=True,
)
model = Qwen2VLForConditionalGeneration(config).to(device=device, dtype=torch.bfloat16)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
if args.freeze:
    model.model.visual.requires_grad_(requires_grad=False)
optimizer = torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], lr=1e-5)
model.train()
for step in range(3):
    grids = [(1, args.side, args.side) if i % 2 == 0 else (1, args.side // 2, args.side) for i in range(args.batch)]
    lengths = [h * w // 4 for _, h, w in grids]
    longest = max(lengths) + 2 + args.text
    tokens, mask = (
        torch.zeros(args.batch, longest, dtype=torch.long),
        torch.zeros(args.batch, longest, dtype=torch.long),
    )
    for row, n in enumerate(lengths):
        line = [START] + [IMAGE] * n + [END] + torch.randint(4, 30000, (args.text,)).tolist()
        tokens[row, : len(line)], mask[row, : len(line)] = torch.tensor(line), 1
    labels = tokens.masked_fill((mask == 0) | (tokens >= IMAGE), -100)
    pixels = torch.randn(sum(h * w for _, h, w in grids), 3 * 2 * 14 * 14, dtype=torch.bfloat16)
    batch = {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": labels,
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": (tokens == IMAGE).int(),
    }
    loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")
