"""A short training under a limit on the device's memory; every flag is one change that a user could make."""

import argparse

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="llama")
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--vocabulary", type=int, default=32000)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--seq", type=int, default=512)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--eval-batch", type=int, default=0)
parser.add_argument("--limit-bytes", type=int, default=0)
parser.add_argument("--attention", default="sdpa")
parser.add_argument("--autocast", action="store_true")
parser.add_argument("--checkpointing", action="store_true")
parser.add_argument("--fused-loss", action="store_true")
parser.add_argument("--fused-optimizer", action="store_true")
parser.add_argument("--late-zero", action="store_true")
parser.add_argument("--keep-losses", action="store_true")
parser.add_argument("--keep-outputs", action="store_true")
options = parser.parse_args()

if options.limit_bytes:
    torch.cuda.set_per_process_memory_fraction(options.limit_bytes / torch.cuda.get_device_properties(0).total_memory)
torch.manual_seed(0)
if options.model == "vit":
    model = ViTForImageClassification(
        ViTConfig(hidden_size=384, num_hidden_layers=options.layers, num_attention_heads=6)
    )
elif options.model == "gpt2":
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=options.layers,
            n_embd=512,
            n_head=8,
            vocab_size=options.vocabulary,
            attn_implementation=options.attention,
        )
    )
elif options.model == "llama":
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=options.layers,
            num_attention_heads=8,
            vocab_size=options.vocabulary,
            attn_implementation=options.attention,
        )
    )
else:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(6)))
model = model.cuda()
if options.checkpointing and options.model != "mlp":
    model.gradient_checkpointing_enable({"use_reentrant": False})
if options.fused_loss:
    from ligerprof import kernels

    kernels.apply(model, "flce")
optimizer = torch.optim.AdamW(model.parameters(), fused=options.fused_optimizer, foreach=not options.fused_optimizer)
losses = []
kept = {}


def batch(rows: int) -> dict[str, torch.Tensor]:
    if options.model == "vit":
        return {
            "pixel_values": torch.rand(rows, 3, 224, 224, device="cuda"),
            "labels": torch.randint(2, (rows,), device="cuda"),
        }
    tokens = torch.randint(options.vocabulary, (rows, options.seq), device="cuda")
    return {"input_ids": tokens, "labels": tokens}


def loss_of(rows: int) -> torch.Tensor:
    if options.model == "mlp":
        hidden = torch.rand(rows, options.seq, 1024, device="cuda")
        for layer in model:
            hidden = (
                torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=False)
                if options.checkpointing
                else layer(hidden)
            )
        return hidden.square().mean()
    outputs = model(**batch(rows))
    if options.keep_outputs:
        kept["outputs"] = outputs
    return outputs.loss


for _ in range(4):
    model.train()
    if not options.late_zero:
        optimizer.zero_grad()
    for _ in range(options.accumulation):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=options.autocast):
            loss = loss_of(options.batch)
        if options.late_zero:
            optimizer.zero_grad()
        loss.backward(retain_graph=options.keep_losses)
        if options.keep_losses:
            losses.append(loss)
        del loss
    optimizer.step()
    if options.eval_batch:
        model.eval()
        with torch.no_grad():
            loss_of(options.eval_batch)
print("RESERVED", torch.cuda.max_memory_reserved())
print("PEAK", torch.cuda.max_memory_allocated())
