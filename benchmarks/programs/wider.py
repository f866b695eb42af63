"""Language models and optimizers of further kinds, written by hand."""

import copy

import torch
import torch.nn.functional as F
from generative import STEPS, noted
from gpt import Block, Gpt
from torch import nn
from truth import DEVICE, TRUTH, program

VOCAB = 32000


class Body(nn.Module):
    def __init__(self, n_embd=512, n_layer=4, vocab=VOCAB):
        super().__init__()
        self.wte, self.h = nn.Embedding(vocab, n_embd), nn.ModuleList([Block(n_embd, 8) for _ in range(n_layer)])
        self.norm, self.wrap = nn.LayerNorm(n_embd), None

    def forward(self, tokens):
        x = self.wte(tokens)
        for block in self.h:
            x = self.wrap(block, x) if self.wrap else block(x)
        return self.norm(x)


class Policy(nn.Module):
    """A language model without a loss of its own."""

    def __init__(self, n_embd=512, n_layer=4, vocab=VOCAB):
        super().__init__()
        self.body, self.head = Body(n_embd, n_layer, vocab), nn.Linear(n_embd, vocab, bias=False)

    def forward(self, tokens):
        logits = self.head(self.body(tokens))
        TRUTH.tag(logits, "logits")
        return logits


def adamw(weights):
    return torch.optim.AdamW(weights, lr=1e-4)


def tokens_of(batch=8, seq=256, vocab=VOCAB):
    tokens = torch.randint(0, vocab, (batch, seq), device=DEVICE)
    TRUTH.tag(tokens, "inputs", "tokens")
    return tokens


def scores_of(logits, tokens):
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), tokens[:, 1:].reshape(-1))


def train(model, loss_of, make=adamw, steps=STEPS):
    model, optimizer = noted(model, make)
    for _ in range(steps):
        tokens = tokens_of()
        loss_of(model, tokens).backward()
        TRUTH.step(model, optimizer)


@program()
def recurrent():
    """The logits [T, V] are as large as the table [V, D]."""

    class Recurrent(nn.Module):
        def __init__(self, width=512):
            super().__init__()
            self.embed, self.layers = nn.Embedding(VOCAB, width), nn.LSTM(width, width, 2, batch_first=True)
            self.head = nn.Linear(width, VOCAB)

        def forward(self, tokens):
            logits = self.head(self.layers(self.embed(tokens))[0])
            TRUTH.tag(logits, "logits")
            return logits

    model, optimizer = noted(Recurrent())
    for _ in range(STEPS):
        tokens = tokens_of(8, 64)
        F.cross_entropy(model(tokens).transpose(1, 2), tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        TRUTH.step(model, optimizer)


@program()
def translation():
    """An encoder and a decoder of torch's own, label smoothing."""

    class Translator(nn.Module):
        def __init__(self, width=512):
            super().__init__()
            self.source, self.target = nn.Embedding(VOCAB, width), nn.Embedding(VOCAB, width)
            self.layers = nn.Transformer(width, 8, 3, 3, 2048, batch_first=True)
            self.generator = nn.Linear(width, VOCAB)

        def forward(self, source, target):
            mask = nn.Transformer.generate_square_subsequent_mask(target.size(1), device=target.device)
            logits = self.generator(self.layers(self.source(source), self.target(target), tgt_mask=mask))
            TRUTH.tag(logits, "logits")
            return logits

    model, optimizer = noted(Translator())
    for _ in range(STEPS):
        source, target = tokens_of(16, 100), tokens_of(16, 101)
        logits = model(source, target[:, :-1])
        F.cross_entropy(logits.reshape(-1, VOCAB), target[:, 1:].reshape(-1), label_smoothing=0.1).backward()
        TRUTH.step(model, optimizer)


@program(vocabulary=False)
def tagger():
    """A class per token."""
    train(
        nn.Sequential(Body(), nn.Linear(512, 17)),
        lambda model, tokens: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten() % 17),
    )


