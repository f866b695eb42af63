"""Sort a sweep's cells into figures and lines: what one figure holds constant, and what each line is called."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ligerprof.kernels.selection import select_kernels
from ligerprof.recipe.categories import Axis, Device, Offload, Optimizer
from ligerprof.recipe.training import RECIPE_OPTIONS, TrainingRecipe
from ligerprof.reports.figures.style import LineLook
from ligerprof.reports.sweep import origin_words
from ligerprof.roles import Backend
from ligerprof.runs.sweep.cells import Cell, CellStatus

_LOSS_TODAY = "hf"
# what tells lines of one figure apart
_OF_A_SERIES = ("liger", "provider", "flce_budget", "loss")
# figures differ in these, in the order in which their titles tell them
_OF_A_SETTING = (
    "batch",
    "seq",
    "precision",
    "checkpointing",
    "reentrant",
    "optimizer",
    "attention",
    "grad_accum",
    "padding",
    "lora",
    "qlora",
    "engine",
    "zero",
    "offload",
    "gpus",
    "memory_limit_bytes",
    "alloc_conf",
)
_WORDS: Mapping[str, str] = {
    "batch": "batch {}",
    "seq": "sequence {}",
    "grad_accum": "{} micro-batches",
    "padding": "{:.0%} padding",
    "attention": "{} attention",
    "lora": "LoRA of rank {}",
    "qlora": "QLoRA of rank {}",
    "zero": "ZeRO-{}",
    "offload": "offload {}",
    "gpus": "{} GPUs",
    "optimizer": "{}",
    "precision": "{}",
    "alloc_conf": "{}",
}
# always told: a reader would wonder
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
# others' kernels and the loss of 2024 take the set's colour, with hollow markers and a line of their own
_OTHER_DASHES = ((0.0, (3.0, 1.6)), (0.0, (1.2, 1.6)), (0.0, (6.0, 1.2, 1.2, 1.2)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Cells that make one line.

    Attributes:
        label: kernel set, and what else tells the line from the others.
        kernels: the kernel set's name.
        cells: along the axis, failed ones left out.
    """

    label: str
    kernels: str
    look: LineLook
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Cells that belong into one figure.

    Attributes:
        recipe: what they have in common; fields that they do not are as in the first cell.
    """

    recipe: TrainingRecipe
    gpu: str
    cells: tuple[Cell, ...]

    @property
    def backends(self) -> tuple[Backend, ...]:
        """How the figures came about."""
        ran = [cell for cell in self.cells if cell.status is not CellStatus.FAILED]
        return tuple(dict.fromkeys(cell.figures.backend for cell in ran if cell.figures is not None))


def split_settings(cells: Iterable[Cell], *, along: Sequence[str]) -> tuple[Setting, ...]:
    """Put cells that differ in nothing but their kernels and the fields `along` into one setting."""
    found = tuple(cells)
    free = {*along, *_OF_A_SERIES, "model", "device", "warmup", "repeats"}
    names = [name for name in RECIPE_OPTIONS if name not in free]
    gpus = tuple(dict.fromkeys(cell.gpu for cell in found if cell.gpu))
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in found:
        # where one GPU made all of it, cells that died before they could name it are its, too
        gpu = gpus[0] if len(gpus) == 1 else cell.gpu
        key = (gpu, cell.recipe.spec.name, *(repr(getattr(cell.recipe, name)) for name in names))
        groups.setdefault(key, []).append(cell)
    return tuple(Setting(recipe=members[0].recipe, gpu=key[0], cells=tuple(members)) for key, members in groups.items())


def name_settings(settings: Sequence[Setting], *, along: Sequence[str]) -> tuple[str, ...]:
    """For each, the fewest words that tell it from the others, for its file's name; none for one alone."""
    told = [list(_words_of(setting, along)) for setting in settings]
    names = [""] * len(settings)
    for place in range(len(_OF_A_SETTING) + 2):
        if len(set(names)) == len(names):
            break
        if len({words[place] for words in told}) > 1:
            names = ["-".join(filter(None, (name, words[place]))) for name, words in zip(names, told, strict=True)]
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
    """The lines of a figure, no kernels first; of cells at one place the last counts."""
    groups: dict[tuple[str, ...], dict[int, Cell]] = {}
    for cell in setting.cells:
        if cell.status is not CellStatus.FAILED:
            groups.setdefault(_series_key(cell, setting), {})[getattr(cell.recipe, axis)] = cell
    ordered = sorted(groups, key=_rank)
    series = []
    for key in ordered:
        found = groups[key]
        series.append(
            Series(
                label=_label(key, ordered),
                kernels=key[0],
                look=_look(key, ordered),
                cells=tuple(found[place] for place in sorted(found)),
            )
        )
    return tuple(series)


