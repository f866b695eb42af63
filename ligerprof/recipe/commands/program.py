"""Read a training command as a configuration file is read: find the program that trains, and what its arguments set."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from ligerprof.errors import RecipeError, UnsupportedError
from ligerprof.files import FileKind, is_file, read_text
from ligerprof.recipe.commands import shell
from ligerprof.recipe.configs import settings
from ligerprof.recipe.configs.accelerate import ACCELERATE
from ligerprof.recipe.configs.axolotl import AXOLOTL
from ligerprof.recipe.configs.documents import read_document
from ligerprof.recipe.configs.llama_factory import LLAMA_FACTORY, LLAMA_FACTORY_1
from ligerprof.recipe.configs.open_instruct import OPEN_INSTRUCT
from ligerprof.recipe.configs.report import OPTION_SETTINGS
from ligerprof.recipe.configs.rows import BadValueError, Framework, Row
from ligerprof.recipe.configs.settings import Outcome, Reading, Reason, Setting
from ligerprof.recipe.configs.sources import foreign_framework, read_named, recognize, settle_method
from ligerprof.recipe.configs.trainer import TRANSFORMERS
from ligerprof.recipe.configs.trl import TRL_SFT
from ligerprof.recipe.training import RECIPE_OPTIONS
from ligerprof.text import printable

_PREFERENCES = "DPO or another preference method, with pairs of sequences"
_REINFORCEMENT = "reinforcement learning"
# words in the names of programs, each with the method that it means
_METHODS: Mapping[str, str] = {
    **dict.fromkeys(("dpo", "kto", "orpo", "cpo", "simpo", "ipo", "bco", "preference"), _PREFERENCES),
    **dict.fromkeys(("grpo", "ppo", "rloo", "gkd", "xpo", "nash", "dapo", "gspo", "rlhf", "rl"), _REINFORCEMENT),
    **dict.fromkeys(("reinforce", "rlvr", "papo"), _REINFORCEMENT),
    **dict.fromkeys(("reward", "prm", "rm"), "reward modeling, with a classification head"),
    # transformers' example scripts for other models
    **dict.fromkeys(("mlm", "glue", "qa", "ner", "swag", "classification", "cls"), "a model that is not causal"),
    **dict.fromkeys(("plm", "fim", "seq2seq", "translation", "summarization"), "a model that is not causal"),
    **dict.fromkeys(("embedding", "contrastive", "mntp", "retriever", "reranker"), "training of embeddings"),
    **dict.fromkeys(("distill", "distillation", "gkd"), "distillation"),
}
_SFT = "sft"
# words in the names of programs for causal language models
_SUPERVISED = frozenset({_SFT, "clm", "pretrain", "pretraining", "cpt"})
# command lines of frameworks, each with the subcommands that train
SUBCOMMANDS: Mapping[str, tuple[str, ...]] = {
    "trl": ("sft", *_METHODS),
    "llamafactory-cli": ("train",),
    "lmf": ("train",),
    "axolotl": ("train",),
}
# the package of a module, a part of a script's path, or a command
_FRAMEWORKS: Mapping[str, Framework] = {
    "axolotl": AXOLOTL,
    "trl": TRL_SFT,
    "open_instruct": OPEN_INSTRUCT,
    "run_clm.py": TRANSFORMERS,
}
# programs of frameworks whose configurations are not read: commands, and the first parts of modules and of scripts
_FOREIGN: Mapping[str, str] = {
    "swift": "ms-swift",
    "megatron": "ms-swift",
    "tune": "torchtune",
    "litgpt": "LitGPT",
    "composer": "LLM Foundry",
    "oumi": "Oumi",
    "autotrain": "AutoTrain",
    "ludwig": "Ludwig",
    "xtuner": "XTuner",
    "colossalai": "ColossalAI",
    "nemo": "NeMo",
}
_FOREIGN_MODULES: Mapping[str, str] = {
    **{name: title for name, title in _FOREIGN.items() if name not in ("megatron", "tune", "composer", "nemo")},
    "verl": "verl",
    "openrlhf": "OpenRLHF",
    "torchtune": "torchtune",
    "llmfoundry": "LLM Foundry",
    "nanotron": "nanotron",
    "nemo_rl": "NeMo RL",
}
_FOREIGN_SCRIPTS: Mapping[str, str] = {
    "deepy.py": "GPT-NeoX",
    "pretrain_gpt.py": "Megatron-LM",
    "swift/cli/sft.py": "ms-swift",
    "verl/trainer/main_ppo.py": "verl",
    "verl/trainer/fsdp_sft_trainer.py": "verl",
}


def is_known_command(word: str) -> bool:
    """Whether a word is the command of a framework."""
    name = PurePath(word).name
    return name in SUBCOMMANDS or name in _FOREIGN


def refuse_other_programs(launch: shell.Launch) -> None:
    """Raise RecipeError for a program of a framework that is not read, UnsupportedError for one of another method."""
    program, name = launch.program, launch.name
    script = next((title for end, title in _FOREIGN_SCRIPTS.items() if f"/{program}".endswith(f"/{end}")), None)
    module = _FOREIGN_MODULES.get(program.partition(".")[0]) if launch.is_module else None
    if title := script or module or (None if launch.is_module else _FOREIGN.get(name)):
        raise _foreign(program, title)
    if name in SUBCOMMANDS and not launch.is_module:
        _require_training(launch, name)
    words = _name_words(launch)
    method = next((_METHODS[word] for word in words if word in _METHODS), None)
    if method is not None and _SFT not in words:
        raise UnsupportedError(
            f"{label_of(launch)}: {method} is not supported yet. Only supervised fine-tuning is covered."
        )


def _foreign(program: str, title: str) -> RecipeError:
    return RecipeError(
        f"{printable(program)}: a command of {title}, whose settings ligerprof does not read. Give its values as"
        f" options, such as --model, --batch, --seq and --precision. {settings.SIMULATED_RANKS}"
    )


def _require_training(launch: shell.Launch, name: str) -> None:
    subcommand = next(iter(launch.words), "")
    if subcommand not in SUBCOMMANDS[name]:
        raise RecipeError(
            f"{name} {printable(subcommand)[:40]}: not a command that trains. Give one such as `{name}"
            f" {SUBCOMMANDS[name][0]}`."
        )


def _name_words(launch: shell.Launch) -> list[str]:
    """The words of a program's name that may say which method it is: `train_dpo.py` is train and dpo."""
    name = launch.name.removesuffix(".py")
    if launch.is_module:
        name = launch.program.rpartition(".")[2]
    elif name == "trl":
        name = next(iter(launch.words), "")
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]


