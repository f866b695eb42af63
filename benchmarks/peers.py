"""Run other estimators on the measured steps: packages, and published formulas implemented here.

    python benchmarks/peers.py benchmarks/results/peers.json   # with accelerate, hf-vram-calc and deepspeed on the path

Does not require a GPU. Existing rows are kept; a figure that a peer cannot compute is null, with the reason.
"""

import argparse
import contextlib
import io
import json
import signal
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accuracy import RESULTS, ZERO_RESULTS, group_of, load_rows, recipe_of

from ligerprof.recipe.training import TrainingRecipe

GIB = 2**30
PATIENCE_SECONDS = 30
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


def parameters(recipe: TrainingRecipe) -> int:
    return sum(item.elements for item in recipe.spec.parameters)


def study_16p(recipe: TrainingRecipe) -> int:
    """The 2024 study of fused kernels: 16 bytes per parameter, checkpoints, three fp32 [T, V] logits tensors."""
    spec, tokens = recipe.spec, recipe.tokens
    checkpoints = 2 * tokens * spec.hidden_size * spec.layers
    return 16 * parameters(recipe) + checkpoints + 3 * 4 * tokens * spec.vocab_size


def ultrascale(recipe: TrainingRecipe) -> int:
    """The Ultra-Scale Playbook (Hugging Face, 2025), "Memory usage in transformers".

    Weights, gradients, fp32 copy and moments are 16 N in mixed precision; activations of a layer are
    s b h (34 + 5 a s / h), after Korthikanti et al. (arXiv 2205.05198), the scores left out with fused
    attention; with full recomputation 2 s b h per layer and one layer whole.
    """
    spec = recipe.spec
    states = 16 if recipe.weight_dtype == "float32" else 8
    plane = recipe.tokens * spec.hidden_size
    scores = 5 * spec.heads * recipe.seq / spec.hidden_size if recipe.attention == "eager" else 0
    layer = plane * (34 + scores)
    activations = 2 * plane * spec.layers + layer if recipe.checkpointing else layer * spec.layers
    return int(states * parameters(recipe) + activations)


def transformer_math(recipe: TrainingRecipe) -> int:
    """EleutherAI, "Transformer Math 101" (2023): states, and activations after the same paper."""
    spec = recipe.spec
    states = 16 if recipe.weight_dtype == "float32" else 8
    plane = recipe.tokens * spec.hidden_size
    whole = plane * (10 + 24 + 5 * spec.heads * recipe.seq / spec.hidden_size)
    return int(states * parameters(recipe) + spec.layers * (2 * plane if recipe.checkpointing else whole))


def accelerate_memory(recipe: TrainingRecipe) -> int:
    """`accelerate estimate-memory`: "Training using Adam (Peak vRAM)", the largest of its four phases."""
    from accelerate.commands.estimate import estimate_training_usage

    computes = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}[recipe.compute_dtype]
    sizes: dict[str, int] = estimate_training_usage(4 * parameters(recipe), mixed_precision=computes)
    return max(sizes.values())


def hf_vram_calc(recipe: TrainingRecipe) -> int:
    """hf-vram-calc's training memory, the only column of its table that is about training."""
    from hf_vram_calc.calculator import VRAMCalculator
    from hf_vram_calc.config import ConfigManager

    calculator = VRAMCalculator(ConfigManager())
    dtype = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[recipe.weight_dtype]
    model = calculator.calculate_model_memory(parameters(recipe), dtype)
    return int(calculator.calculate_training_memory(model) * GIB)


def deepspeed_states(recipe: TrainingRecipe) -> int:
    """DeepSpeed's own estimators of model states, on the GPU."""
    with contextlib.redirect_stdout(io.StringIO()):
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as stage_3
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as stage_2

    total, offloaded = parameters(recipe), recipe.offload != "none"
    if recipe.zero < 3:
        return int(stage_2(total, num_gpus_per_node=recipe.gpus, cpu_offload=offloaded)[1])
    largest = max(item.elements for item in recipe.spec.parameters)
    needs = stage_3(
        total,
        largest,
        num_gpus_per_node=recipe.gpus,
        cpu_offload=offloaded,
        cpu_offload_params=recipe.offload in ("all", "nvme"),
    )
    return int(needs[1])


def mem_tracker(recipe: TrainingRecipe) -> int:
    """torch.distributed._tools.mem_tracker.MemTracker over two training steps under FakeTensorMode."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from ligerprof.runs.training import Trainer, built_model, make_batch, make_optimizer, train_step

    device = torch.device("cpu")
    with FakeTensorMode(), built_model(recipe, device) as model:
        trainer = Trainer(
            recipe=recipe, model=model, optimizer=make_optimizer(recipe, model), scaler=None, device_type="cpu"
        )
        tracker = MemTracker()
        tracked = [model] if trainer.optimizer is None else [model, trainer.optimizer]
        tracker.track_external(*tracked)
        batch = make_batch(recipe, device)
        with tracker:
            for step in range(2):
                train_step(trainer, batch, _Nothing())
                if step == 0:
                    tracker.reset_mod_stats()
        peak = tracker.get_tracker_snapshot("peak")
    return int(next(iter(peak.values()))["Total"])


class _Nothing:
    """An observer that records nothing."""

    @contextlib.contextmanager
    def phase(self, _phase: Any) -> Any:
        yield

    def loss_made(self, _loss: Any) -> None:
        pass


PLAIN: dict[str, Callable[[TrainingRecipe], int]] = {
    "hf-vram-calc": hf_vram_calc,
    "accelerate estimate-memory": accelerate_memory,
    "Ultra-Scale Playbook": ultrascale,
    "Transformer Math 101": transformer_math,
    "16 P, checkpoints, 3 logits tensors": study_16p,
}
# runs the step on fake tensors, which takes seconds per row
SLOW: dict[str, Callable[[TrainingRecipe], int]] = {"MemTracker": mem_tracker}
ZERO: dict[str, Callable[[TrainingRecipe], int]] = {"DeepSpeed's estimators": deepspeed_states}
PACKAGES = ("torch", "transformers", "accelerate", "hf-vram-calc", "deepspeed")


@contextlib.contextmanager
def patience() -> Iterator[None]:
    """Give up after half a minute of CPU time; the time of other processes does not count."""

    def give_up(_number: int, _frame: Any) -> None:
        raise TimeoutError(f"no answer within {PATIENCE_SECONDS} seconds of processor time")

    signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, PATIENCE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def ask(peers: dict[str, Callable[[TrainingRecipe], int]], recipe: TrainingRecipe, known: dict[str, Any]) -> None:
    for name, peer in peers.items():
        if known.get(name) is not None or f"{name}: why" in known:
            continue
        try:
            with patience():
                known[name] = peer(recipe)
        except Exception as error:
            known[name] = None
            known[f"{name}: why"] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}" if str(error) else ""


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(Exception):
            found[package] = version(package)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    results: Path = parser.parse_args().results
    stored = json.loads(results.read_text()) if results.exists() else {"plain": {}, "zero": {}}
    for number, row in enumerate(load_rows(ZERO_RESULTS)):
        ask(ZERO, TrainingRecipe.from_json(row["recipe"]), stored["zero"].setdefault(str(number), {}))
    plain = [row for row in load_rows(RESULTS) if group_of(row["options"]) == "plain"]
    for peers in (PLAIN, SLOW):
        for row in plain:
            ask(peers, recipe_of(row["options"]), stored["plain"].setdefault(str(row["number"]), {}))
            results.write_text(json.dumps({**stored, "versions": _versions()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
