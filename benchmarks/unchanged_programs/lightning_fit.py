"""Lightning trains a causal model in bf16-mixed with checkpointing, accumulation and clipping."""

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.for_model(
    "llama",
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=8,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=128256,
    tie_word_embeddings=True,
)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.inner.gradient_checkpointing_enable()

    def training_step(self, batch: torch.Tensor, _index: int) -> torch.Tensor:
        return self.inner(input_ids=batch, labels=batch).loss

    def validation_step(self, batch: torch.Tensor, _index: int) -> None:
        self.log("v", self.inner(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


data = torch.randint(0, 128256, (24, 1024))
trainer = lightning.Trainer(
    max_steps=3,
    precision="bf16-mixed",
    accumulate_grad_batches=2,
    logger=False,
    enable_checkpointing=False,
    limit_val_batches=1,
    val_check_interval=4,
    gradient_clip_val=1.0,
)
trainer.fit(Module(), DataLoader(data, batch_size=2), DataLoader(data, batch_size=2))
