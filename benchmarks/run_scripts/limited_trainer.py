"""A short Trainer run under a limit on the device's memory; every flag is one change that a user could make."""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

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
options = parser.parse_args()


def main() -> None:
    if options.limit_bytes:
        fraction = options.limit_bytes / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(fraction)
    shared = {"vocab_size": options.vocabulary, "attn_implementation": options.attention}
    model = (
        GPT2LMHeadModel(GPT2Config(n_layer=options.layers, n_embd=512, n_head=8, **shared))
        if options.model == "gpt2"
        else LlamaForCausalLM(
            LlamaConfig(
                hidden_size=512,
                intermediate_size=1408,
                num_hidden_layers=options.layers,
                num_attention_heads=8,
                **shared,
            )
        )
    )
    if options.fused_loss:
        from ligerprof import kernels

        kernels.apply(model.cuda(), "flce")
    tokens = torch.randint(options.vocabulary, (max(64, options.eval_batch), options.seq))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=4,
            per_device_train_batch_size=options.batch,
            per_device_eval_batch_size=options.eval_batch or 1,
            gradient_accumulation_steps=options.accumulation,
            gradient_checkpointing=options.checkpointing,
            optim="adamw_torch_fused" if options.fused_optimizer else "adamw_torch",
            bf16=options.autocast,
            eval_strategy="steps" if options.eval_batch else "no",
            eval_steps=2,
            prediction_loss_only=True,
            save_strategy="no",
            report_to=[],
        )
        Trainer(model, arguments, train_dataset=rows, eval_dataset=rows).train()
    print("RESERVED", torch.cuda.max_memory_reserved())
    print("PEAK", torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    main()
