"""The evaluation pass between two steps: a forward pass without gradients, on a batch of its own."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from ligerprof.analyzers.estimate.micro_batch import MicroBatch
from ligerprof.analyzers.estimate.recording import Recording, recording_after
from ligerprof.analyzers.estimate.static import input_sizes, make_weights
from ligerprof.analyzers.estimate.step import hooks_of, new_meter
from ligerprof.analyzers.estimate.traced_batch import TracedMicroBatch
from ligerprof.kernels.spec import KernelSpec
from ligerprof.models import ModelSpec, spec_from_config
from ligerprof.models.config_keys import Number
from ligerprof.models.layer_tape import Batch, layer_tape, model_tape
from ligerprof.recipe.categories import Step
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Phase, Role


def run_evaluation(recipe: TrainingRecipe, kernels: Mapping[str, KernelSpec], before: Sequence[Recording]) -> Recording:
    """The events of an evaluation after a steady step; none without one.

    Gradients are gone by then; weights, optimizer states, workspaces and the last training batch are there.

    Args:
        before: the build of the model, and the steps.
    """
    evaluated = recipe.evaluation
    if evaluated is None:
        return Recording()
    tape = recipe.spec.evaluation_tape
    model = _without_dropout(recipe.spec) if tape is None else dataclasses.replace(recipe.spec, tape=tape)
    evaluated = dataclasses.replace(evaluated, model=model)
    weights = make_weights(recipe)
    meter = new_meter(recipe)
    recording = meter.recording = recording_after(before)
    recording.begin(Phase.EVALUATION)
    # FSDP2 and ZeRO-3 gather weights as in training, and DDP's buckets are there
    hooks = hooks_of(recipe, kernels, weights, meter, Step.STEADY)
    hooks.start_step()
    for size_bytes in input_sizes(evaluated):
        meter.take(size_bytes, Role.INPUTS)
    for weight in weights.values():
        weight.recorded = False
    if tape is not None:
        TracedMicroBatch(evaluated, weights, meter, hooks).forward()
        return recording
    micro_batch = MicroBatch(evaluated, weights, kernels, meter, hooks)
    micro_batch.evaluates = True
    # checkpointing's hook on the embedding, `enable_input_require_grads`, makes a leaf of what nothing records
    micro_batch.copies_embedding = recipe.checkpointing and recipe.spec.architecture.scales_embedding != "decoder"
    micro_batch.forward()
    return recording


def _without_dropout(spec: ModelSpec) -> ModelSpec:
    """The model in evaluation mode."""
    off = {dropout.key: 0.0 for dropout in _dropouts(spec) if spec.dropout_rate(dropout)}
    experts = spec.architecture.mlp.experts
    if experts is not None and experts.noise is not None:
        off[experts.noise] = 0.0
    return spec_from_config({**spec.config, **off}, name=spec.name) if off else spec


def _dropouts(spec: ModelSpec) -> Iterator[Number]:
    """Those of attention and MLPs, which kernels may compute, and those on tapes."""
    row = spec.architecture
    yield from (dropout for dropout in (row.attention.dropout, row.mlp.dropout) if dropout is not None)
    for tape in (model_tape(spec), *(layer_tape(spec, index, Batch()) for index in spec.layer_kinds.examples)):
        for kind, _, *rest in tape[:-1]:
            if kind == "dropout" and rest[1] is not None:
                yield Number(key=rest[1], default=rest[2])
