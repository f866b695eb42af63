"""Pages: a file's text never becomes markup, nothing is loaded, and a browser draws them."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ligerprof.analyzers.explain.analysis import analyze, explain
from ligerprof.reports.page.peak import render_peak_page
from ligerprof.roles import Phase, Role
from ligerprof.snapshots.reader import Snapshot, read_snapshot
from ligerprof.snapshots.stamp import Stamp
from tests.paths import RECORDINGS
from tests.torch_memory.allocator.programs import MIB, SlowAllocator

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ATTACKS = (
    "</script><script>document.documentElement.dataset.broken='1'</script>",
    "<img src=x onerror=\"document.documentElement.dataset.broken='1'\">",
    "\"' onmouseover=alert(1) &lt;script&gt;",
    "<!--<script>",
    "\u2028]]>\ud800",
)


class Elements(HTMLParser):
    """The elements of a page, their attributes, and the text inside scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] == "script":
            self.scripts.append(data)


def hostile_snapshot() -> Snapshot:
    """Modules, nodes, files and functions that try to become markup."""
    program = SlowAllocator()
    for owner, attack in enumerate(ATTACKS):
        first = len(program.events)
        program.alloc(owner, (owner + 1) * MIB)
        stamp = Stamp(step=1, phase=Phase.FORWARD, module=attack.replace(";", ""), node=attack.replace(";", ""))
        for event in program.events[first:]:
            event["user_metadata"] = stamp.to_text()
            event["frames"] = [{"filename": f"{attack}.py", "line": 1, "name": attack}]
    return Snapshot.from_dict(program.snapshot())


def page_of(snapshot: Snapshot, source: str = "snapshot.pickle") -> str:
    return render_peak_page(analyze(snapshot), source=source)


def recording(name: str = "stamped-amp-ckpt-4x1024") -> Snapshot:
    return read_snapshot(RECORDINGS / f"{name}.pickle.xz")


def test_no_text_of_a_file_becomes_an_element() -> None:
    harmless, hostile = page_of(recording("small-late")), page_of(hostile_snapshot(), source=f"{ATTACKS[0]}.pickle")

    allowed = {tag for tag, _ in Elements(harmless).elements}
    found = Elements(hostile)
    assert {tag for tag, _ in found.elements} <= allowed
    assert sum(tag == "script" for tag, _ in found.elements) == 2
    assert not any(name.startswith("on") for _, attributes in found.elements for name in attributes)


def test_names_reach_the_script_unchanged() -> None:
    data = json.loads(Elements(page_of(hostile_snapshot())).scripts[0])

    assert {attack.replace(";", "") for attack in ATTACKS} <= {module for module, _ in data["holders"]}


def test_the_page_can_be_written_with_any_text(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_bytes(page_of(hostile_snapshot()).encode("utf-8", "strict"))
    assert path.stat().st_size > 0


def test_nothing_is_loaded_from_anywhere() -> None:
    page = page_of(recording())

    assert re.findall(r"""(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}|\bimport\(|\bfetch\(|XMLHttpRequest""", page) == []
    for tag, attributes in Elements(page).elements:
        assert not {"src", "href", "action", "data"} & set(attributes), tag
    assert "default-src 'none'" in page


def test_the_data_adds_up_to_the_reported_peak() -> None:
    snapshot = recording()
    data = json.loads(Elements(page_of(snapshot)).scripts[0])

    report = explain(snapshot)
    at_peak = {role["name"]: sum(role["bytes"][: data["peak_column"] + 1]) for role in data["roles"]}
    assert sum(at_peak.values()) == report.peak_bytes
    assert at_peak == {Role(name).value: report.roles[Role(name)] for name in at_peak}


def test_long_names_do_not_make_a_large_page() -> None:
    program = SlowAllocator()
    for owner in range(3000):
        first = len(program.events)
        program.alloc(owner, 512)
        for event in program.events[first:]:
            event["user_metadata"] = Stamp(step=1, phase=Phase.FORWARD, module=f"{owner}" * 1000).to_text()

    assert len(page_of(Snapshot.from_dict(program.snapshot())).encode()) < 5 * 10**6


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_draws_the_page(tmp_path: Path, width: int) -> None:
    for name, snapshot in (("recorded", recording()), ("hostile", hostile_snapshot())):
        path = tmp_path / f"{name}.html"
        path.write_text(page_of(snapshot), encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        drawn = subprocess.run(
            [
                str(BROWSER),
                *options,
                f"--window-size={width},900",
                "--virtual-time-budget=2000",
                "--dump-dom",
                str(path),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        milliseconds = re.search(r'data-drawn-ms="(\d+)"', drawn)
        assert milliseconds, f"{name}: the script did not get to its end"
        assert int(milliseconds.group(1)) < 2000
        assert "data-broken" not in re.sub(r"<script.*?</script>", "", drawn, flags=re.DOTALL).split("<body>")[0]
