"""Programs that train from nothing: scaled fp16, selective checkpoints, experts, images, optimizers, compiled GPT-2."""

import functools

import torch
import torch.nn.functional as F
from finetuning import with_head_noted
from generative import STEPS, noted
from gpt import Gpt
from torch import nn
from truth import DEVICE, TRUTH, program
from wider import Policy, adamw, scores_of, tokens_of, train

VOCAB = 32000


@program()
def nanogpt_fp16():
    """Micro-batches, a scaler, groups of weights with and without decay, and losses estimated between steps."""

    def grouped(weights):
        weights = list(weights)
        groups = [
            {"params": [w for w in weights if (w.dim() >= 2) is large], "weight_decay": 0.1 * large}
            for large in (True, False)
        ]
        return torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))

    model, optimizer = noted(Gpt(n_layer=4, n_embd=512, n_head=8, vocab=VOCAB), grouped)
    scaler, context = torch.amp.GradScaler(DEVICE), torch.autocast(DEVICE, torch.float16)

    @torch.no_grad()
    def estimate():
        model.eval()
        losses = torch.zeros(3)
        for k in range(3):
            x = tokens_of(8, 256)
            with context:
                _, loss = model(x, x)
            losses[k] = loss.item()
        model.train()
        return losses.mean()

    for _ in range(STEPS):
        estimate()
        x = tokens_of(8, 256)
        for _ in range(4):
            with context:
                _, loss = model(x, x)
                loss = loss / 4
            x = tokens_of(8, 256)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for name, weight in model.named_parameters():
            TRUTH.tag(weight.grad, "gradients", name)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


@program()
def selective_half():
    """Keeps attention and every second matrix product, under autocast."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def made():
        counts = {False: 0, True: 0}

        def policy(context, op, *_arguments, **_named):
            if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                counts[context.is_recompute] += 1
                keeps = counts[context.is_recompute] % 2 == 0
            else:
                keeps = "scaled_dot_product" in str(op)
            return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    model = Policy(n_layer=6)
    model.body.wrap = lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=made)

    def loss_of(model, tokens):
        with torch.autocast(DEVICE, torch.bfloat16):
            return scores_of(model(tokens), tokens)

    train(model, loss_of)


class GroupedExperts(nn.Module):
    """All experts' weights in one tensor each; tokens sorted by their expert; a shared expert."""

    def __init__(self, width=512, hidden=1024, count=8, chosen=2):
        super().__init__()
        self.gate, self.chosen, self.count = nn.Linear(width, count, bias=False), chosen, count
        self.up = nn.Parameter(torch.randn(count, width, 2 * hidden) * 0.02)
        self.down = nn.Parameter(torch.randn(count, hidden, width) * 0.02)
        self.shared = nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, width))

    def forward(self, x):
        flat = x.flatten(0, 1)
        shares = self.gate(flat).float().softmax(-1)
        weights, experts = shares.topk(self.chosen, dim=-1)
        order = experts.flatten().argsort()
        # as many tokens for each expert, as with a capacity
        sorted_tokens = flat[order // self.chosen].view(self.count, -1, flat.size(-1))
        gate, up = torch.bmm(sorted_tokens, self.up).chunk(2, dim=-1)
        out = torch.bmm(F.silu(gate) * up, self.down).flatten(0, 1)
        out = out * weights.flatten()[order, None].to(out.dtype)
        added = torch.zeros_like(flat).index_add(0, order // self.chosen, out)
        self.balance = (shares.mean(0) ** 2).sum() * self.count
        return x + (added + self.shared(flat)).view_as(x)


@program()
def grouped_experts():
    model = Policy(n_layer=2)
    model.body.h.extend([GroupedExperts(), GroupedExperts()])

    def loss_of(model, tokens):
        loss = scores_of(model(tokens), tokens)
        return loss + sum(0.01 * each.balance for each in model.modules() if isinstance(each, GroupedExperts))

    train(model.to(torch.bfloat16), loss_of, functools.partial(torch.optim.AdamW, lr=1e-4, fused=DEVICE == "cuda"))


@program(vocabulary=False)
def patches():
    """A ViT written as timm's: a class token, 21843 classes, mixed labels, an average of the weights."""

    class Attention(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.qkv, self.proj, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

        def forward(self, x):
            b, n, c = x.shape
            q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
            return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))

    class Layer(nn.Module):
        def __init__(self, width=384, heads=6):
            super().__init__()
            self.norm1, self.attn, self.norm2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x):
            x = x + self.attn(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    class Vit(nn.Module):
        def __init__(self, width=384, classes=21843):
            super().__init__()
            self.patch_embed = nn.Conv2d(3, width, 16, 16)
            self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
            self.pos_embed = nn.Parameter(torch.zeros(1, 197, width))
            self.blocks = nn.Sequential(*(Layer() for _ in range(6)))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

        def forward(self, images):
            x = self.patch_embed(images).flatten(2).transpose(1, 2)
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
            scores = self.head(self.norm(self.blocks(x))[:, 0])
            TRUTH.tag(scores, "activations", "scores of classes")
            return scores

    model, optimizer = noted(Vit(), adamw)
    average = {name: value.detach().clone() for name, value in model.state_dict().items()}
    TRUTH.live("parameters", lambda: list(average.values()))
    for _ in range(STEPS):
        images, classes = torch.randn(64, 3, 224, 224, device=DEVICE), torch.randint(0, 21843, (64,), device=DEVICE)
        TRUTH.tag(images, "inputs", "images")
        aims = torch.lerp(F.one_hot(classes, 21843).float(), F.one_hot(classes.flip(0), 21843).float(), 0.2)
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = torch.sum(-aims * F.log_softmax(model(images), dim=-1), dim=-1).mean()
        loss.backward()
        TRUTH.step(model, optimizer)
        with torch.no_grad():
            for name, value in model.state_dict().items():
                average[name].lerp_(value, 0.001)


def loss_of(model, tokens):
    return scores_of(model(tokens), tokens)


class OwnMuon(torch.optim.Optimizer):
    """Momentum, made orthogonal by five products; moments for vectors and tables."""

    def __init__(self, weights, lr=0.02):
        super().__init__(weights, {"lr": lr, "momentum": 0.95})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                state, slope = self.state[weight], weight.grad
                if weight.dim() == 2 and max(weight.shape) < 10000:
                    momentum = state.setdefault("momentum_buffer", torch.zeros_like(weight))
                    momentum.lerp_(slope, 1 - group["momentum"])
                    update = slope.lerp(momentum, group["momentum"]).bfloat16()
                    wide = update.T if update.size(0) > update.size(1) else update
                    wide = wide / (wide.norm() + 1e-7)
                    for _ in range(5):
                        square = wide @ wide.T
                        wide = 3.4445 * wide + (-4.775 * square + 2.0315 * square @ square) @ wide
                    update = wide.T if update.size(0) > update.size(1) else wide
                    weight.add_(update.to(weight.dtype), alpha=-group["lr"])
                else:
                    first = state.setdefault("exp_avg", torch.zeros_like(weight))
                    second = state.setdefault("exp_avg_sq", torch.zeros_like(weight))
                    first.lerp_(slope, 0.1)
                    second.lerp_(slope.square(), 0.05)
                    weight.addcdiv_(first, second.sqrt().add_(1e-8), value=-1e-3)


@program()
def muon_own():
    train(Policy(), loss_of, OwnMuon)


class ScheduleFree(torch.optim.Optimizer):
    """Steps a second copy of the weights, and averages."""

    def __init__(self, weights, lr=1e-3):
        super().__init__(weights, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for weight in weights:
                if "z" not in self.state[weight]:
                    self.state[weight]["z"] = torch.clone(weight, memory_format=torch.preserve_format)
                    self.state[weight]["exp_avg_sq"] = torch.zeros_like(weight)
            slopes, z = [w.grad for w in weights], [self.state[w]["z"] for w in weights]
            squares = [self.state[w]["exp_avg_sq"] for w in weights]
            torch._foreach_mul_(squares, 0.99)
            torch._foreach_addcmul_(squares, slopes, slopes, value=0.01)
            denominator = torch._foreach_sqrt(squares)
            torch._foreach_add_(denominator, 1e-8)
            torch._foreach_div_(slopes, denominator)
            torch._foreach_lerp_(weights, z, weight=1 / group["k"])
            torch._foreach_sub_(z, slopes, alpha=group["lr"])


@program()
def schedule_free():
    train(Policy(), loss_of, ScheduleFree)


@program()
def adafactor_torch():
    train(Policy(), loss_of, functools.partial(torch.optim.Adafactor, lr=1e-2))


@program()
def lbfgs_language():
    """A closure that runs a language model, several times a step."""
    make = functools.partial(torch.optim.LBFGS, max_iter=3, history_size=4, line_search_fn="strong_wolfe")
    model, optimizer = noted(Policy(n_embd=256, n_layer=3), make)
    tokens = tokens_of(8, 128)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        for name, weight in model.named_parameters():
            TRUTH.tag(weight.grad, "gradients", name)
        return loss

    for _ in range(2):
        optimizer.step(closure)


def gpt2(**changes):
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=512, n_head=8, **changes))