@program(vocabulary=False)
def many_labels():
    """A binary cross-entropy over far more classes than there are words."""

    class Labels(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.classes = Body(), nn.Linear(512, 131072)

        def forward(self, tokens):
            scores = self.classes(self.body(tokens).mean(1))
            TRUTH.tag(scores, "activations", "scores")
            return scores

    def loss_of(model, tokens):
        scores = model(tokens)
        return F.binary_cross_entropy_with_logits(scores, torch.zeros_like(scores))

    train(Labels(), loss_of)


@program(vocabulary=False)
def reward_model():
    """A score per sequence, compared in pairs."""

    class Reward(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.score = Body(), nn.Linear(512, 1, bias=False)

        def forward(self, tokens):
            return self.score(self.body(tokens)[:, -1]).squeeze(-1)

    train(Reward(), lambda model, tokens: -F.logsigmoid(model(tokens) - model(tokens.flip(0))).mean())


@program()
def policy_gradient():
    """PPO: a policy with a value head, a frozen copy, two epochs over the same samples."""

    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.value = Body(), nn.Linear(512, VOCAB, bias=False), nn.Linear(512, 1)

        def forward(self, tokens):
            hidden = self.body(tokens)
            logits = self.head(hidden)
            TRUTH.tag(logits, "logits")
            return logits, self.value(hidden).squeeze(-1)

    model, optimizer = noted(Actor(), adamw)
    frozen = copy.deepcopy(model).requires_grad_(requires_grad=False).eval()
    TRUTH.live("parameters", lambda: list(frozen.parameters()))

    def chosen(logits, tokens):
        return F.log_softmax(logits[:, :-1], dim=-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)

    for _ in range(2):
        tokens = tokens_of()
        with torch.no_grad():
            logits, values = model(tokens)
            before, reference = chosen(logits, tokens), chosen(frozen(tokens)[0], tokens)
            del logits
        reward = torch.randn(8, 255, device=DEVICE) - 0.1 * (before - reference)
        gain = reward - values[:, :-1]
        for _ in range(2):
            logits, values = model(tokens)
            ratio = (chosen(logits, tokens) - before).exp()
            loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            loss = loss + 0.1 * (values[:, :-1] - reward).square().mean()
            shares = F.softmax(logits, dim=-1)
            loss = loss - 0.01 * -(shares * F.log_softmax(logits, dim=-1)).sum(-1).mean()
            TRUTH.tag(shares, "ce_or_logits", "shares")
            loss.backward()
            del logits, shares
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            TRUTH.step(model, optimizer)


@program()
def distillation():
    """A Kullback-Leibler divergence between two tensors of logits."""
    student, optimizer = noted(Policy(n_layer=2), adamw)
    teacher = Policy(n_embd=768, n_layer=4).to(DEVICE).to(torch.bfloat16).requires_grad_(requires_grad=False)
    TRUTH.live("parameters", lambda: list(teacher.parameters()))
    for _ in range(STEPS):
        tokens = tokens_of()
        with torch.no_grad():
            aims = teacher(tokens)
        logits = student(tokens)
        scores, shares = F.log_softmax(logits / 2, dim=-1), F.softmax(aims.float() / 2, dim=-1)
        TRUTH.tag(scores, "ce_or_logits", "log-probabilities")
        TRUTH.tag(shares, "ce_or_logits", "probabilities")
        loss = 4 * F.kl_div(scores.flatten(0, 1), shares.flatten(0, 1), reduction="batchmean")
        (loss + scores_of(logits, tokens)).backward()
        del scores, shares, logits, aims
        TRUTH.step(student, optimizer)


class Experts(nn.Module):
    def __init__(self, width=512, count=8, chosen=2):
        super().__init__()
        self.router, self.chosen = nn.Linear(width, count, bias=False), chosen
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(count)
        )

    def forward(self, x):
        flat = x.flatten(0, 1)
        routed = self.router(flat)
        weights, _ = routed.softmax(-1).topk(self.chosen, dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            # as many tokens for each, so that shapes do not depend on values
            rows = torch.arange(number, len(flat), len(self.experts), device=x.device)
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, :1])
        shares = routed.softmax(-1).mean(0)
        self.extra = (shares * shares).sum() + routed.logsumexp(-1).square().mean()
        return x + out.view_as(x)


@program()
def routed():
    """A mixture of experts with a balancing loss and a z-loss over the router's scores."""
    model = Policy(n_layer=2)
    model.body.h.extend([Experts(), Experts()])

    def loss_of(model, tokens):
        loss = scores_of(model(tokens), tokens)
        return loss + sum(0.01 * each.extra for each in model.modules() if isinstance(each, Experts))

    train(model, loss_of)


@program()
def nested_checkpoints():
    from torch.utils.checkpoint import checkpoint

    class Half(nn.Module):
        def __init__(self, blocks):
            super().__init__()
            self.blocks = blocks

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    model = Policy(n_layer=6)
    model.body.h = nn.ModuleList([Half(model.body.h[:3]), Half(model.body.h[3:])])
    model.body.wrap = lambda half, x: checkpoint(half, x, use_reentrant=False)
    train(model, lambda model, tokens: scores_of(model(tokens), tokens))


@program()
def activations_on_host():
    def loss_of(model, tokens):
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return scores_of(model(tokens), tokens)

    train(Policy(), loss_of)


class Int8Linear(nn.Module):
    """A frozen int8 weight with a scale per row, and an adapter."""

    def __init__(self, made, rank=8):
        super().__init__()
        out, width = made.weight.shape
        self.register_buffer("weight", torch.randint(-127, 127, (out, width), dtype=torch.int8))
        self.register_buffer("scale", torch.ones(out, 1))
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, out, bias=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype)) + self.up(self.down(x))


