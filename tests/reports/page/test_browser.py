"""Pages in headless Chromium: search, tap, brush, keyboard, themes and widths."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ligerprof.analyzers.explain.analysis import SnapshotAnalysis, analyze
from ligerprof.reports.page.peak import render_diff_page, render_peak_page
from ligerprof.reports.peak import largest_bytes
from ligerprof.snapshots.reader import read_snapshot
from ligerprof.snapshots.segments import segments_at
from ligerprof.snapshots.trace import EventColumns
from ligerprof.units import format_bytes, in_one_unit
from tests.paths import RECORDINGS
from tests.reports.page.browser import BROWSER, Browser, Chromium
from tests.reports.page.test_html import hostile_snapshot, page_of

pytestmark = pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed")

TIMELINE = "ligerprof.pages[0].timeline"
# boxes of visible elements with text that overlap others which are neither their parents nor their children
OVERLAPS = """(() => {
  const shown = [...document.querySelectorAll("h1, h2, button, select, input, p, th, td, .key, .range")].filter((one) =>
    one.checkVisibility() && !one.closest(".tip, .moments, .brush, tr.detail[hidden]"));
  // of what scrolls in a place of its own, the visible part
  const visible = (one) => {
    const box = one.getBoundingClientRect();
    const place = one.closest(".panel > div, .scroll, .bar")?.getBoundingClientRect();
    if (!place) return box;
    const [top, left] = [Math.max(box.top, place.top), Math.max(box.left, place.left)];
    return { top, left, bottom: Math.min(box.bottom, place.bottom), right: Math.min(box.right, place.right) };
  };
  const boxes = shown.map((one) => [one, visible(one)]);
  const found = [];
  boxes.forEach(([a, x], i) => boxes.slice(i + 1).forEach(([b, y]) => {
    if (a.contains(b) || b.contains(a)) return;
    const wide = Math.min(x.right, y.right) - Math.max(x.left, y.left);
    const high = Math.min(x.bottom, y.bottom) - Math.max(x.top, y.top);
    if (wide > 1 && high > 1) found.push(a.outerHTML.slice(0, 90) + " | " + b.outerHTML.slice(0, 90));
  }));
  return found;
})()"""


@pytest.fixture(scope="module")
def analysis() -> SnapshotAnalysis:
    return analyze(RECORDINGS / "stamped-oom.pickle.xz")


@pytest.fixture(scope="module")
def page(analysis: SnapshotAnalysis, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(render_peak_page(analysis, source="stamped-oom.pickle"), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    process = Chromium(tmp_path_factory.mktemp("chromium"))
    yield process
    process.close()


@pytest.fixture
def browser(page: Path, chromium: Chromium) -> Iterator[Browser]:
    with Browser(chromium) as opened:
        opened.open(page)
        yield opened
        assert opened.problems == []


def rows(browser: Browser) -> list[str]:
    return list(browser.evaluate("[...document.querySelectorAll('.blocks tr.group')].map((row) => row.innerText)"))


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_pages_fit_the_window_and_nothing_overlaps(page: Path, chromium: Chromium, width: int, dark: bool) -> None:
    with Browser(chromium, width=width, dark=dark) as browser:
        browser.open(page)
        assert browser.problems == []
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert browser.evaluate(OVERLAPS) == []
        paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(16, 21, 27)") is dark


def test_text_of_a_hostile_file_stays_text(chromium: Chromium, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    path.write_text(page_of(hostile_snapshot()), encoding="utf-8")
    with Browser(chromium) as browser:
        browser.open(path)
        x, y = browser.place_of(".u-over", 0.9, 0.9)
        browser.mouse("mouseMoved", x, y)
        browser.evaluate("document.querySelectorAll('button.open').forEach((button) => button.click())")
        assert "onerror" in browser.evaluate("document.querySelector('.blocks').innerText")
        assert browser.evaluate("'broken' in document.documentElement.dataset") is False
        assert browser.evaluate("document.querySelectorAll('img').length") == 0
        assert browser.problems == []


def test_search_filters_the_blocks_and_their_sum(browser: Browser, analysis: SnapshotAnalysis) -> None:
    before = rows(browser)
    browser.type(".blocks-host input", "embed_tokens")

    found = rows(browser)
    assert 0 < len(found) < len(before)
    live = analysis.replayed.live_at(analysis.marked_moments[-1]).tolist()
    sites = analysis.attribution.call_sites
    matching = [block for block in live if "embed_tokens" in sites.of(block).module]
    size = sum(int(analysis.replayed.requested_bytes[block]) for block in matching)
    shown = browser.evaluate("document.querySelector('.blocks-host .caption').textContent")
    assert shown.startswith(f"{len(matching):,} of {len(live):,} listed blocks")
    assert browser.evaluate(f"ligerprof.formatBytes({size})") in shown


def test_rows_open_by_keyboard_and_show_the_stack(browser: Browser) -> None:
    browser.evaluate("document.querySelector('.blocks button.open').focus()")
    browser.key("Enter")

    assert browser.evaluate("document.querySelector('.blocks button.open').getAttribute('aria-expanded')") == "true"
    detail = browser.evaluate("document.querySelector('.blocks tr.detail').innerText")
    assert "bytes" in detail
    assert "lives" in detail


def test_heads_sort(browser: Browser) -> None:
    browser.click(".blocks th[data-sort=count] button")

    counts = browser.evaluate(
        "[...document.querySelectorAll('.blocks tr.group .c-count')].map((one) => +one.innerText)"
    )
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) > 1


def test_a_tap_shows_the_role_and_its_blocks(page: Path, chromium: Chromium, analysis: SnapshotAnalysis) -> None:
    with Browser(chromium, width=390) as browser:
        browser.open(page)
        browser.tap(*browser.place_of(".chart .u-over", 0.8, 0.99))

        tip = browser.evaluate("document.querySelector('.tip').innerText")
        role = analysis.attribution.roles_of(analysis.lives().blocks[:1], analysis.peak_moment)[0].value
        assert role in tip
        assert "lives from" in tip
        assert browser.evaluate("document.querySelector('.tip').hidden") is False
        assert "chosen moment" in browser.evaluate("document.querySelector('.moments').innerText")
        assert all(role in row for row in rows(browser))
        assert browser.problems == []


def test_the_brush_moves_and_zooming_reveals_the_columns_of_the_file(browser: Browser) -> None:
    browser.evaluate(f"{TIMELINE}.setView(0, {TIMELINE}.end / 4)")
    browser.settle()
    start = browser.place_of(".brush")
    browser.drag(start, (start[0] + 200, start[1]))

    view = browser.evaluate(f"{TIMELINE}.view")
    end, width = browser.evaluate(f"[{TIMELINE}.end, {TIMELINE}.overviewPlot.over.clientWidth]")
    assert view[0] == pytest.approx(200 / width * end, rel=0.02)
    assert view[1] - view[0] == pytest.approx(end / 4, rel=0.001)

    browser.click("button[title='Zoom to the peak']")
    shown: list[list[Any]] = browser.evaluate(
        f"{TIMELINE}.shownBins.column.map((c) => [c, {TIMELINE}.shown[c], {TIMELINE}.recording.total[c]])"
    )
    assert len(shown) > 100
    assert all(drawn == total for _, drawn, total in shown)
    peak = browser.evaluate(f"{TIMELINE}.recording.columnOf({TIMELINE}.recording.marks.peak.moment)")
    assert peak in [column for column, _, _ in shown]


def test_every_pixel_shows_the_highest_of_its_columns(browser: Browser) -> None:
    assert (
        browser.evaluate(
            f"""(() => {{
          const t = {TIMELINE}, found = [];
          for (const [from, to] of [[0, t.end], [t.end * 0.3, t.end * 0.31], [t.end * 0.7, t.end]]) {{
            const bins = t.bins(from, to, 150), count = bins.x.length;
            const first = Math.max(0, ligerprof.upperBound(t.places, from) - 1);
            const stop = Math.max(first + 1, ligerprof.lowerBound(t.places, to));
            let k = first;
            for (let i = 0; i < count; i++) {{
              let end = k, most = -1, least = Infinity, where = -1;
              while (end < stop && (end === k || i === count - 1 || Math.max(t.places[end], from) < bins.x[i + 1])) {{
                if (t.shown[end] > most) [most, where] = [t.shown[end], end];
                least = Math.min(least, t.recording.lowest[end]);
                end++;
              }}
              if (t.shown[bins.column[i]] !== most || bins.lowest[i] !== least) found.push([from, i, most, where]);
              k = end;
            }}
            if (k !== stop) found.push([from, "columns are left", k, stop]);
          }}
          return found;
        }})()"""
        )
        == []
    )


def test_the_chart_is_used_by_keyboard(browser: Browser) -> None:
    browser.evaluate("document.querySelector('.chart').focus()")
    browser.key("Home")
    browser.key("+")
    zoomed = browser.evaluate(f"{TIMELINE}.view")
    assert zoomed[1] - zoomed[0] == pytest.approx(browser.evaluate(f"{TIMELINE}.end") / 2, rel=0.01)
    browser.key("ArrowRight")
    browser.key("ArrowRight")
    browser.key("ArrowUp")
    assert browser.evaluate("document.querySelector('.tip').hidden") is False
    browser.key("Enter")
    assert "chosen moment" in browser.evaluate("document.querySelector('.moments').innerText")


def test_the_failed_allocation_is_shown_first_and_marked(browser: Browser, analysis: SnapshotAnalysis) -> None:
    pressed = browser.evaluate("document.querySelector('.moments [aria-pressed=true]').innerText")
    assert pressed.startswith("failed allocation")
    total = browser.evaluate("document.querySelector('.blocks tr.total .c-bytes').innerText")
    failed = analysis.out_of_memory
    assert failed is not None
    assert total == browser.evaluate(f"ligerprof.formatMib({failed.allocated_bytes})")


def test_a_suggestion_redraws_the_timeline(browser: Browser, analysis: SnapshotAnalysis) -> None:
    shown = [one for one in analysis.suggestions if one.new_peak_bytes is not None]
    assert browser.evaluate(f"{TIMELINE}.change") is None
    browser.click(".suggestion button")

    assert browser.evaluate(f"Math.max(...{TIMELINE}.after)") == shown[0].new_peak_bytes
    assert browser.evaluate(f"Math.max(...{TIMELINE}.plot.data.at(-1))") == shown[0].new_peak_bytes
    browser.click(".suggestion button")
    assert browser.evaluate(f"{TIMELINE}.change") is None


def test_segments_name_what_pins_them(browser: Browser, analysis: SnapshotAnalysis) -> None:
    failed = analysis.out_of_memory
    assert failed is not None
    summary = browser.evaluate("document.querySelector('.segments-host p').innerText")
    for size in (failed.reserved_bytes, failed.reserved_free_bytes, failed.requested_bytes):
        assert browser.evaluate(f"ligerprof.formatBytes({size})") in summary
    pin = failed.pins[0]
    first = browser.evaluate("document.querySelector('.segment').innerText")
    assert browser.evaluate(f"ligerprof.formatBytes({pin.free_bytes})") in first
    assert max(pin.roles, key=lambda role: pin.roles[role]).value in first
    browser.click(".segment button.open")
    assert "lives" in browser.evaluate("document.querySelector('.segment .pieces').innerText")


def test_the_page_opens_at_the_failure_and_the_blocks_are_beside_the_chart(browser: Browser) -> None:
    figures = browser.evaluate("[...document.querySelectorAll('.figures dd')].map((one) => one.innerText)")
    assert len(figures) == 3
    recording = "ligerprof.pages[0].recording"
    last, failure = browser.evaluate(f"[{recording}.steps.at(-1).start, {recording}.marks.failure.moment]")
    first, end = browser.evaluate(f"{TIMELINE}.momentsShown")
    assert first <= last <= failure <= end
    scrolled = browser.evaluate("scrollY")
    browser.click(".chart .u-over")
    chart, table = (
        browser.evaluate(
            f"(({{top, bottom}}) => [top, bottom])(document.querySelector('{one}').getBoundingClientRect())"
        )
        for one in (".chart", ".blocks tr.group")
    )
    assert chart[0] < table[0] < chart[1], scrolled


def test_a_tap_leaves_chart_and_blocks_in_a_phone_s_window(page: Path, chromium: Chromium) -> None:
    with Browser(chromium, width=390) as browser:
        browser.open(page)
        browser.tap(*browser.place_of(".chart .u-over", 0.8, 0.9))
        browser.wait_for("document.querySelector('.blocks tr.group').getBoundingClientRect().bottom < innerHeight")
        assert browser.evaluate("document.querySelector('.chart').getBoundingClientRect().bottom") > 200


@pytest.mark.parametrize("name", ["oom-leak", "small-expandable", "small-streams", "small-late"])
def test_segments_events_and_shapes_of_any_moment_are_those_of_the_replay(
    chromium: Chromium, tmp_path: Path, name: str
) -> None:
    found = analyze(RECORDINGS / f"{name}.pickle.xz")
    replayed = found.replayed
    path = tmp_path / "page.html"
    path.write_text(render_peak_page(found, source=name), encoding="utf-8")
    moments = [replayed.last_moment * part // 7 for part in range(8)]
    truth = []
    for moment in moments:
        segments = segments_at(replayed, moment)
        pieces = [[sum(one.size_bytes for one in segments), sum(one.free_bytes for one in segments)]]
        truth.append([*pieces[0], sum(len(one.blocks) for one in segments)])
    with Browser(chromium) as browser:
        browser.open(path)
        shown = browser.evaluate(
            f"""{moments}.map((moment) => {{
              const {{ segments }} = ligerprof.pages[0].recording.segmentsAt(moment);
              const sum = (key) => segments.reduce((bytes, one) => bytes + one[key], 0);
              const blocks = segments.flatMap((one) => one.pieces).filter((piece) => piece.kind === "block");
              return [sum("size"), sum("free"), blocks.length];
            }})"""
        )
        assert shown == truth
        actions = EventColumns.of(replayed.trace, name)
        events = browser.evaluate("ligerprof.pages[0].recording.eventRows.map((row) => [row.bytes, row.address])")
        assert [size for size, _ in events] == actions.sizes.tolist()
        assert [address for _, address in events] == actions.addresses.tolist()
        # the shapes of a moment are stacked without a gap
        assert browser.evaluate(
            f"""{moments[1:-1]}.every((moment) => {{
              const {{ recording }} = ligerprof.pages[0];
              const all = Array.from(recording.blocks.role.keys());
              const range = [Math.max(0, moment - 200), Math.min(recording.last, moment + 200)];
              const {{ shapes }} = new ligerprof.Shapes(recording, all, range);
              let top = 0;
              const at = (shape) => shape.bottoms[ligerprof.upperBound(shape.moments, moment) - 1];
              const held = [...shapes.values()].filter((shape) => shape.moments[0] <= moment && moment < shape.end);
              held.sort((a, b) => at(a) - at(b));
              return held.every((shape) => at(shape) === top && ((top += shape.size), true));
            }})"""
        )
        assert browser.problems == []


def test_leaks_and_csv(chromium: Chromium, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page_of(read_snapshot(RECORDINGS / "oom-leak.pickle.xz")), encoding="utf-8")
    with Browser(chromium) as browser:
        browser.open(path)
        browser.evaluate("(() => { const p = ligerprof.pages[0]; p.scopeChoice.value = 'leaks'; p.show(null); })()")
        (row,) = rows(browser)
        assert "logits" in row
        assert "modeling_llama.py:480 forward" in row
        found = browser.evaluate("ligerprof.pages[0].views[0].csv()")
        assert len({line[1] for line in found[1:]}) == 1
        assert len(found) == 14
        text = browser.evaluate("ligerprof.saveCsv('t.csv', [['=1+1', 'a,\"b', -5]])")
        assert text == '\'=1+1,"a,""b",-5\n'
        assert browser.problems == []


def test_flame_graphs_add_up(browser: Browser, analysis: SnapshotAnalysis) -> None:
    for by in ("stack", "module"):
        tree = browser.evaluate(
            f"""(() => {{
              const page = ligerprof.pages[0], r = page.recording, wrong = [];
              const tree = ligerprof.flameTree(r, r.columnOf(r.marks.peak.moment), "{by}");
              const visit = (node) => {{
                const sum = node.children.reduce((sum, child) => sum + child.value, 0);
                if (node.children.length && sum !== node.value) wrong.push(node.name);
                node.children.forEach(visit);
              }};
              visit(tree);
              return [tree.value, wrong];
            }})()"""
        )
        assert tree == [analysis.peak.peak_bytes, []]
    assert browser.evaluate("document.querySelectorAll('.flame g.frame').length") > 5


def test_themes_change_by_button(browser: Browser) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    before = browser.evaluate(paper)
    browser.click("button.theme")
    browser.click("button.theme")
    assert browser.evaluate("document.documentElement.dataset.theme") == "dark"
    assert browser.evaluate(paper) != before


def test_sizes_are_written_as_the_command_prints_them(browser: Browser, analysis: SnapshotAnalysis) -> None:
    sizes = [0, 512, 10239, 10240, 2**20, 10 * 2**30 - 1, 10 * 2**30, 14124071936, -2101346304]
    texts = in_one_unit(lambda: largest_bytes(analysis.peak))(lambda: [format_bytes(size) for size in sizes])()
    assert browser.evaluate(f"{sizes}.map(ligerprof.formatBytes)") == texts


def test_two_recordings_are_side_by_side_with_one_height(chromium: Chromium, tmp_path: Path) -> None:
    names = ("hf-ckpt-4x1024", "liger-flce-ckpt-4x1024")
    before, after = (analyze(RECORDINGS / f"{name}.pickle.xz") for name in names)
    path = tmp_path / "diff.html"
    path.write_text(render_diff_page(before, after, sources=names), encoding="utf-8")
    for width in (1280, 390):
        with Browser(chromium, width=width) as browser:
            browser.open(path)
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert browser.evaluate(OVERLAPS) == []
            tops = "[...document.querySelectorAll('.timeline')].map((one) => one.getBoundingClientRect().top)"
            first, second = browser.evaluate(tops)
            assert (first == second) is (width == 1280)
            assert browser.evaluate("new Set(ligerprof.pages.map((page) => page.timeline.height)).size") == 1
            browser.click(".linked input")
            browser.evaluate(f"{TIMELINE}.setView({TIMELINE}.end / 2, {TIMELINE}.end)")
            browser.settle()
            shares = "ligerprof.pages.map((page) => page.timeline.view[0] / page.timeline.end)"
            assert browser.evaluate(shares) == [0.5, 0.5]
            assert browser.problems == []


@pytest.mark.slow
def test_recordings_of_other_kinds_are_drawn(chromium: Chromium, tmp_path: Path) -> None:
    with Browser(chromium) as browser:
        for name in ("hf-ckpt-4x1024", "small-late", "small-streams"):
            path = tmp_path / f"{name}.html"
            path.write_text(page_of(read_snapshot(RECORDINGS / f"{name}.pickle.xz")), encoding="utf-8")
            browser.open(path)
            assert browser.evaluate("document.documentElement.dataset.ready") == "yes"
            assert browser.problems == []
