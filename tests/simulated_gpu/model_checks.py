"""Models of transformers on a simulated GPU, without their values; run by test_models.py."""

import gc
import json
import resource
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from ligerprof.simulated_gpu.machine import installed

HUB_ID = "HuggingFaceTB/SmolLM2-135M"


def used_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main_memory_is_counted() -> None:
    """As processes with files take it: mapped tensors nothing, casts and copies of what is saved from the GPU all."""
    machine, size = installed(), 64 << 20
    save_file({"large": torch.empty(size // 4)}, "first.safetensors")
    before = machine.summary()["host_bytes"]
    # what was made to write the file
    assert before == size
    with safe_open("first.safetensors", framework="pt") as file:
        large = file.get_tensor("large")
    assert machine.summary()["host_bytes"] == size
    cast = large.double()
    assert machine.summary()["host_bytes"] == 2 * size
    del cast
    on_gpu = {str(number): large.cuda() for number in range(3)}
    assert machine.summary()["host_bytes"] == 2 * size
    save_file(on_gpu, "second.safetensors")
    assert machine.summary()["host_bytes"] == 3 * size
    torch.save(on_gpu, "third.pt")
    assert machine.summary()["host_bytes"] == 3 * size


def weights_are_not_read() -> None:
    path = Path("weights.safetensors")
    size = 2 << 30
    header = {"large": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}
    header["small"] = {"dtype": "F32", "shape": [2], "data_offsets": [size, size + 8]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
        file.seek(0, 2)
        file.write(torch.tensor([3.0, 5.0]).numpy().tobytes())
    before = used_bytes()
    with safe_open(path, framework="pt") as file:
        assert file.get_tensor("large").cuda().shape == (size // 2,)
        assert file.get_slice("large")[:8].shape == (8,)
        assert file.get_tensor("small").tolist() == [3.0, 5.0]
    config = AutoConfig.for_model("llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=4)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.resize_token_embeddings(40000)
    assert used_bytes() - before < 256 << 20
    # optimizers step without values
    optimizer = torch.optim.AdamW(model.parameters())
    for weight in model.parameters():
        weight.grad = torch.empty_like(weight)
    for step in (1.0, 2.0):
        optimizer.step()
        for weight in model.parameters():
            state = optimizer.state[weight]
            assert state["exp_avg"].shape == state["exp_avg_sq"].shape == weight.shape
            assert state["step"].item() == step
    assert used_bytes() - before < 256 << 20
    torch.optim.Adafactor(model.parameters()).step()
    assert used_bytes() - before < 256 << 20


def models_of_the_catalog_need_no_files() -> None:
    tokenizer = AutoTokenizer.from_pretrained(HUB_ID)
    assert len(tokenizer("twelve bytes")["input_ids"]) == 12
    model = AutoModelForCausalLM.from_pretrained(HUB_ID)
    assert sum(weight.numel() for weight in model.parameters()) == 134515008
    assert model.dtype == torch.bfloat16


def events_of(model: Any, *, repeats: bool, **options: Any) -> tuple[list[tuple[str, int]], int]:
    machine = installed()
    assert machine is not None
    machine.siblings.enabled = repeats
    gc.collect()
    torch.cuda.empty_cache()
    before, device = machine.siblings.repeated, machine.device
    device.clear_history()
    tokens = torch.randint(9, 90, (3, 17), device="cuda")
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    with torch.no_grad():
        made = model.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=5, **options)
    assert made.shape == (3, 22)
    return [(event.action, event.size_bytes) for event in device._history or ()], machine.siblings.repeated - before


def layers_that_are_alike_repeat_their_events() -> None:
    small = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    small |= {"num_hidden_layers": 5, "vocab_size": 900, "pad_token_id": 0}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("qwen3", {"do_sample": True, "top_k": 40}),
        ("mixtral", {}),
        ("gemma3_text", {"do_sample": True, "top_p": 0.9}),
    ]
    for kind, options in kinds:
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **small), dtype=torch.bfloat16).eval()
        # the first run makes what is kept, such as workspaces
        events_of(model, repeats=False, **options)
        expected, none = events_of(model, repeats=False, **options)
        events, repeated = events_of(model, repeats=True, **options)
        assert (none, repeated > 0) == (0, True), kind
        assert events == expected, kind


def caches_of_two_parts_run_as_they_are() -> None:
    config = AutoConfig.for_model("t5", d_model=64, d_ff=128, num_layers=4, num_heads=2, d_kv=32, vocab_size=90)
    config.decoder_start_token_id = 0
    model = AutoModelForSeq2SeqLM.from_config(config).cuda().eval()
    assert model.generate(torch.ones(2, 8, dtype=torch.long, device="cuda"), max_new_tokens=4).shape == (2, 5)


main_memory_is_counted()
weights_are_not_read()
models_of_the_catalog_need_no_files()
layers_that_are_alike_repeat_their_events()
caches_of_two_parts_run_as_they_are()
print("all checks passed")
