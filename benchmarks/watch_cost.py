"""What live.json, which `ligerprof watch` reads, costs a recorded training on a GPU.

    ligerprof run -o RUN -- python benchmarks/watch_cost.py WIDTH LAYERS BATCH >> benchmarks/results/watch-h200.jsonl

A row has the median of alternating blocks of steps with and without notes, whose spread is that of the steps, and the
share of the time that the notes themselves took over 300 steps.
"""

import gc
import json
import statistics
import sys
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SEQ, VOCABULARY = 512, 32_000
TURNS, STEPS_PER_TURN, NOTED_STEPS = 60, 5, 300


def main() -> None:
    """Train a Llama of the given width and layers on random tokens, and print the row."""
    width, layers, batch = (int(each) for each in sys.argv[1:4])
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        vocab_size=VOCABULARY,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, VOCABULARY, (batch, SEQ), device="cuda")

    def seconds_per_step(steps: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / steps

    (recording,) = [each for each in gc.get_objects() if type(each).__name__ == "ProcessRecording"]
    live: Any = recording._live
    note, spent = live.note, []

    def timed(step: int, **figures: Any) -> None:
        began = time.perf_counter()
        note(step, **figures)
        spent.append(time.perf_counter() - began)

    seconds_per_step(2 * STEPS_PER_TURN)
    times: dict[str, list[float]] = {"without": [], "with": []}
    for turn in range(TURNS):
        live.note = note if turn % 2 else lambda _step, **_: None
        times["with" if turn % 2 else "without"].append(seconds_per_step(STEPS_PER_TURN))
    live.note = timed
    seconds = NOTED_STEPS * seconds_per_step(NOTED_STEPS)
    ratios = [with_ / without - 1 for without, with_ in zip(times["without"], times["with"], strict=True)]
    row = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": f"Llama, {width} wide, {layers} layers, {batch} x {SEQ} tokens, bf16",
        "step_ms": 1e3 * statistics.median(times["without"]),
        "share_of_notes_percent": 100 * sum(spent) / seconds,
        "longest_note_ms": 1e3 * max(spent),
        "turns_percent": [100 * each for each in statistics.quantiles(ratios, n=4)],
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
