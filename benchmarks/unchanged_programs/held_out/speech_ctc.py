"""wav2vec 2.0 learns letters by CTC in a plain loop: clips of many lengths, bfloat16, a frozen feature encoder."""

import argparse

import torch
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=12)
p.add_argument("--width", type=int, default=768)
p.add_argument("--batch", type=int, default=12)
p.add_argument("--samples", type=int, default=160_000)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = Wav2Vec2Config(
    hidden_size=args.width,
    num_hidden_layers=args.layers,
    num_attention_heads=args.width // 64,
    intermediate_size=4 * args.width,
    ctc_loss_reduction="mean",
    mask_time_length=2,
    layerdrop=0.0,
)
model = Wav2Vec2ForCTC(config).to(device)
model.freeze_feature_encoder()
optimizer = torch.optim.AdamW((w for w in model.parameters() if w.requires_grad), lr=1e-4, foreach=True)
for step in range(4):
    lengths = torch.randint(args.samples // 2, args.samples, (args.batch,))
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    sound, letters = torch.randn(mask.shape) * mask, torch.randint(1, 32, (args.batch, args.samples // 4000))
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = model(sound.to(device), attention_mask=mask.long().to(device), labels=letters.to(device)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")
