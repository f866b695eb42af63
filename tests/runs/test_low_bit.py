"""4-bit weights, 8-bit moments and GaLore: the simulated step against the estimate, role by role."""

import importlib
import multiprocessing
from dataclasses import replace
from typing import Any

import pytest
import torch

from ligerprof.analyzers.estimate import estimate
from ligerprof.analyzers.estimate.lora import is_quantized
from ligerprof.analyzers.explain.analysis import explain
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Phase, Role
from ligerprof.runs.simulated import simulate_step
from ligerprof.runs.simulated.low_bit import EightBitLinear, FourBitLinear, StoredStates
from ligerprof.snapshots.reader import Snapshot
from ligerprof.torch_memory.low_bit import eight_bit_state_sizes, int8_sizes, nf4_sizes
from ligerprof.torch_memory.optimizers import OptimizedTensor
from tests.sampling import sampled

# positions and scalars that the estimate leaves out
SMALL_BYTES = 64 * 1024
CASES: list[dict[str, Any]] = [
    {"optimizer": "adamw-8bit"},
    {"optimizer": "adamw-8bit", "precision": "bf16", "checkpointing": False},
    {"optimizer": "adamw-8bit", "fp32_embedding_states": True},
    {"optimizer": "galore", "galore_rank": 16},
    {"optimizer": "galore", "galore_rank": 4, "precision": "bf16", "grad_accum": 2},
    {"qlora": 8},
    {"qlora": 8, "precision": "bf16", "checkpointing": False, "liger": "all"},
    {"qlora": 4, "precision": "fp16", "optimizer": "adamw-8bit"},
    {"qlora": 4, "precision": "amp-fp16", "attention": "eager"},
    {"lora": 8, "precision": "fp16-amp", "grad_accum": 2, "clip": 1.0},
    {"qlora": 8, "precision": "fp16-amp", "attention": "eager", "checkpointing": False},
    {"qlora": 8, "nested_quant": False},
    {"qlora": 8, "precision": "bf16-amp", "adapter_dtype": "bfloat16", "nested_quant": False},
    {"qlora": 8, "precision": "bf16", "adapter_dtype": "bfloat16", "checkpointing": False},
    {"lora": 8, "quantization": "8bit"},
    {"lora": 8, "quantization": "8bit", "precision": "bf16-amp", "reentrant": True, "grad_accum": 2},
    {"lora": 8, "quantization": "8bit", "precision": "bf16", "checkpointing": False, "liger": "all"},
    {"lora": 8, "quantization": "8bit", "precision": "fp16-amp", "grad_accum": 2, "optimizer": "adamw-8bit"},
    {"lora": 8, "quantization": "8bit", "precision": "amp-fp16", "attention": "eager", "lora_targets": "q_proj+v_proj"},
    {"lora": 8, "quantization": "8bit", "precision": "bf16", "loss": "torch-linear"},
    {"lora": 4, "quantization": "8bit", "precision": "bf16-amp", "adapter_dtype": "bfloat16", "checkpointing": False},
    {"lora": 32, "precision": "bf16-amp", "adapter_dtype": "bfloat16", "lora_targets": "q_proj+lm_head+embed_tokens"},
]


@sampled("options", CASES, ids=lambda options: "-".join(map(str, options.values())), every=4)
def test_estimate_and_simulation_agree_role_by_role(options: dict[str, Any]) -> None:
    recipe = TrainingRecipe(model="tiny", batch=2, seq=512, **options)
    outcome = simulate_step(recipe)
    simulated = explain(Snapshot.from_dict(outcome.snapshot), step=outcome.profiled_step).roles
    estimated = estimate(recipe).roles
    # the gradient of frozen embeddings' output counts as either
    together = (Role.ACTIVATIONS, Role.GRADIENTS)
    assert sum(estimated[role] for role in together) == pytest.approx(
        sum(simulated[role] for role in together), abs=SMALL_BYTES
    )
    for role in set(Role) - {*together, Role.ALLOCATOR_ROUNDING}:
        assert estimated[role] == pytest.approx(simulated[role], abs=SMALL_BYTES), role


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_galore_update_takes_the_estimated_memory(precision: str) -> None:
    recipe = TrainingRecipe(model="tiny", batch=1, seq=16, optimizer="galore", galore_rank=8, precision=precision)
    outcome, estimated = simulate_step(recipe, record=False), estimate(recipe)
    assert estimated.phases[Phase.OPTIMIZER] == pytest.approx(outcome.phases[Phase.OPTIMIZER], abs=SMALL_BYTES)


