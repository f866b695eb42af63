"""transformers' Trainer with accumulation, evaluation and saving."""

import tempfile
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Clock(TrainerCallback):
    def on_step_begin(self, *_arguments: Any, **_named: Any) -> None:
        self.begin = time.perf_counter()

    def on_step_end(self, *_arguments: Any, **_named: Any) -> None:
        torch.cuda.synchronize()
        print("STEP", time.perf_counter() - self.begin)


def main() -> None:
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8, vocab_size=32000
    )
    rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(32000, (160, 256))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=20,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=16,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=10,
            save_steps=10,
            bf16=True,
            report_to=[],
        )
        Trainer(
            LlamaForCausalLM(config), arguments, train_dataset=rows, eval_dataset=rows[:32], callbacks=[Clock()]
        ).train()
    print("PEAK", torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    main()
