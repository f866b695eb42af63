"""accelerate finds the batch that fits: memory runs out twice, is caught, and the training starts again."""

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

torch.cuda.set_per_process_memory_fraction(4 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")


@find_executable_batch_size(starting_batch_size=64)
def train(batch_size: int) -> None:
    print("BATCH", batch_size, flush=True)
    accelerator.free_memory()
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=512, n_head=8))
    rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(50257, (128, 256))]
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=batch_size))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()


train()
print("PEAK", torch.cuda.max_memory_allocated())
