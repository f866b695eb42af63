"""A wide masked autoencoder with 7 GiB: two backward passes fit, the states of Adam's first step do not."""

import torch
from transformers import ViTMAEConfig, ViTMAEForPreTraining

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
if device == "cuda":
    torch.cuda.set_per_process_memory_fraction(7 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
layers, width, batch = (32, 1280, 4) if device == "cuda" else (2, 64, 2)
config = ViTMAEConfig(
    hidden_size=width,
    num_hidden_layers=layers,
    num_attention_heads=width // 64,
    intermediate_size=4 * width,
    decoder_hidden_size=512 if device == "cuda" else 64,
    decoder_intermediate_size=2048 if device == "cuda" else 64,
    image_size=224 if device == "cuda" else 32,
)
model = ViTMAEForPreTraining(config).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
for step in range(3):
    for _ in range(2):
        images = torch.randn(batch, 3, config.image_size, config.image_size, device=device)
        loss = model(pixel_values=images).loss / 2
        loss.backward()
    print(f"step {step} loss {2 * loss.item():.4f}", flush=True)
    optimizer.step()
    optimizer.zero_grad()
