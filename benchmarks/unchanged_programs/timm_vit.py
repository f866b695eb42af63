"""timm's ViT in channels_last under bf16 autocast, with an average of the weights."""

import timm
import torch
import torch.nn.functional as F

model = timm.create_model("vit_base_patch16_224", num_classes=1000).cuda().to(memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
average = timm.utils.ModelEmaV3(model)
for _ in range(4):
    images = torch.randn(128, 3, 224, 224, device="cuda")
    labels = torch.randint(0, 1000, (128,), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    average.update(model)
print(loss.item())
