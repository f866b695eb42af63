"""Trainer with TrainingArguments on the command line: a Llama of random weights, texts of one length."""

from dataclasses import dataclass

import torch
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


@dataclass
class ModelArguments:
    layers: int = 8
    width: int = 2048
    vocabulary: int = 32768
    seq: int = 2048


class Texts(Dataset):
    def __init__(self, vocabulary: int, length: int) -> None:
        self.tokens = torch.randint(vocabulary, (256, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


sizes, arguments = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=sizes.width,
    intermediate_size=sizes.width * 4,
    num_hidden_layers=sizes.layers,
    num_attention_heads=sizes.width // 64,
    num_key_value_heads=max(sizes.width // 256, 1),
    vocab_size=sizes.vocabulary,
)
with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
    model = LlamaForCausalLM(config)
Trainer(model, arguments, train_dataset=Texts(sizes.vocabulary, sizes.seq)).train()
