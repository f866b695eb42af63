"""What a process group takes outside torch's allocator: one kind of collective after another, each in its own group.

torchrun --nproc-per-node 2 outside.py
"""

import os

import torch
import torch.distributed as dist
from meshes import say_outside

MIB = 1 << 20


def exchange(kind, device):
    rank, world = dist.get_rank(), dist.get_world_size()
    part = torch.ones(8 * MIB, dtype=torch.bfloat16, device=device)
    whole = torch.ones(8 * MIB * world, dtype=torch.bfloat16, device=device)
    if kind == "barrier":
        dist.barrier()
    elif kind == "all_reduce":
        dist.all_reduce(part)
    elif kind == "broadcast":
        dist.broadcast(part, src=0)
    elif kind == "all_gather":
        dist.all_gather_into_tensor(whole, part)
    elif kind == "reduce_scatter":
        dist.reduce_scatter_tensor(part, whole)
    elif kind == "all_to_all":
        dist.all_to_all_single(torch.empty_like(whole), whole)
    elif rank == 0:
        dist.send(part, dst=1)
    elif rank == 1:
        dist.recv(part, src=0)


def main():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    say_outside("context")
    store, rank, world = next(iter(dist.rendezvous("env://")))
    kinds = ("all_reduce", "all_gather", "all_to_all", "send", "broadcast", "reduce_scatter", "barrier")
    for kind in kinds:
        # what the ranks of the group before told each other is not for this one
        own = dist.PrefixStore(kind, store)
        early = device if kind == "barrier" else None
        dist.init_process_group("nccl", store=own, rank=rank, world_size=world, device_id=early)
        say_outside(f"{kind}-group")
        for time in ("first", "second"):
            exchange(kind, device)
            say_outside(f"{kind}-{time}")
        if kind == "all_reduce":
            # what else the same group adds
            for further in ("send", "all_to_all"):
                exchange(further, device)
                say_outside(f"{kind}-then-{further}")
            group = dist.new_group(list(range(dist.get_world_size())))
            dist.all_reduce(torch.ones(MIB, device=device), group=group)
            say_outside(f"{kind}-another-group")
        dist.destroy_process_group()
        say_outside(f"{kind}-destroyed")


if __name__ == "__main__":
    main()
