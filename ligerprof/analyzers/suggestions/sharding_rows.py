"""Suggestions for programs on several GPUs: DDP, FSDP2 and DeepSpeed."""

import dataclasses

from ligerprof.analyzers.suggestions.edits import (
    with_bucket_views,
    with_optimizer_on_host,
    with_resharding,
    with_sharded_states_on_host,
    with_smaller_buckets,
)
from ligerprof.analyzers.suggestions.program import Framework
from ligerprof.analyzers.suggestions.row import Row, has
from ligerprof.analyzers.suggestions.suggestion import Cost
from ligerprof.recipe.categories import Offload, Optimizer
from ligerprof.roles import Role

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
