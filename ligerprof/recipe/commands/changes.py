"""Change a training command: the values of its arguments and of the configuration files that they name."""

import json
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd
from pathlib import Path, PurePath
from typing import Any

from ligerprof.errors import LigerprofError, RecipeError
from ligerprof.files import FileKind, is_file, read_text
from ligerprof.recipe.categories import Optimizer
from ligerprof.recipe.commands import program
from ligerprof.recipe.commands.shell import OPTION, Launch, find_launch, scalar, split_variables
from ligerprof.recipe.configs.documents import parse_document, rewrite, value_at
from ligerprof.recipe.configs.edits import keys_for
from ligerprof.recipe.configs.rows import is_off

_FILE = FileKind(error=RecipeError, hint="The command names it.", max_bytes=2**18)
# arguments that name a file with values
_FILE_KEYS = frozenset({*program.FILE_KEYS, "deepspeed", "deepspeed_config"})

# options of accelerate's launcher
_MESH_OPTION, _CONFIG_OPTION = "parallelism_config_", "config_file"

# DeepSpeed's names of keys of the Trainer
_OF_DEEPSPEED = {"per_device_train_batch_size": "train_micro_batch_size_per_gpu"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Values that a command gets: by key, where a dot separates a section, and as variables."""

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
    """A command as it is typed after a change, with the text of each changed file by the path of its copy."""

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
        given, rest = split_variables(words)
        if not rest or rest[0].endswith((".sh", ".bash")) or PurePath(rest[0]).name in ("bash", "sh"):
            raise RecipeError("the arguments of a shell script cannot be changed. Give the command that it runs.")
        launch = find_launch(rest, given, program.is_known_command)
        start = 1 if launch is None else len(rest) - len(launch.words)
        return cls(words=tuple(rest), environment=given, start=start, launch=launch)

    @property
    def name(self) -> str:
        """The program's name without its folder, and the subcommand of a framework's command."""
        if self.launch is None:
            return PurePath(self.words[0]).name
        subcommand = self.words[self.start : self.start + 1] if program.is_known_command(self.launch.program) else ()
        return " ".join((self.launch.name, *subcommand))

    @cached_property
    def framework(self) -> str | None:
        """The name of the framework whose arguments it takes, or None."""
        if self.launch is None:
            return None
        try:
            found, _ = program.framework_of(self.launch, self.values, self.name)
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
                values = program.merged(values, content)
        return program.merged(values, {key: _value(typed.text) for key, typed in self._typed.items()})

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
        """The command after a change; raises RecipeError if lines of a file cannot be replaced.

        A key that is an argument is changed there, and one that is in a file in a copy of the file. A key that is in
        neither becomes an argument, or a line of the first file where arguments do not add to files.

        Args:
            copies: the path of the copy of each file that may change.
            in_files: whether a line of a file is changed where an argument could replace it.
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
            place = self._files[file][0]
            files[copies[file]] = rewrite(read_text(file, _FILE), file, values)
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
        if isinstance(value, bool) and self.framework is None:
            return (option,) if value else ()
        return (option, text)

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
            if equals and (OPTION.match(word) or program.OVERRIDE.match(word)):
                yield key.replace("-", "_"), _Typed(place=place, end=place + 1, text=text)
            elif OPTION.match(word):
                has_value = place + 1 < len(words) and not OPTION.match(words[place + 1])
                end = place + 1 + has_value
                yield key.replace("-", "_"), _Typed(place=place, end=end, text=words[place + 1] if has_value else None)

    def _launcher_options(self, name: str) -> list[int]:
        """The places of accelerate's own options with this beginning."""
        is_accelerates = self.launch is not None and self.launch.uses_accelerate
        starts = (f"--{name}", f"--{name.replace('_', '-')}")
        return [place for place in range(self.start) if is_accelerates and self.words[place].startswith(starts)]

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
            if not name.endswith(program.CONFIG_SUFFIXES) or (key is not None and key not in _FILE_KEYS):
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
    return "=" in word and bool(OPTION.match(word) or program.OVERRIDE.match(word))


def _has(values: Mapping[str, Any], key: str) -> bool:
    section, _, name = key.rpartition(".")
    inner = values.get(section) if section else values
    return isinstance(inner, Mapping) and name in inner


def _value(text: str | None) -> Any:
    return True if text is None else scalar(text)


# keys with the sequences of a micro-batch: of the Trainer, axolotl, torchtitan, DeepSpeed, and of scripts
BATCH_KEYS = (
    "per_device_train_batch_size",
    "micro_batch_size",
    "training.local_batch_size",
    "train_micro_batch_size_per_gpu",
    *("per_gpu_train_batch_size", "train_batch_size", "batch_size", "batch", "bs", "mbs", "micro_batch", "microbatch"),
)
_ACCUMULATION_KEYS = (
    "gradient_accumulation_steps",
    *("grad_accum", "grad_accum_steps", "grad_accumulation_steps", "accumulation_steps", "accumulate_grad_batches"),
)
_LENGTH_KEYS = (
    *("max_length", "max_seq_length", "sequence_len", "cutoff_len", "training.seq_len", "block_size"),
    *("seq_len", "seq_length", "sequence_length", "max_seq_len", "context_length", "model_max_length"),
)
_TRL, _TRAINER, _AXOLOTL, _LLAMA_FACTORY = "trl", "transformers", "axolotl", "llama-factory"
_HUGGING_FACE = (_TRL, _TRAINER, _LLAMA_FACTORY)
# the default of TrainingArguments
_DEFAULT_BATCH = 8
# whose keys for a recipe's options are in the table of their files; others have those of the Trainer
_TABLES = {_TRL: "trl-sft", **{name: name for name in (_AXOLOTL, _LLAMA_FACTORY, "torchtitan")}}
# checkpoint unless they are told not to
_CHECKPOINT = (_TRL, _LLAMA_FACTORY)
_SHORTEST = 256
_ONLINE = frozenset({"grpo", "rloo"})
_WITH_REFERENCE = frozenset({"dpo", "kto"})
_ADAM = frozenset({"adamw", *Optimizer.ADAMW_FUSED.row.names, *Optimizer.ADAMW_FOREACH.row.names})
EXPANDABLE = Change(environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Lever:
    """A change that may help a command to fit, its cost in words, and the package that it needs, or None."""

    name: str
    cost: str
    change: Change
    package: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """The micro-batches of a command that keep the sequences of an optimizer step, and larger ones.

    Attributes:
        batch, accumulation: the command's own.
        accumulation_key: with the micro-batches of an optimizer step; None if the command has none.
        multiple: sequences of a step are a multiple of it.
    """

    key: str
    batch: int
    accumulation_key: str | None
    accumulation: int
    multiple: int = 1

    @property
    def smaller(self) -> tuple[int, ...]:
        """Those of the same optimizer step; of an accumulation, they divide it."""
        whole = range(1, self.batch * self.accumulation + 1)
        return tuple(each for each in whole if self.accumulation_key is None or whole[-1] % each == 0)

    def at(self, index: int) -> int:
        """The micro-batch at an index from 0 on."""
        if index < len(self.smaller):
            return self.smaller[index]
        first = self.smaller[-1] // self.multiple
        return (first + index - len(self.smaller) + 1) * self.multiple

    def index(self, batch: float) -> int:
        """The index of the largest micro-batch that is not above `batch`, -1 for none."""
        if batch >= self.smaller[-1]:
            beyond = int(batch) // self.multiple - self.smaller[-1] // self.multiple
            return len(self.smaller) - 1 + max(beyond, 0)
        return sum(each <= batch for each in self.smaller) - 1

    def accumulated(self, batch: int) -> int:
        """The micro-batches of an optimizer step."""
        if self.accumulation_key is None:
            return self.accumulation
        return max(self.batch * self.accumulation // batch, 1)

    def change(self, batch: int) -> Change:
        """The values for a micro-batch; those that the command has are left as they are."""
        accumulation = self.accumulated(batch)
        keys = {self.key: batch} if batch != self.batch else {}
        if self.accumulation_key is not None and accumulation != self.accumulation:
            keys[self.accumulation_key] = accumulation
        return Change(keys=keys)


def find_batches(command: TrainingCommand) -> Batches:
    """The micro-batches of a command; raises RecipeError without a key for them, or if its value is not a number."""
    family = _family(command)
    stated = (key for key in BATCH_KEYS if _stated(command, key))
    known = _keys(family, batch=1) if family in (*_HUGGING_FACE, _AXOLOTL) else {}
    key = next(stated, next(iter(known), None))
    if key is None:
        looked_for = ", ".join(BATCH_KEYS)
        raise RecipeError(
            f"{command.name}: no argument or key has its batch size (looked for: {looked_for}). Name one with --vary,"
            " such as --vary rows=1,2,4,8."
        )
    default = _DEFAULT_BATCH if family in _HUGGING_FACE else 1
    batch = _number(command, key, default)
    accumulation_key = next((each for each in _ACCUMULATION_KEYS if _stated(command, each)), None)
    if accumulation_key is None and family is not None:
        accumulation_key = _ACCUMULATION_KEYS[0]
    accumulation = 1 if accumulation_key is None else _number(command, accumulation_key, 1)
    own_generation = any(_stated(command, each) for each in ("steps_per_generation", "generation_batch_size"))
    multiple = 1
    if family == _TRL and _names(command, _ONLINE) and not own_generation:
        generations = _number(command, "num_generations", 8)
        # of another step the program says itself what is wrong
        multiple = generations if batch * accumulation % generations == 0 else 1
    return Batches(
        key=key, batch=batch, accumulation_key=accumulation_key, accumulation=accumulation, multiple=multiple
    )


def find_levers(command: TrainingCommand) -> tuple[Lever, ...]:
    """The changes that may help a command, the cheapest first; a later one replaces values of an earlier one."""
    return tuple(each for make in _LADDER for each in make(command) if not _is_stated(command, each.change))


def without_checkpointing(command: TrainingCommand) -> Change | None:
    """The change that turns checkpointing off; None where the key for it is not known, or it is off."""
    family = _family(command)
    if family == "torchtitan":
        keys: dict[str, Any] = {"activation_checkpoint.mode": "none"}
    elif family == _LLAMA_FACTORY:
        keys = {"disable_gradient_checkpointing": True}
    elif family == _TRL or _is_on(command, "gradient_checkpointing"):
        # TRL's own default is to checkpoint
        keys = {"gradient_checkpointing": False}
    else:
        return None
    change = Change(keys=keys)
    return None if _is_stated(command, change) else change


def _is_stated(command: TrainingCommand, change: Change) -> bool:
    return all(command.value(key) == value for key, value in change.keys.items()) and not change.environment


def _lever(name: str, cost: str, keys: Mapping[str, Any], package: str | None = None) -> Lever:
    return Lever(name=name, cost=cost, change=Change(keys=keys), package=package)


def _expandable(command: TrainingCommand) -> Iterator[Lever]:
    if "PYTORCH_CUDA_ALLOC_CONF" not in command.environment:
        yield Lever(name="expandable segments", cost="driver calls when segments grow", change=EXPANDABLE)


def _kernels(command: TrainingCommand) -> Iterator[Lever]:
    family = _family(command)
    # TRL 1.15 and later have a loss of their own, and still switch all other kernels on with the Trainer's key
    keys = _keys(None if family == _TRL else family, liger="all")
    if "plugins" in keys:
        keys["plugins"] = [*(command.value("plugins") or ()), *keys["plugins"]]
    is_on = any(_is_on(command, each) for each in ("use_liger_kernel", "enable_liger_kernel"))
    if family in (*_HUGGING_FACE, _AXOLOTL) and not is_on:
        yield _lever("liger-kernel", "none: the same computation with different rounding", keys, "liger_kernel")


def _adapter_dropout(command: TrainingCommand) -> Iterator[Lever]:
    if _family(command) == _TRL and _is_on(command, "use_peft"):
        yield _lever("no dropout in adapters", "adapters lose this regularization", {"lora_dropout": 0.0})


def _reference(command: TrainingCommand) -> Iterator[Lever]:
    if _family(command) == _TRL and _names(command, _WITH_REFERENCE) and not _is_on(command, "sync_ref_model"):
        name = "log-probabilities of the reference model computed first"
        yield _lever(name, "time: a pass over the data before the first step", {"precompute_ref_log_probs": True})


def _smaller_batches(command: TrainingCommand) -> Iterator[Lever]:
    try:
        batches = find_batches(command)
    except RecipeError:
        return
    halves = (batches.batch >> shift for shift in range(1, batches.batch.bit_length()))
    kept = batches.accumulation_key is not None
    cost = "time: smaller operations" if kept else "the optimizer step has fewer sequences"
    for batch in dict.fromkeys(batches.at(batches.index(each)) for each in halves):
        more = f" with accumulation over {batches.accumulated(batch)}" if kept else ""
        yield Lever(name=f"micro-batches of {batch}{more}", cost=cost, change=batches.change(batch))


def _generation(command: TrainingCommand) -> Iterator[Lever]:
    """Smaller batches for `generate`, each a whole number of micro-batches and of groups of completions."""
    if _family(command) != _TRL or not _names(command, _ONLINE):
        return
    batches, generations = find_batches(command), _number(command, "num_generations", 8)
    steps = _number(command, "steps_per_generation", batches.accumulation)
    size = _number(command, "generation_batch_size", batches.batch * steps)
    unit = batches.batch * generations // gcd(batches.batch, generations)
    smaller = [each for each in range(unit, size, unit) if size % each == 0]
    by_steps = _stated(command, "steps_per_generation")
    for each in reversed(smaller):
        key, value = ("steps_per_generation", each // batches.batch) if by_steps else ("generation_batch_size", each)
        yield _lever(f"{each} completions generated at a time", "time: more calls of generate", {key: value})


def _checkpointing(command: TrainingCommand) -> Iterator[Lever]:
    family = _family(command)
    for key, value in ({} if family is None else _keys(family, checkpointing=True)).items():
        stated = command.value(key)
        same = is_off(stated) is is_off(value) if isinstance(value, bool) else stated == value
        if not (family in _CHECKPOINT if stated is None else same):
            cost = "time: each layer's forward pass runs twice, up to a third more compute"
            yield _lever("activation checkpointing", cost, {key: value})


def _offloaded_activations(command: TrainingCommand) -> Iterator[Lever]:
    if _family(command) == _TRL and not _names(command, _ONLINE):
        cost = "time: activations cross PCIe in both passes"
        yield _lever("activations in main memory", cost, {"activation_offloading": True})


def _autocast(command: TrainingCommand) -> Iterator[Lever]:
    # TRL's own default is bf16
    is_default = _family(command) == _TRL and not _stated(command, "bf16")
    is_on = is_default or any(_is_on(command, key) for key in ("bf16", "fp16"))
    if _family(command) in (*_HUGGING_FACE, _AXOLOTL) and not is_on:
        yield _lever("bf16 autocast", "matrix products in 16 bits", {"bf16": True})


def _frozen_weights(command: TrainingCommand) -> Iterator[Lever]:
    if _family(command) == _TRL and _is_on(command, "use_peft") and not _is_sixteen_bits(command):
        yield _lever("frozen weights in bf16", "rounded weights", {_dtype_key(command): "bfloat16"})


def _optimizers(command: TrainingCommand) -> Iterator[Lever]:
    optim = command.value("optim")
    if _family(command) in _HUGGING_FACE and (optim is None or optim in _ADAM):
        for optimizer, name, cost in (
            (Optimizer.PAGED_ADAMW, "paged AdamW", "time: states that do not fit cross PCIe"),
            (Optimizer.ADAMW_8BIT, "8-bit AdamW", "precision of the moments"),
        ):
            yield _lever(name, cost, _keys(_TRAINER, optimizer=optimizer), optimizer.row.package)


def _weights(command: TrainingCommand) -> Iterator[Lever]:
    if _family(command) == _TRL and not _is_on(command, "use_peft") and not _is_sixteen_bits(command):
        yield _lever("weights in bf16", "weights and their updates are rounded", {_dtype_key(command): "bfloat16"})


def _adapters(command: TrainingCommand) -> Iterator[Lever]:
    if _family(command) == _TRL and not _is_on(command, "use_peft"):
        yield _lever("LoRA of rank 16", "what is trained", _keys(_TRL, lora=16), "peft")
    if _family(command) == _TRL and not any(_is_on(command, key) for key in ("load_in_4bit", "load_in_8bit")):
        yield _lever("4-bit weights", "rounded weights", {"load_in_4bit": True}, "bitsandbytes")


def _shorter(command: TrainingCommand) -> Iterator[Lever]:
    """Half the tokens and a quarter; of completions that are generated, before sequences."""
    keys = [key for key in _LENGTH_KEYS if _stated(command, key)][:1]
    if _family(command) == _TRL and _names(command, _ONLINE):
        keys = ["max_completion_length"]
    elif not keys and _family(command) == _TRL:
        keys = ["max_length"]
    for key in keys:
        length = _number(command, key, 256 if key == "max_completion_length" else 1024)
        least = 16 if key == "max_completion_length" else _SHORTEST
        for each in (length // 2, length // 4):
            if each >= least:
                yield _lever(f"{key} of {each}", "longer texts are cut or split", {key: each})


# no time and no quality first; then time; then precision; then what is trained, and the data
_LADDER: Sequence[Callable[[TrainingCommand], Iterator[Lever]]] = (
    *(_expandable, _kernels, _reference),
    *(_smaller_batches, _generation, _checkpointing, _offloaded_activations, _adapter_dropout),
    *(_autocast, _frozen_weights, _optimizers, _weights),
    *(_adapters, _shorter),
)


def _keys(family: str | None, **changes: Any) -> dict[str, Any]:
    """The keys of a family for changed options of a recipe; none if it has none for them."""
    return keys_for(_TABLES.get(family or "", _TRAINER), **changes) or {}


def _family(command: TrainingCommand) -> str | None:
    """TRL, transformers and so on; None for a program whose keys are its own."""
    parts = () if command.launch is None else (command.launch.name, *PurePath(command.launch.program).parts)
    if _TRL in parts or command.words[0].endswith(f"/{_TRL}") or (command.framework or "").startswith(_TRL):
        return _TRL
    if command.launch is not None and command.launch.is_module and command.launch.program.startswith(f"{_TRL}."):
        return _TRL
    return command.framework


def _names(command: TrainingCommand, methods: Collection[str]) -> bool:
    """Whether a program's name has one of these words, as `trl dpo`, `trl.scripts.dpo` and `train_dpo.py` have."""
    return not set(methods).isdisjoint(re.split(r"[^a-z0-9]+", command.name.lower()))


def _stated(command: TrainingCommand, key: str) -> bool:
    return command.value(key) is not None


def _is_on(command: TrainingCommand, key: str) -> bool:
    return not is_off(command.value(key))


def _dtype_key(command: TrainingCommand) -> str:
    return "torch_dtype" if _stated(command, "torch_dtype") else "dtype"


def _is_sixteen_bits(command: TrainingCommand) -> bool:
    return str(command.value(_dtype_key(command))) in ("bfloat16", "float16")


def _number(command: TrainingCommand, key: str, default: int) -> int:
    value = command.value(key)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise RecipeError(f"{command.name}: {key} is {value!r}, not a number of at least 1. Write a number.")
    return value
