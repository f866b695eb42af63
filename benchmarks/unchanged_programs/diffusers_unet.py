"""diffusers' U-Net learns to remove noise from latents, with text: fp16 autocast, a scaler, checkpoints."""

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from torch.nn import functional

torch.manual_seed(0)
model = UNet2DConditionModel(
    sample_size=32, block_out_channels=(128, 256, 512, 512), cross_attention_dim=512, attention_head_dim=64
).cuda()
model.enable_gradient_checkpointing()
noises = DDPMScheduler(num_train_timesteps=1000)
optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-5), torch.amp.GradScaler()
for step in range(3):
    latents, text = torch.randn(8, 4, 32, 32, device="cuda"), torch.randn(8, 77, 512, device="cuda")
    noise, times = torch.randn_like(latents), torch.randint(0, 1000, (8,), device="cuda")
    with torch.autocast("cuda", torch.float16):
        predicted = model(noises.add_noise(latents, noise, times), times, text).sample
        loss = functional.mse_loss(predicted.float(), noise)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")
