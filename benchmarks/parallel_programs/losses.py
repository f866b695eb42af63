"""A head whose words are split over the ranks, with ligerprof's losses.

torchrun --nproc-per-node N losses.py {linear,logits}
"""

import os
import sys

import torch
import torch.distributed as dist
from meshes import STEPS, say, say_outside
from torch import nn

from ligerprof.kernels.cross_entropy.triton import cross_entropy
from ligerprof.kernels.linear_cross_entropy.triton import fused_linear_cross_entropy
from ligerprof.kernels.options import VocabularyShard

ROWS, WIDTH, WORDS = 8192, 2048, 128256


def main():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    say_outside("context")
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    say_outside("group")
    shard = VocabularyShard.of_rank(WORDS)
    body = nn.Linear(WIDTH, WIDTH, device=device, dtype=torch.bfloat16)
    head = nn.Parameter(torch.randn(shard.stop - shard.start, WIDTH, device=device, dtype=torch.bfloat16) * 0.02)
    optimizer = torch.optim.AdamW([*body.parameters(), head], lr=1e-4)
    for step in range(STEPS):
        states = body(torch.randn(ROWS, WIDTH, device=device, dtype=torch.bfloat16))
        labels = torch.randint(0, WORDS, (ROWS,), device=device)
        if sys.argv[1] == "linear":
            loss = fused_linear_cross_entropy(states, head, labels, shard=shard)
        else:
            loss = cross_entropy(states @ head.t(), labels, shard=shard)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(step)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
