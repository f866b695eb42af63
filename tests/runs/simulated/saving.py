"""Simulate steps after which a model is gathered, and steps after which it is not; prints both peaks as JSON."""

import json
import sys
from typing import Any

from ligerprof import own_process
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Phase
from ligerprof.runs.measured.deepspeed import DeepSpeedTrainer
from ligerprof.runs.parallel import FlatTrainer, ShardedTrainer
from ligerprof.runs.simulated import simulate_step
from ligerprof.runs.simulated.worker import worker


def gather(trainer: Any, _batch: Any) -> None:
    """As `Accelerator.get_state_dict` does."""
    if isinstance(trainer, DeepSpeedTrainer):
        trainer.engine._zero3_consolidated_16bit_state_dict()
        return
    if isinstance(trainer, FlatTrainer):
        from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

        config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        with FullyShardedDataParallel.state_dict_type(trainer.model, StateDictType.FULL_STATE_DICT, config):
            trainer.model.state_dict()
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True)
    get_model_state_dict(trainer.model, options=options)


def nothing(_trainer: Any, _batch: Any) -> None:
    """No evaluation."""


def main() -> None:
    # the worker is a fork, with what is replaced here
    own_process.claim()
    found = {}
    for name, work in (("saving", gather), ("nothing", nothing)):
        FlatTrainer.evaluate = ShardedTrainer.evaluate = DeepSpeedTrainer.evaluate = work  # type: ignore[method-assign]
        recipe = TrainingRecipe.from_json(json.loads(sys.argv[1]))
        found[name] = simulate_step(recipe, record=False).phases[Phase.EVALUATION]
        worker().close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
