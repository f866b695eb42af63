"""Adapters of peft on other architectures: LoHa on a ViT, AdaLoRA on OPT, DoRA on T5, P-tuning on RoBERTa."""

import argparse

import torch
from peft import AdaLoraConfig, LoHaConfig, LoraConfig, PromptEncoderConfig, TaskType, get_peft_model
from transformers import (
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

p = argparse.ArgumentParser()
p.add_argument("method", choices=["loha", "adalora", "dora", "ptuning"])
p.add_argument("--layers", type=int, default=16)
p.add_argument("--width", type=int, default=1024)
p.add_argument("--batch", type=int, default=16)
p.add_argument("--seq", type=int, default=512)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
heads, inner = args.width // 64, 4 * args.width
torch.manual_seed(0)


def words() -> torch.Tensor:
    return torch.randint(4, 400, (args.batch, args.seq), device=device)


if args.method == "loha":
    config = ViTConfig(
        hidden_size=args.width, num_hidden_layers=args.layers, num_attention_heads=heads, intermediate_size=inner
    )
    model = ViTForImageClassification(config)
    linear = sorted(
        {name.split(".")[-1] for name, part in model.vit.named_modules() if isinstance(part, torch.nn.Linear)}
    )
    adapter = LoHaConfig(r=8, alpha=16, target_modules=linear, modules_to_save=["classifier"])
elif args.method == "adalora":
    config = OPTConfig(
        hidden_size=args.width,
        word_embed_proj_dim=args.width,
        ffn_dim=inner,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
    )
    model = OPTForCausalLM(config)
    adapter = AdaLoraConfig(
        task_type=TaskType.CAUSAL_LM, init_r=12, target_r=4, tinit=1, tfinal=1, deltaT=1, total_step=4
    )
    adapter.target_modules = {"q_proj", "v_proj", "fc1", "fc2"}
elif args.method == "dora":
    config = T5Config(d_model=args.width, d_ff=inner, num_layers=args.layers // 2, num_heads=heads)
    config.decoder_start_token_id = 0
    model = T5ForConditionalGeneration(config)
    adapter = LoraConfig(task_type=TaskType.SEQ_2_SEQ_LM, r=16, use_dora=True, target_modules=["q", "v", "wi", "wo"])
else:
    config = RobertaConfig(
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        intermediate_size=inner,
        max_position_embeddings=args.seq + 40,
    )
    model = RobertaForSequenceClassification(config)
    adapter = PromptEncoderConfig(task_type=TaskType.SEQ_CLS, num_virtual_tokens=20, encoder_hidden_size=256)
model = get_peft_model(model.to(torch.bfloat16), adapter).to(device)
model.print_trainable_parameters()
optimizer = torch.optim.AdamW((w for w in model.parameters() if w.requires_grad), lr=1e-3)
model.train()
for step in range(4):
    if args.method == "loha":
        images = torch.randn(args.batch, 3, 224, 224, device=device, dtype=torch.bfloat16)
        batch = {"pixel_values": images, "labels": torch.randint(2, (args.batch,), device=device)}
    elif args.method == "ptuning":
        tokens = words()
        labels = torch.randint(2, (args.batch,), device=device)
        batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    else:
        tokens = words()
        batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    if args.method == "adalora":
        model.base_model.update_and_allocate(step)
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")
