import json
import lzma
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ligerprof.cli.main import main
from tests.analyzers.trace.entries import RECORDING
from tests.sampling import sampled

SERVING = "serving "
# much longer than on a quiet machine; only ends a test that would hang
PATIENCE_SECONDS = 240
PLUGIN = "data/plugin/pytorch_profiler"
CHROMIUM = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)

pytest.importorskip("tensorboard")
pytest.importorskip("torch_tb_profiler")


@pytest.fixture(scope="module")
def run_with_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "001"
    (run / "tensorboard").mkdir(parents=True)
    trace = run / "tensorboard" / "host_1.1700000000000.pt.trace.json"
    trace.write_bytes(lzma.decompress(RECORDING.read_bytes()))
    return run


def start(*arguments: object) -> tuple["subprocess.Popen[str]", str]:
    """The command as a process, and the line with the address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ligerprof", "view", *map(str, arguments)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    return process, process.stderr.readline()


def address_in(line: str) -> str:
    return line.partition(" at ")[2].partition(" (")[0].partition("#")[0]


def fetch(url: str) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=PATIENCE_SECONDS) as answer:
        return json.load(answer)


def children_of(process: int) -> list[str]:
    return Path(f"/proc/{process}/task/{process}/children").read_text(encoding="utf-8").split()


def wait_for_end(process: int) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while Path(f"/proc/{process}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{process}").exists()


def stop(process: "subprocess.Popen[str]", by: signal.Signals) -> None:
    """End the command with a signal; the server ends with it."""
    (server,) = children_of(process.pid)
    process.send_signal(by)
    assert process.wait(PATIENCE_SECONDS) == (-by if by is signal.SIGKILL else 0)
    wait_for_end(int(server))


# each start of TensorBoard takes seconds of CPU time, so each of these tests ends it by another signal
@pytest.fixture(scope="module")
def address(run_with_trace: Path) -> Iterator[str]:
    process, line = start(run_with_trace, "--port", 0)
    try:
        assert line.startswith(SERVING), line
        yield address_in(line)
    finally:
        stop(process, signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.read() == ""


def await_run(address: str) -> str:
    """The plugin reads traces in the background; the name of the run once it has."""
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        listing = fetch(f"{address}{PLUGIN}/runs")
        if listing["runs"] and not listing["loading"]:
            return str(listing["runs"][0])
        time.sleep(0.5)
    raise AssertionError("the plugin lists no run")


def test_the_plugin_lists_the_run_with_its_views(address: str) -> None:
    run = await_run(address)

    assert run == "tensorboard"
    assert fetch(f"{address}{PLUGIN}/views?run={run}") == ["Overview", "Operator", "Kernel", "Trace", "Memory"]


def test_the_overview_counts_the_annotation_of_the_gpu_as_a_step(address: str) -> None:
    # what docs/trace.md says of its figures
    run = await_run(address)
    overview = fetch(f"{address}{PLUGIN}/overview?run={run}&worker=host_1&span=1&view=Overview")

    assert [row[0] for row in overview["steps"]["rows"]] == ["2", "2"]
    shares = {cost["name"]: cost["extra"] for cost in overview["performance"][0]["children"]}
    assert shares["Kernel"] == pytest.approx(65.34, abs=0.01)
    metrics = {row["title"]: row["value"] for row in overview["gpu_metrics"]["data"]}
    assert metrics["GPU Utilization"] == "64.2 %"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_browser_shows_the_plugins_views(address: str, tmp_path: Path) -> None:
    await_run(address)
    shown = subprocess.run(
        [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            f"--user-data-dir={tmp_path}",
            # no network: charts would be asked for elsewhere
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            "--virtual-time-budget=10000",
            "--dump-dom",
            # what TensorBoard's page shows in a frame, which a dump leaves out
            f"{address}{PLUGIN}/index.html",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    for text in ("Runs", "Views", "Overview", "host_1"):
        assert f">{text}<" in shown.stdout


def test_json_contains_the_address_while_it_serves(run_with_trace: Path) -> None:
    process, _ = start(run_with_trace, "--port", 0, "--json")
    assert process.stdout is not None
    text = "".join(iter(process.stdout.readline, "}\n")) + "}"

    values = json.loads(text)
    assert (values["schema"], values["kind"], values["run"]) == (1, "view", str(run_with_trace))
    assert values["address"].startswith("http://127.0.0.1:")
    stop(process, signal.SIGTERM)


@sampled("ending", [signal.SIGKILL, signal.SIGHUP], every=2)
def test_the_server_ends_with_a_killed_command(ending: signal.Signals, run_with_trace: Path) -> None:
    process, line = start(run_with_trace.parent, "--port", 0)
    assert line.startswith(f"{SERVING}{run_with_trace.parent} at http://127.0.0.1:")
    assert line.endswith("/#pytorch_profiler (Ctrl-C ends it)\n")
    stop(process, ending)


def view(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["view", *map(str, arguments)])
    assert result.stdout == ""
    return result.exit_code, result.stderr


def test_a_run_without_a_trace_is_shown_without_the_profilers_tab(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.1.host.2.0").touch()
    process, line = start(tmp_path, "--port", 0)

    assert line.startswith(f"{SERVING}{tmp_path} at http://127.0.0.1:")
    assert line.endswith("/ (Ctrl-C ends it)\n")
    stop(process, signal.SIGHUP)


def test_a_taken_port_is_one_line(run_with_trace: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, said = view(run_with_trace, "--port", taken.getsockname()[1])
    assert (code, said.count("\n")) == (1, 1)
    assert "Address already in use. Try another --port or --host." in said


def test_a_remote_host_is_one_line(run_with_trace: Path) -> None:
    code, said = view(run_with_trace, "--host", "203.0.113.7")
    assert (code, said.count("\n")) == (1, 1)
    assert "203.0.113.7:6006" in said


def test_a_folder_without_a_run_is_one_line(tmp_path: Path) -> None:
    code, said = view(tmp_path)
    assert (code, said.count("\n")) == (1, 1)
    assert "it holds nothing for TensorBoard" in said


@pytest.mark.parametrize("missing", ["tensorboard", "torch_tb_profiler"])
def test_a_package_that_is_missing_is_one_line(
    missing: str, run_with_trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else object())
    code, said = view(run_with_trace)
    assert (code, said.count("\n")) == (1, 1)
    package = missing.replace("_", "-")
    assert f"{package} is not installed. Try: pip install {package}." in said


def test_usage_errors_end_in_2(tmp_path: Path) -> None:
    assert view()[0] == 2
    assert view(tmp_path / "absent")[0] == 2
    assert view(tmp_path, "--port", "70000")[0] == 2
