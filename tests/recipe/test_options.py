"""Options are declared once: the page, the command line and flags follow from the fields."""

import dataclasses
import re
from collections.abc import Iterator

import click
import pytest

from ligerprof.cli.main import COMMANDS, main
from ligerprof.cli.step import command as step
from ligerprof.errors import RecipeError
from ligerprof.recipe.flags import recipe_flags
from ligerprof.recipe.options import Option, options_of
from ligerprof.recipe.training import RECIPE_OPTIONS, TrainingRecipe
from ligerprof.recipe.training_options import RunOptions, TrainingOptions
from tests.golden import assert_matches_golden
from tests.paths import REPOSITORY

CANONICAL = {
    "gpu": ["h200", "24GiB:sm89"],
    "selective": ["attention", "aten.bmm.default+aten.mm.default/2"],
    "routing": ["worst", "3,4,5;0,6,6"],
}
PAGE = REPOSITORY / "docs" / "recipe.md"


def page_lines() -> Iterator[str]:
    text = PAGE.read_text(encoding="utf-8")
    yield from text.partition("## ")[0].rstrip().splitlines()
    group = None
    for declared in RECIPE_OPTIONS.values():
        if declared.group is not group:
            group = declared.group
            yield from ("", f"## {group}", "", "| option | JSON key | default | meaning |", "|---|---|---|---|")
        yield f"| `{spelled(declared)}` | `{declared.name}` | {default_text(declared)} | {declared.help} |"


def spelled(declared: Option) -> str:
    if declared.placeholder is None:
        return declared.flag if declared.off_flag is None else f"{declared.flag}/{declared.off_flag}"
    return f"{declared.flag} {declared.placeholder.strip('[]')}".replace("|", "\\|")


def default_text(declared: Option) -> str:
    if declared.default_text is not None:
        return declared.default_text
    if isinstance(declared.default, bool):
        return "on" if declared.default else "off"
    return "none" if declared.default is None else str(declared.default)


def test_the_page_lists_every_option_as_its_field_declares_it() -> None:
    assert_matches_golden("\n".join(page_lines()), PAGE)


def test_a_command_has_every_option_and_its_default() -> None:
    parameters = {parameter.name: parameter for parameter in step.params if isinstance(parameter, click.Option)}
    assert set(RECIPE_OPTIONS) <= set(parameters)
    for name, declared in RECIPE_OPTIONS.items():
        assert declared.flag in parameters[name].opts
        assert parameters[name].help == declared.help


def test_options_of_one_group_are_declared_together() -> None:
    groups = [declared.group for declared in RECIPE_OPTIONS.values()]
    starts = [group for index, group in enumerate(groups) if index == 0 or groups[index - 1] is not group]
    assert len(starts) == len(set(starts))


@pytest.mark.parametrize("declared", RECIPE_OPTIONS.values(), ids=lambda declared: declared.name)
def test_every_option_reads_back_what_it_types(declared: Option) -> None:
    least = int(declared.minimum or 1)
    samples = {bool: [True, False], int: [least, least + 1], float: [0.5], str: ["sdpa"]}
    values = (
        list(declared.kind.choices()) if declared.choices and not declared.words else samples.get(declared.kind, [])
    )
    if declared.canonical is not None:
        values = CANONICAL[declared.name]
    for value in declared.words or values:
        flag, *texts = declared.typed(value)
        if declared.kind is bool:
            assert declared.parse("on" if flag == declared.flag else "off") is (flag == declared.flag)
        else:
            assert declared.parse(texts[0]) == value


@pytest.mark.parametrize("text", ["", "4.5", "four", "0", "-1", "1e3"])
def test_what_is_not_a_count_is_one_line(text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        RECIPE_OPTIONS["batch"].parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [2**53, 10**30, 10**400, 10**5000, -(10**400)], ids=lambda size: size.bit_length())
def test_a_number_beyond_what_floats_hold_is_one_line(size: int) -> None:
    for name in ("batch", "seq", "padding", "gpus"):
        with pytest.raises(RecipeError) as caught:
            RECIPE_OPTIONS[name].check(size)
        assert len(str(caught.value)) < 200


def test_run_options_are_apart_from_what_is_trained() -> None:
    assert set(options_of(RunOptions)) == {"device", "warmup", "repeats"}
    assert {**options_of(TrainingOptions), **options_of(RunOptions)} == dict(RECIPE_OPTIONS)
    recipe = TrainingRecipe(model="tiny", seq=64)
    timed = dataclasses.replace(recipe, device="cuda", warmup=3, repeats=50)
    assert timed != recipe
    assert timed.training == recipe.training
    assert dataclasses.replace(recipe, seq=65).training != recipe.training


def test_flags_leave_out_defaults_and_make_the_recipe_again() -> None:
    recipe = TrainingRecipe(
        model="tiny", seq=64, checkpointing=False, memory_limit_bytes=24 * 2**30, flce_budget=2**28, precision="bf16"
    )
    assert recipe_flags(recipe) == (
        *("--model", "tiny", "--seq", "64", "--flce-budget", "256MiB", "--precision", "bf16"),
        *("--no-checkpointing", "--memory-limit", "24GiB"),
    )


def test_flags_in_texts_exist() -> None:
    """Texts below the command line spell flags too: each must be an option of some command."""
    context = click.Context(main)
    # TensorBoard's own, and the prefix of a switch
    known = {"--help", "--help-all", "--version", "--logdir", "--no-"}
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None
        known |= {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    spelled_flags = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
    wrong = {
        (path.relative_to(REPOSITORY).as_posix(), flag)
        for path in (REPOSITORY / "ligerprof").rglob("*.py")
        # the palette and pages spell CSS variables
        if path.name != "palette.py"
        and path.parent.name != "page"
        # options of other programs
        and path.parent.name != "commands"
        and path.name != "launchers.py"
        for flag in spelled_flags.findall(path.read_text(encoding="utf-8"))
        if flag not in known
    }
    assert wrong == set()
