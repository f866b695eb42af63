"""A GPT of 500 million parameters on several GPUs, by torch's own parallelism.

    torchrun --nproc-per-node N meshes.py MODE [BATCH]

Modes: ddp, fsdp1, fsdp1-half, fsdp1-original, fsdp1-grad-op, fsdp1-offload, hsdp, fsdp2, fsdp2-mixed, tp, sp, fsdp2-tp,
cp, gpipe, 1f1b, interleaved, zero-bubble, ep.
"""

import os
import shutil
import subprocess
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WIDTH, HEADS, LAYERS, WORDS, TOKENS, BATCH, STEPS = 2048, 16, 8, 32000, 1024, 8, 3


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """One expert on each rank; tokens go to the experts in turn."""

    def __init__(self, group):
        super().__init__()
        self.group, self.expert, self.gate = group, Mlp(), nn.Linear(WIDTH, dist.get_world_size(group))

    def forward(self, x):
        tokens = x.reshape(-1, WIDTH) * self.gate(x).softmax(-1).amax(-1).reshape(-1, 1)
        got = dist.nn.functional.all_to_all_single(torch.empty_like(tokens), tokens, group=self.group)
        out = self.expert(got)
        return dist.nn.functional.all_to_all_single(torch.empty_like(out), out, group=self.group).view(x.shape)


class Block(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), mlp

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, layers=range(LAYERS), group=None):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH) if 0 in layers else None
        self.blocks = nn.ModuleList(Block(Experts(group) if group else Mlp()) for _ in layers)
        last = LAYERS - 1 in layers
        self.norm, self.head = (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)) if last else (None, None)

    def forward(self, x):
        x = self.embedding(x) if self.embedding else x
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.head else x


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def tensor_parallel(model, mesh, sequence):
    plan = {
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.o": RowwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    top = {"embedding": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    if sequence:
        gather = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        plan |= {
            "norm1": SequenceParallel(),
            "norm2": SequenceParallel(),
            "attention": PrepareModuleInput(**gather),
            "mlp": PrepareModuleInput(**gather),
            "attention.o": RowwiseParallel(output_layouts=Shard(1)),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        top = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    parallelize_module(model, mesh, top)


def train(model, optimizer, device, batch, context=None):
    for step in range(STEPS):
        words = torch.randint(0, WORDS, (batch, TOKENS + 1), device=device)
        inputs, labels = words[:, :-1].contiguous(), words[:, 1:].contiguous()
        if context:
            with context([inputs, labels]):
                loss = loss_of(model(inputs), labels)
                loss.backward()
        else:
            loss = loss_of(model(inputs), labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(step)


def say(step):
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(f"rank {dist.get_rank()} step {step}: {peak} {reserved}", flush=True)
    say_outside(f"step{step}")


def say_outside(moment):
    """What the process holds besides torch's reserved memory, by CUDA's count and by nvidia-smi's."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    listed = "none"
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        lines = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()
        used = dict(line.split(", ") for line in lines if ", " in line)
        listed = used.get(str(os.getpid()), "none")
    print(f"rank {os.environ['RANK']} outside {moment}: {total - free - reserved} {reserved} {listed}", flush=True)


def pipeline(mode, rank, world, device, batch):
    from torch.distributed.pipelining import (
        PipelineStage,
        Schedule1F1B,
        ScheduleGPipe,
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
    )

    several = mode in ("interleaved", "zero-bubble")
    count = 2 * world if several else world
    mine = [rank, rank + world] if several else [rank]
    each = LAYERS // count
    parts = [Gpt(range(index * each, (index + 1) * each)).to(device) for index in mine]
    stages = [PipelineStage(part, index, count, device) for part, index in zip(parts, mine, strict=True)]
    kinds = {
        "gpipe": ScheduleGPipe,
        "1f1b": Schedule1F1B,
        "interleaved": ScheduleInterleaved1F1B,
        "zero-bubble": ScheduleInterleavedZeroBubble,
    }
    schedule = kinds[mode](stages if several else stages[0], n_microbatches=2 * world, loss_fn=loss_of)
    optimizer = torch.optim.AdamW([weight for part in parts for weight in part.parameters()], lr=1e-4)
    for step in range(STEPS):
        words = torch.randint(0, WORDS, (batch, TOKENS + 1), device=device)
        inputs = (words[:, :-1].contiguous(),) if rank == 0 else ()
        labels = {"target": words[:, 1:].contiguous()} if count - 1 in mine else {}
        schedule.step(*inputs, **labels)
        optimizer.step()
        optimizer.zero_grad()
        say(step)


def main():
    mode, batch = sys.argv[1], int((*sys.argv[2:], BATCH)[0])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    say_outside("context")
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    say_outside("group")
    rank, world = dist.get_rank(), dist.get_world_size()
    if mode in ("gpipe", "1f1b", "interleaved", "zero-bubble"):
        pipeline(mode, rank, world, device, batch)
        return
    context = None
    mesh = init_device_mesh("cuda", (1, world), mesh_dim_names=("dp", "tp")) if mode == "fsdp2-tp" else None
    whole = init_device_mesh("cuda", (world,))
    with device:
        model = Gpt(group=dist.group.WORLD if mode == "ep" else None)
    if mode == "ddp":
        model = nn.parallel.DistributedDataParallel(model, device_ids=[device.index])
    elif mode.startswith("fsdp1") or mode == "hsdp":
        from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        strategies = {"hsdp": ShardingStrategy.HYBRID_SHARD, "fsdp1-grad-op": ShardingStrategy.SHARD_GRAD_OP}
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=device,
            mixed_precision=half if mode in ("fsdp1-half", "fsdp1-original") else None,
            device_mesh=init_device_mesh("cuda", (world // 2, 2)) if mode == "hsdp" else None,
            sharding_strategy=strategies.get(mode, ShardingStrategy.FULL_SHARD),
            cpu_offload=CPUOffload(offload_params=mode == "fsdp1-offload"),
            use_orig_params=mode == "fsdp1-original",
        )
    elif mode in ("tp", "sp"):
        tensor_parallel(model, whole, mode == "sp")
    elif mode.startswith("fsdp2"):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        if mesh is not None:
            tensor_parallel(model, mesh["tp"], sequence=True)
        policy = MixedPrecisionPolicy()
        if mode == "fsdp2-mixed":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shards = whole if mesh is None else mesh["dp"]
        for block in model.blocks:
            fully_shard(block, mesh=shards, mp_policy=policy)
        fully_shard(model, mesh=shards, mp_policy=policy)
    elif mode == "cp":
        from torch.distributed.tensor.experimental import context_parallel

        def context(tensors):
            return context_parallel(whole, buffers=tensors, buffer_seq_dims=[1] * len(tensors))

        model = model.bfloat16()
    # tensor parallelism leaves some weights as they are, which foreach does not mix with sharded ones
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False if mode == "tp" else None)
    train(model, optimizer, device, batch, context)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
