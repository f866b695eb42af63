"""Train a small Llama with FSDP as one of four ranks, to be recorded without GPUs.

Run a program with `ligerprof run --device simulated --world 4 --ranks 0 --steps : -- python
benchmarks/sharded_recordings.py fsdp2_nosync`.
"""

import functools
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoModelForCausalLM, LlamaConfig

RANKS = 4
LLAMA = LlamaConfig(
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=2000,
    tie_word_embeddings=False,
)


def train(model: Any, *, micro_batches: int = 1) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(3):
        for number in range(micro_batches):
            if micro_batches > 1:
                model.set_requires_gradient_sync(number == micro_batches - 1)
            tokens = torch.randint(0, LLAMA.vocab_size, (2, 64), device="cuda")
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def shard(**options: Any) -> Any:
    model = AutoModelForCausalLM.from_config(LLAMA, dtype=torch.float32).to("cuda")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=options.pop("reduce", torch.float32))
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy, **options)
    return fully_shard(model, mp_policy=policy, **options)


def fsdp2_nosync() -> Any:
    return train(shard(), micro_batches=2)


def hsdp2() -> Any:
    mesh = init_device_mesh("cuda", (2, RANKS // 2), mesh_dim_names=("replicate", "shard"))
    return train(shard(mesh=mesh, reduce=torch.bfloat16))


def fsdp1_flat() -> Any:
    model = AutoModelForCausalLM.from_config(LLAMA, dtype=torch.float32).to("cuda")
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(model.model.layers[0])})
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    return train(
        FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=torch.device("cuda", 0), mixed_precision=precision
        )
    )


def main() -> None:
    dist.init_process_group("nccl")
    kept = {program.__name__: program for program in (fsdp2_nosync, hsdp2, fsdp1_flat)}[sys.argv[1]]()
    del kept


if __name__ == "__main__":
    main()
