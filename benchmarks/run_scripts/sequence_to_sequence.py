"""An encoder-decoder under Seq2SeqTrainer, which generates in its evaluations."""

import tempfile

import torch
from transformers import (
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)


def main() -> None:
    config = T5Config(
        d_model=256, d_kv=32, d_ff=1024, num_layers=3, num_heads=8, vocab_size=8000, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config)
    model.generation_config = GenerationConfig(decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    tokens = torch.randint(2, 8000, (32, 128))
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[:64]} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        arguments = Seq2SeqTrainingArguments(
            output_dir=folder,
            max_steps=6,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=16,
            eval_strategy="steps",
            eval_steps=3,
            predict_with_generate=True,
            generation_max_length=24,
            save_strategy="no",
            report_to=[],
        )
        Seq2SeqTrainer(model, arguments, train_dataset=rows, eval_dataset=rows).train()
    print("PEAK", torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    main()
