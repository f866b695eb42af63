"""A convolutional network of timm under torch.compile, in channels_last with autocast."""

import timm
import torch
import torch.nn.functional as F

torch.manual_seed(0)
model = timm.create_model("resnet50", num_classes=100).cuda().to(memory_format=torch.channels_last).train()
compiled = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(4):
    images = torch.randn(32, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(100, (32,), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(compiled(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"step {step} loss {loss.item():.4f}")
