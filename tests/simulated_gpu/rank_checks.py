"""Run as a rank of four: what a rank hears from the others, and what its collectives take."""

import datetime as dt
import os
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
assert (world, dist.get_backend(), torch.cuda.device_count()) == (4, "nccl", 4)
assert torch.ones(1, device=f"cuda:{rank}").device == torch.ones(1).cuda().device == torch.device("cuda", rank)
with pytest.raises(RuntimeError, match=f"one GPU, cuda:{rank}, not cuda:{(rank + 1) % 4}"):
    torch.ones(1, device=f"cuda:{(rank + 1) % 4}")


def taken(action):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    assert torch.cuda.memory_allocated() == before
    return torch.cuda.max_memory_allocated() - before


# what one rank alone knows comes from it
objects = [{"of": rank}]
dist.broadcast_object_list(objects, src=2)
assert objects == [{"of": 2}]
number = torch.tensor([rank * 10], device="cuda")
scattered = [torch.tensor([place], device="cuda") for place in range(world)] if rank == 0 else None
dist.scatter(number, scattered, src=0)
assert number.item() == rank
# ranks that are asked for exchange what they know; the others have what these have
asked = [int(part) for part in os.environ["LIGERPROF_RANKS"].split(",")]
given = [
    place if place in asked or place == rank else max([a for a in asked if a < place], default=asked[0])
    for place in range(4)
]
dist.all_reduce(number)
assert number.item() == sum(given), (number, given)
gathered = [None] * world
dist.all_gather_object(gathered, rank)
assert gathered == given, (gathered, given)

# numbers that the model computed are not waited for, and do not stand for the ones behind them
dist.broadcast(torch.ones((), device="cuda"), src=2)
number = torch.tensor(rank, device="cuda")
dist.broadcast(number, src=2)
assert number.item() == 2
half = dist.split_group(split_ranks=[[0, 1], [2, 3]])
assert dist.get_process_group_ranks(half) == [rank // 2 * 2, rank // 2 * 2 + 1]

# NCCL gathers lists through a flat tensor, and one tensor without
mine = torch.empty(1 << 20, device="cuda")
parts = [torch.empty_like(mine) for _ in range(world)]
whole = torch.empty(world << 20, device="cuda")
assert taken(lambda: dist.all_gather(parts, mine)) == world << 22
assert taken(lambda: dist.reduce_scatter(mine, parts)) == world << 22
assert taken(lambda: dist.all_gather_into_tensor(whole, mine)) == 0
assert taken(lambda: dist.all_reduce(whole)) == 0
whole = parts = mine = None

mesh = dist.init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "tp"))
stage = mesh.get_local_rank("pp")
block = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda()
parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
# the second stage learns its shapes from the first
pipeline = PipelineStage(block, stage, 2, torch.device("cuda", rank), group=mesh.get_group("pp"))
schedule = ScheduleGPipe(pipeline, n_microbatches=2, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
target = torch.randn(64, 256, device="cuda")
schedule.step(*([target] if stage == 0 else []), **({"target": target} if stage else {}))
optimizer.step()

# what torchtitan and Megatron-LM do, also where torch has no NCCL
dist.distributed_c10d._set_pg_timeout(dt.timedelta(seconds=30), mesh.get_group("tp"))
dist.new_group(pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True))

replicated = nn.parallel.DistributedDataParallel(nn.Linear(256, 256).cuda())
replicated(target).sum().backward()

# the second forward pass makes new buckets; the reduced ones stay until the next reduction, unless the program sleeps
for pause, kept in ((0, 4 << 20), (0.1, 0)):
    replicated = nn.parallel.DistributedDataParallel(nn.Linear(1024, 1024, bias=False).cuda())
    wide = torch.randn(64, 1024, device="cuda")
    replicated(wide).sum().backward()
    before = torch.cuda.memory_allocated()
    time.sleep(pause)
    loss = replicated(wide).sum()
    assert kept <= torch.cuda.memory_allocated() - before < kept + (1 << 20)
    loss.backward()
    del loss
    assert torch.cuda.memory_allocated() - before < 1 << 20
dist.barrier()
print(f"rank {rank} passed", file=sys.stderr)
dist.destroy_process_group()
