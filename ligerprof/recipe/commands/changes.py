"""Change a training command: the values of its arguments and of the configuration files that they name."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from ligerprof.errors import LigerprofError, RecipeError
from ligerprof.files import FileKind, is_file, read_text
from ligerprof.recipe.commands.arguments import scalar
from ligerprof.recipe.commands.launch import Launch, find_launch
from ligerprof.recipe.commands.program import CONFIG_SUFFIXES, merged
from ligerprof.recipe.commands.programs import framework_of, is_known_command
from ligerprof.recipe.configs.documents import parse_document
from ligerprof.recipe.configs.rewriting import rewrite, value_at

_FILE = FileKind(error=RecipeError, hint="The command names it.", max_bytes=2**18)
_OPTION = re.compile(r"--?[A-Za-z]")
_OVERRIDE = re.compile(r"\+{0,2}[A-Za-z_][\w.]*=")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
# arguments that name a file with values
_FILE_KEYS = frozenset({"config", "config_file", "config_path", "cfg", "yaml", "deepspeed", "deepspeed_config"})
_FILE_KEYS |= {"job.config_file"}

# of accelerate's launcher
_MESH_OPTION, _CONFIG_OPTION = "parallelism_config_", "config_file"

# DeepSpeed's names of keys of the Trainer
_OF_DEEPSPEED = {"per_device_train_batch_size": "train_micro_batch_size_per_gpu"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Values that a command gets.

    Attributes:
        keys: by key; a dot separates a section from its key.
        environment: variables.
    """

    keys: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def __hash__(self) -> int:
        """The same for equal values in any order."""
        return hash(json.dumps([self.keys, self.environment], sort_keys=True))

    def and_then(self, other: "Change") -> "Change":
        """Both changes; the other one wins."""
        return Change(keys={**self.keys, **other.keys}, environment={**self.environment, **other.environment})


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangedCommand:
    """A command as it is typed after a change.

    Attributes:
        environment: the variables that it is given.
        files: the text of each changed file, by the path under which the command names it.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str]
    files: Mapping[Path, str]

    @property
    def text(self) -> str:
        """The command for a shell."""
        given = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*given, shlex.join(self.words)])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Typed:
    """An argument: the places of its words, the value as text, or None for a switch."""

    place: int
    end: int
    text: str | None


@dataclass(frozen=True)
class TrainingCommand:
    """A command whose arguments, and the files that they name, can be changed.

    Attributes:
        words: the command without variables.
        environment: variables in front of it.
        start: where the arguments of the program begin.
        launch: the program with its launcher; None for a program that is not known to be Python's.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str]
    start: int
    launch: Launch | None

    @classmethod
    def read(cls, words: Sequence[str]) -> "TrainingCommand":
        """Read a command as typed; one word with blanks is a line of a shell.

        Raises:
            RecipeError: nothing but variables, a quote without its end, or a script of a shell.
        """
        if len(words) == 1 and any(map(str.isspace, words[0])):
            try:
                words = shlex.split(words[0])
            except ValueError as error:
                raise RecipeError(f"the command cannot be read: {error}. Give it without quotes, after --.") from None
        rest, given = list(words), {}
        while rest and _ASSIGNMENT.match(rest[0]):
            name, _, given[name] = rest.pop(0).partition("=")
        if not rest or rest[0].endswith((".sh", ".bash")) or PurePath(rest[0]).name in ("bash", "sh"):
            raise RecipeError("the arguments of a shell script cannot be changed. Give the command that it runs.")
        launch = find_launch(rest, given, is_known_command)
        start = 1 if launch is None else len(rest) - len(launch.words)
        return cls(words=tuple(rest), environment=given, start=start, launch=launch)

    @property
    def name(self) -> str:
        """The program's name without its folder, and the subcommand of a framework's command."""
        if self.launch is None:
            return PurePath(self.words[0]).name
        subcommand = self.words[self.start : self.start + 1] if is_known_command(self.launch.program) else ()
        return " ".join((self.launch.name, *subcommand))

    @cached_property
    def framework(self) -> str | None:
        """The name of the framework whose arguments it takes, or None."""
        if self.launch is None:
            return None
        try:
            found, _ = framework_of(self.launch, self.values, self.name)
        except LigerprofError:
            return None
        # the keys of others are also those of scripts
        return found.name if found.is_complete else None

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """What the arguments and files say, by key; arguments win."""
        values: dict[str, Any] = {}
        for file, (_, content) in self._files.items():
            if not self._is_anothers(file):
                values = merged(values, content)
        return merged(values, {key: _value(typed.text) for key, typed in self._typed.items()})

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """The configuration files that the arguments name, and accelerate's."""
        return tuple(self._files)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The keys that arguments and files state; a dot separates a section of a file from its key."""
        found = dict.fromkeys(self._typed)
        for _, content in self._files.values():
            for key, value in content.items():
                inner = value if isinstance(value, Mapping) else {}
                found |= dict.fromkeys((key, *(f"{key}.{name}" for name in inner)))
        return tuple(found)

    def value(self, key: str) -> Any:
        """The value of a key, None if the command does not state it."""
        if key in self._typed:
            return _value(self._typed[key].text)
        file = self._file_with(key)
        value = None if file is None else value_at(self._files[file][1], key)
        # DeepSpeed's sections have names of the Trainer's switches, and it takes `auto` from the Trainer
        is_other = file is not None and self._is_anothers(file) and type(value) is not int
        return None if is_other else value

    def changed(self, change: Change, copies: Mapping[Path, Path], *, in_files: bool = False) -> ChangedCommand:
        """The command after a change.

        A key that is an argument is changed there, and one that is in a file in a copy of the file. A key that is in
        neither becomes an argument, or a line of the first file where arguments do not add to files.

        Args:
            copies: the path of the copy of each file that may change.
            in_files: whether a line of a file is changed where an argument could replace it.

        Raises:
            RecipeError: a file is written in a way that lines cannot be replaced in.
        """
        words: dict[int, tuple[str, ...]] = {}
        added: list[str] = []
        edited: dict[Path, dict[str, Any]] = {}
        for key, value in change.keys.items():
            same = _OF_DEEPSPEED.get(key, key)
            theirs = self._file_with(same)
            if theirs is not None and self._is_anothers(theirs) and type(self.value(same)) is int:
                # it has to agree with the Trainer, which has none of its sections
                edited.setdefault(theirs, {})[same] = value
                if key not in self._typed and (self.framework is None or "." in key):
                    continue
            if key in self._typed:
                typed = self._typed[key]
                kept = self.words[typed.place].partition("=")[0]
                words[typed.place] = self._argument(kept, value, joined="=" in self.words[typed.place])
                words |= dict.fromkeys(range(typed.place + 1, typed.end), ())
            elif (file := self._file_for(key, in_files=in_files)) is not None:
                edited.setdefault(file, {})[key] = value
            else:
                added += self._argument(f"--{key}", value, joined=False)
        files = {}
        for file, values in edited.items():
            place, text = self._files[file][0], self._texts[file]
            files[copies[file]] = rewrite(text, file, values)
            word = self.words[place]
            words[place] = (f"{word.partition('=')[0]}={copies[file]}" if _is_joined(word) else str(copies[file]),)
        kept_words = [words.get(place, (word,)) for place, word in enumerate(self.words)]
        return ChangedCommand(
            words=(*(word for each in kept_words for word in each), *added),
            environment={**self.environment, **change.environment},
            files=files,
        )

    def _argument(self, option: str, value: Any, *, joined: bool) -> tuple[str, ...]:
        """The words of an argument; parsers of Hugging Face's take switches with a value, others mostly do not."""
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if joined:
            return (f"{option}={text}",)
        if isinstance(value, bool) and not self._takes_truths:
            return (option,) if value else ()
        return (option, text)

    @property
    def _takes_truths(self) -> bool:
        return self.framework is not None

    def _file_with(self, key: str) -> Path | None:
        return next((file for file, (_, values) in self._files.items() if _has(values, key)), None)

    def _file_for(self, key: str, *, in_files: bool) -> Path | None:
        """The file in which a key is changed, None if it becomes an argument."""
        first, stated = self._first, self._file_with(key)
        if stated is not None and self._is_anothers(stated):
            return None
        if stated is not None and (in_files or stated != first or not self._arguments_win):
            return stated
        return first if in_files or not self._arguments_win else None

    @property
    def _first(self) -> Path | None:
        """The first file with the program's own keys."""
        return next((file for file in self._files if not self._is_anothers(file)), None)

    @property
    def _arguments_win(self) -> bool:
        """Whether arguments replace and add to values of the first file: TRL's and torchtitan's do."""
        parts = () if self.launch is None else (*PurePath(self.launch.program).parts, *self.launch.program.split("."))
        return self._first is None or not {"trl", "torchtitan"}.isdisjoint(parts)

    def _is_anothers(self, file: Path) -> bool:
        """Whether a file is DeepSpeed's, or accelerate's, rather than the program's."""
        place = self._files[file][0]
        return place < self.start or any(
            word.lstrip("-").startswith("deepspeed") for word in self.words[max(place - 1, self.start) : place + 1]
        )

    @cached_property
    def _typed(self) -> Mapping[str, _Typed]:
        """The arguments by key with underscores; the last of several counts."""
        return dict(self._arguments())

    def _arguments(self) -> Iterator[tuple[str, _Typed]]:
        words = self.words
        for place in (*self._launcher_options(_MESH_OPTION), *range(self.start, len(words))):
            word = words[place]
            key, equals, text = word.lstrip("-+").partition("=")
            if equals and (_OPTION.match(word) or _OVERRIDE.match(word)):
                yield key.replace("-", "_"), _Typed(place=place, end=place + 1, text=text)
            elif _OPTION.match(word):
                has_value = place + 1 < len(words) and not _OPTION.match(words[place + 1])
                end = place + 1 + has_value
                yield key.replace("-", "_"), _Typed(place=place, end=end, text=words[place + 1] if has_value else None)

    def _launcher_options(self, name: str) -> list[int]:
        """The places of accelerate's own options with this beginning."""
        is_accelerates = self.launch is not None and self.launch.uses_accelerate
        starts = (f"--{name}", f"--{name.replace('_', '-')}")
        return [place for place in range(self.start) if is_accelerates and self.words[place].startswith(starts)]

    @cached_property
    def _texts(self) -> Mapping[Path, str]:
        return {file: read_text(file, _FILE) for file in self._files}

    @cached_property
    def _files(self) -> Mapping[Path, tuple[int, Mapping[str, Any]]]:
        """The configuration files, each with the place of the word that names it, and its content."""
        named = {typed.end - 1: key for key, typed in self._typed.items() if typed.text is not None}
        found = {}
        places = [place + ("=" not in self.words[place]) for place in self._launcher_options(_CONFIG_OPTION)]
        named |= dict.fromkeys(places, _CONFIG_OPTION)
        for place in (*range(self.start, len(self.words)), *places):
            key, word = named.get(place), self.words[place]
            name = word.partition("=")[2] if key is not None and _is_joined(word) else word
            if not name.endswith(CONFIG_SUFFIXES) or (key is not None and key not in _FILE_KEYS):
                continue
            path = Path(name)
            try:
                if not is_file(path):
                    raise RecipeError(f"{name}: no such file. The command names it.")
                found[path] = (place, parse_document(read_text(path, _FILE), path))
            except RecipeError:
                # without a key it may be data, or a file that the program writes
                if key is not None:
                    raise
        return found


def _is_joined(word: str) -> bool:
    return "=" in word and bool(_OPTION.match(word) or _OVERRIDE.match(word))


def _has(values: Mapping[str, Any], key: str) -> bool:
    section, _, name = key.rpartition(".")
    inner = values.get(section) if section else values
    return isinstance(inner, Mapping) and name in inner


def _value(text: str | None) -> Any:
    return True if text is None else scalar(text)
