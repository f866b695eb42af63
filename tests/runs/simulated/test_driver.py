"""The simulated step as a whole: its outcome, its snapshot, and what it leaves behind."""

import gc
import warnings
from typing import Any

import pytest
import torch
import transformers.masking_utils as masking
from torch import nn
from torch.utils import _foreach_utils as foreach_utils

from ligerprof.errors import RecipeError, UnsupportedError
from ligerprof.gpus import GPUS, Vendor
from ligerprof.library import explain
from ligerprof.models import spec_from_config
from ligerprof.models.names import CONFIGS
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import STEP_PHASES, Phase
from ligerprof.runs.outcome import StepOutcome
from ligerprof.runs.simulated import simulate_step
from ligerprof.snapshots.reader import Snapshot
from ligerprof.snapshots.replay import replay
from ligerprof.snapshots.stamp import Stamp
from ligerprof.units import MIB
from tests.sampling import sampled


def tiny(**options: Any) -> TrainingRecipe:
    return TrainingRecipe(**{"model": "tiny", "batch": 2, "seq": 64, **options})


def figures(outcome: StepOutcome) -> tuple[Any, ...]:
    return (
        outcome.peak_bytes,
        outcome.reserved_bytes,
        outcome.first_step_peak_bytes,
        outcome.first_step_reserved_bytes,
        dict(outcome.phases),
        dict(outcome.after_phase),
    )


def events(outcome: StepOutcome) -> list[tuple[Any, ...]]:
    return [
        (event["action"], event.get("addr"), event["size"], event["user_metadata"])
        for event in outcome.snapshot["device_traces"][0]
    ]


def test_a_second_simulation_in_the_process_gives_the_same_bytes() -> None:
    first = simulate_step(tiny(precision="amp"))
    simulate_step(tiny(precision="bf16", liger="all", lora=4, attention="eager"))
    second = simulate_step(tiny(precision="amp"))
    assert figures(second) == figures(first)
    assert events(second) == events(first)


@sampled(
    "options",
    [{"precision": "bf16"}, {"lora": 4, "checkpointing": True}],
    ids=["plain", "lora"],
    every=2,
)
def test_figures_do_not_depend_on_the_recorder_nor_on_repeated_micro_batches(options: dict[str, Any]) -> None:
    recipe = tiny(grad_accum=6, **options)
    recorded, bare = simulate_step(recipe), simulate_step(recipe, record=False)
    assert figures(recorded) == figures(bare)
    assert bare.snapshot == {}
    short = simulate_step(recipe, repeat=False)
    assert figures(short) == figures(recorded)
    assert len(events(short)) < len(events(recorded))
    before, after = (explain(Snapshot.from_dict(outcome.snapshot), step=2) for outcome in (recorded, short))
    assert after.roles == before.roles