def label_of(launch: shell.Launch) -> str:
    """What messages call the program."""
    subcommand = f" {launch.words[0]}" if launch.name in SUBCOMMANDS and launch.words else ""
    return printable(f"{launch.program}{subcommand}")[:80]


def framework_of(launch: shell.Launch, values: Mapping[str, Any], source: str) -> tuple[Framework, str | None]:
    """The framework that reads a program's arguments, and what that assumes; raises RecipeError if none reads them.

    `values` are the arguments with those of the file that they name, and `source` is what messages call them.
    """
    name, words = launch.name, _name_words(launch)
    parts = launch.program.split(".")[:1] if launch.is_module else PurePath(launch.program).parts
    known = next((framework for part, framework in _FRAMEWORKS.items() if part in parts), None)
    if name in ("llamafactory-cli", "lmf"):
        known = LLAMA_FACTORY_1 if LLAMA_FACTORY_1.signature & values.keys() else LLAMA_FACTORY
    if known is not None:
        if not known.knows_most(values):
            raise RecipeError(
                f"{source}: most of its keys are not those of {known.title}. Is it a file of another one?"
            )
        return known, None
    found = _recognized(values, source)
    if found is TRL_SFT and "model_max_length" in values:
        # scripts that descend from Alpaca's have the keys of adapters, too
        return TRANSFORMERS, None
    if found is TRANSFORMERS and _SFT in words:
        return TRL_SFT, f"{source} takes the arguments of TRL's script of supervised fine-tuning"
    return found, None