def kernel_set(recipe: TrainingRecipe) -> str:
    """The shortest word for a recipe's kernels: none, no-flce, all, or their names."""
    for word in ("none", "all", "no-flce"):
        if recipe.kernels == select_kernels(word, recipe.spec):
            return word
    return "+".join(recipe.kernels)


def describe_setting(setting: Setting, *, along: Sequence[str]) -> str:
    """What a figure holds constant: the model, then every field that is not as usual or that a reader would ask for."""
    recipe = setting.recipe
    usual = TrainingRecipe(model=recipe.spec)
    told = [recipe.spec.name]
    for name in _OF_A_SETTING:
        value = getattr(recipe, name)
        if name in along or name in ("memory_limit_bytes", "engine"):
            continue
        # what offloading brings with it needs no word
        implied = name == "optimizer" and recipe.offload is not Offload.NONE and value is Optimizer.DEEPSPEED_CPU_ADAM
        if name in _ALWAYS or (value != getattr(usual, name) and not implied):
            told.append(_words(name, value))
    return ", ".join(told)


def describe_origin(setting: Setting) -> str:
    """How the figures were obtained, as the end of a sentence."""
    return "; ".join(origin_words(backend, setting.gpu or "an unknown GPU") for backend in setting.backends)


def _words(name: str, value: Any) -> str:
    if name == "checkpointing":
        return "checkpointed" if value else "not checkpointed"
    if name == "reentrant":
        return "reentrant"
    return _WORDS[name].format(value)


def _series_key(cell: Cell, setting: Setting) -> tuple[str, ...]:
    recipe = cell.recipe
    word = kernel_set(recipe)
    provider = recipe.provider if recipe.kernels else ""
    budget = str(recipe.flce_budget) if "flce" in recipe.kernels else ""
    return word, provider, budget, recipe.loss, _backend(cell, setting)


def _backend(cell: Cell, setting: Setting) -> Backend:
    if cell.figures is not None:
        return cell.figures.backend
    if len(setting.backends) == 1:
        return setting.backends[0]
    return Backend.SIMULATED if cell.recipe.device is Device.SIMULATED else Backend.MEASURED


def _rank(key: tuple[str, ...]) -> tuple[Any, ...]:
    words = ("none", "no-flce", "flce", "all")
    place = words.index(key[0]) if key[0] in words else len(words)
    # our own kernels and today's loss last: they are drawn on top, with the look that the set has everywhere
    return place, key[0], key[1] == "ligerprof", key[3] == _LOSS_TODAY, *key[1:]


def _label(key: tuple[str, ...], keys: Sequence[tuple[str, ...]]) -> str:
    """The kernel set, and each further word in which lines of the figure differ."""
    parts = [key[0]]
    for place in range(1, len(key)):
        values = {other[place] for other in keys if other[place]}
        if key[place] and len(values) > 1 and key[place] != _LOSS_TODAY:
            parts.append(key[place])
    return ", ".join(parts)


def _look(key: tuple[str, ...], keys: Sequence[tuple[str, ...]]) -> LineLook:
    """One colour and marker a kernel set, the same in every figure; one line style each."""
    unknown = sorted({other[0] for other in keys} - set(_SET_LOOKS))
    look = _SET_LOOKS.get(key[0]) or _OTHER_LOOKS[unknown.index(key[0]) % len(_OTHER_LOOKS)]
    same = [other for other in keys if other[0] == key[0]]
    # what has the set's own look is ranked last
    number = len(same) - 1 - same.index(key)
    if number == 0:
        return look
    dashes = _OTHER_DASHES[(number - 1) % len(_OTHER_DASHES)]
    return dataclasses.replace(look, dashes=dashes, hollow=True, points=look.points + 2.5)