def compiled_gpt2(run, model, optimizer, autocast=True):
    for _ in range(STEPS):
        tokens = tokens_of(8, 512, 50257)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        TRUTH.step(model, optimizer)


@program(needs_compiler=True)
def gpt2_overhead():
    model, optimizer = noted(gpt2(), adamw)
    compiled_gpt2(torch.compile(model, mode="reduce-overhead"), model, optimizer)


@program(needs_compiler=True, stacks="python")
def gpt2_compiled_python():
    model, optimizer = noted(gpt2(), adamw)
    compiled_gpt2(torch.compile(model), model, optimizer, autocast=False)


@program(needs_compiler=True)
def gpt2_compiled_layers():
    """Each layer is compiled, the head and the loss are not."""
    model, optimizer = noted(with_head_noted(gpt2()), adamw)
    for layer in model.transformer.h:
        layer.compile()
    compiled_gpt2(model, model, optimizer)


@program()
def gpt2_python():
    """Not compiled; the head's weight is the table's."""
    model, optimizer = noted(with_head_noted(gpt2()), adamw)
    compiled_gpt2(model, model, optimizer)


@program()
def layers_on_host():
    """Own hooks copy what each layer saves to pinned memory."""

    def pack(tensor):
        if tensor.numel() < 4096 or isinstance(tensor, nn.Parameter) or not tensor.is_contiguous():
            return tensor
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=DEVICE == "cuda")
        return tensor.device, kept.copy_(tensor, non_blocking=True)

    def unpack(packed):
        return packed if isinstance(packed, torch.Tensor) else packed[1].to(packed[0], non_blocking=True)

    def wrapped(block, x):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return block(x)

    model = Policy(n_layer=6)
    model.body.wrap = wrapped
    train(model, loss_of)
