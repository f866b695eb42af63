"""Run a training program, and print the bytes of its weights, gradients and optimizer states after each step.

torchrun --nproc-per-node N counted.py MODULE|FILE.py [ARGUMENTS]
"""

import gc
import os
import runpy
import sys
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

steps: dict[int, int] = {}


def local(tensor):
    return getattr(tensor, "_local_tensor", tensor)


def bytes_of(tensors):
    return sum(local(tensor).nbytes for tensor in tensors if tensor is not None)


def megatron_models():
    """Megatron's wrapped models, whose optimizer trains copies in fp32."""
    module = sys.modules.get("megatron.core.distributed.distributed_data_parallel")
    return [made for made in gc.get_objects() if module and type(made) is module.DistributedDataParallel]


def count(optimizer, *_):
    if not optimizer.state:
        # torchtitan's container of optimizers
        return
    steps[id(optimizer)] = steps.get(id(optimizer), 0) + 1
    trained = [weight for group in optimizer.param_groups for weight in group["params"]]
    states = [
        value
        for weight in trained
        for value in optimizer.state.get(weight, {}).values()
        if isinstance(value, torch.Tensor) and value.is_cuda
    ]
    parameters, gradients, held = bytes_of(trained), bytes_of(weight.grad for weight in trained), bytes_of(states)
    models = megatron_models()
    if models:
        held += parameters
        # of its optimizers, one for experts and one for the rest, the first counts all weights and gradients
        models = models if id(optimizer) == next(iter(steps)) else []
        buffers = [buffer for model in models for buffer in (*model.buffers, *model.expert_parallel_buffers)]
        gradients = sum(buffer.grad_data.nbytes for buffer in buffers)
        parameters = bytes_of(weight for model in models for weight in model.parameters())
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    rank, part = os.environ["RANK"], list(steps).index(id(optimizer))
    line = f"rank {rank} part {part} step {steps[id(optimizer)]}: {parameters} {gradients} {held} {peak} {reserved}"
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    register_optimizer_step_post_hook(count)
    sys.argv = sys.argv[1:]
    if sys.argv[0].endswith(".py"):
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        sys.path[0] = ""
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
