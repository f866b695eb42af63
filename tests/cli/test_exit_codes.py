"""Exit codes of invalid options: 2 for usage, 1 for what cannot be done on this machine or in this version."""

import pytest
from click.testing import CliRunner

from ligerprof.cli.main import main

VALUES: dict[str, tuple[str, ...]] = {
    "--batch": ("0", "-1", "four", "4.5", ""),
    "--seq": ("0", "1e3"),
    "--grad-accum": ("0",),
    "--padding": ("1", "1.5", "-0.1", "nan", "x"),
    "--flce-budget": ("0", "large", "LEAN"),
    "--precision": ("int8", "AMP"),
    "--optimizer": ("adam", "default"),
    "--galore-rank": ("0",),
    "--clip": ("-1", "x"),
    "--attention": ("fast",),
    "--loss": ("nll",),
    "--lora": ("0", "x"),
    "--qlora": ("0", "x"),
    "--engine": ("fsdp",),
    "--zero": ("4", "-1", "x"),
    "--offload": ("disk",),
    "--gpus": ("0",),
    "--gpu": ("h300",),
    "--memory-limit": ("0", "plenty", "-1GiB", ""),
    "--device": ("tpu",),
    "--warmup": ("0",),
    "--repeats": ("0",),
}
CONFLICTS = (
    "--zero 3",
    "--gpus 2",
    "--offload all",
    "--precision mixed",
    "--engine deepspeed",
    "--engine deepspeed --precision mixed --optimizer none",
    "--engine deepspeed --precision mixed --offload optimizer",
    "--engine deepspeed --precision mixed --zero 2 --offload all",
    "--optimizer deepspeed-cpu-adam",
    "--lora 4 --qlora 4",
    "--reentrant --no-checkpointing",
    "--loss hf-4.45 --liger flce",
    "--liger ce,flce",
    "--nvme-path /nowhere",
    "--deepspeed-config /nowhere",
    "--model llama9",
    "--model gpt2-xl --seq 5000",
    "--alloc-conf nonsense",
)
IMPOSSIBLE = (
    "estimate --simulate --gpu mi300x",
    "estimate --simulate --attention flash",
    "step --model tiny --device simulated --engine deepspeed --precision mixed --zero 3 --offload nvme --nvme-path .",
    "step --model tiny --device simulated --attention flash",
)


def run(*arguments: str) -> tuple[int, str]:
    """The exit code and the last line of stderr."""
    result = CliRunner().invoke(main, list(arguments), catch_exceptions=False)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.exit_code, result.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", [("estimate",), ("sweep", "--dry-run")], ids=lambda command: command[0])
@pytest.mark.parametrize(("flag", "value"), [(flag, value) for flag, values in VALUES.items() for value in values])
def test_an_invalid_value_is_exit_2_with_the_name_of_the_option(
    command: tuple[str, ...], flag: str, value: str
) -> None:
    exit_code, error = run(*command, f"{flag}={value}")
    assert exit_code == 2
    # click takes a negative number for another option after an option whose value may be left out
    if command[0] == "estimate" or not value.startswith("-"):
        assert error.startswith(f"Error: Invalid value for '{flag}': ")


@pytest.mark.parametrize("options", CONFLICTS)
def test_options_that_exclude_each_other_are_exit_2(options: str) -> None:
    exit_code, error = run("estimate", *options.split())
    assert exit_code == 2
    assert error.startswith("Error: ")
    assert "Invalid value" not in error


@pytest.mark.parametrize("arguments", IMPOSSIBLE)
def test_what_this_version_or_machine_cannot_do_is_exit_1(arguments: str) -> None:
    exit_code, error = run(*arguments.split())
    assert exit_code == 1
    assert error.startswith("Error: ")


@pytest.mark.parametrize("option", ["--model", "--config", "--lengths", "--selective", "--routing", "--nvme-path"])
@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_a_name_that_no_file_can_have_is_one_line(option: str, name: str) -> None:
    offload = ["--engine", "deepspeed", "--zero", "3", "--precision", "mixed", "--offload", "all"]
    more = offload if option == "--nvme-path" else []
    result = CliRunner().invoke(main, ["estimate", option, name, *more])
    assert isinstance(result.exception, SystemExit)
    assert result.exit_code in (1, 2)
    assert "Traceback" not in result.output
