"""torchtitan and Megatron-LM as they are, as ranks on simulated GPUs, against the arithmetic of their shards.

    python benchmarks/framework_ranks.py build/frameworks.jsonl --titan FOLDER --megatron FOLDER [--only NAME,...]
    python benchmarks/framework_ranks.py build/alone.jsonl --titan FOLDER --alone [--only NAME,...]   # needs a GPU

The folders are checkouts of pytorch/torchtitan v0.2.2 (73a0e697) and NVIDIA/Megatron-LM core_v0.17.1 (266f1c97); the
first needs text for its data set c4_test. A row has for each rank the bytes of its weights, gradients and optimizer
states after the third step, and what they are by arithmetic. `--alone` runs one rank on a GPU with torch's fake
process group: the last, or of those that split Megatron-LM's tensors the first, which gives the others their data.
"""

import argparse
import datetime as dt
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

COUNTED = Path(__file__).parent / "framework_programs" / "counted.py"
ALONE = Path(__file__).parent / "parallel_programs" / "alone.py"
LINE = re.compile(r"rank (\d+) part (\d+) step 3: (\d+) (\d+) (\d+) (\d+) (\d+)")
DEBUG = {"dim": 256, "layers": 6, "heads": 16, "kv_heads": 16, "words": 2048, "multiple": 256, "factor": 1.0}
LLAMA = {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "words": 128256, "multiple": 1024, "factor": 1.3}
GPT = {"dim": 1024, "layers": 8, "words": 32001, "tokens": 1024}
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B")
# name: model, world, (tensor, context, pipeline), schedule
TITAN: dict[str, tuple[str, int, tuple[int, int, int], str]] = {
    "debug": ("debug_model", 8, (1, 1, 1), ""),
    **{f"debug-tp{size}": ("debug_model", 8, (size, 1, 1), "") for size in (2, 4, 8)},
    "debug-cp2": ("debug_model", 8, (1, 2, 1), ""),
    **{f"debug-pp4-{name}": ("debug_model", 8, (1, 1, 4), name) for name in SCHEDULES},
    "debug-tp2-cp2-pp4": ("debug_model", 64, (2, 2, 4), "1F1B"),
    "8b": ("llama3_8b", 64, (1, 1, 1), ""),
    **{f"8b-tp{size}": ("llama3_8b", 64, (size, 1, 1), "") for size in (2, 4, 8)},
    "8b-cp2": ("llama3_8b", 64, (1, 2, 1), ""),
    **{f"8b-pp4-{name}": ("llama3_8b", 64, (1, 1, 4), name) for name in SCHEDULES},
    "8b-tp8-pp4": ("llama3_8b", 64, (8, 1, 4), "1F1B"),
    "8b-tp4-cp2": ("llama3_8b", 64, (4, 2, 1), ""),
    "8b-tp2-cp2-pp4": ("llama3_8b", 64, (2, 2, 4), "Interleaved1F1B"),
}
# name: world, tensor, pipeline, experts, ranks that share experts
MEGATRON: dict[str, tuple[int, int, int, int, int]] = {
    "gpt": (8, 1, 1, 0, 1),
    "gpt-tp2": (8, 2, 1, 0, 1),
    "gpt-tp8": (8, 8, 1, 0, 1),
    "gpt-pp4": (8, 1, 4, 0, 1),
    "gpt-tp2-pp4": (64, 2, 4, 0, 1),
    "gpt-ep4": (8, 1, 1, 8, 4),
    "gpt-pp2-ep4": (8, 1, 2, 8, 4),
}


def split(size: int, ranks: int, rank: int) -> int:
    """Rows of a rank where torch chunks them: the last ranks may have fewer, or none."""
    each = math.ceil(size / ranks)
    return min(each, max(size - each * rank, 0))


