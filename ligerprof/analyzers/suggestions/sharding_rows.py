"""Suggestions for programs on several GPUs: DDP, FSDP2 and DeepSpeed."""

import dataclasses

from ligerprof.analyzers.suggestions.case import Case
from ligerprof.analyzers.suggestions.edits import (
    with_bucket_views,
    with_optimizer_on_host,
    with_resharding,
    with_sharded_states_on_host,
    with_smaller_buckets,
)
from ligerprof.analyzers.suggestions.program import Framework
from ligerprof.analyzers.suggestions.rank_edits import RANKS, with_divided_states, with_sharded_model
from ligerprof.analyzers.suggestions.row import Row, has, owns_loop
from ligerprof.analyzers.suggestions.suggestion import Basis, Cost
from ligerprof.recipe.categories import Offload, Optimizer
from ligerprof.roles import Role

_FOR_TWO_RANKS = f"Computed for {RANKS} ranks; more ranks save more"


def _can_shard(case: Case) -> bool:
    """Whether DDP replicates the model, and the optimizer holds the states of all of it."""
    program = case.program
    if program.engine is not Framework.DDP or not owns_loop(case) or not has(Role.OPTIMIZER_STATES)(case):
        return False
    return not program.has_file(r"torch/distributed/optim/zero_redundancy_optimizer\.py$")


SHARDING_ROWS: tuple[Row, ...] = (
    Row(
        name="bucket-views",
        change="gradients in DDP's buckets instead of next to them",
        cost=Cost.FREE,
        cost_reason="the same results, one copy less",
        without=(Role.GRADIENTS,),
        applies=lambda case: case.program.engine is Framework.DDP and has(Role.COMMUNICATION)(case),
        edit=with_bucket_views,
        how={
            Framework.ACCELERATE: (
                "from accelerate import DistributedDataParallelKwargs",
                "views = DistributedDataParallelKwargs(gradient_as_bucket_view=True)",
                "Accelerator(..., kwargs_handlers=[views])",
            ),
            Framework.LIGHTNING: ("Trainer(strategy=DDPStrategy(gradient_as_bucket_view=True))",),
            Framework.DDP: ("DistributedDataParallel(model, ..., gradient_as_bucket_view=True)",),
        },
    ),
    Row(
        name="reshard",
        change="gathered weights freed after each layer's forward pass",
        cost=Cost.CHEAP,
        cost_reason="one more all-gather per layer and step",
        without=(Role.COMMUNICATION,),
        applies=lambda case: case.program.engine is Framework.FSDP2 and case.trains_model,
        edit=with_resharding,
        how={
            Framework.FSDP2: (
                "# for each layer, not the root:",
                "fully_shard(layer, ..., reshard_after_forward=True)",
            )
        },
    ),
    Row(
        name="shard-optimizer",
        change="each rank updates a part of the weights, and holds the optimizer states of that part alone",
        cost=Cost.CHEAP,
        cost_reason="after each step, the ranks send each other their weights",
        without=(Role.OPTIMIZER_STATES, Role.OPTIMIZER_TEMPORARIES),
        applies=_can_shard,
        edit=with_divided_states,
        condition=_FOR_TWO_RANKS,
        how={
            Framework.DDP: (
                "from torch.distributed.optim import ZeroRedundancyOptimizer",
                "optimizer = ZeroRedundancyOptimizer(",
                "    model.parameters(), optimizer_class=torch.optim.AdamW, ...)",
            ),
        },
    ),
    Row(
        name="shard-model",
        change="weights, gradients and optimizer states divided among the ranks (FSDP2)",
        cost=Cost.TIME,
        cost_reason="two all-gathers per layer and step",
        without=(Role.PARAMETERS, Role.GRADIENTS, Role.OPTIMIZER_STATES, Role.COMMUNICATION),
        applies=lambda case: _can_shard(case) and case.trains_model,
        edit=with_sharded_model,
        basis=Basis.ESTIMATED,
        keeps_buckets=False,
        condition=_FOR_TWO_RANKS,
        how={
            Framework.DDP: (
                "from torch.distributed.fsdp import fully_shard",
                "# in place of DistributedDataParallel(model), for each layer of the model:",
                "fully_shard(layer)",
                "fully_shard(model)  # after its layers, before the optimizer",
            ),
        },
    ),
    Row(
        name="small-buckets",
        change="a tenth of the buffer in which DeepSpeed collects gradients",
        cost=Cost.CHEAP,
        cost_reason="more and smaller reductions",
        without=(Role.COMMUNICATION,),
        applies=lambda case: case.program.engine is Framework.DEEPSPEED,
        edit=with_smaller_buckets,
        how={
            Framework.DEEPSPEED: ('"zero_optimization": {"reduce_bucket_size": 50000000}  # the default / 10',),
        },
    ),
    Row(
        name="offload-optimizer",
        change="optimizer states in main memory",
        cost=Cost.TIME,
        cost_reason="Adam runs on the CPU; gradients and weights cross PCIe every step",
        without=(Role.OPTIMIZER_STATES,),
        applies=lambda case: case.program.engine is Framework.DEEPSPEED and has(Role.OPTIMIZER_STATES)(case),
        edit=with_optimizer_on_host,
        how={
            Framework.LIGERPROF: ("--offload optimizer  # next to --engine deepspeed",),
            Framework.DEEPSPEED: (
                '"zero_optimization": {"offload_optimizer": {"device": "cpu"}}',
                '"zero_force_ds_cpu_optimizer": false  # if the script makes the optimizer',
            ),
        },
        recipe=lambda recipe: dataclasses.replace(recipe, offload=Offload.OPTIMIZER, optimizer=Optimizer.DEFAULT),
    ),
    Row(
        name="cpu-offload",
        change="sharded weights, gradients and optimizer states in main memory",
        cost=Cost.TIME,
        cost_reason="weights and gradients cross PCIe, Adam runs on the CPU",
        without=(Role.PARAMETERS, Role.OPTIMIZER_STATES),
        applies=lambda case: case.program.engine is Framework.FSDP2 and has(Role.OPTIMIZER_STATES)(case),
        edit=with_sharded_states_on_host,
        how={
            Framework.FSDP2: (
                "from torch.distributed.fsdp import CPUOffloadPolicy",
                "# in each call, with the model built on the CPU:",
                "fully_shard(module, ..., offload_policy=CPUOffloadPolicy())",
            ),
        },
    ),
)
