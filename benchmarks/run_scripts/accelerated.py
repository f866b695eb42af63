"""accelerate's loop with gradient accumulation."""

import time

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel


def main() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=4, mixed_precision="bf16")
    model = GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=512, n_head=8))
    rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(50257, (256, 256))]
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=4))
    begin = time.perf_counter()
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            torch.cuda.synchronize()
            print("STEP", time.perf_counter() - begin)
            begin = time.perf_counter()
    print("PEAK", torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    main()
