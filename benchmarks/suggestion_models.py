"""The models, data and optimizers of `suggestion_programs.py`, each with the change that a run makes."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional

STEPS = 3


class Setting:
    """The device, the sizes, and the change to make ("" for none)."""

    def __init__(self, device: str, change: str) -> None:
        self.device, self.change = device, change
        self.small = device == "cpu"
        self.vocab, self.seq = (512, 64) if self.small else (64000, 1024)
        self.batch = 4 if self.small else 8

    def does(self, change: str) -> bool:
        """Whether this is the change to make."""
        return self.change == change

    def batches(self, batch: int | None = None, *, steps: int = STEPS) -> Iterator[torch.Tensor]:
        """Tokens of each step."""
        for _ in range(steps):
            yield torch.randint(0, self.vocab, (batch or self.batch, self.seq)).to(self.device)

    def offload(self) -> Any:
        """A context for the forward pass: saved tensors go to main memory if that is the change."""
        return (
            torch.autograd.graph.save_on_cpu(pin_memory=not self.small)
            if self.does("activation-offload")
            else nullcontext()
        )

    def autocast(self) -> Any:
        """bf16 autocast."""
        return torch.autocast(self.device, torch.bfloat16)


PROGRAMS: dict[str, Callable[[Setting], None]] = {}


def program(function: Callable[[Setting], None]) -> Callable[[Setting], None]:
    """Register a program under its name."""
    PROGRAMS[function.__name__.replace("_", "-")] = function
    return function


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then the MLP."""
        batch, tokens, width = x.shape
        parts = self.qkv(self.norm_1(x)).split(width, dim=2)
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """A GPT written by hand."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        width, layers, heads = (64, 2, 4) if setting.small else (768, 12, 12)
        self.setting = setting
        self.embedding = nn.Embedding(setting.vocab, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, setting.vocab, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Logits and loss."""
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.setting.does("checkpointing"):
                from torch.utils.checkpoint import checkpoint

                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        hidden = self.norm(x)
        if self.setting.does("fused-loss"):
            from ligerprof.kernels.linear_cross_entropy.triton import fused_linear_cross_entropy

            return None, fused_linear_cross_entropy(hidden, self.head.weight, labels)
        logits = self.head(hidden)
        return logits, functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


def gpt(setting: Setting) -> Gpt:
    """The GPT on its device."""
    return Gpt(setting).to(setting.device, torch.bfloat16 if setting.does("bf16-weights") else torch.float32)


def llama(setting: Setting, *, by_trainer: bool = False, **changes: Any) -> Any:
    """A transformers Llama, or a model with its config."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    large = {"hidden": 1024, "intermediate": 2816, "layers": 8, "heads": 16}
    small = {"hidden": 64, "intermediate": 128, "layers": 2, "heads": 4}
    sizes = {"kv_heads": 4, **(small if setting.small else {**large, **changes})}
    dtype = changes.get("dtype", torch.bfloat16)
    dtype = torch.bfloat16 if setting.does("bf16-weights") else dtype
    attention = changes.get("attention", "sdpa")
    config = CONFIG_MAPPING[changes.get("model_type", "llama")](
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["intermediate"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        vocab_size=setting.vocab,
        tie_word_embeddings=changes.get("tied", False),
        max_position_embeddings=4096,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).train()
    if setting.does("lora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    if by_trainer:
        return model
    if not setting.does("cpu-offload"):
        model = model.to(setting.device)
    if setting.does("fused-loss"):
        import ligerprof.kernels

        ligerprof.kernels.apply(model, "flce")
    if setting.does("checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def optimizer_of(setting: Setting, model: nn.Module, *, fused: bool | None = None) -> torch.optim.Optimizer:
    """AdamW with torch's default, foreach on a GPU, or that of a change."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if setting.does("8-bit-optimizer") or setting.does("paged-optimizer"):
        import bitsandbytes

        kind = bitsandbytes.optim.AdamW8bit if setting.does("8-bit-optimizer") else bitsandbytes.optim.PagedAdamW32bit
        optimizer: torch.optim.Optimizer = kind(weights, lr=1e-4)
        return optimizer
    return torch.optim.AdamW(weights, lr=1e-4, fused=True if setting.does("fused-optimizer") else fused)


def parts_of(setting: Setting, batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The micro-batches of a step."""
    return batch.chunk(2) if setting.does("half-batch") else (batch,)


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sequences."""

    def __init__(self, setting: Setting, count: int = 256) -> None:
        self.setting, self.count = setting, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, self.setting.vocab, (self.setting.seq,))
        return {"input_ids": tokens, "labels": tokens.clone()}
