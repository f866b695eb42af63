"""What a rank holds while the whole model is gathered to save it, as accelerate's `get_state_dict` gathers it."""

from collections.abc import Iterable, Mapping

from ligerprof.analyzers.estimate.groups import flat_sizes, sharded_parameter
from ligerprof.analyzers.estimate.partition import weight_width
from ligerprof.analyzers.estimate.recording import Recording
from ligerprof.analyzers.estimate.static import make_weights
from ligerprof.analyzers.estimate.tensors import Weight
from ligerprof.recipe.categories import Engine, Offload
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Phase, Role


def run_saving(recipe: TrainingRecipe) -> Recording:
    """The events of a save after a steady step; none if it gathers nothing.

    Weights, optimizer states, workspaces and the last training batch are there; gradients and gathered weights are not.
    """
    if not recipe.save_whole:
        return Recording()
    if recipe.engine is Engine.FSDP1:
        # one unit at a time, in the dtype of its shards (_unshard_fsdp_state_params, FlatParamHandle.to_cpu)
        gathered_bytes = max(sizes.whole_bytes for sizes in flat_sizes(recipe, make_weights(recipe).values()))
    elif recipe.engine is Engine.FSDP2:
        gathered_bytes = _gathered_by_fsdp2(recipe)
    elif recipe.engine is Engine.DEEPSPEED and recipe.zero == 3 and recipe.gpus > 1:
        gathered_bytes = _gathered_by_zero_3(recipe)
    else:
        return Recording()
    recording = Recording()
    recording.begin(Phase.SAVING)
    recording.touch([gathered_bytes], Role.COMMUNICATION)
    return recording


def _gathered_by_fsdp2(recipe: TrainingRecipe) -> int:
    """One parameter at a time, in the dtype of its shards; shards in main memory are copied to the GPU first.

    torch/distributed/_state_dict_utils.py, _gather_state_dict; of rank 0, which copies it to main memory.
    """
    parameters = [sharded_parameter(recipe, weight) for weight in make_weights(recipe).values()]
    arriving = recipe.offload is not Offload.NONE
    return max(item.storage_bytes * (item.shards + arriving) for item in parameters)


def _gathered_by_zero_3(recipe: TrainingRecipe) -> int:
    """The parameters of one module at a time (engine.py, _zero3_consolidated_16bit_state_dict)."""
    # a partition in main memory is copied to the GPU first
    partitions = recipe.gpus + recipe.offload.moves_parameters
    return max(
        sum(-(-weight.elements // recipe.gpus) for weight in own) * partitions * weight_width(recipe)
        for own in _by_module(make_weights(recipe))
    )


def _by_module(weights: Mapping[str, Weight]) -> Iterable[list[Weight]]:
    modules: dict[str, list[Weight]] = {}
    for name, weight in weights.items():
        modules.setdefault(name.rpartition(".")[0], []).append(weight)
    return modules.values()