def _recognized(values: Mapping[str, Any], source: str) -> Framework:
    if (title := foreign_framework(values)) is not None:
        raise _foreign(source, title)
    try:
        return recognize(values, source)
    except RecipeError:
        shown = ", ".join(f"--{printable(key)[:40]}" for key in list(values)[:5]) or "none"
        raise RecipeError(
            f"{source}: not a training command that ligerprof knows (its first arguments: {shown}). Give its values as"
            " options, such as --model, --batch, --seq and --precision."
        ) from None


# one of them is a value that a row takes
_SAMPLES: tuple[Any, ...] = ("1", "true", "none", "text")


def is_open(value: Any) -> bool:
    """Whether a value, or one of a list, has a part that only a running shell knows."""
    return any(is_open(each) for each in value) if isinstance(value, list) else bool(shell.OPEN.search(str(value)))


def is_path(name: str) -> bool:
    """Whether at most the first folder of a path is a variable: as that of another machine, it is found by its end."""
    found = shell.OPEN.match(name)
    rest = name if found is None else name[found.end() :]
    return (found is None or rest.startswith("/")) and not is_open(rest)


def settled(values: Mapping[str, Any], framework: Framework, given: Mapping[str, Any], program: str) -> dict[str, Any]:
    """The arguments that count, without those that variables decide and options of a recipe, `given`, replace.

    Raises:
        RecipeError: a variable decides an argument that counts, and no option replaces it.
    """
    kept = {}
    for key, value in values.items():
        row = framework.rows.get(key)
        if not is_open(value) or row is None or _is_harmless(row, value):
            kept[key] = value
            continue
        outcome, option = _outcome(row, value), _option_of(row)
        if (option == "model" and "like" in given) or (isinstance(outcome, settings.Names) and is_path(outcome.file)):
            kept[key] = value
        elif option not in given:
            raise RecipeError(unset(program, f"--{key}", value, option))
    return kept


def unset(program: str, key: str, value: Any, option: str | None) -> str:
    """The error about an argument that a variable decides."""
    names = tuple(dict.fromkeys(shell.OPEN.findall(str(value))))
    declared = RECIPE_OPTIONS.get(option or "")
    given = "" if declared is None else f", or give {declared.flag}"
    shown, listed = printable(str(value))[:80], printable(", ".join(names))[:80]
    if any(name.startswith(("$(", "`")) for name in names):
        return f"{printable(program)}: {key} is {shown}, which a running shell computes. Write its value{given}."
    return f"{printable(program)}: {key} is {shown}, and nothing here sets {listed}. Set it in the environment{given}."


def _outcome(row: Row, value: Any) -> Outcome | None:
    try:
        return row.read(value)
    except BadValueError:
        return None


def _is_harmless(row: Row, value: Any) -> bool:
    """Whether a key has no effect, or one that the figures leave out, whatever its value."""
    outcome = _outcome(row, value)
    return isinstance(outcome, settings.LeftOut) or (
        isinstance(outcome, settings.Ignored) and outcome.reason is not Reason.UNSET
    )


def _option_of(row: Row) -> str | None:
    """The option of ligerprof that replaces a key, or None."""
    outcomes = [_outcome(row, sample) for sample in _SAMPLES]
    found = [next(iter(each.values)) for each in outcomes if isinstance(each, settings.Sets) and each.values]
    found += [each.setting for each in outcomes if isinstance(each, settings.Lacking) and each.setting is not None]
    if not found or found[0].value in RECIPE_OPTIONS:
        return found[0].value if found else None
    return next((option for option, made_of in OPTION_SETTINGS.items() if found[0] in made_of), found[0].value)


CONFIG_SUFFIXES = (".yaml", ".yml", ".json", ".toml")
# keys that name the file with the program's arguments
FILE_KEYS = ("config", "config_file", "config_path", "cfg", "yaml", "job.config_file")
OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", flags=re.DOTALL)
_Values = dict[str, Any]


