"""Programs that train language models: nanoGPT-like loops, Trainer, Lightning, accelerate, peft, other optimizers."""

import functools

import torch
from gpt import Gpt, train_gpt
from models import Tokens, llama, trainer
from truth import TRUTH, program, states_of


@program()
def trainer_accum():
    trainer(llama(dtype=torch.float32), bf16=True, gradient_accumulation_steps=3, per_device_train_batch_size=2).train()


@program()
def trainer_ckpt_adafactor():
    trainer(llama(), gradient_checkpointing=True, optim="adafactor").train()


@program()
def trainer_eval():
    made = trainer(llama(num_hidden_layers=3), max_steps=1)
    made.train()
    made.eval_dataset = Tokens(count=24)
    made.evaluate()


@program()
def nanogpt():
    train_gpt(Gpt(), accum=2)


@program(context="alloc", stacks="python")
def nanogpt_python():
    train_gpt(Gpt(), accum=2)


@program(late=True)
def nanogpt_late():
    train_gpt(Gpt(), steps=4)


@program()
def nanogpt_compiled():
    model = Gpt(n_layer=4)
    train_gpt(torch.compile(model))


@program()
def selective():
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]

    def policy(_ctx, op, *_a, **_k):
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    context = functools.partial(create_selective_checkpoint_contexts, policy)
    train_gpt(Gpt(wrap=lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=context)))


@program()
def muon():
    class Both:
        def __init__(self, parameters):
            parameters = list(parameters)
            matrices = [
                p
                for p in parameters
                if p.ndim == 2 and p.shape[0] < 10000 and p.shape[1] < 10000 and p.shape[0] != 1024
            ]
            ids = {id(p) for p in matrices}
            self.parts = [
                torch.optim.Muon(matrices, lr=1e-3),
                torch.optim.AdamW([p for p in parameters if id(p) not in ids], lr=1e-4),
            ]

        @property
        def state(self):
            return {**self.parts[0].state, **self.parts[1].state}

        def step(self):
            for part in self.parts:
                part.step()

        def zero_grad(self, set_to_none=True):
            for part in self.parts:
                part.zero_grad(set_to_none=set_to_none)

    train_gpt(Gpt(n_layer=6), optimizer=Both)


@program()
def lion():
    class Lion(torch.optim.Optimizer):
        def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1):
            super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    if not state:
                        state["exp_avg"] = torch.zeros_like(p)
                    avg, (b1, b2) = state["exp_avg"], group["betas"]
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    update = avg.clone().mul_(b1).add(p.grad, alpha=1 - b1).sign_()
                    p.add_(update, alpha=-group["lr"])
                    avg.mul_(b2).add_(p.grad, alpha=1 - b2)

    train_gpt(Gpt(n_layer=6), optimizer=Lion)


@program()
def compiled_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=768, n_head=12)).cuda()
    TRUTH.model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    TRUTH.optimizer(optimizer)
    model = torch.compile(model)
    for _ in range(3):
        tokens = torch.randint(0, 50257, (8, 512), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@program()
def lora():
    from peft import LoraConfig, get_peft_model

    model = llama(num_hidden_layers=8)
    model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
    model.enable_input_require_grads()
    trainer(model, gradient_checkpointing=True, bf16=True, learning_rate=2e-4).train()


@program()
def lightning():
    import pytorch_lightning as pl

    class Lit(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.gpt = Gpt(n_layer=4)

        def training_step(self, batch, _index):
            return self.gpt(batch["input_ids"], batch["labels"])[1]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    lit = Lit()
    TRUTH.model(lit)
    fit = pl.Trainer(
        max_steps=3,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        devices=1,
    )
    TRUTH.live("optimizer_states", lambda: states_of(fit.optimizers[0]))
    fit.fit(lit, torch.utils.data.DataLoader(Tokens(vocab=50304), batch_size=8))


@program()
def accelerate_loop():
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    model = llama(dtype=torch.float32, num_hidden_layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = torch.utils.data.DataLoader(Tokens(count=16), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    TRUTH.model(model)
    TRUTH.live("optimizer_states", lambda: states_of(optimizer))
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


@program()
def hf_dense_bf16():
    trainer(llama(), bf16=False, optim="adamw_torch").train()
