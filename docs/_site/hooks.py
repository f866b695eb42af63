"""Hooks of mkdocs: add the pages made from code, and the repository's files that pages link to."""

import os
import posixpath
import re
import tempfile
import zipfile
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import reference
from mkdocs.structure.files import File, Files

# code may hold what looks like a link: kernel[grid](...)
_CODE_OR_LINK = re.compile(
    r"```.*?```|`[^`\n]*`|\]\((?P<target>(?!https?:|#|mailto:)[^)#\s]+)(?P<anchor>#[^)]*)?\)", re.DOTALL
)
# of the packages that the calculator runs
_PACKED = frozenset({".py", ".json", ".toml", ".xz"})
_NOT_PACKED = frozenset({"__pycache__", "simulated_gpu", "page", "figures", "bench", "measured"})
_EXAMPLE = "example.html"
_TEXT = frozenset({".py", ".toml", ".txt", ".sh"})
# pages of the repository with a place of their own
_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Files, *, config: Any) -> Files:
    """Add the reference, CONTRIBUTING.md, and every linked file outside of docs/."""
    os.chdir(reference.REPOSITORY)
    with tempfile.TemporaryDirectory() as folder:
        for uri, text in reference.json_pages(Path(folder)).items():
            _add(files, config, uri, text)
    _add(files, config, "reference/python.md", reference.python_page())
    # a recording's page, live behind the picture of the home page
    _add(files, config, _EXAMPLE, reference.example_page())
    config.copyright = f"ligerprof {reference.ligerprof.__version__}"
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        _add(files, config, _PAGES[name], _linked(_read(name), Path(name)))
    for page in [file for file in files.documentation_pages() if file.abs_src_path]:
        text = Path(page.abs_src_path).read_text(encoding="utf-8")
        for path in _outside(text, Path("docs") / page.src_uri):
            uri = _uri(path)
            if path.as_posix() not in _PAGES and files.get_file_from_path(uri) is None:
                if uri.endswith(".md"):
                    _add(files, config, uri, _source_page(path))
                else:
                    files.append(File.generated(config, uri, abs_src_path=str(path.resolve())))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Point links that leave docs/ at the site's copies, and add a command's options to its page."""
    uri = page.file.src_uri
    text = _linked(markdown, Path("docs") / uri) if page.file.generated_by is None else markdown
    name = reference.command_pages(_read("docs/index.md")).get(uri)
    return text if name is None else f"{text.rstrip()}\n\n{reference.options_of_command(name)}"


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Put the names of models and GPUs, and the colors of roles, into the calculator's page."""
    if page.file.src_uri == "index.md":
        return re.sub(r"(<img [^>]*page-peak[^>]*>)", rf'<a href="{_EXAMPLE}" title="Open this page">\1</a>', html)
    if page.file.src_uri != "calculator.md":
        return html
    for name, words in reference.calculator_names().items():
        options = "".join(f'<option value="{escape(word)}">' for word in words)
        html = html.replace(f'<datalist id="calculator-{name}">', f'<datalist id="calculator-{name}">{options}')
    return f"{html}<style>{reference.role_colors()}</style>"


def on_post_build(*, config: Any) -> None:
    """Pack what the calculator runs: ligerprof without what needs torch, click and PyYAML, all plain Python."""
    with zipfile.ZipFile(Path(config.site_dir) / "calculator" / "ligerprof.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        for package in ("ligerprof", "click", "yaml"):
            spec = find_spec(package)
            folder = Path(spec.origin).parent if spec and spec.origin else Path(package)
            for file in sorted(folder.rglob("*")):
                path = file.relative_to(folder.parent)
                if file.suffix in _PACKED and not _NOT_PACKED & set(path.parts):
                    packed.write(file, path.as_posix())


def _add(files: Files, config: Any, uri: str, text: str) -> None:
    files.append(File.generated(config, uri, content=text))


def _read(path: str) -> str:
    return (reference.REPOSITORY / path).read_text(encoding="utf-8")


def _outside(text: str, page: Path) -> list[Path]:
    """The files outside of docs/ that a page links to, relative to the repository."""
    targets = (match["target"] for match in _CODE_OR_LINK.finditer(text) if match["target"])
    paths = (Path(posixpath.normpath((page.parent / target).as_posix())) for target in targets)
    return [path for path in paths if path.parts[0] != "docs"]


def _uri(path: Path) -> str:
    """Where the site has a file of the repository."""
    if path.as_posix() in _PAGES:
        return _PAGES[path.as_posix()]
    if path.suffix == ".md":
        return f"source/{path.as_posix()}"
    return f"source/{path.as_posix()}.md" if path.suffix in _TEXT else f"source/{path.as_posix()}"


def _source_page(path: Path) -> str:
    text = _read(path.as_posix())
    if path.suffix == ".md":
        # its own links lead to files that the site does not have
        return re.sub(r"\[([^\]]+)\]\((?!https?:|#)[^)]+\)", r"\1", text)
    return f"# {path.name}\n\n`{path.as_posix()}`\n\n`````{path.suffix[1:]}\n{text}\n`````\n"


def _linked(text: str, page: Path) -> str:
    """Replace links to files outside of docs/ by links to the site's copies."""
    at = posixpath.dirname(page.relative_to("docs").as_posix() if page.parts[0] == "docs" else page.as_posix())

    def replaced(match: re.Match[str]) -> str:
        if not match["target"]:
            return match[0]
        path = Path(posixpath.normpath((page.parent / match["target"]).as_posix()))
        uri = path.relative_to("docs").as_posix() if path.parts[0] == "docs" else _uri(path)
        return f"]({posixpath.relpath(uri, at or '.')}{match['anchor'] or ''})"

    return _CODE_OR_LINK.sub(replaced, text)