def patched_things() -> list[Any]:
    from triton.runtime.jit import KernelInterface

    keys = ("AutocastCPU", "AutogradCPU")
    return [
        nn.Module._apply,
        torch.amp.GradScaler._maybe_opt_step,
        foreach_utils._get_foreach_kernels_supported_devices,
        list(foreach_utils._foreach_supported_types),
        masking.is_tracing,
        masking.find_packed_sequence_indices,
        KernelInterface.__getitem__,
        torch.cuda.get_device_properties,
        torch.cuda.get_device_capability,
        torch.is_autocast_enabled,
        nn.functional.scaled_dot_product_attention,
        *(sorted(torch._C._dispatch_get_registrations_for_dispatch_key(key)) for key in keys),
        gc.isenabled(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
    ]


@pytest.mark.parametrize(
    "options", [{"liger": "all", "precision": "amp"}, {"memory_limit_bytes": 40 * MIB}, {"lora": 4}]
)
def test_the_process_is_left_as_it_was(options: dict[str, Any]) -> None:
    before = patched_things()
    simulate_step(tiny(**options), record=False)
    assert patched_things() == before


def test_autocast_on_real_tensors_is_its_own_again() -> None:
    def run() -> list[torch.dtype]:
        source = torch.ones(4, 4, dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            return [source.pow(2).dtype, torch.cat([source, source.float()]).dtype, source.softmax(-1).dtype]

    before = run()
    simulate_step(tiny(precision="amp"), record=False)
    assert run() == before


def test_outcome_tells_the_steady_step_phase_by_phase() -> None:
    outcome = simulate_step(tiny(warmup=2, precision="bf16"))
    assert outcome.backend == "simulated"
    assert outcome.profiled_step == 3
    assert outcome.step_seconds == ()
    assert outcome.oom is None
    assert set(outcome.phases) == set(outcome.after_phase) == set(STEP_PHASES)
    assert outcome.peak_bytes == max(outcome.phases.values())
    assert outcome.peak_bytes <= outcome.reserved_bytes
    assert outcome.first_step_peak_bytes < outcome.peak_bytes
    assert outcome.versions["torch"] == torch.__version__
    assert "H200" in outcome.gpu
    assert outcome.notes[0].startswith("Simulated, not measured")


@pytest.mark.parametrize("options", [{}, {"liger": "flce", "alloc_conf": "expandable_segments:True"}, {"lora": 4}])
def test_replaying_its_snapshot_gives_its_own_figures(options: dict[str, Any]) -> None:
    outcome = simulate_step(tiny(precision="amp", clip=1.0, **options))
    replayed = replay(Snapshot.from_dict(outcome.snapshot), 0)
    stamps = [Stamp.parse(event["user_metadata"]) for event in replayed.trace]

    assert replayed.complete
    assert replayed.verified
    assert all(isinstance(stamp, Stamp) for stamp in stamps)
    steady = [index for index, stamp in enumerate(stamps) if stamp and stamp.step == outcome.profiled_step]
    assert replayed.allocated_bytes[steady[0] : steady[-1] + 2].max() == outcome.peak_bytes
    assert replayed.reserved_bytes[steady[0] : steady[-1] + 2].max() == outcome.reserved_bytes
    for phase in STEP_PHASES:
        run = [index for index in steady if stamps[index].phase is phase]  # type: ignore[union-attr]
        assert replayed.allocated_bytes[run[0] : run[-1] + 2].max() == outcome.phases[phase]


def test_stamps_and_frames_name_modules_and_autograd_nodes() -> None:
    outcome = simulate_step(tiny(precision="bf16"))
    allocated = [event for event in outcome.snapshot["device_traces"][0] if event["action"] == "alloc"]
    stamps = [Stamp.parse(event["user_metadata"]) for event in allocated]
    modules = {stamp.module for stamp in stamps if stamp}
    nodes = {stamp.node for stamp in stamps if stamp and stamp.phase is Phase.BACKWARD}
    assert {"model.layers.1.self_attn", "model.layers.0.mlp.gate_proj", "lm_head"} <= modules
    assert {"MmBackward0", "NllLossBackward0"} <= nodes
    assert any(stamp.recompute for stamp in stamps if stamp)
    files = {frame["filename"] for event in allocated for frame in event["frames"][:1]}
    assert any(file.endswith("modeling_llama.py") for file in files)
    assert not any("runs/simulated/" in file and "driver" not in file for file in files)


def test_out_of_memory_is_a_result() -> None:
    fits = simulate_step(tiny(precision="bf16"), record=False)
    limit = fits.reserved_bytes - 4 * MIB
    outcome = simulate_step(tiny(precision="bf16", memory_limit_bytes=limit))
    assert outcome.oom is not None
    assert outcome.oom.limit_bytes == limit
    assert outcome.oom.allocated_bytes <= outcome.oom.reserved_bytes <= limit
    assert outcome.oom.phase in STEP_PHASES
    assert outcome.oom.step == outcome.profiled_step
    assert outcome.peak_bytes <= outcome.reserved_bytes <= limit
    last = [event for event in outcome.snapshot["device_traces"][0] if event["action"] == "oom"]
    assert [event["size"] for event in last] == [outcome.oom.requested_bytes]
    assert replay(Snapshot.from_dict(outcome.snapshot), 0).reserved_bytes.max() == outcome.reserved_bytes


def test_a_model_too_large_ends_while_it_is_built() -> None:
    outcome = simulate_step(TrainingRecipe(model="llama3.1-70b", gpu="rtx4090", precision="bf16"), record=False)
    assert outcome.oom is not None
    assert (outcome.oom.step, outcome.oom.phase) == (0, Phase.BUILD)
    assert outcome.peak_bytes > 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"gpu": "mi300x"}, UnsupportedError),
        ({"alloc_conf": "backend:cudaMallocAsync"}, UnsupportedError),
        ({"memory_limit_bytes": 2**50}, RecipeError),
        ({"attention": "flash"}, UnsupportedError),
    ],
)
def test_what_is_not_modelled_is_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        simulate_step(tiny(**options))


