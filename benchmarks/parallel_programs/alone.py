"""Run a program as one rank of a larger world on one GPU; collectives of its fake process group send nothing.

RANK=1 WORLD_SIZE=8 LOCAL_RANK=0 python alone.py PROGRAM [ARGUMENTS]
"""

import os
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

init, new_group = dist.init_process_group, dist.new_group


def start(*_arguments, **_named):
    init("fake", store=FakeStore(), rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))


def make_group(*arguments, **named):
    """Groups of gloo, too, send nothing."""
    return new_group(*arguments, **named | {"backend": None})


dist.init_process_group, dist.new_group = start, make_group
torch.cuda.set_device(0)
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
