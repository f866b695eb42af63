"""DeepSpeed ZeRO-2 with its own data loader and a checkpoint in the middle, under its launcher."""

import tempfile

import deepspeed
import torch
from torch import nn

SETTINGS = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "fp16": {"enabled": True, "initial_scale_power": 8},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1_000_000},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
}
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(4)))
rows = torch.utils.data.TensorDataset(torch.rand(128, 64, 1024))
engine, _, loader, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=SETTINGS, training_data=rows
)
for number, (batch,) in enumerate(loader):
    loss = engine(batch.to(engine.device, torch.half)).float().square().mean()
    engine.backward(loss)
    engine.step()
    if number == 7:
        with tempfile.TemporaryDirectory() as folder:
            engine.save_checkpoint(folder)
print("PEAK", torch.cuda.max_memory_allocated())
