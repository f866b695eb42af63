"""The calculator of the documentation: Python in headless Chromium answers as CPython does."""

import base64
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.paths import REPOSITORY
from tests.reports.page.browser import BROWSER, Browser, Chromium

# `make calculator` fetches it; the variable names another site
SITE = Path(os.environ.get("LIGERPROF_SITE", REPOSITORY / "site"))
PYODIDE = SITE / "calculator" / "pyodide"
TRL = """model_name_or_path: Qwen/Qwen3-4B
per_device_train_batch_size: 4
gradient_accumulation_steps: 4
max_length: 4096
bf16: true
gradient_checkpointing: true
use_peft: true
lora_r: 32
lora_target_modules: all-linear
"""
AXOLOTL = """base_model: meta-llama/Llama-3.2-1B
micro_batch_size: 16
sequence_len: 1024
bf16: true
"""
FACTORY = """model_name_or_path: Qwen/Qwen3-0.6B
stage: sft
finetuning_type: lora
cutoff_len: 2048
per_device_train_batch_size: 2
"""
TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
"""
ARGUMENTS = json.dumps({"output_dir": "out", "per_device_train_batch_size": 2, "bf16": True})
ACCELERATE = "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n"
DEEPSPEED = json.dumps(
    {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
)
# of the heaviest request, from a cached load
FIRST_ANSWER_SECONDS = 3
REQUESTS = {
    "options": {"options": "--model llama3.2-1b --gpu rtx4090 --liger all"},
    "trl": {"content": TRL, "file": "trl-sft=sft.yaml", "options": "--gpu rtx4090"},
    "axolotl": {"content": AXOLOTL, "file": "a.yaml", "options": "--gpu 'RTX 3090'"},
    "llama-factory": {"content": FACTORY, "options": "--gpu a100-40g"},
    "torchtitan": {"content": TITAN, "options": "--gpus 8 --gpu h100"},
    "trainer": {"content": ARGUMENTS, "options": "--model llama3.2-1b"},
    "accelerate": {"content": ACCELERATE, "options": "--model llama3.1-8b --gpu h100"},
    "deepspeed": {"content": DEEPSPEED, "options": "--model llama3.2-1b --gpus 8 --gpu a100-40g"},
    "misspelt": {"content": "model_name_or_pth: x\n"},
}


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    monkeypatch.chdir(tmp_path)
    module = load(REPOSITORY / "docs" / "calculator" / "answer.py")
    return lambda **request: json.loads(module.answer(json.dumps({"command": "estimate", **request})))


@pytest.mark.parametrize("name", REQUESTS)
def test_every_kind_of_file_is_answered(answer: Callable[..., dict[str, Any]], name: str) -> None:
    found = answer(**REQUESTS[name])
    if name == "misspelt":
        assert found["code"] == 2
        assert found["said"][-1].startswith("Error: pasted/pasted.yaml: ")
    else:
        assert found["result"]["peak_bytes"] > 2**30, found["said"]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the built page, with today's code."""
    if BROWSER is None or not (PYODIDE / "pyodide.mjs").is_file() or not shutil.which("node"):
        pytest.skip("needs Chromium and the site of `make calculator`")
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(REPOSITORY / "docs" / "calculator", folder / "calculator")
    shutil.copytree(PYODIDE, folder / "calculator" / "pyodide")
    for other in SITE.resolve().iterdir():
        if other.name != "calculator":
            (folder / other.name).symlink_to(other)
    sys.path.insert(0, str(REPOSITORY / "docs" / "_site"))
    load(REPOSITORY / "docs" / "_site" / "hooks.py").on_post_build(config=SimpleNamespace(site_dir=folder))
    subprocess.run(["node", str(folder / "calculator" / "snapshot.mjs")], check=True)
    handler = functools.partial(
        type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None}), directory=folder
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/calculator.html"
    server.shutdown()


def test_the_browser_answers_to_the_byte(
    address: str, tmp_path_factory: pytest.TempPathFactory, answer: Callable[..., dict[str, Any]]
) -> None:
    chromium = Chromium(tmp_path_factory.mktemp("chromium"))
    with Browser(chromium, width=390, dark=True) as browser:
        browser.call("Page.navigate", url=address)
        browser.wait_for("Boolean(document.querySelector('#calculator-form')?.dataset.ready)")
        for name, request in REQUESTS.items():
            browser.evaluate(
                f"""(() => {{
                  const form = document.querySelector("#calculator-form"), given = {json.dumps(request)};
                  for (const name of ["content", "file", "options"]) form.elements[name].value = given[name] || "";
                  form.requestSubmit();
                }})()"""
            )
            browser.wait_for("document.querySelector('#calculated').dataset.done === 'yes'", seconds=400)
            for command in ("estimate", "advise"):
                shown = browser.evaluate(f"document.querySelector('#calculated').dataset.{command} || ''")
                if command == "estimate" or shown:
                    assert json.loads(shown) == answer(command=command, **request), name
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
            browser.evaluate(
                "(() => { const { dataset } = document.querySelector('#calculated'); delete dataset.advise; })()"
            )
        given = json.dumps(REQUESTS["trl"]).encode()
        link = f"{address}#{base64.urlsafe_b64encode(given).decode().rstrip('=')}"
        open_link(browser, link)
        found = browser.evaluate("document.querySelector('#calculated').dataset.estimate")
        assert json.loads(found) == answer(command="estimate", **REQUESTS["trl"])
        assert [each for each in browser.problems if not each.startswith("requests http://127.0.0.1:")] == []
    with Browser(chromium, kept=True) as browser:
        seconds = []
        for _ in range(4):
            open_link(browser, link)
            seconds.append(worker_seconds(chromium.process.pid))
    chromium.close()
    # the first load fills the cache
    assert min(seconds[1:]) < FIRST_ANSWER_SECONDS, seconds


def open_link(browser: Browser, link: str) -> None:
    browser.call("Page.navigate", url="about:blank")
    browser.call("Page.navigate", url=link)
    browser.wait_for("Boolean(document.querySelector('#calculated')?.dataset.estimate)", seconds=400)


def worker_seconds(pid: int) -> float:
    """Processor time of the busiest worker of a page: other work on the machine does not count."""
    most = 0.0
    for thread in Path("/proc", str(pid), "task").glob("*"):
        # it may end meanwhile
        with suppress(FileNotFoundError, ProcessLookupError):
            children = (thread / "children").read_text().split()
            of_worker = "DedicatedWorker" in (thread / "comm").read_text()
            own = int((thread / "schedstat").read_text().split()[0]) / 1e9 if of_worker else 0.0
            most = max(most, own, *(worker_seconds(int(child)) for child in children))
    return most
