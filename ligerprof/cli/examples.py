"""The examples in the help of each command; tests/cli/test_examples.py runs them."""

from typing import NamedTuple


class Example(NamedTuple):
    """A command line without `ligerprof`, and what it is for."""

    words: str
    text: str


EXAMPLES: dict[str, tuple[Example, ...]] = {
    "ligerprof": (
        Example("explain snapshot.pickle", "What the memory at the peak of a recording belongs to."),
        Example("run -- python train.py", "The same for your own training, which it records."),
        Example("estimate --model llama3.1-8b --gpu h200", "What a training will need, before it runs."),
    ),
    "watch": (Example("watch runs/001 --once", "The newest figures of a running `ligerprof run`."),),
    "step": (
        Example("step --model llama3.2-1b --liger flce", "A 1B model with the fused loss, on the GPU or simulated."),
        Example(
            "step --model tiny --memory-limit 70MiB -o runs/small", "With a limit on its memory, which may run out."
        ),
    ),
    "run": (
        Example("run -- python train.py", "Record your own training."),
        Example("run --steps 2:3 -- accelerate launch train.py", "Record two steps of each rank."),
    ),
    "explain": (
        Example("explain snapshot.pickle", "Roles, then blocks, at the peak of a recording."),
        Example("explain runs/001 --by layer --html peak.html", "A run layer by layer, and as a page."),
        Example("explain snapshot.pickle --max-peak 20GiB", "For CI: exit code 3 if the peak is above 20 GiB."),
    ),
    "estimate": (
        Example("estimate --model llama3.1-8b --precision bf16 --gpu h200", "Whether a recipe fits a GPU."),
        Example(
            "estimate --model Qwen/Qwen3-4B --lora 16 --gpu 4090 --by layer", "LoRA on a 24 GB card, layer by layer."
        ),
        Example("estimate --config training_args.json --memory-limit 40GiB", "The recipe in a Trainer's arguments."),
    ),
    "fit": (
        Example(
            "fit --model llama3.2-1b --gpu rtx4090 --no-simulate",
            "The largest batch and sequence by the analytic estimate.",
        ),
        Example("fit --model tiny --seq 512 --memory-limit 120MiB", "Each answer checked by simulated steps."),
        Example("fit --gpu rtx4090 -- trl sft --config sft.yaml", "The largest micro-batch of your own command."),
    ),
    "advise": (
        Example(
            "advise --model llama3.2-1b --batch 8 --gpu rtx4090 --no-simulate", "What to change to fit a 24 GB card."
        ),
        Example(
            "advise --config training_args.json --gpu rtx4090 --no-simulate", "The same as changed lines of your file."
        ),
        Example("advise --gpu rtx4090 -- trl dpo --config dpo.yaml", "The cheapest changes of your own command."),
    ),
    "compare": (
        Example("compare runs/001 runs/002", "Two runs, role by role."),
        Example("compare runs/001", "A run with its own estimate."),
        Example("compare snapshot.pickle estimate.json", "A recording with the output of `estimate --json`."),
    ),
    "diff": (
        Example("diff before.pickle after.pickle", "What grew and what shrank."),
        Example(
            "diff before.pickle after.pickle --max-growth 2%", "For CI: exit code 3 if the peak grew by more than 2 %."
        ),
    ),
    "sweep": (
        Example("sweep --model tiny --batch 1,2 --liger none,flce --dry-run", "The cells of a grid, with estimates."),
        Example("sweep --model tiny --batch 1,2 --liger none,flce -o runs/tiny", "Run them; the same command resumes."),
    ),
    "study": (
        Example("study --dry-run", "The cells of the study of 2024."),
        Example("study --report -o runs/study", "The report of the cells that have finished."),
    ),
    "plot": (
        Example("plot runs/sweep", "All figures that a sweep allows."),
        Example("plot --kind planes --model llama3.2-1b", "The logits tensors of a recipe, without a run."),
        Example("plot snapshot.pickle --kind memory --format svg -o timeline", "The memory of a recording over time."),
    ),
    "bench": (
        Example("bench flce rms", "The fused loss and RMSNorm of every provider, on a GPU."),
        Example("bench --from bench.jsonl --figure bench.svg", "Records of an earlier bench, without a GPU."),
    ),
    "trace": (
        Example("trace step.pt.trace.json", "Busy time, gaps and kernels of a trace of torch.profiler."),
        Example("trace step.pt.trace.json later.pt.trace.json", "What changed between two traces."),
    ),
    "view": (Example("view runs/001", "TensorBoard on a run, until Ctrl-C."),),
    "models": (
        Example("models llama3.1", "The figures of every Llama 3.1."),
        Example("models --json", "All models, for scripts."),
    ),
    "kernels": (
        Example("kernels --model llama3.2-1b", "Which kernels apply to a model."),
        Example("kernels check rms", "Test a kernel against its reference."),
    ),
    "mcp": (Example("mcp", "Serve the tools until the agent closes standard input."),),
    "env": (
        Example("env", "What is installed, and which GPUs there are."),
        Example("env --json", "The same for scripts."),
    ),
}
