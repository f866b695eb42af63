"""Take a command apart into its launcher, which decides the number of processes, and the program that it starts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from ligerprof.recipe.commands.shell import OPEN, scalar

# commands that run the rest of their line; their own options may take values
_WRAPPER_NAMES = (
    "env sudo nohup time exec command nice ionice numactl stdbuf timeout srun uv poetry pdm pipenv conda mamba hatch"
    " singularity apptainer docker podman nsys ncu unbuffer setsid taskset chrt ligerprof py-spy viztracer"
)
_WRAPPERS = frozenset(_WRAPPER_NAMES.split())
_ONE_PROCESS_EACH = frozenset({"srun"})
_TORCHRUN = frozenset({"torch.distributed.run", "torch.distributed.launch", "torch.distributed.elastic.run"})
# options of launchers that take no value, with underscores in place of hyphens
_SWITCH_NAMES = (
    "standalone m module no_python run_path use_env virtual_local_rank quiet q cpu multi_gpu tpu enable_cpu_affinity"
    " dynamo_use_fullgraph dynamo_use_dynamic dynamo_use_regional_compilation use_deepspeed use_fsdp use_xpu"
    " use_parallelism_config use_megatron_lm same_network tpu_cluster no_tpu_cluster tpu_use_sudo downcast_bf16"
    " fp8_use_autocast_during_eval debug ipex no_local_rank no_ssh no_ssh_check force_multi bind_cores_to_rank"
    " use_torchrun"
)
_SWITCHES = frozenset(_SWITCH_NAMES.split())
_PYTHON_SWITCHES = frozenset(("-u", "-O", "-OO", "-B", "-E", "-I", "-s", "-S", "-v", "-q", "-d", "-x", "-b", "-P"))
_ACCELERATE_TYPES = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "use_megatron_lm": "MEGATRON_LM"}
# starts of the names of options that stand in a section of accelerate's file
_SECTIONS = {
    "fsdp_": "fsdp_config",
    "parallelism_config_": "parallelism_config",
    "megatron_lm_": "megatron_lm_config",
    "fp8_": "fp8_config",
}
_OF_DEEPSPEED = ("deepspeed_", "zero", "offload_", "gradient_")


@dataclass(kw_only=True)
class Launch:
    """A program and how it is launched.

    Attributes:
        program: the script, module or command, as typed.
        words: its arguments.
        is_module: whether `program` is the name of a Python module.
        processes: number of processes with one GPU each; None if the command does not say it.
        launcher: the option or command that says it.
        open: what only a running shell knows of the number of processes, or an empty text.
        accelerate: keys of accelerate's file that the command sets.
        accelerate_file: accelerate's file, or None.
        uses_accelerate: whether accelerate launches it.
        environment: variables of the process.
    """

    program: str
    words: list[str]
    is_module: bool = False
    processes: int | None = None
    launcher: str = ""
    open: str = ""
    accelerate: dict[str, Any] = field(default_factory=dict)
    accelerate_file: str | None = None
    uses_accelerate: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the program without its folder."""
        return PurePath(self.program).name


def find_launch(words: Sequence[str], environment: Mapping[str, str], is_start: Callable[[str], bool]) -> Launch | None:
    """The program that a command starts, without its launchers.

    Args:
        words: the command.
        environment: variables that are set for it.
        is_start: whether a word is the name of a program that trains.

    Returns:
        None for commands that start neither a Python program nor one of these.
    """
    known = {
        "torchrun": _of_torchrun,
        "deepspeed": _of_deepspeed,
        "accelerate": _of_accelerate,
        "accelerate-launch": _of_accelerate,
    }

    def begins(word: str) -> bool:
        return _is_python(word) or word.endswith(".py") or PurePath(word).name in known or is_start(word)

    wrapped, words = "", list(words)
    if words and PurePath(words[0]).name in _WRAPPERS:
        start = next((place for place, word in enumerate(words) if place and begins(word)), len(words))
        assigned = (word.partition("=") for word in words[:start] if not word.startswith("-"))
        environment = {**environment, **{name: value for name, equals, value in assigned if equals}}
        wrapped, words = PurePath(words[0]).name, words[start:]
    if not words or not begins(words[0]):
        return None
    first = PurePath(words[0]).name
    if first in known:
        launch = known[first](words[1:], environment)
    elif _is_python(words[0]):
        launch = _of_python(words[1:], environment)
    else:
        launch = Launch(program=words[0], words=words[1:], launcher=words[0])
    if launch is None:
        return None
    if "--" in launch.words and not is_start(launch.program):
        # a script that submits the command after it
        inner = find_launch(launch.words[launch.words.index("--") + 1 :], environment, is_start)
        if inner is not None:
            return inner
    launch.environment = environment
    if wrapped in _ONE_PROCESS_EACH and launch.launcher == "python":
        launch.processes = None
    return launch


def has_launcher(words: Sequence[str]) -> bool:
    """Whether a command names a launcher of several processes, such as torchrun."""
    launch = find_launch(words, {}, lambda _: False)
    return launch is not None and launch.launcher != "python"


def visible_gpus(environment: Mapping[str, str]) -> int | None:
    """How many GPUs CUDA_VISIBLE_DEVICES shows; None if it is not set or not known."""
    text = environment.get("CUDA_VISIBLE_DEVICES", "")
    return len(_listed(text)) or None if OPEN.search(text) is None else None


def _listed(text: str) -> list[str]:
    return [name for name in text.split(",") if name.strip()]


def _is_python(word: str) -> bool:
    name = PurePath(word).name
    return name.startswith("python") and not name.removeprefix("python").strip("0123456789.w")


