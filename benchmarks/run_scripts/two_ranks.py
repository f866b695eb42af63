"""Two ranks under torchrun with DDP, buckets and accumulation without reduction; through gloo, also on one device."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.cuda.set_device(rank % torch.cuda.device_count())
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4, vocab_size=8000
)
model = DistributedDataParallel(LlamaForCausalLM(config).cuda())
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5):
    tokens = torch.randint(8000, (2 * (rank + 1), 256), device="cuda")
    with model.no_sync():
        model(input_ids=tokens, labels=tokens).loss.backward()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("PEAK", torch.cuda.max_memory_allocated(), flush=True)
dist.destroy_process_group()
