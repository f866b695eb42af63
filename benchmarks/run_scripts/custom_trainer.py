"""A Trainer with its own compute_loss, data workers, metrics over the logits, and a checkpoint at the end."""

import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Rows(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(8000, (128,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class WeightedTrainer(Trainer):
    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_named: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weights = torch.linspace(0.5, 1.5, labels.shape[1] - 1, device=labels.device)
        losses = torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
        )
        loss = (losses.view(labels.shape[0], -1) * weights).mean()
        return (loss, outputs) if return_outputs else loss


def main() -> None:
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8, vocab_size=8000
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=8,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=32,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            dataloader_num_workers=2,
            eval_strategy="steps",
            eval_steps=4,
            save_steps=8,
            report_to=[],
        )
        trainer = WeightedTrainer(
            LlamaForCausalLM(config),
            arguments,
            train_dataset=Rows(),
            eval_dataset=Rows(),
            compute_metrics=lambda found: {"right": float((found.predictions.argmax(-1) == found.label_ids).mean())},
        )
        trainer.train()
    print("PEAK", torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    main()
