"""One rank started by torch.multiprocessing.spawn with DDP; the parent uses no device."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank: int, world: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        model(torch.rand(1024 * (rank + 1), 512, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("PEAK", torch.cuda.max_memory_allocated(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    count = torch.cuda.device_count()
    torch.multiprocessing.spawn(train, args=(count,), nprocs=count)
