"""Image models, encoders, mixtures of experts, CUDA graphs, and generation."""

import torch
import torch.nn.functional as F
from models import llama
from torch import nn
from truth import TRUTH, program


@program()
def vit():
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(num_hidden_layers=8, num_labels=1000)).cuda()
    train_images(model, lambda m, x, y: m(pixel_values=x, labels=y).loss)


def train_images(model, loss_of, steps=3, batch=64, optimizer=None, size=224, classes=1000):
    TRUTH.model(model)
    optimizer = (optimizer or (lambda ps: torch.optim.AdamW(ps, lr=1e-4)))(model.parameters())
    TRUTH.optimizer(optimizer)
    for _ in range(steps):
        x, y = torch.randn(batch, 3, size, size, device="cuda"), torch.randint(0, classes, (batch,), device="cuda")
        TRUTH.tag(x, "inputs", "images")
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()


@program()
def vit_torchvision():
    from torchvision.models import vit_b_16

    model = vit_b_16().cuda()
    train_images(model, lambda m, x, y: F.cross_entropy(m(x), y))


@program()
def convnext():
    from torchvision.models import convnext_tiny

    model = convnext_tiny().cuda().to(memory_format=torch.channels_last)
    train_images(
        model,
        lambda m, x, y: F.cross_entropy(m(x), y, label_smoothing=0.1),
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    )


@program()
def unet():
    class Unet(nn.Module):
        def __init__(self, c=64):
            super().__init__()

            def block(i, o):
                return nn.Sequential(
                    nn.Conv2d(i, o, 3, padding=1),
                    nn.GroupNorm(8, o),
                    nn.SiLU(),
                    nn.Conv2d(o, o, 3, padding=1),
                    nn.GroupNorm(8, o),
                    nn.SiLU(),
                )

            self.d1, self.d2, self.d3 = block(3, c), block(c, 2 * c), block(2 * c, 4 * c)
            self.u2, self.u1 = block(6 * c, 2 * c), block(3 * c, c)
            self.out = nn.Conv2d(c, 3, 1)

        def forward(self, x):
            a = self.d1(x)
            b = self.d2(F.max_pool2d(a, 2))
            c = self.d3(F.max_pool2d(b, 2))
            y = self.u2(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
            y = self.u1(torch.cat([F.interpolate(y, scale_factor=2), a], 1))
            return self.out(y)

    model = Unet().cuda()
    train_images(model, lambda m, x, _: F.mse_loss(m(x).float(), x), size=128, batch=32)


@program(context="alloc")
def graphed_mlp():
    model = nn.Sequential(
        nn.Linear(2048, 8192), nn.ReLU(), nn.Linear(8192, 8192), nn.ReLU(), nn.Linear(8192, 2048)
    ).cuda()
    TRUTH.model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    TRUTH.optimizer(optimizer)
    x, y = torch.randn(4096, 2048, device="cuda"), torch.randn(4096, 2048, device="cuda")
    TRUTH.tag(x, "inputs")
    TRUTH.tag(y, "inputs")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    for _ in range(3):
        graph.replay()


@program()
def graphed_callables():
    model = nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)).cuda()
    x = torch.randn(2048, 2048, device="cuda", requires_grad=True)
    model = torch.cuda.make_graphed_callables(model, (x,))
    TRUTH.model(model)
    optimizer = torch.optim.Adam(model.parameters())
    TRUTH.optimizer(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2048, 2048, device="cuda")).square().mean().backward()
        optimizer.step()


@program()
def bert_classifier():
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(num_hidden_layers=6, num_labels=3)).cuda()
    TRUTH.model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    TRUTH.optimizer(optimizer)
    for _ in range(3):
        tokens, labels = torch.randint(0, 30522, (32, 256), device="cuda"), torch.randint(0, 3, (32,), device="cuda")
        loss = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program()
