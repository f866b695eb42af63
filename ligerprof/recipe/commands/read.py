"""Read a training command as a configuration file is read: find the program that trains, also in shell scripts."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from ligerprof.errors import RecipeError, UnsupportedError
from ligerprof.files import FileKind, is_file, read_text
from ligerprof.recipe.commands.launch import Launch, find_launch
from ligerprof.recipe.commands.program import CONFIG_SUFFIXES, Program
from ligerprof.recipe.commands.programs import is_known_command, label_of
from ligerprof.recipe.commands.shell import SimpleCommand, simple_commands
from ligerprof.recipe.configs.settings import Reading
from ligerprof.text import printable

_SCRIPT = FileKind(
    error=RecipeError, hint="COMMAND takes a training command or a shell script with one.", max_bytes=2**18
)
_SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh", "source", "."})
_DEEPEST = 4
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=")


def read_command(words: Sequence[str], given: Mapping[str, Any]) -> list[Reading]:
    """Read a command: the settings of its launcher first, which those of the program win over.

    Args:
        words: a command as typed; one word with blanks is a line of a shell, and `x.sh` is a script with one command
            that trains.
        given: recipe options of ligerprof's own command line, which settle what the command leaves to variables.

    Raises:
        RecipeError: not a training command, of a framework that is not read, or with a variable that is not set.
        UnsupportedError: a method that recipes do not cover.
    """
    programs = [Program(launch=launch, script=script) for launch, script in _launches(_typed(words), "", 0)]
    if not programs:
        raise RecipeError(_no_training(words))
    return (programs[0] if len(programs) == 1 else _only_one(programs)).readings(given)


def _typed(words: Sequence[str]) -> list[SimpleCommand]:
    if len(words) == 1 and any(map(str.isspace, words[0])):
        return simple_commands(words[0], os.environ)
    filled = [os.path.expandvars(word) for word in words]
    own = {}
    while filled and _ASSIGNED.match(filled[0]):
        name, _, own[name] = filled.pop(0).partition("=")
    return [SimpleCommand(words=tuple(filled), environment={**os.environ, **own})]


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


def _launches(commands: Sequence[SimpleCommand], script: str, depth: int) -> Iterator[tuple[Launch, str]]:
    """The programs that commands start, also in scripts that they run; each with its script."""
    for command in commands:
        inner = _inner_script(command)
        if inner is not None and depth < _DEEPEST:
            yield from _launches(inner[0], inner[1] or script, depth + 1)
            continue
        launch = find_launch(command.words, command.environment, is_known_command)
        if launch is not None:
            yield launch, script


def _inner_script(command: SimpleCommand) -> tuple[list[SimpleCommand], str] | None:
    """The commands of `bash -c TEXT`, `eval TEXT`, `bash FILE` and `FILE.sh`, and the file."""
    words = command.words
    if words[0] == "eval":
        return simple_commands(" ".join(words[1:]), command.environment), ""
    place = next((place for place, word in enumerate(words) if PurePath(word).name in _SHELLS), None)
    rest = words[place + 1 :] if place is not None else words
    if place is not None:
        switch = next((at for at, word in enumerate(rest) if re.fullmatch(r"-[a-z]*c", word)), None)
        if switch is not None and switch + 1 < len(rest):
            return simple_commands(rest[switch + 1], command.environment), ""
        rest = tuple(word for word in rest if not word.startswith("-"))
    if not rest or not (rest[0].endswith((".sh", ".bash", ".slurm", ".sbatch")) or place is not None):
        return None
    path = Path(rest[0])
    if place is not None and not is_file(path) and not rest[0].endswith(".sh"):
        return None
    arguments = {str(place): word for place, word in enumerate(rest[1:], 1)}
    environment = {**command.environment, **arguments, "@": " ".join(rest[1:])}
    return simple_commands(read_text(path, _SCRIPT), environment), str(path)


def _only_one(programs: Sequence[Program]) -> Program:
    """The one program among several that trains."""
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
