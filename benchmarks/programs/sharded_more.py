"""Further programs on one and two GPUs with FSDP2 and DDP: wrapped norms, tied tables, micro-batches."""

import contextlib

import torch
from finetuning import SMALL, with_head_noted
from gpt import Gpt
from models import llama
from pretraining import gpt2
from sharded import join
from torch import nn
from truth import TRUTH, program
from wider import Policy, adamw, scores_of, tokens_of


def alone():
    """A group of one process."""
    import torch.distributed as dist

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


def sharded(model, groups, **options):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for group in groups:
        fully_shard(group, mp_policy=policy, **options)
    return fully_shard(model, mp_policy=policy, **options)


def steps(model, loss_of, waits, accum=1, count=3):
    """Train; `waits(is_last)` says before each micro-batch whether gradients are reduced after it."""
    TRUTH.model(model)
    optimizer = adamw(model.parameters())
    TRUTH.optimizer(optimizer)
    for _ in range(count):
        for number in range(accum):
            with waits(number == accum - 1):
                loss_of(model).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        TRUTH.step(model, optimizer)


def always(_is_last):
    return contextlib.nullcontext()


def reduces_last(model):
    """FSDP2 reduces gradients after the last micro-batch alone."""

    def waits(is_last):
        model.set_requires_gradient_sync(is_last)
        return contextlib.nullcontext()

    return waits


def of_policy(model):
    tokens = tokens_of(4, 256)
    return scores_of(model(tokens).float(), tokens)


def of_gpt(model):
    tokens = tokens_of(4, 256)
    return model(tokens, tokens)[1]


def of_transformers(model, vocab=32000):
    tokens = tokens_of(4, 256, vocab)
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def norms_of(model):
    return [module for module in model.modules() if isinstance(module, nn.LayerNorm)]


@program()
def fsdp2_alone_norms():
    alone()
    model = Policy(n_layer=4).cuda()
    steps(sharded(model, [*norms_of(model), *model.body.h, model.body.wte, model.head]), of_policy, always)


@program()
def fsdp2_alone_kept():
    """Gathered weights are kept for backward, and gradients are reduced after the second micro-batch."""
    alone()
    model = with_head_noted(llama(**SMALL, tie_word_embeddings=True).cuda())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    sharded(model.train(), list(model.model.layers), reshard_after_forward=False)
    steps(model, of_transformers, reduces_last(model), accum=2)


@program(ranks=2)
def fsdp2_norms_tied():
    join()
    model = Gpt(n_layer=4, n_embd=512, n_head=8, vocab=32000).cuda()
    steps(sharded(model, [*norms_of(model), *model.h]), of_gpt, always)


@program(ranks=2)
def fsdp2_kept_untied():
    join()
    model = Policy(n_layer=4).cuda()
    sharded(model, [*norms_of(model), *model.body.h], reshard_after_forward=False)
    steps(model, of_policy, reduces_last(model), accum=2)


@program(ranks=2)
def ddp_views_accum():
    join()
    model = nn.parallel.DistributedDataParallel(gpt2().cuda(), gradient_as_bucket_view=True)

    def waits(is_last):
        return contextlib.nullcontext() if is_last else model.no_sync()

    steps(model, lambda model: of_transformers(model, 50257), waits, accum=2)


@program(ranks=2)
def ddp_autocast():
    join()
    model = nn.parallel.DistributedDataParallel(Policy(n_layer=4).cuda(), gradient_as_bucket_view=True)

    def loss_of(model):
        tokens = tokens_of(4, 256)
        with torch.autocast("cuda", torch.bfloat16):
            return scores_of(model(tokens), tokens)

    steps(model, loss_of, always)
