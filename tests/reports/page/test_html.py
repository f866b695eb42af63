"""Pages: a file's text never becomes markup, and nothing is loaded."""

import base64
import hashlib
import random
import re
from html.parser import HTMLParser
from pathlib import Path

from ligerprof.analyzers.explain.analysis import analyze
from ligerprof.reports.page import payload
from ligerprof.reports.page.peak import render_peak_page
from ligerprof.roles import Phase
from ligerprof.snapshots.reader import Snapshot, read_snapshot
from ligerprof.snapshots.stamp import Stamp
from ligerprof.text import printable
from tests.paths import RECORDINGS
from tests.reports.page.unpacking import recordings_of
from tests.torch_memory.allocator.programs import MIB, SlowAllocator

# of a page of one recording, as docs/explain.md says
MOST_BYTES = 1_500_000
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
        self.scripts: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] == "script" and data.strip():
            self.scripts.append((data, self.elements[-1][1]))


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

    allowed = Elements(harmless)
    found = Elements(hostile)
    assert {tag for tag, _ in found.elements} <= {tag for tag, _ in allowed.elements}
    scripts = [sum(tag == "script" for tag, _ in page.elements) for page in (allowed, found)]
    assert scripts[0] == scripts[1]
    assert not any(name.startswith("on") for _, attributes in found.elements for name in attributes)


def test_names_reach_the_scripts_as_they_are_printed() -> None:
    (data,) = recordings_of(page_of(hostile_snapshot()))

    assert {printable(attack.replace(";", "")) for attack in ATTACKS} <= {site[0] for site in data["sites"]}
    assert {printable(attack) for attack in ATTACKS} <= {frame[2] for frame in data["frames"]}


def test_the_page_can_be_written_with_any_text(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_bytes(page_of(hostile_snapshot()).encode("utf-8", "strict"))
    assert path.stat().st_size > 0


def test_nothing_is_loaded_and_only_the_scripts_of_the_page_run() -> None:
    page = page_of(recording())

    found = Elements(page)
    for tag, attributes in found.elements:
        assert not {"src", "href", "action", "data"} & set(attributes), tag
    policy = next(attributes["content"] or "" for tag, attributes in found.elements if "http-equiv" in attributes)
    assert "default-src 'none'" in policy
    # scripts may be named by their hash alone; connections, frames, fonts and workers fall back to 'none'
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert set(directives) == {"default-src", "style-src", "script-src", "img-src"}
    scripts = [text for text, attributes in found.scripts if "type" not in attributes]
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts}
    assert set(directives["script-src"].split()) == hashes
    assert len(scripts) > 10


def test_licences_of_the_libraries_are_in_the_page() -> None:
    page = page_of(recording("small-late"))

    for words in ("Leon Sorokin", "Mike Bostock", "Robert Penner", "Apache License", "THE SOFTWARE IS PROVIDED"):
        assert words in page


def test_pages_have_the_promised_size_whatever_is_recorded() -> None:
    page = page_of(recording("hf-ckpt-4x1024"))
    (text,) = re.findall(r'id="recording-0">([^<]*)<', page)

    # what does not depend on the recording, and the most that does
    assert len(page.encode()) - len(text) + payload._MOST_CHARACTERS < MOST_BYTES


def test_long_names_do_not_make_a_large_page() -> None:
    program, draw = SlowAllocator(), random.Random(0)
    for owner in range(400):
        first = len(program.events)
        program.alloc(owner, 512)
        # digits drawn at random, because a page is compressed
        module = draw.randbytes(3000).hex()
        for event in program.events[first:]:
            event["user_metadata"] = Stamp(step=1, phase=Phase.FORWARD, module=module).to_text()

    assert len(page_of(Snapshot.from_dict(program.snapshot())).encode()) < 10**6
