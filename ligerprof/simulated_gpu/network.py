"""The network of a simulated run: this machine alone, since what the program would send follows from made-up values."""

import errno
import ipaddress
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ligerprof.runs.recording.imports import after_import_or_now
from ligerprof.simulated_gpu.files import watch

# libraries that would wait, retry, or start a process of their own
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "SWANLAB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
}

_USER, _NO_COMMIT = "simulated", "0" * 40


def leave_network() -> None:
    """Refuse connections to other machines in this process at once, with the error of a machine without a network."""
    os.environ.update(OFFLINE)
    watch(
        {
            "socket.connect": _refuse_address,
            "socket.sendto": _refuse_address,
            "socket.getaddrinfo": _refuse_name,
            "socket.gethostbyname": _refuse_name,
        }
    )
    after_import_or_now("huggingface_hub.hf_api", _send_nothing_to_hub)
    after_import_or_now("transformers.integrations.integration_utils", _log_nothing_to_mlflow)


def _refuse_address(_socket: Any, address: Any) -> None:
    if isinstance(address, tuple) and not _is_here(address[0]):
        raise OSError(errno.ENETUNREACH, f"a simulated run has no network: {address[0]}")


def _refuse_name(host: Any, *_others: Any) -> None:
    if not _is_here(host):
        raise socket.gaierror(socket.EAI_NONAME, f"a simulated run has no network: {host}")


def _is_here(host: Any) -> bool:
    name = os.fsdecode(host or "localhost")
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return name in ("localhost", "<broadcast>") or name == socket.gethostname()
    return address.is_loopback or address.is_unspecified


def _log_nothing_to_mlflow(module: Any) -> None:
    """The Trainer refuses a callback that is switched off, and MLflow has no mode without a store."""
    module.MLflowCallback = module.INTEGRATION_TO_CALLBACK["mlflow"] = module.TrainerCallback


def _send_nothing_to_hub(module: Any) -> None:
    """Let what a program sends to the Hugging Face hub succeed without a network, so that it trains on."""

    def commit(_api: Any, *arguments: Any, repo_id: str | None = None, run_as_future: bool = False, **_: Any) -> Any:
        repository = repo_id or next(filter(lambda value: isinstance(value, str), arguments), "")
        done = module.CommitInfo(
            commit_url=f"{module.constants.ENDPOINT}/{repository}/commit/{_NO_COMMIT}",
            commit_message="",
            commit_description="",
            oid=_NO_COMMIT,
        )
        if not run_as_future:
            return done
        future: Future[Any] = Future()
        future.set_result(done)
        return future

    def create(_api: Any, repo_id: str, **_: Any) -> Any:
        name = repo_id if "/" in repo_id else f"{_USER}/{repo_id}"
        return module.RepoUrl(f"{module.constants.ENDPOINT}/{name}")

    def nothing(*_arguments: Any, **_named: Any) -> None:
        """A change of a repository."""

    answers: dict[str, Callable[..., Any]] = {
        "create_repo": create,
        "whoami": lambda *_, **__: {"name": _USER, "type": "user", "orgs": []},
        **dict.fromkeys(("create_commit", "upload_file", "upload_folder"), commit),
        **dict.fromkeys(("create_branch", "create_tag", "upload_large_folder", "update_repo_settings"), nothing),
        **dict.fromkeys(("delete_file", "delete_folder", "delete_repo", "preupload_lfs_files"), nothing),
    }
    for name, answer in answers.items():
        if hasattr(module.HfApi, name):
            setattr(module.HfApi, name, answer)
            # functions of the module are methods of one object
            if hasattr(module, name):
                setattr(module, name, getattr(module.api, name))
