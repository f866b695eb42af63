"""Variables that a command leaves to its shell: which arguments they decide, and what is said about them."""

from collections.abc import Mapping
from typing import Any

from ligerprof.errors import RecipeError
from ligerprof.recipe.commands.shell import OPEN
from ligerprof.recipe.configs.framework import Framework
from ligerprof.recipe.configs.report import OPTION_SETTINGS
from ligerprof.recipe.configs.rows import BadValueError, Row
from ligerprof.recipe.configs.settings import Ignored, Lacking, LeftOut, Names, Outcome, Reason, Sets, Setting
from ligerprof.recipe.training import RECIPE_OPTIONS
from ligerprof.text import printable

# one of them is a value that a row takes
_SAMPLES: tuple[Any, ...] = ("1", "true", "none", "text")


def is_open(value: Any) -> bool:
    """Whether a value, or one of a list, has a part that only a running shell knows."""
    return any(is_open(each) for each in value) if isinstance(value, list) else bool(OPEN.search(str(value)))


def is_path(name: str) -> bool:
    """Whether at most the first folder of a path is a variable: as that of another machine, it is found by its end."""
    found = OPEN.match(name)
    rest = name if found is None else name[found.end() :]
    return (found is None or rest.startswith("/")) and not is_open(rest)


def settled(values: Mapping[str, Any], framework: Framework, given: Mapping[str, Any], program: str) -> dict[str, Any]:
    """The arguments that count, without those that variables decide and options replace.

    Args:
        values: arguments by key.
        given: recipe options that replace arguments.
        program: what messages call the program.

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
        if (option == "model" and "like" in given) or (isinstance(outcome, Names) and is_path(outcome.file)):
            kept[key] = value
        elif option not in given:
            raise RecipeError(unset(program, f"--{key}", value, option))
    return kept


def unset(program: str, key: str, value: Any, option: str | None) -> str:
    """The error about an argument that a variable decides."""
    names = tuple(dict.fromkeys(OPEN.findall(str(value))))
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
    return isinstance(outcome, LeftOut) or (isinstance(outcome, Ignored) and outcome.reason is not Reason.UNSET)


def _option_of(row: Row) -> str | None:
    """The option of ligerprof that replaces a key, or None."""
    outcomes = [_outcome(row, sample) for sample in _SAMPLES]
    settings = [next(iter(each.values)) for each in outcomes if isinstance(each, Sets) and each.values]
    settings += [each.setting for each in outcomes if isinstance(each, Lacking) and each.setting is not None]
    return _option_named(settings[0]) if settings else None


def _option_named(setting: Setting) -> str:
    named = (option for option, settings in OPTION_SETTINGS.items() if setting in settings)
    return setting.value if setting.value in RECIPE_OPTIONS else next(named, setting.value)