@dataclass(frozen=True)
class TrainingProgram:
    """A program with its launcher, and the shell script that has the command, or an empty text."""

    launch: shell.Launch
    script: str = ""

    @property
    def label(self) -> str:
        """What messages call the program: the script that has it, else its own name."""
        return self.script or label_of(self.launch)

    def framework(self) -> tuple[Framework, str | None]:
        """The framework whose arguments the program takes, and what that assumes; raises as `framework_of`."""
        refuse_other_programs(self.launch)
        given = self._given
        return framework_of(self.launch, merged(given.values, given.typed), given.file or self.label)

    def readings(self, options: Mapping[str, Any]) -> list[Reading]:
        """What launcher and program set under `options` of a recipe; raises RecipeError or UnsupportedError."""
        framework, sentence = self.framework()
        given = self._given
        typed = settled(shell.negated(given.typed, framework.rows), framework, options, self.label)
        values = merged(given.values, typed)
        reading = self._read(framework, values, given.file)
        # programs of other frameworks and names train with supervised fine-tuning alone
        if framework.family and framework is not OPEN_INSTRUCT and _SUPERVISED.isdisjoint(_name_words(self.launch)):
            settle_method(reading, values)
        if given.file is not None:
            _relabel(reading, typed, self.label)
        reading.assumed += [sentence] if sentence else []
        reading.assumed += [f"{printable(word)} is not set, and counts as nothing" for word in given.unset]
        self._set_processes(reading, options)
        launcher = self._launcher(options)
        return [reading] if launcher is None else [launcher, reading]

    def _read(self, framework: Framework, values: _Values, file: str | None) -> Reading:
        if file is not None:
            return framework.read(values, file)
        try:
            return framework.read(values, self.label)
        except RecipeError as error:
            raise RecipeError(str(error).replace("Fix the file.", "Fix the command.")) from None

    @cached_property
    def _given(self) -> "_Given":
        """The arguments without the subcommand, and the file of arguments that one of them names."""
        launch = self.launch
        words = list(launch.words[1:] if launch.name in SUBCOMMANDS and not launch.is_module else launch.words)
        if "--" in words:
            # axolotl passes on to its launcher what follows
            words = words[: words.index("--")]
        read = shell.read_arguments(words)
        overrides = {
            found[1]: shell.scalar(found[2]) for word in read.positional if (found := OVERRIDE.fullmatch(word))
        }
        typed = {**read.values, **overrides}
        # DeepSpeed's own arguments: a switch, and the file
        if isinstance(typed.get("deepspeed_config"), str) and typed.get("deepspeed", True) is True:
            typed["deepspeed"] = typed.pop("deepspeed_config")
        unset_ = tuple(word for word in read.positional if is_open(word) and not word.endswith(CONFIG_SUFFIXES))
        names = [(key, typed[key]) for key in FILE_KEYS if key in typed] + [("", word) for word in read.positional]
        for key, name in names:
            if key and is_open(name) and not str(name).endswith(CONFIG_SUFFIXES):
                raise RecipeError(unset(self.label, f"--{key}", name, None))
            if isinstance(name, str) and name.endswith(CONFIG_SUFFIXES) and not OVERRIDE.fullmatch(name):
                typed.pop(key, None)
                file, values = self._read_file(name, f"--{key}" if key else "its argument")
                return _Given(typed=typed, values=values, file=file, unset=unset_)
        if not typed and unset_:
            raise RecipeError(unset(self.label, "its argument", unset_[0], None))
        if not typed:
            raise RecipeError(f"{self.label}: has no arguments. Give the whole command, with its model and batch size.")
        return _Given(typed=typed, values={}, file=None, unset=unset_)

    def _read_file(self, name: str, key: str) -> tuple[str, _Values]:
        if not is_path(name):
            raise RecipeError(unset(self.label, key, name, None))
        if is_file(Path(name)):
            return name, read_document(Path(name))
        values, path = read_named(self.script or self.launch.program, "", key, name)
        return path or name, dict(values)

    def _set_processes(self, reading: Reading, options: Mapping[str, Any]) -> None:
        launch = self.launch
        if launch.open and "gpus" not in options:
            raise RecipeError(unset(self.label, launch.launcher, launch.open, "gpus"))
        count = launch.processes
        if launch.name in SUBCOMMANDS and not launch.is_module:
            count = _own_processes(launch)
        if launch.launcher == "python":
            seen = shell.visible_gpus(launch.environment)
            if seen is not None and seen > 1:
                reading.assumed.append(
                    f"python starts one process: DataParallel over the {seen} visible GPUs is not counted"
                )
        elif count is not None and Setting.GPUS not in reading.settings:
            reading.set(launch.launcher, {Setting.GPUS: count})
            reading.settings[Setting.GPUS] = replace(reading.settings[Setting.GPUS], file=self.label)

    def _launcher(self, options: Mapping[str, Any]) -> Reading | None:
        """What accelerate sets for the process; None without accelerate, or if nothing says it."""
        launch = self.launch
        if not launch.uses_accelerate:
            return None
        path, values = self._accelerate_file()
        keys = {key: value for key, value in launch.accelerate.items() if not is_open(value) or key not in options}
        values = merged(values, keys)
        if values.get("num_processes") is None and not path:
            gpus = str(values.get("gpu_ids", ""))
            count = len(gpus.split(",")) if gpus[:1].isdecimal() else shell.visible_gpus(launch.environment)
            values.update({} if count is None else {"num_processes": count})
        if not values:
            return None
        if "distributed_type" not in values:
            several = str(values.get("num_processes", 1)) != "1"
            values["distributed_type"] = "MULTI_GPU" if several else "NO"
        if values["distributed_type"] == "DEEPSPEED":
            section = {"zero_stage": 2} if "deepspeed_config_file" not in (values.get("deepspeed_config") or {}) else {}
            values["deepspeed_config"] = {**section, **(values.get("deepspeed_config") or {})}
        kept = settled(values, ACCELERATE, options, launch.launcher)
        reading = ACCELERATE.read(kept, path or launch.launcher)
        if path:
            _relabel(reading, keys, launch.launcher)
        return reading

    def _accelerate_file(self) -> tuple[str | None, _Values]:
        name = self.launch.accelerate_file
        if name is not None:
            path, values = self._read_file(name, "--config_file")
            return path, values
        home = Path(self.launch.environment.get("HF_HOME") or "~/.cache/huggingface").expanduser()
        default = home / "accelerate" / "default_config.yaml"
        return (str(default), read_document(default)) if is_file(default) else (None, {})


