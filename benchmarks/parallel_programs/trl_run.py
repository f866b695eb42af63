"""Run one of TRL's scripts, and print torch's counters after each step of its optimizer.

accelerate launch --config_file fsdp2.yaml trl_run.py trl.scripts.sft --config sft.yaml
"""

import os
import runpy
import sys

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

steps: list[tuple[int, int]] = []


def note(*_: object) -> None:
    steps.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
    print(f"rank {os.environ['RANK']} step {len(steps)}: {steps[-1][0]} {steps[-1][1]}", flush=True)


if __name__ == "__main__":
    register_optimizer_step_post_hook(note)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(f"rank {os.environ['RANK']} step {len(steps) + 1}: {peak} {reserved}", flush=True)