PRECISIONS = ("amp", "amp-fp16", "bf16", "fp16", "fp32")
# every value of every option at least once, options mixed
MIXTURES = [
    {"precision": "amp", "optimizer": "adamw-foreach", "checkpointing": False},
    {"precision": "amp-fp16", "clip": 1.0, "grad_accum": 2, "liger": "flce"},
    {"precision": "bf16-amp", "liger": "all", "clip": 1.0, "checkpointing": False},
    {"precision": "bf16", "reentrant": True, "padding": 0.25, "optimizer": "sgd"},
    {"precision": "fp16", "attention": "eager", "clip": 0.5, "optimizer": "adamw-foreach"},
    {"precision": "fp32", "liger": "no-flce", "optimizer": "none", "padding": 0.5},
    {"precision": "bf16", "lora": 4, "liger": "all", "clip": 1.0},
    {"precision": "amp", "lora": 4, "reentrant": True, "padding": 0.25},
    {"precision": "bf16", "loss": "hf-4.45", "liger": "no-flce", "checkpointing": False},
    {"precision": "amp", "liger": "ce+rope", "attention": "eager", "grad_accum": 3},
    {"precision": "bf16", "liger": "all", "flce_budget": "lean"},
]


@sampled("options", MIXTURES, ids=lambda options: "-".join(map(str, options.values())), every=3)
def test_every_option_simulates_without_a_warning(options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # liger-kernel and transformers warn about each other when they are first imported
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        outcome = simulate_step(tiny(**options), record=False)
    assert outcome.oom is None
    assert outcome.peak_bytes > 0


@pytest.mark.parametrize("options", MIXTURES[1:6:4], ids=lambda options: "-".join(map(str, options.values())))
def test_nothing_of_a_step_stays_when_it_ends(options: dict[str, Any]) -> None:
    second, third = (simulate_step(tiny(warmup=warmup, **options), record=False) for warmup in (1, 2))
    assert third.after_phase == second.after_phase


# the last one of each compute capability
CAPABILITIES = {gpu.compute_capability: gpu.name for gpu in GPUS.values() if gpu.vendor is Vendor.NVIDIA}


@sampled("gpu", ["h200", *CAPABILITIES.values()], every=4)
def test_every_gpu_of_the_table_simulates(gpu: str) -> None:
    precision = "fp16" if GPUS[gpu].compute_capability < (8, 0) else "bf16"
    recipe = tiny(gpu=gpu, precision=precision, checkpointing=False, optimizer="none")
    outcome = simulate_step(recipe, record=False)
    assert outcome.oom is None
    assert outcome.gpu == GPUS[gpu].title
    assert any("Assumed" in note for note in outcome.notes) != GPUS[gpu].measured


@sampled("model", ["gpt2-xl", "gemma2-2b", "llama2-7b"], every=3)
def test_other_architectures_simulate(model: str) -> None:
    config = {**CONFIGS[model]}
    config["n_layer" if model == "gpt2-xl" else "num_hidden_layers"] = 2
    spec = spec_from_config(config, name=model)
    recipe = TrainingRecipe(model=spec, batch=1, seq=256, attention="eager" if model == "gemma2-2b" else "sdpa")
    outcome = simulate_step(recipe, record=False)
    parameters = 4 * spec.parameter_count
    # weights, gradients and two moments in fp32 stand when a step ends
    assert outcome.after_phase[Phase.OPTIMIZER] >= 4 * parameters


def test_more_memory_is_taken_for_more_tokens_and_never_for_more_checkpoints() -> None:
    def peak(**options: Any) -> int:
        return simulate_step(tiny(precision="bf16", **options), record=False).peak_bytes

    few, many = peak(seq=256), peak(batch=4, seq=256)
    assert many > few
    assert peak(seq=256, checkpointing=False) > few
    assert peak(batch=4, seq=256, liger="flce") < many
