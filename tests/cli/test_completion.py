"""Completion in a shell: names of commands, options, models, GPUs and kernels, without torch."""

import os
import subprocess
import sys

import pytest
from click.shell_completion import get_completion_class

from ligerprof.cli.main import COMMANDS, main

VARIABLE = "_LIGERPROF_COMPLETE"


def completed(*words: str) -> list[str]:
    """What a shell offers for the last word."""
    shell = get_completion_class("bash")
    assert shell is not None
    found = shell(main, {}, "ligerprof", VARIABLE).get_completions(list(words[:-1]), words[-1])
    return [f"{item.type} {item.value}" if item.type != "plain" else item.value for item in found]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["es"], ["estimate"]),
        (["estimate", "--prec"], ["--precision"]),
        (["estimate", "--model", "QWEN3-0"], ["qwen3-0.6b"]),
        (["estimate", "--model", "./no-such"], ["file ./no-such"]),
        (["fit", "--gpu", "h100"], ["h100", "h100-pcie", "h100-nvl"]),
        (["sweep", "--gpu", "h200,l40"], ["h200,l40s", "h200,l40"]),
        (["estimate", "--liger", "rms+s"], ["rms+swiglu"]),
        (["estimate", "--liger", "no"], ["none", "no-flce"]),
        (["sweep", "--precision", "amp,fp"], ["amp,fp16-amp", "amp,fp16", "amp,fp32"]),
        (["step", "--provider", "ligerp"], ["ligerprof"]),
        (["bench", "sw"], ["swiglu"]),
        (["bench", "--providers", "torch,li"], ["torch,ligerprof", "torch,liger"]),
        (["kernels", "check", "layer"], ["layernorm"]),
        (["models", "Qwen/Qwen3-0"], ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B-Base"]),
        (["explain", "--by", "la"], ["layer"]),
        (["explain", "snap"], ["file snap"]),
        ([""], list(COMMANDS)),
    ],
    ids=" ".join,
)
def test_a_shell_completes_names(words: list[str], offered: list[str]) -> None:
    assert completed(*words) == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script_that_calls_ligerprof(shell: str) -> None:
    kind = get_completion_class(shell)

    assert kind is not None
    assert f"{VARIABLE}={shell}_complete" in kind(main, {}, "ligerprof", VARIABLE).source()


def test_completing_a_model_imports_neither_torch_nor_numpy() -> None:
    program = (
        "import atexit, sys\n"
        "names = ('torch', 'numpy', 'rich', 'ligerprof.library', 'ligerprof.analyzers.estimate')\n"
        "atexit.register(lambda: print([name for name in names if name in sys.modules]))\n"
        "from ligerprof.cli.main import main\n"
        "main(prog_name='ligerprof')"
    )
    words = {VARIABLE: "bash_complete", "COMP_WORDS": "ligerprof estimate --model qwen3-0", "COMP_CWORD": "3"}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **words}, capture_output=True, text=True, check=True
    )

    assert done.stdout.split("\n")[-3:] == ["plain,qwen3-0.6b", "[]", ""]
