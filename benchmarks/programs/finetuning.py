"""Programs that fine-tune: Trainer with evaluation and checkpointing, adapters, DPO and GRPO as TRL computes them."""

import torch
import torch.nn.functional as F
from generative import noted
from models import Tokens, llama
from torch import nn
from truth import DEVICE, TRUTH, program, states_of
from wider import adamw, tokens_of

VOCAB = 32000
SMALL = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8}
SMALL |= {"num_key_value_heads": 4, "dtype": torch.float32}


def with_head_noted(model):
    """Note what the head returns, and its input."""

    def note(_module, inputs, output):
        TRUTH.tag(inputs[0], "activations", "the head's input")
        TRUTH.tag(output, "logits", "the head's output")

    model.get_output_embeddings().register_forward_hook(note)
    return model


def trained(model, evaluates=False, **changes):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Notes(TrainerCallback):
        def on_pre_optimizer_step(self, *_, model, **__):
            for name, weight in model.named_parameters():
                TRUTH.tag(weight.grad, "gradients", name)

    arguments = {"output_dir": "/tmp/finetuned", "per_device_train_batch_size": 2, "max_steps": 3, "report_to": []}
    arguments |= {"save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "use_cpu": DEVICE == "cpu"}
    if evaluates:
        arguments |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    TRUTH.model(model)
    made = Trainer(
        model=with_head_noted(model),
        args=TrainingArguments(**(arguments | changes)),
        train_dataset=Tokens(seq=256),
        eval_dataset=Tokens(seq=256, count=12),
        callbacks=[Notes()],
    )
    TRUTH.live("optimizer_states", lambda: states_of(made.optimizer) if made.optimizer else [])
    made.train()


@program()
def trainer_accum_eval():
    trained(llama(**SMALL), evaluates=True, bf16=True, gradient_accumulation_steps=3)


@program()
def trainer_reentrant():
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": True}, "per_device_train_batch_size": 8}
    trained(llama(**SMALL, tie_word_embeddings=True), gradient_checkpointing=True, bf16=True, **options)


@program()
def trainer_no_reentrant_fp16():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    options = {"gradient_checkpointing_kwargs": {"use_reentrant": False}, "per_device_train_batch_size": 8}
    sizes = {name: value for name, value in SMALL.items() if name != "dtype"}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, head_dim=64, **sizes))
    trained(model, gradient_checkpointing=True, fp16=True, optim="adamw_torch", **options)


class Adapter(nn.Module):
    """A frozen 16-bit layer and a low-rank one in fp32, with dropout."""

    def __init__(self, base, rank=16):
        super().__init__()
        self.base_layer, self.scaling = base, 2.0
        self.dropout = nn.Dropout(0.05)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        self.to(base.weight.device)

    def forward(self, x):
        added = self.lora_B(self.lora_A(self.dropout(x.to(self.lora_A.weight.dtype)))) * self.scaling
        return self.base_layer(x) + added.to(x.dtype)


@program()
def adapters_autocast():
    model = llama(**(SMALL | {"dtype": torch.bfloat16, "num_hidden_layers": 6})).requires_grad_(requires_grad=False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name)))
    model = with_head_noted(model.to(DEVICE))
    TRUTH.model(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    TRUTH.optimizer(optimizer)
    for _ in range(3):
        tokens = tokens_of(8, 256)
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        TRUTH.step(model, optimizer)


def chosen_scores(logits, index):
    """TRL's `selective_log_softmax`: the log-probability of each chosen token."""
    if logits.dtype in (torch.float32, torch.float64):
        chosen = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
        return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    found = []
    for row, labels in zip(logits, index, strict=True):
        scores = F.log_softmax(row, dim=-1)
        found.append(scores.gather(dim=-1, index=labels.unsqueeze(-1)).squeeze(-1))
    return torch.stack(found)


def pair_scores(model, tokens, mask):
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    labels, mask = tokens[:, 1:].clone(), mask[:, 1:]
    labels[~mask] = 0
    scores = chosen_scores(logits, labels)
    scores = torch.where(mask, scores, torch.zeros_like(scores))
    return scores.sum(-1), logits[: len(logits) // 2].detach().mean()


def preferences(make, autocast):
    policy, optimizer = noted(with_head_noted(llama(**(SMALL | make))), adamw)
    reference = with_head_noted(llama(**(SMALL | make))).to(DEVICE).eval()
    TRUTH.model(reference)
    for _ in range(3):
        tokens, mask = tokens_of(8, 256), torch.ones(8, 256, dtype=torch.bool, device=DEVICE)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            actual, mean = pair_scores(policy, tokens, mask)
            with torch.no_grad():
                expected, _ = pair_scores(reference, tokens, mask)
            ratio = actual - expected
            loss = -F.logsigmoid(0.1 * (ratio[:4] - ratio[4:])).mean()
        (loss / 2 + 0 * mean).backward()
        TRUTH.step(policy, optimizer)


@program()
def dpo_fp32():
    preferences({}, autocast=True)


@program()
def dpo_bf16():
    preferences({"dtype": torch.bfloat16}, autocast=False)


def completion_scores(model, tokens, kept, temperature):
    logits = model(input_ids=tokens, logits_to_keep=kept + 1, use_cache=False).logits
    logits = logits[:, :-1, :]
    logits = logits[:, -kept:] / temperature
    TRUTH.tag(logits, "logits", "scaled logits")
    scores = chosen_scores(logits, tokens[:, -kept:])
    with torch.no_grad():
        log_shares = F.log_softmax(logits, dim=-1)
        TRUTH.tag(log_shares, "ce_or_logits", "log-probabilities")
        entropy = -(log_shares.exp() * log_shares).sum(-1)
    return scores, entropy


def rewarded(dtype, kept=128):
    policy, optimizer = noted(with_head_noted(llama(**(SMALL | {"dtype": dtype}))), adamw)
    reference = llama(**(SMALL | {"dtype": dtype})).to(DEVICE).eval().requires_grad_(requires_grad=False)
    TRUTH.model(reference)
    for _ in range(2):
        tokens = tokens_of(16, 192)
        with torch.no_grad():
            before, _ = completion_scores(policy, tokens, kept, 0.9)
            expected, _ = completion_scores(reference, tokens, kept, 0.9)
        rewards = torch.randn(16, device=DEVICE).view(-1, 8)
        gain = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        for _ in range(2):
            actual, entropy = completion_scores(policy, tokens, kept, 0.9)
            ratio = torch.exp(actual - before)
            loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
            apart = torch.exp(expected - actual) - (expected - actual) - 1
            (loss + 0.04 * apart).mean().backward()
            del entropy
            TRUTH.step(policy, optimizer)


@program()
def grpo_fp32():
    rewarded(torch.float32)


@program()
def grpo_bf16():
    rewarded(torch.bfloat16)
