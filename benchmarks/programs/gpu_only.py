"""Programs that need a GPU: compiled, graphed, and transformers' own loops."""

import torch
import torch.nn.functional as F
from generative import STEPS, noted
from gpt import Gpt, train_gpt
from models import llama
from torch import nn
from truth import TRUTH, program
from wider import Policy, adamw, scores_of, tokens_of


@program()
def compiled_loss():
    """The head and the loss are compiled together, the body is not."""
    model, optimizer = noted(Policy(n_layer=4), adamw)

    @torch.compile
    def loss_of(hidden, weight, tokens):
        logits = F.linear(hidden, weight)[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    for _ in range(STEPS):
        tokens = tokens_of()
        with torch.autocast("cuda", torch.bfloat16):
            loss_of(model.body(tokens), model.head.weight, tokens).backward()
        TRUTH.step(model, optimizer)


@program()
def compiled_graphs():
    train_gpt(torch.compile(Gpt(n_layer=3), mode="reduce-overhead"))


@program(vocabulary=False)
def compiled_images():
    model = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(64 if i else 3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()) for i in range(4)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 1000),
    )
    model, optimizer = noted(model, adamw)
    run = torch.compile(model)
    for _ in range(STEPS):
        x, y = torch.randn(64, 3, 112, 112, device="cuda"), torch.randint(0, 1000, (64,), device="cuda")
        F.cross_entropy(run(x), y).backward()
        TRUTH.step(model, optimizer)


@program()
def graphed_step():
    """Forward, backward and optimizer of a language model as one graph."""
    model, optimizer = noted(
        Policy(n_layer=2), lambda weights: torch.optim.AdamW(weights, capturable=True, foreach=True)
    )
    tokens, side = tokens_of(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            scores_of(model(tokens), tokens).backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        scores_of(model(tokens), tokens).backward()
        optimizer.step()
    for _ in range(2):
        graph.replay()


@program(vocabulary=False)
def token_classifier():
    from transformers import BertConfig, BertForTokenClassification

    model, optimizer = noted(BertForTokenClassification(BertConfig(num_hidden_layers=4, num_labels=9)), adamw)
    for _ in range(STEPS):
        tokens = torch.randint(0, 30522, (32, 256), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens % 9).loss
        loss.backward()
        TRUTH.step(model, optimizer)


@program(vocabulary=False)
def image_text():
    from transformers import CLIPConfig, CLIPModel

    model, optimizer = noted(CLIPModel(CLIPConfig()), adamw)
    for _ in range(2):
        tokens, images = torch.randint(0, 49000, (64, 77), device="cuda"), torch.randn(64, 3, 224, 224, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens, pixel_values=images, return_loss=True).loss
        loss.backward()
        TRUTH.step(model, optimizer)


@program()
def assisted_generation():
    """Speculative decoding: a small model drafts, a large one checks; samples with top-p."""
    large, small = llama().cuda().eval(), llama(num_hidden_layers=2, hidden_size=512).cuda().eval()
    TRUTH.model(large)
    TRUTH.model(small)
    tokens = torch.randint(0, 32000, (1, 512), device="cuda")
    large.generate(tokens, assistant_model=small, do_sample=True, top_p=0.9, max_new_tokens=24, pad_token_id=0)


@program()
def beams():
    model = llama().cuda().eval()
    TRUTH.model(model)
    tokens = torch.randint(0, 32000, (4, 256), device="cuda")
    model.generate(tokens, num_beams=4, max_new_tokens=16, pad_token_id=0)


@program(vocabulary=False)
def regressor():
    """A closure that the optimizer calls several times a step."""
    model, optimizer = noted(
        nn.Sequential(nn.Linear(1024, 4096), nn.Tanh(), nn.Linear(4096, 1)),
        lambda weights: torch.optim.LBFGS(weights, max_iter=4, history_size=3),
    )
    x, y = torch.randn(8192, 1024, device="cuda"), torch.randn(8192, 1, device="cuda")

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
