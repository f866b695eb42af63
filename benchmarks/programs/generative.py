"""Models of images and of preferences that train several networks, copies of weights, or gradients of gradients."""

import copy
import itertools

import torch
import torch.nn.functional as F
from torch import nn
from truth import DEVICE, TRUTH, program

STEPS = 3


def convolutions(*widths, stride=2, norm=True):
    layers = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Conv2d(before, after, 4, stride, 1), *([nn.GroupNorm(8, after)] if norm else []), nn.SiLU()]
    return nn.Sequential(*layers)


class Upwards(nn.Module):
    def __init__(self, latent=128, width=512, size=4):
        super().__init__()
        self.width, self.size = width, size
        self.start = nn.Linear(latent, width * size * size)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.ConvTranspose2d(width >> i, width >> (i + 1), 4, 2, 1), nn.ReLU()) for i in range(3)),
            nn.ConvTranspose2d(width >> 3, 3, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.layers(self.start(z).view(-1, self.width, self.size, self.size))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.score = convolutions(3, 64, 128, 256, 512, norm=False), nn.Linear(512 * 16, 1)

    def forward(self, x):
        return self.score(self.layers(x).flatten(1))


def noted(model, make=lambda weights: torch.optim.Adam(weights, lr=1e-4)):
    model = model.to(DEVICE)
    TRUTH.model(model)
    optimizer = make(model.parameters())
    TRUTH.optimizer(optimizer)
    return model, optimizer


@program(vocabulary=False)
def gan():
    (generator, for_generator), (critic, for_critic) = noted(Upwards()), noted(Critic())
    for _ in range(STEPS):
        real = torch.randn(64, 3, 64, 64, device=DEVICE)
        TRUTH.tag(real, "inputs")
        fake = generator(torch.randn(64, 128, device=DEVICE))
        of_real, of_fake = critic(real), critic(fake.detach())
        loss = F.binary_cross_entropy_with_logits(of_real, torch.ones_like(of_real))
        loss = loss + F.binary_cross_entropy_with_logits(of_fake, torch.zeros_like(of_fake))
        loss.backward()
        TRUTH.step(critic, for_critic)
        of_fake = critic(fake)
        TRUTH.tag(fake, "activations")
        F.binary_cross_entropy_with_logits(of_fake, torch.ones_like(of_fake)).backward()
        TRUTH.step(generator, for_generator)
        critic.zero_grad()


@program(vocabulary=False)
def gradient_penalty():
    (generator, for_generator), (critic, for_critic) = noted(Upwards()), noted(Critic())
    for _ in range(STEPS):
        for _ in range(2):
            real = torch.randn(48, 3, 64, 64, device=DEVICE)
            with torch.no_grad():
                fake = generator(torch.randn(48, 128, device=DEVICE))
            TRUTH.tag(fake, "activations")
            mixed = torch.lerp(real, fake, torch.rand(48, 1, 1, 1, device=DEVICE)).requires_grad_()
            slope = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)[0]
            TRUTH.tag(slope, "activations", "slope")
            penalty = (slope.flatten(1).norm(2, dim=1) - 1).square().mean()
            (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
            TRUTH.step(critic, for_critic)
        (-critic(generator(torch.randn(48, 128, device=DEVICE))).mean()).backward()
        TRUTH.step(generator, for_generator)
        critic.zero_grad()


@program(vocabulary=False)
def diffusion_average():
    class Net(nn.Module):
        def __init__(self, c=128):
            super().__init__()
            self.time = nn.Sequential(nn.Linear(c, 4 * c), nn.SiLU(), nn.Linear(4 * c, 4 * c))
            self.down, self.middle = convolutions(3, c, 2 * c, 4 * c), convolutions(4 * c, 4 * c, stride=1)
            self.up = nn.Sequential(*(nn.ConvTranspose2d(4 * c >> i, 4 * c >> (i + 1), 4, 2, 1) for i in range(3)))
            self.out, self.c = nn.Conv2d(c // 2, 3, 3, padding=1), c

        def forward(self, x, t):
            angles = t[:, None].float() * torch.exp(-torch.arange(self.c // 2, device=x.device) / self.c)[None]
            embedded = self.time(torch.cat([angles.sin(), angles.cos()], 1))
            hidden = self.down(x) + embedded[:, :, None, None]
            return self.out(self.up(F.pad(self.middle(hidden), (0, 1, 0, 1))))

    model, optimizer = noted(Net(), lambda weights: torch.optim.AdamW(weights, lr=1e-4))
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
    TRUTH.live("parameters", lambda: list(average.module.parameters()))
    kept = torch.linspace(1, 0.01, 1000, device=DEVICE).cumprod(0)
    for _ in range(STEPS):
        images = torch.randn(32, 3, 64, 64, device=DEVICE)
        noise, t = torch.randn_like(images), torch.randint(0, 1000, (32,), device=DEVICE)
        level = kept[t][:, None, None, None]
        noisy = level.sqrt() * images + (1 - level).sqrt() * noise
        F.mse_loss(model(noisy, t), noise).backward()
        TRUTH.step(model, optimizer)
        average.update_parameters(model)


@program(vocabulary=False)
def vae():
    class Vae(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode = nn.Sequential(nn.Linear(12288, 4096), nn.ReLU(), nn.Linear(4096, 1024), nn.ReLU())
            self.mean, self.spread = nn.Linear(1024, 256), nn.Linear(1024, 256)
            self.decode = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 12288))

        def forward(self, x):
            hidden = self.encode(x)
            mean, spread = self.mean(hidden), self.spread(hidden)
            return self.decode(mean + torch.randn_like(mean) * torch.exp(0.5 * spread)), mean, spread

    model, optimizer = noted(Vae())
    for _ in range(STEPS):
        x = torch.rand(4096, 12288, device=DEVICE)
        TRUTH.tag(x, "inputs")
        made, mean, spread = model(x)
        TRUTH.tag(made, "activations", "reconstruction")
        loss = F.binary_cross_entropy_with_logits(made, x, reduction="sum")
        loss = loss - 0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())
        loss.backward()
        TRUTH.step(model, optimizer)


@program(vocabulary=False)
def distilled_prototypes():
    """As DINO: a student and its moving average, a cross-entropy between 65536 prototypes."""

    def network():
        return nn.Sequential(convolutions(3, 64, 128, 256), nn.Flatten(), nn.Linear(256 * 64, 1024), nn.GELU())

    student, optimizer = noted(nn.Sequential(network(), nn.Linear(1024, 65536, bias=False)))
    teacher = copy.deepcopy(student).requires_grad_(requires_grad=False)
    TRUTH.live("parameters", lambda: list(teacher.parameters()))
    center = torch.zeros(1, 65536, device=DEVICE)
    for _ in range(STEPS):
        views = [torch.randn(96, 3, 64, 64, device=DEVICE) for _ in range(2)]
        with torch.no_grad():
            aims = [teacher(view) for view in views]
            sharp = [F.softmax((aim - center) / 0.04, dim=-1) for aim in aims]
        seen = [student(view) for view in views]
        for each in (*seen, *aims, *sharp):
            TRUTH.tag(each, "activations", "scores of prototypes")
        loss = -sum((sharp[i] * F.log_softmax(seen[1 - i] / 0.1, dim=-1)).sum(-1).mean() for i in range(2))
        loss.backward()
        TRUTH.step(student, optimizer)
        with torch.no_grad():
            center.mul_(0.9).add_(torch.cat(aims).mean(0, keepdim=True), alpha=0.1)
            for mean, weight in zip(teacher.parameters(), student.parameters(), strict=True):
                mean.mul_(0.996).add_(weight, alpha=0.004)


@program(vocabulary=False)
def contrastive():
    """As CLIP: two towers and a cross-entropy over B x B similarities."""

    class Towers(nn.Module):
        def __init__(self, width=512):
            super().__init__()
            self.image = nn.Sequential(convolutions(3, 64, 128, 256), nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.project = nn.Linear(256, width)
            self.words, self.places = nn.Embedding(49408, width), nn.Parameter(torch.zeros(77, width))
            layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, norm_first=True)
            self.text = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
            self.scale = nn.Parameter(torch.tensor(2.66))

        def forward(self, images, tokens):
            text = self.text(self.words(tokens) + self.places).mean(1)
            images, text = F.normalize(self.project(self.image(images)), dim=-1), F.normalize(text, dim=-1)
            return self.scale.exp() * images @ text.T

    model, optimizer = noted(Towers(), lambda weights: torch.optim.AdamW(weights, lr=1e-4))
    for _ in range(STEPS):
        images = torch.randn(256, 3, 64, 64, device=DEVICE)
        scores = model(images, torch.randint(0, 49408, (256, 77), device=DEVICE))
        TRUTH.tag(scores, "activations", "similarities")
        aims = torch.arange(256, device=DEVICE)
        (F.cross_entropy(scores, aims) + F.cross_entropy(scores.T, aims)).backward()
        TRUTH.step(model, optimizer)


@program(vocabulary=False)
def segmentation():
    """A cross-entropy per pixel."""
    model, optimizer = noted(
        nn.Sequential(convolutions(3, 64, 64, 64, stride=1), nn.Conv2d(64, 21, 1)),
        lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True),
    )
    for _ in range(STEPS):
        images, aims = torch.randn(8, 3, 130, 130, device=DEVICE), torch.randint(0, 21, (8, 127, 127), device=DEVICE)
        scores = model(images)
        TRUTH.tag(scores, "activations", "scores")
        F.cross_entropy(scores, aims).backward()
        TRUTH.step(model, optimizer)
