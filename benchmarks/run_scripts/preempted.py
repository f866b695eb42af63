"""A scheduler takes the machine back: the script's own handler of SIGTERM saves, and the script ends with 75."""

import io
import os
import signal
import sys
from types import FrameType

import torch
from torch import nn

received = []


def leave(number: int, _frame: FrameType | None) -> None:
    received.append(number)


signal.signal(signal.SIGTERM, leave)
torch.manual_seed(0)
model = nn.LSTM(256, 1024, num_layers=2, batch_first=True).cuda()
head = nn.Linear(1024, 1000).cuda()
optimizer = torch.optim.RMSprop([*model.parameters(), *head.parameters()])
os.chdir("/")
for step in range(100):
    hidden, _ = model(torch.rand(32, 128, 256, device="cuda"))
    nn.functional.cross_entropy(head(hidden).flatten(0, 1), torch.randint(1000, (32 * 128,), device="cuda")).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 4:
        os.kill(os.getpid(), signal.SIGTERM)
    if received:
        torch.save({"model": model.state_dict(), "step": step}, io.BytesIO())
        break
print("PEAK", torch.cuda.max_memory_allocated(), flush=True)
sys.exit(75)