@program()
def int8_adapters():
    model = Policy()
    for block in model.body.h:
        for inner in (block.attn, block.mlp):
            for name, child in list(inner.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(inner, name, Int8Linear(child))
    for name, weight in model.named_parameters():
        weight.requires_grad_(".down." in name or ".up." in name)
    train(model, lambda model, tokens: scores_of(model(tokens), tokens))


@program(vocabulary=False)
def gradients_per_sample():
    """torch.func: gradients of each sample by vmap, clipped and added."""
    model, optimizer = noted(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10)))

    def loss_of(weights, x, y):
        return F.cross_entropy(torch.func.functional_call(model, weights, (x[None],)), y[None])

    each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))
    for _ in range(STEPS):
        x, y = torch.randn(256, 256, device=DEVICE), torch.randint(0, 10, (256,), device=DEVICE)
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        slopes = each(weights, x, y)
        norms = torch.stack([slope.flatten(1).norm(dim=1) for slope in slopes.values()]).norm(dim=0)
        for name, weight in model.named_parameters():
            weight.grad = torch.einsum("b,b...->...", (1 / norms).clamp(max=1), slopes[name])
        del slopes
        TRUTH.step(model, optimizer)


class Shampoo(torch.optim.Optimizer):
    """Preconditioners of both sides, and a momentum."""

    def __init__(self, weights, lr=1e-3):
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state, slope = self.state[weight], weight.grad
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                    if slope.dim() == 2 and max(slope.shape) <= 4096:
                        state["left"] = 1e-4 * torch.eye(slope.shape[0], device=slope.device)
                        state["right"] = 1e-4 * torch.eye(slope.shape[1], device=slope.device)
                if "left" in state:
                    state["left"].add_(slope @ slope.T)
                    state["right"].add_(slope.T @ slope)
                    slope = state["left"] @ slope @ state["right"]
                state["momentum"].mul_(0.9).add_(slope)
                weight.add_(state["momentum"], alpha=-group["lr"])


@program()
def shampoo():
    train(Policy(), lambda model, tokens: scores_of(model(tokens), tokens), Shampoo)


@program()
def sharpness():
    """Sharpness-aware minimization: two passes a step, weights saved and restored."""
    model, optimizer = noted(Policy(n_layer=2), lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9))
    for _ in range(STEPS):
        tokens, saved = tokens_of(), []
        scores_of(model(tokens), tokens).backward()
        with torch.no_grad():
            norm = torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters()])
            for weight in model.parameters():
                saved.append(weight.clone())
                weight.add_(weight.grad / norm, alpha=0.05)
        model.zero_grad()
        scores_of(model(tokens), tokens).backward()
        with torch.no_grad():
            for weight, before in zip(model.parameters(), saved, strict=True):
                weight.copy_(before)
        TRUTH.step(model, optimizer)


@program()
def optimizer_in_backward():
    """Each gradient is applied and dropped as soon as it exists."""
    model = Policy().to(DEVICE)
    TRUTH.live("parameters", lambda: list(model.parameters()))
    optimizers = {weight: torch.optim.AdamW([weight], foreach=False) for weight in model.parameters()}
    for each in optimizers.values():
        TRUTH.optimizer(each)

    def apply(weight):
        TRUTH.tag(weight.grad, "gradients")
        optimizers[weight].step()
        optimizers[weight].zero_grad()

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(apply)
    for _ in range(STEPS):
        tokens = tokens_of()
        scores_of(model(tokens), tokens).backward()


@program()
def byte_level():
    """A vocabulary of bytes under autocast with a scaler: logits smaller than activations."""
    model, optimizer = noted(Gpt(vocab=256, n_layer=4), adamw)
    scaler = torch.amp.GradScaler(DEVICE)
    for _ in range(STEPS):
        tokens = tokens_of(8, 512, 256)
        with torch.autocast(DEVICE, torch.bfloat16):
            _, loss = model(tokens, tokens)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@program()
def own_sampling():
    """A model sampled token by token without a cache, then trained on what it wrote."""
    model, optimizer = noted(Policy(n_layer=2), adamw)
    for _ in range(2):
        tokens = tokens_of(16, 64)
        model.eval()
        with torch.no_grad():
            for _ in range(8):
                scores = model(tokens)[:, -1].float() / 0.8
                best = torch.topk(scores, 50).values[:, -1:]
                shares = F.softmax(scores.masked_fill(scores < best, float("-inf")), dim=-1)
                tokens = torch.cat([tokens, torch.multinomial(shares, 1)], 1)
        model.train()
        scores_of(model(tokens), tokens).backward()
        TRUTH.step(model, optimizer)
