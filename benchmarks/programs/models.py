"""A transformers Llama, random sequences, and transformers' Trainer."""

import torch
from truth import TRUTH, states_of


def llama(**changes):
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    dtype = changes.pop("dtype", torch.bfloat16)
    config |= changes
    return AutoModelForCausalLM.from_config(LlamaConfig(**config), dtype=dtype)


class Tokens(torch.utils.data.Dataset):
    def __init__(self, vocab=32000, seq=512, count=64):
        self.vocab, self.seq, self.count = vocab, seq, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        tokens = torch.randint(0, self.vocab, (self.seq,))
        return {"input_ids": tokens, "labels": tokens.clone()}


def trainer(model, **changes):
    from transformers import Trainer, TrainingArguments

    arguments = {
        "output_dir": "/tmp/trained",
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    arguments.update(changes)
    made = Trainer(model=model, args=TrainingArguments(**arguments), train_dataset=Tokens())
    TRUTH.model(model)
    TRUTH.live("optimizer_states", lambda: states_of(made.optimizer) if made.optimizer else [])
    return made
