"""What a worker imports for scripted cells: next to nothing, or it fails, by the batch of their recipes."""

import os
import signal
import time
from typing import Any

CRASHES, HANGS = 101, 102


def prepare(recipe: dict[str, Any], _options: object) -> None:
    if recipe["batch"] == CRASHES:
        os.kill(os.getpid(), signal.SIGSEGV)
    if recipe["batch"] == HANGS:
        time.sleep(600)
