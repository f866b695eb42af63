"""A GPT of 500 million parameters under DeepSpeed's ZeRO.

deepspeed --num_gpus N zero.py STAGE [--accumulate 4] [...]
"""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from meshes import BATCH, LAYERS, STEPS, TOKENS, WORDS, Gpt, loss_of, say
from torch import nn


class Adapter(nn.Module):
    """A linear layer that stays, and a low-rank one that is trained."""

    def __init__(self, base, rank=16):
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", type=int)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--local_rank", type=int, default=0)
    options = parser.parse_args()
    zero = {"stage": options.stage}
    if options.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_accumulation_steps": options.accumulate,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
    }
    torch.manual_seed(0)
    # the last layers, with the head, and the embedding
    model = Gpt([0, *range(LAYERS - options.layers + 1, LAYERS)])
    if options.lora:
        model.requires_grad_(requires_grad=False)
        for block in model.blocks:
            for name in "qkvo":
                setattr(block.attention, name, Adapter(getattr(block.attention, name)))
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(weights, lr=1e-4), model_parameters=weights, config=config
    )
    for step in range(STEPS):
        for _ in range(options.accumulate):
            words = torch.randint(0, WORDS, (options.batch, options.tokens + 1), device=engine.device)
            loss = loss_of(engine(words[:, :-1].contiguous()), words[:, 1:].contiguous())
            engine.backward(loss)
            engine.step()
        say(step)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
