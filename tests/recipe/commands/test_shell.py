"""Shell text as simple commands: quotes, continuations, variables, and what only a running shell knows."""

import pytest

from ligerprof.errors import RecipeError
from ligerprof.recipe.commands.shell import OPEN, computed, simple_commands


def words(text: str, **environment: str) -> list[list[str]]:
    return [list(command.words) for command in simple_commands(text, environment)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a  b\tc", ["a", "b", "c"]),
        ("a \\\n  --b 1 \\\r\n  c", ["a", "--b", "1", "c"]),
        ('a \'x y\' "z \\"q\\" \\$k" w\\ v', ["a", "x y", 'z "q" $k', "w v"]),
        ("a '' \"\"", ["a", "", ""]),
        ("a --k '{\"use_reentrant\": false}'", ["a", "--k", '{"use_reentrant": false}']),
        ("a b # c\n", ["a", "b"]),
        ("a x#y", ["a", "x#y"]),
        ("a > log 2>&1", ["a"]),
        ("a b &> log", ["a", "b"]),
        ("a <<EOF\nb c\nEOF\n", ["a"]),
        ("M=m a $M ${M}/x \"$M\" '$M'", ["a", "$M", "${M}/x", "$M", "$M"]),
        ("a ${N:-4} ${V:-x} ${V-y}", ["a", "4", "v", "v"]),
        ("a $V$V x$V", ["a", "vv", "xv"]),
        ("a $MANY", ["a", "1", "2"]),
        ('a "$MANY"', ["a", "1 2"]),
        ('a $@ "$@" $*', ["a"]),
        ("a $NOT ${NOT} $(date +%F) `b c` ${V%%/*}", ["a", "$NOT", "${NOT}", "$(date +%F)", "`b c`", "${V%%/*}"]),
        ("a $(b $(c) d)/e", ["a", "$(b $(c) d)/e"]),
        ("a $((2 * (3 + 1))) $((V8 / 3))", ["a", "8", "2"]),
        ("a $((NOT * 2))", ["a", "$((NOT * 2))"]),
    ],
)
def test_words(text: str, found: list[str]) -> None:
    assert words(text, V="v", MANY="1 2", V8="8") == [found]


def test_a_script_is_its_commands_with_its_own_variables() -> None:
    script = """#!/bin/bash
set -e; export A=1 B="two words"
C=$((A + 3))
ARGS=(--x "y z"  # why
  --w 2)
ARGS+=(--v)
MORE="--p 1"
MORE+=" --q"
if [ -z "$D" ]; then
  E=1; F=(a)
else
  E=2
fi
for LR in 1 2; do train $A $C "${ARGS[@]}" $MORE $E $LR "${F[@]}"; done
[ -n "$A" ] && A=9
H=1 train $A $H && other | tee log
"""
    found = {command.words[0]: command for command in simple_commands(script, {"E": "0"})}
    commands = words(script, E="0")
    trained = ["train", "1", "4", "--x", "y z", "--w", "2", "--v", "--p", "1", "--q", "$E", "$LR", "${F[@]}"]
    assert trained in commands
    # A may be 1 or 9, and H is for the command alone
    assert ["train", "$A", "$H"] in commands
    assert found["train"].environment["H"] == "1"
    assert {"other", "tee"} <= set(found)


@pytest.mark.parametrize(
    "text", ["'", '"', "$(", "$((", "${", "`", "a <<E", "x=(", "a\\", "((", "case", "&&", "$", "|>", ""]
)
def test_text_that_ends_early_is_read_to_its_end(text: str) -> None:
    simple_commands(text, {})
    simple_commands(f"a {text}", {})


def test_text_that_grows_or_nests_without_end_is_refused() -> None:
    grows = "A=xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\n" + "A=$A$A\n" * 40 + "train $A"
    with pytest.raises(RecipeError, match="expand to more than"):
        simple_commands(grows, {})
    with pytest.raises(RecipeError, match="nested too deep"):
        simple_commands("x=(y " * 5000, {})


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1+2*3", "7"), ("7 / 2", "3"), ("9 % 4", "1"), ("9**9", None), ("1 / 0", None), ("f(1)", None), ("1" * 80, None)],
)
def test_arithmetic(expression: str, value: str | None) -> None:
    assert computed(expression) == value


def test_what_is_open_is_found_in_a_word() -> None:
    assert OPEN.findall("$A/x-${B}-$(c d)") == ["$A", "${B}", "$(c d)"]
    assert not OPEN.findall("a b=1")


def test_what_only_arguments_of_a_script_change_is_as_without_them() -> None:
    script = """M=m; B=$1
while [[ "$1" != "" ]]; do case $1 in -m ) shift; M=$1;; esac; shift; done
train $M $B ${2:-x} "$@"
"""
    assert words(script)[-1] == ["train", "m", "$1", "x"]
    assert words(script, **{"1": "a", "2": "b", "@": "a b"})[-1] == ["train", "$M", "a", "b", "a", "b"]
    assert words("a $((N * 8))", M="1") == [["a", "$((N * 8))"]]
    assert words("N=$SLURM; a $((N * 8))") == [["a", "$(($SLURM * 8))"]]
