"""Check main memory while a checkpoint is loaded and saved: what processes hold against the estimate.

    cd benchmarks/results
    python ../main_memory.py main-memory-cpu.jsonl

Each row is measured in a new process with transformers and safetensors: the growth of its anonymous memory and of its
mapped pages (RssAnon and RssFile in /proc/self/status, read every 3 ms) from before to the highest moment. The model
is Llama-3.2-1B, with weights that have one value. With a GPU, models are moved to it and saved from there.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ligerprof
from ligerprof.models import load_model
from ligerprof.recipe.training import TrainingRecipe

MODEL = "llama3.2-1b"
CASES = ("load bf16", "load amp", "save bf16", "save amp", "torch.save bf16")


def resident() -> dict[str, int]:
    pairs = (line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {key: int(value.split()[0]) * 1024 for key, value in pairs if key in ("RssAnon", "RssFile")}


@contextmanager
def watched(grown: dict[str, int]) -> Iterator[None]:
    before, ended = resident(), threading.Event()

    def watch() -> None:
        while not ended.is_set():
            for key, size in resident().items():
                grown[key] = max(grown.get(key, 0), size - before[key])
            time.sleep(0.003)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def make(folder: Path) -> None:
    """A checkpoint of 16-bit weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**load_model(MODEL).config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    model.save_pretrained(folder)


def measure(case: str, folder: Path) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    kind, precision = case.split()
    dtype, on_gpu = torch.float32 if precision == "amp" else torch.bfloat16, torch.cuda.is_available()
    if on_gpu:
        torch.zeros(1, device="cuda")
    grown: dict[str, int] = {}
    with watched(grown) if kind == "load" else watched({}):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        if on_gpu:
            model.to("cuda")
        else:
            # reads each page
            sum(float(parameter.detach().sum()) for parameter in model.parameters())
    if kind != "load":
        target = folder / "saved"
        with watched(grown):
            model.save_pretrained(target) if kind == "save" else torch.save(model.state_dict(), f"{target}.pt")
    # what is in main memory is saved from there
    saving = None if kind == "save" and not on_gpu else kind
    estimated = ligerprof.estimate(TrainingRecipe(model=MODEL, precision=precision)).main_memory
    return {
        "case": case,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "anonymous_bytes": grown["RssAnon"],
        "mapped_bytes": grown["RssFile"],
        "estimated_bytes": {"load": estimated.loading_bytes, "save": estimated.saving_bytes}.get(saving),
        "estimated_file_bytes": estimated.file_bytes if kind == "load" else 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case is not None:
        case, folder = given.case
        found = make(Path(folder)) if case == "make" else measure(case, Path(folder))
        print(json.dumps(found))
        return
    from ligerprof.runs.outcome import package_versions

    with tempfile.TemporaryDirectory() as folder, given.target.open("w") as lines:
        for case in ("make", *CASES):
            command = [sys.executable, __file__, "unused", "--case", case, folder]
            row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            if case != "make":
                print(json.dumps(row), flush=True)
                lines.write(json.dumps({**row, "versions": package_versions()}) + "\n")
                lines.flush()


if __name__ == "__main__":
    main()
