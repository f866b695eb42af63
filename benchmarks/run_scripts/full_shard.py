"""FSDP2 under torchrun, with a gathered state dict at the end."""

import time

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
config = LlamaConfig(
    hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8, vocab_size=16000
)
model = LlamaForCausalLM(config).cuda()
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(8):
    begin = time.perf_counter()
    tokens = torch.randint(16000, (4, 512), device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    print("STEP", time.perf_counter() - begin)
get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
print("PEAK", torch.cuda.max_memory_allocated(), flush=True)
dist.destroy_process_group()
