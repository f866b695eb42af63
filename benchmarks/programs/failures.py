"""Programs that run out of memory."""

import torch
from gpt import Gpt, train_gpt
from models import llama
from truth import TRUTH, program


@program(limit_mib=2300)
def oom_backward():
    train_gpt(Gpt(n_layer=6, n_embd=768), steps=4, batch=9, seq=512)


@program(limit_mib=3600)
def oom_longer():
    model = llama(num_hidden_layers=6).cuda()
    TRUTH.model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    TRUTH.optimizer(optimizer)
    for length in (256, 320, 192, 384, 2048):
        tokens = torch.randint(0, 32000, (4, length), device="cuda")
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@program(limit_mib=4000)
def oom_leak():
    model = llama(num_hidden_layers=4).cuda()
    TRUTH.model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    TRUTH.optimizer(optimizer)
    history = []
    for _ in range(50):
        tokens = torch.randint(0, 32000, (4, 512), device="cuda")
        out = model(input_ids=tokens, labels=tokens)
        out.loss.backward()
        history.append(out.logits.detach())
        TRUTH.tag(out.logits, "logits", "leaked")
        optimizer.step()
        optimizer.zero_grad()


@program(limit_mib=2600)
def oom_loss_graph():
    """Keeps each step's loss with its graph: total += loss."""
    model = Gpt(n_layer=6).cuda()
    TRUTH.model(model)
    total = 0
    for _ in range(50):
        x = torch.randint(0, 50304, (2, 512), device="cuda")
        total = total + model(x, x)[1]


@program(limit_mib=1200)
def oom_eval():
    model = llama(num_hidden_layers=4).cuda().eval()
    TRUTH.model(model)
    collected = []
    with torch.no_grad():
        for _ in range(50):
            tokens = torch.randint(0, 32000, (2, 512), device="cuda")
            collected.append(model(input_ids=tokens).logits)


@program(limit_mib=900)
def oom_generate():
    model = llama(num_hidden_layers=4).cuda().eval()
    TRUTH.model(model)
    model.generate(torch.randint(0, 32000, (64, 512), device="cuda"), max_new_tokens=200, do_sample=False)


@program(limit_mib=2400)
def oom_caught():
    """Halves its batch where memory runs out, and goes on."""
    model = llama(num_hidden_layers=4).cuda()
    TRUTH.model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    TRUTH.optimizer(optimizer)
    batch, done = 32, 0
    while done < 3:
        try:
            tokens = torch.randint(0, 32000, (batch, 512), device="cuda")
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
        except torch.OutOfMemoryError:
            batch //= 2
            optimizer.zero_grad()
            torch.cuda.empty_cache()
