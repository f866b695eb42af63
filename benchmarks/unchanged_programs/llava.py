"""A LLaVA of random weights under Trainer: a CLIP tower that stays frozen, a projector and a Llama with LoRA."""

import argparse
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=12)
p.add_argument("--width", type=int, default=1024)
p.add_argument("--depth", type=int, default=12)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--size", type=int, default=224)
args = p.parse_args()
torch.manual_seed(0)
IMAGE = 31999
patches = (args.size // 14) ** 2
config = LlavaConfig(
    vision_config=CLIPVisionConfig(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=args.depth,
        num_attention_heads=12,
        image_size=args.size,
        patch_size=14,
    ),
    text_config=LlamaConfig(
        hidden_size=args.width,
        intermediate_size=args.width * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64,
        num_key_value_heads=args.width // 64,
        vocab_size=32000,
    ),
    image_token_index=IMAGE,
)
model = LlavaForConditionalGeneration(config).to(torch.bfloat16)
model = get_peft_model(
    model,
    LoraConfig(
        r=16,
        target_modules=r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj)",
        modules_to_save=["multi_modal_projector"],
    ),
)
model.print_trainable_parameters()


def row(i: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(i)
    text = torch.randint(3, 30000, (200,), generator=draw)
    tokens = torch.cat([torch.tensor([1]), torch.full((patches,), IMAGE), text])
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": torch.cat([torch.full((patches + 1,), -100), text]),
        "pixel_values": torch.randn(3, args.size, args.size, generator=draw, dtype=torch.bfloat16),
    }


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=3,
        per_device_train_batch_size=args.batch,
        learning_rate=1e-4,
        bf16=torch.cuda.is_available(),
        gradient_checkpointing=True,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
    )
    Trainer(model, arguments, train_dataset=[row(i) for i in range(4 * args.batch)]).train()
