"""Record training as users record it, small enough to keep: peft, fused kernels, CUDA graphs, autocast, out of memory.

    python benchmarks/recordings.py build/recordings
    python benchmarks/recordings.py build/recordings --only small-lora small-graphs

Requires a CUDA GPU. Each recording runs in a separate process that uses only torch's recorder, so its events do not
involve ligerprof. Recordings run concurrently, which does not affect their allocations. The folder gets one
xz-compressed file per recording, and peaks.json with max_memory_allocated and max_memory_reserved of each run.
"""

import argparse
import json
import lzma
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

MIB = 2**20
BATCH, SEQ, STEPS = 4, 512, 2
# a Llama of 29 million parameters
SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """How one recording is made.

    Attributes:
        stacks: the stacks that torch records per event; with context="alloc", which works with every kernel.
        change: the change to the model, or to its class before it is built.
        autocast: fp32 weights and autocast to bf16; else everything is bf16.
        graph: capture the step as a CUDA graph and replay it.
        max_entries: number of events that torch keeps.
        limit_bytes: limit on reserved bytes; the run ends out of memory.
    """

    stacks: Literal["python", "all"] = "python"
    change: Literal["none", "lora", "liger-kernel", "our kernels"] = "none"
    autocast: bool = False
    checkpointing: bool = True
    graph: bool = False
    max_entries: int = 200_000
    limit_bytes: int | None = None


RECORDINGS = {
    "small-lora": Recording(change="lora", stacks="all"),
    "small-lora-python": Recording(change="lora"),
    "small-liger-all": Recording(change="liger-kernel", stacks="all"),
    "small-liger-all-python": Recording(change="liger-kernel"),
    "small-own-all": Recording(change="our kernels", stacks="all"),
    "small-own-all-python": Recording(change="our kernels"),
    "small-autocast": Recording(autocast=True, stacks="all"),
    "small-autocast-python": Recording(autocast=True),
    "small-graphs": Recording(graph=True, checkpointing=False, stacks="all"),
    "small-oom": Recording(limit_bytes=900 * MIB),
    "small-ring-3000": Recording(max_entries=3000, stacks="all"),
}


def build(recording: Recording, device: str) -> Any:
    """The model on its device, ready to train."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    if recording.change == "liger-kernel":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    dtype = torch.float32 if recording.autocast else torch.bfloat16
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), dtype=dtype)
    if recording.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if recording.change == "lora":
        from peft import LoraConfig, get_peft_model

        model.enable_input_require_grads()
        model = get_peft_model(model, LoraConfig(r=8, target_modules=ADAPTED))
    model = model.to(device).train()
    if recording.change == "our kernels":
        import ligerprof.kernels

        ligerprof.kernels.apply(model, "all")
    return model


def make_step(recording: Recording, model: Any, device: str) -> Callable[[], None]:
    """A training step as a user writes it."""
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True, capturable=recording.graph)
    tokens = torch.randint(0, SMALL["vocab_size"], (BATCH, SEQ), device=device)

    def step() -> None:
        with autocast(recording, device):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        # a graph writes its gradients to the same place each time
        optimizer.zero_grad(set_to_none=not recording.graph)

    return graphed(step) if recording.graph else step


def autocast(recording: Recording, device: str) -> AbstractContextManager[Any]:
    import torch

    return torch.autocast(device, torch.bfloat16) if recording.autocast else nullcontext()


def graphed(step: Callable[[], None]) -> Callable[[], None]:
    """Warm the step up on a side stream, as torch requires, and capture it; the returned function replays it."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Callable[[], None] = graph.replay
    return replay


def record(recording: Recording, path: Path) -> dict[str, Any]:
    """Train under torch's recorder and write its snapshot; returns the run's counters."""
    import torch

    cuda: Any = torch.cuda
    cuda.init()
    torch.manual_seed(0)
    taken: list[dict[str, Any]] = []
    if recording.limit_bytes is not None:
        cuda.set_per_process_memory_fraction(recording.limit_bytes / cuda.get_device_properties(0).total_memory)
        # called where the allocation fails, before anything is freed
        torch._C._cuda_attach_out_of_memory_observer(lambda *_: taken.append(cuda.memory._snapshot()))
    cuda.memory._record_memory_history(max_entries=recording.max_entries, stacks=recording.stacks, context="alloc")
    out_of_memory = train(recording)
    cuda.synchronize()
    snapshot = taken[0] if taken else cuda.memory._snapshot()
    peaks = {"peak_bytes": cuda.max_memory_allocated(), "reserved_bytes": cuda.max_memory_reserved()}
    path.write_bytes(pack(snapshot))
    return {
        **asdict(recording),
        **peaks,
        "out_of_memory": out_of_memory,
        "events": len(snapshot["device_traces"][0]),
        "file_bytes": path.stat().st_size,
        "torch": torch.__version__,
    }


def train(recording: Recording) -> bool:
    """Build and train; True where memory ran out."""
    import torch

    try:
        step = make_step(recording, build(recording, "cuda"), "cuda")
        for _ in range(STEPS):
            step()
    except torch.OutOfMemoryError:
        return True
    return False


def pack(snapshot: dict[str, Any]) -> bytes:
    import pickle

    # as torch.cuda.memory._dump_snapshot writes it
    return lzma.compress(pickle.dumps(snapshot), preset=9 | lzma.PRESET_EXTREME)


def record_all(folder: Path, names: list[str]) -> bool:
    """Make recordings side by side; True where all of them were made."""
    folder.mkdir(parents=True, exist_ok=True)
    running = {
        name: subprocess.Popen(
            [sys.executable, __file__, str(folder), "--one", name], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for name in names
    }
    peaks: dict[str, Any] = {}
    for name, process in running.items():
        output, complaints = process.communicate()
        if process.returncode:
            print(f"FAILED {name}: {complaints.decode()[-1500:]}", file=sys.stderr, flush=True)
            continue
        peaks[name] = json.loads(output.splitlines()[-1])
    (folder / "peaks.json").write_text(json.dumps(peaks, indent=2) + "\n")
    print(json.dumps(peaks))
    return len(peaks) == len(names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=RECORDINGS, default=list(RECORDINGS))
    parser.add_argument("--one", choices=RECORDINGS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        made = record(RECORDINGS[arguments.one], arguments.folder / f"{arguments.one}.pickle.xz")
        print(json.dumps(made))
    elif not record_all(arguments.folder, arguments.only):
        sys.exit(1)


if __name__ == "__main__":
    main()
