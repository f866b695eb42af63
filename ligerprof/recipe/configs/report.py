"""What became of every key of the configuration files: the `config` key of JSON results, and lines for the terminal."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ligerprof.recipe.configs.settings import SIMULATED_RANKS, SUPERVISED, Reading, Setting
from ligerprof.recipe.configs.wandb import NAME as WANDB
from ligerprof.recipe.training import RECIPE_OPTIONS
from ligerprof.text import printable

_MOST_SHOWN = 8
# parts of the names of keys that change memory in one framework or another
_MEMORY = re.compile(
    r"lora|quant|[48]_?bit|offload|gradient_|optim|zero|fsdp|shard|batch|seq_?len|max_len|dtype|precision|attn|attention"
    r"|pack|compile|liger|fp8|bf16|fp16|freeze|accum|parallel"
)
UNNAMED_METHOD = "counted as SFT; the file names no method"
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
# the settings that options are made of, where these have other names; the first one found is named
OPTION_SETTINGS: Mapping[str, tuple[Setting, ...]] = {
    "lora": (Setting.RANK,),
    "qlora": (Setting.BITS, Setting.RANK),
    "quantization": (Setting.BITS,),
    "precision": (Setting.AUTOCAST, Setting.WEIGHTS),
    "eval_batch": (Setting.EVALUATION_BATCH,),
    "engine": (Setting.ENGINE, Setting.SEVERAL, Setting.GPUS),
    "deepspeed_config": (Setting.DEEPSPEED,),
}
_UNKNOWN = "keys that ligerprof does not know, and that may change memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigReport:
    """The keys of all files.

    Attributes:
        files: each file and whose it is.
        read: what each key set, in words.
        ignored: keys without effect on the memory of a training step.
        unknown: keys that were not understood.
        left_out: keys whose effect the figures do not include, each with what that is; unknown ones are among them if
            their names say that they may change memory.
        assumed: what reading the files assumed, one sentence each.
        method: what is trained; None if the files do not say, and are counted as supervised fine-tuning.
        places: file and key of each setting.
    """

    files: tuple[tuple[str, str], ...]
    read: Mapping[str, str]
    ignored: tuple[str, ...]
    unknown: tuple[str, ...]
    left_out: Mapping[str, str]
    assumed: tuple[str, ...]
    method: str | None = SUPERVISED
    places: Mapping[Setting, str] = field(default_factory=dict)

    def located(self, message: str, options: Collection[str]) -> str:
        """An error about options, with the file and key that each of those that files set comes from."""
        found = {}
        for flag in _FLAG.findall(message):
            name = next((name for name in options if name in RECIPE_OPTIONS and RECIPE_OPTIONS[name].flag == flag), "")
            settings = OPTION_SETTINGS.get(name) or ((Setting(name),) if name in tuple(Setting) else ())
            if place := next((self.places[setting] for setting in settings if setting in self.places), None):
                found[flag] = f"{flag} is {place}"
        if not found:
            return message
        # what an engine does not take here, the framework may
        remedy = f" {SIMULATED_RANKS}" if len(found) > 1 and RECIPE_OPTIONS["engine"].flag in found else ""
        return f"{message} Here {', '.join(found.values())}.{remedy}"

    def to_json(self) -> dict[str, Any]:
        """The value of `config` in JSON results."""
        return {
            "files": [{"file": file, "framework": framework} for file, framework in self.files],
            "read": dict(self.read),
            "ignored": list(self.ignored),
            "unknown": list(self.unknown),
            "left_out": dict(self.left_out),
            "assumed": list(self.assumed),
            "method": self.method,
        }

    @property
    def omissions(self) -> tuple[str, ...]:
        """What the figures do not include, one entry per subject, as an estimate's `left_out` lists it."""
        keys: dict[str, list[str]] = {}
        for key, what in self.left_out.items():
            keys.setdefault(what, []).append(printable(key))
        return tuple(f"{what} ({_listed(names)})" for what, names in keys.items())

    def lines(self) -> Iterator[str]:
        """The report for a terminal: files, keys that were not understood, and what the figures leave out."""
        if self.method is None:
            yield UNNAMED_METHOD
        for file, framework in self.files:
            yield f"read {file} as {framework}"
        yield f"{len(self.read)} keys read, {len(self.ignored)} without effect on memory, {len(self.unknown)} unknown"
        if self.unknown:
            yield f"unknown keys: {_listed(self.unknown)}"
        yield from (f"assumed: {sentence}" for sentence in self.assumed)
        yield from (f"left out: {omission}" for omission in self.omissions)


def report_of(readings: Iterable[Reading], assumed: Iterable[str]) -> ConfigReport:
    """Collect the keys of all readings; a key that two files have carries the name of the second."""
    readings = tuple(readings)
    trained = next((reading for reading in reversed(readings) if reading.is_complete), None)
    read: dict[str, str] = {}
    left_out: dict[str, str] = {
        key: _UNKNOWN
        for reading in readings
        for key in reading.unknown
        if _MEMORY.search(key.rpartition(".")[2]) and key not in reading.left_out
    }
    for reading in readings:
        for target, source in ((read, reading.read), (left_out, reading.left_out)):
            for key, words in source.items():
                target[f"{reading.file}: {key}" if key in target else key] = words
    return ConfigReport(
        files=tuple((reading.file, reading.framework) for reading in readings),
        read=read,
        ignored=tuple(dict.fromkeys(key for reading in readings for key in reading.ignored if key not in read)),
        unknown=tuple(dict.fromkeys(key for reading in readings for key in reading.unknown)),
        left_out=left_out,
        assumed=(*_unnamed(trained), *(sentence for reading in readings for sentence in reading.assumed), *assumed),
        method=SUPERVISED if trained is None else trained.method,
        places={setting: found.place for reading in readings for setting, found in reading.settings.items()},
    )


def _unnamed(trained: Reading | None) -> Iterator[str]:
    """What to do about files that do not say what they train."""
    if trained is not None and trained.method is None:
        named = "trl-sft" if trained.framework == WANDB else trained.framework
        yield (
            f"{UNNAMED_METHOD}, so nothing is said about what fits. Name it: --config {named}=FILE for SFT,"
            " trl-dpo=FILE, trl-reward=FILE or trl-rl=FILE for others"
        )


def _listed(names: Iterable[str]) -> str:
    shown = [printable(name)[:60] for name in names]
    more = f" and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
    return ", ".join(shown[:_MOST_SHOWN]) + more
