"""A loop class as Lightning's: the optimizer's step calls a closure with forward and backward; then validation."""

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel


class Task(nn.Module):
    """A module with the model inside, whose own forward is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=512, n_head=8, vocab_size=16000))

    def training_step(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss

    def validation_step(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens).logits.argmax(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Loop:
    """Runs a task."""

    def fit(self, task: Task, steps: int) -> None:
        optimizer = task.configure_optimizers()
        for step in range(steps):
            tokens = torch.randint(16000, (8, 256), device="cuda")

            def closure(tokens: torch.Tensor = tokens) -> torch.Tensor:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = task.training_step(tokens)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(task.parameters(), 1.0)
                return loss

            optimizer.step(closure)
            if step == 2:
                task.eval()
                with torch.inference_mode():
                    task.validation_step(torch.randint(16000, (32, 256), device="cuda"))
                task.train()


torch.manual_seed(0)
Loop().fit(Task().cuda(), 6)
print("PEAK", torch.cuda.max_memory_allocated())