@pytest.mark.parametrize("nested", [True, False])
def test_a_4_bit_layer_is_as_large_as_its_sizes_say(nested: bool) -> None:
    layer = FourBitLinear(torch.zeros(96, 64, dtype=torch.bfloat16), None, nested=nested)
    held = [layer.weight, layer._scales, *layer._tables]
    assert sorted(tensor.nbytes for tensor in held) == sorted(nf4_sizes(96 * 64, nested=nested))


def test_bytes_of_4_bit_weights() -> None:
    # half a byte per weight, one byte per 64 weights, and 1.1 KB
    assert sum(nf4_sizes(2**20, nested=True)) == 2**20 // 2 + 2**20 // 64 + 2**20 // 64 // 256 * 4 + 1024 + 4 + 64
    # half a byte per weight, four bytes per 64 weights, and the table
    assert sum(nf4_sizes(2**20, nested=False)) == 2**20 // 2 + 4 * 2**20 // 64 + 64


def test_an_8_bit_layer_is_as_large_as_its_sizes_say() -> None:
    layer = EightBitLinear(torch.zeros(96, 64, dtype=torch.float16), None)
    # one byte per weight, four per output
    assert [layer.weight.nbytes, layer._scales.nbytes] == list(int8_sizes(96, 64)) == [96 * 64, 4 * 96]


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_non_reentrant_checkpointing_does_not_free_the_inputs_of_8_bit_products(reentrant: bool) -> None:
    recipe = TrainingRecipe(
        model="tiny", batch=2, seq=512, lora=8, quantization="8bit", precision="bf16-amp", reentrant=reentrant
    )
    packed, plain = estimate(recipe).roles, estimate(replace(recipe, quantization=None)).roles
    spec = recipe.spec
    inputs = 3 * spec.hidden_size + spec.config["intermediate_size"]
    kept_bytes = 0 if reentrant else 2 * recipe.tokens * inputs * spec.layers
    assert packed[Role.ACTIVATIONS] - plain[Role.ACTIVATIONS] == kept_bytes
    weights = [item.shape for item in spec.parameters if is_quantized(spec, item.name)]
    saved_bytes = sum(outputs * inputs - 4 * outputs for outputs, inputs in weights)
    assert plain[Role.PARAMETERS] - packed[Role.PARAMETERS] == saved_bytes


@pytest.mark.parametrize("name", ["adamw-8bit", "paged-adamw-8bit", "paged-adamw", "lion", "ademamix"])
def test_stand_ins_of_bitsandbytes_keep_the_states_of_their_row(name: str) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(elements)) for elements in (10, 4095, 4096, 170_001)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = StoredStates(parameters, name)
    optimizer.step()
    kept = [[state.nbytes for state in optimizer.state[parameter]["states"]] for parameter in parameters]
    optimizer.step()
    assert kept == [[state.nbytes for state in optimizer.state[parameter]["states"]] for parameter in parameters]
    if name == "adamw-8bit":
        assert kept == [list(eight_bit_state_sizes(parameter.numel())) for parameter in parameters]
    if name == "lion":
        assert kept == [[4 * parameter.numel()] for parameter in parameters]
    if name == "ademamix":
        assert kept == [[8 * parameter.numel(), 4 * parameter.numel()] for parameter in parameters]


def test_a_rank_beyond_a_matrix_projects_nothing_away() -> None:
    for rank, elements in ((100, 12), (2, 8)):
        tensor = OptimizedTensor(shape=(3, 4), elements=12, width=4, in_layer=True, galore_rank=rank)
        assert tensor.projected_bytes == elements * 4


def measured_peak_bytes(options: dict[str, Any]) -> int:
    measure_step = importlib.import_module("ligerprof.runs.measured.step").measure_step
    recipe = TrainingRecipe(model="tiny", batch=2, seq=512, **options)
    peak_bytes: int = measure_step(recipe, trace_directory=None, progress=print).peak_bytes
    return peak_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("options", CASES, ids=lambda options: "-".join(map(str, options.values())))
def test_measured_peak_is_the_simulated_one(options: dict[str, Any]) -> None:
    for package in ("bitsandbytes", "galore_torch"):
        pytest.importorskip(package)
    # a step counts from an empty device, and packages keep tensors until their process ends
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        peak_bytes = pool.apply(measured_peak_bytes, (options,))
    simulated = simulate_step(TrainingRecipe(model="tiny", batch=2, seq=512, **options), record=False)
    assert simulated.peak_bytes == pytest.approx(peak_bytes, rel=0.01)
