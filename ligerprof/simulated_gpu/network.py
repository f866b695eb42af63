"""The network of a simulated run: this machine alone, since what the program would send follows from made-up values."""

import errno
import ipaddress
import os
import socket
import sys
from typing import Any

# libraries that would wait, retry, or start a process of their own
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "SWANLAB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "HF_MLFLOW_LOG_ARTIFACTS": "0",
}


def leave_network() -> None:
    """Refuse connections to other machines in this process at once, with the error of a machine without a network."""
    os.environ.update(OFFLINE)
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.sendto"):
        address = arguments[-1]
        if isinstance(address, tuple) and not _is_here(address[0]):
            raise OSError(errno.ENETUNREACH, f"a simulated run has no network: {address[0]}")
    elif event in ("socket.getaddrinfo", "socket.gethostbyname") and not _is_here(arguments[0]):
        raise socket.gaierror(socket.EAI_NONAME, f"a simulated run has no network: {arguments[0]}")


def _is_here(host: Any) -> bool:
    name = os.fsdecode(host or "localhost")
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return name in ("localhost", "<broadcast>") or name == socket.gethostname()
    return address.is_loopback or address.is_unspecified