def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(d_model=512, decoder_start_token_id=0, num_layers=4, num_decoder_layers=4)
    ).cuda()
    TRUTH.model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    TRUTH.optimizer(optimizer)
    for _ in range(3):
        tokens, labels = (torch.randint(0, 32000, (16, 256), device="cuda") for _ in range(2))
        out = model(input_ids=tokens, labels=labels)
        TRUTH.tag(out.logits, "logits")
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@program()
def mixtral():
    from transformers import AutoModelForCausalLM, MixtralConfig

    model = AutoModelForCausalLM.from_config(
        MixtralConfig(
            hidden_size=768,
            intermediate_size=1536,
            num_hidden_layers=4,
            num_attention_heads=12,
            num_key_value_heads=4,
            num_local_experts=8,
            vocab_size=32000,
        ),
        dtype=torch.bfloat16,
    ).cuda()
    TRUTH.model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
    TRUTH.optimizer(optimizer)
    for _ in range(2):
        tokens = torch.randint(0, 32000, (4, 512), device="cuda")
        model(input_ids=tokens, labels=tokens, output_router_logits=True).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@program()
def vlm():
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=512,
            intermediate_size=2048,
            num_hidden_layers=6,
            num_attention_heads=8,
            image_size=224,
            patch_size=14,
        ),
        text_config=LlamaConfig(
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=4,
            num_attention_heads=16,
            num_key_value_heads=4,
            vocab_size=32064,
        ),
        image_token_index=32000,
    )
    model = LlavaForConditionalGeneration(config).to("cuda", torch.bfloat16)
    model.model.vision_tower.requires_grad_(requires_grad=False)
    TRUTH.model(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-5)
    TRUTH.optimizer(optimizer)
    for _ in range(2):
        tokens = torch.randint(0, 31000, (4, 512), device="cuda")
        tokens[:, :256] = 32000
        pixels = torch.randn(4, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
        TRUTH.tag(pixels, "inputs", "pixels")
        model(
            input_ids=tokens, pixel_values=pixels, labels=tokens, attention_mask=torch.ones_like(tokens)
        ).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@program()
def double_head():
    """A contrastive text encoder: no loss over a vocabulary, though an embedding has one."""
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(num_hidden_layers=6)).cuda()
    TRUTH.model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    TRUTH.optimizer(optimizer)
    for _ in range(3):
        a, b = (torch.randint(0, 30522, (64, 128), device="cuda") for _ in range(2))
        with torch.autocast("cuda", torch.bfloat16):
            u, v = (F.normalize(model(input_ids=z).last_hidden_state.mean(1), dim=-1) for z in (a, b))
            loss = F.cross_entropy(u @ v.T * 20, torch.arange(64, device="cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@program()
def static_cache():
    model = llama(num_hidden_layers=8).cuda().eval()
    TRUTH.model(model)
    model.generate(
        torch.randint(0, 32000, (8, 256), device="cuda"),
        max_new_tokens=24,
        cache_implementation="static",
        disable_compile=True,
    )


@program()
def dynamic_cache():
    model = llama(num_hidden_layers=8).cuda().eval()
    TRUTH.model(model)
    model.generate(torch.randint(0, 32000, (8, 512), device="cuda"), max_new_tokens=24)


@program()
def own_cache():
    class Layer(nn.Module):
        def __init__(self, width=1024, heads=16):
            super().__init__()
            self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
            self.cache = None

        def forward(self, x):
            b, t, c = x.shape
            q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
            if self.cache is not None:
                k, v = torch.cat([self.cache[0], k], 2), torch.cat([self.cache[1], v], 2)
            self.cache = (k, v)
            TRUTH.tag(k, "kv_cache")
            TRUTH.tag(v, "kv_cache")
            return x + self.out(
                F.scaled_dot_product_attention(q, k, v, is_causal=t > 1).transpose(1, 2).reshape(b, t, c)
            )

    model = nn.Sequential(*[Layer() for _ in range(6)]).cuda().bfloat16().eval()
    TRUTH.model(model)
    with torch.inference_mode():
        x = torch.randn(8, 512, 1024, device="cuda", dtype=torch.bfloat16)
        for _ in range(24):
            x = model(x)[:, -1:]
