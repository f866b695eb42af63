"""Further kinds of models: speech, states instead of attention, encoder and decoder that generate, wrapped layers."""

import torch
import torch.nn.functional as F
from finetuning import SMALL, Adapter, with_head_noted
from generative import STEPS, noted
from models import llama
from sharded_more import alone, of_transformers, sharded, steps
from truth import DEVICE, TRUTH, program
from wider import Policy, adamw, scores_of, tokens_of


@program()
def speech():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"d_model": 384, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 6}
    sizes |= {"decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536}
    model, optimizer = noted(with_head_noted(WhisperForConditionalGeneration(WhisperConfig(**sizes))), adamw)
    for _ in range(STEPS):
        sound = torch.randn(8, 80, 3000, device=DEVICE)
        TRUTH.tag(sound, "inputs", "sound")
        tokens = tokens_of(8, 128, 50000)
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(input_features=sound, labels=tokens).loss
        loss.backward()
        TRUTH.step(model, optimizer)


@program()
def state_space():
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=32000, hidden_size=384, num_hidden_layers=3)
    model, optimizer = noted(with_head_noted(MambaForCausalLM(config)), adamw)
    for _ in range(2):
        tokens = tokens_of(2, 128)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        TRUTH.step(model, optimizer)


@program()
def encoder_generates():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=32128, d_model=512, num_layers=3, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).to(DEVICE).to(torch.bfloat16).eval()
    TRUTH.model(model)
    model.generate(torch.randint(0, 32000, (16, 256), device=DEVICE), max_new_tokens=24, num_beams=2, do_sample=False)


@program()
def sliding_windows():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {name: value for name, value in SMALL.items() if name != "dtype"}
    config = Gemma2Config(vocab_size=32000, head_dim=64, sliding_window=128, **sizes)
    model = Gemma2ForCausalLM(config).to(DEVICE).to(torch.bfloat16).eval()
    TRUTH.model(model)
    model.generate(torch.randint(0, 32000, (8, 256), device=DEVICE), max_new_tokens=16, disable_compile=True)


@program(needs_compiler=True)
def compiled_adapters():
    model = llama(**(SMALL | {"dtype": torch.bfloat16})).requires_grad_(requires_grad=False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name)))
    model = model.to(DEVICE)
    TRUTH.model(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    TRUTH.optimizer(optimizer)
    run = torch.compile(model)
    for _ in range(STEPS):
        tokens = tokens_of(8, 256)
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        TRUTH.step(model, optimizer)


@program(needs_compiler=True, vocabulary=False)
def compiled_vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536, num_hidden_layers=4)
    model, optimizer = noted(ViTForImageClassification(config), adamw)
    run = torch.compile(model)
    for _ in range(STEPS):
        images, classes = torch.randn(64, 3, 224, 224, device=DEVICE), torch.randint(0, 2, (64,), device=DEVICE)
        TRUTH.tag(images, "inputs", "images")
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = F.cross_entropy(run(pixel_values=images).logits, classes)
        loss.backward()
        TRUTH.step(model, optimizer)


@program()
def fsdp2_wrapped_checkpoints():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    alone()
    model = with_head_noted(llama(**SMALL).cuda())
    layers = model.model.layers
    for number, layer in enumerate(layers):
        layers[number] = checkpoint_wrapper(layer)
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    sharded(model, [*norms, *layers, model.model.embed_tokens, model.lm_head])
    steps(model, of_transformers, lambda _is_last: torch.autograd.set_grad_enabled(True))


@program()
def ddp_alone():
    alone()
    policy = Policy(n_layer=4).cuda()
    model = torch.nn.parallel.DistributedDataParallel(policy, static_graph=True, bucket_cap_mb=50)

    def loss_of(model):
        tokens = tokens_of(8, 256)
        with torch.autocast("cuda", torch.bfloat16):
            return scores_of(model(tokens), tokens)

    steps(model, loss_of, lambda _is_last: torch.autograd.set_grad_enabled(True))
