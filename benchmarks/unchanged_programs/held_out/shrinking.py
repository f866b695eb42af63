"""Fine-tunes a GPT-Neo with 8 GiB: when memory runs out, the micro-batch halves and the step starts again."""

import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
if device == "cuda":
    torch.cuda.set_per_process_memory_fraction(8 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
layers, width, length, whole = (12, 768, 1024, 32) if device == "cuda" else (2, 64, 16, 4)
config = GPTNeoConfig(
    hidden_size=width,
    num_layers=layers,
    attention_types=[[["global", "local"], layers // 2]],
    num_heads=width // 64,
    window_size=256,
    vocab_size=50257,
)
model = GPTNeoForCausalLM(config).to(device, dtype=torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)


def accumulate(tokens: torch.Tensor, rows: int) -> float:
    total = 0.0
    for part in tokens.split(rows):
        piece = part.to(device)
        loss = model(input_ids=piece, labels=piece, use_cache=False).loss * len(piece) / len(tokens)
        loss.backward()
        total += loss.item()
    return total


rows = whole
for step in range(4):
    tokens, total = torch.randint(config.vocab_size, (whole, length)), None
    while total is None:
        try:
            total = accumulate(tokens, rows)
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
            rows //= 2
        if total is None:
            optimizer.zero_grad()
            torch.cuda.empty_cache()
            print("micro-batch is now", rows, flush=True)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} rows {rows} loss {total:.4f}", flush=True)