def stages_of(layers: int, count: int) -> list[list[int | str]]:
    """The parts of torchtitan's stages: embedding and head count as a layer each."""
    everything: list[int | str] = ["embedding", *range(layers), "head"]
    sizes = [len(everything) // count + (index < len(everything) % count) for index in range(count)]
    parts, start = [], 0
    for size in sizes:
        parts.append(everything[start : start + size])
        start += size
    return parts


def titan_bytes(case: tuple[str, int, tuple[int, int, int], str], rank: int) -> list[int]:
    """Weights, gradients and states of a rank, in fp32; the states are two of each weight and the count of steps."""
    name, world, (tensor, _, pipeline), schedule = case
    model = DEBUG if name == "debug_model" else LLAMA
    shards = world // tensor // pipeline
    # the mesh is pipeline, data, context, tensor; FSDP shards over data and context
    stage, shard, part = rank // (shards * tensor), rank // tensor % shards, rank % tensor
    each = 2 if schedule == "Interleaved1F1B" else 1
    stages = stages_of(model["layers"], pipeline * each)
    mine = [part for index in range(each) for part in stages[stage + index * pipeline]]
    dim, head = model["dim"], model["dim"] // model["heads"]
    hidden = int(int(2 * 4 * dim / 3) * model["factor"])
    hidden = math.ceil(hidden / model["multiple"]) * model["multiple"]
    keys = model["kv_heads"] * head
    # rows and columns of each weight, and which of them tensor parallelism splits
    layer = [(dim, dim, 0), (keys, dim, 0), (keys, dim, 0), (dim, dim, 1)]
    layer += [(hidden, dim, 0), (dim, hidden, 1), (hidden, dim, 0), (dim, 1, None), (dim, 1, None)]
    weights = {"embedding": [(model["words"], dim, 0)], "head": [(dim, 1, None), (model["words"], dim, 0)]}
    elements = tensors = 0
    for place in mine:
        for rows, columns, axis in weights.get(place, layer):
            own_rows = split(rows, tensor, part) if axis == 0 else rows
            own_columns = split(columns, tensor, part) if axis == 1 else columns
            elements += split(own_rows, shards, shard) * own_columns
            tensors += 1
    # tensor parallelism alone keeps one gradient of the size of the embedding whole, on a GPU too
    whole = model["words"] * dim - split(model["words"], tensor, part) * dim if shards == 1 else 0
    return [4 * elements, 4 * (elements + whole), 8 * elements + 4 * tensors]


def megatron_bytes(case: tuple[int, int, int, int, int], rank: int) -> list[int]:
    """Weights in bf16, a buffer of gradients in fp32, and as states the weights and both moments in fp32."""
    world, tensor, pipeline, experts, together = case
    stage = rank // (world // pipeline)
    dim = GPT["dim"]
    words = math.ceil(GPT["words"] / (128 * tensor)) * 128
    # norms, and the products with their biases; those of experts have none
    bias = 0 if experts else 1
    layer = 4 * dim + 3 * (dim * dim + bias * dim) // tensor + dim * dim // tensor + bias * dim
    perceptron = (4 * dim * dim + bias * 4 * dim) // tensor + 4 * dim * dim // tensor + bias * dim
    if experts:
        # every rank has its experts whole, with tensor parallelism split as other weights are
        perceptron = perceptron * experts // together + experts * dim
    elements = GPT["layers"] // pipeline * (layer + perceptron)
    if stage == 0:
        elements += words * dim + GPT["tokens"] * dim
    if stage == pipeline - 1:
        elements += 2 * dim + (words * dim if pipeline > 1 else 0)
    return [2 * elements, 4 * elements, 12 * elements]


def titan_arguments(case: tuple[str, int, tuple[int, int, int], str]) -> list[str]:
    model, _, (tensor, context, pipeline), schedule = case
    words = ["torchtitan.train", "--job.config_file", f"torchtitan/models/llama3/train_configs/{model}.toml"]
    words += ["--training.steps", "3", "--training.dataset", "c4_test"]
    words += ["--model.hf_assets_path", "./tests/assets/tokenizer"]
    words += ["--metrics.no-enable-tensorboard", "--profiling.no-enable-profiling"]
    words += ["--parallelism.tensor_parallel_degree", str(tensor)]
    words += ["--parallelism.context_parallel_degree", str(context)]
    if pipeline > 1:
        words += ["--parallelism.pipeline_parallel_degree", str(pipeline)]
        words += ["--parallelism.pipeline_parallel_schedule", schedule, "--training.local_batch_size", "8"]
    return words


def megatron_arguments(case: tuple[int, int, int, int, int]) -> list[str]:
    world, tensor, pipeline, experts, together = case
    words = "pretrain_gpt.py --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion"
    words += " --no-masked-softmax-fusion --no-rope-fusion --attention-backend unfused --mock-data"
    words += " --tokenizer-type NullTokenizer --vocab-size 32000 --num-layers 8 --hidden-size 1024"
    words += " --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 2"
    words += f" --global-batch-size {8 * world} --train-iters 3 --lr 1e-4 --bf16 --eval-iters 0 --eval-interval 100"
    words += f" --tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}"
    if experts:
        words += f" --num-experts {experts} --expert-model-parallel-size {together} --disable-bias-linear"
        words += " --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall"
    return words.split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--titan", type=Path)
    parser.add_argument("--megatron", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--alone", action="store_true", help="the last rank on a GPU, with torch's fake process group")
    options = parser.parse_args()
    cases: list[tuple[str, Path, int, list[str], Any]] = []
    for name, titan in TITAN.items() if options.titan else ():
        cases.append((f"torchtitan-{name}", options.titan, titan[1], titan_arguments(titan), (titan_bytes, titan)))
    for name, gpt in MEGATRON.items() if options.megatron else ():
        cases.append((f"megatron-{name}", options.megatron, gpt[0], megatron_arguments(gpt), (megatron_bytes, gpt)))
    chosen = options.only.split(",") if options.only else [case[0] for case in cases]
    for name, folder, world, words, arithmetic in cases:
        if name in chosen:
            tensor = arithmetic[1][1] if arithmetic[0] is megatron_bytes else 1
            alone = world - tensor if options.alone else None
            row = row_of(folder.resolve(), world, words, arithmetic, alone)
            row = {"case": name, "world": world, "how": "alone" if options.alone else "simulate"} | row
            row |= {"torch": torch.__version__, "date": dt.date.today().isoformat()}
            with options.file.open("a") as file:
                print(json.dumps(row), file=file)
            print(name, "equal" if row["equal"] else row, flush=True)


def row_of(folder: Path, world: int, words: list[str], arithmetic: Any, alone: int | None) -> dict[str, Any]:
    began = time.monotonic()
    paths = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(folder)])
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    with tempfile.TemporaryDirectory() as output:
        if alone is not None:
            command = [sys.executable, str(ALONE), str(COUNTED), *words]
            environment |= {"RANK": str(alone), "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
        else:
            run = ["-m", "ligerprof", "run", "--device", "simulated", "--eager", "--json", "-o", f"{output}/run"]
            launch = ["-m", "torch.distributed.run", "--nproc-per-node", "8", "--nnodes", str(world // 8)]
            command = [sys.executable, *run, "--", sys.executable, *launch, str(COUNTED), *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    found: dict[int, list[list[int]]] = {}
    for rank, _, *values in LINE.findall(done.stderr):
        found.setdefault(int(rank), []).append([int(value) for value in values])
    ranks = {}
    for rank, parts in sorted(found.items()):
        sums = [sum(part[place] for part in parts) for place in range(3)]
        peak, reserved = (max(part[place] for part in parts) for place in (3, 4))
        function, case = arithmetic
        ranks[rank] = {"bytes": sums, "arithmetic": function(case, rank), "peak": peak, "reserved": reserved}
    lines = [line for line in done.stderr.splitlines() if "Error" in line or "ligerprof:" in line]
    return {
        "ranks": ranks,
        "equal": bool(ranks) and not done.returncode and all(r["bytes"] == r["arithmetic"] for r in ranks.values()),
        "problem": (lines or done.stderr.splitlines() or [""])[-1][-300:] if done.returncode else "",
        "seconds": round(time.monotonic() - began, 1),
    }


if __name__ == "__main__":
    main()