@dataclass(frozen=True, kw_only=True)
class _Given:
    """What a program is given: arguments typed and of a file, and `unset` ones, nothing but variables without value."""

    typed: _Values
    values: _Values
    file: str | None
    unset: tuple[str, ...]


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> _Values:
    """The values with changes, whose keys may have dots, and whose sections add to those of the values."""
    result = dict(values)
    for key, value in changes.items():
        section, dot, inner = key.partition(".")
        change = {inner: value} if dot else value
        old = result.get(section)
        result[section] = (
            merged(old if isinstance(old, Mapping) else {}, change) if isinstance(change, Mapping) else change
        )
    return result


def _relabel(reading: Reading, typed: Mapping[str, Any], label: str) -> None:
    """Name the command rather than the file for what arguments set."""
    for setting, found in reading.settings.items():
        parts = re.split(r"[.:]", found.key)
        inner = typed.get(parts[0])
        if found.key in typed or (inner is not None and not (isinstance(inner, Mapping) and parts[-1] not in inner)):
            reading.settings[setting] = replace(found, file=label)


def _own_processes(launch: shell.Launch) -> int | None:
    """Processes that a framework's own command starts; None if it does not say it."""
    words, environment = list(launch.words), launch.environment
    passed = shell.read_arguments(words[words.index("--") + 1 :]).values if "--" in words else {}
    for key in ("num_processes", "nproc_per_node"):
        if type(passed.get(key)) is int:
            return int(passed[key])
    each, nodes = (
        environment.get("NPROC_PER_NODE", str(shell.visible_gpus(environment))),
        environment.get("NNODES", "1"),
    )
    return int(each) * int(nodes) if each.isdecimal() and nodes.isdecimal() else None


