"""peft's AdaLoRA in a loop of its own: an orthogonal penalty, and ranks that are allocated again after each step."""

import argparse

import torch
from peft import AdaLoraConfig, TaskType, get_peft_model
from transformers import AutoModelForCausalLM

p = argparse.ArgumentParser()
p.add_argument("model")
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=512)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
config = AdaLoraConfig(
    task_type=TaskType.CAUSAL_LM,
    init_r=12,
    target_r=4,
    tinit=1,
    tfinal=2,
    deltaT=1,
    total_step=6,
    target_modules=["q_proj", "v_proj", "up_proj"],
)
model = get_peft_model(model, config).to(device)
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
for step in range(6):
    ids = torch.randint(4, 400, (args.batch, args.seq), device=device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    model.base_model.update_and_allocate(step)
    optimizer.zero_grad()
    print(loss.item())
