"""Sort a sweep's cells into figures and lines, and name them."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ligerprof.kernels.selection import select_kernels
from ligerprof.recipe.categories import Axis, Device, Offload, Optimizer
from ligerprof.recipe.training import RECIPE_OPTIONS, TrainingRecipe
from ligerprof.reports.figures.style import LineLook
from ligerprof.reports.sweep import origin_words
from ligerprof.roles import Backend
from ligerprof.runs.sweep.cells import Cell, CellStatus

AXIS_TITLES: Mapping[Axis, str] = {Axis.BATCH: "batch, sequences", Axis.SEQ: "sequence, tokens"}
_CURRENT_LOSS = "hf"
# the fields that distinguish the lines of one figure
_OF_A_SERIES = ("liger", "provider", "flce_budget", "loss")
# the fields that distinguish figures, in the order of their titles, with their words in a title; empty: not in titles
_OF_A_SETTING: Mapping[str, str] = {
    "batch": "batch {}",
    "seq": "sequence {}",
    "precision": "{}",
    "checkpointing": "checkpointed",
    "checkpoint_every": "one of {} layers checkpointed",
    "selective": "{} kept",
    "activation_offload": "activations offloaded",
    "compile": "compiled",
    "reentrant": "reentrant",
    "optimizer": "{}",
    "attention": "{} attention",
    "grad_accum": "{} micro-batches",
    "padding": "{:.0%} padding",
    "lora": "LoRA of rank {}",
    "qlora": "QLoRA of rank {}",
    "quantization": "{} weights",
    "lora_targets": "adapters on {}",
    "lora_dropout": "adapter dropout {}",
    "dora": "DoRA",
    "modules_to_save": "{} trained in full",
    "engine": "",
    "zero": "ZeRO-{}",
    "offload": "offload {}",
    "gpus": "{} GPUs",
    "memory_limit_bytes": "",
    "alloc_conf": "{}",
}
# in every title, even with the default value
_ALWAYS = ("batch", "seq", "precision", "checkpointing")
_SET_LOOKS: Mapping[str, LineLook] = {
    "none": LineLook("#000000", "o", (0, (1, 1.2)), hollow=True, points=7.5),
    "no-flce": LineLook("#0072b2", "s", (0, (5, 1.5, 1, 1.5))),
    "flce": LineLook("#009e73", "^", (0, (3, 1)), points=5),
    "ce": LineLook("#cc79a7", "v", (0, (6, 2)), points=5),
    "all": LineLook("#d55e00", "D", points=4),
}
_OTHER_LOOKS = (
    LineLook("#7a5195", "P", (0, (4, 1, 1, 1, 1, 1)), points=5),
    LineLook("#8a6d00", "X", (0, (2, 2)), points=5),
    LineLook("#56b4e9", "<", (0, (7, 1)), points=5),
    LineLook("#737373", ">", (0, (1, 2.5)), points=5),
)
# other providers and the loss of 2024 take the set's color, with hollow markers and another line style
_OTHER_DASHES = ((0.0, (3.0, 1.6)), (0.0, (1.2, 1.6)), (0.0, (6.0, 1.2, 1.2, 1.2)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Cells that make one line.

    Attributes:
        label: kernel set, and the other words that distinguish the line.
        cells: in order along the axis, without failed ones.
    """

    label: str
    kernels: str
    look: LineLook
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Cells of one figure; `recipe` is that of the first cell."""

    recipe: TrainingRecipe
    gpu: str
    cells: tuple[Cell, ...]

    @property
    def backends(self) -> tuple[Backend, ...]:
        """How the figures were obtained, without those of failed cells."""
        ran = [cell.figures for cell in self.cells if cell.status is not CellStatus.FAILED]
        return tuple(dict.fromkeys(figures.backend for figures in ran if figures is not None))


class _Key(NamedTuple):
    """The words that distinguish the lines of a figure."""

    kernels: str
    provider: str
    budget: str
    loss: str
    backend: str


def split_settings(cells: Iterable[Cell], *, along: Sequence[str]) -> tuple[Setting, ...]:
    """Group cells that differ only in their kernels and in the fields `along`."""
    found = tuple(cells)
    free = {*along, *_OF_A_SERIES, "model", "device", "warmup", "repeats"}
    names = [name for name in RECIPE_OPTIONS if name not in free]
    gpus = tuple(dict.fromkeys(cell.gpu for cell in found if cell.gpu))
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in found:
        # cells that failed before they recorded the GPU ran on the only GPU of the others
        gpu = gpus[0] if len(gpus) == 1 else cell.gpu
        key = (gpu, cell.recipe.spec.name, *(repr(getattr(cell.recipe, name)) for name in names))
        groups.setdefault(key, []).append(cell)
    return tuple(Setting(recipe=members[0].recipe, gpu=key[0], cells=tuple(members)) for key, members in groups.items())


def name_settings(settings: Sequence[Setting], *, along: Sequence[str]) -> tuple[str, ...]:
    """The fewest words that distinguish each setting, for the file's name; none for a single setting."""
    words_of = [list(_words_of(setting, along)) for setting in settings]
    names = [""] * len(settings)
    for place in range(len(_OF_A_SETTING) + 2):
        if len(set(names)) == len(names):
            break
        if len({words[place] for words in words_of}) > 1:
            names = ["-".join(filter(None, (name, words[place]))) for name, words in zip(names, words_of, strict=True)]
    return tuple(re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-") for name in names)


def _words_of(setting: Setting, along: Sequence[str]) -> Iterator[str]:
    yield setting.recipe.spec.name
    yield setting.gpu
    for name in _OF_A_SETTING:
        value = getattr(setting.recipe, name)
        if name in along:
            yield ""
        elif name == "checkpointing":
            yield "checkpointed" if value else "not-checkpointed"
        else:
            yield value if isinstance(value, str) else f"{name}-{value}"


def split_series(setting: Setting, axis: Axis) -> tuple[Series, ...]:
    """The lines of a figure, starting with no kernels; the last of several cells at one place counts."""
    groups: dict[_Key, dict[int, Cell]] = {}
    for cell in setting.cells:
        if cell.status is not CellStatus.FAILED:
            groups.setdefault(_series_key(cell, setting), {})[getattr(cell.recipe, axis)] = cell
    ordered = sorted(groups, key=_rank)
    return tuple(
        Series(
            label=_label(key, ordered),
            kernels=key.kernels,
            look=_look(key, ordered),
            cells=tuple(groups[key][place] for place in sorted(groups[key])),
        )
        for key in ordered
    )


def kernel_set(recipe: TrainingRecipe) -> str:
    """The shortest word for a recipe's kernels: none, no-flce, all, or their names."""
    for word in ("none", "all", "no-flce"):
        if recipe.kernels == select_kernels(word, recipe.spec):
            return word
    return "+".join(recipe.kernels)


def describe_setting(setting: Setting, *, along: Sequence[str]) -> str:
    """The constants of a figure: the model, the important fields, and those that differ from their default."""
    recipe = setting.recipe
    usual = TrainingRecipe(model=recipe.spec)
    found = [recipe.spec.name]
    for name, words in _OF_A_SETTING.items():
        value = getattr(recipe, name)
        # offloading implies the CPU optimizer
        implied = name == "optimizer" and recipe.offload is not Offload.NONE and value is Optimizer.DEEPSPEED_CPU_ADAM
        if not words or name in along or implied or (name not in _ALWAYS and value == getattr(usual, name)):
            continue
        found.append(f"not {words}" if name == "checkpointing" and not value else words.format(value))
    return ", ".join(found)


def describe_origin(setting: Setting) -> str:
    """How the figures were obtained, as the end of a sentence."""
    return "; ".join(origin_words(backend, setting.gpu or "an unknown GPU") for backend in setting.backends)


def _series_key(cell: Cell, setting: Setting) -> _Key:
    recipe = cell.recipe
    backends = [cell.figures.backend] if cell.figures is not None else list(setting.backends)
    if len(backends) != 1:
        backends = [Backend.SIMULATED if recipe.device is Device.SIMULATED else Backend.MEASURED]
    return _Key(
        kernels=kernel_set(recipe),
        provider=recipe.provider_names if recipe.kernels else "",
        budget=str(recipe.flce_budget) if "flce" in recipe.kernels else "",
        loss=recipe.loss,
        backend=backends[0],
    )


def _rank(key: _Key) -> tuple[Any, ...]:
    words = ("none", "no-flce", "flce", "all")
    place = words.index(key.kernels) if key.kernels in words else len(words)
    # our own kernels and the current loss last: they are drawn on top, with the set's own look
    return place, key.kernels, key.provider == "ligerprof", key.loss == _CURRENT_LOSS, *key[1:]


def _label(key: _Key, keys: Sequence[_Key]) -> str:
    """The kernel set, and each further word in which lines of the figure differ."""
    parts = [key.kernels]
    for place in range(1, len(key)):
        values = {other[place] for other in keys if other[place]}
        if key[place] and len(values) > 1 and key[place] != _CURRENT_LOSS:
            parts.append(key[place])
    return ", ".join(parts)


def _look(key: _Key, keys: Sequence[_Key]) -> LineLook:
    """One color and marker per kernel set, the same in every figure; one line style per line."""
    unknown = sorted({other.kernels for other in keys} - set(_SET_LOOKS))
    look = _SET_LOOKS.get(key.kernels) or _OTHER_LOOKS[unknown.index(key.kernels) % len(_OTHER_LOOKS)]
    same = [other for other in keys if other.kernels == key.kernels]
    # the line with the set's own look is ranked last
    number = len(same) - 1 - same.index(key)
    if number == 0:
        return look
    dashes = _OTHER_DASHES[(number - 1) % len(_OTHER_DASHES)]
    return dataclasses.replace(look, dashes=dashes, hollow=True, points=look.points + 2.5)