_SCRIPT = FileKind(
    error=RecipeError, hint="COMMAND takes a training command or a shell script with one.", max_bytes=2**18
)
_SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh", "source", "."})
_DEEPEST = 4


def read_command(words: Sequence[str], given: Mapping[str, Any]) -> list[Reading]:
    """Read a command: the settings of its launcher first, which those of the program win over.

    Args:
        words: a command as typed; one word with blanks is a line of a shell, and `x.sh` is a script with one command
            that trains.
        given: recipe options of ligerprof's own command line, which settle what the command leaves to variables.

    Raises RecipeError for what is not read or left to unset variables, UnsupportedError for another method.
    """
    programs = [TrainingProgram(launch=launch, script=script) for launch, script in _launches(_typed(words), "", 0)]
    if not programs:
        raise RecipeError(_no_training(words))
    return (programs[0] if len(programs) == 1 else _only_one(programs)).readings(given)


def _typed(words: Sequence[str]) -> list[shell.SimpleCommand]:
    if len(words) == 1 and any(map(str.isspace, words[0])):
        return shell.simple_commands(words[0], os.environ)
    own, filled = shell.split_variables([os.path.expandvars(word) for word in words])
    return [shell.SimpleCommand(words=tuple(filled), environment={**os.environ, **own})]


def _no_training(words: Sequence[str]) -> str:
    shown = printable(" ".join(words))[:60]
    if len(words) == 1 and words[0].endswith(CONFIG_SUFFIXES):
        return f"{shown}: a file, not a command. Give it as --config {shown}."
    if len(words) == 1 and not words[0].startswith("-"):
        return f"{shown}: no training command. A model is named with --model {shown}, a file with --config."
    return (
        f"{shown}: no training command. Give one such as `python train.py --per_device_train_batch_size 2 …`, or a file"
        " with --config."
    )


def _launches(commands: Sequence[shell.SimpleCommand], script: str, depth: int) -> Iterator[tuple[shell.Launch, str]]:
    """The programs that commands start, also in scripts that they run; each with its script."""
    for command in commands:
        inner = _inner_script(command)
        if inner is not None and depth < _DEEPEST:
            yield from _launches(inner[0], inner[1] or script, depth + 1)
            continue
        launch = shell.find_launch(command.words, command.environment, is_known_command)
        if launch is not None:
            yield launch, script


def _inner_script(command: shell.SimpleCommand) -> tuple[list[shell.SimpleCommand], str] | None:
    """The commands of `bash -c TEXT`, `eval TEXT`, `bash FILE` and `FILE.sh`, and the file."""
    words = command.words
    if words[0] == "eval":
        return shell.simple_commands(" ".join(words[1:]), command.environment), ""
    place = next((place for place, word in enumerate(words) if PurePath(word).name in _SHELLS), None)
    rest = words[place + 1 :] if place is not None else words
    if place is not None:
        switch = next((at for at, word in enumerate(rest) if re.fullmatch(r"-[a-z]*c", word)), None)
        if switch is not None and switch + 1 < len(rest):
            return shell.simple_commands(rest[switch + 1], command.environment), ""
        rest = tuple(word for word in rest if not word.startswith("-"))
    if not rest or not (rest[0].endswith((".sh", ".bash", ".slurm", ".sbatch")) or place is not None):
        return None
    path = Path(rest[0])
    if place is not None and not is_file(path) and not rest[0].endswith(".sh"):
        return None
    arguments = {str(place): word for place, word in enumerate(rest[1:], 1)}
    environment = {**command.environment, **arguments, "@": " ".join(rest[1:])}
    return shell.simple_commands(read_text(path, _SCRIPT), environment), str(path)


def _only_one(programs: Sequence[TrainingProgram]) -> TrainingProgram:
    found, refused = [], []
    for program in programs:
        try:
            program.framework()
            found.append(program)
        except UnsupportedError:
            found.append(program)
        except RecipeError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    if len(found) > 1:
        names = ", ".join(label_of(program.launch) for program in found)[:120]
        raise RecipeError(f"{len(found)} training commands ({names}). Give one of them, in quotes or after --.")
    return found[0]