def _options(words: list[str]) -> tuple[dict[str, str | bool], list[str]]:
    """The options of a launcher by name, and the words from the program on."""
    found: dict[str, str | bool] = {}
    place = 0
    while place < len(words) and words[place].startswith("-") and words[place] != "--":
        name, equals, value = words[place].lstrip("-").partition("=")
        name = name.replace("-", "_")
        place += 1
        if equals:
            found[name] = value
        elif name in _SWITCHES:
            found[name] = True
        elif place < len(words):
            found[name] = words[place]
            place += 1
    return found, words[place + (words[place : place + 1] == ["--"]) :]


def _of_python(words: list[str], environment: Mapping[str, str]) -> Launch | None:
    while words and (words[0] in _PYTHON_SWITCHES or words[0].startswith(("-X", "-W"))):
        words = words[2 if words[0] in ("-X", "-W") else 1 :]
    if words[:1] == ["-m"] and len(words) > 1:
        module, rest = words[1], words[2:]
        if module in _TORCHRUN:
            return _of_torchrun(rest, environment)
        if module in ("accelerate.commands.launch", "accelerate.commands.accelerate_cli"):
            return _of_accelerate(rest, environment)
        if module in ("deepspeed.launcher.runner", "deepspeed"):
            return _of_deepspeed(rest, environment)
        return Launch(program=module, words=rest, is_module=True, processes=1, launcher="python")
    if not words or words[0].startswith("-"):
        return None
    return Launch(program=words[0], words=words[1:], processes=1, launcher="python")


def _started(options: Mapping[str, str | bool], words: list[str]) -> Launch | None:
    is_module = bool(options.get("m") or options.get("module"))
    if words and _is_python(words[0]):
        # torchrun --no-python python train.py
        return _of_python(words[1:], {})
    return Launch(program=words[0], words=words[1:], is_module=is_module) if words else None


def _times(launch: Launch, each: Any, nodes: Any, launcher: str, nodes_option: str) -> Launch:
    """Set the number of processes from those per node and the number of nodes."""
    low, _, high = str(nodes).partition(":")
    launch.launcher, launch.processes = launcher, None
    counts = (str(each), low if high in ("", low) else str(nodes))
    if all(count.isdecimal() for count in counts):
        launch.processes = int(counts[0]) * int(counts[1])
    elif still_open := [count for count in counts if OPEN.search(count) is not None or ":" in count]:
        launch.open = still_open[0]
        # the second option has the number of nodes
        launch.launcher = launcher if still_open[0] == counts[0] else nodes_option
    return launch


def _of_torchrun(words: list[str], environment: Mapping[str, str]) -> Launch | None:
    options, rest = _options(words)
    launch = _started(options, rest)
    each = options.get("nproc_per_node", environment.get("PET_NPROC_PER_NODE", "1"))
    if each in ("gpu", "auto"):
        each = str(visible_gpus(environment) or each)
    nodes = options.get("nnodes", environment.get("PET_NNODES", "1"))
    return launch and _times(launch, each, nodes, "--nproc_per_node", "--nnodes")


def _of_deepspeed(words: list[str], environment: Mapping[str, str]) -> Launch | None:
    options, rest = _options(words)
    launch = _started(options, rest)
    chosen = str(options.get("include", options.get("i", "")))
    if launch is not None and ":" in chosen:
        # worker-0:0,1@worker-1:0,1
        launch.processes = sum(len(_listed(node.partition(":")[2])) for node in chosen.split("@"))
        launch.launcher = "--include"
        launch.open = chosen if OPEN.search(chosen) is not None else ""
        return launch
    each = options.get("num_gpus", "" if "hostfile" in options else str(visible_gpus(environment) or ""))
    nodes = options.get("num_nodes", "" if "hostfile" in options or "H" in options else "1")
    return launch and _times(launch, each, nodes, "--num_gpus", "--num_nodes")


def _of_accelerate(words: list[str], _environment: Mapping[str, str]) -> Launch | None:
    if words[:1] == ["launch"]:
        words = words[1:]
    options, rest = _options(words)
    launch = _started(options, rest)
    if launch is None:
        return None
    launch.processes, launch.launcher, launch.uses_accelerate = None, "accelerate launch", True
    file = options.pop("config_file", None)
    launch.accelerate_file = str(file) if file else None
    keys = _accelerate_keys(options)
    if OPEN.search(str(keys.get("num_processes", ""))) is not None:
        launch.open, launch.launcher = str(keys.pop("num_processes")), "--num_processes"
    launch.accelerate = keys
    return launch


def _accelerate_keys(options: Mapping[str, str | bool]) -> dict[str, Any]:
    """The keys of accelerate's file that options of `accelerate launch` replace."""
    keys: dict[str, Any] = {}
    for name, value in options.items():
        kind = _ACCELERATE_TYPES.get(name)
        section = next((each for start, each in _SECTIONS.items() if name.startswith(start)), None)
        if kind is not None:
            keys["distributed_type"] = kind
        elif section is not None:
            keys.setdefault(section, {})[name] = scalar(str(value))
        elif name.startswith(_OF_DEEPSPEED):
            keys.setdefault("deepspeed_config", {})[name] = scalar(str(value))
        elif name == "cpu":
            keys["use_cpu"] = True
        elif name not in _SWITCHES or name == "downcast_bf16":
            keys[name] = scalar(str(value))
    if "multi_gpu" in options and "distributed_type" not in keys:
        keys["distributed_type"] = "MULTI_GPU"
    return keys
