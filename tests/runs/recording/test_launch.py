"""Commands as processes: signals, exit codes, and the environment that opens the door."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ligerprof.errors import MissingDependencyError
from ligerprof.runs.recording.launch import environment_of, python_command, run_command
from ligerprof.runs.recording.settings import Mode, Settings

REPOSITORY = Path(__file__).parents[3]
# runs run_command in a process of its own, and prints how the command ended
LAUNCHER = """
import os, sys
from ligerprof.runs.recording.launch import run_command
end = run_command(sys.argv[1:], os.environ)
print(end.exit_code, end.interrupted, end.runs)
"""
# reports that it is ready, and then waits for a signal
SHELL = "trap 'echo got {name}; exit 9' {name}; echo ready; while :; do sleep 0.02; done"


def launched(*command: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    arguments = [sys.executable, "-c", LAUNCHER, *command]
    return subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)


def ready(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


@pytest.mark.parametrize("name", ["TERM", "HUP", "USR1"])
def test_a_signal_is_passed_on_and_the_commands_exit_code_counts(name: str) -> None:
    process = launched("sh", "-c", SHELL.format(name=name))
    ready(process)
    process.send_signal(getattr(signal, f"SIG{name}"))

    assert process.communicate()[0].splitlines() == [f"got {name}", "9 False False"]


def test_an_interrupt_is_passed_on_and_ends_in_130() -> None:
    process = launched("sh", "-c", SHELL.format(name="INT"))
    ready(process)
    process.send_signal(signal.SIGINT)

    assert process.communicate()[0].splitlines() == ["got INT", "130 True False"]


def test_a_command_that_ignores_an_interrupt_is_not_waited_for() -> None:
    process = launched("sh", "-c", "trap '' INT; echo ready; sleep 3 >/dev/null")
    ready(process)
    process.send_signal(signal.SIGINT)

    assert process.stdout is not None
    assert process.stdout.readline() == "130 True True\n"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_command_starts_with_the_signals_of_its_parent() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    code = "import signal, sys; sys.exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"

    assert run_command([sys.executable, "-S", "-c", code], os.environ).exit_code == len(before)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_a_command_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(MissingDependencyError, match="no-such: cannot be started"):
        run_command(["no-such"], os.environ)


def test_a_python_file_and_a_module_are_run_by_this_python(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert python_command([str(script), "--x"]) == [sys.executable, str(script), "--x"]
    assert python_command(["-m", "package"]) == [sys.executable, "-m", "package"]
    script.chmod(0o755)
    assert python_command([str(script)]) == [str(script)]
    assert python_command(["torchrun", "train.py"]) == ["torchrun", "train.py"]


def isolated_python(settings: Settings, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python without ligerprof on its path, but with the door."""
    without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = environment_of(settings, {**without, **variables})
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, cwd="/"
    )


def test_the_door_opens_where_ligerprof_is_not_installed_and_leaves_the_path_alone(tmp_path: Path) -> None:
    settings = Settings(mode=Mode.RUN, output=tmp_path)
    code = (
        "import sys\n"
        "from ligerprof.runs.recording.imports import _FINDER\n"
        "print(sorted(_FINDER.actions), 'torch' in sys.modules, 'numpy' in sys.modules)\n"
        "print([path for path in sys.path if 'startup' in path])\n"
    )

    done = isolated_python(settings, code)

    assert (done.stdout.splitlines(), done.stderr) == (["['torch'] False False", "[]"], "")


def test_a_sitecustomize_that_the_door_hides_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    settings = Settings(mode=Mode.RUN, output=tmp_path)

    assert isolated_python(settings, "import sitecustomize", PYTHONPATH=str(tmp_path)).stdout == "mine\n"


def test_a_wrong_setting_never_stops_a_program(tmp_path: Path) -> None:
    done = isolated_python(Settings(mode=Mode.RUN, output=tmp_path), "print(1)", LIGERPROF_STEPS="")
    environment = environment_of(Settings(mode=Mode.RUN, output=tmp_path), {"LIGERPROF": "x"})
    assert environment["LIGERPROF"] == "run"
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_the_pth_file_is_one_line_that_opens_the_door_only_if_the_variable_is_set() -> None:
    line = (REPOSITORY / "ligerprof.pth").read_text(encoding="utf-8")
    assert line.startswith("import ")
    assert line.count("\n") == 1
    code = f"import sys\n{line}\nprint([name for name in sys.modules if name.startswith('ligerprof')])"

    printed = []
    for value in ("", "oom"):
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "LIGERPROF": value}
        done = subprocess.run(
            [sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        printed.append(done.stdout)

    assert printed[0] == "[]\n"
    assert "ligerprof.runs.recording.door" in printed[1]
