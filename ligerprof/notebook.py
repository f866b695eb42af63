"""`%%ligerprof`: record what a notebook's cell allocates on the GPU, and show its page below the cell."""

import html
import shlex
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from ligerprof.errors import RecipeError

_HEIGHT_PIXELS = 800
# the page is a document of its own: its styles and scripts stay in the frame
_FRAME = '<iframe sandbox="allow-scripts" style="width:100%;height:{height}px;border:0" srcdoc="{page}"></iframe>'


class RecordedCell:
    """The magic of one shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, line: str, cell: str) -> None:
        """Run a cell under `ligerprof.record`, then show its report and its page.

        Args:
            line: the folder for the recording; without it, a new one among the temporary files.
            cell: the code.

        Raises:
            LigerprofError: there is no GPU, or the folder holds a recording.
        """
        from ligerprof.runs.recording.record import record

        words = shlex.split(line)
        if len(words) > 1:
            raise RecipeError("%%ligerprof takes at most the folder for the recording. Quote a name with spaces.")
        directory = Path(words[0] if words else tempfile.mkdtemp(prefix="ligerprof-cell-"))
        ran = None
        try:
            with record(directory):
                ran = self._shell.run_cell(cell)
                # so that the recorder sees a failure for want of memory
                ran.raise_error()
        except Exception:
            # the shell has shown the cell's own exception
            if ran is None or ran.success:
                raise
        self._show(directory)

    def _show(self, directory: Path) -> None:
        from ligerprof.analyzers.explain.analysis import analyze
        from ligerprof.reports.page.peak import render_peak_page

        notebook: Any = import_module("IPython.display")
        analysis = analyze(directory)
        notebook.display(analysis.peak)
        page = html.escape(render_peak_page(analysis, source=directory.name), quote=True)
        notebook.display(notebook.HTML(_FRAME.format(height=_HEIGHT_PIXELS, page=page)))


def register(shell: Any) -> None:
    """Give a shell of IPython the magic `%%ligerprof`."""
    shell.register_magic_function(RecordedCell(shell), magic_kind="cell", magic_name="ligerprof")
