"""Trainer from scratch: evaluation with metrics, saving, the best checkpoint loaded at the end."""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import MistralConfig, MistralForCausalLM, Trainer, TrainingArguments, default_data_collator

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=8)
p.add_argument("--width", type=int, default=1024)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=512)
p.add_argument("--vocabulary", type=int, default=32768)
p.add_argument("--optim", default="adamw_torch")
args = p.parse_args()


class Lines(Dataset):
    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(args.vocabulary, (count, args.seq), generator=torch.Generator().manual_seed(count))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


def accuracy(result) -> dict[str, float]:
    return {"accuracy": float((result.predictions[:, :-1] == result.label_ids[:, 1:]).mean())}


torch.manual_seed(0)
config = MistralConfig(
    hidden_size=args.width,
    intermediate_size=args.width * 7 // 2,
    num_hidden_layers=args.layers,
    num_attention_heads=args.width // 64,
    num_key_value_heads=max(args.width // 256, 1),
    head_dim=64,
    vocab_size=args.vocabulary,
    sliding_window=256,
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=4,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=2 * args.batch,
        gradient_accumulation_steps=2,
        learning_rate=1e-4,
        bf16=torch.cuda.is_available(),
        optim=args.optim,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        save_total_limit=1,
        load_best_model_at_end=True,
        logging_steps=1,
        report_to=[],
    )
    trainer = Trainer(
        MistralForCausalLM(config),
        arguments,
        data_collator=default_data_collator,
        train_dataset=Lines(64),
        eval_dataset=Lines(24),
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, _labels: logits.argmax(-1),
    )
    trainer.train()
    print(trainer.evaluate())
