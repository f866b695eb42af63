"""Programs on two GPUs: FSDP2, FSDP1, DDP, and optimizers that shard."""

import functools
import os

import torch
from gpt import Gpt, train_gpt
from models import llama, trainer
from torch import nn
from truth import TRUTH, program, states_of


def join():
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))


def train_sharded(model, steps=3, optimizer=None, vocab=32000, batch=2, seq=512, accum=1):
    TRUTH.model(model)
    optimizer = (optimizer or (lambda ps: torch.optim.AdamW(ps, lr=1e-4)))(model.parameters())
    TRUTH.optimizer(optimizer)
    for _ in range(steps):
        for _ in range(accum):
            tokens = torch.randint(0, vocab, (batch, seq), device="cuda")
            out = model(input_ids=tokens, labels=tokens, use_cache=False)
            TRUTH.tag(out.logits, "logits")
            out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def shard(model, groups, **options):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for group in groups:
        fully_shard(group, mp_policy=policy, **options)
    return fully_shard(model, mp_policy=policy, **options)


@program(ranks=2)
def fsdp2_norms():
    join()
    model = llama(dtype=torch.float32).cuda()
    layers = model.model.layers
    groups = [n for layer in layers for n in (layer.input_layernorm, layer.post_attention_layernorm)] + list(layers)
    train_sharded(shard(model, [*groups, model.model.norm, model.lm_head, model.model.embed_tokens]))


@program(ranks=2)
def fsdp2_noreshard_accum():
    join()
    model = llama(dtype=torch.float32).cuda()
    train_sharded(shard(model, list(model.model.layers), reshard_after_forward=False), accum=2)


@program(ranks=2)
def fsdp2_meta_ckpt():
    join()
    with torch.device("meta"):
        model = llama(dtype=torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    shard(model, list(model.model.layers))
    model.to_empty(device="cuda")
    train_sharded(model.train())


@program(ranks=2)
def fsdp2_offload():
    join()
    from torch.distributed.fsdp import CPUOffloadPolicy

    model = llama(dtype=torch.float32)
    train_sharded(shard(model, list(model.model.layers), offload_policy=CPUOffloadPolicy()))


@program(ranks=2)
def fsdp2_bf16_compiled():
    join()
    from torch.distributed.fsdp import fully_shard

    model = llama(num_hidden_layers=3).cuda()
    for layer in model.model.layers:
        layer.compile()
        fully_shard(layer)
    train_sharded(fully_shard(model))


@program(ranks=2)
def fsdp1():
    join()
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    model = llama(dtype=torch.float32)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(model.model.layers[0])})
    train_sharded(
        FullyShardedDataParallel(
            model,
            auto_wrap_policy=policy,
            device_id=torch.cuda.current_device(),
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
            use_orig_params=True,
        )
    )


@program(ranks=2)
def ddp_bucket_view():
    join()
    model = nn.parallel.DistributedDataParallel(llama(dtype=torch.float32).cuda(), gradient_as_bucket_view=True)
    train_sharded(model)


@program(ranks=2)
def ddp_nanogpt():
    join()
    model = Gpt(n_layer=6).cuda()
    model = nn.parallel.DistributedDataParallel(model)
    train_gpt(model, accum=2)


@program(ranks=2)
def ddp_bf16_hook():
    join()
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    model = nn.parallel.DistributedDataParallel(llama(dtype=torch.float32).cuda(), static_graph=True)
    model.register_comm_hook(None, bf16_compress_hook)
    train_sharded(model)


@program(ranks=2)
def trainer_ddp():
    trainer(llama(dtype=torch.float32), bf16=True, ddp_find_unused_parameters=False).train()


@program(ranks=2)
def zero_redundancy():
    join()
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(llama().cuda())
    made = []

    def optimizer(parameters):
        made.append(ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=1e-4))
        return made[0]

    TRUTH.live("optimizer_states", lambda: states_of(made[0].optim))
    train_sharded(model, optimizer=optimizer)
