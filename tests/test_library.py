"""The library: its names, results with every key of their JSON, and the examples of its page."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

import ligerprof
from ligerprof.errors import UnsupportedError
from ligerprof.library import fastest
from tests.paths import DATA, RECORDINGS, REPOSITORY

PAGE = REPOSITORY / "docs" / "library.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
SMALL, OTHER = (str(RECORDINGS / f"small-{name}.pickle.xz") for name in ("lora", "own-all"))
RECIPE = ligerprof.TrainingRecipe(model="tiny", batch=2, seq=128, memory_limit_bytes=2**30)
RESULTS: dict[str, Callable[[], Any]] = {
    "estimate": lambda: ligerprof.estimate(RECIPE),
    "explain": lambda: ligerprof.explain(SMALL),
    "explain-oom": lambda: ligerprof.explain(RECORDINGS / "small-oom.pickle.xz"),
    "fit": lambda: ligerprof.fit(RECIPE, simulate=False),
    "fastest": lambda: fastest(RECIPE, simulate=False),
    "advise": lambda: ligerprof.advise(RECIPE, simulate=False),
    "compare": lambda: ligerprof.compare(SMALL, ligerprof.estimate(RECIPE)),
    "diff": lambda: ligerprof.diff(SMALL, ligerprof.explain(OTHER)),
    "analyze_trace": lambda: ligerprof.analyze_trace(DATA / "traces" / "llama3.2-1b-step.pt.trace.json.xz"),
}
WRONG: dict[str, Callable[[], Any]] = {
    "recipe": lambda: ligerprof.estimate("llama3.2-1b"),  # type: ignore[arg-type]
    "none": lambda: ligerprof.simulate(None),  # type: ignore[arg-type]
    "number": lambda: ligerprof.explain(5),  # type: ignore[arg-type]
    "judge": lambda: ligerprof.fit({}, simulate=False),  # type: ignore[arg-type]
    "column": lambda: ligerprof.compare(SMALL, 3),  # type: ignore[arg-type]
    "trace": lambda: ligerprof.analyze_trace(None),  # type: ignore[arg-type]
    "side": lambda: ligerprof.diff(SMALL, 3),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.slow) if ".fit(" in EXAMPLES[n] else n for n in range(len(EXAMPLES))]
)
def test_an_example_of_the_page_runs(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    exec(compile(EXAMPLES[number], f"{PAGE.name}, example {number + 1}", "exec"), {"__name__": "example"})


def test_every_public_name_is_there_and_on_the_page() -> None:
    assert dir(ligerprof) == sorted(ligerprof.__all__)
    text = PAGE.read_text(encoding="utf-8")
    for name in ligerprof.__all__:
        # a subclass of a class of axolotl's
        if name != "AxolotlPlugin":
            assert getattr(ligerprof, name) is not None
        if name.islower():
            assert f"`{name}" in text


@pytest.mark.parametrize("name", RESULTS)
def test_every_key_of_a_result_is_an_attribute(name: str) -> None:
    result = RESULTS[name]()

    assert set(result.to_json()) <= set(dir(result))
    for key, value in result.to_json().items():
        attribute = getattr(result, key)
        if key in ("roles", "phases") and isinstance(value, dict):
            assert isinstance(attribute, Mapping)
            assert set(map(str, attribute)) == set(value)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        result.nothing  # noqa: B018 - the access is the test


@pytest.mark.parametrize("name", [*RESULTS, "simulate", "roles"])
def test_a_result_prints_as_its_command_and_shows_itself_in_a_notebook(name: str) -> None:
    others = {"simulate": lambda: ligerprof.simulate(RECIPE), "roles": lambda: ligerprof.estimate(RECIPE).roles}
    result = {**RESULTS, **others}[name]()

    lines = str(result).splitlines()
    assert len(lines) > 3
    assert max(map(len, lines)) <= 100
    page = ET.fromstring(result._repr_html_())
    assert page.tag == "pre"
    assert "".join(page.itertext()).split() == str(result).split()


NOTEBOOK = """
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from ligerprof.gpus import find_gpu
from ligerprof.simulated_gpu.machine import install

install(find_gpu("rtx4090"))
import torch
import ligerprof

kept = torch.zeros(1000, 1000, device="cuda")
assert ligerprof.explain().peak_bytes == torch.cuda.memory_allocated() == 4_000_256
shell = InteractiveShell.instance()

def run(*lines):
    with capture_output() as shown:
        shell.run_cell("\\n".join(lines))
    return shown.stdout, [output.data for output in shown.outputs]

run("%load_ext ligerprof", "import torch")
_, (report, page) = run(
    "%%ligerprof recorded",
    "layer = torch.nn.Linear(1000, 1000, device='cuda')",
    "layer(torch.zeros(50, 1000, device='cuda')).sum().backward()",
)
assert report["text/plain"].startswith("Peak "), report
assert page["text/html"].startswith("<iframe sandbox="), page
assert ligerprof.explain("recorded").peak_phase is not None
assert "layer" in shell.user_ns
text, (report, page) = run("%%ligerprof", "torch.zeros(2**40, device='cuda')")
assert "OutOfMemoryError" in text
assert report["text/plain"].startswith("Out of memory"), report
text, outputs = run("%%ligerprof recorded", "1")
assert "recorded" in text and not outputs, text
print("done")
"""


def test_a_notebook_records_a_cell_and_explains_its_process(tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "IPYTHONDIR": str(tmp_path / "ipython"), "TMPDIR": str(tmp_path)},
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["done"], done.stdout + done.stderr


@pytest.mark.parametrize("name", WRONG)
def test_an_argument_of_a_wrong_type_is_an_error_of_one_line(name: str) -> None:
    with pytest.raises(ligerprof.LigerprofError) as caught:
        WRONG[name]()

    assert "\n" not in str(caught.value)


def test_roles_and_phases_are_mappings() -> None:
    results = [RESULTS[name]() for name in ("estimate", "explain")]
    for each in [*results, ligerprof.compare(*results).columns[0]]:
        assert each.roles[ligerprof.Role.PARAMETERS] == dict(each.roles)[ligerprof.Role.PARAMETERS] > 0
        assert len(each.roles) == len(ligerprof.Role)
        assert each.phases[ligerprof.Phase.BACKWARD] == each.phases["backward"] > 0


def test_importing_the_library_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    program = "import sys, ligerprof; dir(ligerprof); sys.exit(bool({'torch', 'numpy', 'click'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60)


def test_a_simulated_step_can_be_compared() -> None:
    recipe = ligerprof.TrainingRecipe(model="tiny", batch=2, seq=64)
    outcome = ligerprof.simulate(recipe)
    comparison = ligerprof.compare(outcome, ligerprof.estimate(recipe))

    assert comparison.columns[0].peak_bytes == outcome.peak_bytes
    assert comparison.columns[0].roles.total_bytes == outcome.peak_bytes


@pytest.mark.parametrize("search", [ligerprof.fit, ligerprof.advise])
def test_what_fits_under_torch_compile_is_not_guessed(search: Callable[..., Any]) -> None:
    recipe = ligerprof.TrainingRecipe(model="tiny", compile=True, memory_limit_bytes=2**30)
    with pytest.raises(UnsupportedError, match=r"--compile: what fits under torch\.compile is known after"):
        search(recipe, simulate=False)
