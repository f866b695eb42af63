"""One program that trains, with its launcher: what its arguments, and the files that they name, set."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ligerprof.errors import RecipeError
from ligerprof.files import is_file
from ligerprof.recipe.commands.arguments import negated, read_arguments, scalar
from ligerprof.recipe.commands.launch import Launch, visible_gpus
from ligerprof.recipe.commands.programs import (
    SUBCOMMANDS,
    framework_of,
    label_of,
    names_method,
    refuse_other_programs,
)
from ligerprof.recipe.commands.unresolved import is_open, is_path, settled, unset
from ligerprof.recipe.configs.accelerate import ACCELERATE
from ligerprof.recipe.configs.documents import read_document
from ligerprof.recipe.configs.framework import Framework
from ligerprof.recipe.configs.methods import settle_method
from ligerprof.recipe.configs.settings import Reading, Setting
from ligerprof.recipe.configs.sources import read_named
from ligerprof.text import printable

CONFIG_SUFFIXES = (".yaml", ".yml", ".json", ".toml")
# keys that name the file with the program's arguments
_FILE_KEYS = ("config", "config_file", "config_path", "cfg", "yaml", "job.config_file")
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", flags=re.DOTALL)
_Values = dict[str, Any]


@dataclass(frozen=True)
class Program:
    """A program of a command.

    Attributes:
        launch: the program and its launcher.
        script: the shell script that has the command, or an empty text.
    """

    launch: Launch
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
        """What the launcher and the program set; `options` are those of a recipe that win over both.

        Raises:
            RecipeError: a framework that is not read, a file that cannot be read, or a variable that is not set.
            UnsupportedError: a method that recipes do not cover.
        """
        framework, sentence = self.framework()
        given = self._given
        typed = settled(negated(given.typed, framework.rows), framework, options, self.label)
        values = merged(given.values, typed)
        reading = self._read(framework, values, given.file)
        if not names_method(self.launch, framework):
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
        read = read_arguments(words)
        overrides = {found[1]: scalar(found[2]) for word in read.positional if (found := _OVERRIDE.fullmatch(word))}
        typed = {**read.values, **overrides}
        # DeepSpeed's own arguments: a switch, and the file
        if isinstance(typed.get("deepspeed_config"), str) and typed.get("deepspeed", True) is True:
            typed["deepspeed"] = typed.pop("deepspeed_config")
        unset_ = tuple(word for word in read.positional if is_open(word) and not word.endswith(CONFIG_SUFFIXES))
        names = [(key, typed[key]) for key in _FILE_KEYS if key in typed] + [("", word) for word in read.positional]
        for key, name in names:
            if key and is_open(name) and not str(name).endswith(CONFIG_SUFFIXES):
                raise RecipeError(unset(self.label, f"--{key}", name, None))
            if isinstance(name, str) and name.endswith(CONFIG_SUFFIXES) and not _OVERRIDE.fullmatch(name):
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
            seen = visible_gpus(launch.environment)
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
            count = len(gpus.split(",")) if gpus[:1].isdecimal() else visible_gpus(launch.environment)
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
    """What a program is given: typed arguments, and those of a file.

    Attributes:
        unset: arguments that are nothing but variables that are not set.
    """

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


def _own_processes(launch: Launch) -> int | None:
    """Processes that a framework's own command starts; None if it does not say it."""
    words, environment = list(launch.words), launch.environment
    passed = read_arguments(words[words.index("--") + 1 :]).values if "--" in words else {}
    for key in ("num_processes", "nproc_per_node"):
        if type(passed.get(key)) is int:
            return int(passed[key])
    each, nodes = environment.get("NPROC_PER_NODE", str(visible_gpus(environment))), environment.get("NNODES", "1")
    return int(each) * int(nodes) if each.isdecimal() and nodes.isdecimal() else None
